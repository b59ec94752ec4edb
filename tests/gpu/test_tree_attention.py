"""Tree attention and compaction on a GPU: every case, real shapes, graphs, determinism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
pytest.importorskip("triton", reason="no CUDA device: Triton is not installed")

from tree_attention_cases import CASES, Case, Inputs, make, poisoned_memory, worst  # noqa: E402

from specpilot_kernels.tree_attention import plan  # noqa: E402
from specpilot_kernels.tree_attention.attention import run_kernels, tree_attention  # noqa: E402
from specpilot_kernels.tree_attention.compact import (  # noqa: E402
    KvPools,
    compact_kv,
    compact_reference,
)
from specpilot_kernels.tree_attention.reference import tree_attention_reference  # noqa: E402

pytestmark = pytest.mark.gpu

MODELS = {
    "qwen3.8-27b": Case((8000,), 33, heads=24, kv_heads=4, head_dim=256),
    "llama-3.1-8b": Case((5000, 1), 33, heads=32, kv_heads=8, head_dim=128),
    "muse-glimmer window": Case((5000,), 33, heads=32, kv_heads=2, head_dim=128, window=2048),
    "gemma window": Case((3000, 700), 17, heads=16, kv_heads=8, head_dim=256, window=1024),
    "gemma full": Case((4000,), 33, heads=16, kv_heads=1, head_dim=512),
    "cap": Case((2000,), 65, heads=8, kv_heads=4, head_dim=256, logit_cap=50.0, gain=4.0),
    "65 rows of eight": Case((900, 0, 3000, 1, 64, 65, 2500, 7), 65, 24, 4, 256),
}
# Its score is so large a sum that float32 says nothing of its weights.
_WITHOUT_DIMENSION = {"huge logits"}


def on_gpu(inputs: Inputs, **options: Any) -> torch.Tensor:
    with poisoned_memory():
        return tree_attention(*inputs.tensors, **inputs.options, **options)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("head_dim", plan.HEAD_DIMS)
@pytest.mark.parametrize("name", CASES, ids=str)
def test_every_case(name: str, head_dim: int) -> None:
    case = CASES[name]
    if name not in _WITHOUT_DIMENSION:
        case = replace(case, gain=case.gain * (16 / head_dim) ** 0.5 if case.gain > 1 else 1.0)
    inputs = make(replace(case, head_dim=head_dim), torch.bfloat16)
    assert worst(on_gpu(inputs.to("cuda"), n_splits=case.splits), inputs) <= 1


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(dim, tile) for dim, _, tile in plan.tiles()], ids=str
)
def test_every_tile(head_dim: int, tile: plan.Tile) -> None:
    case = Case((1000, 0, 333), 70, heads=6, kv_heads=2, head_dim=head_dim, window=300)
    for windowed in (case, replace(case, window=None)):
        inputs = make(windowed, torch.float16)
        there = inputs.to("cuda")
        chosen = plan.Plan(tile, splits=5, least_blocks=2)
        with poisoned_memory():
            out = run_kernels(*there.tensors, **there.options, plan=chosen)
        assert worst(out, inputs) <= 1


@pytest.mark.parametrize("name", MODELS, ids=str)
def test_models(name: str) -> None:
    """Against the formula, on a GPU and in float64: their sequences are long for a loop."""
    inputs = make(MODELS[name], torch.bfloat16).to("cuda")
    expected = tree_attention_reference(*inputs.tensors, **inputs.options, dtype=torch.float64)
    q, k, v, *rest = inputs.tensors
    terms = tree_attention_reference(q, k, v.abs(), *rest, **inputs.options, dtype=torch.float64)
    out = on_gpu(inputs)
    assert out.isfinite().all()
    allowed = 2.0**-6 * terms.double() + 1e-30
    assert ((out.double() - expected.double()).abs() <= allowed).all()


def test_a_context_of_256_k() -> None:
    inputs = make(Case((262_144, 12), 33, heads=6, kv_heads=1, head_dim=256), torch.bfloat16)
    inputs = inputs.to("cuda")
    expected = tree_attention_reference(*inputs.tensors, **inputs.options)
    error = (on_gpu(inputs).float() - expected.float()).abs().max().item()
    assert error <= 2.0**-8 * max(1.0, expected.float().abs().max().item())


def test_equal_inputs_give_equal_bits() -> None:
    inputs = make(MODELS["65 rows of eight"], torch.bfloat16).to("cuda")
    first = bits(on_gpu(inputs))
    assert all(torch.equal(bits(on_gpu(inputs)), first) for _ in range(20))


def test_nothing_waits_for_the_gpu() -> None:
    inputs = make(CASES["ragged"], torch.bfloat16)
    inputs = replace(
        inputs, tensors=make(replace(inputs.case, head_dim=64), torch.bfloat16).tensors
    )
    there = inputs.to("cuda")
    tree_attention(*there.tensors, scale=0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree_attention(*there.tensors, scale=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_graph_serves_every_length_and_tree() -> None:
    shape = {"rows": 17, "heads": 8, "kv_heads": 2, "head_dim": 128}
    cases = [
        Case((700, 3, 90, 0), tree=("random", "chain", "star", "random"), **shape),
        Case((0, 0, 0, 793), tree="random", **shape),
        Case((200, 200, 200, 193), tree=("empty", "chain", "empty", "chain"), **shape),
    ]
    made = [make(case, torch.bfloat16, seed=n).to("cuda") for n, case in enumerate(cases)]
    static = tuple(tensor.clone() for tensor in made[0].tensors)
    tree_attention(*static, **made[0].options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*static, **made[0].options)
    for inputs in [*made, made[0]]:
        for target, source in zip(static, inputs.tensors, strict=True):
            target.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(out), bits(tree_attention(*inputs.tensors, **inputs.options)))


def test_operator_is_one_that_torch_may_compile() -> None:
    inputs = make(replace(CASES["strided"], head_dim=64), torch.bfloat16).to("cuda")
    torch.library.opcheck(
        torch.ops.specpilot.tree_attention.default, (*inputs.tensors, 0.25, None, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("length", [2, 5, 16, 17, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_compaction_is_indexing(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    batch, rows, layers = 9, 129, 5
    slots = torch.randperm(5000, generator=generator)[: batch * rows].view(batch, rows)
    path = torch.full((batch, length), -1, dtype=torch.int32)
    counts = torch.randint(0, length, (batch,), generator=generator, dtype=torch.int32)
    counts[0], counts[1] = length - 1, 0
    for request, count in enumerate(counts.tolist()):
        nodes = torch.randperm(rows - 1, generator=generator)[:count].sort().values + 1
        # The first request's rows each lie where the next one must go.
        path[request, : count + 1] = torch.cat([torch.zeros(1), nodes])
        if request == 0:
            path[request] = torch.tensor([0, *range(2, length + 1)])
    pools = [
        torch.randint(0, 255, (5000, 2, 1024), generator=generator, dtype=torch.uint8)
        .view(dtype).cuda()
        for _ in range(2 * layers)
    ]  # fmt: skip
    tables = (slots.cuda(), path.cuda(), counts.cuda())
    expected = [pool.clone() for pool in pools]
    compact_reference(expected, *tables)
    described = KvPools.of(pools)
    before = [pool.clone() for pool in pools]
    for _ in range(20):
        for pool, old in zip(pools, before, strict=True):
            pool.copy_(old)
        compact_kv(described, *tables)
        for pool, wanted in zip(pools, expected, strict=True):
            assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
