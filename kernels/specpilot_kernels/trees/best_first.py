"""Best-first draft trees with conditional scores, one lattice or a batch (paper §2.2, §4.2).

The rule, its ties and why every prefix is a tree: `reference.py`. Here the loop is compiled; where
numba is absent, single trees come from the reference itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._jit import HAVE_NUMBA
from specpilot_kernels.trees._native import many_trees, one_tree
from specpilot_kernels.trees.lattice import (
    as_candidates,
    as_edges,
    edge_log_probs,
    marginal_log_probs,
)
from specpilot_kernels.trees.reference import best_first_reference
from specpilot_kernels.trees.types import Int32, Tree, TreeBatch


def best_first(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | None = None,
) -> Tree:
    """The `n_nodes` most probable paths of one lattice as a tree, in nonincreasing path score.

    candidate_ids [L, K] int32; edge [L, K, K] float32 log-probabilities (predecessor, candidate),
    or [L, 1, K] where the predecessor does not matter. `max_depth` caps the depth below L. The
    tree is smaller than `n_nodes` only if the lattice has no more paths. Path scores are summed in
    float64. Any tree of a smaller budget is a prefix of this one. Raises ValueError on shapes.
    """
    check_budget(n_nodes, max_depth)
    candidates = as_candidates(candidate_ids, 2)
    edges = as_edges(edge, candidates)
    if not HAVE_NUMBA:
        return best_first_reference(candidates, edges, n_nodes, max_depth=max_depth)
    limit = _depth_limit(candidates.shape[0], max_depth)
    return Tree(*one_tree(candidates, edges, n_nodes, limit))


def best_first_batch(
    candidate_ids: npt.NDArray[Any],
    edge: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | npt.NDArray[Any] | None = None,
) -> TreeBatch:
    """`best_first` for `s` lattices of one shape: candidate_ids [s, L, K], edge [s, L, K or 1, K].

    `max_depth` is one cap for all or one per lattice, [s] (paper §4.4, per-request block).
    """
    check_budget(n_nodes, None)
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    limits = depth_limits(candidates.shape[0], candidates.shape[1], max_depth)
    width = min(n_nodes, paths_in_lattice(candidates.shape[1], candidates.shape[2], n_nodes))
    return TreeBatch(*many_trees(candidates, edges, width, limits))


def marginal(
    candidate_ids: npt.NDArray[Any],
    unary: npt.NDArray[Any],
    unary_logsumexp: npt.NDArray[Any],
    n_nodes: int,
    *,
    max_depth: int | None = None,
) -> Tree:
    """The tree that DDTree builds: best-first by each candidate's own probability (paper §2.2).

    candidate_ids [L, K] int32, unary [L, K] logits, unary_logsumexp [L] over the full vocabulary.
    A candidate scores the same below every parent, which is what conditional scores improve on.
    """
    scores = marginal_log_probs(unary, unary_logsumexp)
    return best_first(candidate_ids, scores[..., None, :], n_nodes, max_depth=max_depth)


def warm_up() -> None:
    """Compile builder and log-softmax now, or load them from numba's cache.

    The first tree of a process otherwise pays for it: up to seconds without a cache, which must
    not fall into a timed request. `marginal` and any lattice size use the same machine code.
    """
    best_first(np.zeros((1, 1), dtype=np.int32), edge_log_probs(np.zeros((1, 1, 1))), 1)


def check_budget(n_nodes: int, max_depth: int | None) -> None:
    """Raise ValueError on a negative node budget or depth cap."""
    if n_nodes < 0:
        raise ValueError(f"n_nodes must not be negative: {n_nodes}")
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth must not be negative: {max_depth}")


def depth_limits(
    n_lattices: int, n_positions: int, max_depth: int | npt.NDArray[Any] | None
) -> Int32:
    """The depth cap of each lattice, [s] int32, never above `n_positions`."""
    cap = n_positions if max_depth is None else max_depth
    limits = np.broadcast_to(np.asarray(cap, dtype=np.int32), (n_lattices,))
    if np.any(limits < 0):
        raise ValueError("max_depth must not be negative")
    return np.minimum(limits, np.int32(n_positions))


def paths_in_lattice(n_positions: int, n_candidates: int, stop_at: int) -> int:
    """Paths a lattice holds, K + K^2 + … + K^L, counted no further than `stop_at`."""
    total, level = 0, 1
    for _ in range(n_positions):
        level *= n_candidates
        total += level
        if total >= stop_at:
            break
    return total


def _depth_limit(n_positions: int, max_depth: int | None) -> int:
    return n_positions if max_depth is None else min(max_depth, n_positions)
