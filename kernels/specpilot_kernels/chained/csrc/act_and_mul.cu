// The gated activation of an MLP: out = act(gate) * up, where a row of x is gate, then up.
//
// The activation and the product are taken in FP32 and rounded once, as SGLang does.
#include "common/dependent_launch.cuh"
#include "bf16.cuh"

typedef long long i64;

__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 0  // silu
  return x / (1.0f + expf(-x));
#elif ACTIVATION == 1  // gelu
  return x * (0.5f * (1.0f + erff(x * 0.7071067811865475f)));
#else  // gelu, by tanh
  return x * (0.5f * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))));
#endif
}

// x [rows, 2 * cols], out [rows, cols], BF16; vectors = cols / VECTOR, x_stride in elements.
// A grid of rows by pieces of a row: no thread divides.
extern "C" __global__ void __launch_bounds__(THREADS)
    act_and_mul(const Vector* x, Vector* out, int vectors, i64 x_stride) {
  const i64 row = blockIdx.x;
  const int vector = int(blockIdx.y) * THREADS + threadIdx.x;
  if (vector >= vectors) return;
  const Vector* gate = x + row * (x_stride / VECTOR) + vector;
  wait_then_let_next_start();
  const Vector gates = gate[0];
  const Vector ups = gate[vectors];
  Vector made;
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i)
    made.pairs[i] = to_pair(activated(low(gates.pairs[i])) * low(ups.pairs[i]),
                            activated(high(gates.pairs[i])) * high(ups.pairs[i]));
  out[row * vectors + vector] = made;
}
