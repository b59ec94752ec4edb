// One warp's part of a W12 record (layout 1): 16 channels x 64 inputs, 32 weights per lane.
//
// Lane l = 4 * g + q holds, per k16 step s of 0..3, four words of two neighbouring weights:
//
//     word 4 * s + j:   channel g + 8 * (j & 1),   inputs 16 * s + 8 * (j >> 1) + 2 * q  and  + 1
//
// which is the A operand of mma m16n8k16 and the order of the record's bytes: the lane's three
// 16-byte pieces are view of steps 0 and 1, view of steps 2 and 3, low plane of all four.
#pragma once

static_assert(W12_LAYOUT == 1, "this code packs layout 1");

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int GROUP_ROWS = 16;        // channels of a warp's part
constexpr int RECORD_COLS = 64;
constexpr int GROUPS_PER_RECORD = 8;  // 128 channels
constexpr int RECORD_BYTES = 12288;
constexpr int LOW_PLANE = 8192;       // where the low plane begins
constexpr u32 WINDOW_SPAN = 16;
constexpr int MAX_LO = 239;
constexpr u32 FULL_WARP = 0xFFFFFFFF;

// Byte offsets of a lane's three pieces; `group` is the warp's part of the record, 0..7.
__device__ __forceinline__ int view_offset(int group, int pair, int lane)
{
    return group / 4 * 4096 + pair * 2048 + (group % 4 * 32 + lane) * 16;
}

__device__ __forceinline__ int low_offset(int group, int lane)
{
    return LOW_PLANE + group / 4 * 2048 + (group % 4 * 32 + lane) * 16;
}

// Two weights minus their window's base, packed: sign | 0000 | offset | mantissa if both lie in
// the window. Otherwise one of the bits of OUTSIDE is set (a weight below the base borrows).
constexpr u32 OUTSIDE = 0x78007800;

// Pack the four words of one k16 step: 8 view bytes, and the 4 low bytes.
__device__ __forceinline__ void pack_step(const u32 d[4], u32& view0, u32& view1, u32& low)
{
    // High byte of each weight: sign and offset bits e3 e2 e1. Low byte: e0 and the mantissa.
    const u32 first = __byte_perm(d[0], d[1], 0x6420), second = __byte_perm(d[2], d[3], 0x6420);
    view0 = __byte_perm(d[0], d[1], 0x7531) | (first >> 1 & 0x78787878);
    view1 = __byte_perm(d[2], d[3], 0x7531) | (second >> 1 & 0x78787878);
    low = (first & 0x0F0F0F0F) | (second << 4 & 0xF0F0F0F0);
}

// Undo pack_step; the words still lack the window's base.
__device__ __forceinline__ void unpack_step(u32 view0, u32 view1, u32 low, u32 d[4])
{
    const u32 high0 = view0 & 0x87878787, high1 = view1 & 0x87878787;
    const u32 first = (view0 << 1 & 0xF0F0F0F0) | (low & 0x0F0F0F0F);
    const u32 second = (view1 << 1 & 0xF0F0F0F0) | (low >> 4 & 0x0F0F0F0F);
    d[0] = __byte_perm(first, high0, 0x5140);
    d[1] = __byte_perm(first, high0, 0x7362);
    d[2] = __byte_perm(second, high1, 0x5140);
    d[3] = __byte_perm(second, high1, 0x7362);
}

// The base of a window in both halves of a word.
__device__ __forceinline__ u32 base_word(u32 lo)
{
    return lo * 0x00800080u;
}

// Eight neighbouring weights of a row from `col` < `cols` on; those at or beyond `cols` read as
// `fill`. ALIGNED: rows begin at multiples of 16 bytes, and no piece is cut by the end of its row.
// A channel has fewer than 2^28 inputs, so columns are ints.
template <bool ALIGNED>
__device__ __forceinline__ uint4 load8(const u16* row, int col, int cols, u32 fill)
{
    if (ALIGNED)
        return *reinterpret_cast<const uint4*>(row + col);
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = col + 2 * i;
        const u32 low = at < cols ? row[at] : fill & 0xFFFF;
        const u32 high = at + 1 < cols ? row[at + 1] : fill >> 16;
        word[i] = low | high << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}
