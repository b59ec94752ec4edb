// RMS norm of short BF16 rows times a gate, as behind gated delta networks. One warp per row.
//
// out = x / rms(x) * weight * gate(z), in FP32 and rounded once.
#include "common/dependent_launch.cuh"
#include "bf16.cuh"

typedef long long i64;

constexpr int kWarp = 32;
constexpr int kPairs = COLS / (2 * kWarp);  // of each lane
static_assert(COLS == 2 * kWarp * kPairs, "lanes share a row evenly");

struct __align__(4 * kPairs) Part {
  u32 pairs[kPairs];
};

__device__ __forceinline__ float gated(float value, float z) {
  const float sigmoid = 1.0f / (1.0f + expf(-z));
  return value * (SILU ? z * sigmoid : sigmoid);
}

// x, z, out [rows, COLS], weight [COLS], all BF16; strides of rows in elements, multiples of 8.
extern "C" __global__ void __launch_bounds__(THREADS)
    gated_rms_norm(const char* x, const char* z, char* out, const Part* weight, int rows,
                   i64 x_stride, i64 z_stride, float eps) {
  const int lane = threadIdx.x % kWarp;
  const i64 row = i64(blockIdx.x) * (THREADS / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const Part weights = weight[lane];
  wait_then_let_next_start();

  const Part given = reinterpret_cast<const Part*>(x + 2 * row * x_stride)[lane];
  const Part gates = reinterpret_cast<const Part*>(z + 2 * row * z_stride)[lane];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    sum += low(given.pairs[i]) * low(given.pairs[i]);
    sum += high(given.pairs[i]) * high(given.pairs[i]);
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  const float scale = rsqrtf(sum / COLS + eps);
  Part made;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const u32 pair = given.pairs[i], w = weights.pairs[i], gate = gates.pairs[i];
    made.pairs[i] = to_pair(gated(low(pair) * scale * low(w), low(gate)),
                            gated(high(pair) * scale * high(w), high(gate)));
  }
  reinterpret_cast<Part*>(out + 2 * row * COLS)[lane] = made;
}
