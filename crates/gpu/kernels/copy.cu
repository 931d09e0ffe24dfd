// Copies lists of pieces between any two memories that the device can address, and sums both sides on the way if asked to.
//
// A warp takes a chunk of a piece at a time: eight vectors of sixteen bytes a lane are on their way before the first is stored, which is a page of 4 KiB at once, and
// sixteen warps a multiprocessor do so: that is what it takes to keep the memory busy, and leaves half of each multiprocessor to whoever computes. How orders come and end is
// told in `worker.cuh`.

#include "worker.cuh"

// Vectors of a lane on their way at once; and of what is left at the end of a chunk.
static constexpr u32 DEPTH = 8;
static constexpr u32 LAST_DEPTH = 4;
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

// Copies vectors; returns the sum of what was read where that is wanted. What is read is not read again. What is written may be, by whoever the bytes are for, or by whoever sums
// them: it stays in the second cache as long as there is room.
template <bool SUM>
__device__ __forceinline__ u64 copy_vectors(uint4 *to, const uint4 *from, u32 vectors, u64 place, u32 lane) {
    u64 sum = 0;
    u32 first = lane;
#pragma unroll 1
    for (; first - lane + DEPTH * LANES <= vectors; first += DEPTH * LANES) {
        uint4 v[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) v[d] = __ldcs(from + first + d * LANES);
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) __stwb(to + first + d * LANES, v[d]);
#pragma unroll
        for (u32 d = 0; SUM && d < DEPTH; d++) sum += weigh(v[d], place + (first + d * LANES) * VECTOR);
    }
    // Lanes that are past the end copy the last vector once more.
#pragma unroll 1
    for (; first - lane < vectors; first += LAST_DEPTH * LANES) {
        uint4 v[LAST_DEPTH];
#pragma unroll
        for (u32 d = 0; d < LAST_DEPTH; d++) v[d] = __ldcs(from + min(first + d * LANES, vectors - 1));
#pragma unroll
        for (u32 d = 0; d < LAST_DEPTH; d++) __stwb(to + min(first + d * LANES, vectors - 1), v[d]);
#pragma unroll
        for (u32 d = 0; SUM && d < LAST_DEPTH; d++) {
            if (first + d * LANES < vectors) sum += weigh(v[d], place + (first + d * LANES) * VECTOR);
        }
    }
    return sum;
}

// The sum of what is there now. Each lane looks at what it has written itself.
__device__ __forceinline__ u64 sum_vectors(const uint4 *at, u32 vectors, u64 place, u32 lane) {
    u64 sum = 0;
    u32 first = lane;
#pragma unroll 1
    for (; first - lane + DEPTH * LANES <= vectors; first += DEPTH * LANES) {
        uint4 v[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) v[d] = load_again(at + first + d * LANES);
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) sum += weigh(v[d], place + (first + d * LANES) * VECTOR);
    }
#pragma unroll 1
    for (; first < vectors; first += LANES) sum += weigh(load_again(at + first), place + first * VECTOR);
    return sum;
}

template <bool SUM>
__device__ __forceinline__ void copy_chunk(u8 *to, const u8 *from, u32 len, u64 place, u32 lane, Sums &sums) {
    u32 at = 0;
    if ((((u64)to | (u64)from) & (VECTOR - 1)) == 0) {
        u32 vectors = len / VECTOR;
        sums.read += copy_vectors<SUM>((uint4 *)to, (const uint4 *)from, vectors, place, lane);
        if (SUM) sums.written += sum_vectors((const uint4 *)to, vectors, place, lane);
        at = vectors * VECTOR;
    }
    // Whatever does not begin or end where vectors do.
#pragma unroll 1
    for (u32 i = at + lane; i < len; i += LANES) {
        u8 byte = from[i];
        to[i] = byte;
        if (SUM) {
            sums.read += weigh_byte(byte, place + i);
            sums.written += weigh_byte(((volatile u8 *)to)[i], place + i);
        }
    }
}

// A function of its own, so that its loops have all registers to themselves.
template <bool SUM>
__device__ __noinline__ Sums copy_chunks(const Order &order, const Piece *pieces, u32 unit, u32 step) {
    u32 lane = threadIdx.x % LANES;
    Sums sums = {0, 0};
    u32 chunks_a_piece = order.chunks_a_piece, chunk = order.chunk, units = order.count * chunks_a_piece;
    if (unit >= units) return sums;
    Piece next = pieces[unit / chunks_a_piece];
#pragma unroll 1
    for (;;) {
        Piece piece = next;
        u32 nth = unit / chunks_a_piece, within = unit - nth * chunks_a_piece;
        unit += step;
        // The next piece is on its way while this one is copied.
        if (unit < units) next = pieces[unit / chunks_a_piece];
        u64 begin = (u64)within * chunk;
        if (begin < piece.len) {
            // Where a piece lies in the list is part of its bytes' place.
            u64 place = ((u64)nth << 40) + begin;
            u32 len = (u32)min((u64)chunk, piece.len - begin);
            copy_chunk<SUM>((u8 *)piece.to + begin, (const u8 *)piece.from + begin, len, place, lane, sums);
        }
        if (unit >= units) return sums;
    }
}

__device__ __forceinline__ Sums copy_share(const Order &order, const Piece *pieces, u32 unit, u32 step) {
    return order.flags & SUMMED ? copy_chunks<true>(order, pieces, unit, step) : copy_chunks<false>(order, pieces, unit, step);
}

extern "C" __global__ void __launch_bounds__(512, 2) weft_copy(const __grid_constant__ Order order, const __grid_constant__ Terms terms) { work(order, terms); }
