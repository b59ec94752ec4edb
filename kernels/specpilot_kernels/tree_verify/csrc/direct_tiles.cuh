// Direct WY verify: its products on tensor cores, where everything lies in shared memory, and who
// waits for whom.
//
// Compile-time: KDIM, VDIM, ROWS (tree rows rounded up to a multiple of 8).
#pragma once

#include "wy_common.cuh"

constexpr int kMultipliers = 256;  // threads that have the state: half of 16 columns per warp
constexpr int kSolvers = 128;      // threads that have the tables: a row each, and more than that
constexpr int kThreads = kMultipliers + kSolvers;
constexpr int kWarps = kThreads / 32;
// Threads that registers are for: up to 40 rows more than there are, so that a block of `rows` has
// room beside one of us.
constexpr int kRegisterThreads = ROWS <= 40 ? 512 : kThreads;
constexpr int kWarpSteps = kSteps / 2;  // that a multiplying warp has
constexpr int kTablePitch = ROWS + 4;
static_assert(kMultipliers / 32 == 2 * kSlice / 16, "a warp multiplies half of 16 columns");
static_assert(ROWS <= kSolvers && ROWS % 8 == 0, "a row per solver");

struct Shared {
  u16 keys[16 * kRowTiles][kKeyPitch];
  u16 queries[16 * kRowTiles][kKeyPitch];
  u16 values[ROWS][kValuePitch];
  float system[ROWS][kTablePitch];   // [row i][row j]: A_ij; nobody reads the diagonal
  float weights[ROWS][kTablePitch];  // [row j][row i]: decay from j to i, then P_ij, then W_ij
  float right[ROWS][kPitch];         // R
  float out[ROWS][kPitch];           // gamma_i S0^T q_i
  float alpha[ROWS];
  int parent[ROWS];
  int plainly[kMultipliers / 32];  // of a multiplying warp: its half of the state cannot be split
  Factors factors[ROWS];
  u8 path[ROWS][ROWS];  // [step][row]: the row itself, its parent, and so on to the root
};

// ---- barriers ----------------------------------------------------------------------------------

__device__ __forceinline__ void solvers_meet() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kSolvers) : "memory");
}

__device__ __forceinline__ void halves_meet() {
  asm volatile("barrier.sync 3, %0;" ::"n"(kMultipliers) : "memory");
}

// The tables are full: multipliers say so and go on, solvers wait for all.
__device__ __forceinline__ void tables_are_full() {
  asm volatile("barrier.arrive 2, %0;" ::"n"(kThreads) : "memory");
}
__device__ __forceinline__ void wait_for_tables() {
  asm volatile("barrier.sync 2, %0;" ::"n"(kThreads) : "memory");
}

// ---- the state ---------------------------------------------------------------------------------

// A lane's part of S0 [columns, KDIM]: of its warp's 16 columns t / 4 and t / 4 + 8, of the warp's
// half of the key dimension four neighbouring elements of every 16. A product over k may take k in
// any order as long as both operands do, so these four stand for the operand's k = 2t, +1, +8, +9.
struct StateTile {
  float4 part[kWarpSteps][2];
};

__device__ __forceinline__ void load_state(const float* from, StateTile& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kWarpSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      s.part[step][half] = __ldcg(reinterpret_cast<const float4*>(
          from + (lane / 4 + 8 * half) * KDIM + 16 * step + 4 * (lane % 4)));
}

// Whether any element is not finite or at least 2^60. Products with keys whose norms are not yet
// taken off could overflow, and from 2^127 on a rounded part could.
__device__ __forceinline__ bool cannot_split(const StateTile& s) {
  u32 most = 0;
  const auto see = [&](float x) { most = max(most, __float_as_uint(x) & 0x7FFFFFFF); };
#pragma unroll
  for (int step = 0; step < kWarpSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4& x = s.part[step][half];
      see(x.x), see(x.y), see(x.z), see(x.w);
    }
  return most >= 0x5D800000;
}

// S0 = part[.][0] + part[.][1] + part[.][2], three bfloat16 each: all 24 bits of a float.
struct StateParts {
  u32 part[kWarpSteps][3][4];
};

__device__ __forceinline__ void split(StateTile& s, StateParts& parts) {
#pragma unroll
  for (int step = 0; step < kWarpSteps; ++step)
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4& x = s.part[step][half];
        parts.part[step][part][half] = take_leading(x.x, x.y);
        parts.part[step][part][half + 2] = take_leading(x.z, x.w);
      }
}

// d = this half of S0^T times the rows' keys or queries, of which the half begins at step `begin`.
// Tensor cores cut off what does not fit, so each 16 elements of k are summed there and these sums
// rounded to nearest. The two small parts stay there: what is cut off them is too small to matter.
// As their sums go on, the compiler keeps many products under way; with sums over all three parts
// it does one row tile after the other, and waits three times as long.
template <int from, int kTiles>
__device__ __forceinline__ void multiply_tiles(const StateParts& s, const u16 (*rows)[kKeyPitch],
                                               int begin, Products& p) {
  float small[kTiles][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) small[n][i] = 0.f;
#pragma unroll
  for (int step = 0; step < kWarpSteps; ++step) {
    float sum[kTiles][4];
    uint2 b[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      b[n] = load_pairs(rows, 8 * (from + n) + threadIdx.x % 32 / 4, begin + step);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(small[n], s.part[step][2], b[n].x, b[n].y);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(sum[n], s.part[step][0], b[n].x, b[n].y);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(small[n], s.part[step][1], b[n].x, b[n].y);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& d = p.d[from + n][i];
        d = step ? __fadd_rn(d, sum[n][i]) : sum[n][i];
      }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) p.d[from + n][i] = __fadd_rn(p.d[from + n][i], small[n][i]);
}

__device__ __forceinline__ void multiply_state(const StateParts& s, const u16 (*rows)[kKeyPitch],
                                               int begin, Products& p) {
  constexpr int kTiles = ROWS / 8, kFirst = kTiles < 5 ? kTiles : 5;  // as registers allow
  multiply_tiles<0, kFirst>(s, rows, begin, p);
  if constexpr (kTiles > kFirst) multiply_tiles<kFirst, kTiles - kFirst>(s, rows, begin, p);
}

// The same with the scales of keys or queries, for states that cannot be split; slow.
__device__ __forceinline__ void multiply_state_plainly(const Shared& s, const float* state,
                                                       bool of_queries, int begin, Products& p) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) p.d[n][i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < KDIM / 2; ++k) {
    const float of_state[2] = {__ldcg(state + lane / 4 * KDIM + k),
                               __ldcg(state + (lane / 4 + 8) * KDIM + k)};
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + lane % 4 * 2 + i % 2;
        const float scale = of_queries ? s.factors[row].q_scale : s.factors[row].k_scale;
        const u16* vector = of_queries ? s.queries[row] : s.keys[row];
        const float element = __fmul_rn(scale, from_bf16(vector[16 * begin + k]));
        p.d[n][i] = __fmaf_rn(of_state[i / 2], element, p.d[n][i]);
      }
  }
}

// ---- keys among each other ---------------------------------------------------------------------

// d [16, 8] = rows `tile` of `left` times rows `n` of the keys.
__device__ __forceinline__ void multiply_rows(const u16 (*left)[kKeyPitch],
                                              const u16 (*keys)[kKeyPitch], int tile, int n,
                                              float (&d)[4]) {
  const int row = threadIdx.x % 32 / 4;
  float sum[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint2 upper = load_pairs(left, 16 * tile + row, step);
    const uint2 lower = load_pairs(left, 16 * tile + row + 8, step);
    const uint2 b = load_pairs(keys, 8 * n + row, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[step][i] = 0.f;
    mma(sum[step], {upper.x, lower.x, upper.y, lower.y}, b.x, b.y);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    d[i] = sum[0][i];
#pragma unroll
    for (int step = 1; step < kSteps; ++step) d[i] = __fadd_rn(d[i], sum[step][i]);
  }
}

// Turn decays into A_ij = beta_i D_ij k_i.k_j and P_ij = D_ij q_i.k_j, a tile per warp and turn.
__device__ __forceinline__ void fill_tables(Shared& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < kTableTiles; t += kWarps) {
    int tile = 0, n = t;
    for (int row = min(2, kColumnTiles); n >= row; row = min(2 * tile + 2, kColumnTiles))
      n -= row, ++tile;
    float of_keys[4], of_queries[4];
    multiply_rows(s.keys, s.keys, tile, n, of_keys);
    multiply_rows(s.queries, s.keys, tile, n, of_queries);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * tile + lane / 4 + 8 * (e / 2), j = 8 * n + lane % 4 * 2 + e % 2;
      if (i >= ROWS) continue;
      const Factors& own = s.factors[i];
      const float decay = s.weights[j][i], scale = __fmul_rn(decay, s.factors[j].k_scale);
      const float a = __fmul_rn(__fmul_rn(__fmul_rn(own.beta, own.k_scale), scale), of_keys[e]);
      const float p = __fmul_rn(__fmul_rn(own.q_scale, scale), of_queries[e]);
      s.system[i][j] = decay == 0.f ? 0.f : a;  // no ancestor: zero whatever the product
      s.weights[j][i] = decay == 0.f ? 0.f : p;
    }
  }
}
