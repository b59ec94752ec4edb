// Everything of a Gated DeltaNet layer that each tree row does for itself, before the recurrence:
//
//   causal convolution along the row's root path, width 4, and SiLU     -> q, k, v (bfloat16)
//   1 / |q|, 1 / |k| of each key head                                   -> q_scale, k_scale
//   log decay g and write strength beta of each value head              -> g, beta
//
// with the stock kernels' bits: their convolution rounds every product to bfloat16 and adds oldest
// first. k, v, their scales, g, beta and the rows before the convolution are what a commit replays.
//
// A thread has four neighbouring channels of PER_BLOCK rows; the lanes of a key head sum their
// squares. The last block along x has the gates. Rows that no node has get zeros.
//
// Compile-time: KDIM, VDIM, PER_BLOCK.

#include "gdn.cuh"

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = PER_BLOCK;
constexpr int kWidth = 4;

struct Params {
  const u16* mixed;        // [requests * rows, channels], before the convolution: q, k, v
  const u16* a;            // [requests * rows, value heads]
  const u16* b;
  const u16* conv_weight;  // [channels, 4], oldest first
  const u16* conv_bias;    // [channels] or null
  const float* a_log;      // [value heads]
  const void* dt_bias;     // [value heads], float32 or bfloat16
  const u16* windows;      // committed: [slots, channels, 3], oldest first
  const i64* slot;         // [requests]; others than 0..slots - 1: nothing to do
  const int* parent;       // [requests, rows]
  const int* tap;          // [requests, rows, 4]: row, or negative: -1 newest committed
  u16* q;                  // [requests * rows, key heads * KDIM]
  u16* kv;                 // [requests * rows, key heads * KDIM + value heads * VDIM]
  u16* kept;               // copy of `mixed`, or null
  float* q_scale;          // [requests * rows, key heads]
  float* k_scale;
  float* g;                // [requests * rows, value heads]
  float* beta;
  i64 mixed_pitch, a_pitch, b_pitch, window_slot, window_channel, window_tap;
  int rows, key_heads, value_heads, channels, slots, dt_bias_is_bf16, conv_blocks;
};

struct Four {
  u32 pair[2];  // channels 0 and 1, 2 and 3
};

__device__ __forceinline__ Four load_four(const u16* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {{words.x, words.y}};
}
__device__ __forceinline__ void store_four(u16* to, const Four& x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(x.pair[0], x.pair[1]);
}

// A committed input of four channels; `tap` is -1 (newest), -2 or -3.
__device__ __forceinline__ Four load_window(const Params& p, i64 slot, int channel, int tap) {
  const u16* from = p.windows + slot * p.window_slot + channel * p.window_channel +
                    (kWidth - 1 + tap) * p.window_tap;
  u32 one[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) one[i] = from[i * p.window_channel];
  return {{one[0] | one[1] << 16, one[2] | one[3] << 16}};
}

// Weights of four channels, by tap.
__device__ __forceinline__ void load_weights(const Params& p, int channel, Four (&w)[kWidth]) {
  const uint4* from = reinterpret_cast<const uint4*>(p.conv_weight + kWidth * channel);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 two = from[half];  // two channels of four taps
    w[0].pair[half] = __byte_perm(two.x, two.z, 0x5410);
    w[1].pair[half] = __byte_perm(two.x, two.z, 0x7632);
    w[2].pair[half] = __byte_perm(two.y, two.w, 0x5410);
    w[3].pair[half] = __byte_perm(two.y, two.w, 0x7632);
  }
}

__device__ __forceinline__ Four convolve(const Four (&x)[kWidth], const Four (&w)[kWidth],
                                         const Four& bias) {
  Four y;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float low = low_half(bias.pair[half]), high = high_half(bias.pair[half]);
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap) {
      const u32 products = multiply_bf16x2(x[tap].pair[half], w[tap].pair[half]);
      low = __fadd_rn(low, low_half(products));
      high = __fadd_rn(high, high_half(products));
    }
    y.pair[half] = to_bf16x2(silu(low), silu(high));
  }
  return y;
}

// 1 / |x| over the lanes of a key head. The stock kernel spreads a key over all 32 lanes of a warp,
// and adds the farthest first: of 64 elements a lane has two, so those of ours that are neighbours
// meet last.
__device__ __forceinline__ float inverse_norm(const Four& x) {
  const float v[4] = {low_half(x.pair[0]), high_half(x.pair[0]), low_half(x.pair[1]),
                      high_half(x.pair[1])};
  float sum;
  if (KDIM == 64)
    sum = __fadd_rn(sum_of_lanes(__fmaf_rn(v[0], v[0], __fmul_rn(v[1], v[1]))),
                    sum_of_lanes(__fmaf_rn(v[2], v[2], __fmul_rn(v[3], v[3]))));
  else
    sum = sum_of_lanes(dot4(v, v));
  return divide(1.f, sqrt_approx(__fadd_rn(sum, 1e-6f)));
}

// Store four channels of one row where they belong. All lanes of a warp come here together.
__device__ __forceinline__ void store_row(const Params& p, i64 row, int channel, bool live,
                                          bool inside, const Four& y) {
  const int keys = p.key_heads * KDIM;
  const float scale = live ? inverse_norm(y) : 0.f;
  if (!inside) return;
  const bool first = threadIdx.x % kLanes == 0;
  if (channel < keys) {
    store_four(p.q + row * keys + channel, y);
    if (first) p.q_scale[row * p.key_heads + channel / KDIM] = scale;
    return;
  }
  store_four(p.kv + row * (p.channels - keys) + channel - keys, y);
  if (channel < 2 * keys && first)
    p.k_scale[row * p.key_heads + (channel - keys) / KDIM] = scale;
}

// The gates of this block's rows.
__device__ __forceinline__ void gates(const Params& p, i64 request, bool served) {
  for (int i = threadIdx.x; i < kRowsPerBlock * p.value_heads; i += kThreads) {
    const int row = kRowsPerBlock * blockIdx.y + i / p.value_heads, head = i % p.value_heads;
    if (row >= p.rows) return;
    const i64 at = request * p.rows + row;
    float g = 0.f, beta = 0.f;
    if (served && p.parent[at] != kUnused) {
      const float dt_bias = p.dt_bias_is_bf16 ? from_bf16(static_cast<const u16*>(p.dt_bias)[head])
                                              : static_cast<const float*>(p.dt_bias)[head];
      g = log_decay(from_bf16(p.a[at * p.a_pitch + head]), p.a_log[head], dt_bias);
      beta = sigmoid(from_bf16(p.b[at * p.b_pitch + head]));
    }
    p.g[at * p.value_heads + head] = g;
    p.beta[at * p.value_heads + head] = beta;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gdn_rows(const __grid_constant__ Params p) {
  const i64 request = blockIdx.z;
  if (static_cast<int>(blockIdx.x) == p.conv_blocks) {
    wait_then_let_next_start();
    const i64 slot = p.slot[request];
    gates(p, request, slot >= 0 && slot < p.slots);
    return;
  }
  const int wanted = 4 * (blockIdx.x * kThreads + threadIdx.x);
  const bool inside = wanted < p.channels;
  const int channel = inside ? wanted : 0;  // a lane that has none computes along
  Four weights[kWidth];
  load_weights(p, channel, weights);
  const Four bias = p.conv_bias ? load_four(p.conv_bias + channel) : Four{{0, 0}};
  wait_then_let_next_start();

  // All that says where to read from is asked for at once.
  const i64 slot = p.slot[request], base = request * p.rows;
  int parent[kRowsPerBlock];
  int4 taps[kRowsPerBlock];
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const i64 at = base + min(kRowsPerBlock * static_cast<int>(blockIdx.y) + i, p.rows - 1);
    parent[i] = p.parent[at];
    taps[i] = reinterpret_cast<const int4*>(p.tap)[at];
  }
  const bool served = slot >= 0 && slot < p.slots;
  Four x[kRowsPerBlock][kWidth];
  bool live[kRowsPerBlock];
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    live[i] = served && parent[i] != kUnused;
    if (!live[i]) continue;
    const int from[kWidth] = {taps[i].x, taps[i].y, taps[i].z, taps[i].w};
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
      if (from[tap] >= 0)
        x[i][tap] = load_four(p.mixed + (base + from[tap]) * p.mixed_pitch + channel);
      else
        x[i][tap] = load_window(p, slot, channel, from[tap]);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const int row = kRowsPerBlock * blockIdx.y + i;
    if (row >= p.rows) return;
    const i64 at = base + row;
    const Four y = live[i] ? convolve(x[i], weights, bias) : Four{{0, 0}};
    store_row(p, at, channel, live[i], inside, y);
    if (p.kept && live[i] && inside)
      store_four(p.kept + at * p.channels + channel, x[i][kWidth - 1]);
  }
}
