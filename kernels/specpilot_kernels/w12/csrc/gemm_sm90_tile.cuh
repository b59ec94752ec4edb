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
// arithmetic makes, until the sum is there, and the reader makes it kEmpty again.
__device__ __forceinline__ u32* partial_slot(const Params& p, int cta, int group) {
  return p.partials + (cta * COLS / 8 + group) * (kTileRows * 8) + threadIdx.x * 4;
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

// A segment of a split tile: send the sums to the tile's first CTA, or be it. To the first CTA the
// segment is its last one of the split tiles, to the others their first, so nobody waits long.
__device__ __forceinline__ void join_tile(const Params& p, const Segment& segment,
                                          float (&d)[kAccumulators]) {
  const int self = blockIdx.x;
  if (segment.first > 0) {
#pragma unroll
    for (int group = 0; group < COLS / 8; ++group) {
      const float sums[4] = {d[4 * group], d[4 * group + 1], d[4 * group + 2], d[4 * group + 3]};
      send(partial_slot(p, self, group), sums);
    }
    return;
  }
  // Words on their way at once: of kTogether CTAs, kGroups groups of rows.
  constexpr int kGroups = COLS == 48 ? 3 : COLS < 32 ? COLS / 8 : 4;
  constexpr int kTogether = COLS == 8 ? 4 : COLS == 64 ? 1 : 2;
  const int last = owner(p, segment.tile * p.blocks + p.blocks - 1);
#pragma unroll
  for (int begin = 0; begin < COLS / 8; begin += kGroups) {
#pragma unroll 1
    for (int cta = self + 1; cta <= last; cta += kTogether) {
      u32 words[kTogether * kGroups][4] = {};
      u32 missing;
      do {
#pragma unroll
        for (int i = 0; i < kTogether * kGroups; ++i)
          if (cta + i / kGroups <= last)
            peek(partial_slot(p, cta + i / kGroups, begin + i % kGroups), words[i]);
        missing = 0;
#pragma unroll
        for (int i = 0; i < kTogether * kGroups * 4; ++i) missing |= words[i / 4][i % 4] == kEmpty;
      } while (missing);
#pragma unroll
      for (int i = 0; i < kTogether * kGroups; ++i) {
        if (cta + i / kGroups > last) break;
        clear(partial_slot(p, cta + i / kGroups, begin + i % kGroups));
#pragma unroll
        for (int k = 0; k < 4; ++k)
          d[4 * (begin + i % kGroups) + k] += __uint_as_float(words[i][k]);
      }
    }
  }
  store_tile(p, segment.tile, d);
}
