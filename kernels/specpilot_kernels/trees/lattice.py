"""Edge scores of a drafter lattice: what a tree builder takes as input (paper §2.2).

A lattice has `L` positions with `K` candidate tokens each. `edge[l, p, c]` is the log-probability
of candidate `c` at position `l` given candidate `p` at position `l - 1`. At position 0 every
predecessor stands for the anchor, the last committed token, so all rows are equal and row 0 is
the one that is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees.types import Float32, Float64, Int32


def edge_log_probs(scores: npt.NDArray[Any]) -> Float32:
    """Selector scores [..., K] to log-probabilities over the last axis, float32 (paper §4.2).

    The selector's scores are logits: they order the candidates of one predecessor, but only their
    log-softmax may be added along a path.
    """
    wide = np.asarray(scores, dtype=np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result.astype(np.float32)


def marginal_log_probs(unary: npt.NDArray[Any], unary_logsumexp: npt.NDArray[Any]) -> Float32:
    """Unary logits [..., K] and full-vocabulary logsumexp [...] to log-probabilities, float32.

    These are the scores of DDTree: a candidate's own probability, whatever precedes it.
    """
    norm = np.asarray(unary_logsumexp, dtype=np.float64)[..., None]
    return (np.asarray(unary, dtype=np.float64) - norm).astype(np.float32)


def temper(log_probs: npt.NDArray[Any], temperature: float) -> Float32:
    """Log-probabilities [..., K] of the same scores divided by `temperature`, float32.

    Dividing normalised scores gives the same distribution as dividing the raw ones, because the
    two differ by a constant per predecessor.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: {temperature}")
    return edge_log_probs(np.asarray(log_probs, dtype=np.float64) / temperature)


def as_candidates(candidate_ids: npt.NDArray[Any], ndim: int) -> Int32:
    """`candidate_ids` as a C-contiguous int32 array of `ndim` axes; ValueError otherwise."""
    result = np.ascontiguousarray(candidate_ids, dtype=np.int32)
    if result.ndim != ndim:
        raise ValueError(f"candidate_ids must have {ndim} axes, not shape {result.shape}")
    return result


def as_edges(edge: npt.NDArray[Any], candidates: Int32) -> Float32:
    """`edge` as C-contiguous float32 that fits `candidates`.

    Accepts [..., L, K, K] (conditional) and [..., L, 1, K] (the same row for every predecessor).
    """
    result = np.ascontiguousarray(edge, dtype=np.float32)
    shape, wanted = result.shape, candidates.shape
    fits = shape[:-2] == wanted[:-1] and shape[-1:] == wanted[-1:]
    if not fits or shape[-2] not in (1, wanted[-1]):
        raise ValueError(
            f"edge of shape {result.shape} does not fit candidate_ids of shape {candidates.shape}"
        )
    return result


def full_scores(edge: Float32) -> Float64:
    """`edge` in float64, the precision in which path scores are summed."""
    return edge.astype(np.float64)
