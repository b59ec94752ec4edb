// The arithmetic of the Gated DeltaNet kernels for `gpu_emulator.h`. Approximations of the GPU are
// exact functions here.
#pragma once
#include "gpu_emulator.h"

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
template <class T> T __shfl_xor_sync(unsigned, T value, int distance) {
  return emulator::with_warp(value, [=](auto of) { return of(emulator::current % 32 ^ distance); });
}
inline bool __any_sync(unsigned, bool value) {
  return emulator::with_warp(value, [&](auto of) {
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= of(lane);
    return any;
  });
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float sqrt_approx(float x) { return std::sqrt(x); }
inline float divide(float x, float y) { return x / y; }
inline unsigned to_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline unsigned multiply_bf16x2(unsigned x, unsigned y) {
  return to_bf16x2(half_of(x, 0) * half_of(y, 0), half_of(x, 1) * half_of(y, 1));
}

inline void solvers_meet() { emulator::meet(emulator::named[1], 128); }
inline void halves_meet() { emulator::meet(emulator::named[3], 256); }
inline void wait_for_tables() { emulator::meet(emulator::named[2], 384); }
inline void tables_are_full() {
  emulator::Barrier& barrier = emulator::named[2];
  if (++barrier.arrived == 384) barrier = {0, barrier.phase + 1};
}
