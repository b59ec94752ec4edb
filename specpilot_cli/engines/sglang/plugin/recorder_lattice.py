"""Writes lattices into the recorder's rows: plain tensor operations, safe to capture in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.recorder_layout import RowLayout

# Float32 copies of full-vocabulary logits exist for so many rows at a time: 32 MiB at 256k tokens.
_ROWS_AT_ONCE = 32


def write_lattice(
    layout: RowLayout,
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    anchor: torch.Tensor,
    candidate_ids: torch.Tensor,
    scores: torch.Tensor,
    unary: torch.Tensor,
    unary_logsumexp: torch.Tensor,
) -> None:
    """Copy one lattice per request into `rows` (int32 and float32 views [bs, words]).

    anchor int [bs]; candidate_ids int [bs, L, K]; scores [bs, L, K, K]; unary [bs, L, K];
    unary_logsumexp [bs, L], any float type.
    """
    ints, reals = rows
    bs = ints.shape[0]
    ints[:, 0].copy_(anchor)
    ints[:, layout.candidate_ids].copy_(candidate_ids.reshape(bs, -1))
    reals[:, layout.scores].copy_(scores.reshape(bs, -1))
    reals[:, layout.unary].copy_(unary.reshape(bs, -1))
    reals[:, layout.unary_logsumexp].copy_(unary_logsumexp.reshape(bs, -1))


def full_logsumexp(
    logits: torch.Tensor,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logsumexp over the last axis in float32, a few rows at a time: [N, V] to float32 [N].

    transform: applied to float32 copies of the logits first; it may work in place.
    """
    result = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        part = logits[start : start + _ROWS_AT_ONCE].to(torch.float32, copy=True)
        if transform is not None:
            part = transform(part)
        torch.logsumexp(part, dim=-1, out=result[start : start + _ROWS_AT_ONCE])
    return result


def markov_scores(
    head: Any, candidate_ids: torch.Tensor, unary: torch.Tensor, anchor: torch.Tensor
) -> torch.Tensor:
    """Edge scores of DSPARK's vanilla Markov head, float32 [bs, L, K, K] (paper Eq. 1).

    score[b, s, p, c] = unary[b, s, c] + <W1[predecessor p], W2[candidate c]>, where the
    predecessors are the candidates of position s - 1, and the anchor K times at position 0.
    head: has `markov_w1` (embedding) and `markov_w2` (linear). candidate_ids int64 [bs, L, K];
    unary [bs, L, K]; anchor int [bs].
    """
    top_k = candidate_ids.shape[-1]
    first = anchor.long()[:, None, None].expand(-1, 1, top_k)
    previous = torch.cat([first, candidate_ids[:, :-1]], dim=1)
    latent = head.markov_w1.weight[previous].float()
    keys = head.markov_w2.weight[candidate_ids].float()
    return unary.float()[:, :, None] + torch.einsum("blpr,blcr->blpc", latent, keys)
