"""Shapes of the two models the reference engine runs, read from Hugging Face `config.json` files.

The target is the text part of the Qwen3.5 family: Gated DeltaNet (GDN) layers with gated softmax
attention in between. The drafter is DFlash2: a block-parallel drafter with a candidate selector.
Keys and defaults follow the public checkpoints, so transformers and SGLang load the same folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json

_OWN = "is this config.json the checkpoint's own, unedited?"

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
        text = _Getter(path, raw).section("text_config") or raw
        if text.get("model_type") not in ("qwen3_5_text", "qwen3_5"):
            raise InputError(
                f"unsupported target architecture: {text.get('model_type')}",
                where=f"{path}: model_type",
                hint="the reference engine runs qwen3_5 text models only",
            )
        get = _Getter(path, text)
        # newer files keep rotary settings in a section, older ones beside the rest
        rope = _Getter(path, text | get.section("rope_parameters"))
        partial = rope.real("partial_rotary_factor", 0.25)
        head_dim = get.integer("head_dim")
        config = cls(
            vocab_size=get.integer("vocab_size"),
            hidden_size=get.integer("hidden_size"),
            intermediate_size=get.integer("intermediate_size"),
            layer_types=_layer_types(get),
            rms_norm_eps=get.real("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(
                raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            eos_token_id=get.integer("eos_token_id", low=0),
            max_positions=get.integer("max_position_embeddings"),
            n_heads=get.integer("num_attention_heads"),
            n_kv_heads=get.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            rope_theta=rope.real("rope_theta", 1e7),
            n_key_heads=get.integer("linear_num_key_heads"),
            n_value_heads=get.integer("linear_num_value_heads"),
            key_dim=get.integer("linear_key_head_dim"),
            value_dim=get.integer("linear_value_head_dim"),
            conv_width=get.integer("linear_conv_kernel_dim"),
        )
        if config.n_value_heads % config.n_key_heads or config.n_heads % config.n_kv_heads:
            raise InputError(
                "value (query) heads must be a multiple of key heads", where=str(path), hint=_OWN
            )
        if config.rotary_dim % 2 or not 0 < config.rotary_dim <= head_dim:
            raise InputError(
                f"partial_rotary_factor {partial} gives {config.rotary_dim} of {head_dim} channels",
                where=str(path),
                hint="an even number of channels is rotated, at most all of them",
            )
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
        get = _Getter(path, raw)
        flash = _Getter(path, get.section("dflash_config"))
        config = cls(
            vocab_size=get.integer("vocab_size"),
            hidden_size=get.integer("hidden_size"),
            intermediate_size=get.integer("intermediate_size"),
            n_layers=get.integer("num_hidden_layers", high=_MAX_LAYERS),
            n_heads=get.integer("num_attention_heads"),
            n_kv_heads=get.integer("num_key_value_heads"),
            head_dim=get.integer("head_dim"),
            rms_norm_eps=get.real("rms_norm_eps", 1e-6),
            rope_theta=get.real("rope_theta", 1e4),
            block_size=flash.integer("block_size"),
            mask_token_id=flash.integer("mask_token_id", low=0),
            target_layer_ids=tuple(flash.integers("target_layer_ids")),
            selector_rank=flash.integer("selector_rank"),
            top_k=flash.integer("selector_top_k"),
            conv_group_size=flash.integer("conv_group_size"),
            conv_taps=flash.integer("conv_kernel_size"),
        )
        problem = _drafter_problem(config)
        if problem is not None:
            raise InputError(problem, where=str(path), hint=_OWN)
        return config


def _drafter_problem(c: DrafterConfig) -> str | None:
    if c.n_heads % c.n_kv_heads:
        return f"{c.n_heads} query heads are no multiple of {c.n_kv_heads} key heads"
    if c.hidden_size % c.conv_group_size:
        return f"conv_group_size {c.conv_group_size} does not divide hidden_size {c.hidden_size}"
    if max(c.mask_token_id + 1, c.top_k) > c.vocab_size:
        return "mask_token_id and selector_top_k must fit the vocabulary"
    if c.head_dim % 2:
        return f"head_dim {c.head_dim} is odd: rotary embedding turns pairs of channels"
    return None


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
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise InputError("expected a JSON object", where=str(path), hint=_OWN)
    return path, raw


def _layer_types(get: _Getter) -> tuple[str, ...]:
    kinds = get.raw.get("layer_types")
    if kinds is None:
        interval = get.integer("full_attention_interval")
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(get.integer("num_hidden_layers", high=_MAX_LAYERS))
        )
    where = f"{get.path}: layer_types"
    named = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if not named or not 1 <= len(kinds) <= _MAX_LAYERS:
        raise InputError(f"expected a list of names, got {_shown(kinds)}", where=where, hint=_OWN)
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown:
        raise InputError(f"unknown layer types: {sorted(unknown)}", where=where, hint=_OWN)
    return tuple(kinds)


# Larger than any published model; a slip in a file should not take all memory.
_MAX_SIZE, _MAX_LAYERS = 2**24, 4096


@dataclass(frozen=True, slots=True)
class _Getter:
    """Typed access to one JSON object; a missing or mistyped key is named with its file."""

    path: Path
    raw: dict[str, Any]

    def integer(self, key: str, *, low: int = 1, high: int = _MAX_SIZE) -> int:
        """A whole number from `low` to `high`."""
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InputError(
                f"expected a whole number from {low} to {high}, got {_shown(value)}",
                where=f"{self.path}: {key}",
                hint=_OWN,
            )
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers, at least one."""
        value = self.raw.get(key)
        whole = (
            isinstance(value, list)
            and value
            and all(
                isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _MAX_SIZE
                for v in value
            )
        )
        if not whole:
            raise InputError(
                f"expected a list of whole numbers, got {_shown(value)}",
                where=f"{self.path}: {key}",
                hint=_OWN,
            )
        return list(value or [])

    def real(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.raw.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < 1e12:
            raise InputError(
                f"expected a positive number, got {_shown(value)}",
                where=f"{self.path}: {key}",
                hint=_OWN,
            )
        return float(value)

    def section(self, key: str) -> dict[str, Any]:
        """A JSON object; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InputError(
                f"expected an object, got {_shown(value)}", where=f"{self.path}: {key}", hint=_OWN
            )
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
