"""What a model profile means for memory: sizes that are known, and models told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.sglang.model_shape import ModelShape, shape_of
from specpilot_cli.models.hf_config import profile_of_config, read_hf_config
from specpilot_cli.models.registry import bundled_model, model_names

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def _shape(**change: Any) -> ModelShape:
    return shape_of(profile_of_config({**LLAMA, **change}, name="llama", where="x"))


def test_llama_8b_has_its_known_size() -> None:
    shape = _shape()
    assert shape.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert (shape.gdn_state_bytes, shape.draft_tokens) == (0, None)


def test_tied_embeddings_are_counted_once() -> None:
    assert _shape().weight_bytes - _shape(tie_word_embeddings=True).weight_bytes == (
        128256 * 4096 * 2
    )


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_the_demo_models_are_as_large_as_their_files(repo: Path, model: str) -> None:
    folder = repo / "recipes/demo-cpu" / model
    stored = (folder / "model.safetensors").stat().st_size
    # small parts (norms of heads, headers) weigh more in models this small
    assert shape_of(read_hf_config(folder / "config.json")).weight_bytes == pytest.approx(
        stored, rel=0.08
    )


@pytest.mark.parametrize("name", model_names())
def test_every_bundled_model_can_be_planned(name: str) -> None:
    model = bundled_model(name)
    shape = shape_of(model)
    if model.streamed is not None:
        assert shape.linear_bytes <= 1.001 * model.streamed.gigabytes * 1e9
        assert shape.weight_bytes > 0.99 * model.streamed.gigabytes * 1e9
    assert shape.kv_bytes_per_token > 0
    assert (shape.gdn_state_bytes > 0) is model.is_hybrid
    assert (shape.draft_tokens is None) is (model.drafter is None)


def test_experts_are_held_and_stay_as_they_are() -> None:
    experts = _shape(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2,
                     moe_intermediate_size=1024)  # fmt: skip
    assert {matrix.name for matrix in experts.matrices} == {"attn_qkv", "attn_o", "head"}
    assert experts.other_bytes > 32 * 8 * 3 * 1024 * 4096 * 2


def test_first_difference_says_what() -> None:
    shape = _shape()
    assert shape.first_difference(_shape()) is None
    assert shape.first_difference(_shape(num_key_value_heads=4)) == (
        "attn_qkv: 32 of [6144, 4096], 32 of [5120, 4096]"
    )
    assert shape.first_difference(_shape(tie_word_embeddings=True)) == (
        "head: 1 of [128256, 4096], none"
    )
