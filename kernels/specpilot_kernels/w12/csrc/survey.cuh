// First step of the encoder: count exponent fields, choose each channel's window.
#pragma once
#include "group.cuh"

constexpr int IN_FLIGHT = 4;  // 16-byte loads per lane that are under way at once

// A warp may keep several histograms, lane l in copy l % COPIES. Fields lie in other banks in each
// copy, neighbouring ones always in different banks: field f of copy c is bin f ^ SKEW * c.
constexpr int COPIES = W12_ENCODE_COPIES;
constexpr int SKEW = 32 / COPIES % 32;
static_assert(COPIES == 1 || COPIES == 2 || COPIES == 4, "a lane's copy and skew come from its bits");

// Count one weight. `histogram` is the lane's copy, an address in shared memory that is a multiple
// of 1024, with the skew in its low bits, so that one three-input logic operation gives the bin's
// place. The atomic adds up the lanes of equal field by itself.
__device__ __forceinline__ void count(u32 histogram, u32 bits_shifted_by_5)
{
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(histogram ^ (bits_shifted_by_5 & 0x3FC))
                 : "memory");
}

// Count the exponent fields of this warp's share of a channel. Field 255 is in no window, so
// places beyond the end of the channel are read as NaN and need no care.
template <bool ALIGNED>
__device__ void count_fields(const u16* row, int cols, int part, u32 (*histogram)[256])
{
    constexpr int STRIDE = 32 * 8 * WARPS_PER_ROW;
    const int lane = threadIdx.x % 32, copy = lane % COPIES;
    const u32 address = u32(__cvta_generic_to_shared(histogram[copy])) + copy * SKEW * 4;
    for (int begin = (part * 32 + lane) * 8; begin < cols; begin += STRIDE * IN_FLIGHT) {
        uint4 piece[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (begin + i * STRIDE < cols)
                piece[i] = load8<ALIGNED>(row, begin + i * STRIDE, cols, 0xFFFFFFFF);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (begin + i * STRIDE >= cols)
                break;
            const u32 word[4] = {piece[i].x, piece[i].y, piece[i].z, piece[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                count(address, word[j] >> 5);
                count(address, word[j] >> 21);
            }
        }
    }
}

// Choose a channel's window from its histogram, with one warp: most weights, then the highest.
__device__ void choose_window(u32 (*histogram)[256], int cols, u32& lo, u32& escapes)
{
    const int lane = threadIdx.x % 32;
    u32* below = histogram[0];  // becomes: weights with a lower field
    u32 count[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        count[i] = 0;
        for (int part = 0; part < WARPS_PER_ROW * COPIES; ++part)
            count[i] += histogram[part][(lane * 8 + i) ^ part % COPIES * SKEW];
        sum += count[i];
    }
    u32 before = sum;
    for (int step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(FULL_WARP, before, step);
        before += lane >= step ? left : 0;
    }
    before -= sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        below[lane * 8 + i] = before;
        before += count[i];
    }
    __syncwarp();
    u64 best = 0;
    for (int low = lane; low <= MAX_LO; low += 32) {
        const u64 covered = below[low + WINDOW_SPAN] - below[low];
        const u64 candidate = covered << 8 | low;
        best = candidate > best ? candidate : best;
    }
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(FULL_WARP, best, step);
        best = other > best ? other : best;
    }
    lo = best & 0xFF;
    escapes = u32(cols) - u32(best >> 8);
}

template <bool ALIGNED>
__device__ void survey(const Matrix& matrix, Workspace& work, Group& group)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / WARPS_PER_ROW, part = warp % WARPS_PER_ROW;
    for (int i = lane; i < 256 * COPIES; i += 32)
        work.histogram[warp * COPIES][i] = 0;
    __syncwarp();
    if (row < matrix.rows)
        count_fields<ALIGNED>(matrix.row(row), matrix.cols, part, work.histogram + warp * COPIES);
    __syncthreads();
    if (part == 0) {
        u32 lo = 0, escapes = 0;  // channels beyond the matrix: zero bits, no escapes
        if (row < matrix.rows)
            choose_window(work.histogram + warp * COPIES, matrix.cols, lo, escapes);
        if (lane == 0) {
            group.lo[row] = lo;
            group.escapes[row] = escapes;
        }
    }
    __syncthreads();
}
