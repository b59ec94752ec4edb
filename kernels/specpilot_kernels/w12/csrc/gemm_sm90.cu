// W12 GEMM for Hopper (sm_90a): y[m, n] = sum_k x[m, k] * W[n, k], W in W12 layout 1.
//
// Reading order: types, PTX helpers, the work split, the roles (producer, escapes, consumers), the
// end of a tile, the kernel.
//
// One CTA has ten warps and, with its ring of stages, half of an SM:
//
//   warps 0-3  consumer of channels  0..63 of a tile    decode -> wgmma, A from registers
//   warps 4-7  consumer of channels 64..127 of a tile   the same
//   warp  8    producer: bulk copies of records, tensor copies of activations, one ring
//   warp  9    escapes: the exact values of weights outside their channel's window
//
// Half of an SM, because the next kernel's CTAs then fit beside ours: launched with programmatic
// dependent launch they fill their rings with weights while we still compute.
//
// Work split (stream-K). Output channels form tiles of 128, inputs form blocks of 64; tile t and
// block k make one unit, which is one record of 12,288 bytes, and units are numbered tile by tile:
//
//   units   | tile 0: k 0 .. kb-1 | tile 1: k 0 .. kb-1 | tile 2 ...        |
//   CTAs    |  0         |  1          |  2         |  3          |  4 ...  |
//
// Each CTA takes floor(U / G) neighbouring units, the first U mod G CTAs one more. The part of a
// tile in one CTA is a segment. A tile of one segment is finished from registers. Otherwise every
// segment writes its sums to the workspace and the CTA that comes last adds them up, always in the
// order of the CTAs: the result depends neither on timing nor, since the split ignores the rows,
// on the batch.
//
// Hand-over. Loading must not pause between kernels. While our CTA issues loads it is counted in
// `issuing` of its SM; the next kernel's CTA beside us waits for the count to fall, then fills its
// ring while we drain ours, add up and store.
//
// Compile-time: COLS (rows of x rounded up: 8, 16, 32, 48, 64), STAGES, VIEW_ONLY (1: read only the
// 8-bit view of each record and put the dropped mantissa bits at their midpoint), STREAM_ONLY (1:
// move every byte, multiply nothing; the floor that benchmarks print beside the kernel).

#ifndef COLS
#define COLS 8
#endif
#ifndef STAGES
#define STAGES 8
#endif
#ifndef VIEW_ONLY
#define VIEW_ONLY 0
#endif
#ifndef PREFETCH
#define PREFETCH 0
#endif
#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kTileRows = 128;       // channels of a record
constexpr int kBlockCols = 64;       // inputs of a record
constexpr int kViewBytes = 8192;     // bytes 0..8191 of a record: the 8-bit view
constexpr int kRecordBytes = 12288;  // view and low plane
constexpr int kFetchBytes = VIEW_ONLY ? kViewBytes : kRecordBytes;
constexpr int kInputBytes = COLS * kBlockCols * 2;  // one block of activations
constexpr int kConsumers = 256;
constexpr int kThreads = 320;
constexpr int kAccumulators = COLS / 2;  // floats per consumer thread: 64 x COLS over 128 threads

// CUtensorMap of x: bfloat16 [rows, inputs], box [COLS, 64], 128-byte swizzle, zeros outside.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct Params {
  const u8* records;       // [tiles, blocks, 12288]
  const float* scale;      // [tiles * 128]: 2^(lo - 112), or 0 for a channel held in escapes alone
  const int* escape_ptr;   // [tiles + 1]
  const u64* escapes;      // tile by tile, by channel, by column: see Escape
  const u16* x;            // bfloat16 [rows, x_stride]
  const u16* bias;         // bfloat16 [channels], or null
  u16* y;                  // bfloat16 [rows, y_stride]
  float* partials;         // [2 * CTAs, 128 * COLS]
  float* corrections;      // [tiles, 128, COLS]: only channels named in `corrected` are written
  u32* corrected;          // [tiles + 2 * CTAs, 4]: bit r of an unsplit tile or of a split tile's part
                           // = channel r has a correction
  u32* arrivals;           // [tiles], zero between launches
  u32* issuing;            // [SMs]: CTAs of ours on that SM with loads still to issue
  long long x_stride;      // elements
  long long y_stride;      // elements
  int rows;                // 1..COLS
  int channels;
  int tiles;
  int blocks;              // units per tile
  int workers;             // CTAs that share the units; the others only keep their place
  int linger;              // cycles a CTA without work keeps its place
  int share;               // floor(units / workers)
  int longer;              // units mod workers: so many CTAs have one unit more
};

struct Segment {
  int tile;
  int first;   // first block
  int count;   // blocks, at least 1
};

// ---- PTX helpers -------------------------------------------------------------------------------

// The 32-bit address of a generic pointer to shared memory.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The value itself, which the compiler must hold in a register instead of computing it anew.
__device__ __forceinline__ u32 keep(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Prepare a barrier that completes a phase after `arrivals` arrivals and all expected bytes.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Arrive once and announce `bytes` that the copy engine will write in this phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Wait until the phase of the given parity has completed; the hardware suspends the thread.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Copy `bytes` of global memory to shared memory in the background; weights are read once, so L2
// may drop them first.
__device__ __forceinline__ void copy_weights(u32 target, const void* source, u32 bytes, u32 barrier,
                                             u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Ask for `bytes` of weights to be brought into L2.
__device__ __forceinline__ void prefetch_weights(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Copy the box of x that begins at column `column` of row 0, swizzled as wgmma reads it.
__device__ __forceinline__ void copy_inputs(u32 target, const TensorMap& map, int column,
                                            u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target), "l"(&map), "r"(column), "r"(0), "r"(barrier)
      : "memory");
}

// Let the next kernel of the stream start; it still waits for our results by itself.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Wait until every kernel this one was launched to depend on has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A barrier of the 256 consumer threads alone.
__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Order our register writes before the wgmma that reads them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Four bytes of `low` and `high` (numbered 0-3 and 4-7), chosen by the nibbles of `order`.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 order) {
  return __byte_perm(low, high, order);
}

// (value & mask) | set in one instruction.
__device__ __forceinline__ u32 mask_and_set(u32 value, u32 mask, u32 set) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(value), "r"(mask), "r"(set));
  return result;
}

// Bits of `one` where `mask` has ones, of `other` elsewhere, in one instruction.
__device__ __forceinline__ u32 choose(u32 one, u32 other, u32 mask) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(one), "r"(other), "r"(mask));
  return result;
}

// Read 16 bytes of shared memory.
__device__ __forceinline__ void load16(u32 address, u32 (&words)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

// Descriptor of a [COLS, 64] bfloat16 block in shared memory, 128-byte swizzle, k contiguous:
// address / 16, 1024 bytes from one group of eight rows to the next, swizzle mode 1.
__device__ __forceinline__ u64 inputs_descriptor(u32 address) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{1} << 16) | ((address & 0x3FFFF) >> 4);
}

// acc [64, COLS] += A [64, 16] (registers) x B [16, COLS] (shared memory), asynchronously.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define WGMMA_IN(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const u32 (&a)[4], u64 b) {
#if COLS == 8
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8,"
      " 1, 1, 1, 0;"
      : D4(0) : WGMMA_IN(a, b));
#elif COLS == 16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},"
      " {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
      : D8(0) : WGMMA_IN(a, b));
#elif COLS == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : D8(0), D8(8) : WGMMA_IN(a, b));
#elif COLS == 48
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, {%24,%25,%26,%27}, %28,"
      " 1, 1, 1, 0;"
      : D8(0), D8(8), D8(16) : WGMMA_IN(a, b));
#elif COLS == 64
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : D8(0), D8(8), D8(16), D8(24) : WGMMA_IN(a, b));
#else
#error "COLS must be 8, 16, 32, 48 or 64"
#endif
}

// ---- the work split ----------------------------------------------------------------------------

// The first unit of CTA `cta`.
__device__ __forceinline__ int first_unit(const Params& p, int cta) {
  return cta * p.share + min(cta, p.longer);
}

// The CTA that has unit `unit`.
__device__ __forceinline__ int owner(const Params& p, int unit) {
  const int in_longer = p.longer * (p.share + 1);
  return unit < in_longer ? unit / (p.share + 1) : p.longer + (unit - in_longer) / p.share;
}

// The segment that begins at `unit` and ends with its tile or before `end`.
__device__ __forceinline__ Segment segment_at(const Params& p, int unit, int end) {
  const int tile = unit / p.blocks;
  const int first = unit - tile * p.blocks;
  return {tile, first, min(end - unit, p.blocks - first)};
}

// Shared memory as 32-bit addresses.
struct Shared {
  u32 inputs;   // STAGES blocks of activations, 1024-byte aligned
  u32 records;  // STAGES records
  u32 full;     // STAGES barriers: a stage has landed
  u32 empty;    // STAGES barriers: every consumer warp is done with a stage
};

// What the roles tell each other through shared memory.
struct Signals {
  volatile u32 previous_done;    // 1: the previous kernel has ended
  volatile u32 tiles_corrected;  // unsplit tiles whose corrections are complete
  volatile u32 comes_last;       // 1: our segment was the last part of its tile
};

// ---- producer ----------------------------------------------------------------------------------

__device__ __forceinline__ u32 sm_index() {
  u32 index;
  asm volatile("mov.u32 %0, %smid;" : "=r"(index));
  return index;
}

// Wait until no other CTA of this SM issues loads, or the previous kernel has ended.
__device__ __forceinline__ void take_over(u32* issuing, const Signals& signals) {
  atomicAdd(issuing, 1);
  while (!signals.previous_done && *reinterpret_cast<volatile u32*>(issuing) > 1) {
  }
}

__device__ void produce(const Params& p, const TensorMap& map, const Shared& s,
                        const Signals& signals, int begin, int end) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const u8* source = p.records + static_cast<long long>(begin) * kRecordBytes;
  const int total = end - begin;
  const int ahead = min(total, STAGES);
  int block = begin % p.blocks;
  u32* issuing = p.issuing + sm_index();
  take_over(issuing, signals);

  // Weights never change, so the ring fills before the previous kernel has written our inputs.
  for (int i = 0; i < ahead; ++i) {
    barrier_expect(s.full + 8 * i, kFetchBytes + kInputBytes);
    copy_weights(s.records + i * kFetchBytes, source, kFetchBytes, s.full + 8 * i, policy);
    source += kRecordBytes;
  }
  for (int i = 0; i < min(total - ahead, PREFETCH); ++i)
    prefetch_weights(source + i * kRecordBytes, kFetchBytes);
  wait_for_previous_kernel();
  for (int i = 0; i < ahead; ++i) {
    copy_inputs(s.inputs + i * kInputBytes, map, block * kBlockCols, s.full + 8 * i);
    if (++block == p.blocks) block = 0;
  }
  int stage = 0;
  u32 parity = 0;
  for (int i = ahead; i < total; ++i) {
    barrier_wait(s.empty + 8 * stage, parity);
    barrier_expect(s.full + 8 * stage, kFetchBytes + kInputBytes);
    copy_weights(s.records + stage * kFetchBytes, source, kFetchBytes, s.full + 8 * stage, policy);
    copy_inputs(s.inputs + stage * kInputBytes, map, block * kBlockCols, s.full + 8 * stage);
    source += kRecordBytes;
    if (++block == p.blocks) block = 0;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  atomicSub(issuing, 1);
}

// ---- escapes -----------------------------------------------------------------------------------
//
// Code here runs once or twice in a kernel's life, so what costs is latency: of instructions not
// yet in the cache (loops stay rolled), and of inputs gathered from L2 (a group is on its way
// together).

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// The CTAs that share a tile, and which of its escapes each of them takes.
struct Sharers {
  int tile_begin, first, last;
  __device__ Sharers(const Params& p, int tile)
      : tile_begin(tile * p.blocks),
        first(owner(p, tile_begin)),
        last(owner(p, tile_begin + p.blocks - 1)) {}
  __device__ int count() const { return last - first + 1; }
  // A CTA has at most two unfinished tiles: the one it begins in and the one it ends in.
  __device__ int slot(const Params& p, int cta) const {
    return 2 * cta + (first_unit(p, cta) < tile_begin);
  }
};

// An escape as it lies in memory: column | (channel of the tile) << 32 | (window lo) << 40 |
// (exact bits) << 48. Where lo is 0 the channel's scale is 0: nothing has to be taken from its sum.
struct Escape {
  u32 column;
  int channel;
  float weight, placeholder;  // placeholder: what the consumers decode, 2^(lo - 127) or the midpoint

  __device__ explicit Escape(u64 stored)
      : column(static_cast<u32>(stored)),
        channel(static_cast<int>(stored >> 32 & 0xFF)),
        weight(from_bf16(static_cast<u32>(stored >> 48))) {
    const u32 lo = stored >> 40 & 0xFF;
    placeholder = lo == 0 ? 0.f : __uint_as_float(lo == 1 ? 1u << 22 : (lo - 1) << 23);
    if (VIEW_ONLY) placeholder *= 1.0625f;
  }
};

__device__ __forceinline__ int channel_of(const Params& p, int index) {
  return static_cast<int>(__ldg(p.escapes + index) >> 32 & 0xFF);
}

// The escapes lo..hi - 1 that a CTA takes of a tile's begin..end - 1: an equal share, except that
// a channel belongs to whoever has its first escape.
struct Share {
  int end, lo, hi;
  int before, at_end;  // channels of escapes lo - 1 and hi - 1; -1: none
  u64 mine;            // escape lo + lane

  __device__ Share() = default;
  // Reads constants only, so it may run before the previous kernel has ended.
  __device__ Share(const Params& p, int tile, const Sharers& sharers) {
    const int begin = __ldg(p.escape_ptr + tile);
    end = __ldg(p.escape_ptr + tile + 1);
    const int part = blockIdx.x - sharers.first;
    const long long escapes = end - begin;
    lo = begin + static_cast<int>(escapes * part / sharers.count());
    hi = begin + static_cast<int>(escapes * (part + 1) / sharers.count());
    before = lo > begin ? channel_of(p, lo - 1) : -1;
    at_end = hi > lo ? channel_of(p, hi - 1) : -1;
    mine = load(p, lo);
  }
  __device__ u64 load(const Params& p, int base) const {
    const int index = base + static_cast<int>(threadIdx.x % 32);
    return index < end ? __ldg(p.escapes + index) : 0;
  }
  __device__ bool has(int index, int channel) const {
    return index < end && channel != before && (index < hi || channel == at_end);
  }
};

// Two bytes of global memory, or zero. `volatile` keeps the compiler from moving the load down to
// where its value is used, one at a time.
__device__ __forceinline__ u32 load_input(const u16* source, bool wanted) {
  u32 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@wanted ld.global.u16 %0, [%1];\n"
      "}\n" : "=r"(value) : "l"(source), "r"(static_cast<u32>(wanted)) : "memory");
  return value;
}

// The running sums of one channel: lane l has rows l and l + 32.
struct Correction {
  float low, high;
  int channel;
  __device__ void store(const Params& p, int tile) const {
    const int lane = threadIdx.x % 32;
    float* row = p.corrections + (tile * kTileRows + channel) * COLS + lane;
    if (channel >= 0 && lane < COLS) row[0] = low;
    if (COLS > 32 && channel >= 0 && lane + 32 < COLS) row[32] = high;
  }
};

// Sum (true weight - placeholder) * x over our share of a tile's escapes, by channel, columns
// rising. Returns, in lane l < 4, which of channels 32 l .. 32 l + 31 have a sum.
__device__ u32 correct_share(const Params& p, int tile, const Share& share) {
  constexpr int kGroup = COLS > 32 ? 8 : 16;
  const int lane = threadIdx.x % 32;
  const bool has_low = lane < p.rows;
  const bool has_high = lane + 32 < p.rows;
  const u16* x_low = p.x + lane * p.x_stride;
  const u16* x_high = x_low + 32 * p.x_stride;
  u32 mask = 0;
  Correction sum{0.f, 0.f, -1};
  u64 stored = share.mine;
#pragma unroll 1
  for (int base = share.lo; base < share.end; base += 32) {
    const Escape mine(stored);
    u32 wanted = __ballot_sync(~0u, share.has(base + lane, mine.channel));
    const bool go_on = base + 32 < share.hi || wanted >> 31;
    if (go_on) stored = share.load(p, base + 32);
#pragma unroll 1
    while (wanted) {
      u32 low[kGroup], high[kGroup];
      u32 rest = wanted;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const u32 column = __shfl_sync(~0u, mine.column, __ffs(rest) - 1);
        low[i] = load_input(x_low + column, rest && has_low);
        if (COLS > 32) high[i] = load_input(x_high + column, rest && has_high);
        rest &= rest - 1;
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int from = __ffs(wanted) - 1;
        const int channel = __shfl_sync(~0u, mine.channel, from);
        const float weight = __shfl_sync(~0u, mine.weight, from);
        const float placeholder = __shfl_sync(~0u, mine.placeholder, from);
        if (wanted) {
          if (channel != sum.channel) {
            sum.store(p, tile);
            sum = {0.f, 0.f, channel};
            if (lane == channel / 32) mask |= 1u << (channel % 32);
          }
          sum.low = fmaf(-placeholder, from_bf16(low[i]), fmaf(weight, from_bf16(low[i]), sum.low));
          if (COLS > 32)
            sum.high =
                fmaf(-placeholder, from_bf16(high[i]), fmaf(weight, from_bf16(high[i]), sum.high));
        }
        wanted &= wanted - 1;
      }
    }
    if (!go_on) break;
  }
  sum.store(p, tile);
  return mask;
}

// ---- the end of a tile -------------------------------------------------------------------------

// Sums lie in registers as wgmma leaves them. Part `part` of 256 (warp w, lane l) has channels
// 16 w + l / 4 (+ 8) and, in each group of eight rows, rows 2 (l % 4) and the next: four sums.

// What finishes a sum: scale, correction, bias, rounding, store.
struct Finish {
  float scale[2], bias[2];
  const float* corrections[2];  // null: the channel has none
  u16* y;
  int row0;

  // slot(0) .. slot(masks - 1): the rows of `corrected` that speak of this tile.
  template <class Slot>
  __device__ Finish(const Params& p, int tile, int part, int masks, Slot slot)
      : row0(part % 4 * 2) {
    const int channel = part / 32 * 16 + part % 32 / 4;
    const int column = tile * kTileRows + channel;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = channel + 8 * half;
      scale[half] = __ldg(p.scale + column + 8 * half);
      bias[half] = p.bias && column + 8 * half < p.channels ? from_bf16(p.bias[column + 8 * half])
                                                            : 0.f;
      u32 mask = 0;
      for (int i = 0; i < masks; ++i) mask |= __ldcg(p.corrected + slot(i) * 4 + c / 32);
      const bool corrected = mask >> (c % 32) & 1;
      corrections[half] =
          corrected ? p.corrections + (tile * kTileRows + c) * COLS + row0 : nullptr;
    }
    y = p.y + column + row0 * p.y_stride;
  }

  // sums: [half][odd row] of group `group`.
  __device__ __forceinline__ void store(const Params& p, int tile, int part, int group,
                                        const float (&sums)[4]) const {
    const int column = tile * kTileRows + part / 32 * 16 + part % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, row = group * 8 + i % 2;
      if (row + row0 >= p.rows || column + 8 * half >= p.channels) continue;
      float sum = sums[i] * scale[half];
      if (corrections[half]) sum += __ldcg(corrections[half] + row);
      u16 rounded;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum + bias[half]));
      y[row * p.y_stride + 8 * half] = rounded;
    }
  }
};

__device__ __forceinline__ void store_tile(const Params& p, int tile,
                                           const float (&d)[kAccumulators]) {
  const Finish finish(p, tile, threadIdx.x, 1, [=](int) { return tile; });
#pragma unroll
  for (int i = 0; i < COLS / 8; ++i) {
    const float sums[4] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    finish.store(p, tile, threadIdx.x, i, sums);
  }
}

__device__ __forceinline__ float4* partial_slot(const Params& p, int slot, int part) {
  return reinterpret_cast<float4*>(p.partials) + slot * (kTileRows * COLS / 4) + part;
}

// Each CTA arrives twice, with its sums and with its corrections; true for whoever comes last.
__device__ __forceinline__ bool arrive_last(const Params& p, int tile, const Sharers& sharers) {
  __threadfence();
  const u32 parts = 2 * sharers.count();
  const bool comes_last = atomicAdd(p.arrivals + tile, 1) == parts - 1;
  if (comes_last) p.arrivals[tile] = 0;
  __threadfence();
  return comes_last;
}

// Add up a split tile in the order of the CTAs. `kTogether` groups of rows have their loads on
// the way at once.
template <int kTogether>
__device__ __forceinline__ void add_parts(const Params& p, int tile, const Sharers& sharers,
                                          int part) {
  const Finish finish(p, tile, part, sharers.count(), [&](int i) {
    return p.tiles + sharers.slot(p, sharers.first + i);
  });
#pragma unroll 1
  for (int group = 0; group < COLS / 8; group += kTogether) {
    float sums[kTogether][4] = {};
    for (int cta = sharers.first; cta <= sharers.last; ++cta) {
      const float4* slot = partial_slot(p, sharers.slot(p, cta), part);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float4 v = __ldcg(slot + (group + i) * kConsumers);
        sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) finish.store(p, tile, part, group + i, sums[i]);
  }
}

// A segment that is not a whole tile: leave the sums in the workspace; the last part to arrive,
// whichever it is, finishes the tile.
__device__ __forceinline__ void join_tile(const Params& p, int tile, Signals& signals,
                                          const float (&d)[kAccumulators]) {
  const Sharers sharers(p, tile);
  float4* own = partial_slot(p, sharers.slot(p, blockIdx.x), threadIdx.x);
#pragma unroll
  for (int i = 0; i < kAccumulators / 4; ++i)
    __stcg(own + i * kConsumers, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  consumers_meet();  // what all consumers wrote is covered by the fence of thread 0
  if (threadIdx.x == 0) signals.comes_last = arrive_last(p, tile, sharers);
  consumers_meet();
  constexpr int kTogether = COLS == 48 ? 3 : COLS < 32 ? COLS / 8 : 4;
  if (signals.comes_last) add_parts<kTogether>(p, tile, sharers, threadIdx.x);
}

// The escape warp: our share of the escapes of every tile that we have a segment of.
__device__ void correct(const Params& p, Signals& signals, int begin, int end) {
  const int lane = threadIdx.x % 32;
  const int last_tile = (end - 1) / p.blocks;
  int tile = begin / p.blocks;
  Sharers sharers(p, tile);
  Share share(p, tile, sharers);
  wait_for_previous_kernel();
  if (lane == 0) signals.previous_done = 1;
  u32 whole = 0;
#pragma unroll 1
  while (true) {
    const u32 mask = correct_share(p, tile, share);
    const bool split = sharers.count() > 1;
    const int row = split ? p.tiles + sharers.slot(p, blockIdx.x) : tile;
    if (lane < 4) p.corrected[row * 4 + lane] = mask;
    __threadfence_block();
    __syncwarp();
    if (!split) {
      if (lane == 0) signals.tiles_corrected = ++whole;
    } else {
      const bool comes_last = lane == 0 && arrive_last(p, tile, sharers);
      if (__shfl_sync(~0u, comes_last, 0)) {
#pragma unroll 1
        for (int part = lane; part < kConsumers; part += 32) add_parts<1>(p, tile, sharers, part);
      }
    }
    if (++tile > last_tile) break;
    sharers = Sharers(p, tile);
    share = Share(p, tile, sharers);
  }
}

// ---- consumers ---------------------------------------------------------------------------------

// Eight weights to bfloat16 with exponent field 0x70 | offset, in the order of the A operand:
// high byte = sign 0111 e3 e2 e1, low byte = e0 m6 m5 m4 m3 m2 m1 m0. `view` holds one byte per
// weight, `low` two nibbles per byte: m3..m0 of weights 0-3 below those of weights 4-7. Eleven
// instructions for eight weights.
__device__ __forceinline__ void decode(u32 view0, u32 view1, u32 low, u32 (&a)[4]) {
  const u32 high0 = mask_and_set(view0, 0x87878787, 0x38383838);
  const u32 high1 = mask_and_set(view1, 0x87878787, 0x38383838);
#if VIEW_ONLY
  const u32 low0 = mask_and_set(view0 << 1, 0xF0F0F0F0, 0x08080808);
  const u32 low1 = mask_and_set(view1 << 1, 0xF0F0F0F0, 0x08080808);
#else
  const u32 low0 = choose(view0 << 1, low, 0xF0F0F0F0);
  const u32 low1 = choose(view1 << 1, low >> 4, 0xF0F0F0F0);
#endif
  a[0] = permute(low0, high0, 0x5140);
  a[1] = permute(low0, high0, 0x7362);
  a[2] = permute(low1, high1, 0x5140);
  a[3] = permute(low1, high1, 0x7362);
}

__device__ void consume(const Params& p, const Shared& s, Signals& signals, int begin, int end) {
  const int group = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  const u32 view = keep(s.records + group * 4096 + thread * 16);
  const u32 low_plane = keep(s.records + kViewBytes + group * 2048 + thread * 16);
  float d[kAccumulators];
  u32 a[2][2][4];  // two sets of two k16 steps: one is decoded while the other is multiplied
  int stage = 0;
  u32 parity = 0, whole = 0;
  for (int unit = begin; unit < end;) {
    const Segment segment = segment_at(p, unit, end);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) d[i] = 0.f;
    int previous = -1;  // the stage whose activations the tensor cores may still be reading
    for (int block = 0; block < segment.count; ++block) {
      barrier_wait(s.full + 8 * stage, parity);
#if STREAM_ONLY
      __syncwarp();
      if (previous >= 0 && lane == 0) barrier_arrive(s.empty + 8 * previous);
#else
      u32 low[4] = {};
#if !VIEW_ONLY
      load16(low_plane + stage * kFetchBytes, low);
#endif
      const u64 inputs = inputs_descriptor(s.inputs + stage * kInputBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 bytes[4];
        load16(view + stage * kFetchBytes + half * 2048, bytes);
        wgmma_wait<1>();  // the set we are about to overwrite is no longer read
        if (half == 1 && previous >= 0 && lane == 0) barrier_arrive(s.empty + 8 * previous);
        decode(bytes[0], bytes[1], low[2 * half], a[half][0]);
        decode(bytes[2], bytes[3], low[2 * half + 1], a[half][1]);
        wgmma_fence();
        // 16 inputs are 32 bytes: two descriptor units.
        wgmma(d, a[half][0], inputs + 4 * half);
        wgmma(d, a[half][1], inputs + 4 * half + 2);
        wgmma_commit();
      }
#endif
      previous = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(s.empty + 8 * previous);
    if (segment.count == p.blocks) {
      ++whole;
      while (signals.tiles_corrected < whole) {
      }
      __threadfence_block();
      store_tile(p, segment.tile, d);
    } else {
      join_tile(p, segment.tile, signals, d);
    }
    unit += segment.count;
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
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ Signals signals;
  const u32 base = keep(shared_address(ring));
  const Shared s{base, base + STAGES * kInputBytes, shared_address(barriers),
                 shared_address(barriers + STAGES)};
  const int begin = first_unit(p, blockIdx.x);
  const int end = first_unit(p, blockIdx.x + 1);

  if (threadIdx.x == 0) {
    signals.previous_done = 0;
    signals.tiles_corrected = 0;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(s.full + 8 * i, 1);
      barrier_init(s.empty + 8 * i, kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) >= p.workers) {
    keep_place(p);
    return;
  }

  const int warp = threadIdx.x / 32;
  if (warp < 8)
    consume(p, s, signals, begin, end);
  else if (warp == 8 && threadIdx.x % 32 == 0)
    produce(p, map, s, signals, begin, end);
  else if (warp == 9)
    correct(p, signals, begin, end);
}
