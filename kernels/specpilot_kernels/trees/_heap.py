"""The compiled best-first loop that `best_first` and replay share.

Same rule as `reference.py`. Three things make it fast: sibling order is found by one scan of the
predecessor's row instead of a sort, a popped node's next sibling overwrites it at the heap's top,
and all scratch memory comes from the caller, so that a batch allocates once.
"""

from __future__ import annotations

import numpy as np

from specpilot_kernels.trees._jit import native
from specpilot_kernels.trees.types import Float32, Float64, Int32, Int64

_FIRST = np.float32(np.inf)  # "the value before the best one" when a scan starts
_OPENED_BITS = 32  # heap tie key = depth << 32 | order of opening


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
    n_rows = edge.shape[1]
    if n_nodes <= 0 or depth_limit <= 0:
        return 0
    best = next_candidate(edge, 0, 0, _FIRST, -1)
    if best < 0:
        return 0
    heap_score[0] = np.float64(edge[0, 0, best])
    heap_key[0] = np.int64(1) << _OPENED_BITS
    opened_node[0, 0] = -1
    opened_node[0, 1] = best
    size, opened, built = 1, 1, 0
    while size > 0:
        path, key = heap_score[0], heap_key[0]
        order = key & ((np.int64(1) << _OPENED_BITS) - 1)
        above, chosen = opened_node[order, 0], opened_node[order, 1]
        level = key >> _OPENED_BITS
        candidate[built] = chosen
        parent[built] = above
        depth[built] = level
        score[built] = path
        built += 1
        if built == n_nodes:
            break
        before = candidate[above] if above >= 0 and n_rows > 1 else 0
        sibling = next_candidate(edge, level - 1, before, edge[level - 1, before, chosen], chosen)
        if sibling >= 0:
            base = score[above] if above >= 0 else 0.0
            heap_score[0] = base + np.float64(edge[level - 1, before, sibling])
            heap_key[0] = (level << _OPENED_BITS) | opened
            opened_node[opened, 0] = above
            opened_node[opened, 1] = sibling
            opened += 1
        else:
            size -= 1
            heap_score[0], heap_key[0] = heap_score[size], heap_key[size]
        if size > 0:
            _sift_down(heap_score, heap_key, size)
        if level < depth_limit:
            below = chosen if n_rows > 1 else 0
            child = next_candidate(edge, level, below, _FIRST, -1)
            if child >= 0:
                heap_score[size] = path + np.float64(edge[level, below, child])
                heap_key[size] = ((level + 1) << _OPENED_BITS) | opened
                opened_node[opened, 0] = built - 1
                opened_node[opened, 1] = child
                opened += 1
                _sift_up(heap_score, heap_key, size)
                size += 1
    return built
