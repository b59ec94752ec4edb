// Which root path of a verified tree the target's own choices follow, and all that the rest of a
// step wants to know of it, one warp for each request. The rule is that of
// `accept.py: walk_accepted`.

using u32 = unsigned int;
using i64 = long long;

constexpr u32 kWarp = 0xFFFFFFFFu;
constexpr int kSlots = 5;  // 129 rows, 32 at a time
constexpr int kMaxRows = 129;

// `prefix` and `enabled` may be null: lengths count from 0, and paths are accepted.
extern "C" __global__ void __launch_bounds__(32)
    accept_path(const i64* token, const int* parent, const i64* target, const i64* prefix,
                const int* enabled, int* path, int* n_accepted, i64* bonus, i64* committed,
                i64* place, i64* length, int* n_committed, int n_rows, int width) {
  __shared__ int rows[kMaxRows];
  const int lane = threadIdx.x;
  const i64 request = blockIdx.x, first = request * n_rows;
  token += first, parent += first, target += first;
  const bool accepts = enabled == nullptr || *enabled != 0;
  const i64 before = prefix ? prefix[request] : 0;

  // The parent of a row that carries what the target chose there; -1 for all other rows.
  int after[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int row = s * 32 + lane;
    const int its_parent = row < n_rows ? parent[row] : -1;
    after[s] = its_parent >= 0 && token[row] == target[its_parent] ? its_parent : -1;
  }
  int current = 0, accepted = accepts ? 0 : -1;
  while (accepts) {
    if (lane == 0) rows[accepted] = current;
    int next = -1;
#pragma unroll
    for (int s = kSlots - 1; s >= 0; --s) {
      const u32 lanes = __ballot_sync(kWarp, after[s] == current);
      if (lanes) next = s * 32 + __ffs(lanes) - 1;
    }
    if (next < 0 || accepted + 1 == width) break;
    current = next, ++accepted;
  }
  __syncwarp();
  for (int i = lane; i < width; i += 32) {
    const bool used = i <= accepted;
    const int row = used ? rows[i] : 0;
    const i64 at = request * width + i;
    path[at] = used ? row : -1;
    committed[at] = used ? target[row] : 0;
    place[at] = first + row;
  }
  if (lane == 0) {
    n_accepted[request] = accepted;
    bonus[request] = target[current];
    length[request] = before + accepted + 1;
    n_committed[request] = accepted + 1;
  }
}
