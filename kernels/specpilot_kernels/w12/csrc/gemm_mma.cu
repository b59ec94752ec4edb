// W12 GEMM for every GPU since sm_80: y[m, n] = sum_k x[m, k] * W[n, k], W in W12 layout 1.
//
// Reading order: gemm.cuh (split, decoding, escapes), then here: types, PTX helpers, copies into the
// ring, products, escapes, the end of a segment, the kernel.
//
// One CTA per SM has nine warps and at most 99 KB of shared memory: a ring of stages, each with
// one record (128 channels x 64 inputs) and the same 64 inputs of x, and one table of sums.
//
//                               inputs 0..31   inputs 32..63
//   channels  0..15,  64..79       warp 0         warp 4        decode -> mma.sync, A from
//   channels 16..31,  80..95       warp 1         warp 5        registers, B by ldmatrix; these
//   channels 32..47,  96..111      warp 2         warp 6        warps also copy into the ring
//   channels 48..63, 112..127      warp 3         warp 7
//
//   warp 8: escapes; adds to the table what weights outside their channel's window are worth
//
// A warp takes 32 channels and half the inputs, rather than 16 and all, because each piece of x it
// reads from shared memory then serves twice as many products. At the end of a segment warps w and
// w ^ 4 exchange sums through the table, and warp w is left with channels 16 w .. 16 w + 15.
//
// Work split (stream-K). Output channels form tiles of 128, inputs form blocks of 64; tile t and
// block k make one unit, which is one record of 12,288 bytes. Units are numbered tile by tile:
//
//   units   | tile 0: k 0 .. kb-1 | tile 1: k 0 .. kb-1 | tile 2 ...        |
//   CTAs    |  0         |  1          |  2         |  3          |  4 ...  |
//
// Each CTA takes floor(U / G) neighbouring units, the first U mod G CTAs one more. The part of a
// tile in one CTA is a segment. A tile of one segment is finished from registers. Otherwise every
// segment writes its sums to the workspace and the CTA that comes last adds them up, always in the
// order of the CTAs: the result does not depend on timing, nor on the batch, since no order and no
// split here depends on the rows.
//
// Compile-time: COLS (rows of x rounded up: 8, 16, 32, 48, 64), STAGES, VIEW_ONLY (see gemm.cuh),
// STREAM_ONLY (1: move every byte, multiply nothing; the floor that benchmarks print beside it).

#include "common/mma.cuh"
#include "gemm.cuh"

#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

constexpr int kInputBytes = COLS * kBlockCols * 2;  // one block of x
constexpr int kStageBytes = kFetchBytes + kInputBytes;
constexpr int kMultipliers = 256;  // threads that copy and multiply
constexpr int kThreads = 288;
constexpr int kGroups = COLS / 8;  // groups of eight rows of x: the n of mma.sync
static_assert(COLS % 8 == 0 && COLS <= 64 && STAGES >= 2, "no such kernel");

struct Params {
  const u8* records;      // [tiles, blocks, 12288]
  const float* scale;     // [tiles * 128]: 2^(lo - 112), or 0 for a channel held in escapes alone
  const int* escape_ptr;  // [units + 1]
  const u64* escapes;     // by unit, channel, column: see Escape
  const u16* x;           // bfloat16 [rows, x_stride], rows 16-byte aligned
  const u16* bias;        // bfloat16 [channels], or null
  u16* y;                 // bfloat16 [rows, y_stride]
  float* partials;        // [2 * CTAs, 128 * COLS]
  u32* arrivals;          // [tiles], zero between launches
  long long x_stride;     // elements
  long long y_stride;
  int rows;    // 1..COLS
  int inputs;
  int channels;
  int blocks;  // units per tile
  int share;   // floor(units / CTAs)
  int longer;  // units mod CTAs: so many CTAs have one unit more
};

// Sums of 16 channels x COLS rows over a warp, as mma.sync leaves them: lane l has, of each group
// of eight rows, rows 2 (l % 4) and the next of channel l / 4, then of channel l / 4 + 8.
using Sums = float[kGroups][4];

// ---- PTX helpers -------------------------------------------------------------------------------

// A barrier of all warps. They reach it in different places, which __syncthreads does not allow.
__device__ __forceinline__ void everyone_meets() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// A barrier of the warps that multiply.
__device__ __forceinline__ void multipliers_meet() {
  asm volatile("barrier.sync 2, %0;" ::"n"(kMultipliers) : "memory");
}

// Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8 and receives of
// each matrix two neighbouring values of row l / 4: the B operand of two k16 steps.
__device__ __forceinline__ void load_matrices(u32 address, u32 (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// ---- copies into the ring ----------------------------------------------------------------------

// Where a thread's share of the copies comes from and goes to. A stage is a record, copied as it
// is, and [COLS, 64] inputs, 128 bytes a row, whose 16-byte pieces are swizzled by the row: eight
// rows of one piece then lie in eight different groups of banks, as ldmatrix reads them.
struct Copies {
  const u8* record;  // the next unit's
  int block;         // the next unit's
  int left;          // units still to copy
  u32 stage_base;    // the stage it goes to
  int stage;

  __device__ Copies(const Params& p, u32 ring, int begin, int end)
      : record(p.records + static_cast<long long>(begin) * kRecordBytes),
        block(begin % p.blocks), left(end - begin), stage_base(ring), stage(0) {}

  // Copy the next unit, if there is one, as one group of copies.
  __device__ __forceinline__ void issue(const Params& p) {
    if (left > 0) {
      const u32 target = stage_base + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < kFetchBytes; i += kMultipliers * 16)
        copy16(target + i, record + threadIdx.x * 16 + i, 16);
      copy_inputs(p, stage_base + kFetchBytes);
      --left;
      record += kRecordBytes;
      if (++block == p.blocks) block = 0;
      stage_base += kStageBytes;
      if (++stage == STAGES) stage = 0, stage_base -= STAGES * kStageBytes;
    }
    copies_commit();
  }

  // Eight threads copy a row of the block, 32 rows at a time; zeros where x has ended.
  __device__ __forceinline__ void copy_inputs(const Params& p, u32 target) const {
    const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
    const int column = block * kBlockCols + piece * 8;
    const int in_row = min(max(p.inputs - column, 0), 8) * 2;
    target += first * 128 + (piece ^ first % 8) * 16;
#pragma unroll
    for (int i = 0; i < COLS; i += 32) {
      const int row = first + i;
      if (i + 32 > COLS && row >= COLS) continue;
      const int bytes = row < p.rows ? in_row : 0;
      copy16(target + i * 128, bytes ? p.x + row * p.x_stride + column : p.x, bytes);
    }
  }

  // Bring the first records into L2: weights never change, so this need not wait for anyone.
  __device__ __forceinline__ void prefetch_records() const {
    for (int i = threadIdx.x; i < min(left, STAGES - 1) * (kFetchBytes / 128); i += kMultipliers)
      prefetch(record + i / (kFetchBytes / 128) * kRecordBytes + i % (kFetchBytes / 128) * 128);
  }
};

// ---- products ----------------------------------------------------------------------------------

// Add the products of the two k16 steps of this warp. `own` are the sums of the 16 channels it
// will keep, in half warp / 4 of the record, `other` those of the 16 channels of warp ^ 4.
__device__ __forceinline__ void multiply_unit(u32 stage_base, Sums& own, Sums& other) {
  const int lane = threadIdx.x % 32, pair = threadIdx.x / 128, thread = threadIdx.x % 128;
  u32 a[2][2][4];  // own, other; k16 step
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int half = pair ^ i;
    u32 view[4], low[2] = {};
    load16(stage_base + half * 4096 + pair * 2048 + thread * 16, view);
#if !VIEW_ONLY
    load8(stage_base + kViewBytes + half * 2048 + thread * 16 + pair * 8, low);
#endif
    decode(view[0], view[1], low[0], a[i][0]);
    decode(view[2], view[3], low[1], a[i][1]);
  }
  const int piece = (4 * pair + lane / 8) ^ lane % 8;
  const u32 inputs = stage_base + kFetchBytes + lane % 8 * 128 + piece * 16;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    u32 b[4];
    load_matrices(inputs + group * 1024, b);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      mma(own[group], a[0][step], b[2 * step], b[2 * step + 1]);
      mma(other[group], a[1][step], b[2 * step], b[2 * step + 1]);
    }
  }
}

// ---- escapes -----------------------------------------------------------------------------------
//
// For each escape of a unit its warp adds (true weight - placeholder) * x to the table; the inputs
// are in the ring already, so nothing waits for memory. The placeholder is what decode() gives
// there, at its true scale.

// The table has the sums of the warp that keeps a channel in the order of its registers, so that
// thread t of 256 finds those of group g at float4 g * 256 + t. Here: one sum.
__device__ __forceinline__ int table_index(int channel, int row) {
  const int thread = channel / 16 * 32 + channel % 8 * 4 + row % 8 / 2;
  return (row / 8 * kMultipliers + thread) * 4 + channel % 16 / 8 * 2 + row % 2;
}

// Lane l has rows l and l + 32; `inputs` is a block of x in the ring.
__device__ __forceinline__ void add_escape(Escape escape, const u8* inputs, float* table) {
  const float weight = escape.weight(), placeholder = escape.placeholder();
#pragma unroll
  for (int row = threadIdx.x % 32; row < COLS; row += 32) {
    const int piece = escape.column() / 8 ^ row % 8;
    const float x = from_bf16(
        *reinterpret_cast<const u16*>(inputs + row * 128 + piece * 16 + escape.column() % 8 * 2));
    float& sum = table[table_index(escape.channel(), row)];
    sum = fmaf(-placeholder, x, fmaf(weight, x, sum));
  }
}

__device__ void correct(const Params& p, const u8* ring, float* table, int begin, int end) {
  // 32 escapes are in registers, one a lane, and the next 32 on their way.
  int next = __ldg(p.escape_ptr + begin);
  const int limit = __ldg(p.escape_ptr + end);
  const auto load = [&](int base) {
    const int index = base + threadIdx.x % 32;
    return index < limit ? __ldg(p.escapes + index) : ~u64{0};  // of no unit
  };
  u64 mine = load(next), coming = load(next + 32);
  int used = 0;
  const auto current = [&] {
    const u64 from_lane = __shfl_sync(~0u, mine, used);
    return Escape{static_cast<u32>(from_lane), static_cast<u32>(from_lane >> 32)};
  };
  Escape escape = current();
  int stage = 0;
  for (int unit = begin; unit < end;) {
    for (const int stop = unit + segment_at(p, unit, end).count; unit < stop; ++unit) {
      everyone_meets();  // the stage has landed
      while (escape.unit() == unit) {
        add_escape(escape, ring + stage * kStageBytes + kFetchBytes, table);
        if (++used == 32) used = 0, next += 32, mine = coming, coming = load(next + 32);
        escape = current();
      }
      if (++stage == STAGES) stage = 0;
    }
    everyone_meets();  // the table has this segment's corrections,
    everyone_meets();  // then the exchanged sums
  }
}

// ---- the end of a segment ----------------------------------------------------------------------

// A scale of 0 wins over everything: the channel is held in escapes alone.
__device__ __forceinline__ float scaled(float sum, float scale) {
  return scale == 0.f ? 0.f : sum * scale;
}

__device__ __forceinline__ float4 scaled(const float (&sums)[4], const float (&scale)[2]) {
  return make_float4(scaled(sums[0], scale[0]), scaled(sums[1], scale[0]),
                     scaled(sums[2], scale[1]), scaled(sums[3], scale[1]));
}

// Bring both sums to their true scale, put `other` into the table, on top of the corrections, and
// take out what the table has for `own`, leaving zeros.
__device__ __forceinline__ void exchange(const Params& p, int tile, float* table, Sums& own,
                                         const Sums& other) {
  const int channel = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float* scale = p.scale + tile * kTileRows;
  const float own_scale[] = {__ldg(scale + channel), __ldg(scale + channel + 8)};
  const float other_scale[] = {__ldg(scale + (channel ^ 64)), __ldg(scale + (channel ^ 64) + 8)};
  everyone_meets();
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float4& cell = reinterpret_cast<float4*>(table)[group * kMultipliers + (threadIdx.x ^ 128)];
    const float4 sum = cell, add = scaled(other[group], other_scale);
    cell = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
  }
  everyone_meets();
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float4& cell = reinterpret_cast<float4*>(table)[group * kMultipliers + threadIdx.x];
    const float4 sum = cell, add = scaled(own[group], own_scale);
    own[group][0] = sum.x + add.x, own[group][1] = sum.y + add.y;
    own[group][2] = sum.z + add.z, own[group][3] = sum.w + add.w;
    cell = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

__device__ __forceinline__ float4* partial_slot(const Params& p, int slot) {
  return reinterpret_cast<float4*>(p.partials) + slot * (kTileRows * COLS / 4) + threadIdx.x;
}

// A segment that is not a whole tile: leave the sums in the workspace. If this CTA is the last of
// the tile's, return true, with the sums of all its CTAs added up in their order.
__device__ __forceinline__ bool join_tile(const Params& p, int tile, Sums& sums) {
  __shared__ bool comes_last;
  const int tile_begin = tile * p.blocks;
  const int first = owner(p, tile_begin);
  const int last = owner(p, tile_begin + p.blocks - 1);
  // A CTA has at most two unfinished tiles: the one it begins in and the one it ends in.
  const auto slot_of = [&](int cta) { return 2 * cta + (first_unit(p, cta) < tile_begin); };
  float4* mine = partial_slot(p, slot_of(blockIdx.x));
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    __stcg(mine + i * kMultipliers, make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
  multipliers_meet();
  if (threadIdx.x == 0) {
    __threadfence();  // after the barrier it covers what all of us wrote
    comes_last = atomicAdd(p.arrivals + tile, 1) == static_cast<u32>(last - first);
    if (comes_last) p.arrivals[tile] = 0;
    __threadfence();
  }
  multipliers_meet();
  if (!comes_last) return false;
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
#pragma unroll 2
  for (int cta = first; cta <= last; ++cta) {
    const float4* slot = partial_slot(p, slot_of(cta));
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float4 v = __ldcg(slot + i * kMultipliers);
      sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
    }
  }
  return true;
}

// Bias, rounding, store.
__device__ __forceinline__ void store_tile(const Params& p, int tile, const Sums& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = tile * kTileRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    if (channel >= p.channels) continue;
    const float bias = p.bias ? from_bf16(__ldg(p.bias + channel)) : 0.f;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const float sum = sums[i / 2][half * 2 + i % 2] + bias;
      if (row < p.rows) p.y[row * p.y_stride + channel] = to_bf16(sum);
    }
  }
}

// ---- the kernel --------------------------------------------------------------------------------

__device__ void multiply(const Params& p, u32 ring, float* table, int begin, int end) {
  Copies copies(p, ring, begin, end);
  copies.prefetch_records();
  for (int i = threadIdx.x; i < kTileRows * COLS; i += kMultipliers) table[i] = 0.f;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) copies.issue(p);

  int stage = 0;
  for (int unit = begin; unit < end;) {
    const Segment segment = segment_at(p, unit, end);
    Sums own = {}, other = {};
    for (int block = 0; block < segment.count; ++block) {
      copies_wait<STAGES - 2>();
      everyone_meets();  // this stage has landed, and all are done with the one before it,
      copies.issue(p);   // which is the one that is filled next
#if !STREAM_ONLY
      multiply_unit(ring + stage * kStageBytes, own, other);
#endif
      if (++stage == STAGES) stage = 0;
    }
    exchange(p, segment.tile, table, own, other);
    if (segment.count == p.blocks || join_tile(p, segment.tile, own))
      store_tile(p, segment.tile, own);
    unit += segment.count;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    w12_gemm_mma(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  u8* ring = shared + kTileRows * COLS * 4;
  float* table = reinterpret_cast<float*>(shared);
  const int begin = first_unit(p, blockIdx.x);
  const int end = first_unit(p, blockIdx.x + 1);
  let_next_kernel_start();
  if (threadIdx.x < kMultipliers)
    multiply(p, shared_address(ring), table, begin, end);
  else
    correct(p, ring, table, begin, end);
}
