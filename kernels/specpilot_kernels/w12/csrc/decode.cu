// W12 decoder: records back to BF16 patterns, written out or compared with the originals.
//
// A block takes 16 channels x 512 inputs. Each of its 8 warps unpacks its part of one record into
// a row-major tile in shared memory; escapes that fall into the tile are patched there; then the
// tile's rows, 1 KB each, are written, or compared with what should be there. Blocks of the eight
// groups of a row block follow each other, so that whole records are read at about one time.
#include "record.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int TILE_COLS = WARPS * RECORD_COLS;
constexpr int TILE_PITCH = TILE_COLS * 2 + 16;  // bytes; 16 more keep column writes off one bank
constexpr int PIECES_PER_ROW = TILE_COLS / 8;
constexpr int PIECES = GROUP_ROWS * PIECES_PER_ROW / THREADS;  // 16-byte pieces per thread

struct Encoded {
    const u8* records;
    const u8* window;
    const int* escape_ptr;
    const int* escape_col;
    const u16* escape_bits;
    int escapes;
};

// Unpack one warp's part of a record; words of channel g and g + 8 go to their rows of the tile.
__device__ __forceinline__ void unpack_record(const u8* record, int part, u32 base0, u32 base1,
                                              u32* tile)
{
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const uint4 first = __ldcs(reinterpret_cast<const uint4*>(record + view_offset(part, 0, lane)));
    const uint4 last = __ldcs(reinterpret_cast<const uint4*>(record + view_offset(part, 1, lane)));
    const uint4 low = __ldcs(reinterpret_cast<const uint4*>(record + low_offset(part, lane)));
    u32 d[16];
    unpack_step(first.x, first.y, low.x, d);
    unpack_step(first.z, first.w, low.y, d + 4);
    unpack_step(last.x, last.y, low.z, d + 8);
    unpack_step(last.z, last.w, low.w, d + 12);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const int row = g + 8 * (k & 1), pair = k / 4 * 8 + (k >> 1 & 1) * 4 + q;
        tile[row * (TILE_PITCH / 4) + pair] = d[k] + (k & 1 ? base1 : base0);
    }
}

// First index in begin .. end whose column is at least `col`.
__device__ int lower_bound(const int* escape_col, int begin, int end, int col)
{
    while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (escape_col[middle] < col)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

// Put the escapes of one channel that lie in the tile's columns into its row, with one warp.
__device__ void patch_row(const Encoded& encoded, int begin, int end, int first_col, u16* row)
{
    for (int at = lower_bound(encoded.escape_col, begin, end, first_col) + threadIdx.x % 32;
         at < end; at += 32) {
        const u32 place = u32(encoded.escape_col[at]) - u32(first_col);
        if (place >= TILE_COLS)
            return;
        row[place] = encoded.escape_bits[at];
    }
}

// Where a block works: rows of one matrix of the stack, and columns.
struct Place {
    i64 channel;
    int first_col, rows, part;
    i64 row_of_records;
};

__device__ Place place_of(u32 block, i64 rows, int row_blocks, int chunks)
{
    const int part = block % GROUPS_PER_RECORD;
    const int chunk = block / GROUPS_PER_RECORD % chunks;
    const i64 record_row = block / GROUPS_PER_RECORD / chunks;
    const i64 row = record_row % row_blocks * (GROUPS_PER_RECORD * GROUP_ROWS) + part * GROUP_ROWS;
    const i64 left = rows - row;
    return {record_row / row_blocks * rows + row, chunk * TILE_COLS,
            int(left < 0 ? 0 : left < GROUP_ROWS ? left : GROUP_ROWS), part, record_row};
}

// Fill the tile; every place inside the matrix then holds its exact pattern.
__device__ void decode_tile(const Encoded& encoded, const Place& place, int cols, u8* tile)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int col_blocks = (cols + RECORD_COLS - 1) / RECORD_COLS;
    const int block = place.first_col / RECORD_COLS + warp;
    if (block < col_blocks) {
        const u32 lo0 = g < place.rows ? encoded.window[place.channel + g] : 0;
        const u32 lo1 = g + 8 < place.rows ? encoded.window[place.channel + g + 8] : 0;
        unpack_record(encoded.records + (place.row_of_records * col_blocks + block) * RECORD_BYTES,
                      place.part, base_word(lo0), base_word(lo1),
                      reinterpret_cast<u32*>(tile + warp * RECORD_COLS * 2));
    }
    // Bounds are clamped, so that a damaged pointer cannot make a warp read outside the lists.
    int begin[2], end[2];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = warp + i * WARPS;
        begin[i] = end[i] = 0;
        if (row < place.rows) {
            begin[i] = max(0, encoded.escape_ptr[place.channel + row]);
            end[i] = min(encoded.escapes, encoded.escape_ptr[place.channel + row + 1]);
        }
        any = any || begin[i] < end[i];
    }
    if (!__syncthreads_or(any))
        return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (begin[i] < end[i])
            patch_row(encoded, begin[i], end[i], place.first_col,
                      reinterpret_cast<u16*>(tile + (warp + i * WARPS) * TILE_PITCH));
    __syncthreads();
}

// The row and the column, relative to the block, of a thread's i-th piece of eight weights.
__device__ __forceinline__ void piece_at(int i, int& row, int& col)
{
    const int piece = i * THREADS + threadIdx.x;
    row = piece / PIECES_PER_ROW;
    col = piece % PIECES_PER_ROW * 8;
}

template <bool ALIGNED>
__device__ void decode(const Encoded& encoded, i64 rows, int cols, int row_blocks, int chunks,
                       u16* bits)
{
    __shared__ uint4 tile[GROUP_ROWS * TILE_PITCH / 16];
    const Place place = place_of(blockIdx.x, rows, row_blocks, chunks);
    if (place.rows <= 0)
        return;
    decode_tile(encoded, place, cols, reinterpret_cast<u8*>(tile));
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        int row, col;
        piece_at(i, row, col);
        if (row >= place.rows || place.first_col + col >= cols)
            continue;
        const uint4 piece = tile[(row * TILE_PITCH + col * 2) / 16];
        u16* target = bits + (place.channel + row) * cols + place.first_col + col;
        if (ALIGNED) {
            __stcs(reinterpret_cast<uint4*>(target), piece);
        } else {
            const u32 word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (place.first_col + col + j < cols)
                    target[j] = u16(word[j / 2] >> 16 * (j & 1));
        }
    }
}

template <bool ALIGNED>
__device__ void compare(const Encoded& encoded, i64 rows, int cols, int row_blocks, int chunks,
                        const u16* bits, int* differs)
{
    __shared__ uint4 tile[GROUP_ROWS * TILE_PITCH / 16];
    const Place place = place_of(blockIdx.x, rows, row_blocks, chunks);
    if (place.rows <= 0)
        return;
    uint4 expected[PIECES];  // on their way while the records are unpacked
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        int row, col;
        piece_at(i, row, col);
        expected[i] = row < place.rows && place.first_col + col < cols
            ? load8<ALIGNED>(bits + (place.channel + row) * cols, place.first_col + col, cols, 0)
            : make_uint4(0, 0, 0, 0);
    }
    decode_tile(encoded, place, cols, reinterpret_cast<u8*>(tile));
    u32 difference = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        int row, col;
        piece_at(i, row, col);
        const int left = cols - place.first_col - col;
        if (row >= place.rows || left <= 0)
            continue;
        const uint4 actual = tile[(row * TILE_PITCH + col * 2) / 16];
        const u32 word[4] = {actual.x ^ expected[i].x, actual.y ^ expected[i].y,
                             actual.z ^ expected[i].z, actual.w ^ expected[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)  // a piece cut by the end of its row counts only its weights
            difference |= left >= 2 * j + 2 ? word[j] : left > 2 * j ? word[j] & 0xFFFF : 0;
    }
    if (__any_sync(FULL_WARP, difference != 0) && threadIdx.x % 32 == 0)
        *differs = 1;
}

#define DECODE_KERNELS(SUFFIX, ALIGNED)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                         \
    w12_decode##SUFFIX(const u8* records, const u8* window, const int* escape_ptr,                \
                       const int* escape_col, const u16* escape_bits, int escapes, i64 rows,      \
                       int cols, int row_blocks, int chunks, u16* bits)                           \
    {                                                                                             \
        decode<ALIGNED>({records, window, escape_ptr, escape_col, escape_bits, escapes}, rows,    \
                        cols, row_blocks, chunks, bits);                                          \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                         \
    w12_compare##SUFFIX(const u8* records, const u8* window, const int* escape_ptr,               \
                        const int* escape_col, const u16* escape_bits, int escapes, i64 rows,     \
                        int cols, int row_blocks, int chunks, const u16* bits, int* differs)      \
    {                                                                                             \
        compare<ALIGNED>({records, window, escape_ptr, escape_col, escape_bits, escapes}, rows,   \
                         cols, row_blocks, chunks, bits, differs);                                \
    }

DECODE_KERNELS(, true)
DECODE_KERNELS(_unaligned, false)
