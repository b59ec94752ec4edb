"""Recordings from files that other engines' hooks wrote: raw scores and answers to lattices.

What drafters give are logits, in whatever float type they ran. Only their log-softmax over one
predecessor's candidates may be added along a path, so that is what a lattice holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_checks import check_recording
from specpilot_cli.replay.raw_checks import RawTensors
from specpilot_cli.schema.lattice import (
    DrafterKind,
    LatticeMetadata,
    LatticeRecording,
    LatticeRequest,
    join_ids,
)
from specpilot_cli.schema.outputs import OutputRecord, outputs_by_id
from specpilot_cli.schema.tree_recording import TreeRecording

Arrays = Mapping[str, npt.NDArray[Any]]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

_CHUNK_STEPS = 256

#: Tensors that a raw file must hold, by what drafted; besides `step_request`, `step_position`.
RAW_NEEDS: dict[DrafterKind, tuple[str, ...]] = {
    "dflash2": ("candidate_ids", "scores", "unary", "unary_logsumexp"),
    "dspark": ("candidate_ids", "unary", "unary_logsumexp", "stock_choice"),
    "dflash": ("candidate_ids", "unary", "unary_logsumexp"),
    "eagle": ("node_offsets", "node_token", "node_parent", "node_log_prob"),
}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the raw file cannot say of itself; the files are named in errors."""

    kind: DrafterKind
    mode: Literal["dense", "anchored"]
    engine: str
    target_sha256: str
    drafter_sha256: str
    block: int | None = None
    raw_file: str = "RAW"
    outputs_file: str = "--outputs"


@dataclass(frozen=True, slots=True, eq=False)
class MarkovHead:
    """DSpark's Markov head (paper Eq. 1): w1, w2 [V, r] float32, rows by token id."""

    w1: Float32
    w2: Float32


def convert_lattice(
    raw: Arrays,
    outputs: Sequence[OutputRecord],
    provenance: Provenance,
    *,
    markov: MarkovHead | None = None,
) -> LatticeRecording:
    """A lattice recording from raw tensors and the answers that the steps index.

    raw: `RAW_NEEDS` of the kind, any float type, with `step_request` [S], the line of the answer,
    and `step_position` [S], the anchor's index in it. `dspark` needs `scores` or `markov`. Raises
    InputError on what is missing, on values that a cast would change, and as `check_recording`.
    """
    tensors = _required(raw, provenance)
    optional = [name for name in ("scores", "stock_choice") if name in raw]
    tensors.check_axes((*_named(provenance.kind), *optional))
    ids = tensors.whole("candidate_ids", np.int32)
    unary, norm = tensors.real("unary"), tensors.real("unary_logsumexp")
    index = _index(tensors, outputs, provenance)
    if provenance.kind == "dflash":
        edge = (unary - norm[..., None])[:, :, None, :]
        best = unary.argmax(axis=-1)[..., None]
        stock = np.take_along_axis(ids, best, axis=-1)[..., 0]
    else:
        if "scores" in tensors:
            edge = selector_edges(tensors.real("scores"))
        else:
            edge = markov_edges(ids, unary, _anchors(index), _head(markov))
        stock = _stock_choice(tensors, ids, edge)
    block = provenance.block
    if block is None:
        block = ids.shape[1] + (0 if provenance.kind == "dspark" else 1)
    recording = LatticeRecording(
        metadata=_metadata(provenance, outputs, block),
        candidate_ids=ids,
        edge=edge,
        unary=unary,
        unary_logsumexp=norm,
        stock_choice=stock,
        **index,
    )
    check_recording(recording, provenance.raw_file)
    return recording


def convert_trees(
    raw: Arrays, outputs: Sequence[OutputRecord], provenance: Provenance
) -> TreeRecording:
    """A recording of sequential trees; `raw` as in `RAW_NEEDS["eagle"]`, else as for lattices."""
    from specpilot_cli.io.tree_file import check_structure, node_depths

    tensors = _required(raw, provenance)
    tensors.check_axes(_named("eagle"))
    recording = TreeRecording(
        metadata=_metadata(provenance, outputs, 2),
        node_offsets=tensors.whole("node_offsets", np.int64),
        node_token=tensors.whole("node_token", np.int32),
        node_parent=tensors.whole("node_parent", np.int32),
        node_log_prob=tensors.real("node_log_prob"),
        **_index(tensors, outputs, provenance),
    )
    check_structure(recording, provenance.raw_file)
    deepest = int(node_depths(recording).max(initial=1))
    metadata = _metadata(provenance, outputs, deepest + 1)
    return TreeRecording(metadata, **recording.tensors())


def selector_edges(scores: npt.NDArray[Any]) -> Float32:
    """DFlash2's pairwise scores [S, L, K, K] as log-probabilities, rows equal at position 0."""
    from specpilot_kernels.trees import edge_log_probs

    edge = edge_log_probs(scores)
    edge[:, 0] = edge[:, 0, :1]
    return edge


def markov_edges(ids: Int32, unary: Float32, anchors: Int32, head: MarkovHead) -> Float32:
    """Eq. 1: log-softmax over the candidates y of base(y) + ⟨W1[previous], W2[y]⟩.

    ids, unary [S, L, K]: the backbone's best tokens and their logits; anchors [S]: the token before
    position 0. Raises InputError on a token that the head does not know.
    """
    from specpilot_kernels.trees import edge_log_probs

    most = max(int(ids.max(initial=0)), int(anchors.max(initial=0)))
    if most >= len(head.w1) or most >= len(head.w2):
        raise InputError(
            f"token {most} is beyond the Markov head's {min(len(head.w1), len(head.w2))} rows",
            where="--drafter",
            hint="the drafter and the recording do not belong together",
        )
    n_candidates = ids.shape[2]
    edge = np.empty((*ids.shape, n_candidates), dtype=np.float32)
    for start in range(0, len(ids), _CHUNK_STEPS):
        part = slice(start, start + _CHUNK_STEPS)
        first = np.repeat(anchors[part, None, None], n_candidates, axis=2)
        before = np.concatenate([first, ids[part, :-1]], axis=1)  # [s, L, K]
        pair = head.w1[before] @ np.swapaxes(head.w2[ids[part]], 2, 3)
        edge[part] = edge_log_probs(unary[part][:, :, None, :] + pair)
    return edge


def _anchors(index: Arrays) -> Int32:
    at = index["output_offsets"][index["step_request"]] + index["step_position"]
    return np.asarray(index["output_ids"][at], dtype=np.int32)


def _head(markov: MarkovHead | None) -> MarkovHead:
    if markov is None:
        raise InputError(
            "a dspark file without tensor `scores` needs the drafter's Markov head",
            where="--drafter",
            hint="name the drafter's folder",
        )
    return markov


def _stock_choice(raw: RawTensors, ids: Int32, edge: Float32) -> Int32:
    """Stock's own tokens; DFlash2's are the greedy walk over the selector's scores."""
    if "stock_choice" in raw:
        return raw.whole("stock_choice", np.int32)
    from specpilot_kernels.trees import chain_batch

    return chain_batch(ids, edge).token


def _named(kind: DrafterKind) -> tuple[str, ...]:
    return ("step_request", "step_position", *RAW_NEEDS[kind])


def _required(raw: Arrays, provenance: Provenance) -> RawTensors:
    missing = [name for name in _named(provenance.kind) if name not in raw]
    if missing:
        raise InputError(
            f"a raw {provenance.kind} recording needs the tensor `{missing[0]}`",
            where=provenance.raw_file,
            hint=f"it needs {', '.join(_named(provenance.kind))}",
        )
    return RawTensors(raw, provenance.raw_file)


def _index(
    raw: RawTensors, outputs: Sequence[OutputRecord], provenance: Provenance
) -> dict[str, npt.NDArray[Any]]:
    """The six tensors that say which tokens belong to which step, steps in order."""
    request = raw.whole("step_request", np.int32)
    position = raw.whole("step_position", np.int64)
    unknown = (request < 0) | (request >= len(outputs))
    if np.any(unknown):
        raise raw.error(
            "step_request",
            f"it names answer {request[unknown][0]}, counted from 0, but there are {len(outputs)} "
            f"in `{provenance.outputs_file}`",
            at=unknown,
        )
    prompts = [_tokens(record, "prompt_ids", provenance.outputs_file) for record in outputs]
    answers = [_tokens(record, "output_ids", provenance.outputs_file) for record in outputs]
    lengths = np.array([len(answer) for answer in answers])
    outside = (position < 0) | (position >= lengths[request])
    if np.any(outside):
        raise raw.error(
            "step_position",
            f"{position[outside][0]} is outside its answer; it is the index of the step's last "
            "committed token there",
            at=outside,
        )
    return {
        **dict(zip(("prompt_ids", "prompt_offsets"), join_ids(prompts), strict=True)),
        **dict(zip(("output_ids", "output_offsets"), join_ids(answers), strict=True)),
        "step_request": request,
        "step_position": position,
    }


def _tokens(record: OutputRecord, field: str, where: str) -> Int32:
    ids: tuple[int, ...] = getattr(record, field)
    if max(ids) > np.iinfo(np.int32).max:
        raise InputError(
            f"request `{record.request_id}`: `{field}` holds {max(ids)}, which is no token id",
            where=where, hint="token ids are below 2^31",
        )  # fmt: skip
    return np.asarray(ids, dtype=np.int32)


def _metadata(
    provenance: Provenance, outputs: Sequence[OutputRecord], block: int
) -> LatticeMetadata:
    outputs_by_id(outputs, where=provenance.outputs_file)
    return LatticeMetadata(
        mode=provenance.mode,
        block=block,
        engine=provenance.engine,
        requests=[
            LatticeRequest(request_id=record.request_id, benchmark=record.benchmark)
            for record in outputs
        ],
        target_sha256=provenance.target_sha256,
        drafter_sha256=provenance.drafter_sha256,
        drafter_kind=provenance.kind,
    )
