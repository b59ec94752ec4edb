// What the encoder's steps share: a block's geometry and what it knows about its 16 channels.
#pragma once
#include "record.cuh"

constexpr int THREADS = W12_ENCODE_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int WARPS_PER_ROW = WARPS / GROUP_ROWS;
constexpr int TILE_PITCH = RECORD_COLS * 2 + 16;  // bytes; 16 more keep column reads off one bank
constexpr int TILE_BYTES = GROUP_ROWS * TILE_PITCH;
constexpr int LIST = 1024;  // escapes of a group that are sorted in shared memory
constexpr int COL_BITS = 28;

static_assert(WARPS % GROUP_ROWS == 0, "each channel takes whole warps");

// Survey and pack never use shared memory at once: histograms, then tiles.
union Workspace {
    u32 histogram[WARPS * W12_ENCODE_COPIES][256];
    uint4 tile[WARPS][TILE_BYTES / 16];
};

struct Group {
    u32 lo[GROUP_ROWS];
    u32 escapes[GROUP_ROWS];
    u32 key[LIST];  // channel in the group << COL_BITS | column
    u16 bits[LIST];
    u32 listed;
    u32 index;   // the ticket
    u64 before;  // escapes of all earlier groups
};

struct Matrix {
    const u16* source;  // the group's first weight
    int cols;
    int rows;           // of this group, 0 to 16

    __device__ __forceinline__ const u16* row(int index) const { return source + i64(index) * cols; }
};

__device__ __forceinline__ u32 field_of(u32 bits)
{
    return bits >> 7 & 0xFF;
}
