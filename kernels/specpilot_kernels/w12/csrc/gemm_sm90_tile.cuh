// The end of a tile in the Hopper GEMM: scale, corrections, sums of other CTAs, bias, rounding.
#pragma once

#include "gemm_sm90_escapes.cuh"

// Sums lie in registers as wgmma leaves them. A consumer thread (warp w, lane l) has channels
// 16 w + l / 4 (+ 8) and, in each group of eight rows, rows 2 (l % 4) and the next: four sums.

// Bring the sums of a segment to their true scale and add its corrections.
__device__ __forceinline__ void scale_and_correct(const Params& p, int tile,
                                                  const Corrections& corrections,
                                                  const Signals& signals,
                                                  float (&d)[kAccumulators]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    const float scale = __ldg(p.scale + tile * kTileRows + channel);
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) d[i / 2 * 4 + half * 2 + i % 2] *= scale;
    const int slot = signals.slot_of[channel];
    if (slot != kNoSlot) {
#pragma unroll
      for (int group = 0; group < COLS / 8; ++group) {
        const float2 pair = corrections.load_pair(slot, group * 8 + threadIdx.x % 4 * 2);
        d[group * 4 + half * 2] += pair.x, d[group * 4 + half * 2 + 1] += pair.y;
      }
    }
  }
}

// Bias, rounding, store, of rows 8 group .. 8 group + 7.
__device__ __forceinline__ void store_group(const Params& p, int tile, int group,
                                            const float (&sums)[4]) {
  const int column = tile * kTileRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = group * 8 + threadIdx.x % 4 * 2 + i % 2, channel = column + i / 2 * 8;
    if (row >= p.rows || channel >= p.channels) continue;
    const float bias = p.bias ? from_bf16(__ldg(p.bias + channel)) : 0.f;
    p.y[row * p.y_stride + channel] = to_bf16(sums[i] + bias);
  }
}

__device__ __forceinline__ void store_tile(const Params& p, int tile,
                                           const float (&d)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < COLS / 8; ++i) {
    const float sums[4] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    store_group(p, tile, i, sums);
  }
}

// Sums travel between CTAs as words that are their own signal: a word is kEmpty, a NaN that no
// arithmetic makes, until the sum is there, and the reader makes it kEmpty again. A CTA has two
// places: one for the segment with which its split part ends, one for a segment before.
__device__ __forceinline__ u32* partial_slot(const Params& p, int cta, bool is_last, int group) {
  return p.partials + ((cta * 2 + is_last) * (COLS / 8) + group) * (kTileRows * 8) +
         threadIdx.x * 4;
}

__device__ __forceinline__ void send(u32* slot, const float (&sums)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "f"(sums[0]),
               "f"(sums[1]), "f"(sums[2]), "f"(sums[3]) : "memory");
}

__device__ __forceinline__ void clear(u32* slot) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(slot), "r"(kEmpty)
               : "memory");
}

__device__ __forceinline__ void peek(const u32* slot, u32 (&words)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(slot)
               : "memory");
}

// The CTAs that share a tile, first .. last. Those whose split part ends in it finish it: all, or
// all but the last one, which goes on with the next tile. Finisher f adds up row groups f,
// f + finishers, ... of everybody.
struct Sharing {
  int first, last, finishers;
  bool last_goes_on;

  __device__ Sharing(const Params& p, int tile) {
    const int begin = tile * p.blocks, end = begin + p.blocks;
    first = owner(p, begin), last = owner(p, end - 1);
    last_goes_on = first_unit(p, last + 1) > end;
    finishers = last - first + !last_goes_on;
  }
};

// With a single group its finisher is the first CTA, whose own sums need not travel.
constexpr bool kOneGroup = COLS == 8;

// Add what the CTAs sent of row groups `group`, `group` + finishers, ..., in the order of the CTAs,
// so that no timing shows in the sums.
template <int kGroups>
__device__ __forceinline__ void gather(const Params& p, const Sharing& sharing, int group,
                                       float (&sums)[kGroups][4]) {
  constexpr int kTogether = kGroups == 1 ? 4 : 3;  // CTAs whose words are on their way at once
#pragma unroll 1
  for (int begin = sharing.first + kOneGroup; begin <= sharing.last; begin += kTogether) {
    u32 words[kTogether][kGroups][4] = {};
    const auto slot = [&](int i, int g) {
      const bool is_last = begin + i < sharing.last || !sharing.last_goes_on;
      return partial_slot(p, begin + i, is_last, group + g * sharing.finishers);
    };
    const auto exists = [&](int i, int g) {
      return begin + i <= sharing.last && group + g * sharing.finishers < COLS / 8;
    };
    u32 missing;
    do {
      missing = 0;
#pragma unroll
      for (int i = 0; i < kTogether * kGroups; ++i)
        if (exists(i / kGroups, i % kGroups))
          peek(slot(i / kGroups, i % kGroups), words[i / kGroups][i % kGroups]);
#pragma unroll
      for (int i = 0; i < kTogether * kGroups * 4; ++i)
        missing |= words[i / 4 / kGroups][i / 4 % kGroups][i % 4] == kEmpty;
    } while (missing);
#pragma unroll
    for (int i = 0; i < kTogether * kGroups; ++i)
      if (exists(i / kGroups, i % kGroups)) {
        clear(slot(i / kGroups, i % kGroups));
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i % kGroups][k] += __uint_as_float(words[i / kGroups][i % kGroups][k]);
      }
  }
}

// A segment of a split tile: send the sums, and finish the row groups that are ours.
__device__ __forceinline__ void join_tile(const Params& p, const Segment& segment, bool is_last,
                                          const float (&d)[kAccumulators]) {
  const Sharing sharing(p, segment.tile);
  const int self = static_cast<int>(blockIdx.x) - sharing.first;
  if (!kOneGroup || self > 0)
#pragma unroll
    for (int group = 0; group < COLS / 8; ++group) {
      const float sums[4] = {d[4 * group], d[4 * group + 1], d[4 * group + 2], d[4 * group + 3]};
      send(partial_slot(p, blockIdx.x, is_last, group), sums);
    }
  if (!is_last) return;
  constexpr int kGroups = COLS < 32 ? 1 : 2;  // finished at once
#pragma unroll 1
  for (int group = self; group < COLS / 8; group += kGroups * sharing.finishers) {
    float sums[kGroups][4];
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i)
      sums[i / 4][i % 4] = kOneGroup ? d[i] : -0.f;  // -0: adding to it changes nothing
    gather<kGroups>(p, sharing, group, sums);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (group + g * sharing.finishers < COLS / 8)
        store_group(p, segment.tile, group + g * sharing.finishers, sums[g]);
  }
}
