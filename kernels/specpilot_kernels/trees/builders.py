"""Every tree builder behind one interface: a batch of lattices and a node budget give trees.

A builder is one function `(lattices, n_nodes) -> TreeBatch`. What a method needs beyond scores
comes with the lattices: `top_k` (EAGLE-2), `accept` (Sequoia), `step_cost` (cost-aware), `truth`
(the oracle). Builders keep no state and run without the interpreter's lock, so one may be called
from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specpilot_kernels.trees.best_first import best_first_batch
from specpilot_kernels.trees.chain import chain_batch
from specpilot_kernels.trees.levels import eagle2_batch, opt_tree_batch
from specpilot_kernels.trees.sequoia import place_batch, sequoia_plan
from specpilot_kernels.trees.types import Float32, Float64, Int32, TreeBatch


@dataclass(frozen=True, slots=True, eq=False)
class Lattices:
    """`s` lattices of `L` positions with `K` candidates, and what some builders also read.

    candidate_ids [s, L, K] int32. edge [s, L, K or 1, K] float32: log-probabilities given the
    parent. unary [s, L, K] float32: log-probabilities without a parent. max_depth caps every tree.
    top_k: paths per level of EAGLE-2. accept [K] float64: Sequoia's acceptance by rank. step_cost
    [N + 1] float64: seconds of a step with 0 … N nodes. truth [s, L] int32: the tokens that really
    follow, -1 where unknown.
    """

    candidate_ids: Int32
    edge: Float32
    unary: Float32 | None = None
    max_depth: int | None = None
    top_k: int = 4
    accept: Float64 | None = None
    step_cost: Float64 | None = None
    truth: Int32 | None = None


Builder = Callable[[Lattices, int], TreeBatch]


def _chain(lattices: Lattices, n_nodes: int) -> TreeBatch:
    length = n_nodes if lattices.max_depth is None else min(n_nodes, lattices.max_depth)
    return chain_batch(lattices.candidate_ids, lattices.edge, length=length)


def _best_first(lattices: Lattices, n_nodes: int) -> TreeBatch:
    return best_first_batch(
        lattices.candidate_ids, lattices.edge, n_nodes, max_depth=lattices.max_depth
    )


def _marginal(lattices: Lattices, n_nodes: int) -> TreeBatch:
    if lattices.unary is None:
        raise ValueError("builder `marginal` needs `unary`, each candidate's own log-probability")
    scores = lattices.unary[:, :, None, :]
    return best_first_batch(lattices.candidate_ids, scores, n_nodes, max_depth=lattices.max_depth)


def _eagle2(lattices: Lattices, n_nodes: int) -> TreeBatch:
    return eagle2_batch(
        lattices.candidate_ids, lattices.edge, n_nodes,
        top_k=lattices.top_k, max_depth=lattices.max_depth,
    )  # fmt: skip


def _opt_tree(lattices: Lattices, n_nodes: int) -> TreeBatch:
    return opt_tree_batch(
        lattices.candidate_ids, lattices.edge, n_nodes, max_depth=lattices.max_depth
    )


def _sequoia(lattices: Lattices, n_nodes: int) -> TreeBatch:
    if lattices.accept is None:
        raise ValueError("builder `sequoia` needs `accept`, the acceptance of each rank")
    n_positions = lattices.candidate_ids.shape[1]
    depth = n_positions if lattices.max_depth is None else min(lattices.max_depth, n_positions)
    plan = sequoia_plan(lattices.accept, n_nodes, max_depth=depth).tree(n_nodes)
    return place_batch(plan, lattices.candidate_ids, lattices.edge)


def _cost_aware(lattices: Lattices, n_nodes: int) -> TreeBatch:
    """Best-first, each tree cut where (1 + Σ exp(score)) / step time peaks; ties: fewer nodes."""
    if lattices.step_cost is None or lattices.step_cost.shape[0] <= n_nodes:
        raise ValueError(f"builder `cost-aware` needs `step_cost` for 0 to {n_nodes} nodes")
    trees = _best_first(lattices, n_nodes)
    hoped = np.cumsum(np.exp(trees.score), axis=1)  # padding adds exp(-inf), nothing
    start = np.zeros((len(trees), 1))
    tau = 1.0 + np.concatenate([start, hoped], axis=1)
    chosen = (tau / lattices.step_cost[: tau.shape[1]]).argmax(axis=1)
    return trees.cut(np.minimum(chosen, trees.n_nodes))


def _oracle(lattices: Lattices, n_nodes: int) -> TreeBatch:
    """The one path that will be accepted: the truth while it is a candidate. An upper bound."""
    if lattices.truth is None:
        raise ValueError("builder `oracle` needs `truth`, the tokens that follow")
    hit = lattices.candidate_ids == lattices.truth[:, :, None]
    inside = np.logical_and.accumulate(hit.any(axis=-1), axis=1)[:, : lattices.max_depth]
    n_lattices, width = inside.shape[0], min(n_nodes, inside.shape[1])
    index = hit.argmax(axis=-1)
    before = np.where(np.arange(index.shape[1]) > 0, np.roll(index, 1, axis=1), 0)
    rows = before if lattices.edge.shape[2] > 1 else np.zeros_like(before)
    s, position = np.ogrid[:n_lattices, : index.shape[1]]
    score = np.cumsum(lattices.edge[s, position, rows, index], axis=1, dtype=np.float64)
    steps = np.arange(width, dtype=np.int32)
    return TreeBatch(
        np.ascontiguousarray(lattices.truth[:, :width]),
        np.tile(steps - np.int32(1), (n_lattices, 1)),
        np.tile(steps + np.int32(1), (n_lattices, 1)),
        score[:, :width],
        np.full(n_lattices, width, dtype=np.int32),
    ).cut(inside.sum(axis=1))


#: All builders by the name that `specpilot replay --list` shows.
BUILDERS: dict[str, Builder] = {
    "chain": _chain,
    "best-first": _best_first,
    "marginal": _marginal,
    "eagle-2": _eagle2,
    "opt-tree": _opt_tree,
    "sequoia": _sequoia,
    "cost-aware": _cost_aware,
    "oracle": _oracle,
}


def build(name: str, lattices: Lattices, n_nodes: int) -> TreeBatch:
    """Trees of at most `n_nodes` nodes by the builder called `name`.

    Raises KeyError on an unknown name, ValueError on shapes or where the builder lacks an input.
    """
    return BUILDERS[name](lattices, n_nodes)
