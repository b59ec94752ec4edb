// What the kernels of a Gated DeltaNet layer share: shapes, PTX helpers, and the exact arithmetic
// of the stock kernel (SGLang's fused_sigmoid_gating_delta_rule_update as Triton 3.6 compiles it
// for sm_90), so that chains have its bits.
//
// Compile-time: KDIM and VDIM, the key and value dimensions of a head (64 or 128).
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int kLanes = KDIM / 4;  // lanes that share a key: four neighbouring elements each
constexpr int kUnused = -2;       // parent of a row that no node has

// ---- PTX helpers -------------------------------------------------------------------------------

// The approximations that the stock kernel uses. CUDA's own functions differ from them in places.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float divide(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Two products of bfloat16, each rounded to bfloat16. (mul.bf16x2 exists since sm_90 only; the
// product plus -0 is the product.)
__device__ __forceinline__ u32 multiply_bf16x2(u32 x, u32 y) {
  u32 z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

// The nearest bfloat16 of two floats, ties to even; `low` in the lower half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u16 to_bf16(float value) {
  u16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return rounded;
}

// ---- arithmetic of the stock kernel ------------------------------------------------------------
//
// Roundings are written out, so that no compiler fuses what the stock kernel does not, or the
// other way round.

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }
__device__ __forceinline__ float from_bf16(u16 bits) { return low_half(bits); }

__device__ __forceinline__ float exponential(float x) {
  return exp2_approx(__fmul_rn(x, 1.4426950216293335f));
}

// log(x) for x >= 1, infinity or NaN: the polynomial of CUDA's logf.
__device__ __forceinline__ float logarithm(float x) {
  const u32 bits = __float_as_uint(x);
  const u32 exponent = (bits - 0x3F2AAAAB) & 0xFF800000;
  const float m = __fadd_rn(__uint_as_float(bits - exponent), -1.f);
  const float e = __fmaf_rn(static_cast<float>(static_cast<int>(exponent)), 0x1p-23f, 0.f);
  float r = __fmaf_rn(__uint_as_float(0xBE055027), m, __uint_as_float(0x3E1039F6));
  r = __fmaf_rn(r, m, __uint_as_float(0xBDF8CDCC));
  r = __fmaf_rn(r, m, __uint_as_float(0x3E0F2955));
  r = __fmaf_rn(r, m, __uint_as_float(0xBE2AD8B9));
  r = __fmaf_rn(r, m, __uint_as_float(0x3E4CED0B));
  r = __fmaf_rn(r, m, __uint_as_float(0xBE7FFF22));
  r = __fmaf_rn(r, m, __uint_as_float(0x3EAAAA78));
  r = __fmaf_rn(r, m, -0.5f);
  r = __fmaf_rn(__fmul_rn(m, r), m, m);
  r = __fmaf_rn(e, __uint_as_float(0x3F317218), r);
  const float infinite = __uint_as_float(0x7F800000);
  return bits >= 0x7F800000 ? __fmaf_rn(x, infinite, infinite) : r;
}

__device__ __forceinline__ float sigmoid(float x) {
  return divide(1.f, __fadd_rn(exponential(__fsub_rn(0.f, x)), 1.f));
}

// x sigmoid(x), as the stock convolution rounds it.
__device__ __forceinline__ float silu(float x) {
  return divide(x, __fadd_rn(exponential(__fsub_rn(0.f, x)), 1.f));
}

// log of the decay: -exp(a_log) softplus(a + dt_bias), the softplus linear above 20.
__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
  const float x = __fadd_rn(a, dt_bias);
  const float softplus = x <= 20.f ? logarithm(__fadd_rn(exponential(x), 1.f)) : x;
  return __fmul_rn(__fsub_rn(0.f, exponential(a_log)), softplus);
}

// x . y over this lane's four elements, in the stock kernel's order.
__device__ __forceinline__ float dot4(const float (&x)[4], const float (&y)[4]) {
  const float first = __fmaf_rn(x[0], y[0], __fmul_rn(x[1], y[1]));
  return __fmaf_rn(x[3], y[3], __fmaf_rn(x[2], y[2], first));
}

// The sum over the lanes that share a key, in all of them.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
