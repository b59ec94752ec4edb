// Last steps of the encoder: where a group's escapes go in the list of all, and writing them.
#pragma once
#include "group.cuh"

// A group's state: nothing yet, its own count, or the count of itself and all before it.
constexpr u64 SUM_KNOWN = 1ull << 62, PREFIX_KNOWN = 2ull << 62, COUNT = SUM_KNOWN - 1;

// Return the escapes of all groups before `index`, with one warp; publishes the prefix sum.
__device__ u64 look_back(u64* state, int index, u64 own)
{
    constexpr int DEPTH = 4;  // loads per lane at a time, since each round trip is long
    const int lane = threadIdx.x % 32;
    u64 before = 0;
    bool done = false;
    for (int nearest = index - 1; !done && nearest >= 0; nearest -= 32 * DEPTH) {
        u64 found[DEPTH];
        bool known;
        do {
            known = true;
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                const int at = nearest - 32 * i - lane;
                found[i] = at < 0 ? PREFIX_KNOWN
                                  : *reinterpret_cast<volatile u64*>(state + at);
                known = known && found[i] >> 62;
            }
        } while (!__all_sync(FULL_WARP, known));
        for (int i = 0; i < DEPTH && !done; ++i) {
            const u32 prefixes = __ballot_sync(FULL_WARP, found[i] >> 62 == 2);
            done = prefixes != 0;
            // Everything nearer than the nearest known prefix counts, and that prefix itself.
            u64 sum = !done || lane < __ffs(prefixes) ? found[i] & COUNT : 0;
            for (int step = 16; step > 0; step /= 2)
                sum += __shfl_xor_sync(FULL_WARP, sum, step);
            before += sum;
        }
    }
    if (lane == 0)
        atomicExch(state + index, PREFIX_KNOWN | (before + own));
    return before;
}

struct EscapeList {
    int* col;
    u16* bits;
    i64 capacity;

    __device__ void put(i64 at, u32 column, u32 pattern) const
    {
        if (at < capacity) {
            col[at] = int(column);
            bits[at] = u16(pattern);
        }
    }
};

// Few escapes: each thread finds the rank of one in the list.
__device__ void collect_listed(const Group& group, i64 begin, const EscapeList& out)
{
    for (u32 own = threadIdx.x; own < group.listed; own += THREADS) {
        const u32 key = group.key[own];
        u32 rank = 0;
        for (u32 other = 0; other < group.listed; ++other)
            rank += group.key[other] < key;
        out.put(begin + rank, key & ((1u << COL_BITS) - 1), group.bits[own]);
    }
}

// Many escapes: each warp walks a channel once more, in order.
template <bool ALIGNED>
__device__ void collect_by_reading(const Matrix& matrix, const Group& group, i64 begin,
                                   const EscapeList& out)
{
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < matrix.rows; row += WARPS) {
        const u32 lo = group.lo[row];
        i64 at = begin;
        for (int other = 0; other < row; ++other)
            at += group.escapes[other];
        for (int first = 0; group.escapes[row] && first < matrix.cols; first += 256) {
            const int col = first + lane * 8;
            const u32 fill = base_word(lo);
            const uint4 piece = col < matrix.cols
                ? load8<ALIGNED>(matrix.row(row), col, matrix.cols, fill)
                : make_uint4(fill, fill, fill, fill);
            const u32 word[4] = {piece.x, piece.y, piece.z, piece.w};
            u32 mask = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                mask |= u32(field_of(word[i / 2] >> 16 * (i & 1)) - lo >= WINDOW_SPAN) << i;
            u32 upto = __popc(mask);
            for (int step = 1; step < 32; step *= 2) {
                const u32 left = __shfl_up_sync(FULL_WARP, upto, step);
                upto += lane >= step ? left : 0;
            }
            i64 next = at + upto - __popc(mask);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (mask >> i & 1)
                    out.put(next++, u32(col) + i, word[i / 2] >> 16 * (i & 1) & 0xFFFF);
            at += __shfl_sync(FULL_WARP, upto, 31);
        }
    }
}
