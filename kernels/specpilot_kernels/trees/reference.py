"""The readable definition of a best-first tree, in float64 with `heapq` (paper §2.2, §4.2).

Start from the most probable child of the root. Pop the open node with the highest path score, add
it to the tree, and open two more: its next best sibling and its own best child. A node is open
only after its parent is in the tree, so every prefix of the pop order is a tree by itself; and
because log-probabilities are never positive, the first N pops are N most probable nodes.

Ties: higher score first, then smaller depth, then whichever was opened first; among the candidates
of one predecessor, the lower index. The rule only fixes which of several equal trees is built.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees.lattice import as_candidates, as_edges, full_scores
from specpilot_kernels.trees.types import Tree


def best_first_reference(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | None = None,
) -> Tree:
    """Build the best-first tree of one lattice; same arguments and result as `best_first`."""
    candidates = as_candidates(candidate_ids, 2)  # [L, K]
    scores = full_scores(as_edges(edge, candidates))  # [L, K or 1, K]
    n_positions = candidates.shape[0]
    depth_limit = n_positions if max_depth is None else min(max_depth, n_positions)
    sorted_rows: dict[tuple[int, int], list[int]] = {}

    def ranked(position: int, predecessor: int) -> list[int]:
        # All nodes with the same depth and candidate share this list: the lattice is first-order.
        key = (position, predecessor if scores.shape[1] > 1 else 0)
        if key not in sorted_rows:
            sorted_rows[key] = np.argsort(-scores[key], kind="stable").tolist()
        return sorted_rows[key]

    token: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    score: list[float] = []
    candidate: list[int] = []  # candidate index of every node
    heap: list[tuple[float, int, int, int, int]] = []  # (-score, depth, opened, parent, rank)
    opened = 0

    def open_node(parent_node: int, rank: int) -> None:
        nonlocal opened
        position = 0 if parent_node < 0 else depth[parent_node]
        predecessor = 0 if parent_node < 0 else candidate[parent_node]
        if position >= depth_limit or rank >= candidates.shape[1]:
            return
        index = ranked(position, predecessor)[rank]
        row = predecessor if scores.shape[1] > 1 else 0
        base = 0.0 if parent_node < 0 else score[parent_node]
        path = base + float(scores[position, row, index])
        heapq.heappush(heap, (-path, position + 1, opened, parent_node, rank))
        opened += 1

    open_node(-1, 0)
    while heap and len(token) < n_nodes:
        negative, node_depth, _, parent_node, rank = heapq.heappop(heap)
        predecessor = 0 if parent_node < 0 else candidate[parent_node]
        index = ranked(node_depth - 1, predecessor)[rank]
        token.append(int(candidates[node_depth - 1, index]))
        parent.append(parent_node)
        depth.append(node_depth)
        score.append(-negative)
        candidate.append(index)
        open_node(parent_node, rank + 1)
        open_node(len(token) - 1, 0)
    return Tree(
        np.array(token, dtype=np.int32),
        np.array(parent, dtype=np.int32),
        np.array(depth, dtype=np.int32),
        np.array(score, dtype=np.float64),
    )
