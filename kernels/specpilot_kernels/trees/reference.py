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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees.lattice import as_candidates, as_edges, full_scores
from specpilot_kernels.trees.types import Tree


class _Node(NamedTuple):
    candidate: int  # index among the candidates of its position
    parent: int
    depth: int
    score: float


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
    ranking = np.argsort(-scores, axis=-1, kind="stable")  # candidates of each row, best first
    n_positions, n_rows, n_candidates = scores.shape
    depth_limit = n_positions if max_depth is None else min(max_depth, n_positions)
    nodes: list[_Node] = []
    heap: list[tuple[float, int, int, int, int]] = []  # (-score, depth, opened, parent, rank)
    opened = 0

    def open_node(parent: int, rank: int) -> None:
        nonlocal opened
        depth, base = (nodes[parent].depth, nodes[parent].score) if parent >= 0 else (0, 0.0)
        if depth < depth_limit and rank < n_candidates:
            row = row_of(parent)
            score = base + float(scores[depth, row, ranking[depth, row, rank]])
            heapq.heappush(heap, (-score, depth + 1, opened, parent, rank))
            opened += 1

    def row_of(parent: int) -> int:
        return nodes[parent].candidate if parent >= 0 and n_rows > 1 else 0

    open_node(-1, 0)
    while heap and len(nodes) < n_nodes:
        negative, depth, _, parent, rank = heapq.heappop(heap)
        candidate = int(ranking[depth - 1, row_of(parent), rank])
        nodes.append(_Node(candidate, parent, depth, -negative))
        open_node(parent, rank + 1)
        open_node(len(nodes) - 1, 0)
    return Tree(
        np.array([candidates[n.depth - 1, n.candidate] for n in nodes], dtype=np.int32),
        np.array([n.parent for n in nodes], dtype=np.int32),
        np.array([n.depth for n in nodes], dtype=np.int32),
        np.array([n.score for n in nodes], dtype=np.float64),
    )
