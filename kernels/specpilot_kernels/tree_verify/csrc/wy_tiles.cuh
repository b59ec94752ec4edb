// The matrix products of WY verify on tensor cores, and where everything lies in shared memory.
//
// Compile-time: KDIM, VDIM, ROWS (tree rows rounded up to a multiple of 8), BLOCKS_PER_SM.
#pragma once

#include "wy_common.cuh"

constexpr int kWorkers = 256;                    // threads that multiply
constexpr int kWalkers = ROWS <= 40 ? 32 : 64;    // threads that walk up the tree
constexpr int kThreads = kWorkers + kWalkers;
constexpr int kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlock = ROWS < 32 ? ROWS : 32;    // rows that are solved at once
constexpr int kSolved = (ROWS + kBlock - 1) / kBlock * kBlock;
constexpr int kTablePitch = kSolved + 4;
static_assert(kWorkers / 32 == 2 * kSlice / 16, "a worker's tile: 16 columns times all rows");

struct Node {
  float alpha;
  int parent;
};

// `system` and `weights` are transposed, [column j][row i], so that four rows are one access.
struct Shared {
  u16 keys[16 * kRowTiles][kKeyPitch];
  u16 queries[16 * kRowTiles][kKeyPitch];
  u16 values[ROWS][kValuePitch];
  float system[ROWS][kTablePitch];   // decay from row j to row i, then A_ij
  float weights[ROWS][kTablePitch];  // the same, then what o_i takes of u_j
  float right[kSolved][kPitch];      // right sides R, then U
  float out[ROWS][kPitch];           // gamma_i S0^T q_i
  Node nodes[ROWS];
  Factors factors[ROWS];
};

// ---- the state ---------------------------------------------------------------------------------

// A worker's part of S0 [columns, KDIM]: rows t / 4 and t / 4 + 8 of its warp's 16 columns, and of
// every 16 elements of the key dimension four neighbouring ones. A product over k may take k in any
// order as long as both operands do, so these four stand for the operand's k = 2t, +1, +8, +9.
struct StateTile {
  float4 part[kSteps][2];
};

__device__ __forceinline__ void load_state(const float* from, StateTile& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      s.part[step][half] = *reinterpret_cast<const float4*>(
          from + (lane / 4 + 8 * half) * KDIM + 16 * step + 4 * (lane % 4));
}

// Whether any element is not finite or at least 2^60. Products with keys whose norms are not yet
// taken off could overflow, and from 2^127 on a rounded part could.
__device__ __forceinline__ bool cannot_split(const StateTile& s) {
  u32 most = 0;
  const auto see = [&](float x) { most = max(most, __float_as_uint(x) & 0x7FFFFFFF); };
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4& x = s.part[step][half];
      see(x.x), see(x.y), see(x.z), see(x.w);
    }
  return most >= 0x5D800000;
}

// S0 = s[0] + s[1] + s[2], three bfloat16 each: all 24 bits of a float.
__device__ __forceinline__ void split(float4 (&x)[2], u32 (&s)[3][4]) {
#pragma unroll
  for (int part = 0; part < 3; ++part)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      s[part][half] = take_leading(x[half].x, x[half].y);
      s[part][half + 2] = take_leading(x[half].z, x[half].w);
    }
}

// d = S0^T times the rows' keys or queries. Each 16 elements of k are summed on tensor cores, the
// smallest parts first, and these sums rounded to nearest: tensor cores cut off what does not fit.
__device__ __forceinline__ void multiply_state(StateTile& s, const u16 (*rows)[kKeyPitch],
                                               Products& p) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 parts[3][4];
    split(s.part[step], parts);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
      const uint2 b = load_pairs(rows, 8 * n + threadIdx.x % 32 / 4, step);
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      mma(sum, parts[2], b.x, b.y);
      mma(sum, parts[1], b.x, b.y);
      mma(sum, parts[0], b.x, b.y);
#pragma unroll
      for (int i = 0; i < 4; ++i) p.d[n][i] = step ? __fadd_rn(p.d[n][i], sum[i]) : sum[i];
    }
  }
}

// S0^T times the rows' keys or queries with their scales, for states that cannot be split; slow.
__device__ __forceinline__ void multiply_state_plainly(const Shared& s, const float* state,
                                                       bool of_queries, Products& p) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) p.d[n][i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < KDIM; ++k) {
    const float of_state[2] = {state[lane / 4 * KDIM + k], state[(lane / 4 + 8) * KDIM + k]};
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + lane % 4 * 2 + i % 2;
        const float scale = of_queries ? s.factors[row].q_scale : s.factors[row].k_scale;
        const u16 element = of_queries ? s.queries[row][k] : s.keys[row][k];
        p.d[n][i] = __fmaf_rn(of_state[i / 2], __fmul_rn(scale, from_bf16(element)), p.d[n][i]);
      }
  }
}

// ---- keys among each other ---------------------------------------------------------------------

// d [16, 8] = rows `tile` of `left` times rows `n` of the keys.
__device__ __forceinline__ void multiply_rows(const u16 (*left)[kKeyPitch],
                                              const u16 (*keys)[kKeyPitch], int tile, int n,
                                              float (&d)[4]) {
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 0.f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint2 upper = load_pairs(left, 16 * tile + row, step);
    const uint2 lower = load_pairs(left, 16 * tile + row + 8, step);
    const uint2 b = load_pairs(keys, 8 * n + row, step);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    mma(sum, {upper.x, lower.x, upper.y, lower.y}, b.x, b.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = __fadd_rn(d[i], sum[i]);
  }
}

// Turn decays into A_ij = beta_i D_ij k_i.k_j and weights D_ij q_i.k_j, a tile per warp and turn.
__device__ __forceinline__ void fill_tables(Shared& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < 2 * kTableTiles; t += kWorkers / 32) {
    const bool of_queries = t % 2;
    int tile = 0, n = t / 2;
    for (int row = min(2, kColumnTiles); n >= row; row = min(2 * tile + 2, kColumnTiles))
      n -= row, ++tile;
    float d[4];
    multiply_rows(of_queries ? s.queries : s.keys, s.keys, tile, n, d);
    auto& table = of_queries ? s.weights : s.system;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * tile + lane / 4 + 8 * (e / 2), j = 8 * n + lane % 4 * 2 + e % 2;
      if (i >= ROWS) continue;
      const float decay = table[j][i];
      if (decay == 0.f) continue;  // no ancestor: stays zero whatever the product
      const float scale = of_queries ? s.factors[i].q_scale
                                     : __fmul_rn(s.factors[i].beta, s.factors[i].k_scale);
      table[j][i] = __fmul_rn(__fmul_rn(decay, __fmul_rn(scale, s.factors[j].k_scale)), d[e]);
    }
  }
}
