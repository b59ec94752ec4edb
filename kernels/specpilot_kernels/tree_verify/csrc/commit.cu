// Commit: the rows of the accepted path replayed into the states and windows of all layers, in one
// launch, with the bits that the stock recurrence leaves after a chain.
//
// Blocks along x: the columns of a value head, and one more that moves this head's share of the
// channels' windows. The next kernel of the stream is not let in early, so that all that follow
// find the new states in memory.
//
// Compile-time: KDIM, VDIM, MAX_ROWS.

#include "recurrence.cuh"

constexpr int kWindow = 3;

struct Layer {
  Rows rows_of;
  const u16* mixed;  // [requests * rows, channels], before the convolution
  float* states;     // [slots, value heads, VDIM, KDIM]
  u16* windows;      // [slots, channels, 3]
};

struct Params {
  const Layer* layers;
  const i64* slot;        // [requests]
  const int* path;        // [requests, path_pitch]: accepted rows, the anchor first, -1 padded
  const int* n_accepted;  // [requests]: accepted rows besides the anchor
  i64 state_slot, window_slot, window_channel, window_tap;
  int rows, path_pitch, key_heads, value_heads, channels, slots, requests;
};

// The window after the accepted rows: the last three of (old window, accepted inputs).
__device__ __forceinline__ void move_windows(const Params& p, const Layer& layer, i64 base,
                                             i64 slot, const int* path, int count) {
  const int share = (p.channels + p.value_heads - 1) / p.value_heads;
  const int end = min(p.channels, (static_cast<int>(blockIdx.y) + 1) * share);
  for (int c = blockIdx.y * share + threadIdx.x; c < end; c += kThreads) {
    u16* window = layer.windows + slot * p.window_slot + c * p.window_channel;
    u16 after[kWindow];
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const int from = count + j - kWindow;  // in the accepted inputs
      after[j] = from >= 0 ? layer.mixed[(base + path[from]) * p.channels + c]
                           : window[(kWindow + from) * p.window_tap];
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) window[j * p.window_tap] = after[j];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gdn_commit(const __grid_constant__ Params p) {
  __shared__ int path[MAX_ROWS];
  wait_for_previous_kernel();
  const i64 request = blockIdx.z % p.requests, base = request * p.rows, slot = p.slot[request];
  if (slot < 0 || slot >= p.slots) return;
  int count = min(p.n_accepted[request] + 1, min(p.path_pitch, p.rows));
  for (int i = threadIdx.x; i < count; i += kThreads)
    path[i] = p.path[request * p.path_pitch + i];
  __syncthreads();
  for (int i = 0; i < count; ++i)  // never read rows that are none
    if (path[i] < 0 || path[i] >= p.rows) count = i;
  const Layer layer = p.layers[blockIdx.z / p.requests];
  if (blockIdx.x == VDIM / kBlockColumns) {
    move_windows(p, layer, base, slot, path, count);
    return;
  }
  if (count <= 0) return;

  const Heads heads(p.key_heads, p.value_heads, blockIdx.y);
  const int first = blockIdx.x * kBlockColumns + threadIdx.x / 32 * kWarpColumns;
  const int column = first + column_of_lane();
  float* at = layer.states + slot * p.state_slot +
              (static_cast<i64>(heads.value_head) * VDIM + first +
               threadIdx.x % 32 / kLanes * kColumns) * KDIM +
              threadIdx.x % kLanes * 4;
  State state;
  state.load(at);
  Step next = load_step(layer.rows_of, heads, base + path[0], column);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Step step = next;
    if (i + 1 < count) next = load_step(layer.rows_of, heads, base + path[i + 1], column);
    state.advance(step);
  }
  state.store(at);
}
