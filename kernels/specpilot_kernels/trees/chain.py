"""The chain that stock drafts: the best candidate at each position given the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Tree


def chain(
    candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any], *, length: int | None = None
) -> Tree:
    """The greedy walk through one lattice as a tree of one path (paper §2.1, stock).

    candidate_ids [L, K] int32, edge [L, K, K] float32. `length` stops the walk early. Equal scores
    go to the lower candidate index, as argmax does. Raises ValueError on shapes.
    """
    candidates = as_candidates(candidate_ids, 2)
    edges = as_edges(edge, candidates)
    n_nodes = candidates.shape[0] if length is None else min(length, candidates.shape[0])
    if n_nodes < 0:
        raise ValueError(f"length must not be negative: {length}")
    token = np.empty(n_nodes, dtype=np.int32)
    score = np.empty(n_nodes, dtype=np.float64)
    index, path = 0, 0.0
    for position in range(n_nodes):
        row = edges[position, index if position > 0 and edges.shape[1] > 1 else 0]
        index = int(row.argmax())
        path += float(row[index])
        token[position] = candidates[position, index]
        score[position] = path
    steps = np.arange(n_nodes, dtype=np.int32)
    return Tree(token, steps - np.int32(1), steps + np.int32(1), score)
