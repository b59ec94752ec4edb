// Runs one CTA of a CUDA kernel on the CPU, every thread a coroutine, so that its index
// arithmetic, its barriers and the order of its copies are tested without a GPU.
//
// It is stricter than the hardware where that finds mistakes: a background copy fills its target
// with NaN patterns when it is issued and writes it only when it is waited for; warps run in random
// order; shared memory begins as garbage; a barrier that nobody leaves, or an access outside shared
// memory, ends the process. It knows nothing of caches or of memory order between CTAs.
//
// The kernel's helpers with inline PTX are left out of its source and defined here.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("cta_statics")))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900

using std::max;
using std::min;

struct Index { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(16) int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 1 << 16;

// Of `bytes` to `room` bytes of shared memory; the rest becomes zero.
struct Copy { unsigned target; const void* source; unsigned bytes, room; };

struct Thread {
  ucontext_t context;
  bool done;
  std::vector<Copy> open;                  // copies of no group yet
  std::vector<std::vector<Copy>> pending;  // groups, oldest first
};

struct Barrier { int arrived, phase; };

inline Thread threads[kMaxThreads];
inline Barrier named[16], warps[kMaxThreads / 32];
inline const void* posted[kMaxThreads];  // what each thread shows to its warp
inline ucontext_t scheduler;
inline int current;
inline std::mt19937 random_order;
inline size_t shared_bytes;
inline int thread_count;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (thread %d)\n", what, current);
  std::abort();
}

inline void meet(Barrier& barrier, int count) {
  const int phase = barrier.phase, me = current;
  if (++barrier.arrived == count) {
    barrier = {0, phase + 1};
    return;
  }
  while (barrier.phase == phase) swapcontext(&threads[me].context, &scheduler);
}

// Show `value` to the warp, let `read` look at what all 32 lanes show, and go on together.
template <class T, class Read>
auto with_warp(const T& value, Read read) {
  posted[current] = &value;
  meet(warps[current / 32], 32);
  const void* const* shown = posted + current / 32 * 32;
  auto result = read([=](int lane) { return *static_cast<const T*>(shown[lane]); });
  meet(warps[current / 32], 32);
  return result;
}

}  // namespace emulator

inline Index threadIdx, blockIdx;
alignas(1024) inline unsigned char shared[1 << 18];  // dynamic; static variables: cta_statics
// Weak, since a kernel may have none.
extern __attribute__((weak)) unsigned char __start_cta_statics[], __stop_cta_statics[];

// ---- intrinsics --------------------------------------------------------------------------------

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T value) { *p = value; }
inline unsigned atomicAdd(unsigned* p, unsigned value) { return std::exchange(*p, *p + value); }
inline unsigned atomicSub(unsigned* p, unsigned value) { return std::exchange(*p, *p - value); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class To, class From> To bits_as(From value) {
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline int __double2loint(double value) { return static_cast<int>(bits_as<uint64_t>(value)); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<uint64_t>(high) << 32 | static_cast<unsigned>(low));
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __double2float_rn(double value) { return static_cast<float>(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> shift);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline void __syncthreads() { emulator::meet(emulator::named[0], emulator::thread_count); }
inline void __syncwarp() { emulator::meet(emulator::warps[emulator::current / 32], 32); }
template <class T> T __shfl_sync(unsigned, T value, int lane) {
  return emulator::with_warp(value, [&](auto of) { return of(lane); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return emulator::with_warp(value, [](auto of) {
    unsigned lanes = 0;
    for (int i = 0; i < 32; ++i) lanes |= unsigned{of(i)} << i;
    return lanes;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulator::with_warp(value, [](auto of) {
    unsigned best = of(0);
    for (int i = 1; i < 32; ++i) best = max(best, of(i));
    return best;
  });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return ~__reduce_max_sync(~0u, ~value);
}

// ---- helpers that are inline PTX in the kernel -------------------------------------------------

inline void* at(unsigned address, unsigned bytes) {
  unsigned char* p = shared + static_cast<int>(address);
  const bool dynamic = address + bytes <= emulator::shared_bytes;
  const bool known = p >= __start_cta_statics && p + bytes <= __stop_cta_statics;
  if (address % bytes || !(dynamic || known)) emulator::fail("bad address");
  return p;
}
inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(p) - shared);
}
inline void load16(unsigned address, unsigned (&to)[4]) { std::memcpy(to, at(address, 16), 16); }
inline void load8(unsigned address, unsigned (&to)[2]) { std::memcpy(to, at(address, 8), 8); }
inline void prefetch(const void* p) { (void)*static_cast<const volatile char*>(p); }
inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}
inline unsigned mask_and_set(unsigned value, unsigned mask, unsigned set) {
  return (value & mask) | set;
}
inline unsigned choose(unsigned one, unsigned other, unsigned mask) {
  return (one & mask) | (other & ~mask);
}
inline unsigned short to_bf16(float value) {
  const unsigned bits = bits_as<unsigned>(value);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void copy(unsigned target, const void* source, unsigned bytes, unsigned room) {
  if (bytes > room || reinterpret_cast<uintptr_t>(source) % room) emulator::fail("bad copy");
  std::memset(at(target, room), 0xFF, room);
  emulator::threads[emulator::current].open.push_back({target, source, bytes, room});
}
inline void copy16(unsigned target, const void* source, unsigned bytes) {
  copy(target, source, bytes, 16);
}
inline void copies_commit() {
  auto& mine = emulator::threads[emulator::current];
  mine.pending.push_back(std::exchange(mine.open, {}));
}
template <int pending> void copies_wait() {
  auto& groups = emulator::threads[emulator::current].pending;
  while (static_cast<int>(groups.size()) > pending) {
    for (const auto& copy : groups.front()) {
      void* target = at(copy.target, copy.room);
      std::memset(target, 0, copy.room);
      std::memcpy(target, copy.source, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

inline void everyone_meets() { emulator::meet(emulator::named[1], 288); }
inline void multipliers_meet() { emulator::meet(emulator::named[2], 256); }

inline void load_matrices(unsigned address, unsigned (&b)[4]) {
  const int lane = emulator::current % 32;
  emulator::with_warp(address, [&](auto of) {
    for (int i = 0; i < 4; ++i)
      std::memcpy(&b[i], static_cast<char*>(at(of(8 * i + lane / 4), 16)) + lane % 4 * 4, 4);
    return 0;
  });
}

struct Operands { unsigned a[4], b[2]; };

// One of the two bfloat16 values of a register, which hold neighbouring k.
inline float half_of(unsigned word, int k) { return __uint_as_float(word >> 16 * (k % 2) << 16); }

inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = emulator::current % 32;
  emulator::with_warp(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), col = lane % 4 * 2 + i % 2;
      double sum = d[i];
      for (int k = 0; k < 16; ++k) {
        const Operands left = of(row % 8 * 4 + k % 8 / 2), right = of(col * 4 + k % 8 / 2);
        sum += double{half_of(left.a[row / 8 + 2 * (k / 8)], k)} * half_of(right.b[k / 8], k);
      }
      d[i] = static_cast<float>(sum);
    }
    return 0;
  });
}

// ---- running a CTA -----------------------------------------------------------------------------

namespace emulator {

inline void (*kernel)();
inline void (*between_warps)() = [] {};  // what the hardware does in the background

inline void enter() {
  kernel();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}

inline void run_cta(int cta, int count, size_t dynamic_bytes) {
  static std::vector<char> stacks(kMaxThreads * kStackBytes);
  blockIdx = {static_cast<unsigned>(cta), 0, 0};
  shared_bytes = dynamic_bytes, thread_count = count;
  std::memset(shared, 0xA5, sizeof shared);
  std::memset(__start_cta_statics, 0xA5, __stop_cta_statics - __start_cta_statics);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    thread.done = false, thread.open.clear(), thread.pending.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  const auto running = [&] {
    return std::any_of(threads, threads + count, [](const Thread& t) { return !t.done; });
  };
  for (int round = 0; running(); ++round) {
    if (round > 1000000) fail("no thread can go on");
    for (int w = 0, first = random_order() % (count / 32); w < count / 32; ++w) {
      between_warps();
      if (random_order() % 3 == 0) continue;
      for (int lane = 0; lane < 32; ++lane) {
        current = (w + first) % (count / 32) * 32 + lane;
        threadIdx = {static_cast<unsigned>(current), 0, 0};
        if (!threads[current].done) swapcontext(&scheduler, &threads[current].context);
      }
    }
  }
  for (const Barrier& barrier : named)
    if (barrier.arrived) fail("threads wait at a barrier for ever");
}

}  // namespace emulator
