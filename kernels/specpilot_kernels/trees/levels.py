"""Trees grown level by level: EAGLE-2 and OPT-Tree (the builders of paper §6.4's comparison).

Both expand the best nodes of the last level and keep the best nodes of all levels at the end. They
differ in how many they expand. EAGLE-2 expands `top_k` per level whatever the budget, so it may
miss a probable path whose ancestor was not among its level's best. OPT-Tree expands as many as the
budget, which misses nothing: its tree is the best-first tree.

Ties go to the smaller depth, then to the parent that ranked higher, then to the lower candidate
index, so a node never comes before its parent even where all scores are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._native import NEVER, many_levels
from specpilot_kernels.trees._walks import trace_trees
from specpilot_kernels.trees.best_first import check_budget, depth_limits, paths_in_lattice
from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Float64, Int32, Tree, TreeBatch

Shape = tuple[int, int, int, int, bool]


def eagle2(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    top_k: int,
    max_depth: int | None = None,
) -> Tree:
    """EAGLE-2's dynamic tree: `top_k` children of the `top_k` best of a level, then a rerank.

    candidate_ids [L, K] int32, edge [L, K or 1, K] float32. With top_k ≥ n_nodes it is the
    best-first tree. Raises ValueError on shapes, a negative budget or top_k below 1.
    """
    candidates = as_candidates(candidate_ids, 2)
    edges = as_edges(edge, candidates)
    return eagle2_batch(candidates[None], edges[None], n_nodes, top_k=top_k, max_depth=max_depth)[0]


def eagle2_batch(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    top_k: int,
    max_depth: int | None = None,
) -> TreeBatch:
    """`eagle2` for `s` lattices: candidate_ids [s, L, K], edge [s, L, K or 1, K]."""
    candidates = as_candidates(candidate_ids, 3)
    shape = _eagle2_shape(candidates.shape[1:], n_nodes, top_k, max_depth)
    return TreeBatch(*many_levels(candidates, as_edges(edge, candidates), shape))


def opt_tree(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | None = None,
) -> Tree:
    """OPT-Tree with its stopping rule at no gain: levels of `n_nodes`, the best `n_nodes` of all.

    Shapes and errors as for `eagle2`. Nodes and scores are those of `best_first`.
    """
    candidates = as_candidates(candidate_ids, 2)
    edges = as_edges(edge, candidates)
    return opt_tree_batch(candidates[None], edges[None], n_nodes, max_depth=max_depth)[0]


def opt_tree_batch(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | None = None,
) -> TreeBatch:
    """`opt_tree` for `s` lattices: candidate_ids [s, L, K], edge [s, L, K or 1, K]."""
    candidates = as_candidates(candidate_ids, 3)
    shape = _opt_tree_shape(candidates.shape[1:], n_nodes, max_depth)
    return TreeBatch(*many_levels(candidates, as_edges(edge, candidates), shape))


def levels_pop_index(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    truth: npt.NDArray[Any],
    budgets: npt.NDArray[Any],
    *,
    top_k: int | None,
    counted_depth: npt.NDArray[Any] | None = None,
) -> tuple[Int32, Float64]:
    """`trace.truth_pop_index` for EAGLE-2 of that `top_k`, or for OPT-Tree where it is None.

    EAGLE-2's growth does not depend on the budget, so its smaller trees are prefixes; OPT-Tree's
    are, because every one of them is a best-first tree.
    """
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    steps = np.ascontiguousarray(budgets, dtype=np.int64)
    n_lattices, n_positions, _ = candidates.shape
    largest = int(steps[-1])
    if top_k is None:
        shape = _opt_tree_shape(candidates.shape[1:], largest, None)
    else:
        shape = _eagle2_shape(candidates.shape[1:], largest, top_k, None)
    counted = depth_limits(n_lattices, n_positions, counted_depth)
    wanted = np.ascontiguousarray(truth, dtype=np.int32)
    trees = many_levels(candidates, edges, shape)
    return trace_trees(*trees, wanted, steps, counted, int(NEVER))


def _eagle2_shape(
    lattice: tuple[int, ...], n_nodes: int, top_k: int, max_depth: int | None
) -> Shape:
    check_budget(n_nodes, max_depth)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1: {top_k}")
    n_positions, n_candidates = lattice
    depth = n_positions if max_depth is None else min(max_depth, n_positions)
    budget = min(n_nodes, paths_in_lattice(n_positions, n_candidates, n_nodes))
    return budget, depth, top_k, min(top_k, n_candidates), False


def _opt_tree_shape(lattice: tuple[int, ...], n_nodes: int, max_depth: int | None) -> Shape:
    budget, depth, width, branch, _ = _eagle2_shape(lattice, n_nodes, max(n_nodes, 1), max_depth)
    return budget, depth, width, branch, True
