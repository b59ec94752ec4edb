// Hopper's barriers, bulk copies and asynchronous products for `gpu_emulator.h`.
//
// Stricter than the hardware, too: a bulk copy poisons its target when it is issued and lands at a
// random later time; products read both operands only when they are waited for, so that whoever
// gives a buffer back too early spoils them.
#pragma once
#include <unistd.h>

#include <map>

#include "gpu_emulator.h"

namespace emulator {

struct Phases { int count, pending, bytes; unsigned parity; };
struct BulkCopy { unsigned target, bytes, barrier; const unsigned char* source; };
struct InputsCopy { unsigned target, barrier; int column; };
struct Product { float* d; const unsigned* a; uint64_t b; };

inline std::map<unsigned, Phases> barriers;
inline std::vector<BulkCopy> records;
inline std::vector<InputsCopy> blocks;
inline std::vector<Product> open_products[kMaxThreads];
inline std::vector<std::vector<Product>> products[kMaxThreads];

// x, as the tensor map in the kernel's arguments describes it.
struct Inputs { const unsigned short* x; int64_t rows, cols, pitch; };
inline Inputs inputs;

inline Phases& barrier_at(unsigned address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail("no barrier there");
  return found->second;
}

inline void complete_if_done(Phases& barrier) {
  if (barrier.pending < 0) fail("more arrivals than a barrier expects");
  if (barrier.pending == 0 && barrier.bytes == 0)
    barrier.pending = barrier.count, barrier.parity ^= 1;
}

inline void landed(unsigned address, int bytes) {
  barrier_at(address).bytes -= bytes;
  complete_if_done(barrier_at(address));
}

template <class T> bool take_any(std::vector<T>& from, T& one) {
  if (from.empty()) return false;
  const size_t i = random_order() % from.size();
  one = from[i];
  from.erase(from.begin() + i);
  return true;
}

// Rows beyond x, and columns beyond it, are zeros; 16-byte pieces are swizzled by the row.
inline void land_inputs(const InputsCopy& copy) {
  for (int row = 0; row < COLS; ++row)
    for (int k = 0; k < 64; ++k) {
      const int64_t column = copy.column + k;
      const bool inside = row < inputs.rows && column < inputs.cols;
      const unsigned short value = inside ? inputs.x[row * inputs.pitch + column] : 0;
      std::memcpy(shared + copy.target + row * 128 + (k / 8 ^ row % 8) * 16 + k % 8 * 2, &value, 2);
    }
  landed(copy.barrier, COLS * 128);
}

inline void land_something() {
  BulkCopy record;
  InputsCopy block;
  if (random_order() % 4 == 0 && take_any(records, record)) {
    std::memcpy(shared + record.target, record.source, record.bytes);
    landed(record.barrier, record.bytes);
  }
  if (random_order() % 4 == 0 && take_any(blocks, block)) land_inputs(block);
}

inline void begin_cta() {
  barriers.clear(), records.clear(), blocks.clear();
  for (int i = 0; i < kMaxThreads; ++i) open_products[i].clear(), products[i].clear();
  between_warps = land_something;
}

inline void end_cta() {
  if (!records.empty() || !blocks.empty()) fail("copies are under way at the end");
  for (int i = 0; i < thread_count; ++i) {
    if (!open_products[i].empty() || !products[i].empty()) fail("products nobody waited for");
    for (const auto& group : threads[i].pending)
      if (!group.empty()) fail("copies nobody waited for");
  }
}

inline void yield() { swapcontext(&threads[current].context, &scheduler); }

}  // namespace emulator

inline unsigned keep(unsigned value) { return value; }
inline unsigned sm_index() { return 5; }
inline uint64_t read_once_policy() { return 0; }
inline long long clock64() { return 0; }
inline void __nanosleep(unsigned) {}

inline void barrier_init(unsigned barrier, unsigned arrivals) {
  at(barrier, 8);
  const int count = static_cast<int>(arrivals);
  emulator::barriers[barrier] = {count, count, 0, 0};
}
inline void barriers_visible() {}
inline void barrier_arrive(unsigned barrier) {
  auto& state = emulator::barrier_at(barrier);
  --state.pending;
  emulator::complete_if_done(state);
}
inline void barrier_expect(unsigned barrier, unsigned bytes) {
  emulator::barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline bool barrier_passed(unsigned barrier, unsigned parity) {
  return emulator::barrier_at(barrier).parity != parity;
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
  while (!barrier_passed(barrier, parity)) emulator::yield();
}
inline bool __any_sync(unsigned, bool value) {
  return emulator::with_warp(value, [&](auto of) {
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= of(lane);
    return any;
  });
}

inline void copy_weights(unsigned target, const void* source, unsigned bytes, unsigned barrier,
                         uint64_t) {
  at(target, 16), at(target + bytes - 16, 16);
  std::memset(shared + target, 0xFF, bytes);
  emulator::records.push_back({target, bytes, barrier, static_cast<const unsigned char*>(source)});
}
template <class TensorMap>
void copy_inputs(unsigned target, const TensorMap&, int column, unsigned barrier) {
  at(target, 1024), at(target + COLS * 128 - 16, 16);
  std::memset(shared + target, 0xFF, COLS * 128);
  emulator::blocks.push_back({target, barrier, column});
}

inline unsigned load_u16(unsigned address) {
  unsigned short value;
  std::memcpy(&value, at(address, 2), 2);
  return value;
}
inline float load_float(unsigned address) { return *static_cast<float*>(at(address, 4)); }
inline float2 load_float2(unsigned address) { return *static_cast<float2*>(at(address, 8)); }
inline void store_float(unsigned address, float value) {
  std::memcpy(at(address, 4), &value, 4);
}
inline void wgmma_fence() {}
inline void wgmma(float (&d)[COLS / 2], const unsigned (&a)[4], uint64_t b) {
  emulator::open_products[emulator::current].push_back({d, a, b});
}
inline void wgmma_commit() {
  auto& open = emulator::open_products[emulator::current];
  emulator::products[emulator::current].push_back(std::exchange(open, {}));
}

// d [64, COLS] += A [64, 16] x B [16, COLS], the part of one warp: 16 of the 64 rows.
inline void multiply(const emulator::Product& mine) {
  const int lane = emulator::current % 32;
  emulator::with_warp(mine, [&](auto of) {
    const auto b = [&](int k, int col) {
      const unsigned address = (mine.b & 0x3FFF) * 16 + col * 128 + k * 2;
      return half_of(load_u16(address ^ (address >> 7 & 7) << 4) << 16, 1);
    };
    for (int i = 0; i < COLS / 2; ++i) {
      const int row = lane / 4 + 8 * (i / 2 % 2), col = i / 4 * 8 + lane % 4 * 2 + i % 2;
      double sum = mine.d[i];
      for (int k = 0; k < 16; ++k) {
        const unsigned* a = of(row % 8 * 4 + k % 8 / 2).a;
        sum += double{half_of(a[row / 8 + 2 * (k / 8)], k)} * b(k, col);
      }
      mine.d[i] = static_cast<float>(sum);
    }
    return 0;
  });
}
template <int pending> void wgmma_wait() {
  auto& groups = emulator::products[emulator::current];
  while (static_cast<int>(groups.size()) > pending) {
    for (const auto& product : groups.front()) multiply(product);
    groups.erase(groups.begin());
  }
}

// Sums of other CTAs, which run at the same time as other processes.
inline void send(unsigned* slot, const float (&sums)[4]) { std::memcpy(slot, sums, 16); }
inline void clear(unsigned* slot) { std::memset(slot, 0xFF, 16); }
inline void peek(const unsigned* slot, unsigned (&words)[4]) {
  std::memcpy(words, slot, 16);
  if (std::count(words, words + 4, ~0u) == 0) return;
  if (threadIdx.x % 32 == 0) usleep(200);  // let the processes work that we wait for
  emulator::yield();
}
