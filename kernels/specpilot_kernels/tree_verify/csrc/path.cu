// Path verify: every root path of a tree walked from the committed state, with the bits that the
// stock recurrence gives a chain. No state is stored; what paths share is computed again.
//
// One block per leaf, value head and part of its columns. A row's output is written by the first
// leaf below it.
//
// Compile-time: KDIM, VDIM, MAX_ROWS.

#include "recurrence.cuh"

struct Params {
  const u16* q;          // [requests * rows, key heads * KDIM], after the convolution
  const float* q_scale;  // [requests * rows, key heads]
  Rows rows_of;
  const float* states;   // committed: [slots, value heads, VDIM, KDIM]
  const i64* slot;       // [requests]
  const int* parent;     // [requests, rows]
  u16* out;              // [requests * rows, value heads, VDIM]
  i64 state_slot;
  float scale;           // KDIM^-1/2
  int rows, key_heads, value_heads, slots;
};

struct Walk {
  int parent[MAX_ROWS];
  int has_child[MAX_ROWS];
  int taken[MAX_ROWS];  // an earlier leaf writes this row
  int path[MAX_ROWS];   // leaf first
  int length;
};

// Fill `walk` for the path that ends at `row`; false if it is no leaf. Barriers inside.
__device__ __forceinline__ bool find_path(Walk& walk, const int* parent, int rows, int row) {
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    walk.parent[i] = parent[i];
    walk.has_child[i] = walk.taken[i] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows; i += kThreads)
    if (walk.parent[i] >= 0) walk.has_child[walk.parent[i]] = 1;
  __syncthreads();
  if (walk.has_child[row]) return false;
  for (int i = threadIdx.x; i < row; i += kThreads)
    if (walk.parent[i] != kUnused && !walk.has_child[i])
      for (int j = i; j >= 0; j = walk.parent[j]) walk.taken[j] = 1;
  if (threadIdx.x == 0) {
    int length = 0;
    for (int j = row; j >= 0; j = walk.parent[j]) walk.path[length++] = j;
    walk.length = length;
  }
  __syncthreads();
  return true;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gdn_path(const __grid_constant__ Params p) {
  __shared__ Walk walk;
  wait_then_let_next_start();
  const int blocks = VDIM / kBlockColumns;
  const Heads heads(p.key_heads, p.value_heads, blockIdx.x / blocks);
  const int first = blockIdx.x % blocks * kBlockColumns + threadIdx.x / 32 * kWarpColumns;
  const int column = first + column_of_lane();
  const int row = blockIdx.y;
  const i64 request = blockIdx.z, base = request * p.rows, slot = p.slot[request];
  const bool writes = threadIdx.x % (kLanes / kColumns) == 0;  // one of the lanes with this column
  const auto write = [&](int to, float value) {
    if (writes)
      p.out[((base + to) * p.value_heads + heads.value_head) * VDIM + column] = to_bf16(value);
  };
  if (slot < 0 || slot >= p.slots || p.parent[base + row] == kUnused) {
    write(row, 0.f);
    return;
  }
  if (!find_path(walk, p.parent + base, p.rows, row)) return;

  const int lane_columns = threadIdx.x % 32 / kLanes * kColumns;  // first of this lane's group
  State state;
  state.load(p.states + slot * p.state_slot +
             (static_cast<i64>(heads.value_head) * VDIM + first + lane_columns) * KDIM +
             threadIdx.x % kLanes * 4);
  for (int i = walk.length - 1; i >= 0; --i) {
    const int node = walk.path[i];
    const i64 at = base + node;
    state.advance(load_step(p.rows_of, heads, at, column));
    if (walk.taken[node]) continue;
    float q[4];
    load_key(p.q + (at * p.key_heads + heads.key_head) * KDIM,
             p.q_scale[at * p.key_heads + heads.key_head], q);
#pragma unroll
    for (int e = 0; e < 4; ++e) q[e] = __fmul_rn(p.scale, q[e]);
    write(node, state.read(q));
  }
}
