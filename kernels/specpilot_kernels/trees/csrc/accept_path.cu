// Which root path of a verified tree the target's own choices follow, one warp for each request.
// The rule is that of `accept.py: walk_accepted`.

using u32 = unsigned int;
using i64 = long long;

constexpr u32 kWarp = 0xFFFFFFFFu;
constexpr int kSlots = 5;  // 129 rows, 32 at a time

extern "C" __global__ void __launch_bounds__(32)
    accept_path(const i64* token, const int* parent, const i64* target, int* path, int* n_accepted,
                i64* bonus, int n_rows, int width) {
  const int lane = threadIdx.x;
  const i64 first = static_cast<i64>(blockIdx.x) * n_rows;
  token += first, parent += first, target += first;
  path += static_cast<i64>(blockIdx.x) * width;

  // The parent of a row that carries what the target chose there; -1 for all other rows.
  int after[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int row = s * 32 + lane;
    const int its_parent = row < n_rows ? parent[row] : -1;
    after[s] = its_parent >= 0 && token[row] == target[its_parent] ? its_parent : -1;
  }
  int current = 0, accepted = 0;
  for (;; ++accepted) {
    if (lane == 0) path[accepted] = current;
    int next = -1;
#pragma unroll
    for (int s = kSlots - 1; s >= 0; --s) {
      const u32 lanes = __ballot_sync(kWarp, after[s] == current);
      if (lanes) next = s * 32 + __ffs(lanes) - 1;
    }
    if (next < 0 || accepted + 1 == width) break;
    current = next;
  }
  for (int i = accepted + 1 + lane; i < width; i += 32) path[i] = -1;
  if (lane == 0) n_accepted[blockIdx.x] = accepted, bonus[blockIdx.x] = target[current];
}
