"""Where the true continuation lies in a tree's pop order, for many anchors at once.

A best-first tree of budget N is the first N pops of one build (paper §2.2, "prefix-closed"). So the
pop index of each node on the true path says, for every budget, how many drafts would have been
accepted, and one build per anchor answers the whole curve τ(N).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._native import NEVER, trace_truth
from specpilot_kernels.trees._walks import visited_anchors
from specpilot_kernels.trees.best_first import check_budget, depth_limits, paths_in_lattice
from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Float64, Int32

__all__ = ["NEVER", "truth_pop_index", "visited_anchors"]


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
    return trace_truth(candidates, edges, wanted, steps, limits, counted, width)
