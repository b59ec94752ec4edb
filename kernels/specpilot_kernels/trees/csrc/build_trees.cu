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
constexpr int kLast = -2147483647 - 1;  // below every other score's integer
constexpr u32 kAbsent = 255;  // in place of a candidate
constexpr i64 kSign = static_cast<i64>(1ull << 63);
constexpr int kNoParent = -2;  // of rows that the tree does not fill

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

struct Shape {
  int positions, predecessors, candidates;
};

// One row of the tree so far, row 0 being the anchor.
struct __align__(16) Row {
  u64 key;  // of its path score
  int parent;
  int what;  // depth << 8 | candidate; 0 for the anchor
};

// ---- candidates of every predecessor, best first -----------------------------------------------

// Rows of the ranking: one of the first position, `predecessors` of each other one.
__device__ __forceinline__ int ranked_rows(const Shape& shape) {
  return 1 + (shape.positions - 1) * shape.predecessors;
}

// Integers in the order of floats; NaN, which stands for nothing, comes last. No -0 comes here.
__device__ __forceinline__ int ordered(float value) {
  const int bits = __float_as_int(value);
  return value != value ? kLast : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

// One row's scores in descending order, each candidate beside its score.
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
  for (int i = 0; i < CANDIDATES; ++i) {
    ranked[rank[i]] = value[i];
    order[rank[i]] = key[i] == kLast ? kAbsent : i;
  }
  ranked[CANDIDATES] = 0.0f, order[CANDIDATES] = kAbsent;
}

// Raw scores into the places of the ranked ones, 16 loads of each thread on their way at a time.
__device__ __forceinline__ void fetch(const float* scores, const Shape& shape, float* ranked) {
  constexpr int kLoads = 16, kRowsAtOnce = THREADS / CANDIDATES;
  const int rows = ranked_rows(shape), candidate = threadIdx.x % CANDIDATES;
  for (int first = threadIdx.x / CANDIDATES; first < rows; first += kLoads * kRowsAtOnce) {
    float value[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int row = first + j * kRowsAtOnce;
      const int source = row == 0 ? 0 : row - 1 + shape.predecessors;
      const bool exists = row < rows && candidate < shape.candidates;
      value[j] = exists ? scores[source * shape.candidates + candidate] : minus_infinity();
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int row = first + j * kRowsAtOnce;
      if (row < rows) ranked[row * kStride + candidate] = value[j];
    }
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
      value[i] = i < shape.candidates ? value[i] + 0.0f : __int_as_float(0x7FC00000);
    rank_row(value, ranked + row * kStride, order + row * kStride);
  }
}

// ---- the tree ----------------------------------------------------------------------------------

// Path scores as integers in the same order. That of -inf is the smallest, and above 0, which
// stands for no path. No score is -0: a sum of two others never is.
__device__ __forceinline__ u64 to_key(double score) {
  const i64 bits = __double_as_longlong(score);
  return static_cast<u64>(bits ^ (bits >> 63 | kSign));
}
__device__ __forceinline__ double to_score(u64 key) {
  const i64 bits = static_cast<i64>(key);
  return __longlong_as_double(bits ^ (~(bits >> 63) | kSign));
}

// A row's best child that is not in the tree, and what comes after it.
struct Open {
  u64 key;             // of its path score; 0: the row has no such child
  u64 sibling, child;  // keys of its next sibling and of its own best child
  double base;         // path score of the row
  u32 tie;             // depth << 16 | order of opening: the smaller goes first
  int place;           // in the ranking
  u32 depth, candidate, sibling_candidate, child_candidate;
};

struct Ranking {
  const volatile float* value;  // volatile: read at once, not after a look at `order`
  const volatile u8* order;
  int per_position, per_candidate;  // places between rows of neighbouring positions, candidates
  u32 max_depth;

  // Where the candidates after `candidate` at `depth`, counted from 1, begin.
  __device__ __forceinline__ int children(u32 depth, u32 candidate) const {
    return kStride + static_cast<int>(depth - 1) * per_position +
           static_cast<int>(candidate) * per_candidate;
  }
};

// The key of the candidate at `place` after a path of score `base`, and the candidate.
__device__ __forceinline__ u64 extend(const Ranking& ranking, double base, int place,
                                      u32& candidate) {
  const double score = plus(base, ranking.value[place]);
  candidate = ranking.order[place];
  return candidate == kAbsent ? 0 : to_key(score);
}

// What follows `open`. It may be asked again: the answer stays.
__device__ __forceinline__ void look_ahead(Open& open, const Ranking& ranking) {
  const bool exists = open.key != 0, has_child = exists && open.depth < ranking.max_depth;
  const int first = has_child ? ranking.children(open.depth, open.candidate) : 0;
  const int next = exists ? open.place + 1 : 0;
  const u64 sibling = extend(ranking, open.base, next, open.sibling_candidate);
  const u64 child = extend(ranking, to_score(open.key), first, open.child_candidate);
  open.sibling = exists ? sibling : 0;
  open.child = has_child ? child : 0;
}

// The lane with the largest key, of equal ones that with the smallest tie; `highest` is the larger
// half of the key.
__device__ __forceinline__ int lane_of(u32 highest, u64 key, u32 tie) {
  bool best = static_cast<u32>(key >> 32) == highest;
  u32 lanes = __ballot_sync(kWarp, best);
  if (lanes & (lanes - 1)) {
    const u32 low = best ? static_cast<u32>(key) : 0;
    const u32 highest_low = __reduce_max_sync(kWarp, low);
    best = best && low == highest_low;
    lanes = __ballot_sync(kWarp, best);
    if (lanes & (lanes - 1)) {
      const u32 first = __reduce_min_sync(kWarp, best ? tie : kWarp);
      lanes = __ballot_sync(kWarp, best && tie == first);
    }
  }
  return 31 - __clz(static_cast<int>(lanes));
}

// One warp. Lane l owns the rows l, l + 32, ...: `kSlots` of them. Returns the number of nodes.
template <int kSlots>
__device__ __forceinline__ int grow(Row* rows, const Ranking& ranking, int n_nodes) {
  const int lane = threadIdx.x;
  Open open[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) open[s] = {0, 0, 0, 0.0, kWarp, 0, 0, 0, 0, 0};
  if (lane == 0 && ranking.max_depth > 0) {
    open[0].key = extend(ranking, 0.0, 0, open[0].candidate);
    open[0].depth = 1, open[0].tie = 1u << 16;
  }
  if (lane == 0) rows[0] = {to_key(0.0), -1, 0};
  bool changed[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) changed[s] = s == 0;

  int row = 1;
  for (; row <= n_nodes; ++row) {
    int slot = 0;
    u64 key = open[0].key;
    u32 tie = open[0].tie;
#pragma unroll
    for (int s = 1; s < kSlots; ++s)
      if (open[s].key > key || (open[s].key == key && open[s].tie < tie))
        key = open[s].key, tie = open[s].tie, slot = s;
    const u32 highest = __reduce_max_sync(kWarp, static_cast<u32>(key >> 32));
    // While the maximum is on its way. One slot is done without a branch, changed or not.
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (kSlots == 1 || changed[s]) look_ahead(open[s], ranking);
    if (highest == 0) break;  // no key but 0 begins so
    Open mine = open[0];
#pragma unroll
    for (int s = 1; s < kSlots; ++s)
      if (slot == s) mine = open[s];
    const int winner = lane_of(highest, key, tie);
    key = u64{highest} << 32 | __shfl_sync(kWarp, static_cast<u32>(key), winner);
    const u64 child = __shfl_sync(kWarp, mine.child, winner);
    const u32 packed =
        __shfl_sync(kWarp, slot << 24 | mine.depth << 16 | mine.child_candidate << 8 |
                               mine.candidate, winner);
    const u32 depth = packed >> 16 & 0xFF, candidate = packed & 0xFF;
    const int parent = static_cast<int>(packed >> 24) * 32 + winner;
    if (lane == 0) rows[row] = {key, parent, static_cast<int>(depth << 8 | candidate)};
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      Open& own = open[s];
      const bool wins = s * 32 + lane == parent, fresh = s * 32 + lane == row;
      changed[s] = wins || fresh;
      own.key = wins ? own.sibling : fresh ? child : own.key;
      own.base = fresh ? to_score(key) : own.base;
      own.place = fresh ? ranking.children(depth, candidate) : own.place + wins;
      own.candidate = wins ? own.sibling_candidate : fresh ? packed >> 8 & 0xFF : own.candidate;
      own.depth = fresh ? depth + 1 : own.depth;
      own.tie = changed[s] ? own.depth << 16 | static_cast<u32>(2 * row + fresh) : own.tie;
    }
  }
  return row - 1;
}

// ---- tables ------------------------------------------------------------------------------------

// Bits 64 * word to 64 * word + 63 of the set of rows on the way up, this one included.
__device__ __forceinline__ u64 ancestor_word(const Row* rows, int row, int word) {
  u64 bits = 0;
  for (int at = row; at >= 0; at = rows[at].parent)
    if (at >> 6 == word) bits |= u64{1} << (at & 63);
  return bits;
}

// The four newest inputs of a causal convolution at this row, itself last. Before the anchor come
// -1, -2, -3: the committed window, newest first.
__device__ __forceinline__ int4 taps(const Row* rows, int row) {
  const auto before = [&](int at) { return at >= 0 ? rows[at].parent : at - 1; };
  const int one = before(row), two = before(one);
  return make_int4(before(two), two, one, row);
}

// Shared memory: the tree's rows, ranked scores, ranked candidates.
extern "C" __global__ void __launch_bounds__(THREADS)
    build_trees(const void* candidate_ids, const float* scores, const i64* anchor,
                const float* logsumexp, const double* calibration, const i64* prefix, i64* token,
                int* parent, int* depth, float* score, u64* ancestors, int4* tap, i64* position,
                int wide_ids, int positions, int predecessors, int candidates, int n_nodes,
                int max_depth) {
  extern __shared__ __align__(16) u8 dynamic[];
  __shared__ int built;
  const Shape shape{positions, predecessors, candidates};
  const i64 request = blockIdx.x;
  const int n_ids = positions * candidates;
  Row* const rows = reinterpret_cast<Row*>(dynamic);
  float* const ranked = reinterpret_cast<float*>(rows + kMaxRows);
  u8* const order = reinterpret_cast<u8*>(ranked + ranked_rows(shape) * kStride);

  fetch(scores + request * n_ids * predecessors, shape, ranked);
  __syncthreads();
  rank_all(shape, logsumexp ? logsumexp + request * positions : nullptr, calibration, ranked,
           order);
  __syncthreads();
  if (threadIdx.x < 32) {
    const Ranking ranking{ranked, order, kStride * predecessors, predecessors > 1 ? kStride : 0,
                          static_cast<u32>(max_depth)};
    const int count = n_nodes <= 32   ? grow<1>(rows, ranking, n_nodes)
                      : n_nodes <= 64 ? grow<2>(rows, ranking, n_nodes)
                                      : grow<4>(rows, ranking, n_nodes);
    if (threadIdx.x == 0) built = count;
  }
  __syncthreads();

  const i64 first = request * (n_nodes + 1), before = prefix ? prefix[request] : 0;
  for (int row = threadIdx.x; row <= n_nodes; row += THREADS) {
    const i64 at = first + row;
    const bool used = row <= built;
    const int what = used ? rows[row].what : 0;  // a row that stands for nothing carries the anchor
    const i64 id = request * n_ids + ((what >> 8) - 1) * candidates + (what & 0xFF);
    token[at] = what == 0  ? anchor[request]
                : wide_ids ? static_cast<const i64*>(candidate_ids)[id]
                           : static_cast<const int*>(candidate_ids)[id];
    parent[at] = used ? rows[row].parent : kNoParent;
    depth[at] = used ? what >> 8 : -1;
    position[at] = before + (what >> 8);
    score[at] = used ? __double2float_rn(to_score(rows[row].key)) : minus_infinity();
    tap[at] = used ? taps(rows, row) : make_int4(-3, -2, -1, row);
  }
  const int words = (n_nodes >> 6) + 1;
  for (int i = threadIdx.x; i < (n_nodes + 1) * words; i += THREADS) {
    const int row = i / words;
    ancestors[first * words + i] = row <= built ? ancestor_word(rows, row, i % words) : 0;
  }
}
