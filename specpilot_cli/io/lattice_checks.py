"""What a lattice recording must satisfy before anything is computed from it.

Recordings also come from other engines, and a wrong one gives a plausible τ: padding ids twice in a
row, scores that were never normalised, positions shifted by one. Each check names the tensor and
the first step at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.schema.lattice import TENSORS, Axes, LatticeMetadata, LatticeRecording

# Float32 log-softmax over 16 candidates is good to about 1e-6 nats; the margin is for GPU kernels.
NORMALISATION_TOLERANCE_NATS = 1e-4
# The full-vocabulary logsumexp may come from another kernel than the candidates' own logits.
LOGSUMEXP_TOLERANCE_NATS = 1e-2
# How far a logsumexp can lie above the best logit: all of 2^31 token ids as likely as the best.
LARGEST_VOCABULARY_NATS = 31 * math.log(2)
_CHUNK_STEPS = 512  # bounds the float temporaries of the edge checks to a few tens of MiB


def check_recording(recording: LatticeRecording, where: str) -> None:
    """Raise InputError unless `recording` is well formed; `where` names the file."""
    tensors = recording.tensors()
    for name, array in tensors.items():
        if array.dtype != np.dtype(TENSORS[name][0]):
            _fail(where, name, f"dtype is {array.dtype}, not {TENSORS[name][0]}")
    check_shapes({name: array.shape for name, array in tensors.items()}, recording.metadata, where)
    check_index(
        recording.metadata,
        prompt_offsets=recording.prompt_offsets,
        output_offsets=recording.output_offsets,
        n_prompt_tokens=recording.prompt_ids.size,
        n_output_tokens=recording.output_ids.size,
        step_request=recording.step_request,
        step_position=recording.step_position,
        where=where,
    )
    check_content(recording, where)


def check_content(recording: LatticeRecording, where: str, *, first_step: int = 0) -> None:
    """Check tokens and scores; `first_step` is where this part begins in its file."""
    for name in ("prompt_ids", "output_ids"):
        ids: npt.NDArray[np.int32] = getattr(recording, name)
        if ids.size and ids.min() < 0:
            _fail(where, name, "negative token id")
    _check_candidates(recording, where, first_step)
    if recording.conditional:
        _check_edges(recording, where, first_step)
    _check_unary(recording, where, first_step)


def _fail(where: str, tensor: str, message: str, *, step: int | None = None) -> NoReturn:
    place = f"tensor `{tensor}`" if step is None else f"tensor `{tensor}`, step {step}"
    raise InputError(
        f"bad lattice file: {place}: {message}",
        where=where,
        hint="record it again, or fix the exporter; docs/replay.md defines every tensor",
    )


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    metadata: LatticeMetadata,
    where: str,
    axes_of: Mapping[str, tuple[str, Axes]] = TENSORS,
) -> dict[str, int]:
    """Check that all tensors agree on their axes, and return the axes' sizes by name."""
    sizes: dict[str, int] = {"R + 1": len(metadata.requests) + 1}
    for name, shape in shapes.items():
        axes = axes_of[name][1]
        if len(shape) != len(axes):
            _fail(where, name, f"shape {list(shape)} does not have the axes {list(axes)}")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                _fail(
                    where, name, f"axis {axis} is {size}, but {sizes[axis]} elsewhere in the file"
                )
    block, n_positions = metadata.block, sizes["L"]
    if n_positions not in (block - 1, block) or n_positions < 1 or sizes["K"] < 1:
        _fail(
            where,
            "candidate_ids",
            f"{n_positions} positions of {sizes['K']} candidates do not fit block {block}, "
            "which drafts block - 1 or block positions",
        )
    return sizes


def check_index(
    metadata: LatticeMetadata,
    *,
    prompt_offsets: npt.NDArray[np.int64],
    output_offsets: npt.NDArray[np.int64],
    n_prompt_tokens: int,
    n_output_tokens: int,
    step_request: npt.NDArray[np.int32],
    step_position: npt.NDArray[np.int64],
    where: str,
) -> None:
    """Check that offsets cover the tokens and that steps are where the recording's mode wants."""
    for name, offsets, total in (
        ("prompt_offsets", prompt_offsets, n_prompt_tokens),
        ("output_offsets", output_offsets, n_output_tokens),
    ):
        if offsets[0] != 0 or offsets[-1] != total or np.any(np.diff(offsets) < 0):
            ids_name = name.replace("_offsets", "_ids")
            _fail(where, name, f"must rise from 0 to {total}, the length of `{ids_name}`")
    empty = np.flatnonzero(np.diff(prompt_offsets) == 0)
    if empty.size:
        name = metadata.requests[int(empty[0])].request_id
        _fail(where, "prompt_offsets", f"request `{name}` has no prompt token")
    lengths = np.diff(output_offsets)
    _check_steps(step_request, step_position, lengths, where)
    if metadata.mode == "dense":
        _check_dense(metadata, step_request, step_position, lengths, where)


def _check_steps(
    request: npt.NDArray[np.int32],
    position: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    where: str,
) -> None:
    bad = (request < 0) | (request >= lengths.size)
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


def _check_dense(
    metadata: LatticeMetadata,
    request: npt.NDArray[np.int32],
    position: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    where: str,
) -> None:
    counts = np.bincount(request, minlength=lengths.size)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    # The last output token may serve as an anchor too: nothing recorded follows it.
    short = counts < np.maximum(lengths - 1, 0)
    gap = position != np.arange(request.size) - first[request]
    short[request[gap]] = True
    if np.any(short):
        index = int(np.argmax(short))
        _fail(
            where,
            "step_position",
            f"mode is dense, but request `{metadata.requests[index].request_id}` lacks a lattice "
            f"at some of its {max(int(lengths[index]) - 1, 0)} positions",
        )


def _check_candidates(recording: LatticeRecording, where: str, first: int) -> None:
    ids = recording.candidate_ids
    _first_bad_step(ids < 0, where, "candidate_ids", "negative token id", offset=first)
    ordered = np.sort(ids, axis=-1)
    _first_bad_step(
        ordered[..., 1:] == ordered[..., :-1],
        where,
        "candidate_ids",
        "the same token appears twice at one position",
        offset=first,
    )
    bad = recording.stock_choice < 0
    _first_bad_step(bad, where, "stock_choice", "negative token id", offset=first)


def _check_edges(recording: LatticeRecording, where: str, first: int) -> None:
    for start in range(0, recording.n_steps, _CHUNK_STEPS):
        edge = recording.edge[start : start + _CHUNK_STEPS]
        offset = first + start
        _first_bad_step(np.isnan(edge), where, "edge", "NaN", offset=offset)
        _first_bad_step(
            edge > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "a log-probability is above 0",
            offset=offset,
        )
        total = np.exp(edge).sum(axis=-1, dtype=np.float64)
        off = np.abs(np.log(np.maximum(total, np.finfo(np.float64).tiny)))
        _first_bad_step(
            off > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "a predecessor's probabilities do not sum to 1 (scores must be log-softmax)",
            offset=offset,
        )
        spread = np.exp(edge[:, 0]) - np.exp(edge[:, 0, :1])
        _first_bad_step(
            np.abs(spread) > NORMALISATION_TOLERANCE_NATS,
            where,
            "edge",
            "rows differ at position 0, where every predecessor is the anchor",
            offset=offset,
        )


def _check_unary(recording: LatticeRecording, where: str, first: int) -> None:
    unary, norm = recording.unary, recording.unary_logsumexp
    bad = ~np.isfinite(unary)
    _first_bad_step(bad, where, "unary", "a logit is not finite", offset=first)
    bad = ~np.isfinite(norm)
    _first_bad_step(bad, where, "unary_logsumexp", "a value is not finite", offset=first)
    peak = unary.max(axis=-1, keepdims=True).astype(np.float64)
    own = peak[..., 0] + np.log(np.exp(unary - peak).sum(axis=-1))
    _first_bad_step(
        norm < own - LOGSUMEXP_TOLERANCE_NATS,
        where,
        "unary_logsumexp",
        "smaller than the logsumexp of the candidates alone, so not over the full vocabulary",
        offset=first,
    )
    _first_bad_step(
        norm > peak[..., 0] + LARGEST_VOCABULARY_NATS,
        where,
        "unary_logsumexp",
        "larger than any vocabulary makes it above its best candidate",
        offset=first,
    )


def _first_bad_step(
    bad: npt.NDArray[Any], where: str, tensor: str, message: str, *, offset: int = 0
) -> None:
    if np.any(bad):
        step = int(np.argmax(bad.reshape(bad.shape[0], -1).any(axis=1)))
        _fail(where, tensor, message, step=offset + step)
