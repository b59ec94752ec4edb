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
// every CTA but the first sends its sums to the first one, which adds them up in the order of the
// CTAs: the result depends neither on timing nor, since the split ignores the rows, on the batch.
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
#ifndef SLOTS
#define SLOTS 128
#endif
#ifndef VIEW_ONLY
#define VIEW_ONLY 0
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
constexpr int kSlots = SLOTS;  // corrected channels that find place in shared memory
constexpr int kNoSlot = 255;
constexpr u32 kEmpty = 0xFFFFFFFF;
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
  const int* escape_ptr;   // [units + 1]
  const u64* escapes;      // by unit, channel, column: see Escape
  const u16* bias;         // bfloat16 [channels], or null
  u16* y;                  // bfloat16 [rows, y_stride]
  u32* partials;           // [workers, 128 * COLS] floats, every word kEmpty between launches
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

// Whether the phase of the given parity has completed.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
  return passed;
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

__device__ __forceinline__ u32 load_u16(u32 address) {
  u32 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float load_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_float2(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
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

// The first unit that CTA `cta` has of the split tiles.
__device__ __forceinline__ int first_split_unit(const Params& p, int cta) {
  return cta * p.share + min(cta, p.longer);
}

// The CTA that has unit `unit` of the split tiles.
__device__ __forceinline__ int owner(const Params& p, int unit) {
  const int in_longer = p.longer * (p.share + 1);
  return unit < in_longer ? unit / (p.share + 1) : p.longer + (unit - in_longer) / p.share;
}

// The units of a CTA: `split` units from `split_begin` on, then `whole` units from `whole_begin`.
struct Work {
  int split_begin, split, whole_begin, whole;

  __device__ Work(const Params& p, int cta)
      : split_begin(first_split_unit(p, cta)),
        split(first_split_unit(p, cta + 1) - split_begin),
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
                        const Signals& signals, const Work& work) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
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

// ---- escapes -----------------------------------------------------------------------------------
//
// The escape warp goes through the ring like a consumer. For each escape of a unit it adds
// (true weight - placeholder) * x to the correction of the escape's channel; the inputs are in the
// ring already, so nothing waits for memory. The placeholder is what the consumers decode there.

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// bits 0-5: column of the unit, 6-12: channel of the tile, 13-20: window lo, 21-47: unit,
// 48-63: the exact pattern. Where lo is 0 the channel's scale is 0 and there is no placeholder.
struct Escape {
  u32 low, high;

  __device__ int column() const { return low & 63; }
  __device__ int channel() const { return low >> 6 & 127; }
  __device__ int unit() const { return __funnelshift_r(low, high, 21) & 0x7FFFFFF; }
  __device__ float weight() const { return from_bf16(high >> 16); }
  __device__ float placeholder() const {  // 2^(lo - 127), or the midpoint of the view; 0 for lo 0
    const float unit = __uint_as_float((low >> 13 & 255) << 23);
    return VIEW_ONLY ? unit * 1.0625f : unit;
  }
};

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

// ---- the end of a tile -------------------------------------------------------------------------

// Sums lie in registers as wgmma leaves them. A consumer thread (warp w, lane l) has channels
// 16 w + l / 4 (+ 8) and, in each group of eight rows, rows 2 (l % 4) and the next: four sums.

// Bring the sums of a segment to their true scale and add its corrections.
__device__ __forceinline__ void scale_and_correct(const Params& p, int tile,
                                                  const Corrections& corrections,
                                                  const Signals& signals,
                                                  float (&d)[kAccumulators]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    const float scale = __ldg(p.scale + tile * kTileRows + channel);
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) d[i / 2 * 4 + half * 2 + i % 2] *= scale;
    const int slot = signals.slot_of[channel];
    if (slot != kNoSlot) {
#pragma unroll
      for (int group = 0; group < COLS / 8; ++group) {
        const float2 pair = corrections.load_pair(slot, group * 8 + threadIdx.x % 4 * 2);
        d[group * 4 + half * 2] += pair.x, d[group * 4 + half * 2 + 1] += pair.y;
      }
    }
  }
}

// Bias, rounding, store, of rows 8 group .. 8 group + 7.
__device__ __forceinline__ void store_group(const Params& p, int tile, int group,
                                            const float (&sums)[4]) {
  const int column = tile * kTileRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = group * 8 + threadIdx.x % 4 * 2 + i % 2, channel = column + i / 2 * 8;
    if (row >= p.rows || channel >= p.channels) continue;
    const float bias = p.bias ? from_bf16(__ldg(p.bias + channel)) : 0.f;
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sums[i] + bias));
    p.y[row * p.y_stride + channel] = rounded;
  }
}

__device__ __forceinline__ void store_tile(const Params& p, int tile,
                                           const float (&d)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < COLS / 8; ++i) {
    const float sums[4] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    store_group(p, tile, i, sums);
  }
}

// Sums travel between CTAs as words that are their own signal: a word is kEmpty, a NaN that no
// arithmetic makes, until the sum is there, and the reader makes it kEmpty again.
__device__ __forceinline__ u32* partial_slot(const Params& p, int cta, int group) {
  return p.partials + (cta * COLS / 8 + group) * (kTileRows * 8) + threadIdx.x * 4;
}

__device__ __forceinline__ void send(u32* slot, const float (&sums)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "f"(sums[0]),
               "f"(sums[1]), "f"(sums[2]), "f"(sums[3]) : "memory");
}

__device__ __forceinline__ void clear(u32* slot) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(slot), "r"(kEmpty)
               : "memory");
}

__device__ __forceinline__ void peek(const u32* slot, u32 (&words)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(slot)
               : "memory");
}

// A segment of a split tile: send the sums to the tile's first CTA, or be it. To the first CTA the
// segment is its last one of the split tiles, to the others their first, so nobody waits long.
__device__ __forceinline__ void join_tile(const Params& p, const Segment& segment,
                                          float (&d)[kAccumulators]) {
  const int self = blockIdx.x;
  if (segment.first > 0) {
#pragma unroll
    for (int group = 0; group < COLS / 8; ++group) {
      const float sums[4] = {d[4 * group], d[4 * group + 1], d[4 * group + 2], d[4 * group + 3]};
      send(partial_slot(p, self, group), sums);
    }
    return;
  }
  // Words on their way at once: of kTogether CTAs, kGroups groups of rows.
  constexpr int kGroups = COLS == 48 ? 3 : COLS < 32 ? COLS / 8 : 4;
  constexpr int kTogether = COLS == 8 ? 4 : COLS == 64 ? 1 : 2;
  const int last = owner(p, segment.tile * p.blocks + p.blocks - 1);
#pragma unroll
  for (int begin = 0; begin < COLS / 8; begin += kGroups) {
#pragma unroll 1
    for (int cta = self + 1; cta <= last; cta += kTogether) {
      u32 words[kTogether * kGroups][4] = {};
      u32 missing;
      do {
#pragma unroll
        for (int i = 0; i < kTogether * kGroups; ++i)
          if (cta + i / kGroups <= last)
            peek(partial_slot(p, cta + i / kGroups, begin + i % kGroups), words[i]);
        missing = 0;
#pragma unroll
        for (int i = 0; i < kTogether * kGroups * 4; ++i) missing |= words[i / 4][i % 4] == kEmpty;
      } while (missing);
#pragma unroll
      for (int i = 0; i < kTogether * kGroups; ++i) {
        if (cta + i / kGroups > last) break;
        clear(partial_slot(p, cta + i / kGroups, begin + i % kGroups));
#pragma unroll
        for (int k = 0; k < 4; ++k)
          d[4 * (begin + i % kGroups) + k] += __uint_as_float(words[i][k]);
      }
    }
  }
  store_tile(p, segment.tile, d);
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

__device__ void consume(const Params& p, const Shared& s, const Corrections& corrections,
                        const Signals& signals, const Work& work) {
  const int group = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  const u32 view = keep(s.records + group * 4096 + thread * 16);
  const u32 low_plane = keep(s.records + kViewBytes + group * 2048 + thread * 16);
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
    for (int block = 0; block < segment.count; ++block) {
      if (previous >= 0 && !__any_sync(~0u, barrier_passed(s.full + 8 * at.stage, at.parity))) {
        wgmma_wait<0>();  // nothing to do yet: let the inputs go early
        if (lane == 0) barrier_arrive(s.inputs_free + 8 * previous);
        previous = -1;
      }
      barrier_wait(s.full + 8 * at.stage, at.parity);
#if STREAM_ONLY
      __syncwarp();
      if (lane == 0) barrier_arrive(s.record_free + 8 * at.stage);
      if (previous >= 0 && lane == 0) barrier_arrive(s.inputs_free + 8 * previous);
#else
      u32 bytes[2][4], low[4] = {};
      load16(view + at.stage * kFetchBytes, bytes[0]);
#if !VIEW_ONLY
      load16(low_plane + at.stage * kFetchBytes, low);
#endif
      load16(view + at.stage * kFetchBytes + 2048, bytes[1]);
      __syncwarp();
      if (lane == 0) barrier_arrive(s.record_free + 8 * at.stage);
      const u64 inputs = inputs_descriptor(s.inputs + at.stage * kInputBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma_wait<1>();  // the set we are about to overwrite is no longer read
        if (half == 1 && previous >= 0 && lane == 0) barrier_arrive(s.inputs_free + 8 * previous);
        decode(bytes[half][0], bytes[half][1], low[2 * half], a[half][0]);
        decode(bytes[half][2], bytes[half][3], low[2 * half + 1], a[half][1]);
        wgmma_fence();
        // 16 inputs are 32 bytes: two descriptor units.
        wgmma(d, a[half][0], inputs + 4 * half);
        wgmma(d, a[half][1], inputs + 4 * half + 2);
        wgmma_commit();
      }
#endif
      previous = at.stage;
      at.advance();
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(s.inputs_free + 8 * previous);
    barrier_wait(s.corrected, corrected);
    scale_and_correct(p, segment.tile, corrections, signals, d);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.taken_over);
    if (segment.count == p.blocks)
      store_tile(p, segment.tile, d);
    else
      join_tile(p, segment, d);
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
                 barrier + 24 * STAGES + 8};
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
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
