"""Edge scores of a drafter lattice: what a tree builder takes as input (paper §2.2).

A lattice has `L` positions with `K` candidate tokens each. `edge[l, p, c]` is the log-probability
of candidate `c` at position `l` given candidate `p` at position `l - 1`. At position 0 every
predecessor stands for the anchor, the last committed token, so all rows are equal and row 0 is
the one that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._log_softmax import log_softmax_rows
from specpilot_kernels.trees.types import Float32, Float64, Int32

_UNCHANGED: Final = np.array([[1.0, 0.0]])  # temperature 1, recall 1


def edge_log_probs(
    scores: npt.NDArray[Any], calibration: npt.NDArray[Any] | None = None
) -> Float32:
    """Selector scores [..., K] to log-probabilities over the last axis, float32 (paper §4.2).

    The selector's scores are logits: they order the candidates of one predecessor, but only their
    log-softmax may be added along a path. Computed in float64 by operations that have the same
    result on every machine, GPUs included. A row with NaN, +inf or nothing finite becomes NaN,
    which no builder chooses.

    calibration [L or more, 2]: `calibration_table`, applied before rounding to float32; scores are
    [..., L, P, K] then. Raises ValueError without candidates or on another shape.
    """
    wide = np.ascontiguousarray(scores, dtype=np.float64)
    if wide.shape[-1] == 0:
        raise ValueError(f"scores of shape {wide.shape} have no candidates")
    table, rows_per_position = _UNCHANGED, 1
    if calibration is not None:
        n_positions, rows_per_position = wide.shape[-3:-1]
        table = np.ascontiguousarray(calibration[:n_positions], dtype=np.float64)
        if table.shape != (n_positions, 2) or not np.all(table[:, 0] > 0):
            raise ValueError(f"calibration {calibration.shape} does not fit scores {wide.shape}")
    result = np.empty(wide.shape, dtype=np.float32)
    last = wide.shape[-1]
    log_softmax_rows(
        wide.reshape(-1, last), table, max(rows_per_position, 1), result.reshape(-1, last)
    )
    return result


def calibration_table(temperature: float, recall: Sequence[float]) -> Float64:
    """What `specpilot replay --calibrate` fits, as builders take it: float64 [L, 2].

    temperature divides every score; recall [L] is the probability by position that the true token
    is a candidate at all. Column 0 holds 1 / temperature, column 1 the log of the recall. Raises
    ValueError unless 0 < temperature and 0 < recall <= 1.
    """
    shares = np.asarray(recall, dtype=np.float64)
    if not temperature > 0 or not np.isfinite(temperature):
        raise ValueError(f"temperature must be positive: {temperature}")
    if shares.ndim != 1 or not np.all((shares > 0) & (shares <= 1)):
        raise ValueError(f"recall must be shares above 0 and up to 1, one per position: {recall}")
    return np.stack([np.full(shares.shape, 1.0 / temperature), np.log(shares)], axis=1)


def marginal_log_probs(unary: npt.NDArray[Any], unary_logsumexp: npt.NDArray[Any]) -> Float32:
    """Unary logits [..., K] and full-vocabulary logsumexp [...] to log-probabilities, float32.

    These are the scores of DDTree: a candidate's own probability, whatever precedes it.
    """
    norm = np.asarray(unary_logsumexp, dtype=np.float64)[..., None]
    with np.errstate(over="ignore"):
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
