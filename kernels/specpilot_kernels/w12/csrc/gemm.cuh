// What the W12 GEMMs are made of: the format's numbers, PTX helpers, the work split, the decoding of
// eight weights, the fields of an escape. VIEW_ONLY (1: only the 8-bit view of each record is read,
// and the dropped mantissa bits are put at their midpoint) is defined before.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"

#ifndef VIEW_ONLY
#define VIEW_ONLY 0
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

// ---- PTX helpers -------------------------------------------------------------------------------

// Read 16 or 8 bytes of shared memory.
__device__ __forceinline__ void load16(u32 address, u32 (&words)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
__device__ __forceinline__ void load8(u32 address, u32 (&words)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}

// ---- the work split ----------------------------------------------------------------------------
//
// Neighbouring units are shared out evenly, see the kernels. `p` has blocks (units per tile), share
// (floor(units / CTAs)) and longer (units mod CTAs).

struct Segment {
  int tile;
  int first;  // first block
  int count;  // blocks, at least 1
};

// The first unit of CTA `cta`.
template <class Params>
__device__ __forceinline__ int first_unit(const Params& p, int cta) {
  return cta * p.share + min(cta, p.longer);
}

// The CTA that has unit `unit`.
template <class Params>
__device__ __forceinline__ int owner(const Params& p, int unit) {
  const int in_longer = p.longer * (p.share + 1);
  return unit < in_longer ? unit / (p.share + 1) : p.longer + (unit - in_longer) / p.share;
}

// The segment that begins at `unit` and ends with its tile or before `end`.
template <class Params>
__device__ __forceinline__ Segment segment_at(const Params& p, int unit, int end) {
  const int tile = unit / p.blocks;
  const int first = unit - tile * p.blocks;
  return {tile, first, min(end - unit, p.blocks - first)};
}

// ---- weights -----------------------------------------------------------------------------------

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

// The nearest bfloat16, ties to even.
__device__ __forceinline__ u16 to_bf16(float value) {
  u16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return rounded;
}

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

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

// bits 0-5: column of the unit, 6-12: channel of the tile, 13-20: window lo, 21-47: unit,
// 48-63: the exact pattern. Where lo is 0 the channel's scale is 0 and there is no placeholder.
struct Escape {
  u32 low, high;

  __device__ int column() const { return low & 63; }
  __device__ int channel() const { return low >> 6 & 127; }
  __device__ int unit() const { return __funnelshift_r(low, high, 21) & 0x7FFFFFF; }
  __device__ float weight() const { return from_bf16(high >> 16); }
  __device__ float placeholder() const {  // 2^(lo - 127), or the midpoint of the view
    const float least = __uint_as_float((low >> 13 & 255) << 23);
    return VIEW_ONLY ? least * 1.0625f : least;
  }
};
