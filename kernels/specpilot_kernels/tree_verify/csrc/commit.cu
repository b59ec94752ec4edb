// Commit: the rows of the accepted path replayed into the states and windows of all layers, in one
// launch, with the bits that the stock recurrence leaves after a chain. A prefix cache may want the
// states at every so many tokens: where a path passes such a place, they go to another slot, too.
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
  const i64* keep_slot;   // [requests]: where states on the way go; null: nowhere
  const i64* length;      // [requests]: tokens before the anchor, if keep_slot is there
  i64 state_slot, window_slot, window_channel, window_tap;
  int rows, path_pitch, key_heads, value_heads, channels, slots, requests;
  int keep_every;  // tokens
};

// The last place on the way whose states are kept.
struct Keep {
  i64 slot;
  int rows;  // that lead there; 0: no such place
};

__device__ __forceinline__ Keep find_keep(const Params& p, i64 request, int count) {
  if (p.keep_slot == nullptr || count <= 0) return {0, 0};
  const i64 slot = p.keep_slot[request];
  const int before = static_cast<int>(p.length[request]);
  const int reached = (before + count) / p.keep_every * p.keep_every;
  return {slot, slot >= 0 && slot < p.slots && reached > before ? reached - before : 0};
}

// The windows after some accepted rows: the last three of (old window, accepted inputs).
__device__ __forceinline__ void move_windows(const Params& p, const Layer& layer, i64 base,
                                             i64 slot, const int* path, int count,
                                             const Keep& keep) {
  const int share = (p.channels + p.value_heads - 1) / p.value_heads;
  const int end = min(p.channels, (static_cast<int>(blockIdx.y) + 1) * share);
  for (int c = blockIdx.y * share + threadIdx.x; c < end; c += kThreads) {
    u16* const channel = layer.windows + c * p.window_channel;
    const u16* const old = channel + slot * p.window_slot;
    const auto write = [&](i64 to, int rows) {
      u16 after[kWindow];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const int from = rows + j - kWindow;  // in the accepted inputs
        after[j] = from >= 0 ? layer.mixed[(base + path[from]) * p.channels + c]
                             : old[(kWindow + from) * p.window_tap];
      }
#pragma unroll
      for (int j = 0; j < kWindow; ++j) channel[to * p.window_slot + j * p.window_tap] = after[j];
    };
    if (keep.rows > 0) write(keep.slot, keep.rows);
    write(slot, count);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gdn_commit(const __grid_constant__ Params p) {
  __shared__ int path[MAX_ROWS];
  __shared__ Keep keep;
  wait_for_previous_kernel();
  const i64 request = blockIdx.z % p.requests, base = request * p.rows, slot = p.slot[request];
  if (slot < 0 || slot >= p.slots) return;
  int count = min(p.n_accepted[request] + 1, min(p.path_pitch, p.rows));
  for (int i = threadIdx.x; i < count; i += kThreads)
    path[i] = p.path[request * p.path_pitch + i];
  __syncthreads();
  for (int i = 0; i < count; ++i)  // never read rows that are none
    if (path[i] < 0 || path[i] >= p.rows) count = i;
  if (threadIdx.x == 0) keep = find_keep(p, request, count);
  __syncthreads();
  const Layer layer = p.layers[blockIdx.z / p.requests];
  if (blockIdx.x == VDIM / kBlockColumns) {
    move_windows(p, layer, base, slot, path, count, keep);
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
    if (i + 1 == keep.rows) state.store(at + (keep.slot - slot) * p.state_slot);
  }
  state.store(at);
}
