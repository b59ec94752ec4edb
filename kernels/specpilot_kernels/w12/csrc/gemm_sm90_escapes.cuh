// The role of the escape warp in the Hopper GEMM.
//
// The escape warp goes through the ring like a consumer. For each escape of a unit it adds
// (true weight - placeholder) * x to the correction of the escape's channel; the inputs are in the
// ring already, so nothing waits for memory. The placeholder is what the consumers decode there.
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

__device__ void correct(const Params& p, const Shared& s, const Corrections& corrections,
                        Signals& signals, const Work& work) {
  const int lane = threadIdx.x % 32;
  EscapeStream escapes(p, work.split_begin, work.split_begin + work.split);
  EscapeStream of_whole(p, work.whole_begin, work.whole_begin + work.whole);
  wait_for_previous_kernel();
  if (lane == 0) signals.previous_done = 1;

  Position at;
  u32 taken_over = 1;  // parity: the first segment has nobody to wait for
  for (int i = 0; i < work.total(); taken_over ^= 1) {
    if (i > 0) barrier_wait(s.taken_over, taken_over);
    if (i == work.split) escapes = of_whole;
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
