// The best-first draft tree of every request of a batch, one CTA each, and the tables that verify
// kernels read. Node for node the tree of `_native.py: build`, whose rule is in `reference.py`.
//
// Every predecessor's candidates are first normalised and ranked, all rows at once, one thread
// each. Then one warp grows the tree. The best child of a row that is not in the tree yet is that
// row's open node; siblings enter in order, so a row has one at most, and it is kept by the lane
// that owns the row. A step is a maximum over the warp: the winner's next sibling replaces it, and
// its best child becomes the new row's open node. Both scores are known before the step that needs
// them. Last, every row walks up its ancestors for the tables.
//
// CANDIDATES is the most candidates of a position.

#include "log_softmax.cuh"

using u8 = unsigned char;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr u32 kWarp = 0xFFFFFFFFu;
constexpr int kMaxRows = 129;
constexpr int kStride = CANDIDATES + 1;  // a ranked row ends with a candidate that does not exist
constexpr int kAbsent = -2147483647 - 1;
constexpr int kNoParent = -2;  // of rows that the tree does not fill

// What a builder reads besides a lattice's scores.
struct Shape {
  int positions, predecessors, candidates, n_nodes, max_depth;
};

// The tree so far. Row 0 is the anchor.
struct Rows {
  int parent[kMaxRows], depth[kMaxRows], candidate[kMaxRows];
  float score[kMaxRows];
  int built;
};

// ---- candidates of every predecessor, best first -----------------------------------------------

// Rows of the ranking: one of the first position, `predecessors` of each other one.
__device__ __forceinline__ int ranked_rows(const Shape& shape) {
  return 1 + (shape.positions - 1) * shape.predecessors;
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FC00000); }

// Integers in the order of floats, both zeros alike; NaN, which stands for nothing, comes last.
__device__ __forceinline__ int ordered(float value) {
  const int bits = __float_as_int(value + 0.0f);
  return value != value ? kAbsent : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

__device__ __forceinline__ void rank_row(const float (&value)[CANDIDATES], float* ranked,
                                         u8* order) {
  int key[CANDIDATES], rank[CANDIDATES];
#pragma unroll
  for (int i = 0; i < CANDIDATES; ++i) key[i] = ordered(value[i]), rank[i] = 0;
#pragma unroll
  for (int i = 1; i < CANDIDATES; ++i)
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const bool first = key[j] >= key[i];  // equal ones in the order of their indices
      rank[i] += first, rank[j] += !first;
    }
#pragma unroll
  for (int i = 0; i < CANDIDATES; ++i) ranked[rank[i]] = value[i], order[rank[i]] = i;
  ranked[CANDIDATES] = not_a_number(), order[CANDIDATES] = 0;
}

// Raw scores into the places of the ranked ones.
__device__ __forceinline__ void fetch(const float* scores, const Shape& shape, float* ranked) {
  const int count = ranked_rows(shape) * CANDIDATES;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int row = i / CANDIDATES, candidate = i % CANDIDATES;
    const int source = row == 0 ? 0 : row - 1 + shape.predecessors;
    ranked[row * kStride + candidate] =
        candidate < shape.candidates ? scores[source * shape.candidates + candidate]
                                     : __int_as_float(0xFF800000);
  }
}

__device__ __forceinline__ void rank_all(const Shape& shape, const float* logsumexp,
                                         const double* calibration, float* ranked, u8* order) {
  for (int row = threadIdx.x; row < ranked_rows(shape); row += THREADS) {
    float value[CANDIDATES];
#pragma unroll
    for (int i = 0; i < CANDIDATES; ++i) value[i] = ranked[row * kStride + i];
    const int position = row == 0 ? 0 : 1 + (row - 1) / shape.predecessors;
    if (logsumexp) {
      const double norm = logsumexp[position];
#pragma unroll
      for (int i = 0; i < CANDIDATES; ++i) value[i] = __double2float_rn(plus(value[i], -norm));
    } else {
      log_softmax(value, calibration ? calibration[2 * position] : 1.0,
                  calibration ? calibration[2 * position + 1] : 0.0);
    }
#pragma unroll
    for (int i = 0; i < CANDIDATES; ++i)
      if (i >= shape.candidates) value[i] = not_a_number();
    rank_row(value, ranked + row * kStride, order + row * kStride);
  }
}

// ---- the tree ----------------------------------------------------------------------------------

// Path scores as integers in the same order, 0 for NaN: there is no such path. -inf is above 0.
__device__ __forceinline__ u64 to_key(double score) {
  const i64 bits = __double_as_longlong(plus(score, 0.0));
  if (score != score) return 0;
  return bits < 0 ? ~static_cast<u64>(bits) : static_cast<u64>(bits) | u64{1} << 63;
}
__device__ __forceinline__ double to_score(u64 key) {
  return __longlong_as_double(static_cast<i64>(key >> 63 ? key ^ u64{1} << 63 : ~key));
}

// A row's best child that is not in the tree, and what follows if it is taken.
struct Open {
  u64 key;           // path score; 0: the row has no such child
  u64 sibling, child;  // path scores of its next sibling and of its own best child
  double base;       // path score of the row
  u32 tie;           // depth, then the order of opening; smaller first
  int place;         // in the ranking
  int depth, candidate, sibling_candidate, child_candidate;
};

struct Ranking {
  const float* value;
  const u8* order;
  int predecessors, max_depth;

  // Where the candidates after `candidate` at `depth`, counted from 1, begin.
  __device__ __forceinline__ int children(int depth, int candidate) const {
    return kStride * (1 + (depth - 1) * predecessors + (predecessors > 1 ? candidate : 0));
  }
};

__device__ __forceinline__ void look_ahead(Open& open, const Ranking& ranking) {
  open.sibling = open.child = 0;
  open.sibling_candidate = open.child_candidate = 0;
  if (open.key == 0) return;
  open.sibling = to_key(plus(open.base, ranking.value[open.place + 1]));
  open.sibling_candidate = ranking.order[open.place + 1];
  if (open.depth == ranking.max_depth) return;
  const int first = ranking.children(open.depth, open.candidate);
  open.child = to_key(plus(to_score(open.key), ranking.value[first]));
  open.child_candidate = ranking.order[first];
}

// The lane with the largest key, of equal ones the one with the smallest tie; -1 if all are 0.
__device__ __forceinline__ int best_lane(u64 key, u32 tie) {
  const u32 high = static_cast<u32>(key >> 32), low = static_cast<u32>(key);
  const u32 highest = __reduce_max_sync(kWarp, high);
  if (highest == 0) return -1;  // no key but 0 begins so
  bool best = high == highest;
  u32 lanes = __ballot_sync(kWarp, best);
  if (lanes & (lanes - 1)) {
    const u32 highest_low = __reduce_max_sync(kWarp, best ? low : 0);
    best = best && low == highest_low;
    lanes = __ballot_sync(kWarp, best);
    if (lanes & (lanes - 1)) {
      const u32 first = __reduce_min_sync(kWarp, best ? tie : kWarp);
      lanes = __ballot_sync(kWarp, best && tie == first);
    }
  }
  return __ffs(lanes) - 1;
}

// One warp. Lane l owns the rows l, l + 32, ...: `kSlots` of them.
template <int kSlots>
__device__ __forceinline__ void grow(Rows& rows, const Ranking& ranking, int n_nodes) {
  const int lane = threadIdx.x;
  Open open[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) open[s].key = 0, open[s].tie = kWarp;
  if (lane == 0 && ranking.max_depth > 0)
    open[0] = {to_key(ranking.value[0]), 0, 0, 0.0, 1u << 16, 0, 1, ranking.order[0], 0, 0};
#pragma unroll
  for (int s = 0; s < kSlots; ++s) look_ahead(open[s], ranking);

  int node = 0;
  for (; node < n_nodes; ++node) {
    int slot = 0;
    Open mine = open[0];
#pragma unroll
    for (int s = 1; s < kSlots; ++s)
      if (open[s].key > mine.key || (open[s].key == mine.key && open[s].tie < mine.tie))
        mine = open[s], slot = s;
    const int winner = best_lane(mine.key, mine.tie);
    if (winner < 0) break;
    const u64 key = __shfl_sync(kWarp, mine.key, winner);
    const u64 child = __shfl_sync(kWarp, mine.child, winner);
    const int packed = __shfl_sync(kWarp,
                                   mine.candidate | mine.child_candidate << 8 | mine.depth << 16 |
                                       slot << 24,
                                   winner);
    const int candidate = packed & 0xFF, depth = packed >> 16 & 0xFF;
    const int row = node + 1, parent = (packed >> 24) * 32 + winner;
    if (lane == 0) {
      rows.parent[row] = parent, rows.depth[row] = depth, rows.candidate[row] = candidate;
      rows.score[row] = __double2float_rn(to_score(key));
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      Open& own = open[s];
      if (s * 32 + lane == parent) {
        own.key = own.sibling, own.candidate = own.sibling_candidate, ++own.place;
        own.tie = static_cast<u32>(depth << 16 | 2 * row);
      } else if (s * 32 + lane == row) {
        own.key = child, own.candidate = packed >> 8 & 0xFF, own.depth = depth + 1;
        own.place = ranking.children(depth, candidate), own.base = to_score(key);
        own.tie = static_cast<u32>((depth + 1) << 16 | (2 * row + 1));
      } else {
        continue;
      }
      look_ahead(own, ranking);
    }
  }
  if (lane == 0) rows.parent[0] = -1, rows.depth[0] = 0, rows.score[0] = 0.0f, rows.built = node;
}

// ---- tables ------------------------------------------------------------------------------------

// Bits 64 * word to 64 * word + 63 of the set of rows on the way up, this one included.
__device__ __forceinline__ u64 ancestor_word(const Rows& rows, int row, int word) {
  u64 bits = 0;
  for (int at = row; at >= 0; at = rows.parent[at])
    if (at >> 6 == word) bits |= u64{1} << (at & 63);
  return bits;
}

// The four newest inputs of a causal convolution at this row, itself last. Before the anchor come
// -1, -2, -3: the committed window, newest first.
__device__ __forceinline__ int4 taps(const Rows& rows, int row) {
  const auto before = [&](int at) { return at >= 0 ? rows.parent[at] : at - 1; };
  const int one = before(row), two = before(one);
  return make_int4(before(two), two, one, row);
}

// Shared memory: ranked scores, token ids, ranked candidates.
extern "C" __global__ void __launch_bounds__(THREADS)
    build_trees(const void* candidate_ids, const float* scores, const i64* anchor,
                const float* logsumexp, const double* calibration, i64* token, int* parent,
                int* depth, float* score, u64* ancestors, int4* tap, int wide_ids, int positions,
                int predecessors, int candidates, int n_nodes, int max_depth) {
  extern __shared__ __align__(16) u8 dynamic[];
  __shared__ Rows rows;
  const Shape shape{positions, predecessors, candidates, n_nodes, max_depth};
  const i64 request = blockIdx.x;
  const int n_ids = positions * candidates, ranked_places = ranked_rows(shape) * kStride;
  float* const ranked = reinterpret_cast<float*>(dynamic);
  int* const ids = reinterpret_cast<int*>(ranked + ranked_places);
  u8* const order = reinterpret_cast<u8*>(ids + n_ids);

  fetch(scores + request * n_ids * predecessors, shape, ranked);
  for (int i = threadIdx.x; i < n_ids; i += THREADS) {
    const i64 at = request * n_ids + i;
    ids[i] = wide_ids ? static_cast<int>(static_cast<const i64*>(candidate_ids)[at])
                      : static_cast<const int*>(candidate_ids)[at];
  }
  __syncthreads();
  rank_all(shape, logsumexp ? logsumexp + request * positions : nullptr, calibration, ranked,
           order);
  __syncthreads();
  if (threadIdx.x < 32) {
    const Ranking ranking{ranked, order, predecessors, max_depth};
    if (n_nodes <= 32) grow<1>(rows, ranking, n_nodes);
    else if (n_nodes <= 64) grow<2>(rows, ranking, n_nodes);
    else grow<4>(rows, ranking, n_nodes);
  }
  __syncthreads();

  const i64 first = request * (n_nodes + 1);
  for (int row = threadIdx.x; row <= n_nodes; row += THREADS) {
    const i64 at = first + row;
    const bool used = row <= rows.built;
    const int its_depth = used ? rows.depth[row] : -1;
    // A row that stands for nothing carries the anchor: any model can embed it.
    token[at] = its_depth > 0 ? ids[(its_depth - 1) * candidates + rows.candidate[row]]
                              : anchor[request];
    parent[at] = used ? rows.parent[row] : kNoParent;
    depth[at] = its_depth;
    score[at] = used ? rows.score[row] : __int_as_float(0xFF800000);
    tap[at] = used ? taps(rows, row) : make_int4(-3, -2, -1, row);
  }
  const int words = (n_nodes >> 6) + 1;
  for (int i = threadIdx.x; i < (n_nodes + 1) * words; i += THREADS) {
    const int row = i / words;
    ancestors[first * words + i] = row <= rows.built ? ancestor_word(rows, row, i % words) : 0;
  }
}
