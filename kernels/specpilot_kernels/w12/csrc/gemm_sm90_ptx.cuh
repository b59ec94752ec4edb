// Hopper instructions that the W12 GEMM uses, one line about each.
#pragma once

#include "gemm.cuh"

constexpr int kAccumulators = COLS / 2;  // floats per consumer thread: 64 x COLS over 128 threads

// CUtensorMap of x: bfloat16 [rows, inputs], box [COLS, 64], 128-byte swizzle, zeros outside.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// The value itself, which the compiler must hold in a register instead of computing it anew.
__device__ __forceinline__ u32 keep(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Which multiprocessor we are on.
__device__ __forceinline__ u32 sm_index() {
  u32 index;
  asm volatile("mov.u32 %0, %smid;" : "=r"(index));
  return index;
}

// ---- barriers and bulk copies ------------------------------------------------------------------

// Prepare a barrier that completes a phase after `arrivals` arrivals and all expected bytes.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Make initialised barriers known to the copy engine.
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive once and announce `bytes` that the copy engine will write in this phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Wait until the phase of the given parity has completed; the hardware suspends the thread.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether the phase of the given parity has completed.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
  return passed;
}

// A policy for data that is read once: L2 may drop it first.
__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copy `bytes` of global memory to shared memory in the background.
__device__ __forceinline__ void copy_weights(u32 target, const void* source, u32 bytes, u32 barrier,
                                             u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Copy the box of x that begins at column `column` of row 0, swizzled as wgmma reads it.
__device__ __forceinline__ void copy_inputs(u32 target, const TensorMap& map, int column,
                                            u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target), "l"(&map), "r"(column), "r"(0), "r"(barrier)
      : "memory");
}

// ---- shared memory by address ------------------------------------------------------------------

__device__ __forceinline__ u32 load_u16(u32 address) {
  u32 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float load_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_float2(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// ---- matrix products ---------------------------------------------------------------------------

// Order our register writes before the wgmma that reads them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Descriptor of a [COLS, 64] bfloat16 block in shared memory, 128-byte swizzle, k contiguous:
// address / 16, 1024 bytes from one group of eight rows to the next, swizzle mode 1. The low word
// has the address, so 1 more is 16 bytes further; the high word is the same for all blocks.
__device__ __forceinline__ u32 descriptor_of(u32 address) {
  return 1u << 16 | (address & 0x3FFFF) >> 4;
}
__device__ __forceinline__ u64 inputs_descriptor(u32 low_word) {
  return u64{1u << 30 | 1024 >> 4} << 32 | low_word;
}

// acc [64, COLS] += A [64, 16] (registers) x B [16, COLS] (shared memory), asynchronously.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define WGMMA_IN(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const u32 (&a)[4], u64 b) {
#if COLS == 8
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8,"
      " 1, 1, 1, 0;"
      : D4(0) : WGMMA_IN(a, b));
#elif COLS == 16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},"
      " {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
      : D8(0) : WGMMA_IN(a, b));
#elif COLS == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : D8(0), D8(8) : WGMMA_IN(a, b));
#elif COLS == 48
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, {%24,%25,%26,%27}, %28,"
      " 1, 1, 1, 0;"
      : D8(0), D8(8), D8(16) : WGMMA_IN(a, b));
#elif COLS == 64
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : D8(0), D8(8), D8(16), D8(24) : WGMMA_IN(a, b));
#else
#error "COLS must be 8, 16, 32, 48 or 64"
#endif
}
