// Read a buffer once, as fast as memory gives it, and sum it so that nothing can be left out.
//
// Each block reads one contiguous tile; a thread has LOADS independent 16-byte loads under way.
// A buffer much larger than L2 that is read in the same order every time is never found there.
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = STREAM_THREADS;
constexpr int LOADS = STREAM_LOADS;
constexpr int SUMS = STREAM_SUMS;

__device__ __forceinline__ uint4 load_once(const uint4* source)
{
    uint4 piece;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(source));
    return piece;
}

// buffer: pieces of 16 bytes. sums [SUMS]: added to, modulo 2^32; zeroed by the caller.
extern "C" __global__ void __launch_bounds__(THREADS)
    stream_read(const uint4* buffer, i64 pieces, u32* sums)
{
    const i64 begin = i64(blockIdx.x) * THREADS * LOADS + threadIdx.x;
    uint4 piece[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        piece[i] = begin + i * THREADS < pieces ? load_once(buffer + begin + i * THREADS)
                                                : uint4{0, 0, 0, 0};
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        sum += piece[i].x + piece[i].y + piece[i].z + piece[i].w;
    sum = __reduce_add_sync(0xFFFFFFFF, sum);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sums + (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) % SUMS, sum);
}
