"""Recordings of sequential trees on disk: one safetensors file, checked both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_checks import check_index
from specpilot_cli.io.safetensors_stream import SafetensorsFile, write_safetensors
from specpilot_cli.io.validation import first_in_words
from specpilot_cli.schema.lattice import LatticeMetadata
from specpilot_cli.schema.tree_recording import TREE_TENSORS, TREES_KEY, TreeRecording

# A drafter's softmax in float16 or bfloat16 may end a little above 1.
_TOLERANCE_NATS = 1e-2
_DTYPES = {"int32": "I32", "int64": "I64", "float32": "F32"}


def is_tree_file(path: Path) -> bool:
    """Whether the file at `path` says that it holds sequential trees."""
    if not path.is_file():
        return False
    with SafetensorsFile(path) as file:
        return TREES_KEY in file.metadata


def write_trees(path: Path, recording: TreeRecording, *, force: bool = False) -> None:
    """Write atomically; InputError if the recording is not well formed."""
    check_trees(recording, str(path))
    document = recording.metadata.model_dump_json()
    write_safetensors(path, recording.tensors(), {TREES_KEY: document}, force=force)


def read_trees(path: Path) -> TreeRecording:
    """Read and check a recording; InputError names the file, the tensor and the step at fault."""
    with SafetensorsFile(path) as file:
        if TREES_KEY not in file.metadata:
            raise InputError(
                f"not a tree recording: no `{TREES_KEY}` entry in its metadata",
                where=str(path),
                hint="make one with `specpilot lattice convert --drafter-kind eagle`",
            )
        try:
            metadata = LatticeMetadata.model_validate_json(file.metadata[TREES_KEY])
        except ValidationError as error:
            key, problem = first_in_words(error, TREES_KEY)
            _fail(str(path), f"metadata key `{key}`", problem)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, axes) in TREE_TENSORS.items():
            info = file.info(name)
            if info.dtype != _DTYPES[dtype] or len(info.shape) != len(axes):
                _fail(
                    str(path), f"tensor `{name}`",
                    f"{info.dtype} {list(info.shape)}, not {_DTYPES[dtype]} {list(axes)}",
                )  # fmt: skip
            arrays[name] = file.read_array(name)
    recording = TreeRecording(metadata, **arrays)
    check_trees(recording, str(path))
    return recording


def check_trees(recording: TreeRecording, where: str) -> None:
    """Raise InputError unless outputs, steps and trees are well formed and agree."""
    check_structure(recording, where)
    deepest = int(node_depths(recording).max(initial=0))
    if deepest >= recording.metadata.block:
        _fail(where, "metadata key `block`", f"must exceed the deepest tree's depth, {deepest}")


def check_structure(recording: TreeRecording, where: str) -> None:
    """`check_trees`, but for the block, which says how deep the trees may be."""
    if recording.metadata.drafter_kind != "eagle":
        _fail(where, "metadata key `drafter_kind`", "must be `eagle`")
    n_requests, n_steps = len(recording.metadata.requests), recording.n_steps
    for name, length in (
        ("prompt_offsets", n_requests + 1),
        ("output_offsets", n_requests + 1),
        ("step_position", n_steps),
        ("node_offsets", n_steps + 1),
        ("node_parent", recording.node_token.size),
        ("node_log_prob", recording.node_token.size),
    ):
        if getattr(recording, name).size != length:
            _fail(where, f"tensor `{name}`", f"has {getattr(recording, name).size}, not {length}")
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
    offsets = recording.node_offsets
    if offsets[0] != 0 or offsets[-1] != recording.node_token.size or np.any(np.diff(offsets) < 0):
        _fail(where, "tensor `node_offsets`", f"must rise from 0 to {recording.node_token.size}")
    _check_nodes(recording, where)


def _check_nodes(recording: TreeRecording, where: str) -> None:
    step = recording.node_step
    index = np.arange(step.size) - recording.node_offsets[:-1][step]
    parent, score = recording.node_parent, recording.node_log_prob
    bad = (parent < -1) | (parent >= index)
    _first_bad(bad, step, where, "node_parent", "a node precedes its parent")
    bad = np.isnan(score) | (score > _TOLERANCE_NATS)
    _first_bad(bad, step, where, "node_log_prob", "NaN, or a log-probability above 0")
    _first_bad(recording.node_token < 0, step, where, "node_token", "negative token id")
    order = np.lexsort((recording.node_token, parent, step))
    same = np.zeros(step.size, dtype=np.bool_)
    for array in (step, parent, recording.node_token):
        change = array[order][1:] == array[order][:-1]
        same[1:] = change if array is step else same[1:] & change
    bad = np.zeros_like(same)
    bad[order] = same
    _first_bad(bad, step, where, "node_token", "one parent has the same token twice")
    _check_siblings(recording, where)


def _check_siblings(recording: TreeRecording, where: str) -> None:
    """The children of one node share a probability of 1."""
    step, above = recording.node_step, recording.node_above
    # A child of the anchor has no parent in the list: count it below its step instead.
    family = np.where(above < 0, step, recording.n_steps + above)
    share = np.exp(recording.node_log_prob.astype(np.float64))
    total = np.bincount(family, weights=share, minlength=1)[family]
    bad = total > np.exp(_TOLERANCE_NATS)
    if np.any(bad):
        _first_bad(
            bad, step, where, "node_log_prob",
            f"the children of one node have probabilities that add up to {total[bad][0]:.4g}",
        )  # fmt: skip


def node_depths(recording: TreeRecording) -> npt.NDArray[np.int64]:
    """Depth of every node, 1 for a child of the anchor, [N] int64."""
    above = recording.node_above
    depth = np.ones(above.size, dtype=np.int64)
    at = above.copy()
    while np.any(at >= 0):  # once per level
        inside = at >= 0
        depth[inside] += 1
        at[inside] = above[at[inside]]
    return depth


def _first_bad(
    bad: npt.NDArray[np.bool_], step: npt.NDArray[np.int64], where: str, tensor: str, message: str
) -> None:
    if np.any(bad):
        _fail(where, f"tensor `{tensor}`, step {int(step[bad.argmax()])}", message)


def _fail(where: str, place: str, message: str) -> NoReturn:
    raise InputError(
        f"bad tree recording: {place}: {message}",
        where=where,
        hint="fix the exporter; docs/replay.md defines every tensor",
    )
