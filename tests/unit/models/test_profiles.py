"""Bundled model profiles against what is stated elsewhere, and the work of a step by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.models.registry import bundled_model, load_model, model_names
from specpilot_cli.models.shapes import (
    OUTPUT_ENDINGS,
    context_projections,
    draft_extras,
    head,
    projections,
)
from specpilot_cli.models.work import StepShape, kv_bytes, state_bytes, step_work
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_kernels.w12.shapes import MODELS

REPO = Path(__file__).resolve().parents[3]
GB = 1e9


@pytest.mark.parametrize("title", MODELS)
def test_shapes_that_kernels_are_tuned_for_are_those_of_the_profiles(title: str) -> None:
    profile = load_model(title)
    found = {
        item.name: (item.out_features, item.in_features)
        for item in (*projections(profile), head(profile))
    }
    # 96 rows: no kernel of ours runs the gates, which stay in BF16.
    found.pop("gdn_gates", None)
    assert found == MODELS[title]


@pytest.mark.parametrize(
    ("folder", "name"), [("target", "demo-target"), ("drafter", "demo-drafter")]
)
def test_demo_pair_has_the_shape_that_its_files_state(folder: str, name: str) -> None:
    read, written = load_model(str(REPO / "recipes" / "demo-cpu" / folder)), load_model(name)
    for part in (projections, context_projections, draft_extras):
        assert part(read) == part(written)
    assert read.tied_head.value == written.tied_head.value
    assert state_bytes(read) == state_bytes(written)


@pytest.mark.parametrize("name", model_names())
def test_stated_totals_follow_from_the_shape(name: str) -> None:
    profile = bundled_model(name)
    if profile.streamed is None:
        return
    weights = sum(item.weights for item in (*projections(profile), head(profile)))
    total = profile.weight_bytes.value * weights / GB
    assert round(total, profile.streamed.digits) == profile.streamed.gigabytes


@pytest.mark.parametrize(
    ("name", "linears", "head_gb", "layers"),
    [
        ("qwen3.8-27b", 48.70, 2.543, 64),
        ("qwen3.5-4b", 7.14, 1.271, 32),
        ("muse-glimmer-30b", 50.33, 2.690, 52),
        ("gemma-4-12b", 21.80, 2.013, 48),
        ("llama-3.1-8b", 13.96, 1.051, 32),
    ],
)
def test_sizes(name: str, linears: float, head_gb: float, layers: int) -> None:
    profile = load_model(name)
    assert 2 * sum(p.weights for p in projections(profile)) / GB == pytest.approx(linears, abs=5e-3)
    assert 2 * head(profile).weights / GB == pytest.approx(head_gb, abs=5e-4)
    assert profile.n_layers == layers


def test_states_and_caches_of_the_hybrid() -> None:
    """48 layers of 48 heads of 128 x 128 floats, and 16 layers of 4 KV heads of 256."""
    profile = load_model("qwen3.8-27b")
    window = 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2
    assert state_bytes(profile) - window == 48 * 48 * 128 * 128 * 4
    assert kv_bytes(profile, 1) == 64 * 1024


def test_a_window_caps_the_cache() -> None:
    gemma = load_model("gemma-4-12b")
    per_token = 8 * 2 * 512 * 2
    assert kv_bytes(gemma, 5000) == per_token * 5000 + 40 * 2 * 8 * 256 * 2 * 1024
    assert kv_bytes(gemma, 500) == per_token * 500 + 40 * 2 * 8 * 256 * 2 * 500


def test_work_of_plain_decoding_by_hand() -> None:
    profile = load_model("llama-3.1-8b")
    work = step_work(profile, None, StepShape(requests=3, rows=1, context=1000))
    weights = sum(item.weights for item in projections(profile))
    assert work["target_gemm"].bytes == 2 * weights
    assert work["target_gemm"].flops == 2 * 3 * weights
    token = 32 * 2 * 8 * 128 * 2
    assert work["attention"].bytes == 3 * token * (1000 + 1 + 1)
    assert work["attention"].flops == 3 * 32 * 4 * 1 * 1001 * 32 * 128
    assert "recurrent" not in work
    assert "drafter" not in work


def test_verifying_reads_the_state_once_more_than_decoding() -> None:
    profile = load_model("qwen3.8-27b")
    plain = step_work(profile, None, StepShape())["recurrent"]
    verify = step_work(profile, None, StepShape(rows=8, committed=4, block=8))["recurrent"]
    assert plain.bytes == 2 * state_bytes(profile)
    assert verify.bytes == 3 * state_bytes(profile)
    assert verify.flops > plain.flops


def test_a_draft_reads_its_layers_and_the_borrowed_head() -> None:
    """1.797e9 streamed weights of the published drafter, without the tables that are gathered."""
    target, drafter = load_model("qwen3.8-27b"), load_model("qwen3.8-27b-dflash2")
    own = (*projections(drafter), *draft_extras(drafter), context_projections(drafter)[0])
    assert sum(item.weights for item in own) / GB == pytest.approx(1.797, abs=5e-4)
    work = step_work(target, drafter, StepShape(rows=8, committed=4, block=8))["drafter"]
    update_kv = context_projections(drafter)[1].weights
    streamed = 2 * (sum(i.weights for i in own) + update_kv + head(target).weights)
    assert streamed <= work.bytes <= 1.001 * streamed


def test_output_projections_are_told_by_their_ending() -> None:
    for name in model_names():
        profile = load_model(name)
        outputs = [p for p in projections(profile) if p.name.endswith(OUTPUT_ENDINGS)]
        assert sum(p.count for p in outputs) == profile.n_layers
        assert all(p.out_features == profile.hidden.value for p in outputs)


def test_unknown_names_show_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        load_model("qwen3.8-28b")
    assert caught.value.hint is not None
    assert "did you mean `qwen3.8-27b`?" in caught.value.hint
    assert "llama-3.1-8b" in caught.value.hint


def test_every_number_names_a_source_and_every_source_is_named() -> None:
    data = bundled_model("llama-3.1-8b").model_dump()
    with pytest.raises(ValidationError, match="no such source: guess"):
        ModelProfile.model_validate(data | {"hidden": {**data["hidden"], "source": "guess"}})
    more = {"sources": {**data["sources"], "other": "a book"}}
    with pytest.raises(ValidationError, match="no number names: other"):
        ModelProfile.model_validate(data | more)
