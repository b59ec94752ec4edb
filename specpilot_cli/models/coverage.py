"""Which configurations give right floors, and which are refused by key.

A family is read only if its matrices, counted here, are those that transformers builds; a test
holds every name in `FAMILIES` to that. Within a family, keys that add or shrink weights, share
them, or change what is cached are refused where they are set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.models.config_part import HINT, ConfigPart

#: `model_type` of the text models that are read. All have gated MLPs and plain, windowed or Gated
#: DeltaNet mixers.
FAMILIES = frozenset((
    "cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite",
    "granitemoe", "internlm3", "llama", "minimax_m2", "ministral3", "mistral", "mixtral",
    "muse_glimmer", "muse_glimmer_text", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe",
    "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
    "smollm3", "stablelm",
))  # fmt: skip
#: `model_type` of models around such a text model; other parts of theirs take no part in decoding.
WRAPPERS = frozenset((
    "aya_vision", "cohere2_vision", "gemma3", "gemma4", "gemma4_unified", "idefics3", "internvl",
    "llava", "llava_next", "llava_onevision", "mistral3", "muse_glimmer", "paligemma",
    "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "voxtral",
))  # fmt: skip
DRAFTERS = re.compile(r"D(F|f)lash2?\w*DraftModel")
_GENERATORS = re.compile(r"\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel)")

_BOTH_WAYS = "models that do not only decode from left to right have no such floors"
#: What no family above may set, and why. `False`, 0, null and empty are not set.
NOT_COUNTED: dict[str, tuple[str, ...]] = {
    "mixers of another kind are not counted": (
        "kv_lora_rank", "q_lora_rank", "linear_attn_config", "hybrid_override_pattern",
        "mamba_d_state", "attn_layer_period", "ssm_state_size", "index_topk",
        "attention_chunk_size", "v_head_dim", "swa_head_dim", "swa_num_key_value_heads",
    ),
    "layers that share weights or caches are not counted": (
        "num_kv_shared_layers", "cla_share_factor", "use_cla", "pruned_heads",
    ),
    "layers with further matrices are not counted": (
        "hidden_size_per_layer_input", "use_double_wide_mlp", "altup_num_inputs",
        "cross_attention_layers", "has_lora_adapter", "block_configs",
    ),
    "experts laid out in another way are not counted": (
        "interleave_moe_layer_step", "intermediate_size_mlp", "moe_layers", "enable_moe_block",
        "mlp_layer_types", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts",
        "shared_intermediate_size", "moe_shared_expert_intermediate_size", "zero_expert_num",
        "moe_num_experts", "moe_layer_start_index",
    ),
    _BOTH_WAYS: ("is_encoder_decoder", "add_cross_attention"),
}  # fmt: skip
_QWEN_SHARED = frozenset(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"))
_FINE_EXPERTS = _QWEN_SHARED | {"glm4_moe", "qwen3_moe", "qwen3_vl_moe_text"}
_COARSE_EXPERTS = frozenset((
    "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe",
))  # fmt: skip
_GEMMA4 = frozenset(("gemma4_text", "gemma4_unified_text"))
_PLAIN_HEADS = frozenset((
    "cohere", "cohere2", "granite", "granitemoe", "llama", "olmo", "olmo2", "olmo3", "olmoe",
    "phi3",
))  # fmt: skip
#: Keys, or either of several, that a family must state: left out, transformers fills in a number
#: of that family which is not the one that follows from the other keys.
STATED: dict[tuple[str, ...], frozenset[str]] = {
    ("num_key_value_heads",): FAMILIES - _PLAIN_HEADS,
    ("head_dim",): FAMILIES - _PLAIN_HEADS - {
        "exaone", "exaone4", "mistral", "mixtral", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl_text",
        "qwen2_5_vl_text", "qwen3_moe", "glm4_moe", "smollm3", "stablelm",
    },
    ("num_experts", "num_local_experts", "n_routed_experts"): _FINE_EXPERTS | _COARSE_EXPERTS,
    ("moe_intermediate_size",): _FINE_EXPERTS,
    ("shared_expert_intermediate_size",): _QWEN_SHARED,
    ("n_shared_experts",): frozenset(("glm4_moe",)),
    ("first_k_dense_replace",): frozenset(("glm4_moe",)),
    ("layer_types", "linear_num_value_heads"): frozenset((
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    )),
    ("global_head_dim", "per_layer_config"): _GEMMA4,
    ("hidden_size_per_layer_input",): frozenset(("gemma4_text",)),
}  # fmt: skip
#: Families with a window of their own where none is stated; null says that there is none.
_WINDOW_STATED = _GEMMA4 | {
    "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "mistral", "muse_glimmer",
    "muse_glimmer_text", "olmo3",
}  # fmt: skip
#: How checkpoints say that their weights are not of one type.
QUANTISED = ("quantization_config", "compression_config", "quantization", "quant_config")
_PLAIN_HINT = "give the configuration of the unquantised model; floors are of plain weights"
_W12_HINT = (
    "give the folder that was converted: the answer states the bytes in W12 beside the plain ones"
)


def refuse_uncovered(
    config: ConfigPart,
    document: Mapping[str, Any],
    *,
    w12: bool = False,
    any_drafter: bool = False,
) -> None:
    """Raise `InputError` naming the key that would make a floor wrong.

    config: the text part of `document`. w12: read W12 folders as the models they were made of.
    any_drafter: read drafters of other kinds too, without what they have beside their layers.
    """
    outer = ConfigPart(document, config.where, "")
    parts = (config,) if config.data is document else (config, outer)
    for part in parts:
        _refuse_quantised(part, w12=w12)
        for problem, keys in NOT_COUNTED.items():
            for key in keys:
                if part.data.get(key):
                    raise part.error(problem, key)
        if part.data.get("use_bidirectional_attention") in (True, "all"):
            raise part.error(_BOTH_WAYS, "use_bidirectional_attention")
        if part.data.get("moe_layer_freq") not in (None, 1):
            raise part.error("experts laid out in another way are not counted", "moe_layer_freq")
    if not any_drafter:
        _refuse_architecture(outer)
    name = str(outer.data.get("model_type"))[:60]
    if len(parts) > 1 and name not in WRAPPERS:
        raise outer.error(f"what `{name}` adds to its text model is not known here", "model_type")
    _refuse_family(config)


def refuse_quantised_folder(folder: Path) -> None:
    """Refuse a model folder that says in a file beside its configuration that it is quantised."""
    beside = folder / "hf_quant_config.json"
    if beside.exists():
        raise InputError(
            "quantised weights are not counted: `hf_quant_config.json` lies beside config.json",
            where=str(beside), hint=_PLAIN_HINT,
        )  # fmt: skip


def _refuse_quantised(part: ConfigPart, *, w12: bool) -> None:
    for key in QUANTISED:
        stated = part.data.get(key)
        if not stated:
            continue
        method = stated.get("quant_method") if isinstance(stated, dict) else None
        if method == "w12":
            if w12:
                continue
            raise part.error("weights in W12 are not counted", key, hint=_W12_HINT)
        named = f" ({method})" if isinstance(method, str) else ""
        raise part.error(f"quantised weights are not counted{named}", key, hint=_PLAIN_HINT)


def _refuse_architecture(outer: ConfigPart) -> None:
    names = outer.data.get("architectures")
    if not isinstance(names, list) or not names:
        return
    first = str(names[0])
    if not (_GENERATORS.fullmatch(first) or DRAFTERS.fullmatch(first)):
        raise outer.error(
            f"`{first}` is no text generator and no DFlash drafter", "architectures",
            hint="encoders, classifiers, rerankers and other drafters have no floors here",
        )  # fmt: skip


def _refuse_family(config: ConfigPart) -> None:
    family = config.data.get("model_type")
    if family is None:
        raise config.error("missing", "model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise config.error(
            f"the layers of `{str(family)[:60]}` are not known here", "model_type",
            hint=f"{HINT}; read are: {', '.join(sorted(FAMILIES))}",
        )  # fmt: skip
    hint = f"`{family}` models have a default of their own for it: state what this one has"
    for keys, families in STATED.items():
        if family in families and all(config.data.get(key) is None for key in keys):
            raise config.error("missing", f"` or `{config.prefix}".join(keys), hint=hint)
    if family in _WINDOW_STATED and not {"sliding_window", "layer_types"} & config.data.keys():
        raise config.error("missing", "sliding_window", hint=f"{hint}, or null")
