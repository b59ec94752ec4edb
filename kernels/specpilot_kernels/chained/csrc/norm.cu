// RMS norm of BF16 rows, with or without a residual that is added first. One block per row.
//
// The sum of squares is taken in the order of FlashInfer's kernel, which SGLang uses, so that
// results agree: in each of up to 1024 threads over its vectors, in each warp by halves, then over
// the warps by halves. A block here has fewer threads, because it must find room beside two blocks
// of the product; each of its warps does the work of several of those, which are called parts.
//
// Compile-time: THREADS; KEPT, how many vectors a thread holds from the sum to the result, or 0:
// it reads them again, which needs fewer registers and takes rows of any length.
#include "common/dependent_launch.cuh"
#include "bf16.cuh"

typedef long long i64;

constexpr int kWarp = 32;
constexpr u32 kEveryLane = 0xFFFFFFFFu;
constexpr int kMostParts = 1024 / kWarp;
constexpr int kWarps = THREADS / kWarp;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kEveryLane, value, distance);
  return value;
}

// What is added up at one place of a row.
struct Terms {
  Vector given, added;
  __device__ __forceinline__ float low_sum(int i) const {
    return low(given.pairs[i]) + low(added.pairs[i]);
  }
  __device__ __forceinline__ float high_sum(int i) const {
    return high(given.pairs[i]) + high(added.pairs[i]);
  }
};

// A row: x, and the residual or null.
struct Row {
  const Vector* x;
  Vector* residual;
  Vector* out;

  __device__ __forceinline__ Terms read(int at) const {
    Terms found{x[at], {}};
    if (residual != nullptr) found.added = residual[at];
    return found;
  }
  // The sum, rounded, becomes the residual; its norm goes out.
  __device__ __forceinline__ void write(int at, const Terms& terms, const Vector& weight,
                                        float scale, float weight_bias) const {
    Vector sum, normed;
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
      const float first = terms.low_sum(i), second = terms.high_sum(i);
      sum.pairs[i] = to_pair(first, second);
      normed.pairs[i] = to_pair(first * scale * (weight_bias + low(weight.pairs[i])),
                                second * scale * (weight_bias + high(weight.pairs[i])));
    }
    if (residual != nullptr) residual[at] = sum;
    out[at] = normed;
  }
};

__device__ __forceinline__ float add_squares(float sum, const Terms& terms) {
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i) {
    const float first = terms.low_sum(i), second = terms.high_sum(i);
    sum += first * first;
    sum += second * second;
  }
  return sum;
}

// x, out [rows, cols], weight [cols], residual [rows, cols] or null, all BF16; strides in elements.
// residual += x, rounded; out = (residual before rounding) / rms * (weight + weight_bias).
// cols: a multiple of VECTOR; with KEPT at most VECTOR * KEPT * THREADS. out may be x.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    rms_norm(const Vector* x, Vector* out, const Vector* weight, Vector* residual, int cols,
             i64 x_stride, i64 out_stride, i64 residual_stride, float eps, float weight_bias) {
  __shared__ float sums[kMostParts];
  let_next_kernel_start();

  const i64 row_index = blockIdx.x;
  const Row row{x + row_index * (x_stride / VECTOR),
                residual == nullptr ? nullptr : residual + row_index * (residual_stride / VECTOR),
                out + row_index * (out_stride / VECTOR)};
  const int vectors = cols / VECTOR;
  const int parts = min(kMostParts, (vectors + kWarp - 1) / kWarp);
  const int lane = threadIdx.x % kWarp;
  const auto total = [&]() {
    __syncthreads();
    const float sum = warp_sum(lane < parts ? sums[lane] : 0.0f);
    return rsqrtf(sum / static_cast<float>(cols) + eps);
  };

  // No kernel makes the weight, so it need not wait.
#if KEPT
  Vector weights[KEPT];
  Terms kept[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at < vectors) weights[i] = weight[at];
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at < vectors) kept[i] = row.read(at);
  }
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int at = i * THREADS + threadIdx.x, part = at / kWarp;
    const float sum = warp_sum(at < vectors ? add_squares(0.0f, kept[i]) : 0.0f);
    if (lane == 0 && part < parts) sums[part] = sum;
  }
  const float scale = total();
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at < vectors) row.write(at, kept[i], weights[i], scale, weight_bias);
  }
#else
  for (int at = threadIdx.x; at < vectors; at += THREADS)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + at));
  wait_for_previous_kernel();
  for (int part = threadIdx.x / kWarp; part < parts; part += kWarps) {
    float sum = 0.0f;
    for (int at = part * kWarp + lane; at < vectors; at += parts * kWarp)
      sum = add_squares(sum, row.read(at));
    sum = warp_sum(sum);
    if (lane == 0) sums[part] = sum;
  }
  const float scale = total();
  for (int at = threadIdx.x; at < vectors; at += THREADS)
    row.write(at, row.read(at), weight[at], scale, weight_bias);
#endif
}
