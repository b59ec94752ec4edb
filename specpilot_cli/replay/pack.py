"""Which scores of a recording trees can read: what a packed file has to keep.

A builder reads one row of scores per node that it looks below, the scores after that predecessor.
So the rows of the largest tree's nodes are enough for best-first trees of every smaller budget, for
OPT-Tree and for the cost-aware cut. EAGLE-2 also looks below nodes that its final choice drops; the
chain and the true path may leave all trees. With those rows kept, every policy gives what it gives
on the whole recording, up to the rounding to float16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import write_packed_lattice
from specpilot_cli.replay.anchors import AS_RECORDED, line_up
from specpilot_cli.schema.lattice import LatticeRecording, Packing

Int32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_CHUNK_STEPS = 512


def pack(path: Path, recording: LatticeRecording, packing: Packing, *, force: bool = False) -> None:
    """Write `recording` packed. InputError if it is packed already or has no edges to pack."""
    if recording.metadata.packed is not None or not recording.conditional:
        raise InputError(
            "nothing to pack: this recording is packed already, or has no scores given the "
            "predecessor",
            where=str(path),
            hint="copy it as it is",
        )
    kept = rows_read(recording, packing)
    write_packed_lattice(path, recording, kept, packing, force=force)


def rows_read(recording: LatticeRecording, packing: Packing) -> Bools:
    """Predecessors whose row some policy may read, [S, L, K] bool, `packing` giving the limits."""
    kept = np.zeros(recording.candidate_ids.shape, dtype=np.bool_)
    for start in range(0, recording.n_steps, _CHUNK_STEPS):
        part = slice(start, start + _CHUNK_STEPS)
        _keep_trees(kept[part], recording, part, packing)
    _keep_path(kept, recording.candidate_ids, recording.stock_choice)
    anchors = line_up(recording, AS_RECORDED)
    truth = np.full(recording.stock_choice.shape, -1, dtype=np.int32)
    truth[anchors.step] = anchors.truth
    _keep_path(kept, recording.candidate_ids, truth)
    return kept


def _keep_trees(kept: Bools, recording: LatticeRecording, part: slice, packing: Packing) -> None:
    from specpilot_kernels.trees import best_first_batch, chain_batch, eagle2_batch

    ids, edge = recording.candidate_ids[part], recording.edge[part]
    best = best_first_batch(ids, edge, packing.exact_nodes)
    _keep(kept, ids, best.token, best.depth, best.depth > 0)
    _keep_path(kept, ids, chain_batch(ids, edge).token)
    width = packing.top_k
    grown = eagle2_batch(ids, edge, width + (ids.shape[1] - 1) * width * width, top_k=width)
    expanded = np.zeros(grown.token.shape, dtype=np.bool_)
    tree, node = np.nonzero(grown.parent >= 0)
    expanded[tree, grown.parent[tree, node]] = True
    _keep(kept, ids, grown.token, grown.depth, expanded)


def _keep_path(kept: Bools, ids: Int32, path: Int32) -> None:
    """Keep the rows along paths, [s, L] token ids, as far as each stays in the lattice."""
    inside = np.logical_and.accumulate((ids == path[:, :, None]).any(axis=-1), axis=1)
    depth = np.broadcast_to(np.arange(1, path.shape[1] + 1, dtype=np.int32), path.shape)
    _keep(kept, ids, path, depth, inside)


def _keep(kept: Bools, ids: Int32, token: Int32, depth: Int32, chosen: Bools) -> None:
    """Mark what follows nodes: the row of a node's candidate at the next position, if any."""
    step, node = np.nonzero(chosen & (depth < ids.shape[1]))
    position = depth[step, node]
    candidate = (ids[step, position - 1] == token[step, node][:, None]).argmax(axis=-1)
    kept[step, position, candidate] = True
