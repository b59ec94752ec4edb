"""Sequoia: one fixed tree for all steps, optimal where only a child's rank matters (paper §6.4).

Its premise: whatever the context, the truth is the r-th best child of an accepted node with
probability `accept[r]`. A dynamic programme then finds the tree of N nodes that accepts most, once;
at run time the tree is filled with each step's candidates by rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._walks import place_ranks
from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Float64, Int32, Tree, TreeBatch


@dataclass(frozen=True, slots=True, eq=False)
class RankTree:
    """A tree of ranks. parent, rank, depth [n] int32: rank 0 is the best child; parents first.

    value: expected accepted nodes under the acceptance vector, the bonus not counted.
    """

    parent: Int32
    rank: Int32
    depth: Int32
    value: float

    @property
    def n_nodes(self) -> int:
        """Nodes, the root not counted."""
        return int(self.parent.shape[0])

    def children(self, n_ranks: int) -> Int32:
        """Row of each row's r-th child, [n + 1, n_ranks] int32; row 0 is the root, -1 = none."""
        table = np.full((self.n_nodes + 1, n_ranks), -1, dtype=np.int32)
        table[self.parent + 1, self.rank] = np.arange(1, self.n_nodes + 1)
        return table

    def reach_by_depth(self, accept: Float64, n_positions: int) -> Float64:
        """Expected accepted nodes at each depth, [n_positions + 1]; accept [K] by rank."""
        reach = np.empty(self.n_nodes, dtype=np.float64)
        for node, (parent, rank) in enumerate(
            zip(self.parent.tolist(), self.rank.tolist(), strict=True)
        ):
            reach[node] = accept[rank] * (reach[parent] if parent >= 0 else 1.0)
        sums = np.bincount(self.depth, weights=reach, minlength=n_positions + 1)
        return np.asarray(sums, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class SequoiaPlan:
    """The solved programme for one acceptance vector: the best tree at every budget."""

    accept: Float64
    _value: npt.NDArray[np.float64]
    _share: npt.NDArray[np.int32]

    def tree(self, n_nodes: int) -> RankTree:
        """The best tree of `n_nodes` nodes, or of as many as fit. ValueError beyond the plan."""
        depth, _, columns = (size - 1 for size in self._value.shape)
        if not 0 <= n_nodes <= columns:
            raise ValueError(f"the plan covers 0 to {columns} nodes, not {n_nodes}")
        fits = np.flatnonzero(np.isfinite(self._value[depth, 0, : n_nodes + 1]))
        n_used = int(fits[-1])
        nodes: list[tuple[int, int, int]] = []
        # (levels left, rank, nodes to place, parent): a forest of the children rank, rank + 1, …
        open_forests = [(depth, 0, n_used, -1)]
        while open_forests:
            levels, rank, total, parent = open_forests.pop()
            if total == 0:
                continue
            own = int(self._share[levels, rank, total])
            nodes.append((parent, rank, depth - levels + 1))
            open_forests.append((levels, rank + 1, total - own, parent))
            open_forests.append((levels - 1, 0, own - 1, len(nodes) - 1))
        arrays = np.array(nodes, dtype=np.int32).reshape(-1, 3)
        parents, ranks, depths = np.ascontiguousarray(arrays.T)
        return RankTree(parents, ranks, depths, float(self._value[depth, 0, n_used]))


def sequoia_plan(accept: npt.NDArray[Any], n_nodes: int, *, max_depth: int) -> SequoiaPlan:
    """Solve Sequoia's dynamic programme for every budget up to `n_nodes`.

    accept [K]: probability that the truth is the r-th best child, best first. It need not fall with
    the rank: children are ranks 1 to b without gaps, as in the paper of the method. Takes
    O(n_nodes² · max_depth · K). Raises ValueError on anything but probabilities.
    """
    vector = np.ascontiguousarray(accept, dtype=np.float64)
    if vector.ndim != 1 or vector.size == 0 or not np.all((vector >= 0) & (vector <= 1)):
        raise ValueError("accept must be a nonempty list of probabilities")
    if n_nodes < 0 or max_depth < 0:
        raise ValueError(f"n_nodes and max_depth must not be negative: {n_nodes}, {max_depth}")
    return SequoiaPlan(vector, *_rank_programme(vector, n_nodes, max_depth))


def place(plan: RankTree, candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any]) -> Tree:
    """Fill a tree of ranks with one lattice, candidate_ids [L, K], edge [L, K or 1, K].

    Ranks order a parent's children by (score descending, index ascending). ValueError on shapes.
    """
    candidates = as_candidates(candidate_ids, 2)
    return place_batch(plan, candidates[None], as_edges(edge, candidates)[None])[0]


def place_batch(
    plan: RankTree, candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any]
) -> TreeBatch:
    """`place` for `s` lattices: candidate_ids [s, L, K], edge [s, L, K or 1, K]."""
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    token, score = place_ranks(candidates, edges, plan.parent, plan.rank, plan.depth)
    n_lattices = token.shape[0]
    return TreeBatch(
        token,
        np.tile(plan.parent, (n_lattices, 1)),
        np.tile(plan.depth, (n_lattices, 1)),
        score,
        np.full(n_lattices, plan.n_nodes, dtype=np.int32),
    )


def truth_ranks(
    candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any], truth: npt.NDArray[Any]
) -> Int32:
    """Rank of each true token among the true parent's children, [s, L] int32.

    candidate_ids [s, L, K], edge [s, L, K or 1, K], truth [s, L]. -1 from the first position on
    whose true token is not a candidate.
    """
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    n_lattices, n_positions, n_candidates = candidates.shape
    ranks = np.full((n_lattices, n_positions), -1, dtype=np.int32)
    every, index = np.arange(n_lattices), np.arange(n_candidates)
    before = np.zeros(n_lattices, dtype=np.int64)
    on_path = np.ones(n_lattices, dtype=np.bool_)
    for position in range(n_positions):
        hit = candidates[:, position] == np.asarray(truth)[:, position, None]
        on_path &= hit.any(axis=-1)
        at = hit.argmax(axis=-1)
        row = edges[every, position, before if edges.shape[2] > 1 else 0]
        own = row[every, at][:, None]
        better = (row > own) | ((row == own) & (index < at[:, None]))
        ranks[:, position] = np.where(on_path, better.sum(axis=-1), -1)
        before = at
    return ranks


def accepted_by_rank(plan: RankTree, ranks: Int32, n_ranks: int) -> Int32:
    """Accepted nodes of one tree of ranks at every anchor, [s]; ranks from `truth_ranks`."""
    children = plan.children(n_ranks)
    at = np.zeros(ranks.shape[0], dtype=np.int32)
    accepted = np.zeros(ranks.shape[0], dtype=np.int32)
    for position in range(ranks.shape[1]):
        rank = ranks[:, position]
        at = np.where((at >= 0) & (rank >= 0), children[at, np.maximum(rank, 0)], np.int32(-1))
        accepted += at >= 0
    return accepted


def _rank_programme(
    accept: Float64, n_nodes: int, depth: int
) -> tuple[Float64, npt.NDArray[np.int32]]:
    """Sequoia's recursion over subtree sizes.

    Returns value [depth + 1, K + 1, n_nodes + 1], expected accepted nodes of the children r, r + 1,
    … with exactly m nodes in at most l levels (-inf if that many do not fit), and share, same
    shape: how many of them are in the subtree of child r.
    """
    shape = (depth + 1, accept.size + 1, n_nodes + 1)
    value, share = np.full(shape, -np.inf), np.zeros(shape, dtype=np.int32)
    value[:, :, 0] = 0.0
    for level in range(1, depth + 1):
        for rank in range(accept.size - 1, -1, -1):
            below = value[level - 1, 0]  # by nodes below the child; a zero must not hide an -inf
            fits = np.isfinite(below)
            own = np.where(fits, accept[rank] * (1.0 + np.where(fits, below, 0.0)), -np.inf)
            rest = value[level, rank + 1]
            for total in range(1, n_nodes + 1):
                found = own[:total] + rest[total - 1 :: -1]
                best = int(found.argmax())
                value[level, rank, total], share[level, rank, total] = found[best], best + 1
    return value, share
