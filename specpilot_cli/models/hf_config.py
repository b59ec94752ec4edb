"""From a Hugging Face `config.json` to a model profile: dense, hybrid, MoE, windows, tied heads.

Only what decides bytes and FLOPs is read. A configuration that leaves such a number open, or has
a mixer that is not known here, is refused by key: a guessed shape would give a wrong floor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import parse_json, read_text
from specpilot_cli.io.validation import validate
from specpilot_cli.models.config_part import HINT, ConfigPart
from specpilot_cli.models.coverage import DRAFTERS, refuse_quantised_folder, refuse_uncovered
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.ui import printable

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WINDOWED = "sliding_attention"
_KINDS = frozenset(("full_attention", "linear_attention", _WINDOWED))
# Layers whose output gate is a matrix of its own, by model type; Qwen says `attn_output_gate`.
_SEPARATE_GATE = frozenset(("muse_glimmer_text", "muse_glimmer"))
# Families whose query projection always holds the gate, whether the configuration says so or not.
_FUSED_GATE = re.compile(r"qwen3_(next|5(_moe)?(_text)?)")
# Families whose defaults are written down where a configuration leaves the kinds of layers out.
_FULL_EVERY = {
    "gemma2": 2, "gemma3_text": 6, "gemma4_text": 6, "gemma4_unified_text": 6,
    "muse_glimmer_text": 4, "muse_glimmer": 4, "gpt_oss": 2, "cohere2": 4,
    "olmo3": 4,
}  # fmt: skip
# Families whose one window holds for all layers, and those that must switch a window on.
_ALL_WINDOWED = frozenset(("mistral", "ministral3", "mixtral", "phi3", "phimoe"))
_SWITCHED = re.compile(r"qwen\w+|smollm3")
_OVERRIDDEN = frozenset(("head_dim", "num_key_value_heads"))
_MOST_LAYERS = 10_000
_SOURCE = "config"

Layers = Counter[str]


def read_hf_config(path: Path, *, w12: bool = False, any_drafter: bool = False) -> ModelProfile:
    """The shape in a `config.json`; models with an image part are read through `text_config`.

    w12, any_drafter: as in `refuse_uncovered`. Raises `InputError` naming the key that is missing,
    wrong or unknown, or that stands for weights which are not counted.
    """
    document = parse_json(read_text(path), str(path), finite=False)
    if not isinstance(document, dict):
        raise InputError("not a model configuration", where=str(path), hint=HINT)
    refuse_quantised_folder(path.parent)
    name = path.resolve().parent.name
    return profile_of_config(
        document, name=name, where=str(path), w12=w12, any_drafter=any_drafter
    )


def profile_of_config(
    document: Mapping[str, Any],
    *,
    name: str,
    where: str,
    w12: bool = False,
    any_drafter: bool = False,
) -> ModelProfile:
    """As `read_hf_config`, of a document in memory; `name` is what to call the model."""
    text = document.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise InputError("`text_config` is no object", where=where, hint=HINT)
    if text is None:
        config = ConfigPart(document, where, "")
    else:
        config = ConfigPart(text, where, "text_config.")
    refuse_uncovered(config, document, w12=w12, any_drafter=any_drafter)
    dtype = config.data.get("dtype") or config.data.get("torch_dtype")
    dtype = dtype or document.get("dtype") or document.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise config.error(f"weights of type {dtype!r} have no known size", "dtype")
    tied = config.data.get("tie_word_embeddings", document.get("tie_word_embeddings"))
    profile: dict[str, Any] = {
        "schema_version": 1,
        "name": re.sub(r"[^a-z0-9.\-]+", "-", name.lower()).strip("-.") or "model",
        "title": printable(name if len(name) > 2 else f"model {name}"),
        "sources": {_SOURCE: printable(f"configuration {where}")},
        "hidden": _count(config.must("hidden_size")),
        "vocab": _count(config.must("vocab_size")),
        "weight_bytes": _count(_DTYPE_BYTES[dtype], derived=True),
        "tied_head": _flag(bool(tied), derived=tied is None),
        "layers": _layers(config),
    }
    if drafter := _drafter(document, where):
        profile["drafter"] = drafter
    return validate(profile, ModelProfile, lambda _: where)


def _count(value: int, *, derived: bool = False) -> dict[str, Any]:
    return {"value": value, "kind": "derived" if derived else "stated", "source": _SOURCE}


def _flag(value: bool, *, derived: bool = False) -> dict[str, Any]:
    return {"value": value, "kind": "derived" if derived else "stated", "source": _SOURCE}


def _layers(config: ConfigPart) -> list[dict[str, Any]]:
    """Groups of layers that share mixer and MLP, in the order of their first layer."""
    kinds = _kinds(config)
    sparse = _sparse(config, len(kinds))
    groups = Counter(zip(kinds, sparse, strict=True))
    distinct = {_attention_numbers(config, kind) for kind in kinds if kind != "linear_attention"}
    several = len(distinct) > 1
    found = []
    for (kind, has_experts), n in groups.items():
        mixer = _gdn(config) if kind == "linear_attention" else _attention(config, kind, several)
        mlp = _experts(config) if has_experts else _dense(config)
        found.append({"count": _count(n, derived=len(groups) > 1), "mixer": mixer, "mlp": mlp})
    return found


def _kinds(config: ConfigPart) -> list[str]:
    """The kind of every layer, from `layer_types` or from the rule that stands for it."""
    n_layers = config.must("num_hidden_layers")
    if n_layers > _MOST_LAYERS:
        raise config.error(f"{n_layers} layers are more than any model has", "num_hidden_layers")
    stated = config.data.get("layer_types")
    if stated is not None:
        if not isinstance(stated, list) or len(stated) != n_layers:
            raise config.error(f"needs one entry for each of {n_layers} layers", "layer_types")
        if unknown := sorted({str(kind) for kind in stated} - _KINDS):
            raise config.error(f"unknown kind of layer `{unknown[0]}`", "layer_types")
        return [str(kind) for kind in stated]
    family = str(config.data["model_type"])
    on = config.data.get("use_sliding_window", _SWITCHED.fullmatch(family) is None)
    window = on is not False and config.data.get("sliding_window") is not None
    other = _WINDOWED if window else "full_attention"
    every = config.whole("full_attention_interval", "sliding_window_pattern", optional=True)
    if config.data.get("linear_num_value_heads") is not None:
        other, every = "linear_attention", every or 4
    every = every or (_FULL_EVERY.get(family) if window else None)
    if every is None:
        if window and family not in _ALL_WINDOWED:
            raise config.error("does not say which layers have the window", "layer_types")
        return [other] * n_layers
    if family.startswith("muse_glimmer"):  # counted from the last layer
        return ["full_attention" if (n_layers - 1 - i) % every == 0 else other
                for i in range(n_layers)]  # fmt: skip
    kinds = ["full_attention" if (i + 1) % every == 0 else other for i in range(n_layers)]
    if family.startswith("gemma4"):
        kinds[-1] = "full_attention"
    return kinds


def _attention_numbers(config: ConfigPart, kind: str) -> tuple[int, int, int]:
    """(heads, KV heads, head dim) of layers of `kind`; Gemma's global layers have their own."""
    heads = config.must("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", optional=True) or heads
    dim = config.whole("head_dim", optional=True)
    if kind == "full_attention":
        wide = _overrides(config)
        kv_heads = wide.whole("num_global_key_value_heads", "num_key_value_heads",
                              optional=True) or kv_heads  # fmt: skip
        dim = wide.whole("global_head_dim", "head_dim", optional=True) or dim
    if dim is None:
        hidden = config.must("hidden_size")
        if hidden % heads:
            raise config.error(f"{hidden} is no multiple of {heads} heads", "hidden_size")
        dim = hidden // heads
    return heads, kv_heads, dim


def _overrides(config: ConfigPart) -> ConfigPart:
    """Numbers that full-attention layers have of their own, under either spelling.

    transformers writes them out layer by layer; they must be the same in all of them.
    """
    layers = config.data.get("per_layer_config")
    if not isinstance(layers, dict) or not layers:
        own = ("num_global_key_value_heads", "global_head_dim")
        return ConfigPart({k: config.data.get(k) for k in own}, config.where, config.prefix)
    values = list(layers.values())
    first = values[0]
    full = {str(i) for i, kind in enumerate(_kinds(config)) if kind == "full_attention"}
    same = isinstance(first, dict) and all(value == first for value in values)
    if not same or {str(key) for key in layers} != full or set(first) - _OVERRIDDEN:
        raise config.error("layers with numbers of their own are not counted", "per_layer_config")
    return ConfigPart(first, config.where, f"{config.prefix}per_layer_config.")


def _attention(config: ConfigPart, kind: str, several: bool) -> dict[str, Any]:
    heads, kv_heads, dim = _attention_numbers(config, kind)
    stated = config.data.get("head_dim") is not None
    windowed = kind == _WINDOWED
    mixer: dict[str, Any] = {
        "type": "attention",
        "prefix": ("window" if windowed else "full") if several else "attn",
        "heads": _count(heads),
        "kv_heads": _count(kv_heads, derived=config.data.get("num_key_value_heads") is None),
        "head_dim": _count(dim, derived=not stated),
    }
    if windowed:
        mixer["window"] = _count(config.must("sliding_window"))
    model_type = str(config.data.get("model_type"))
    if config.data.get("attn_output_gate", _FUSED_GATE.fullmatch(model_type) is not None):
        mixer["gate"] = "fused"
    elif model_type in _SEPARATE_GATE:
        mixer["gate"] = "separate"
    if config.data.get("attention_k_eq_v") is True and not windowed:
        mixer["value_is_key"] = _flag(True)
    return mixer


def _gdn(config: ConfigPart) -> dict[str, Any]:
    state = config.data.get("mamba_ssm_dtype", "float32")
    if not isinstance(state, str) or state not in _DTYPE_BYTES:
        raise config.error(f"states of type {state!r} have no known size", "mamba_ssm_dtype")
    return {
        "type": "gated_delta_net",
        "key_heads": _count(config.must("linear_num_key_heads")),
        "value_heads": _count(config.must("linear_num_value_heads")),
        "key_dim": _count(config.must("linear_key_head_dim")),
        "value_dim": _count(config.must("linear_value_head_dim")),
        "conv_width": _count(config.must("linear_conv_kernel_dim")),
        "state_bytes": _count(_DTYPE_BYTES[state], derived=True),
    }


def _sparse(config: ConfigPart, n_layers: int) -> list[bool]:
    """Which layers hold experts."""
    n_experts = config.whole("num_experts", "num_local_experts", "n_routed_experts",
                             optional=True, least=0)  # fmt: skip
    if not n_experts:
        return [False] * n_layers
    every = config.whole("decoder_sparse_step", "moe_layer_freq", optional=True) or 1
    first = config.whole("first_k_dense_replace", optional=True, least=0) or 0
    dense = config.data.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("not a list of layers", "mlp_only_layers")
    return [i >= first and (i + 1) % every == 0 and i not in dense for i in range(n_layers)]


def _experts(config: ConfigPart) -> dict[str, Any]:
    mlp: dict[str, Any] = {
        "type": "experts",
        "experts": _count(config.must("num_experts", "num_local_experts", "n_routed_experts")),
        "active": _count(config.must("num_experts_per_tok", "experts_per_token", "top_k_experts")),
        "intermediate": _count(config.must("moe_intermediate_size", "intermediate_size")),
    }
    shared = config.whole("shared_expert_intermediate_size", optional=True, least=0)
    n_shared = config.whole("n_shared_experts", optional=True, least=0)
    if shared:
        mlp["shared_intermediate"] = _count(shared)
    elif n_shared:
        size = n_shared * config.must("moe_intermediate_size", "intermediate_size")
        mlp["shared_intermediate"] = _count(size, derived=True)
    return mlp


def _dense(config: ConfigPart) -> dict[str, Any]:
    return {"type": "dense", "intermediate": _count(config.must("intermediate_size"))}


def _drafter(document: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """What a DFlash drafter's configuration adds; None for any other model."""
    names = document.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    if not DRAFTERS.fullmatch(first):
        return None
    own = document.get("dflash_config")
    data = {**document, **own} if isinstance(own, dict) else dict(document)
    config = ConfigPart(data, where, "dflash_config.")
    features = data.get("target_layer_ids")
    if not isinstance(features, list) or not features:
        raise config.error("needs the target layers whose states it reads", "target_layer_ids")
    found = {"block": _count(config.must("block_size")), "features": _count(len(features))}
    names_of = {"selector_rank": "selector_rank", "selector_top_k": "selector_top_k",
                "conv_group": "conv_group_size", "conv_width": "conv_kernel_size"}  # fmt: skip
    for field, key in names_of.items():
        value = config.whole(key, optional=True, least=0)
        if value:
            found[field] = _count(value)
    return found
