// What both forms of WY verify have in common: parameters, factors of a row, and how tensor cores
// are given their operands.
//
// Compile-time: KDIM, VDIM, ROWS (tree rows rounded up to a multiple of 8).
#pragma once

#include "gdn.cuh"

constexpr int kSlice = 64;                   // columns of S that a block has
constexpr int kRowTiles = (ROWS + 15) / 16;  // of 16 rows, the A operand
constexpr int kSteps = KDIM / 16;
constexpr int kKeyPitch = KDIM + 16;         // spreads eight rows over all banks
constexpr int kValuePitch = kSlice + 8;
constexpr int kPitch = kSlice + 4;           // of right sides and outputs

struct Params {
  const u16* q;          // [requests * rows, key heads * KDIM], after the convolution
  const float* q_scale;  // [requests * rows, key heads]: 1 / |q|
  const u16* kv;         // [requests * rows, key heads * KDIM + value heads * VDIM]
  const float* k_scale;  // [requests * rows, key heads]: 1 / |k|
  const float* g;        // [requests * rows, value heads]
  const float* beta;
  const float* states;   // committed: [slots, value heads, VDIM, KDIM]
  const i64* slot;       // [requests]
  const int* parent;     // [requests, rows]
  u16* out;              // [requests * rows, value heads, VDIM]
  i64 state_slot;
  float scale;           // KDIM^-1/2
  int rows, key_heads, value_heads, slots;
};

// Factors of a row.
struct Factors {
  float beta;
  float k_scale, q_scale;  // 1 / |k|, KDIM^-1/2 / |q|
  float decay;             // from the committed state
  float k_decay, q_decay;  // the same times the scale
};

// Take the leading bfloat16 off two floats and leave the rest; exact.
__device__ __forceinline__ u32 take_leading(float& low, float& high) {
  const u32 pair = to_bf16x2(low, high);
  low = __fsub_rn(low, low_half(pair));
  high = __fsub_rn(high, high_half(pair));
  return pair;
}

// The same four elements of k of a row: the B operand, or with another row half of the A operand.
__device__ __forceinline__ uint2 load_pairs(const u16 (*rows)[kKeyPitch], int row, int step) {
  return *reinterpret_cast<const uint2*>(&rows[row][16 * step + 4 * (threadIdx.x % 4)]);
}

struct Products {
  float d[ROWS / 8][4];  // rows 8 n + 2t, + 1 for columns t / 4 and t / 4 + 8
};

// Tiles of 16 x 8 with a row that may have an ancestor among the columns: below the diagonal.
constexpr int kColumnTiles = ROWS / 8;
__device__ constexpr int tiles_before(int tile) {
  int count = 0;
  for (int i = 0; i < tile; ++i) count += 2 * i + 2 < kColumnTiles ? 2 * i + 2 : kColumnTiles;
  return count;
}
constexpr int kTableTiles = tiles_before(kRowTiles);
