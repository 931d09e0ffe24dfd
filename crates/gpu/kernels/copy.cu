// Copies lists of pieces between any two memories that the device can address, and sums both sides on the way if asked to.
//
// A warp takes a chunk of a piece at a time: four vectors of sixteen bytes a lane are on their way before the first is stored, and 1,536 threads a
// multiprocessor do so, which is what it takes to keep the memory busy. Warps walk over the chunks; the last one to end tells the host by a word in the host's own memory, because asking
// the driver for an event takes longer than a small copy.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece {
    u64 to, from, len;
};

// What one launch shares among its blocks. The device's own memory, all zero between two launches.
struct Tally {
    u32 ended;
    u32 unused;
    u64 read, written;
};

// Where the host looks. Memory of the host.
struct Report {
    u64 read, written;
    u32 done;
    u32 unused;
};

static constexpr u32 LANES = 32;
static constexpr u32 DEPTH = 4;
// So many pieces come with the launch itself; a longer list is read from the host's memory, a warp's piece at a time.
static constexpr u32 FEW = 8;
static constexpr u32 VECTOR = sizeof(uint4);

// Memory as it is now, past every cache of this multiprocessor.
__device__ __forceinline__ uint4 load_again(const uint4 *from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Words times keys of their places: no two vectors can change places, and no word can change, without the sum changing but for one time in 2^32.
__device__ __forceinline__ u64 weigh(uint4 v, u64 place) {
    u32 key = (u32)place * 0x9e3779b1u + (u32)(place >> 32) * 0x85ebca77u + 0x27d4eb2fu;
    u32 other = key ^ 0xc2b2ae3du;
    return (u64)(v.x + key) * (u64)(v.y ^ other) + (u64)(v.z + (key << 16 | key >> 16)) * (u64)(v.w ^ (other << 16 | other >> 16)) + v.y + ((u64)v.w << 32);
}

__device__ __forceinline__ u64 weigh_byte(u32 byte, u64 place) {
    return (u64)(byte + 1) * ((place << 1 | 1) * 0x9e3779b97f4a7c15ull);
}

template <bool SUM>
__device__ __forceinline__ void copy_chunk(u8 *to, const u8 *from, u64 len, u64 place, u32 lane, u64 &read, u64 &written) {
    u64 at = 0;
    if ((((u64)to | (u64)from) & (VECTOR - 1)) == 0) {
        u64 vectors = len / VECTOR;
        uint4 v[DEPTH];
        u64 first = lane;
        for (; first + (DEPTH - 1) * LANES < vectors; first += DEPTH * LANES) {
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++) v[d] = __ldcs((const uint4 *)from + first + d * LANES);
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++) __stcs((uint4 *)to + first + d * LANES, v[d]);
            if (SUM) {
#pragma unroll
                for (u32 d = 0; d < DEPTH; d++) read += weigh(v[d], place + (first + d * LANES) * VECTOR);
#pragma unroll
                for (u32 d = 0; d < DEPTH; d++) v[d] = load_again((const uint4 *)to + first + d * LANES);
#pragma unroll
                for (u32 d = 0; d < DEPTH; d++) written += weigh(v[d], place + (first + d * LANES) * VECTOR);
            }
        }
        for (; first < vectors; first += LANES) {
            uint4 one = __ldcs((const uint4 *)from + first);
            __stcs((uint4 *)to + first, one);
            if (SUM) {
                read += weigh(one, place + first * VECTOR);
                written += weigh(load_again((const uint4 *)to + first), place + first * VECTOR);
            }
        }
        at = vectors * VECTOR;
    }
    // Whatever does not begin or end where vectors do.
    for (u64 i = at + lane; i < len; i += LANES) {
        u8 byte = from[i];
        to[i] = byte;
        if (SUM) {
            read += weigh_byte(byte, place + i);
            written += weigh_byte(((volatile u8 *)to)[i], place + i);
        }
    }
}

template <bool SUM>
__device__ void copy_pieces(const Piece *pieces, u32 count, u32 chunks_a_piece, u64 chunk, Tally *tally, Report *report, u32 number) {
    u32 lane = threadIdx.x % LANES;
    u64 warp = (u64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    u64 total = (u64)count * chunks_a_piece;
    u64 read = 0, written = 0;
    for (u64 unit = warp; unit < total; unit += warps) {
        Piece piece = pieces[unit / chunks_a_piece];
        u64 begin = (unit % chunks_a_piece) * chunk;
        if (begin >= piece.len) continue;
        u64 len = min(chunk, piece.len - begin);
        // Where a piece lies in the list is part of its bytes' place.
        u64 place = (unit / chunks_a_piece << 40) + begin;
        copy_chunk<SUM>((u8 *)piece.to + begin, (const u8 *)piece.from + begin, len, place, lane, read, written);
    }
    if (SUM) {
        for (u32 step = LANES / 2; step > 0; step /= 2) {
            read += __shfl_xor_sync(0xffffffffu, read, step);
            written += __shfl_xor_sync(0xffffffffu, written, step);
        }
        if (lane == 0) {
            atomicAdd(&tally->read, read);
            atomicAdd(&tally->written, written);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(&tally->ended, 1) == gridDim.x - 1) {
            __threadfence(); // What the other blocks have added is there from here on.
            if (SUM) {
                report->read = atomicExch(&tally->read, 0);
                report->written = atomicExch(&tally->written, 0);
            }
            tally->ended = 0;
            __threadfence_system();
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&report->done), "r"(number) : "memory");
        }
    }
}

struct Few {
    Piece pieces[FEW];
};

extern "C" __global__ void __launch_bounds__(256, 6)
weft_copy(const __grid_constant__ Few few, const Piece *pieces, u32 count, u32 chunks_a_piece, u64 chunk, Tally *tally, Report *report, u32 number) {
    copy_pieces<false>(pieces ? pieces : few.pieces, count, chunks_a_piece, chunk, tally, report, number);
}

extern "C" __global__ void __launch_bounds__(256, 4)
weft_copy_summed(const __grid_constant__ Few few, const Piece *pieces, u32 count, u32 chunks_a_piece, u64 chunk, Tally *tally, Report *report, u32 number) {
    copy_pieces<true>(pieces ? pieces : few.pieces, count, chunks_a_piece, chunk, tally, report, number);
}
