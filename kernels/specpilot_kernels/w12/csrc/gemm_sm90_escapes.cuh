// The role of the escape warp in the Hopper GEMM.
//
// The escape warp goes through the ring like a consumer. For each escape of a unit it adds
// (true weight - placeholder) * x to the correction of the escape's channel; the inputs are in the
// ring already, so nothing waits for memory. The placeholder is what the consumers decode there.
//
// ESCAPE_RING chooses how the list of escapes is read: 0 by 32 into registers, as measured; 1 ahead
// of time through shared memory, not yet run on a GPU. When `bench_w12.py --escape-ring` has
// decided, the loser is deleted.
#pragma once

#include "gemm_sm90_work.cuh"

// Where row 0 lies in a slot; row r is r ^ that. Threads of a warp read eight slots at once, which
// should not fall on the same banks.
__device__ __forceinline__ int first_row(int slot) {
  if (COLS == 48) return slot / 2 % 2 * 8;
  return COLS >= 32 ? slot % 4 * 8 : 0;
}

// The sum of row `row` in a slot. Slots without a place in shared memory are in global memory.
struct Corrections {
  u32 shared;     // float [kSlots, COLS]
  float* global;  // float [128, COLS], of this CTA

  __device__ bool is_shared(int slot) const { return kSlots == kTileRows || slot < kSlots; }
  __device__ u32 address(int slot, int row) const {
    return shared + 4 * (slot * COLS + (row ^ first_row(slot)));
  }
  __device__ float load(int slot, int row) const {
    return is_shared(slot) ? load_float(address(slot, row)) : __ldcg(global + slot * COLS + row);
  }
  __device__ float2 load_pair(int slot, int row) const {  // of an even row and the next
    if (is_shared(slot)) return load_float2(address(slot, row));
    return __ldcg(reinterpret_cast<const float2*>(global + slot * COLS + row));
  }
  __device__ void store(int slot, int row, float value) const {
    if (is_shared(slot))
      store_float(address(slot, row), value);
    else
      __stcg(global + slot * COLS + row, value);
  }
};

// `inputs`: the unit's activations in the ring, 128 bytes a row, 16-byte pieces swizzled by the row.
__device__ __forceinline__ void add_escape(Escape escape, u32 inputs,
                                           const Corrections& corrections, Signals& signals,
                                           int& slots) {
  const int lane = threadIdx.x % 32;
  int slot = signals.slot_of[escape.channel()];
  const bool is_new = slot == kNoSlot;
  if (is_new) {
    slot = slots++;
    __syncwarp();
    if (lane == 0) signals.slot_of[escape.channel()] = slot;
  }
  const float weight = escape.weight(), placeholder = escape.placeholder();
#pragma unroll
  for (int row = lane; row < COLS; row += 32) {
    const int piece = escape.column() / 8 ^ row % 8;
    const float x =
        from_bf16(load_u16(inputs + row * 128 + piece * 16 + escape.column() % 8 * 2));
    const float before = is_new ? 0.f : corrections.load(slot, row);
    corrections.store(slot, row, fmaf(-placeholder, x, fmaf(weight, x, before)));
  }
  __syncwarp();
}

#if ESCAPE_RING
// The CTA's escapes in the order of its units. They come through a small ring in shared memory,
// three chunks ahead: a load from global memory takes as long as many units. The last chunks that
// are asked for hold no escapes, so no copy is under way when the stream ends.
struct EscapeStream {
  static constexpr int kChunk = kEscapeRing / 4;
  u32 ring;
  int split_base, split, whole_base, total;  // where they lie: `split` of them, then the others
  int at;                                    // the current one's number
  Escape current;

  // Reads constants only: may run before the previous kernel has ended.
  __device__ EscapeStream(const Params& p, u32 ring, const Work& work)
      : ring(ring), split_base(__ldg(p.escape_ptr + work.split_begin)), at(0) {
    const int split_end = __ldg(p.escape_ptr + work.split_begin + work.split);
    whole_base = __ldg(p.escape_ptr + work.whole_begin);
    const int whole_end = __ldg(p.escape_ptr + work.whole_begin + work.whole);
    split = split_end - split_base;
    total = split + whole_end - whole_base;
    for (int chunk = 0; chunk < 4; ++chunk) fetch(p, chunk * kChunk);
    select();
  }
  // Ask for the chunk that begins with escape `first`, as one group of copies. Beyond the last
  // escape there are ones: no unit has that number.
  __device__ void fetch(const Params& p, int first) const {
    const int lane = threadIdx.x % 32;
    const int i = first + lane;
    if (lane < kChunk) {
      const u32 target = ring + 8 * (i % kEscapeRing);
      if (i < total)
        copy8(target, p.escapes + (i < split ? split_base + i : whole_base + i - split));
      else
        store_u64(target, ~u64{0});
    }
    copies_commit();
  }
  // Read the current escape; at the start of a chunk wait until every lane's part is here.
  __device__ void select() {
    if (at % kChunk == 0) {
      copies_wait<3>();
      __syncwarp();
    }
    load_pair(ring + 8 * (at % kEscapeRing), current.low, current.high);
  }
  __device__ void advance(const Params& p) {
    if (++at % kChunk == 0) {
      __syncwarp();  // everybody has read the chunk whose place is taken
      fetch(p, at + 3 * kChunk);
    }
    select();
  }
};
#else
// Escapes base .. limit - 1, 32 in registers and the next 32 on their way.
struct EscapeStream {
  int next, limit, used;
  u64 mine, coming;
  Escape current;

  // The escapes of units begin .. end - 1. Constants: may be read before the previous kernel ends.
  __device__ EscapeStream(const Params& p, int begin, int end)
      : next(__ldg(p.escape_ptr + begin)), limit(__ldg(p.escape_ptr + end)), used(0) {
    mine = load(p, next), coming = load(p, next + 32);
    select();
  }
  __device__ u64 load(const Params& p, int base) const {
    const int index = base + static_cast<int>(threadIdx.x % 32);
    return index < limit ? __ldg(p.escapes + index) : ~u64{0};  // no unit has that number
  }
  __device__ void select() {
    const u64 escape = __shfl_sync(~0u, mine, used);
    current = {static_cast<u32>(escape), static_cast<u32>(escape >> 32)};
  }
  __device__ void advance(const Params& p) {
    if (++used == 32) used = 0, next += 32, mine = coming, coming = load(p, next + 32);
    select();
  }
};
#endif

__device__ void correct(const Params& p, const Shared& s, const Corrections& corrections,
                        Signals& signals, const Work& work) {
  const int lane = threadIdx.x % 32;
#if ESCAPE_RING
  EscapeStream escapes(p, s.escapes, work);
#else
  EscapeStream escapes(p, work.split_begin, work.split_begin + work.split);
  EscapeStream of_whole(p, work.whole_begin, work.whole_begin + work.whole);
#endif
  wait_for_previous_kernel();
  if (lane == 0) signals.previous_done = 1;

  Position at;
  u32 taken_over = 1;  // parity: the first segment has nobody to wait for
  for (int i = 0; i < work.total(); taken_over ^= 1) {
    if (i > 0) barrier_wait(s.taken_over, taken_over);
#if !ESCAPE_RING
    if (i == work.split) escapes = of_whole;
#endif
    const Segment segment = segment_at(p, work, i);
    reinterpret_cast<u32*>(signals.slot_of)[lane] = ~0u;
    __syncwarp();
    int slots = 0;
    int unit = work.unit(i);
    i += segment.count;
    for (const int end = unit + segment.count; unit < end; ++unit) {
      barrier_wait(s.full + 8 * at.stage, at.parity);
      for (; escapes.current.unit() == unit; escapes.advance(p))
        add_escape(escapes.current, s.inputs + at.stage * kInputBytes, corrections, signals, slots);
      __syncwarp();
      if (lane == 0) barrier_arrive(s.inputs_free + 8 * at.stage);
      at.advance();
    }
    if (kSlots < kTileRows) __threadfence_block();
    __syncwarp();
    if (lane == 0) barrier_arrive(s.corrected);
  }
}
