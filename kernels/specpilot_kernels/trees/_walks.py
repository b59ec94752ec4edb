"""Compiled loops that call no other compiled function: walks through lattices and trees.

Each stands alone, so numba's disk cache of one never holds stale code of another file.
"""

from __future__ import annotations

import numpy as np

from specpilot_kernels.trees._jit import native
from specpilot_kernels.trees.types import Bool, Float32, Float64, Int32, Int64


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


@native
def many_chains(
    candidate_ids: Int32, edge: Float32, length: int
) -> tuple[Int32, Int32, Int32, Float64, Int32]:
    """The greedy walk through each lattice, [s, length]; ties go to the lower candidate index."""
    n_lattices, _, n_candidates = candidate_ids.shape
    conditional = edge.shape[2] > 1
    token = np.empty((n_lattices, length), dtype=np.int32)
    parent = np.empty((n_lattices, length), dtype=np.int32)
    depth = np.empty((n_lattices, length), dtype=np.int32)
    score = np.empty((n_lattices, length), dtype=np.float64)
    for s in range(n_lattices):
        before, path = 0, 0.0
        for position in range(length):
            row = before if conditional and position > 0 else 0
            best = 0
            for index in range(1, n_candidates):
                if edge[s, position, row, index] > edge[s, position, row, best]:
                    best = index
            path += np.float64(edge[s, position, row, best])
            token[s, position], score[s, position] = candidate_ids[s, position, best], path
            parent[s, position], depth[s, position] = position - 1, position + 1
            before = best
    return token, parent, depth, score, np.full(n_lattices, length, dtype=np.int32)


@native
def place_ranks(
    candidate_ids: Int32, edge: Float32, parent: Int32, rank: Int32, depth: Int32
) -> tuple[Int32, Float64]:
    """Fill one tree of ranks with every lattice: token [s, n] and score [s, n].

    The candidate of rank r is the one with r better ones: higher, or equal with a lower index.
    """
    n_lattices, _, n_candidates = candidate_ids.shape
    n_nodes, conditional = parent.shape[0], edge.shape[2] > 1
    token = np.empty((n_lattices, n_nodes), dtype=np.int32)
    score = np.empty((n_lattices, n_nodes), dtype=np.float64)
    chosen = np.empty(n_nodes, dtype=np.int64)
    for s in range(n_lattices):
        for node in range(n_nodes):
            above, position = parent[node], depth[node] - 1
            row = chosen[above] if above >= 0 and conditional else 0
            for index in range(n_candidates):
                value, better = edge[s, position, row, index], 0
                for other in range(n_candidates):
                    rival = edge[s, position, row, other]
                    better += rival > value or (rival == value and other < index)
                if better == rank[node]:
                    chosen[node] = index
                    break
            base = score[s, above] if above >= 0 else 0.0
            score[s, node] = base + np.float64(edge[s, position, row, chosen[node]])
            token[s, node] = candidate_ids[s, position, chosen[node]]
    return token, score


@native
def count_accepted(token: Int32, parent: Int32, n_nodes: Int32, truth: Int32) -> Int32:
    """Nodes of each tree on the path of its true tokens, [s]; truth [s, t], -1 where unknown."""
    accepted = np.zeros(n_nodes.shape[0], dtype=np.int32)
    for s in range(n_nodes.shape[0]):
        current, found = -1, 0
        for node in range(n_nodes[s]):
            if found == truth.shape[1] or truth[s, found] < 0:
                break
            if parent[s, node] == current and token[s, node] == truth[s, found]:
                current = node
                found += 1
        accepted[s] = found
    return accepted


@native
def trace_trees(
    token: Int32,
    parent: Int32,
    depth: Int32,
    score: Float64,
    n_nodes: Int32,
    truth: Int32,
    budgets: Int64,
    counted: Int32,
    never: int,
) -> tuple[Int32, Float64]:
    """Where the truth lies in built trees whose prefixes are the smaller budgets' trees.

    Returns pop_index [s, P], `never` where a tree lacks the token, and expected [s, b]: nodes no
    deeper than counted [s], weighed by their probability, within each budget.
    """
    n_lattices, n_positions = truth.shape
    pop_index = np.full((n_lattices, n_positions), never, dtype=np.int32)
    expected = np.empty((n_lattices, budgets.shape[0]), dtype=np.float64)
    for s in range(n_lattices):
        current, found, slot, total = -1, 0, 0, 0.0
        for node in range(n_nodes[s]):
            while slot < budgets.shape[0] and budgets[slot] == node:
                expected[s, slot] = total
                slot += 1
            if depth[s, node] <= counted[s]:
                total += np.exp(score[s, node])
            if found == n_positions or parent[s, node] != current:
                continue
            if token[s, node] == truth[s, found]:
                pop_index[s, found] = node + 1
                current = node
                found += 1
        expected[s, slot:] = total
    return pop_index, expected
