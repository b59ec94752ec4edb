#pragma once
// Programmatic dependent launch, which exists since sm_90; before, these do nothing.

// Let the next kernel of the stream start; it still waits for our results by itself.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until every kernel this one was launched to depend on has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a small kernel: the next one sets itself up while we compute. If we let it start any earlier,
// its blocks would look for room between ours and those of the kernel that still runs ahead of us;
// of a kernel with one large block per multiprocessor some would then share one, and it would wait
// for those.
__device__ __forceinline__ void wait_then_let_next_start() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}
