#pragma once
// Background copies into shared memory (cp.async), and prefetches.

// The 32-bit address of a generic pointer to shared memory.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes to shared memory in the background; of the source only `bytes`, then zeros.
__device__ __forceinline__ void copy16(unsigned target, const void* source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes) : "memory");
}

// Close the group of this thread's background copies since the last call.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most `pending` of this thread's groups, the latest ones, are unfinished.
template <int pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Ask for the 128 bytes around `source` to be brought into L2.
__device__ __forceinline__ void prefetch(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}
