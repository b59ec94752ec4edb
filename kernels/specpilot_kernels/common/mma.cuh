#pragma once
// Products of bfloat16 on the tensor cores of every GPU since sm_80.

// d [16, 8] += A [16, 16] x B [16, 8], summed in float32, by a warp. Thread t has of A rows t / 4
// and t / 4 + 8, of B column t / 4, and of both k = 2 (t % 4), + 1, + 8, + 9.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
