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
    size, opened, built = 0, 0, 0
    best = next_candidate(edge, 0, 0, _FIRST, -1) if n_nodes > 0 and depth_limit > 0 else -1
    if best >= 0:
        opened_node[0, 0], opened_node[0, 1] = -1, best
        size = _push(heap_score, heap_key, 0, np.float64(edge[0, 0, best]), 1 << _OPENED_BITS)
        opened = 1
    while size > 0:
        path, key = heap_score[0], heap_key[0]
        order, level = key & _OPENED_MASK, key >> _OPENED_BITS
        above, chosen = opened_node[order, 0], opened_node[order, 1]
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
            child = next_candidate(edge, level, row, _FIRST, -1)
            if child >= 0:
                value = path + np.float64(edge[level, row, child])
                opened_node[opened, 0], opened_node[opened, 1] = built - 1, child
                key = ((level + 1) << _OPENED_BITS) | opened
                size = _push(heap_score, heap_key, size, value, key)
                opened += 1
    return built
