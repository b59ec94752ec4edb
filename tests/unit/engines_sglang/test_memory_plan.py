"""The memory plan against figures worked out by hand for Qwen3.8-27B on an H200."""

from __future__ import annotations

from typing import Any

import pytest

from specpilot_cli.engines.sglang.memory_plan import (
    CONTEXT_BYTES,
    Device,
    MemoryPlan,
    ServedModel,
    encoded_bytes,
    plan_memory,
)
from specpilot_cli.engines.sglang.model_shape import Matrix, ModelShape, shape_of
from specpilot_cli.errors import InputError
from specpilot_cli.models.registry import bundled_model
from specpilot_cli.schema.plugin_config import TreePlugin, W12Plugin

MIB, GIB = 2**20, 2**30
H200 = Device("h200", 141_000_000_000, "data sheet")
RADIX_OFF = {"disable-radix-cache": True, "max-running-requests": 8, "mem-fraction-static": 0.85}
DRAFTED = {**RADIX_OFF, "speculative-algorithm": "DFLASH", "speculative-num-draft-tokens": 8}
STATE = 48 * 48 * 128 * 128 * 4  # layers, value heads, 128 x 128 floats
CONV = 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2  # three kept inputs of every channel, BF16


@pytest.fixture(scope="module")
def target() -> ModelShape:
    """Qwen3.8-27B."""
    return shape_of(bundled_model("qwen3.8-27b"))


@pytest.fixture(scope="module")
def drafter() -> ModelShape:
    """Its DFlash2 drafter."""
    return shape_of(bundled_model("qwen3.8-27b-dflash2"))


def _plan(model: ServedModel, arguments: dict[str, Any], **more: Any) -> MemoryPlan:
    wanted = {"tensor_parallel": 1, "requests": 1, "context": 32768} | more
    device = wanted.pop("device", H200)
    return plan_memory(model, arguments, device, **wanted)


def _size(plan: MemoryPlan, name: str) -> int:
    return next(part.n_bytes for part in (*plan.parts, *plan.outside) if part.name == name)


def test_shape_of_the_27b(target: ModelShape, drafter: ModelShape) -> None:
    # 48.70 GB of linears, 2.543 GB head, an embedding of the same size; all but norms
    ba = 48 * 2 * 48 * 5120 * 2
    assert target.linear_bytes + ba == pytest.approx(51.24e9, rel=1e-3)
    assert target.matrices[-1].n_bytes == 248320 * 5120 * 2
    assert target.weight_bytes == pytest.approx(53.79e9, rel=1e-3)
    assert target.kv_bytes_per_token == 16 * 2 * 4 * 256 * 2 == 65536
    assert target.gdn_state_bytes == STATE == 144 * MIB
    assert target.gdn_conv_bytes == CONV
    assert drafter.kv_bytes_per_token == 5 * 2 * 8 * 128 * 2
    assert drafter.draft_tokens == 8


def test_plain_decoding(target: ModelShape) -> None:
    plan = _plan(ServedModel(target, None), RADIX_OFF)
    assert plan.problems == ()
    assert plan.free_bytes == H200.memory_bytes - CONTEXT_BYTES
    assert plan.static_bytes == int(plan.free_bytes * 0.85)
    assert _size(plan, "target weights") == target.weight_bytes == plan.load_peak_bytes
    assert _size(plan, "GDN states") == 9 * (STATE + CONV)
    left = plan.static_bytes - target.weight_bytes - 9 * (STATE + CONV)
    assert plan.kv_tokens == left // 65536
    assert not [part for part in plan.parts if part.name == "GDN snapshots"]


def test_drafting_costs_a_state_for_every_node_of_every_request(
    target: ModelShape, drafter: ModelShape
) -> None:
    plain = _plan(ServedModel(target, None), RADIX_OFF)
    plan = _plan(ServedModel(target, drafter), DRAFTED)
    assert _size(plan, "GDN snapshots") == 8 * 9 * (STATE + CONV)
    assert plan.kv_bytes_per_token == 65536 + 20480
    assert _size(plan, "drafter weights") == drafter.weight_bytes
    assert plan.kv_tokens < plain.kv_tokens * 0.7
    wider = _plan(ServedModel(target, drafter), {**DRAFTED, "speculative-num-draft-tokens": 16})
    assert _size(wider, "GDN snapshots") == 2 * _size(plan, "GDN snapshots")


def test_a_tree_keeps_records_instead_of_a_state_for_every_row(
    target: ModelShape, drafter: ModelShape
) -> None:
    """33 rows fit the memory of one state, where stock keeps one for each row of its chain."""
    tree = ServedModel(target, drafter, tree=TreePlugin(block=16, nodes=32))
    plan = _plan(tree, DRAFTED)
    assert _size(plan, "GDN replay records") == 9 * (STATE + CONV)
    chain = _plan(ServedModel(target, drafter), DRAFTED)
    assert _size(chain, "GDN snapshots") == 8 * 9 * (STATE + CONV)
    assert plan.kv_tokens > chain.kv_tokens
    wide = ServedModel(target, drafter, tree=TreePlugin(block=16, nodes=64))
    assert _size(_plan(wide, DRAFTED), "GDN replay records") == 2 * 9 * (STATE + CONV)


def test_w12_gives_a_quarter_of_the_linear_weights_to_the_cache(target: ModelShape) -> None:
    stock = _plan(ServedModel(target, None), RADIX_OFF)
    tuned = _plan(ServedModel(target, None, W12Plugin()), RADIX_OFF)
    freed = _size(stock, "target weights") - _size(tuned, "target weights")
    assert freed / target.linear_bytes == pytest.approx(0.25, abs=0.005)
    assert tuned.kv_tokens - stock.kv_tokens == pytest.approx(freed / 65536, rel=1e-3)
    # encoding happens on the GPU, beside the BF16 model
    assert tuned.load_peak_bytes > target.weight_bytes
    stored = _plan(ServedModel(target, None, W12Plugin(), w12_checkpoint=True), RADIX_OFF)
    assert stored.load_peak_bytes < target.weight_bytes
    without_head = _plan(ServedModel(target, None, W12Plugin(lm_head=False)), RADIX_OFF)
    head = _size(without_head, "target weights") - _size(tuned, "target weights")
    assert head == pytest.approx(248320 * 5120 * 2 / 4, rel=0.02)


def test_the_drafter_stays_bf16_unless_asked(target: ModelShape, drafter: ModelShape) -> None:
    kept = _plan(ServedModel(target, drafter, W12Plugin()), DRAFTED)
    asked = _plan(ServedModel(target, drafter, W12Plugin(drafter=True)), DRAFTED)
    assert _size(kept, "drafter weights") == drafter.weight_bytes
    assert _size(asked, "drafter weights") < 0.8 * drafter.weight_bytes


def test_encoded_bytes_of_padded_and_whole_matrices() -> None:
    whole = Matrix("a", 256, 128, 3)
    records, per_row, escapes = 2 * 2 * 12288, 256 * 5, int(256 * 128 * 1e-3) * 6
    assert encoded_bytes([whole]) == 3 * (records + per_row + escapes)
    odd = Matrix("b", 129, 65, 1)
    assert encoded_bytes([odd]) == 2 * 2 * 12288 + 129 * 5 + int(129 * 65 * 1e-3) * 6


def test_tensor_parallel_divides_what_is_sharded(target: ModelShape, drafter: ModelShape) -> None:
    one = _plan(ServedModel(target, drafter), DRAFTED)
    two = _plan(ServedModel(target, drafter), DRAFTED, tensor_parallel=2)
    for name in ("target weights", "GDN states", "GDN snapshots"):
        assert _size(two, name) == pytest.approx(_size(one, name) / 2, rel=1e-3)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2


@pytest.mark.parametrize(
    ("device_gb", "arguments", "more", "problem"),
    [
        (50, RADIX_OFF, {}, "loading takes"),
        (62, RADIX_OFF, {}, "weights and states take"),
        (66, {**RADIX_OFF, "mem-fraction-static": 0.86}, {"context": 262144},
         "the KV cache holds"),
        (141, {**RADIX_OFF, "max-total-tokens": 1000}, {}, "holds 1000 tokens, 32768 are needed"),
        (141, RADIX_OFF, {"requests": 9, "context": 1024}, "state slots for 8 requests, not 9"),
        (141, RADIX_OFF, {"taken_bytes": 100_000_000_000}, "loading takes"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_said(
    target: ModelShape, device_gb: int, arguments: dict[str, Any], more: dict[str, Any],
    problem: str,
) -> None:  # fmt: skip
    device = Device("small", device_gb * 10**9, "test")
    plan = _plan(ServedModel(target, None), arguments, device=device, **more)
    assert problem in plan.problems[0]


def test_states_of_a_shared_prefix_cache_come_out_of_the_pool(target: ModelShape) -> None:
    plan = _plan(ServedModel(target, None), {"mem-fraction-static": 0.85})
    states, kv = _size(plan, "GDN states"), _size(plan, "KV cache")
    # SGLang's default: recurrent states get 0.9 of what the KV cache gets
    assert states / kv == pytest.approx(0.9, rel=0.02)
    fixed = _plan(ServedModel(target, None), {"max-mamba-cache-size": 30})
    assert _size(fixed, "GDN states") == 31 * (STATE + CONV)


def test_default_share_follows_sglangs_reserve(target: ModelShape) -> None:
    plan = _plan(ServedModel(target, None), {"max-running-requests": 8})
    # 512 MiB, 1.5 MiB for each of 8192 tokens, 8 graphs, prefill graphs, 128 MiB of parallel slack
    reserve = 512 + 8192 * 1.5 + 8 * 2 + 400 + 128
    assert plan.static_fraction == round(1 - reserve * MIB / H200.memory_bytes, 3)


def test_a_share_that_leaves_no_room_beside_it_is_noted(target: ModelShape) -> None:
    plan = _plan(ServedModel(target, None), {**RADIX_OFF, "mem-fraction-static": 0.99})
    assert plan.problems == ()
    assert "mem-fraction-static leaves" in plan.warnings[0]
    assert _plan(ServedModel(target, None), RADIX_OFF).warnings == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max-total-tokens", "many"), ("max-running-requests", 0), ("mem-fraction-static", 1.5),
     ("mem-fraction-static", True), ("chunked-prefill-size", 1.5)],
)  # fmt: skip
def test_arguments_that_are_no_numbers(target: ModelShape, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"`{name}` should"):
        _plan(ServedModel(target, None), {**RADIX_OFF, name: value})


def test_a_cache_in_eight_bits_holds_twice_the_target_and_the_same_drafter(
    target: ModelShape, drafter: ModelShape
) -> None:
    eight = {**DRAFTED, "kv-cache-dtype": "fp8_e4m3"}
    plan = _plan(ServedModel(target, drafter), eight)
    assert plan.kv_bytes_per_token == 65536 // 2 + 20480
