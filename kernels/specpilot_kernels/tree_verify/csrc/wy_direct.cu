// Direct WY verify: the outputs of all rows of a tree from the committed state alone, in one pass.
//
// With S0 the committed state of a value head, Gamma_i the decay from it to row i, D_ij the decay
// from row j to row i, A_ij = beta_i D_ij k_i.k_j where j is an ancestor of i, else 0, and
// P_ij = D_ij q_i.k_j where j is i or an ancestor of i, else 0:
//
//   (I + A) U = R,   R_i = beta_i (v_i - Gamma_i S0^T k_i),   o_i = Gamma_i S0^T q_i + (P U)_i
//
// U is never formed. W (I + A) = P is solved instead, which needs no state, while other warps
// multiply the state; what is left after that is o_i = Gamma_i S0^T q_i + (W R)_i. Entries of W are
// q_i carried back along the path, so they are no larger than q_i: W is as benign as U.
//
// A block has kSlice columns of a value head of a request. Two thirds of its warps are multipliers,
// the others solvers; the phases end with barriers:
//
//             multipliers                      solvers
//   before    S0 to registers                  root paths
//   load      rows; S0 in three parts          rows; Gamma and D along the paths
//   fill      A and P, from products of keys and queries
//   work      S0^T k, S0^T q, R                W, by backward substitution
//   add up    o
//
// What "before" reads is not written by any kernel that may still run: only `rows` is ahead of us,
// and it lets us start when all before it have ended. So that phase costs nothing.
//
// S0 is taken in three bfloat16 parts, keys and queries as the convolution left them; their norms
// are applied to the sums in float32. All else is plain float32. Powers of A are never formed: they
// overflow when keys repeat. A state with elements of 2^60 or more, or that are not finite, is
// multiplied without splitting. Everything is summed over ancestors in the order of their rows, so
// neither siblings nor their order change a bit.
//
// Compile-time: KDIM, VDIM, ROWS.

#include "direct_tiles.cuh"

// Which part of the work a block has.
struct Place {
  int base;  // first row of the request
  int head, key_head, column;

  // Of a row's outputs, those of this block.
  __device__ __forceinline__ u16* out(const Params& p, int row) const {
    return p.out + (static_cast<i64>(base + row) * p.value_heads + head) * VDIM + column;
  }
  __device__ __forceinline__ explicit Place(const Params& p) {
    base = blockIdx.y * p.rows;
    head = blockIdx.x / (VDIM / kSlice);
    key_head = head / (p.value_heads / p.key_heads);
    column = blockIdx.x % (VDIM / kSlice) * kSlice;
  }
};

// ---- all: rows ---------------------------------------------------------------------------------

// Start copying what all rows have; rows that the tree has not become zeros.
__device__ __forceinline__ void copy_rows(const Params& p, const Place& place, Shared& s) {
  constexpr int kKeyPieces = KDIM / 8, kValuePieces = kSlice / 8;
  const int keys = p.key_heads * KDIM, pitch = keys + p.value_heads * VDIM;
  constexpr int kKeyTurns = (16 * kRowTiles * kKeyPieces + kThreads - 1) / kThreads;
  constexpr int kValueTurns = (ROWS * kValuePieces + kThreads - 1) / kThreads;
#pragma unroll
  for (int turn = 0; turn < kKeyTurns; ++turn) {
    const int i = kThreads * turn + threadIdx.x;
    if (i >= 16 * kRowTiles * kKeyPieces) continue;
    const int row = i / kKeyPieces, piece = i % kKeyPieces * 8;
    const u32 bytes = row < p.rows ? 16 : 0;
    const i64 at = place.base + (bytes ? row : 0);
    const int from = place.key_head * KDIM + piece;
    copy16(shared_address(&s.keys[row][piece]), p.kv + at * pitch + from, bytes);
    copy16(shared_address(&s.queries[row][piece]), p.q + at * keys + from, bytes);
  }
#pragma unroll
  for (int turn = 0; turn < kValueTurns; ++turn) {
    const int i = kThreads * turn + threadIdx.x;
    if (i >= ROWS * kValuePieces) continue;
    const int row = i / kValuePieces, piece = i % kValuePieces * 8;
    const u32 bytes = row < p.rows ? 16 : 0;
    const i64 at = place.base + (bytes ? row : 0);
    copy16(shared_address(&s.values[row][piece]),
           p.kv + at * pitch + keys + place.head * VDIM + place.column + piece, bytes);
  }
  copies_commit();
}

// ---- solvers: decays ---------------------------------------------------------------------------

__device__ __forceinline__ void clear_tables(Shared& s) {
  float4* tables = reinterpret_cast<float4*>(&s.system[0][0]);
  for (int i = threadIdx.x - kMultipliers; i < 2 * ROWS * kTablePitch / 4; i += kSolvers)
    tables[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Write down the root path of each row; return this thread's rows on it, 0 for a row without node.
__device__ __forceinline__ int find_paths(const Params& p, const Place& place, Shared& s) {
  const int row = static_cast<int>(threadIdx.x) - kMultipliers;
  if (row < ROWS)
    s.parent[row] = row < p.rows ? __ldcg(p.parent + place.base + row) : kUnused;
  clear_tables(s);
  solvers_meet();
  if (row >= ROWS || s.parent[row] == kUnused) return 0;
  int length = 0;
  for (int j = row;;) {
    s.path[length++][row] = static_cast<u8>(j);
    const int parent = s.parent[j];
    if (static_cast<u32>(parent) >= static_cast<u32>(j)) return length;  // j is the root
    j = parent;
  }
}

// Decays from all ancestors to a row, by its path, and all the row's factors.
__device__ __forceinline__ void walk(Shared& s, int row, int length, Factors own) {
  constexpr int kStride = 8;  // steps whose loads are under way together
  float decay = 1.f;
  for (int step = 0; step < length; step += kStride) {
    int j[kStride];
    float alpha[kStride];
#pragma unroll
    for (int e = 0; e < kStride; ++e) j[e] = s.path[min(step + e, length - 1)][row];
#pragma unroll
    for (int e = 0; e < kStride; ++e) alpha[e] = s.alpha[j[e]];
#pragma unroll
    for (int e = 0; e < kStride; ++e)
      if (step + e < length) {
        s.weights[j[e]][row] = decay;
        decay = __fmul_rn(decay, alpha[e]);
      }
  }
  own.decay = length ? decay : 0.f;
  own.k_decay = __fmul_rn(own.decay, own.k_scale);
  own.q_decay = __fmul_rn(own.decay, own.q_scale);
  s.factors[row] = own;
}

// What `rows` has left for a solver's row.
struct Gates {
  float g, beta, k_scale, q_scale;

  __device__ __forceinline__ Gates(const Params& p, const Place& place, int row)
      : g(0.f), beta(0.f), k_scale(0.f), q_scale(0.f) {
    if (row < 0 || row >= p.rows) return;  // rows without node have zeros there
    const i64 at = place.base + row;
    const i64 head = at * p.value_heads + place.head, key = at * p.key_heads + place.key_head;
    g = p.g[head], beta = p.beta[head];
    k_scale = p.k_scale[key], q_scale = p.q_scale[key];
  }
};

__device__ __forceinline__ void find_decays(Shared& s, int row, int length, float scale,
                                            const Gates& gates) {
  if (row < ROWS) s.alpha[row] = exponential(gates.g);
  solvers_meet();
  if (row < ROWS)
    walk(s, row, length, {gates.beta, gates.k_scale, __fmul_rn(gates.q_scale, scale), 0, 0, 0});
}

// ---- solvers: weights --------------------------------------------------------------------------

__device__ __forceinline__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// m[c] -= w A[l][first + c] for c < count, of eight columns.
__device__ __forceinline__ void take_off(const Shared& s, int l, int first, float w, int count,
                                         float (&m)[8]) {
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    if (4 * quad >= count) continue;
    const float4 a = load_four(&s.system[l][first + 4 * quad]);
    const float four[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (4 * quad + e < count) m[4 * quad + e] = __fmaf_rn(-w, four[e], m[4 * quad + e]);
  }
}

// P into W: W_ij = P_ij - sum over l > j of W_il A_lj, a thread per row i, eight j at a time, all
// sums from the highest l down.
__device__ __forceinline__ void solve_weights(Shared& s, int rows) {
  const int lane = threadIdx.x % 32;
  if (lane >= 16) return;
#pragma unroll 1
  for (int tile = threadIdx.x / 32 - kMultipliers / 32; 16 * tile < rows; tile += kSolvers / 32) {
    const int i = 16 * tile + lane, top = min(16 * tile + 16, rows) - 1;
    if (i >= rows) continue;
#pragma unroll 1
    for (int first = top / 8 * 8; first >= 0; first -= 8) {
      float m[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) m[c] = s.weights[first + c][i];
#pragma unroll 8
      for (int l = top; l >= first + 8; --l) take_off(s, l, first, s.weights[l][i], 8, m);
#pragma unroll
      for (int c = 7; c > 0; --c) take_off(s, first + c, first, m[c], c, m);
#pragma unroll
      for (int c = 0; c < 8; ++c) s.weights[first + c][i] = m[c];
    }
  }
}

// ---- multipliers -------------------------------------------------------------------------------

// What a multiplying warp has: 16 columns from `first` on, half of the key dimension.
struct Share {
  int first, upper;

  __device__ __forceinline__ Share() {
    first = threadIdx.x / 32 % (kSlice / 16) * 16;
    upper = threadIdx.x / 32 / (kSlice / 16);
  }
  __device__ __forceinline__ const float* state(const Params& p, const Place& place,
                                                int slot) const {
    return p.states + slot * p.state_slot + upper * (KDIM / 2) +
           (static_cast<i64>(place.head) * VDIM + place.column + first) * KDIM;
  }
};

// Split the state, or say that it cannot be.
__device__ __forceinline__ void split_state(StateTile& tile, Shared& s, StateParts& parts) {
  const bool plainly = __any_sync(~0u, cannot_split(tile));
  if (threadIdx.x % 32 == 0) s.plainly[threadIdx.x / 32] = plainly;
  split(tile, parts);
}

// Call `visit(n, e, row, column)` for each of a lane's products.
template <class Visit>
__device__ __forceinline__ void for_products(int first, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      visit(n, e, 8 * n + lane % 4 * 2 + e % 2, first + lane / 4 + 8 * (e / 2));
}

__device__ __forceinline__ void store_products(float (*to)[kPitch], const Products& p, int first) {
  for_products(first, [&](int n, int e, int row, int column) { to[row][column] = p.d[n][e]; });
}

// Right sides, from products with keys, or first parts of the outputs, from products with queries,
// both without the other half's, which lie where the results go. `scaled`: the products have the
// scales of keys or queries in them. Nothing is stored before all is loaded, so that loads overlap.
__device__ __forceinline__ void combine(Shared& s, Products& p, bool scaled, int first,
                                        bool of_queries) {
  auto& results = of_queries ? s.out : s.right;
  for_products(first, [&](int n, int e, int row, int column) {
    const Factors& own = s.factors[row];
    const float decay = scaled ? own.decay : of_queries ? own.q_decay : own.k_decay;
    const float sum = __fadd_rn(results[row][column], p.d[n][e]);
    if (of_queries)
      p.d[n][e] = __fmul_rn(decay, sum);
    else
      p.d[n][e] = __fmul_rn(own.beta, __fmaf_rn(-decay, sum, from_bf16(s.values[row][column])));
  });
  store_products(results, p, first);
}

// Both halves multiply keys and queries. The lower one gives its products with queries away and
// keeps those with keys, the upper one the other way round.
template <bool plainly>
__device__ __forceinline__ void multiply(const Params& p, const Place& place, int slot, Shared& s,
                                         const StateParts& parts, const Share& share) {
  const int begin = share.upper * kWarpSteps;
  Products products;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const bool of_queries = turn == share.upper;
    if (plainly)
      multiply_state_plainly(s, share.state(p, place, slot), of_queries, begin, products);
    else
      multiply_state(parts, of_queries ? s.queries : s.keys, begin, products);
    if (turn == 0) store_products(of_queries ? s.out : s.right, products, share.first);
  }
  halves_meet();
  combine(s, products, plainly, share.first, share.upper);
}

// Whether one of both halves cannot be split.
__device__ __forceinline__ bool plainly(const Shared& s) {
  const int both = kSlice / 16, warp = threadIdx.x / 32 % both;
  return s.plainly[warp] || s.plainly[warp + both];
}

// ---- all ---------------------------------------------------------------------------------------

// o = out + W R: a warp has four rows at a time, a lane two columns of them. Rows take as many
// steps as their number, so the first turn begins at the end and the next one at the beginning.
__device__ __forceinline__ void add_up(const Params& p, const Place& place, const Shared& s) {
  const int warp = threadIdx.x / 32, column = threadIdx.x % 32 * 2, groups = (p.rows + 3) / 4;
#pragma unroll 1
  for (int turn = 0; kWarps * turn < groups; ++turn) {
    const int from_end = kWarps * turn + (turn % 2 ? kWarps - 1 - warp : warp);
    if (from_end >= groups) continue;
    const int i = 4 * (groups - 1 - from_end);
    float o[4][2];
    bool live[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      live[e] = s.parent[i + e] != kUnused;
      const float2 begin = *reinterpret_cast<const float2*>(&s.out[i + e][column]);
      o[e][0] = begin.x, o[e][1] = begin.y;
    }
#pragma unroll 2
    for (int four = 0; four <= i; four += 4)
#pragma unroll
      for (int j = four; j < four + 4; ++j) {
        const float2 r = *reinterpret_cast<const float2*>(&s.right[j][column]);
        const float4 w = load_four(&s.weights[j][i]);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o[e][0] = __fmaf_rn(weight[e], r.x, o[e][0]);
          o[e][1] = __fmaf_rn(weight[e], r.y, o[e][1]);
        }
      }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (i + e < p.rows) {
        u32* to = reinterpret_cast<u32*>(place.out(p, i + e) + column);
        *to = live[e] ? to_bf16x2(o[e][0], o[e][1]) : 0;
      }
  }
}

__device__ __forceinline__ void write_zeros(const Params& p, const Place& place) {
  for (int i = threadIdx.x; i < p.rows * kSlice; i += kThreads)
    place.out(p, i / kSlice)[i % kSlice] = 0;
}

extern "C" __global__ void __launch_bounds__(kRegisterThreads, 1)
    gdn_wy(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Place place(p);
  const i64 slot = __ldcg(p.slot + blockIdx.y);
  if (slot < 0 || slot >= p.slots) {
    wait_then_let_next_start();
    write_zeros(p, place);
    return;
  }
  const int at = static_cast<int>(slot);
  const bool multiplies = threadIdx.x < kMultipliers;
  const Share share;
  const int row = static_cast<int>(threadIdx.x) - kMultipliers;  // a solver's
  StateTile tile;
  StateParts parts;
  int length = 0;
  if (multiplies)
    load_state(share.state(p, place, at), tile);
  else
    length = find_paths(p, place, s);
  wait_then_let_next_start();

  const Gates gates(p, place, row);
  copy_rows(p, place, s);
  if (multiplies)
    split_state(tile, s, parts);
  else
    find_decays(s, row, length, p.scale, gates);
  copies_wait<0>();
  __syncthreads();
  fill_tables(s);
  if (multiplies) {
    tables_are_full();
    if (plainly(s))
      multiply<true>(p, place, at, s, parts, share);
    else
      multiply<false>(p, place, at, s, parts, share);
  } else {
    wait_for_tables();
    solve_weights(s, p.rows);
  }
  __syncthreads();
  add_up(p, place, s);
}
