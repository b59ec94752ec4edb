"""Shapes of the two models the reference engine runs, read from Hugging Face `config.json` files.

The target is the text part of the Qwen3.5 family: Gated DeltaNet (GDN) layers with gated softmax
attention in between. The drafter is DFlash2: a block-parallel drafter with a candidate selector.
Keys and defaults follow the public checkpoints, so transformers and SGLang load the same folders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Shape of a Qwen3.5-like hybrid target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_id: int
    max_positions: int
    # gated attention
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # Gated DeltaNet
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def n_layers(self) -> int:
        return len(self.layer_types)

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @classmethod
    def from_folder(cls, folder: Path) -> TargetConfig:
        """Read `config.json` of a target folder; unknown architectures are refused by name."""
        path, raw = _read_config(folder)
        text = raw.get("text_config", raw)
        if text.get("model_type") not in {"qwen3_5_text", "qwen3_5"}:
            raise InputError(
                f"unsupported target architecture: {text.get('model_type')}",
                where=f"{path}: model_type",
                hint="the reference engine runs qwen3_5 text models only",
            )
        get = _Getter(path, text)
        rope = text.get("rope_parameters") or {}
        partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        head_dim = get.integer("head_dim")
        config = cls(
            vocab_size=get.integer("vocab_size"),
            hidden_size=get.integer("hidden_size"),
            intermediate_size=get.integer("intermediate_size"),
            layer_types=_layer_types(get),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(
                raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            eos_token_id=get.integer("eos_token_id"),
            max_positions=get.integer("max_position_embeddings"),
            n_heads=get.integer("num_attention_heads"),
            n_kv_heads=get.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
            n_key_heads=get.integer("linear_num_key_heads"),
            n_value_heads=get.integer("linear_num_value_heads"),
            key_dim=get.integer("linear_key_head_dim"),
            value_dim=get.integer("linear_value_head_dim"),
            conv_width=get.integer("linear_conv_kernel_dim"),
        )
        if config.n_value_heads % config.n_key_heads or config.n_heads % config.n_kv_heads:
            raise InputError("value (query) heads must be a multiple of key heads", where=str(path))
        return config


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a DFlash2 drafter. `block_size` B drafts B - 1 positions after the anchor."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    selector_rank: int
    top_k: int
    conv_group_size: int
    conv_taps: int

    @classmethod
    def from_folder(cls, folder: Path) -> DrafterConfig:
        """Read `config.json` of a DFlash2 drafter folder."""
        path, raw = _read_config(folder)
        if raw.get("architectures") != ["DFlash2DraftModel"]:
            raise InputError(
                f"unsupported drafter architecture: {raw.get('architectures')}",
                where=f"{path}: architectures",
                hint='the reference engine drafts with ["DFlash2DraftModel"] only',
            )
        get, flash = _Getter(path, raw), _Getter(path, raw.get("dflash_config", {}))
        return cls(
            vocab_size=get.integer("vocab_size"),
            hidden_size=get.integer("hidden_size"),
            intermediate_size=get.integer("intermediate_size"),
            n_layers=get.integer("num_hidden_layers"),
            n_heads=get.integer("num_attention_heads"),
            n_kv_heads=get.integer("num_key_value_heads"),
            head_dim=get.integer("head_dim"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(raw.get("rope_theta", 1e4)),
            block_size=flash.integer("block_size"),
            mask_token_id=flash.integer("mask_token_id"),
            target_layer_ids=tuple(flash.integers("target_layer_ids")),
            selector_rank=flash.integer("selector_rank"),
            top_k=flash.integer("selector_top_k"),
            conv_group_size=flash.integer("conv_group_size"),
            conv_taps=flash.integer("conv_kernel_size"),
        )


def check_pair(target: TargetConfig, drafter: DrafterConfig, drafter_folder: Path) -> None:
    """Raise `InputError` unless the drafter was made for a target of this shape."""
    where = str(drafter_folder / CONFIG_NAME)
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(drafter, name), getattr(target, name)
        if ours != theirs:
            raise InputError(
                f"{name} of drafter and target differ: {ours} and {theirs}",
                where=where,
                hint="drafter and target must be a pair",
            )
    outside = [layer for layer in drafter.target_layer_ids if not 0 <= layer < target.n_layers]
    if outside:
        raise InputError(
            f"the drafter reads target layer {outside[0]}, the target has {target.n_layers} layers",
            where=where,
            hint="drafter and target must be a pair",
        )


def _read_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(
            "not a model folder", where=str(path), hint="a Hugging Face folder holds config.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not valid JSON: {error}", where=str(path)) from error
    if not isinstance(raw, dict):
        raise InputError("expected a JSON object", where=str(path))
    return path, raw


def _layer_types(get: _Getter) -> tuple[str, ...]:
    kinds = get.raw.get("layer_types")
    if kinds is None:
        interval = get.integer("full_attention_interval")
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(get.integer("num_hidden_layers"))
        )
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown:
        where = f"{get.path}: layer_types"
        raise InputError(f"unknown layer types: {sorted(unknown)}", where=where)
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class _Getter:
    """Typed access to one JSON object; a missing or mistyped key is named with its file."""

    path: Path
    raw: dict[str, Any]

    def integer(self, key: str) -> int:
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"expected a whole number, got {value!r}", where=f"{self.path}: {key}")
        return value

    def integers(self, key: str) -> list[int]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value) or not value:
            raise InputError(
                f"expected a list of whole numbers, got {value!r}", where=f"{self.path}: {key}"
            )
        return value
