"""What `gpu.py` does for tensors on the CPU, with the builders of this package.

Lattices, trees and tables as there; every function fills the tensors that it is given.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from specpilot_kernels.trees.accept import follow
from specpilot_kernels.trees.best_first import best_first_batch
from specpilot_kernels.trees.lattice import edge_log_probs, marginal_log_probs
from specpilot_kernels.trees.types import Int32

_NO_PARENT = -2


def build(
    candidate_ids: torch.Tensor,
    scores: torch.Tensor,
    anchor: torch.Tensor,
    logsumexp: torch.Tensor | None,
    calibration: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
    max_depth: int,
    *out: torch.Tensor,
) -> None:
    """Build trees and tables; `out` is the tensors of `DeviceTrees`."""
    if logsumexp is None:
        table = None if calibration is None else calibration.numpy()
        edge = edge_log_probs(scores.numpy(), table)
    else:
        edge = marginal_log_probs(scores.numpy(), logsumexp.numpy()[:, :, None])
    token, parent, depth, score, ancestors, tap, position = (tensor.numpy() for tensor in out)
    trees = best_first_batch(candidate_ids.numpy(), edge, token.shape[1] - 1, max_depth=max_depth)
    token[:] = anchor.numpy()[:, None]
    parent[:], depth[:], score[:] = _NO_PARENT, -1, -np.inf
    parent[:, 0], depth[:, 0], score[:, 0] = -1, 0, 0.0
    for request in range(len(trees)):
        tree = trees[request]
        rows = slice(1, tree.n_nodes + 1)
        token[request, rows], parent[request, rows] = tree.token, tree.parent + 1
        with np.errstate(over="ignore"):  # a sum below float32's range is -inf there
            depth[request, rows], score[request, rows] = tree.depth, tree.score + 0.0  # not -0
    position[:] = np.maximum(depth, 0)
    if prefix_lens is not None:
        position += prefix_lens.numpy()[:, None]
    _tables(parent, ancestors, tap)


def _tables(parent: Int32, ancestors: npt.NDArray[np.uint64], tap: Int32) -> None:
    """Fill ancestors [B, R, words] and tap [B, R, 4] from parent [B, R]."""
    requests, n_rows = np.arange(parent.shape[0]), parent.shape[1]
    ancestors[:] = 0
    for row in range(n_rows):
        above, used = parent[:, row], parent[:, row] != _NO_PARENT
        ancestors[above >= 0, row] = ancestors[requests, above][above >= 0]
        ancestors[used, row, row // 64] |= np.uint64(1 << row % 64)
    at = np.broadcast_to(np.arange(n_rows, dtype=np.int32), parent.shape)
    for place in (3, 2, 1, 0):
        tap[:, :, place] = at
        above = np.take_along_axis(parent, np.maximum(at, 0), axis=1)
        at = np.where(at >= 0, above, at - 1)
    tap[parent == _NO_PARENT, :3] = (-3, -2, -1)


def accept(
    token: torch.Tensor,
    parent: torch.Tensor,
    target_argmax: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    enabled: torch.Tensor | None,
    *out: torch.Tensor,
) -> None:
    """Follow the target through each tree; `out` is the fields of `AcceptedPaths`."""
    path, n_accepted, bonus, committed, place, length, n_committed = (
        tensor.numpy() for tensor in out
    )
    accepts = enabled is None or int(enabled[0]) != 0
    path[:], committed[:] = -1, 0
    place[:] = token.shape[1] * np.arange(token.shape[0])[:, None]
    length[:] = 0 if prefix_lens is None else prefix_lens.numpy()
    for request in range(token.shape[0]):
        wanted = target_argmax[request].numpy()
        above = (parent[request, 1:] - 1).tolist()
        nodes = follow(token[request, 1:].tolist(), above, wanted.tolist())
        rows = np.array([0, *(node + 1 for node in nodes)])[: None if accepts else 0]
        path[request, : rows.size], place[request, : rows.size] = rows, place[request, 0] + rows
        committed[request, : rows.size] = wanted[rows]
        n_accepted[request], n_committed[request] = rows.size - 1, rows.size
        length[request] += rows.size
        bonus[request] = wanted[rows[-1] if accepts else 0]
