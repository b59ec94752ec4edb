// W12 encoder: one pass over a BF16 matrix in device memory.
//
// A block takes 16 channels, one warp's part of every record of a row block:
//
//     survey     read all inputs, count exponent fields per channel, choose the windows
//     pack       read the inputs again, last first, and write the records
//     place      find how many escapes lie before this group (decoupled look-back)
//     collect    write the group's escapes in order
//
// The second reading comes from L2: 132 blocks of 16 x 5120 weights are 22 MB. Where a channel is
// longer than that allows, reading backwards still finds the half that was read last.
//
//              cols ->
//     group 0  ################   16 channels: one block, its warps side by side
//     group 1  ................   along the inputs, 64 (one record) at a time
//     ...      ................
//
// Blocks take groups in order of arrival (a ticket), so every group a block waits for has begun.
#include "escapes.cuh"
#include "group.cuh"
#include "survey.cuh"

extern __shared__ uint4 dynamic_shared[];

template <bool ALIGNED>
__device__ __forceinline__ void load_tile(const Matrix& matrix, const Group& group, int block,
                                          uint4 piece[4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8;
        const i64 col = i64(block) * RECORD_COLS + lane % 8 * 8;
        const u32 fill = base_word(group.lo[row]);
        piece[i] = row < matrix.rows
            ? load8<ALIGNED>(matrix.source + row * matrix.cols, col, matrix.cols, fill)
            : make_uint4(fill, fill, fill, fill);
    }
}

// Where word k of a lane lies in the tile, and its channel in the group and input in the record.
struct Word {
    int row, col;

    __device__ __forceinline__ explicit Word(int k)
        : row(threadIdx.x % 32 / 4 + 8 * (k & 1)),
          col(k / 4 * 16 + (k >> 1 & 1) * 8 + threadIdx.x % 4 * 2)
    {
    }

    __device__ __forceinline__ int index() const { return (row * TILE_PITCH + col * 2) / 4; }
};

// Read a lane's words and take their windows' bases off; true if all lie in their windows.
__device__ __forceinline__ bool read_words(const u32* tile, const u32 base[2], u32 d[16])
{
    u32 seen = 0;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        d[k] = tile[Word(k).index()] - base[k & 1];
        seen |= d[k];
    }
    return !(seen & OUTSIDE);
}

// Move the escapes among a lane's words to the group's list (if that is kept) and leave their
// windows' base in the tile, which packs to zero bits.
__device__ void replace_escapes(u32* tile, Group& group, int block, bool listed)
{
#pragma unroll 1
    for (int half = 0; half < 32; ++half) {
        const Word word(half / 2);
        u16& bits = reinterpret_cast<u16*>(tile + word.index())[half % 2];
        const u32 lo = group.lo[word.row];
        if (field_of(bits) - lo < WINDOW_SPAN)
            continue;
        if (listed) {
            const u32 at = atomicAdd(&group.listed, 1u);
            group.key[at] = u32(word.row) << COL_BITS | u32(block * RECORD_COLS + word.col + half % 2);
            group.bits[at] = bits;
        }
        bits = u16(lo << 7);
    }
}

// Write one warp's part of one record: 16 channels x 64 inputs that lie in `tile`.
__device__ __forceinline__ void pack_tile(u32* tile, Group& group, int block, bool listed,
                                          u8* record, int part)
{
    const int lane = threadIdx.x % 32;
    const u32 base[2] = {base_word(group.lo[lane / 4]), base_word(group.lo[lane / 4 + 8])};
    u32 d[16];
    if (!read_words(tile, base, d)) {
        replace_escapes(tile, group, block, listed);
        read_words(tile, base, d);
    }
    uint4 view[2], low;
    pack_step(d, view[0].x, view[0].y, low.x);
    pack_step(d + 4, view[0].z, view[0].w, low.y);
    pack_step(d + 8, view[1].x, view[1].y, low.z);
    pack_step(d + 12, view[1].z, view[1].w, low.w);
    // Streaming stores: nothing here is read again, the inputs in L2 are.
    __stcs(reinterpret_cast<uint4*>(record + view_offset(part, 0, lane)), view[0]);
    __stcs(reinterpret_cast<uint4*>(record + view_offset(part, 1, lane)), view[1]);
    __stcs(reinterpret_cast<uint4*>(record + low_offset(part, lane)), low);
}

template <bool ALIGNED>
__device__ void pack(const Matrix& matrix, Workspace& work, Group& group, bool listed,
                     u8* records, int part)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int blocks = int((matrix.cols + RECORD_COLS - 1) / RECORD_COLS);
    u8* tile = reinterpret_cast<u8*>(work.tile[warp]);
    uint4 piece[4];
    int block = blocks - 1 - warp;
    if (block >= 0)
        load_tile<ALIGNED>(matrix, group, block, piece);
    for (; block >= 0; block -= WARPS) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(tile + (i * 4 + lane / 8) * TILE_PITCH + lane % 8 * 16) =
                piece[i];
        __syncwarp();
        if (block >= WARPS)  // the next tile is on its way while this one is packed
            load_tile<ALIGNED>(matrix, group, block - WARPS, piece);
        pack_tile(reinterpret_cast<u32*>(tile), group, block, listed,
                  records + i64(block) * RECORD_BYTES, part);
    }
    __syncthreads();
}

// bits u16 [matrices, rows, cols]; groups = matrices * row_blocks * 8.
// progress: u64 [1 + groups], zero: the ticket, then one state per group.
// total: i64, escapes found; beyond `capacity` of them only the first `capacity` are written.
template <bool ALIGNED>
__device__ void encode(const u16* bits, i64 rows, i64 cols, int row_blocks, int groups,
                       u8* records, u8* window, int* escape_ptr, const EscapeList& out,
                       u64* progress, i64* total)
{
    __shared__ Group group;
    Workspace& work = *reinterpret_cast<Workspace*>(dynamic_shared);
    if (threadIdx.x == 0) {
        group.index = u32(atomicAdd(progress, 1ull));
        group.listed = 0;
    }
    __syncthreads();
    u64* state = progress + 1;
    const int index = group.index, per_matrix = row_blocks * GROUPS_PER_RECORD;
    const i64 row = i64(index % per_matrix) * GROUP_ROWS;
    const i64 channel = index / per_matrix * rows + row;
    const i64 left = rows - row;
    const Matrix matrix = {bits + channel * cols, cols,
                           int(left < 0 ? 0 : left < GROUP_ROWS ? left : GROUP_ROWS)};
    survey<ALIGNED>(matrix, work, group);
    u32 own = 0;
    for (int i = 0; i < GROUP_ROWS; ++i)
        own += group.escapes[i];
    if (threadIdx.x == 0)
        atomicExch(state + index, SUM_KNOWN | own);
    const int col_blocks = int((cols + RECORD_COLS - 1) / RECORD_COLS);
    u8* row_of_records = records + i64(index / GROUPS_PER_RECORD) * col_blocks * RECORD_BYTES;
    pack<ALIGNED>(matrix, work, group, own <= LIST, row_of_records, index % GROUPS_PER_RECORD);
    if (threadIdx.x < 32) {
        const u64 before = look_back(state, index, own);
        if (threadIdx.x == 0)
            group.before = before;
    }
    __syncthreads();
    const i64 begin = i64(group.before);
    if (own <= LIST)
        collect_listed(group, begin, out);
    else
        collect_by_reading<ALIGNED>(matrix, group, begin, out);
    if (threadIdx.x < matrix.rows) {
        i64 at = begin;
        for (int other = 0; other < threadIdx.x; ++other)
            at += group.escapes[other];
        window[channel + threadIdx.x] = u8(group.lo[threadIdx.x]);
        escape_ptr[channel + threadIdx.x] = int(at);
    }
    if (index == groups - 1 && threadIdx.x == 0) {
        escape_ptr[i64(groups / per_matrix) * rows] = int(begin + own);
        *total = begin + own;
    }
}

#define ENCODE_KERNEL(NAME, ALIGNED)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, W12_ENCODE_BLOCKS)                      \
    NAME(const u16* bits, i64 rows, i64 cols, int row_blocks, int groups, u8* records,            \
         u8* window, int* escape_ptr, int* escape_col, u16* escape_bits, i64 capacity,            \
         u64* progress, i64* total)                                                               \
    {                                                                                             \
        encode<ALIGNED>(bits, rows, cols, row_blocks, groups, records, window, escape_ptr,        \
                        EscapeList{escape_col, escape_bits, capacity}, progress, total);          \
    }

ENCODE_KERNEL(w12_encode, true)
ENCODE_KERNEL(w12_encode_unaligned, false)
