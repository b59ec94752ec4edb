"""The compiled tree builds, and what reads their output in the same loop.

They share one file because numba's disk cache notices an edit only in the file of the function it
loads, not in files of functions that were inlined into it. Loops that call none of these are in
`_walks.py`.

The best-first build follows the same rule as `reference.py`. Three things make it fast: siblings
are found by a scan of the predecessor's row instead of a sort, a popped node's next sibling takes
its place at the heap's top, and all scratch memory is the caller's: a batch allocates once.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from specpilot_kernels.trees._jit import native
from specpilot_kernels.trees.types import Float32, Float64, Int32, Int64

#: Pop index of a node that the build did not reach: larger than any budget.
NEVER = np.int32(np.iinfo(np.int32).max)
_FIRST = np.float32(np.inf)  # "the value before the best one" when a scan starts
# numba compiles a function once more for every literal that it is called with: these have types.
_ZERO, _NONE = cast(int, np.int64(0)), cast(int, np.int64(-1))
_FALSE = cast(bool, np.bool_(False))
_OPENED_BITS = 32  # heap tie key = depth << 32 | order of opening
_OPENED_MASK = (1 << _OPENED_BITS) - 1


@native
def next_candidate(
    edge: Float32, position: int, before: int, last_value: np.float32, last_index: int
) -> int:
    """The candidate after `(last_value, last_index)` in order of (value desc, index asc), or -1.

    Takes the lattice and two indices, not a row of it: a row view costs more than its scan.
    """
    best = -1
    best_value = np.float32(-np.inf)
    for index in range(edge.shape[2]):
        value = edge[position, before, index]
        if value > best_value and (
            value < last_value or (value == last_value and index > last_index)
        ):
            best = index
            best_value = value
    if best < 0:  # what is left, if anything, has probability zero
        for index in range(edge.shape[2]):
            if edge[position, before, index] == -np.inf and (
                last_value > -np.inf or index > last_index
            ):
                return index
    return best


@native
def _precedes(score_a: float, key_a: int, score_b: float, key_b: int) -> bool:
    return score_a > score_b or (score_a == score_b and key_a < key_b)


@native
def _sift_up(heap_score: Float64, heap_key: Int64, slot: int) -> None:
    score, key = heap_score[slot], heap_key[slot]
    while slot > 0:
        above = (slot - 1) >> 1
        if not _precedes(score, key, heap_score[above], heap_key[above]):
            break
        heap_score[slot], heap_key[slot] = heap_score[above], heap_key[above]
        slot = above
    heap_score[slot], heap_key[slot] = score, key


@native
def _sift_down(heap_score: Float64, heap_key: Int64, size: int) -> None:
    score, key = heap_score[0], heap_key[0]
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= size:
            break
        right = child + 1
        if right < size and _precedes(
            heap_score[right], heap_key[right], heap_score[child], heap_key[child]
        ):
            child = right
        if not _precedes(heap_score[child], heap_key[child], score, key):
            break
        heap_score[slot], heap_key[slot] = heap_score[child], heap_key[child]
        slot = child
    heap_score[slot], heap_key[slot] = score, key


@native
def _push(heap_score: Float64, heap_key: Int64, size: int, score: float, key: int) -> int:
    heap_score[size], heap_key[size] = score, key
    _sift_up(heap_score, heap_key, size)
    return size + 1


@native
def _replace_top(heap_score: Float64, heap_key: Int64, size: int, score: float, key: int) -> int:
    heap_score[0], heap_key[0] = score, key
    _sift_down(heap_score, heap_key, size)
    return size


@native
def _drop_top(heap_score: Float64, heap_key: Int64, size: int) -> int:
    size -= 1
    heap_score[0], heap_key[0] = heap_score[size], heap_key[size]
    if size > 0:
        _sift_down(heap_score, heap_key, size)
    return size


@native
def build(
    edge: Float32,  # [L, P, K], P = K or 1
    n_nodes: int,
    depth_limit: int,
    candidate: Int32,  # [n] out: candidate index of each node
    parent: Int32,  # [n] out
    depth: Int32,  # [n] out
    score: Float64,  # [n] out
    heap_score: Float64,  # [2 n + 2] scratch, as are the next two
    heap_key: Int64,
    opened_node: Int32,  # [2 n + 2, 2]: parent and candidate of the i-th opened node
) -> int:
    """Fill the outputs with the best-first tree and return how many nodes it has."""
    conditional = edge.shape[1] > 1
    size, opened, built, best = 0, 0, 0, _NONE
    if n_nodes > 0 and depth_limit > 0:
        best = next_candidate(edge, _ZERO, _ZERO, _FIRST, _NONE)
    if best >= 0:
        opened_node[0, 0], opened_node[0, 1] = -1, best
        size = _push(heap_score, heap_key, _ZERO, np.float64(edge[0, 0, best]), 1 << _OPENED_BITS)
        opened = 1
    while size > 0:
        path, key = heap_score[0], heap_key[0]
        order, level = key & _OPENED_MASK, key >> _OPENED_BITS
        above, chosen = opened_node[order, 0], int(opened_node[order, 1])
        candidate[built], parent[built], depth[built] = chosen, above, level
        score[built] = path
        built += 1
        if built == n_nodes:
            break
        row = candidate[above] if above >= 0 and conditional else 0
        nearest = next_candidate(edge, level - 1, row, edge[level - 1, row, chosen], chosen)
        if nearest >= 0:  # the next best sibling takes the popped node's place
            base = score[above] if above >= 0 else 0.0
            value = base + np.float64(edge[level - 1, row, nearest])
            opened_node[opened, 0], opened_node[opened, 1] = above, nearest
            size = _replace_top(heap_score, heap_key, size, value, (level << _OPENED_BITS) | opened)
            opened += 1
        else:
            size = _drop_top(heap_score, heap_key, size)
        if level < depth_limit:
            row = chosen if conditional else 0
            child = next_candidate(edge, level, row, _FIRST, _NONE)
            if child >= 0:
                value = path + np.float64(edge[level, row, child])
                opened_node[opened, 0], opened_node[opened, 1] = built - 1, child
                key = ((level + 1) << _OPENED_BITS) | opened
                size = _push(heap_score, heap_key, size, value, key)
                opened += 1
    return built


@native
def one_tree(
    candidate_ids: Int32, edge: Float32, n_nodes: int, depth_limit: int
) -> tuple[Int32, Int32, Int32, Float64]:
    out = np.empty((4, n_nodes), dtype=np.int32)  # token, parent, depth, candidate
    score = np.empty(n_nodes, dtype=np.float64)
    heap_score = np.empty(2 * n_nodes + 2, dtype=np.float64)
    heap_key = np.empty(2 * n_nodes + 2, dtype=np.int64)
    opened = np.empty((2 * n_nodes + 2, 2), dtype=np.int32)
    built = build(
        edge, n_nodes, depth_limit, out[3], out[1], out[2], score, heap_score, heap_key, opened
    )
    for node in range(built):
        out[0, node] = candidate_ids[out[2, node] - 1, out[3, node]]
    return out[0, :built], out[1, :built], out[2, :built], score[:built]


@native
def many_trees(
    candidate_ids: Int32, edge: Float32, n_nodes: int, limits: Int32
) -> tuple[Int32, Int32, Int32, Float64, Int32]:
    n_lattices = candidate_ids.shape[0]
    token = np.full((n_lattices, n_nodes), -1, dtype=np.int32)
    parent = np.full((n_lattices, n_nodes), -1, dtype=np.int32)
    depth = np.zeros((n_lattices, n_nodes), dtype=np.int32)
    score = np.full((n_lattices, n_nodes), -np.inf, dtype=np.float64)
    sizes = np.empty(n_lattices, dtype=np.int32)
    candidate = np.empty(n_nodes, dtype=np.int32)
    heap_score = np.empty(2 * n_nodes + 2, dtype=np.float64)
    heap_key = np.empty(2 * n_nodes + 2, dtype=np.int64)
    opened = np.empty((2 * n_nodes + 2, 2), dtype=np.int32)
    for s in range(n_lattices):
        built = build(
            edge[s], n_nodes, limits[s], candidate, parent[s], depth[s], score[s],
            heap_score, heap_key, opened,
        )  # fmt: skip
        sizes[s] = built
        for node in range(built):
            token[s, node] = candidate_ids[s, depth[s, node] - 1, candidate[node]]
    return token, parent, depth, score, sizes


@native
def locate_truth(
    candidate_ids: Int32,
    candidate: Int32,
    parent: Int32,
    depth: Int32,
    score: Float64,
    built: int,
    truth: Int32,
    budgets: Int64,
    counted: int,
    pop_index: Int32,  # [P] out, filled with NEVER before
    expected: Float64,  # [b] out
) -> None:
    """Where the true tokens stand in one tree's order, and what each budget expects to accept."""
    current, found, slot, total = -1, 0, 0, 0.0
    for node in range(built):
        while slot < budgets.shape[0] and budgets[slot] == node:
            expected[slot] = total
            slot += 1
        if depth[node] <= counted:
            total += np.exp(score[node])
        if found < truth.shape[0] and parent[node] == current:
            token = candidate_ids[depth[node] - 1, candidate[node]]
            if token == truth[found]:
                pop_index[found] = node + 1
                current = node
                found += 1
    expected[slot:] = total


@native
def trace_truth(
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
        locate_truth(
            candidate_ids[s], candidate, parent, depth, score, built, truth[s], budgets,
            counted[s], pop_index[s], expected[s],
        )  # fmt: skip
    return pop_index, expected


@native
def _expand(
    edge: Float32,
    entry: Int32,  # [capacity, 3] out: candidate, parent entry, depth
    path: Float64,  # [capacity] out
    count: int,
    node: int,
    branch: int,
    floor: float,
    has_floor: bool,
) -> int:
    """Append the `branch` best children of entry `node` (-1 = root) that can beat `floor`."""
    level = entry[node, 2] if node >= 0 else 0
    base = path[node] if node >= 0 else 0.0
    row = entry[node, 0] if node >= 0 and edge.shape[1] > 1 else 0
    last_value, last_index = _FIRST, _NONE
    for _ in range(branch):
        chosen = next_candidate(edge, level, row, last_value, last_index)
        if chosen < 0:
            break
        last_value, last_index = edge[level, row, chosen], chosen
        value = base + np.float64(last_value)
        if has_floor and value <= floor:
            break  # siblings come in descending order: none after this one can enter either
        entry[count, 0], entry[count, 1], entry[count, 2] = chosen, node, level + 1
        path[count] = value
        count += 1
    return count


@native
def _keep_best(path: Float64, first: int, end: int, keep: int, best: Int64) -> int:
    """The `keep` best entries of `path[first:end]` in order, equal ones as they come."""
    kept = 0
    for entry in range(first, end):
        value = path[entry]
        if kept == keep and value <= path[best[kept - 1]]:
            continue
        slot = kept if kept < keep else keep - 1
        kept = min(kept + 1, keep)
        while slot > 0 and path[best[slot - 1]] < value:
            best[slot] = best[slot - 1]
            slot -= 1
        best[slot] = entry
    return kept


@native
def build_levels(
    edge: Float32,  # [L, P, K], P = K or 1
    n_nodes: int,
    depth_limit: int,
    width: int,
    branch: int,
    prune: bool,
    entry: Int32,  # [capacity, 3] scratch
    path: Float64,  # [capacity] scratch
    renamed: Int32,  # [capacity] scratch
    candidate: Int32,  # [n] out, as are the next three
    parent: Int32,
    depth: Int32,
    score: Float64,
) -> int:
    """Grow level by level from the `width` best of the last level, keep the `n_nodes` best of all.

    `prune` leaves out a child that `n_nodes` shallower or equal entries already beat. Entries are
    in order of depth, and equal ones keep it, so a parent never comes after its child.
    """
    if n_nodes == 0 or depth_limit == 0:
        return 0
    floor, has_floor = 0.0, _FALSE
    best = np.empty(max(width, n_nodes), dtype=np.int64)
    first, count = _ZERO, _expand(edge, entry, path, _ZERO, _NONE, branch, floor, has_floor)
    for _ in range(1, depth_limit):
        if prune and count >= n_nodes:
            kept = _keep_best(path, _ZERO, count, n_nodes, best)
            floor, has_floor = path[best[kept - 1]], True
        kept, first = _keep_best(path, first, count, width, best), count
        for node in best[:kept]:
            count = _expand(edge, entry, path, count, node, branch, floor, has_floor)
        if count == first:
            break
    kept = _keep_best(path, _ZERO, count, n_nodes, best)
    for place in range(kept):
        node = best[place]
        renamed[node] = place
        above = entry[node, 1]
        candidate[place], depth[place], score[place] = entry[node, 0], entry[node, 2], path[node]
        parent[place] = renamed[above] if above >= 0 else -1
    return kept


@native
def many_levels(
    candidate_ids: Int32, edge: Float32, shape: tuple[int, int, int, int, bool]
) -> tuple[Int32, Int32, Int32, Float64, Int32]:
    """`many_trees` of `build_levels`; shape: n_nodes, depth limit, width, branch, prune."""
    n_nodes, depth_limit, width, branch, prune = shape
    n_lattices = candidate_ids.shape[0]
    capacity = branch + max(depth_limit - 1, 0) * width * branch
    entry, path = np.empty((capacity, 3), dtype=np.int32), np.empty(capacity, dtype=np.float64)
    renamed = np.empty(capacity, dtype=np.int32)
    token = np.full((n_lattices, n_nodes), -1, dtype=np.int32)
    parent = np.full((n_lattices, n_nodes), -1, dtype=np.int32)
    depth = np.zeros((n_lattices, n_nodes), dtype=np.int32)
    score = np.full((n_lattices, n_nodes), -np.inf, dtype=np.float64)
    sizes = np.empty(n_lattices, dtype=np.int32)
    candidate = np.empty(n_nodes, dtype=np.int32)
    for s in range(n_lattices):
        built = build_levels(
            edge[s], n_nodes, depth_limit, width, branch, prune, entry, path, renamed,
            candidate, parent[s], depth[s], score[s],
        )  # fmt: skip
        sizes[s] = built
        for node in range(built):
            token[s, node] = candidate_ids[s, depth[s, node] - 1, candidate[node]]
    return token, parent, depth, score, sizes
