// What kernels that work on rows (the hidden state of one token each) share: how blocks tell each other where buffers are, sums over a block, and rounding to eight bits.
#ifndef WEFT_ROWS_CUH
#define WEFT_ROWS_CUH

#include "float8.cuh"
#include "meeting.cuh"

namespace weft {

static constexpr u32 WARPS_MAX = 32;

// What each rank has told this block, EIGHTS words of it.
template <u32 EIGHTS>
struct Told {
    u64 of[RANKS_MAX][EIGHTS];
};

// Every block tells the same block of every other rank a few words, and hears theirs; `told.of[me.rank]` is what this one tells, and one thread has written it before the call. Says too that all have come, as
// `meet_at_start` does, and what they had written before is seen. The words go by packets, at the beginning of what a rank has for packets. Whoever has something to do in between calls the two halves.
template <u32 EIGHTS>
WEFT_DEVICE bool tell(Rank &me, const Turn &turn, const Told<EIGHTS> &told, bool fine) {
    __syncthreads();
    u32 peer = threadIdx.x / EIGHTS, word = threadIdx.x % EIGHTS;
    if (fine && peer < me.team.ranks && peer != me.rank) {
        me.fence();
        store_packets(packets(me, peer, turn, me.rank) + ((u64)blockIdx.x * EIGHTS + word) * 16, told.of[me.rank][word], turn.flag);
    }
    return fine;
}

// False, for the whole block, where somebody did not come; then nothing may be touched.
template <u32 EIGHTS>
WEFT_DEVICE bool hear(Rank &me, const Turn &turn, Told<EIGHTS> &told, bool fine) {
    u32 peer = threadIdx.x / EIGHTS, word = threadIdx.x % EIGHTS;
    if (fine && peer < me.team.ranks && peer != me.rank) {
        const u8 *from = packets(me, me.rank, turn, peer) + ((u64)blockIdx.x * EIGHTS + word) * 16;
        u64 a = 0, b = 0;
        fine = look_until(me, peer, [&] {
            load_pair(from, a, b);
            return are_marked(a, b, turn.flag);
        });
        me.fence();
        told.of[peer][word] = eight_of(a, b);
    }
    fine = __syncthreads_and(fine);
    me.failed = !fine;
    return fine;
}

// Blocks of one rank tell each other things by packets in the rank's own heap, where its packets to itself would be. This waits for one of them; false where that block does not come. It is twice as long as a block
// waits for another rank, so that the one that waits for a rank is the one that says who did not come.
WEFT_DEVICE bool hear_own(Rank &me, const Turn &turn, u64 at, u64 &value) {
    if (me.failed) return false;
    const u8 *from = packets(me, me.rank, turn, me.rank) + at;
    u64 a = 0, b = 0;
    me.until = clock_ns() + 2 * me.team.timeout_ns;
    for (u32 looks = 1;; looks++) {
        load_pair(from, a, b);
        if (are_marked(a, b, turn.flag)) break;
        if (looks % LOOKS_A_CLOCK == 0 && !me.patient(looks, me.rank)) return false;
    }
    value = eight_of(a, b);
    return true;
}

WEFT_DEVICE void tell_own(const Rank &me, const Turn &turn, u64 at, u64 value) { store_packets(packets(me, me.rank, turn, me.rank) + at, value, turn.flag); }

// What each warp has found, twice: a block that comes to the next sum but one has left this one.
struct Partials {
    float of[2][WARPS_MAX];
};

template <class Join>
WEFT_DEVICE float over_warp(float value, Join join) {
#pragma unroll
    for (u32 far = LANES / 2; far > 0; far /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, far));
    return value;
}

// Blocks of one rank that share a row, and which of them this is.
struct Share {
    u32 parts;
    u32 part;
};

// The same number for all threads of all blocks that share a row, whose order is always the same. `fine` is made that of all threads of the block, false where another block did not come. Blocks that
// share a row do so once in a call, and `turn` tells their sums apart.
template <class Join>
WEFT_DEVICE float over_row(Rank &me, const Turn &call, const Share &share, Partials &partials, u32 &turn, float value, bool &fine, Join join) {
    float *of = partials.of[turn & 1];
    value = over_warp(value, join);
    if (threadIdx.x % LANES == 0) of[threadIdx.x / LANES] = value;
    fine = __syncthreads_and(fine);
    u32 lane = threadIdx.x % LANES;
    value = over_warp(lane < blockDim.x / LANES ? of[lane] : 0.0f, join);
    if (share.parts > 1 && fine) {
        __shared__ float all;
        if (threadIdx.x < LANES) {
            u64 at = (u64)(turn * BLOCKS_MAX + blockIdx.x - share.part + lane) * 16, other = 0;
            if (lane == share.part) {
                tell_own(me, call, at, __float_as_uint(value));
            } else if (lane < share.parts) {
                fine = hear_own(me, call, at, other);
                value = __uint_as_float((u32)other);
            }
            value = over_warp(lane < share.parts ? value : 0.0f, join);
            if (lane == 0) all = value;
        }
        fine = __syncthreads_and(fine);
        value = all;
    }
    turn++;
    return value;
}

struct Add {
    WEFT_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Of numbers that are not negative; one that is no number stays.
struct Most {
    WEFT_DEVICE float operator()(float a, float b) const {
        float c;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
        return c;
    }
};

static constexpr float E4M3_MAX = 448.0f;

// A plain store that no reader of this multiprocessor waits for.
WEFT_DEVICE void store_vector(u64 to, const uint4 &v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }

}  // namespace weft

#endif
