"""The Triton kernels of tree attention; `attention` launches them and says what they compute.

The rows of a request and the query heads of one KV head are packed into one dimension, m = row *
GROUP + head, so that keys are read once per tile of m and not once per row and head. The keys of a
request are a list of blocks: those of the prefix that some row sees, then those of the tree. The
blocks of all requests, one after the other, are dealt out in equal runs to `splits` programs for
each KV head and tile of m. Lengths are known on the GPU alone, so the grid is always the same, and
yet a long request gets its share of the programs and all end at about the same time. A run may
begin in one request and end in the next: its part of a request is stored at place split + request,
which no other part has.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_TREE_N: tl.constexpr = tl.constexpr(32)  # rows of the tree in a block: those of one word of bits


@triton.jit
def _prefix(kv_indptr, request, window, WINDOWED: tl.constexpr):
    """Where the prefix of a request begins in kv_indices, its length, the first key a row sees."""
    begin = tl.load(kv_indptr + request)
    length = (tl.load(kv_indptr + request + 1) - begin).to(tl.int32)
    first = tl.maximum(length - window + 1, 0) if WINDOWED else 0
    return begin, length, first


@triton.jit
def _deal(
    kv_indptr, batch, rows, splits, window,
    BATCH: tl.constexpr, BLOCK_N: tl.constexpr, LEAST_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Blocks of every request [BATCH], blocks in all, and how many of the splits get any."""
    request = tl.arange(0, BATCH)
    there = request < batch
    # Requests that are not there have the length of the first, and no blocks.
    _, length, first = _prefix(kv_indptr, tl.where(there, request, 0), window, WINDOWED)
    blocks = tl.cdiv(length - first, BLOCK_N) + tl.cdiv(rows, _TREE_N)
    blocks = tl.where(there, blocks, 0)
    total = tl.sum(blocks, 0)
    used = tl.minimum(tl.maximum(total // LEAST_BLOCKS, 1), splits)
    return blocks, total, used


@triton.jit
def _attend(q, k, v, bias, top, total, acc, scale, cap, CAPPED: tl.constexpr):
    """One block of online softmax, in powers of two: q [M, D], k [D, N], v [N, DV].

    bias, [M, N] or [1, N], is 0 where a key is seen and -inf where not.
    """
    score = tl.dot(q, k)
    if CAPPED:
        # cap * tanh(score * scale / cap)
        score = cap * (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * _LOG2_E * scale / cap))))
        score = score * _LOG2_E + bias
    else:
        score = score * (scale * _LOG2_E) + bias
    new_top = tl.maximum(top, tl.max(score, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: no inf - inf
    weight = tl.exp2(score - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return new_top, total * shrink + tl.sum(weight, 1), acc


@triton.jit
def _attend_prefix(
    q, top, total, acc, depth, k_head, v_head, slots, begin, end, length,
    k_stride, v_stride, scale, window, cap,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) of the prefix; `slots` and positions count from its beginning."""
    lane = tl.arange(0, BLOCK_N)
    k_dim = tl.arange(0, HEAD_DIM)
    v_dim = tl.arange(0, VALUE_DIM)
    for at in range(begin, end, BLOCK_N):
        position = at + lane
        # Past the end the last key is read again, and weighs nothing.
        slot = tl.load(slots + tl.minimum(position, length - 1)).to(tl.int64)
        k = tl.load(k_head + slot[None, :] * k_stride + k_dim[:, None])
        v = tl.load(v_head + slot[:, None] * v_stride + v_dim[None, :])
        bias = tl.where(position < length, 0.0, float("-inf"))[None, :]
        if WINDOWED:
            bias = tl.where(
                position[None, :] > (length - window + depth)[:, None], bias, float("-inf")
            )
        top, total, acc = _attend(q, k, v, bias, top, total, acc, scale, cap, CAPPED)
    return top, total, acc


@triton.jit
def _attend_tree(
    q, top, total, acc, depth, words, k_head, v_head, slots, depths, begin, end, rows,
    k_stride, v_stride, scale, window, cap,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of the tree's own rows; `words` points at the ancestors of each m."""
    lane = tl.arange(0, _TREE_N)
    k_dim = tl.arange(0, HEAD_DIM)
    v_dim = tl.arange(0, VALUE_DIM)
    for block in range(begin, end):
        key = block * _TREE_N + lane
        key_depth = tl.load(depths + key, mask=key < rows, other=-1)
        there = key_depth >= 0
        slot = tl.load(slots + key, mask=there, other=0).to(tl.int64)
        k = tl.load(k_head + slot[None, :] * k_stride + k_dim[:, None], there[None, :], other=0.0)
        v = tl.load(v_head + slot[:, None] * v_stride + v_dim[None, :], there[:, None], other=0.0)
        word = tl.load(words + block, mask=depth >= 0, other=0)
        visible = ((word[:, None] >> lane[None, :]) & there.to(tl.int32)[None, :]) != 0
        if WINDOWED:
            visible = visible & (key_depth[None, :] > (depth - window)[:, None])
        bias = tl.where(visible, 0.0, float("-inf"))
        top, total, acc = _attend(q, k, v, bias, top, total, acc, scale, cap, CAPPED)
    return top, total, acc


@triton.jit
def _run(blocks, in_all, used, split):
    """The blocks [begin, end) of a split, and the first and the last request that they are of."""
    end = tl.cumsum(blocks, 0)
    run_begin, run_end = in_all * split // used, in_all * (split + 1) // used
    first = tl.sum((end <= run_begin).to(tl.int32), 0)
    last = tl.sum((end < run_end).to(tl.int32), 0)
    return run_begin, run_end, first, last


@triton.jit
def _queries(
    q, depths, flat, inside, head, row_stride, head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Depth [M] and query [M, D] of each m, counted from the first request; 0 where none."""
    row = flat // GROUP
    depth = tl.load(depths + row, mask=inside, other=-1)
    at = row * row_stride + (head * GROUP + flat % GROUP) * head_stride
    dim = tl.arange(0, HEAD_DIM)
    return depth, tl.load(q + at[:, None] + dim[None, :], (depth >= 0)[:, None], other=0.0)


@triton.jit
def _store(
    part, part_log, place, inside, depth, top, total, acc, value_begin, HEAD_DIM: tl.constexpr
):
    """What a run found for a request: softmax over its keys, and log2 of the weights' sum."""
    seen = (depth >= 0) & (total != 0.0)
    log = tl.where(seen, top + tl.log2(total), float("-inf"))
    if value_begin == 0:
        tl.store(part_log + place, log, inside)
    share = tl.where(seen, 1.0 / total, 0.0)
    at = place[:, None] * HEAD_DIM + value_begin + tl.arange(0, acc.shape[1])[None, :]
    tl.store(part + at, acc * share[:, None], inside[:, None])


@triton.jit(do_not_specialize=["batch", "rows", "splits", "window"])
def attend(
    q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, ancestors, depths, part, part_log,
    q_row_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    batch, rows, splits, scale, window, cap,
    GROUP: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BATCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of m * parts of the value dimension, KV heads, splits).

    part float32 [splits + batch - 1, KV heads, rows * GROUP, HEAD_DIM], part_log without the last.
    """
    value_parts: tl.constexpr = HEAD_DIM // VALUE_DIM
    head, split = tl.program_id(1), tl.program_id(2)
    m = tl.program_id(0) // value_parts * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < rows * GROUP
    value_begin = tl.program_id(0) % value_parts * VALUE_DIM
    blocks, in_all, used = _deal(
        kv_indptr, batch, rows, splits, window, BATCH, BLOCK_N, LEAST_BLOCKS, WINDOWED
    )
    if split >= used:
        return
    run_begin, run_end, first_request, last_request = _run(blocks, in_all, used, split)
    k_head, v_head = k_pool + head * k_head_stride, v_pool + head * v_head_stride + value_begin
    for request in range(first_request, last_request + 1):
        # Of a request's own, so that no address is kept in registers from one to the next.
        flat = request * rows * GROUP + m
        depth, q_tile = _queries(
            q, depths, flat, inside, head, q_row_stride, q_head_stride, GROUP, HEAD_DIM
        )
        top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
        kv_begin, length, first = _prefix(kv_indptr, request, window, WINDOWED)
        before = tl.sum(tl.where(tl.arange(0, BATCH) < request, blocks, 0), 0)
        of_prefix = tl.cdiv(length - first, BLOCK_N)
        begin = tl.maximum(run_begin - before, 0)
        stop = tl.minimum(run_end - before, of_prefix + tl.cdiv(rows, _TREE_N))
        top, total, acc = _attend_prefix(
            q_tile, top, total, acc, depth, k_head, v_head, kv_indices + kv_begin,
            first + begin * BLOCK_N, first + tl.minimum(stop, of_prefix) * BLOCK_N, length,
            k_stride, v_stride, scale, window, cap, HEAD_DIM, VALUE_DIM, BLOCK_N, WINDOWED, CAPPED,
        )  # fmt: skip
        top, total, acc = _attend_tree(
            q_tile, top, total, acc, depth, ancestors + flat // GROUP * WORDS, k_head, v_head,
            row_slots + request * rows, depths + request * rows,
            tl.maximum(begin - of_prefix, 0), stop - of_prefix, rows,
            k_stride, v_stride, scale, window, cap, HEAD_DIM, VALUE_DIM, WINDOWED, CAPPED,
        )  # fmt: skip
        place = ((split + request) * tl.num_programs(1) + head) * rows * GROUP + m
        _store(part, part_log, place, inside, depth, top, total, acc, value_begin, HEAD_DIM)


@triton.jit(do_not_specialize=["batch", "rows", "splits", "window"])
def combine(
    part, part_log, kv_indptr, out, batch, rows, splits, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BATCH: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid (rows * GROUP, KV heads, requests): weigh the parts of one row and head, in order.

    SPLITS: a power of two, at least `splits`. out [requests * rows, KV heads * GROUP, HEAD_DIM].
    """
    m, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks, in_all, used = _deal(
        kv_indptr, batch, rows, splits, window, BATCH, BLOCK_N, LEAST_BLOCKS, WINDOWED
    )
    others = tl.arange(0, BATCH)
    begin = tl.sum(tl.where(others < request, blocks, 0), 0)
    end = tl.sum(tl.where(others <= request, blocks, 0), 0)
    # Block t is in the last split s that has in_all * s // used <= t.
    first = ((begin + 1) * used - 1) // in_all
    last = (end * used - 1) // in_all
    heads = tl.num_programs(1)
    place = ((request + first).to(tl.int64) * heads + head) * rows * GROUP + m
    step = heads * rows * GROUP

    split = tl.arange(0, SPLITS)
    logs = tl.load(part_log + place + split * step, split <= last - first, other=float("-inf"))
    top = tl.max(logs, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - anchor), 0)
    dim = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for at in range(0, last - first + 1, CHUNK):
        some = at + tl.arange(0, CHUNK)
        there = some <= last - first
        log = tl.load(part_log + place + some * step, there, other=float("-inf"))
        value_at = (place + some * step)[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(part + value_at, there[:, None], other=0.0)
        acc += tl.sum(values * tl.exp2(log - anchor)[:, None], 0)
    result = tl.where(total == 0.0, 0.0, acc / total)
    row = request.to(tl.int64) * rows + m // GROUP
    out_at = (row * heads * GROUP + head * GROUP + m % GROUP) * HEAD_DIM
    tl.store(out + out_at + dim, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "length"])
def compact(
    pools, row_slots, path, n_accepted, rows, length, row_words, slot_words,
    STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of a row, requests, pools): copy row path[i] over row i of one request.

    pools: addresses, int64; words are of four bytes. STEPS: a power of two, at least `length`.
    """
    chunk, request, pool = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    step = tl.arange(0, STEPS)
    on_path = (step <= tl.load(n_accepted + request)) & (step < length)
    row = tl.load(path + request * length + step, on_path, other=-1)
    moves = row > step  # the others are where they belong
    source = tl.load(row_slots + request * rows + row, moves, other=0).to(tl.int64)
    target = tl.load(row_slots + request * rows + step, moves, other=0).to(tl.int64)
    base = tl.load(pools + pool).to(tl.pointer_type(tl.int32))
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = moves[:, None] & (word < row_words)[None, :]
    values = tl.load(base + source[:, None] * slot_words + word[None, :], mask)
    tl.debug_barrier()  # a target may be another thread's source
    tl.store(base + target[:, None] * slot_words + word[None, :], values, mask)
