// The recurrence of one value head, walked by a warp with the stock kernel's bits.
//
//   S <- alpha S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
//
// A lane holds four neighbouring elements of the key dimension for kColumns columns of S; kLanes
// lanes share a column. The stock kernel sums a column over its lanes in a butterfly, 16, 8, 4, 2,
// 1, once per column. Here lanes split up the columns while they add: in each of the first steps a
// lane keeps half of its columns and gives the other half away. The additions are the same, so are
// the bits, and 8 columns take 9 exchanges instead of 40. In the end each lane has one column.
#pragma once

#include "gdn.cuh"

constexpr int kColumns = 8;                            // per lane
constexpr int kWarpColumns = kColumns * 32 / kLanes;   // columns of S that a warp has
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockColumns = kWarps * kWarpColumns;
static_assert(VDIM % kBlockColumns == 0, "a block has whole columns of one head");

// A row's inputs as a lane needs them.
struct Step {
  float k[4];  // normalised
  float v;     // of the lane's column
  float alpha, beta;
};

// The lane's column among those of its warp.
__device__ __forceinline__ int column_of_lane() {
  const int lane = threadIdx.x % 32, among = lane % kLanes;
  // The first exchange decides the highest bit of the column.
  return lane / kLanes * kColumns + among / (kLanes / kColumns);
}

// Sum column c of `x` over the lanes that share it; a lane gets the sum of its own column.
__device__ __forceinline__ float sum_columns(float (&x)[kColumns]) {
#pragma unroll
  for (int width = kColumns / 2, distance = kLanes / 2; width > 0; width /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      const float mine = upper ? x[c + width] : x[c];
      const float theirs = upper ? x[c] : x[c + width];
      x[c] = __fadd_rn(mine, __shfl_xor_sync(~0u, theirs, distance));
    }
  }
  float sum = x[0];
#pragma unroll
  for (int distance = kLanes / kColumns / 2; distance > 0; distance /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

struct State {
  float s[kColumns][4];

  // `from`: column 0 of the warp, this lane's elements; columns are KDIM apart.
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float4 four = *reinterpret_cast<const float4*>(from + c * KDIM);
      // The stock kernel adds what it reads to zeros, which turns -0 into 0.
      s[c][0] = __fadd_rn(0.f, four.x), s[c][1] = __fadd_rn(0.f, four.y);
      s[c][2] = __fadd_rn(0.f, four.z), s[c][3] = __fadd_rn(0.f, four.w);
    }
  }

  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      *reinterpret_cast<float4*>(to + c * KDIM) = make_float4(s[c][0], s[c][1], s[c][2], s[c][3]);
  }

  __device__ __forceinline__ void advance(const Step& step) {
    float dots[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[c][e] = __fmul_rn(s[c][e], step.alpha);
      dots[c] = dot4(step.k, s[c]);
    }
    const float mine = __fmul_rn(__fsub_rn(step.v, sum_columns(dots)), step.beta);
    const int group = threadIdx.x % 32 / kLanes * kLanes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float u = __shfl_sync(~0u, mine, group + c * (kLanes / kColumns));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[c][e] = __fmaf_rn(step.k[e], u, s[c][e]);
    }
  }

  // o of the lane's column.
  __device__ __forceinline__ float read(const float (&q)[4]) const {
    float dots[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) dots[c] = dot4(q, s[c]);
    return sum_columns(dots);
  }
};

// What the replay of rows reads, for one layer.
struct Rows {
  const u16* kv;         // [rows, key heads * KDIM + value heads * VDIM], after the convolution
  const float* k_scale;  // [rows, key heads]
  const float* g;        // [rows, value heads]
  const float* beta;
};

struct Heads {
  int key_heads, value_heads, key_head, value_head;

  __device__ __forceinline__ Heads(int keys, int values, int head)
      : key_heads(keys), value_heads(values), key_head(head / (values / keys)), value_head(head) {}
};

// Four elements of a row's key or query that this lane holds.
__device__ __forceinline__ void load_key(const u16* from, float scale, float (&to)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from + threadIdx.x % kLanes * 4);
  to[0] = __fmul_rn(scale, low_half(words.x)), to[1] = __fmul_rn(scale, high_half(words.x));
  to[2] = __fmul_rn(scale, low_half(words.y)), to[3] = __fmul_rn(scale, high_half(words.y));
}

// `column`: the lane's, within the head.
__device__ __forceinline__ Step load_step(const Rows& from, const Heads& h, i64 row, int column) {
  const int keys = h.key_heads * KDIM;
  const u16* kv = from.kv + row * (keys + h.value_heads * VDIM);
  Step step;
  load_key(kv + h.key_head * KDIM, from.k_scale[row * h.key_heads + h.key_head], step.k);
  step.v = from_bf16(kv[keys + h.value_head * VDIM + column]);
  step.alpha = exponential(from.g[row * h.value_heads + h.value_head]);
  step.beta = from.beta[row * h.value_heads + h.value_head];
  return step;
}
