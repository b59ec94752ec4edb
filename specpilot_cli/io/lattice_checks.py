"""What a lattice recording must satisfy before anything is computed from it.

Recordings also come from other engines, and a wrong one gives a plausible τ: padding ids twice in a
row, scores that were never normalised, positions shifted by one. Each check names the tensor and
the first step at fault.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.schema.lattice import TENSORS, LatticeRecording

# Float32 log-softmax over 16 candidates is good to about 1e-6 nats; the margin is for GPU kernels.
NORMALISATION_TOLERANCE_NATS = 1e-4
# The full-vocabulary logsumexp may come from another kernel than the candidates' own logits.
LOGSUMEXP_TOLERANCE_NATS = 1e-2
_CHUNK_STEPS = 512  # bounds the float temporaries of the edge checks to a few tens of MiB


def check_recording(recording: LatticeRecording, where: str) -> None:
    """Raise InputError unless `recording` is well formed; `where` names the file."""
    _check_shapes(recording, where)
    _check_offsets(recording, where)
    _check_steps(recording, where)
    _check_candidates(recording, where)
    _check_edges(recording, where)
    _check_unary(recording, where)


def _fail(where: str, tensor: str, message: str, *, step: int | None = None) -> NoReturn:
    place = f"tensor `{tensor}`" if step is None else f"tensor `{tensor}`, step {step}"
    raise InputError(
        f"bad lattice file: {place}: {message}",
        where=where,
        hint="record it again, or fix the exporter; docs/replay.md defines every tensor",
    )


def _check_shapes(recording: LatticeRecording, where: str) -> None:
    sizes: dict[str, int] = {"R + 1": recording.n_requests + 1}
    for name, array in recording.tensors().items():
        dtype, axes = TENSORS[name]
        if array.dtype != np.dtype(dtype):
            _fail(where, name, f"dtype is {array.dtype}, not {dtype}")
        if array.ndim != len(axes):
            _fail(where, name, f"shape {list(array.shape)} does not have the axes {list(axes)}")
        for axis, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                _fail(
                    where, name, f"axis {axis} is {size}, but {sizes[axis]} elsewhere in the file"
                )
    block, n_positions = recording.metadata.block, sizes["L"]
    if n_positions not in (block - 1, block) or n_positions < 1 or sizes["K"] < 1:
        _fail(
            where,
            "candidate_ids",
            f"{n_positions} positions of {sizes['K']} candidates do not fit block {block}, "
            "which drafts block - 1 or block positions",
        )


def _check_offsets(recording: LatticeRecording, where: str) -> None:
    for name, ids_name in (("prompt_offsets", "prompt_ids"), ("output_offsets", "output_ids")):
        offsets: npt.NDArray[np.int64] = getattr(recording, name)
        ids: npt.NDArray[np.int32] = getattr(recording, ids_name)
        if offsets[0] != 0 or offsets[-1] != ids.size or np.any(np.diff(offsets) < 0):
            _fail(where, name, f"must rise from 0 to {ids.size}, the length of `{ids_name}`")
        if ids.size and ids.min() < 0:
            _fail(where, ids_name, "negative token id")


def _check_steps(recording: LatticeRecording, where: str) -> None:
    request, position = recording.step_request, recording.step_position
    lengths = np.diff(recording.output_offsets)
    bad = (request < 0) | (request >= recording.n_requests)
    if np.any(bad):
        step = int(np.argmax(bad))
        _fail(where, "step_request", f"request {request[step]} does not exist", step=step)
    bad = (position < 0) | (position >= lengths[request])
    if np.any(bad):
        step = int(np.argmax(bad))
        _fail(
            where,
            "step_position",
            f"{position[step]} is outside the output of request {request[step]}, "
            f"which has {lengths[request[step]]} tokens",
            step=step,
        )
    same = request[1:] == request[:-1]
    disorder = (request[1:] < request[:-1]) | (same & (position[1:] <= position[:-1]))
    if np.any(disorder):
        step = int(np.argmax(disorder)) + 1
        _fail(where, "step_position", "steps are not sorted by request and position", step=step)
    if recording.metadata.mode == "dense":
        _check_dense(recording, lengths, where)


def _check_dense(recording: LatticeRecording, lengths: npt.NDArray[np.int64], where: str) -> None:
    counts = np.bincount(recording.step_request, minlength=recording.n_requests)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    for index in range(recording.n_requests):
        part = recording.step_position[first[index] : first[index] + counts[index]]
        # The last output token may serve as an anchor too: nothing recorded follows it.
        needed = max(int(lengths[index]) - 1, 0)
        if part.size < needed or np.any(part != np.arange(part.size)):
            name = recording.metadata.requests[index].request_id
            _fail(
                where,
                "step_position",
                f"mode is dense, but request `{name}` lacks a lattice at some of its "
                f"{needed} positions",
            )


def _check_candidates(recording: LatticeRecording, where: str) -> None:
    ids = recording.candidate_ids
    _first_bad_step(ids < 0, where, "candidate_ids", "negative token id")
    ordered = np.sort(ids, axis=-1)
    _first_bad_step(
        ordered[..., 1:] == ordered[..., :-1],
        where,
        "candidate_ids",
        "the same token appears twice at one position",
    )
    _first_bad_step(recording.stock_choice < 0, where, "stock_choice", "negative token id")


def _check_edges(recording: LatticeRecording, where: str) -> None:
    for start in range(0, recording.n_steps, _CHUNK_STEPS):
        edge = recording.edge[start : start + _CHUNK_STEPS]
        _first_bad_step(np.isnan(edge), where, "edge", "NaN", offset=start)
        _first_bad_step(
            edge > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "a log-probability is above 0",
            offset=start,
        )
        total = np.exp(edge).sum(axis=-1, dtype=np.float64)
        off = np.abs(np.log(np.maximum(total, np.finfo(np.float64).tiny)))
        _first_bad_step(
            off > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "a predecessor's probabilities do not sum to 1 (scores must be log-softmax)",
            offset=start,
        )
        spread = np.exp(edge[:, 0]) - np.exp(edge[:, 0, :1])
        _first_bad_step(
            np.abs(spread) > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "rows differ at position 0, where every predecessor is the anchor",
            offset=start,
        )


def _check_unary(recording: LatticeRecording, where: str) -> None:
    unary, norm = recording.unary, recording.unary_logsumexp
    _first_bad_step(~np.isfinite(unary), where, "unary", "a logit is not finite")
    _first_bad_step(~np.isfinite(norm), where, "unary_logsumexp", "a value is not finite")
    peak = unary.max(axis=-1, keepdims=True).astype(np.float64)
    own = peak[..., 0] + np.log(np.exp(unary - peak).sum(axis=-1))
    _first_bad_step(
        norm < own - LOGSUMEXP_TOLERANCE_NATS,
        where,
        "unary_logsumexp",
        "smaller than the logsumexp of the candidates alone, so not over the full vocabulary",
    )


def _first_bad_step(
    bad: npt.NDArray[Any], where: str, tensor: str, message: str, *, offset: int = 0
) -> None:
    if np.any(bad):
        step = int(np.argmax(bad.reshape(bad.shape[0], -1).any(axis=1)))
        _fail(where, tensor, message, step=offset + step)
