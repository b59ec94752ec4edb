// What the roles of the Hopper GEMM have in common: parameters, the work split drawn in
// gemm_sm90.cu, and the places in shared memory where they meet.
#pragma once

#include "gemm_sm90_ptx.cuh"

constexpr int kInputBytes = COLS * kBlockCols * 2;  // one block of activations
constexpr int kSlots = SLOTS;  // corrected channels that find place in shared memory
constexpr int kNoSlot = 255;
constexpr u32 kEmpty = 0xFFFFFFFF;
constexpr int kConsumers = 256;
constexpr int kThreads = 320;

struct Params {
  const u8* records;       // [tiles, blocks, 12288]
  const float* scale;      // [tiles * 128]: 2^(lo - 112), or 0 for a channel held in escapes alone
  const int* escape_ptr;   // [units + 1]
  const u64* escapes;      // by unit, channel, column: see Escape
  const u16* bias;         // bfloat16 [channels], or null
  u16* y;                  // bfloat16 [rows, y_stride]
  u32* partials;           // [workers, 2, 128 * COLS] floats, every word kEmpty between launches
  float* overflow;         // [workers, 128, COLS]: corrections without a place in shared memory
  u32* issuing;            // [SMs]: CTAs of ours on that SM with loads still to issue
  long long y_stride;      // elements
  int rows;                // 1..COLS
  int channels;
  int blocks;              // units per tile
  int workers;             // CTAs with work; the others only keep their place
  int linger;              // cycles they keep it
  int split_tiles;         // tiles 0 .. split_tiles - 1 are shared
  int share;               // floor(units of them / workers)
  int longer;              // their units mod workers: so many CTAs have one unit more
  int whole_tiles;         // per worker
};

// ---- the work split ----------------------------------------------------------------------------

// The units of a CTA: `split` units from `split_begin` on, then `whole` units from `whole_begin`.
struct Work {
  int split_begin, split, whole_begin, whole;

  __device__ Work(const Params& p, int cta)
      : split_begin(first_unit(p, cta)),
        split(first_unit(p, cta + 1) - split_begin),
        whole_begin((p.split_tiles + cta * p.whole_tiles) * p.blocks),
        whole(p.whole_tiles * p.blocks) {}
  __device__ int total() const { return split + whole; }
  __device__ int unit(int i) const {
    return i < split ? split_begin + i : whole_begin + i - split;
  }
};

// The segment that begins with the CTA's i-th unit.
__device__ __forceinline__ Segment segment_at(const Params& p, const Work& work, int i) {
  const int unit = work.unit(i);
  const int tile = unit / p.blocks;
  const int first = unit - tile * p.blocks;
  const int left = i < work.split ? work.split - i : p.blocks;
  return {tile, first, min(left, p.blocks - first)};
}

// ---- shared memory -----------------------------------------------------------------------------

// Shared memory as 32-bit addresses. A stage has a record and a block of inputs. The record is
// free once the consumers have it in registers, the inputs only after the products.
struct Shared {
  u32 inputs;        // STAGES blocks of activations, 1024-byte aligned
  u32 records;       // STAGES records
  u32 full;          // STAGES barriers: record and inputs have landed
  u32 record_free;   // STAGES barriers: every consumer warp has read the record
  u32 inputs_free;   // STAGES barriers: the consumer warps and the escape warp need them no more
  u32 corrected;     // barrier: the corrections of a segment are complete
  u32 taken_over;    // barrier: the consumers have added them to their sums
};

// What the roles tell each other through shared memory.
struct Signals {
  volatile u32 previous_done;  // 1: the previous kernel has ended
  u8 slot_of[kTileRows];       // where a channel's correction lies; kNoSlot: it has none
};

// A stage of the ring and the parity of its current phase.
struct Position {
  int stage = 0;
  u32 parity = 0;
  __device__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
