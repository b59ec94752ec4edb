// W12 GEMM for Hopper (sm_90a): y[m, n] = sum_k x[m, k] * W[n, k], W in W12 layout 1.
//
// Reading order: what every GEMM shares (gemm.cuh), Hopper's instructions (gemm_sm90_ptx.cuh), work
// split and shared memory (gemm_sm90_work.cuh), the escape warp (gemm_sm90_escapes.cuh), the end of
// a tile (gemm_sm90_tile.cuh); here producer, consumers, the kernel.
//
// One CTA has ten warps and, with its ring of stages, half of an SM:
//
//   warps 0-3  consumer of channels  0..63 of a tile    decode -> wgmma, A from registers
//   warps 4-7  consumer of channels 64..127 of a tile   the same
//   warp  8    producer: bulk copies of records, tensor copies of activations, one ring
//   warp  9    escapes: adds what weights outside their channel's window are worth
//
// Half of an SM, because the next kernel's CTAs then fit beside ours: launched with programmatic
// dependent launch they fill their rings with weights while we still compute.
//
// Work split. Output channels form tiles of 128, inputs form blocks of 64; tile t and block k make
// one unit, which is one record of 12,288 bytes, and units are numbered tile by tile. A CTA first
// takes its equal share of the units of the first few tiles, then its whole tiles:
//
//   tiles   | split tiles: units shared out evenly | whole tiles, the same number for every CTA |
//   CTAs    | 0 | 1 | 2 | 3 | 4 | ...              | 0           | 1           | 2 ...          |
//
// What a CTA has of a tile is a segment. A whole tile is finished from registers. Of a split tile
// every CTA sends its sums to the others, and each finishes some rows, adding up in the order of
// the CTAs: the result depends neither on timing nor, since the split ignores the rows, on the
// batch.
//
// Hand-over. Loading must not pause between kernels. While our CTA issues loads it is counted in
// `issuing` of its SM; the next kernel's CTA beside us waits for the count to fall, then fills its
// ring while we drain ours, add up and store.
//
// Compile-time: COLS (rows of x rounded up: 8, 16, 32, 48, 64), STAGES, VIEW_ONLY (1: read only the
// 8-bit view of each record and put the dropped mantissa bits at their midpoint), STREAM_ONLY (1:
// move every byte, multiply nothing; the floor that benchmarks print beside the kernel), SLOTS
// (channels of a tile whose corrections fit in shared memory), READ_AHEAD (see the consumers).

#ifndef COLS
#define COLS 8
#endif
#ifndef STAGES
#define STAGES 8
#endif
#ifndef SLOTS
#define SLOTS 128
#endif
#ifndef READ_AHEAD
#define READ_AHEAD 0
#endif
#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

#include "gemm_sm90_tile.cuh"

// ---- producer ----------------------------------------------------------------------------------

// Wait until no other CTA of this SM issues loads, or the previous kernel has ended.
__device__ __forceinline__ void take_over(u32* issuing, const Signals& signals) {
  atomicAdd(issuing, 1);
  while (!signals.previous_done && *reinterpret_cast<volatile u32*>(issuing) > 1) {
  }
}

__device__ void produce(const Params& p, const TensorMap& map, const Shared& s,
                        const Signals& signals, const Work& work) {
  const u64 policy = read_once_policy();
  const int total = work.total();
  const int ahead = min(total, STAGES);
  const auto load_record = [&](int i, int stage) {
    barrier_expect(s.full + 8 * stage, kFetchBytes + kInputBytes);
    copy_weights(s.records + stage * kFetchBytes,
                 p.records + static_cast<long long>(work.unit(i)) * kRecordBytes, kFetchBytes,
                 s.full + 8 * stage, policy);
  };
  int block = work.unit(0) % p.blocks;
  const auto load_inputs = [&](int i, int stage) {
    if (i == work.split) block = 0;
    copy_inputs(s.inputs + stage * kInputBytes, map, block * kBlockCols, s.full + 8 * stage);
    if (++block == p.blocks) block = 0;
  };
  u32* issuing = p.issuing + sm_index();
  take_over(issuing, signals);

  // Weights never change, so the ring fills before the previous kernel has written our inputs.
  for (int i = 0; i < ahead; ++i) load_record(i, i);
  wait_for_previous_kernel();
  for (int i = 0; i < ahead; ++i) load_inputs(i, i);

  // Records run one unit ahead of inputs, since their places get free earlier.
  Position record, inputs;
  for (int i = ahead; i <= total; ++i) {
    if (i < total) {
      barrier_wait(s.record_free + 8 * record.stage, record.parity);
      load_record(i, record.stage);
      record.advance();
    }
    if (i > ahead) {
      barrier_wait(s.inputs_free + 8 * inputs.stage, inputs.parity);
      load_inputs(i - 1, inputs.stage);
      inputs.advance();
    }
  }
  atomicSub(issuing, 1);
}

// ---- consumers ---------------------------------------------------------------------------------

// A thread's part of a record: view of the first two and the last two k16 steps, low plane of all.
struct Record {
  u32 view[2][4];
  u32 low[4] = {};
};

// READ_AHEAD 1: the next record is in registers before the current one is decoded. That hides the
// latency of shared memory where it limits, but the next record must have come.
__device__ void consume(const Params& p, const Shared& s, const Corrections& corrections,
                        const Signals& signals, const Work& work) {
  const int group = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  const u32 view = keep(s.records + group * 4096 + thread * 16);
  const u32 low_plane = keep(s.records + kViewBytes + group * 2048 + thread * 16);
  const u32 first_inputs = keep(descriptor_of(s.inputs));
  const auto wait_for = [&](const Position& at) {
    barrier_wait(s.full + 8 * at.stage, at.parity);
  };
  const auto give_back_inputs = [&](int stage) {
    if (lane == 0) barrier_arrive(s.inputs_free + 8 * stage);
  };
  Record record;
  const auto read_record = [&](const Position& at) {
#if !STREAM_ONLY
    load16(view + at.stage * kFetchBytes, record.view[0]);
#if !VIEW_ONLY
    load16(low_plane + at.stage * kFetchBytes, record.low);
#endif
    load16(view + at.stage * kFetchBytes + 2048, record.view[1]);
#endif
    __syncwarp();
    if (lane == 0) barrier_arrive(s.record_free + 8 * at.stage);
  };

  float d[kAccumulators];
  u32 a[2][2][4];  // two sets of two k16 steps: one is decoded while the other is multiplied
  Position at;
  u32 corrected = 0;  // parity
  for (int i = 0; i < work.total(); corrected ^= 1) {
    const Segment segment = segment_at(p, work, i);
    i += segment.count;
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k) d[k] = 0.f;
    int previous = -1;  // the stage whose inputs the tensor cores may still be reading
#if READ_AHEAD
    wait_for(at);
    read_record(at);
#endif
#pragma unroll 1
    for (int left = segment.count; left > 0; --left) {
      const int stage = at.stage;
#if READ_AHEAD
      const Record current = record;
      at.advance();
      if (left > 1) {
        wait_for(at);
        read_record(at);
      }
#else
      if (previous >= 0 && !__any_sync(~0u, barrier_passed(s.full + 8 * stage, at.parity))) {
        wgmma_wait<0>();  // nothing to do yet: let the inputs go early
        give_back_inputs(previous);
        previous = -1;
      }
      wait_for(at);
      read_record(at);
      at.advance();
      const Record& current = record;
#endif
#if STREAM_ONLY
      if (previous >= 0) give_back_inputs(previous);
#else
      const u32 inputs = first_inputs + stage * (kInputBytes >> 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma_wait<1>();  // the set we are about to overwrite is no longer read
        if (half == 1 && previous >= 0) give_back_inputs(previous);
        decode(current.view[half][0], current.view[half][1], current.low[2 * half], a[half][0]);
        decode(current.view[half][2], current.view[half][3], current.low[2 * half + 1],
               a[half][1]);
        wgmma_fence();
        // 16 inputs are 32 bytes: two descriptor units.
        wgmma(d, a[half][0], inputs_descriptor(inputs + 4 * half));
        wgmma(d, a[half][1], inputs_descriptor(inputs + 4 * half + 2));
        wgmma_commit();
      }
#endif
      previous = stage;
    }
    wgmma_wait<0>();
    give_back_inputs(previous);
    barrier_wait(s.corrected, corrected);
    scale_and_correct(p, segment.tile, corrections, signals, d);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.taken_over);
    if (segment.count == p.blocks)
      store_tile(p, segment.tile, d);
    else
      join_tile(p, segment, i == work.split, d);
  }
}

// ---- the kernel --------------------------------------------------------------------------------

// A CTA without work keeps the next kernel from putting two CTAs on its SM: it stays until that
// kernel's CTAs have found their places, soon after the previous kernel has ended.
__device__ __forceinline__ void keep_place(const Params& p) {
  wait_for_previous_kernel();
  const long long start = clock64();
  while (clock64() - start < p.linger) __nanosleep(200);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    w12_gemm(const __grid_constant__ TensorMap map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ __align__(8) u64 barriers[3 * STAGES + 2];
  __shared__ __align__(4) Signals signals;
  const u32 base = keep(shared_address(ring));
  const u32 barrier = shared_address(barriers);
  const Shared s{base,
                 base + STAGES * kInputBytes,
                 barrier,
                 barrier + 8 * STAGES,
                 barrier + 16 * STAGES,
                 barrier + 24 * STAGES,
                 barrier + 24 * STAGES + 8,
  };
  const Corrections corrections{base + STAGES * (kInputBytes + kFetchBytes),
                                p.overflow + blockIdx.x * kTileRows * COLS};

  if (threadIdx.x == 0) {
    signals.previous_done = 0;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(s.full + 8 * i, 1);
      barrier_init(s.record_free + 8 * i, kConsumers / 32);
      barrier_init(s.inputs_free + 8 * i, kConsumers / 32 + 1);
    }
    barrier_init(s.corrected, 1);
    barrier_init(s.taken_over, kConsumers / 32);
    barriers_visible();
  }
  __syncthreads();
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) >= p.workers) {
    keep_place(p);
    return;
  }

  const Work work(p, blockIdx.x);
  const int warp = threadIdx.x / 32;
  if (warp < 8)
    consume(p, s, corrections, signals, work);
  else if (warp == 8 && threadIdx.x % 32 == 0)
    produce(p, map, s, signals, work);
  else if (warp == 9)
    correct(p, s, corrections, signals, work);
}
