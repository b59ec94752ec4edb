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

constexpr bool PREFETCH = W12_ENCODE_PREFETCH;

extern __shared__ __align__(1024) uint4 dynamic_shared[];  // survey.cuh needs the alignment

// Read this lane's share of a tile: 8 inputs from `col` on, of channels first_row + 0, 4, 8, 12.
// `source` is the first of them. Places outside the matrix get their window's base.
template <bool ALIGNED>
__device__ __forceinline__ void load_tile(const u16* source, const Matrix& matrix,
                                          const Group& group, int col, uint4 piece[4])
{
    const int first_row = threadIdx.x % 32 / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first_row + 4 * i;
        const u16* row_source = source + i64(4 * i) * matrix.cols;
        if (row < matrix.rows && col < matrix.cols) {
            piece[i] = load8<ALIGNED>(row_source, col, matrix.cols, base_word(group.lo[row]));
        } else {
            const u32 fill = base_word(group.lo[row]);
            piece[i] = make_uint4(fill, fill, fill, fill);
        }
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

// Pack a lane's words into its three pieces of the record; false if one lies outside its window.
__device__ __forceinline__ bool pack_words(const u32* tile, const u32 base[2], uint4 view[2],
                                           uint4& low)
{
    u32 seen = 0, view_word[8], low_word[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        u32 d[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            d[j] = tile[Word(step * 4 + j).index()] - base[j & 1];
            seen |= d[j];
        }
        pack_step(d, view_word[step * 2], view_word[step * 2 + 1], low_word[step]);
    }
    view[0] = make_uint4(view_word[0], view_word[1], view_word[2], view_word[3]);
    view[1] = make_uint4(view_word[4], view_word[5], view_word[6], view_word[7]);
    low = make_uint4(low_word[0], low_word[1], low_word[2], low_word[3]);
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
    uint4 view[2], low;
    while (!pack_words(tile, base, view, low))
        replace_escapes(tile, group, block, listed);
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
    const int blocks = (matrix.cols + RECORD_COLS - 1) / RECORD_COLS;
    const u16* source = matrix.row(lane / 8);
    u8* tile = reinterpret_cast<u8*>(work.tile[warp]);
    u8* mine = tile + lane / 8 * TILE_PITCH + lane % 8 * 16;
    uint4 piece[4];
    int block = blocks - 1 - warp;
    int col = block * RECORD_COLS + lane % 8 * 8;
    if (PREFETCH && block >= 0)
        load_tile<ALIGNED>(source, matrix, group, col, piece);
    for (; block >= 0; block -= WARPS) {
        if (!PREFETCH)
            load_tile<ALIGNED>(source, matrix, group, col, piece);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(mine + 4 * i * TILE_PITCH) = piece[i];
        __syncwarp();
        col -= WARPS * RECORD_COLS;
        if (PREFETCH && block >= WARPS)  // the next tile travels while this one is packed
            load_tile<ALIGNED>(source, matrix, group, col, piece);
        pack_tile(reinterpret_cast<u32*>(tile), group, block, listed,
                  records + i64(block) * RECORD_BYTES, part);
    }
    __syncthreads();
}

// bits u16 [matrices, rows, cols]; groups = matrices * row_blocks * 8.
// progress: u64 [1 + groups], zero: the ticket, then one state per group.
// total: i64, escapes found; beyond `capacity` of them only the first `capacity` are written.
template <bool ALIGNED>
__device__ void encode(const u16* bits, i64 rows, int cols, int row_blocks, int groups,
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
    const int col_blocks = (cols + RECORD_COLS - 1) / RECORD_COLS;
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
    NAME(const u16* bits, i64 rows, int cols, int row_blocks, int groups, u8* records,            \
         u8* window, int* escape_ptr, int* escape_col, u16* escape_bits, i64 capacity,            \
         u64* progress, i64* total)                                                               \
    {                                                                                             \
        encode<ALIGNED>(bits, rows, cols, row_blocks, groups, records, window, escape_ptr,        \
                        EscapeList{escape_col, escape_bits, capacity}, progress, total);          \
    }

ENCODE_KERNEL(w12_encode, true)
ENCODE_KERNEL(w12_encode_unaligned, false)
