"""Whether the output head may be W12: drafters and other precisions may need its BF16 matrix."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from transformers import PretrainedConfig

NOT_ASKED = "the configuration says lm_head: false"
FP32 = "its logits are asked for in float32"

_WITHOUT_DRAFT_HEAD = {"", "NONE", "NGRAM", "STANDALONE"}
"""Algorithms without a drafter, or with one that has a head of its own."""

_THROUGH_METHOD = {"DSPARK"}
"""Algorithms whose drafters use the target's head through its quantization method."""


def reason_to_keep(model_config: Any, *, asked: bool) -> str | None:
    """Return why a head of its own stays BF16, or None."""
    if not asked:
        return NOT_ASKED
    precision = precision_reason(model_config)
    if precision is not None:
        return precision
    spec = get_spec()
    algorithm = (spec.speculative_algorithm or "").upper()
    if algorithm in _WITHOUT_DRAFT_HEAD | _THROUGH_METHOD:
        return None
    if algorithm == "DFLASH" and _has_selector(
        spec.speculative_draft_model_path, spec.speculative_draft_model_revision
    ):
        return None
    return f"the {algorithm} drafter multiplies with its BF16 matrix"


def precision_reason(model_config: Any) -> str | None:
    """Return why no head may be W12: SGLang would leave out the precision that is asked for."""
    config = model_config.hf_config
    parts = (config, getattr(model_config, "hf_text_config", config))
    wanted = ("enable_lm_head_fp32", "enable_lm_head_output_fp32")
    asked = any(getattr(part, name, False) for part in parts for name in wanted)
    return FP32 if asked or get_exec().features.enable_fp32_lm_head else None


def tp_size() -> int:
    """Ranks that share each layer."""
    return int(get_parallel().tp_size)


def _has_selector(drafter: str, revision: str | None) -> bool:
    """Whether a DFLASH drafter is a DFlash2 one, which ranks through the head's method."""
    config, _ = PretrainedConfig.get_config_dict(drafter, revision=revision)
    return bool((config.get("dflash_config") or {}).get("selector_rank"))
