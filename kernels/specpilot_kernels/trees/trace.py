"""Where the true continuation lies in a tree's pop order, for many anchors at once.

A best-first tree of budget N is the first N pops of one build (paper §2.2, "prefix-closed"). So the
pop index of each node on the true path says, for every budget, how many drafts would have been
accepted, and one build per anchor answers the whole curve τ(N).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._heap import build
from specpilot_kernels.trees._jit import native
from specpilot_kernels.trees.best_first import check_budget, depth_limits, paths_in_lattice
from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Bool, Float32, Float64, Int32, Int64

#: Pop index of a node that the build did not reach: larger than any budget.
NEVER = np.int32(np.iinfo(np.int32).max)


def truth_pop_index(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    truth: npt.NDArray[Any],
    budgets: npt.NDArray[Any],
    *,
    max_depth: int | None = None,
    counted_depth: npt.NDArray[Any] | None = None,
) -> tuple[Int32, Float64]:
    """Build one best-first tree per anchor and locate the truth in its pop order.

    candidate_ids [s, L, K] int32, edge [s, L, K or 1, K] float32, truth [s, L] int32 token ids that
    really followed (-1 where unknown), budgets [b] int, ascending, in nodes.

    Returns pop_index [s, L] int32 and expected [s, b] float64. `pop_index[i, d]` is the smallest
    budget whose tree holds the first d + 1 true tokens, NEVER if that is above the largest budget;
    it grows along a row. `expected[i, j]` is the drafter's own estimate of accepted drafts with
    budget j, Σ exp(path score) over nodes no deeper than `counted_depth[i]` ([s], default L).
    """
    check_budget(0, max_depth)
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    wanted = np.ascontiguousarray(truth, dtype=np.int32)
    steps = np.ascontiguousarray(budgets, dtype=np.int64)
    n_anchors, n_positions, n_candidates = candidates.shape
    if wanted.shape != (n_anchors, n_positions):
        raise ValueError(f"truth must have shape {(n_anchors, n_positions)}, not {wanted.shape}")
    if steps.ndim != 1 or steps.size == 0 or steps[0] < 0 or np.any(np.diff(steps) < 0):
        raise ValueError("budgets must be a nonempty ascending list of node counts")
    limits = depth_limits(n_anchors, n_positions, max_depth)
    counted = depth_limits(n_anchors, n_positions, counted_depth)
    width = min(int(steps[-1]), paths_in_lattice(n_positions, n_candidates, int(steps[-1])))
    return _trace(candidates, edges, wanted, steps, limits, counted, width)


@native
def _trace(
    candidate_ids: Int32,
    edge: Float32,
    truth: Int32,
    budgets: Int64,
    limits: Int32,
    counted: Int32,
    width: int,
) -> tuple[Int32, Float64]:
    n_anchors, n_positions = truth.shape
    pop_index = np.full((n_anchors, n_positions), NEVER, dtype=np.int32)
    expected = np.zeros((n_anchors, budgets.shape[0]), dtype=np.float64)
    candidate = np.empty(width, dtype=np.int32)
    parent = np.empty(width, dtype=np.int32)
    depth = np.empty(width, dtype=np.int32)
    score = np.empty(width, dtype=np.float64)
    heap_score = np.empty(2 * width + 2, dtype=np.float64)
    heap_key = np.empty(2 * width + 2, dtype=np.int64)
    opened = np.empty((2 * width + 2, 2), dtype=np.int32)
    for s in range(n_anchors):
        built = build(
            edge[s], width, limits[s], candidate, parent, depth, score, heap_score, heap_key, opened
        )
        current, found, slot, total = -1, 0, 0, 0.0
        for node in range(built):
            while slot < budgets.shape[0] and budgets[slot] == node:
                expected[s, slot] = total
                slot += 1
            if depth[node] <= counted[s]:
                total += np.exp(score[node])
            if found < n_positions and parent[node] == current:
                token = candidate_ids[s, depth[node] - 1, candidate[node]]
                if token == truth[s, found]:
                    pop_index[s, found] = node + 1
                    current = node
                    found += 1
        expected[s, slot:] = total
    return pop_index, expected


@native
def visited_anchors(committed: Int32, first_anchor: Int64, n_anchors: Int64) -> Bool:
    """Which anchors a policy lands on when it advances by what it commits, [s] bool.

    committed [s] int32, at least 1: tokens committed from each anchor. Request r owns the anchors
    first_anchor[r] … first_anchor[r] + n_anchors[r] - 1, one per output position, and starts at
    the first of them.
    """
    visited = np.zeros(committed.shape[0], dtype=np.bool_)
    for request in range(first_anchor.shape[0]):
        at = first_anchor[request]
        end = at + n_anchors[request]
        while at < end:
            visited[at] = True
            at += committed[at]
    return visited
