// RMS norm of BF16 rows, with or without a residual that is added first. One block per row.
//
// The sum of squares is taken in a fixed order: in each thread over its vectors, in each warp over
// its threads by halves, then over the warps by halves. It is the order of FlashInfer's kernel,
// which SGLang uses, so that results agree.
#include "common/dependent_launch.cuh"
#include "bf16.cuh"

typedef long long i64;

constexpr u32 kWarp = 32;
constexpr u32 kEveryLane = 0xFFFFFFFFu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kEveryLane, value, distance);
  return value;
}

__device__ __forceinline__ float block_sum(float value, float* sums) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    value = warp_sum(threadIdx.x < blockDim.x / kWarp ? sums[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) sums[0] = value;
  }
  __syncthreads();
  return sums[0];
}

// x, out [rows, cols], weight [cols], residual [rows, cols] or null, all BF16; strides in elements.
// residual += x, rounded; out = (residual before rounding) / rms * (weight + weight_bias).
// cols: a multiple of VECTOR, at most VECTOR * ROUNDS * blockDim.x. out may be x.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    rms_norm(const Vector* x, Vector* out, const Vector* weight, Vector* residual, int cols,
             i64 x_stride, i64 out_stride, i64 residual_stride, float eps, float weight_bias) {
  __shared__ float sums[MAX_THREADS / kWarp];

  const int vectors = cols / VECTOR;
  Vector weights[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int at = round * blockDim.x + threadIdx.x;
    if (at < vectors) weights[round] = weight[at];  // no kernel makes it, so it need not wait
  }
  wait_then_let_next_start();

  x += blockIdx.x * x_stride / VECTOR;
  out += blockIdx.x * out_stride / VECTOR;
  const bool adds = residual != nullptr;
  if (adds) residual += blockIdx.x * residual_stride / VECTOR;
  float values[ROUNDS][VECTOR];
  float sum = 0.0f;
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int at = round * blockDim.x + threadIdx.x;
    if (at >= vectors) continue;
    const Vector given = x[at];
    Vector added{};
    if (adds) added = residual[at];
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
      values[round][2 * i] = low(given.pairs[i]) + low(added.pairs[i]);
      values[round][2 * i + 1] = high(given.pairs[i]) + high(added.pairs[i]);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += values[round][i] * values[round][i];
    if (adds) {
#pragma unroll
      for (int i = 0; i < VECTOR / 2; ++i)
        added.pairs[i] = to_pair(values[round][2 * i], values[round][2 * i + 1]);
      residual[at] = added;
    }
  }
  const float scale = rsqrtf(block_sum(sum, sums) / static_cast<float>(cols) + eps);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int at = round * blockDim.x + threadIdx.x;
    if (at >= vectors) continue;
    Vector normed;
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
      const u32 pair = weights[round].pairs[i];
      normed.pairs[i] = to_pair(values[round][2 * i] * scale * (weight_bias + low(pair)),
                                values[round][2 * i + 1] * scale * (weight_bias + high(pair)));
    }
    out[at] = normed;
  }
}
