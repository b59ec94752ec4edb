"""The packed form of a lattice file: the scores that trees read, in float16.

Most of a lattice is never read: a tree of N nodes looks at one row of scores per node, and a row is
the scores after one predecessor. A packed file holds the rows that were asked to be kept, as
float16 log-probabilities, and a bit per row. A row that was dropped is read back as the
candidates' own probabilities, without a predecessor. Unary scores are log-probabilities, so
`unary_logsumexp` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.schema.lattice import LatticeRecording, offsets_of

Arrays = dict[str, npt.NDArray[Any]]

#: Float16 keeps 11 bits: sixteen rounded probabilities sum to 1 within this, in nats.
PACKED_TOLERANCE_NATS = 5e-3


def pack_tensors(recording: LatticeRecording, kept: npt.NDArray[np.bool_]) -> Arrays:
    """Tensors of a packed file; kept [S, L, K] says which predecessors' rows to hold.

    Position 0 has one row whatever `kept` says.
    """
    rows = kept.copy()
    rows[:, 0] = False
    rows[:, 0, 0] = True
    counts = rows.sum(axis=(1, 2))
    own = recording.unary.astype(np.float64) - recording.unary_logsumexp[..., None]
    with np.errstate(over="ignore"):  # below -65504 nats is a probability of zero
        return {
            "candidate_ids": _narrow(recording.candidate_ids),
            "edge_kept": np.packbits(rows, axis=-1, bitorder="little"),
            "edge_offsets": offsets_of(counts.tolist()),
            "edge_rows": recording.edge[rows].astype(np.float16),
            "unary": np.maximum(own, np.finfo(np.float16).min).astype(np.float16),
            "stock_choice": _narrow(recording.stock_choice),
        }


def unpack_tensors(stored: Mapping[str, npt.NDArray[Any]], where: str, first_step: int) -> Arrays:
    """The arrays of a `LatticeRecording` from a packed part, rows normalised again.

    edge_offsets begin at 0. Raises InputError where masks, offsets and rows do not agree.
    """
    from specpilot_kernels.trees.lattice import edge_log_probs

    n_candidates = stored["candidate_ids"].shape[-1]
    bits = np.unpackbits(stored["edge_kept"], axis=-1, count=n_candidates, bitorder="little")
    kept = np.asarray(bits, dtype=np.bool_)
    _check(stored, kept, where, first_step)
    unary = stored["unary"].astype(np.float32)
    fallback = edge_log_probs(np.where(np.isfinite(unary), unary, 0.0))  # checked afterwards
    edge = np.repeat(fallback[:, :, None, :], n_candidates, axis=2)
    edge[kept] = edge_log_probs(stored["edge_rows"])
    edge[:, 0] = edge[:, 0, :1]
    return {
        "candidate_ids": stored["candidate_ids"].astype(np.int32),
        "edge": edge,
        "unary": unary,
        "unary_logsumexp": np.zeros(unary.shape[:2], dtype=np.float32),
        "stock_choice": stored["stock_choice"].astype(np.int32),
    }


def _check(
    stored: Mapping[str, npt.NDArray[Any]],
    kept: npt.NDArray[np.bool_],
    where: str,
    first_step: int,
) -> None:
    offsets, rows = stored["edge_offsets"], stored["edge_rows"].astype(np.float64)
    wrong = (kept.sum(axis=(1, 2)) != np.diff(offsets)) | ~kept[:, 0, 0]
    if np.any(wrong):
        _fail(where, "edge_kept", int(wrong.argmax()) + first_step, "its rows are not all there")
    with np.errstate(divide="ignore"):
        off = np.abs(np.log(np.exp(rows).sum(axis=-1)))
    bad = np.flatnonzero(~(off <= PACKED_TOLERANCE_NATS))  # NaN is bad too
    if bad.size:
        step = int(np.searchsorted(offsets, bad[0], side="right")) - 1 + first_step
        _fail(where, "edge_rows", step, "NaN, or probabilities that do not sum to 1")


def _fail(where: str, tensor: str, step: int, message: str) -> None:
    raise InputError(
        f"bad lattice file: tensor `{tensor}`, step {step}: {message}",
        where=where,
        hint="pack the recording again with `specpilot lattice pack`",
    )


def _narrow(ids: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """Token ids in 16 bits where the vocabulary allows."""
    fits = ids.size == 0 or int(ids.max()) <= np.iinfo(np.uint16).max
    return ids.astype(np.uint16) if fits else ids
