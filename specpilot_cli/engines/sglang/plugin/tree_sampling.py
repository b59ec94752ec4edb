"""Which token follows each row of a tree: the target's best, or one drawn from its distribution.

A row's token is drawn without regard to the tree. Where it is one of the row's children the path
goes on there, else it is the last token of the step: so what is committed has the target's own
distribution, whatever was drafted.
"""

from __future__ import annotations

from typing import Any

import torch


def chosen_by_argmax(batch: Any) -> bool:
    """Whether the largest of the target's own logits decides, with nothing to change them."""
    info = batch.sampling_info
    if info is None:
        return not batch.has_grammar
    penalties = info.penalizer_orchestrator
    return bool(
        info.is_all_greedy
        and not batch.has_grammar
        and not info.has_custom_logit_processor
        and info.acc_additive_penalties is None
        and info.acc_scaling_penalties is None
        and (penalties is None or not penalties.is_required)
        and info.grammar_mask is None
        and info.logit_bias is None
    )


def choose_tokens(
    logits: torch.Tensor, info: Any, positions: torch.Tensor, rows: int
) -> torch.Tensor:
    """int64 [B * rows] from logits [B * rows, V]; greedy requests get the largest one's."""
    best = torch.argmax(logits, dim=-1)
    if info is None or info.is_all_greedy:
        return best
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def each(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1).repeat_interleave(rows)

    probabilities = torch.softmax(logits.float() / each(info.temperatures)[:, None], dim=-1)
    drawn = top_k_top_p_min_p_sampling_from_probs_torch(
        probabilities,
        each(info.top_ks),
        each(info.top_ps),
        each(info.min_ps),
        info.need_min_p_sampling,
        None if info.sampling_seed is None else each(info.sampling_seed),
        positions,
    )
    return torch.where(each(info.top_ks) <= 1, best, drawn.long())
