"""Shapes of model configurations: what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.sglang.model_shape import read_shape
from specpilot_cli.errors import InputError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def test_llama_8b_has_its_known_size() -> None:
    shape = read_shape(LLAMA, "x")
    assert shape.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert (shape.gdn_layers, shape.draft_tokens) == (0, None)


def test_tied_embeddings_are_counted_once() -> None:
    tied = read_shape({**LLAMA, "tie_word_embeddings": True}, "x")
    assert read_shape(LLAMA, "x").weight_bytes - tied.weight_bytes == 128256 * 4096 * 2


def test_text_part_of_a_larger_model_is_read() -> None:
    assert read_shape({"model_type": "qwen3_5", "text_config": LLAMA}, "x") == read_shape(
        LLAMA, "x"
    )


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_the_demo_models_are_as_large_as_their_files(repo: Path, model: str) -> None:
    folder = repo / "recipes/demo-cpu" / model
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = (folder / "model.safetensors").stat().st_size
    # small parts (gates, convolutions, headers) weigh more in models this small
    assert read_shape(config, model).weight_bytes == pytest.approx(stored, rel=0.11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "unknown kind of model: model_type `deepseek_v3`"),
        ({"kv_lora_rank": 512}, "unknown kind of model: `kv_lora_rank`"),
        ({"num_experts": 8}, "unknown kind of model: `num_experts`"),
        ({"hidden_size": None}, "`hidden_size` should be a positive whole number"),
        ({"num_hidden_layers": 32.0}, "`num_hidden_layers` should be"),
        ({"layer_types": ["full_attention"]}, "does not name every layer"),
        ({"layer_types": ["mamba"] * 32}, "unknown kind of layer: `mamba`"),
        ({"layer_types": ["linear_attention"] * 32}, "`linear_num_key_heads` should be"),
    ],
)
def test_what_is_not_known_is_no_guess(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_shape({**LLAMA, **change}, "some/config.json")
    assert error.value.where == "some/config.json"


def test_first_difference_names_the_field() -> None:
    shape = read_shape(LLAMA, "x")
    other = read_shape({**LLAMA, "num_key_value_heads": 4}, "x")
    assert shape.first_difference(shape) is None
    assert shape.first_difference(other) == "kv_bytes_per_token: 131072, 65536"
