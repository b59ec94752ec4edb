#pragma once
// Eight BF16 values as 16 bytes.

typedef unsigned int u32;

struct __align__(16) Vector {
  u32 pairs[VECTOR / 2];
};

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Both rounded to nearest, ties to even.
__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
