// WY verify: the outputs of all rows of a tree from the committed state alone, in one pass.
//
// With S0 the committed state of a value head, Gamma_i the decay from it to row i, D_ij the decay
// from row j to row i, and A_ij = beta_i D_ij k_i.k_j where j is an ancestor of i, else 0:
//
//   (I + A) U = R,   R_i = beta_i (v_i - Gamma_i S0^T k_i)
//   o_i = Gamma_i S0^T q_i + sum over j = i and its ancestors of D_ij (q_i.k_j) u_j
//
// A block has kSlice columns of a value head of a request. Its phases, each ended by a barrier:
//
//   1 load      keys, queries, values and factors of all rows; S0 into registers
//   2 multiply  workers: S0^T k and S0^T q, S0 in three bfloat16 parts, keys and queries as the
//               convolution left them, their norms applied to the sums in float32
//               walkers: Gamma and D as products up the root path
//   3 combine   workers: R and Gamma S0^T q; A and the weights of U from products of keys
//   4 solve     a thread per column, forward substitution in registers, 32 rows at a time, the rows
//               below updated by all workers in between
//   5 add up    o, four rows of a column per thread and turn
//
// Powers of A are never formed: they overflow when keys repeat. Phases 4 and 5 are plain float32.
// A state with elements of 2^60 or more, or that are not finite, is multiplied without splitting.
//
// Compile-time: KDIM, VDIM, ROWS, BLOCKS_PER_SM.

#include "wy_tiles.cuh"

// Which part of the work a block has.
struct Place {
  i64 base;  // first row of the request
  int head, key_head, column;

  __device__ __forceinline__ explicit Place(const Params& p) {
    base = static_cast<i64>(blockIdx.y) * p.rows;
    head = blockIdx.x / (VDIM / kSlice);
    key_head = head / (p.value_heads / p.key_heads);
    column = blockIdx.x % (VDIM / kSlice) * kSlice;
  }
  __device__ __forceinline__ const float* state(const Params& p, i64 slot) const {
    return p.states + slot * p.state_slot + (static_cast<i64>(head) * VDIM + column) * KDIM;
  }
};

// ---- 1: load -----------------------------------------------------------------------------------

// Bring the state to L2, before what it depends on is there: the slot may be one that an earlier
// kernel is about to replace, and the state too. L2 stays right, and nothing is used or left in L1.
__device__ __forceinline__ void prefetch_state(const Params& p, const Place& place) {
  const i64 slot = __ldcg(p.slot + blockIdx.y);
  if (slot < 0 || slot >= p.slots) return;
  for (int line = threadIdx.x; line < kSlice * KDIM / 32; line += kThreads)
    prefetch(place.state(p, slot) + 32 * line);
}

__device__ __forceinline__ void clear_tables(Shared& s) {
  float4* tables = reinterpret_cast<float4*>(&s.system[0][0]);
  for (int i = threadIdx.x; i < 2 * ROWS * kTablePitch / 4; i += kThreads)
    tables[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Start copying what all rows have; rows that the tree has not become zeros.
__device__ __forceinline__ void copy_rows(const Params& p, const Place& place, Shared& s) {
  constexpr int kKeyPieces = KDIM / 8, kValuePieces = kSlice / 8;
  const int keys = p.key_heads * KDIM, pitch = keys + p.value_heads * VDIM;
  for (int i = threadIdx.x; i < 16 * kRowTiles * kKeyPieces; i += kThreads) {
    const int row = i / kKeyPieces, piece = i % kKeyPieces * 8;
    const u32 bytes = row < p.rows ? 16 : 0;
    const i64 at = place.base + (bytes ? row : 0);
    const int from = place.key_head * KDIM + piece;
    copy16(shared_address(&s.keys[row][piece]), p.kv + at * pitch + from, bytes);
    copy16(shared_address(&s.queries[row][piece]), p.q + at * keys + from, bytes);
  }
  for (int i = threadIdx.x; i < ROWS * kValuePieces; i += kThreads) {
    const int row = i / kValuePieces, piece = i % kValuePieces * 8;
    const u32 bytes = row < p.rows ? 16 : 0;
    const i64 at = place.base + (bytes ? row : 0);
    copy16(shared_address(&s.values[row][piece]),
           p.kv + at * pitch + keys + place.head * VDIM + place.column + piece, bytes);
  }
  copies_commit();
}

__device__ __forceinline__ void load_factors(const Params& p, const Place& place, Shared& s) {
  for (int row = threadIdx.x; row < ROWS; row += kThreads) {
    Node node{0.f, kUnused};
    Factors own{0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (row < p.rows) {  // rows without node have zeros there
      const i64 at = place.base + row;
      const i64 head = at * p.value_heads + place.head, key = at * p.key_heads + place.key_head;
      node = {exponential(p.g[head]), p.parent[at]};
      own.beta = p.beta[head];
      own.k_scale = p.k_scale[key];
      own.q_scale = __fmul_rn(p.q_scale[key], p.scale);
    }
    s.nodes[row] = node;
    s.factors[row] = own;
  }
}

// ---- 2: multiply -------------------------------------------------------------------------------

// Decays from all ancestors to row `row`.
__device__ __forceinline__ void walk(Shared& s, int row) {
  if (s.nodes[row].parent == kUnused) return;
  s.weights[row][row] = 1.f;
  float decay = 1.f;
  for (int j = row;;) {
    const Node node = s.nodes[j];
    decay = __fmul_rn(decay, node.alpha);
    if (static_cast<u32>(node.parent) >= static_cast<u32>(j)) break;  // the root
    j = node.parent;
    s.system[j][row] = s.weights[j][row] = decay;
  }
  Factors& own = s.factors[row];
  own.decay = decay;
  own.k_decay = __fmul_rn(decay, own.k_scale);
  own.q_decay = __fmul_rn(decay, own.q_scale);
}

// Whether the products have the scales of keys or queries in them.
__device__ __forceinline__ bool multiply(const Shared& s, const float* state, bool of_queries,
                                         StateTile& tile, Products& products) {
  const bool plainly = __any_sync(~0u, cannot_split(tile));
  if (plainly)
    multiply_state_plainly(s, state, of_queries, products);
  else
    multiply_state(tile, of_queries ? s.queries : s.keys, products);
  return plainly;
}

// ---- 3: combine --------------------------------------------------------------------------------

// Right sides, from products with keys, or first parts of the outputs, from products with queries.
__device__ __forceinline__ void combine(Shared& s, const Products& p, bool scaled, int first,
                                        bool of_queries) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 8 * n + lane % 4 * 2 + e % 2, column = first + lane / 4 + 8 * (e / 2);
      const Factors& own = s.factors[row];
      const float decay = scaled ? own.decay : of_queries ? own.q_decay : own.k_decay;
      if (of_queries)
        s.out[row][column] = __fmul_rn(decay, p.d[n][e]);
      else
        s.right[row][column] =
            __fmul_rn(own.beta, __fmaf_rn(-decay, p.d[n][e], from_bf16(s.values[row][column])));
    }
}

// ---- 4: solve ----------------------------------------------------------------------------------

__device__ __forceinline__ float4 load_rows(const float* table) {
  return *reinterpret_cast<const float4*>(table);
}

// Rows first .. first + kBlock of one column, those above already taken off.
__device__ __forceinline__ void solve_block(Shared& s, int first, int rows, int column) {
  float u[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) u[i] = s.right[first + i][column];
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
    if (first + j >= rows) return;
    s.right[first + j][column] = u[j];
#pragma unroll
    for (int quad = j / 4; quad < kBlock / 4; ++quad) {
      const float4 a = load_rows(&s.system[first + j][first + 4 * quad]);
      const float four[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (4 * quad + e > j) u[4 * quad + e] = __fmaf_rn(-four[e], u[j], u[4 * quad + e]);
    }
  }
}

// Take rows first .. first + kBlock off all rows below.
__device__ __forceinline__ void update_below(Shared& s, int first, int rows) {
  const int column = threadIdx.x % kSlice;
  for (int i = first + kBlock + threadIdx.x / kSlice * 4; i < rows; i += kWorkers / kSlice * 4) {
    float r[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) r[e] = s.right[i + e][column];
#pragma unroll 8
    for (int j = first; j < first + kBlock; ++j) {
      const float u = s.right[j][column];
      const float4 a = load_rows(&s.system[j][i]);
      r[0] = __fmaf_rn(-a.x, u, r[0]), r[1] = __fmaf_rn(-a.y, u, r[1]);
      r[2] = __fmaf_rn(-a.z, u, r[2]), r[3] = __fmaf_rn(-a.w, u, r[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s.right[i + e][column] = r[e];
  }
}

__device__ __forceinline__ void solve(Shared& s, int rows) {
#pragma unroll 1
  for (int first = 0; first < rows; first += kBlock) {
    if (first) {
      if (threadIdx.x < kWorkers) update_below(s, first - kBlock, rows);
      __syncthreads();
    }
    if (threadIdx.x < kSlice) solve_block(s, first, rows, threadIdx.x);
    __syncthreads();
  }
}

// ---- 5: add up ---------------------------------------------------------------------------------

__device__ __forceinline__ void add_up(const Params& p, const Place& place, const Shared& s) {
  const int column = threadIdx.x % kSlice;
  for (int i = threadIdx.x / kSlice * 4; i < p.rows; i += kWorkers / kSlice * 4) {
    float o[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = s.out[i + e][column];
    const int end = min(i + 4, p.rows);
#pragma unroll 4
    for (int j = 0; j < end; ++j) {
      const float u = s.right[j][column];
      const float4 w = load_rows(&s.weights[j][i]);
      o[0] = __fmaf_rn(w.x, u, o[0]), o[1] = __fmaf_rn(w.y, u, o[1]);
      o[2] = __fmaf_rn(w.z, u, o[2]), o[3] = __fmaf_rn(w.w, u, o[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (i + e < p.rows) {
        const bool live = s.nodes[i + e].parent != kUnused;
        p.out[((place.base + i + e) * p.value_heads + place.head) * VDIM + place.column + column] =
            to_bf16(live ? o[e] : 0.f);
      }
  }
}

// ---- the kernel --------------------------------------------------------------------------------

__device__ __forceinline__ void write_zeros(const Params& p, const Place& place) {
  for (int i = threadIdx.x; i < p.rows * kSlice; i += kThreads)
    p.out[((place.base + i / kSlice) * p.value_heads + place.head) * VDIM + place.column +
          i % kSlice] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gdn_wy(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Place place(p);
  prefetch_state(p, place);
  clear_tables(s);
  wait_then_let_next_start();

  const i64 slot = p.slot[blockIdx.y];
  copy_rows(p, place, s);
  if (slot < 0 || slot >= p.slots) {
    copies_wait<0>();
    write_zeros(p, place);
    return;
  }
  const bool works = threadIdx.x < kWorkers;
  const int warp = threadIdx.x / 32, first = warp % (kSlice / 16) * 16;
  const bool of_queries = warp >= kSlice / 16;
  const float* state = place.state(p, slot) + first * KDIM;
  StateTile tile;
  if (works) load_state(state, tile);
  load_factors(p, place, s);
  copies_wait<0>();
  __syncthreads();

  Products products;
  bool scaled = false;
  if (works)
    scaled = multiply(s, state, of_queries, tile, products);
  else
    for (int row = threadIdx.x - kWorkers; row < ROWS; row += kWalkers) walk(s, row);
  __syncthreads();

  if (works) {
    combine(s, products, scaled, first, of_queries);
    fill_tables(s);
  }
  __syncthreads();
  solve(s, p.rows);
  if (works) add_up(p, place, s);
}
