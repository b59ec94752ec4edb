"""Tiny models of several kinds, as BF16 folders and as W12 folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specpilot_kernels.integrations.transformers  # noqa: F401  (registers W12)
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.w12_folder import W12Folder
from tests.unit.convert_w12.conftest import convert

SHARED = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LINEAR = {
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

# name: (model type, configuration, a tensor name that must be converted)
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "biased": (
        "llama",
        {"intermediate_size": 256, "attention_bias": True, "tie_word_embeddings": False},
        "lm_head.weight",
    ),
    "tied": (
        "qwen3",
        {"intermediate_size": 200, "tie_word_embeddings": True},
        "model.layers.1.mlp.down_proj.weight",
    ),
    "experts-apart": (
        "qwen3_moe",
        {"intermediate_size": 256, **EXPERTS},
        "model.layers.0.mlp.experts.3.up_proj.weight",
    ),
    "experts-renamed": (
        "mixtral",
        {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    ),
    "experts-stacked": (
        "qwen3_5_moe_text",
        {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 128},
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
    "hybrid": (
        "qwen3_5_text",
        {"intermediate_size": 256, **LINEAR},
        "model.layers.0.linear_attn.in_proj_qkv.weight",
    ),
}

Folders = tuple[Path, Path]
MakeFolders = Callable[..., Folders]


def build(kind: str) -> Any:
    """A model of `KINDS` with random weights, norms and biases too, in BF16."""
    model_type, settings, _ = KINDS[kind]
    torch.manual_seed(len(kind))
    config = AutoConfig.for_model(model_type, **{**SHARED, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> MakeFolders:
    """`folders(kind, exclude=, shard_size=)` → (BF16 folder, W12 folder), made once each."""
    made: dict[tuple[Any, ...], Folders] = {}

    def make(
        kind: str, *, exclude: tuple[str, ...] = (), shard_size: str = "50GB"
    ) -> tuple[Path, Path]:
        key = (kind, exclude, shard_size)
        if key not in made:
            root = tmp_path_factory.mktemp(kind)
            # As published, stacks of experts are one tensor; transformers would save them apart.
            apart = kind != "experts-stacked"
            build(kind).save_pretrained(
                root / "bf16", max_shard_size=shard_size, save_original_format=apart
            )
            convert(root / "bf16", root / "w12", exclude=exclude)
            made[key] = root / "bf16", root / "w12"
        return made[key]

    return make


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder, as anyone loads it."""
    return AutoModelForCausalLM.from_pretrained(str(folder), **options)


def converted(folder: Path) -> set[str]:
    """Names of the tensors that a W12 folder holds as records."""
    with W12Folder(folder) as opened:
        return {t.name for t in opened.manifest.tensors if t.encoding == "w12"}


def bits(model: Any) -> dict[str, torch.Tensor]:
    """State dict as raw bytes: comparing floats would miss the sign of zero."""
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8)
        for name, tensor in model.state_dict().items()
    }


def shard_names(folder: Path) -> list[str]:
    """Safetensors files of a folder."""
    return sorted({shard for shard, _ in open_hf_folder(folder).tensors})
