// How the ranks of a team meet in a kernel, and what they tell each other: packets, records of where buffers are, and ends.
#ifndef WEFT_MEETING_CUH
#define WEFT_MEETING_CUH

#include "elements.cuh"

namespace weft {

// Of every block, and how many blocks fit on a multiprocessor by what they need of it: 80 registers a thread.
static constexpr u32 THREADS = 256;
static constexpr u32 BLOCKS_A_MULTIPROCESSOR = 3;
static constexpr u32 BLOCKS_MAX = 256;
static constexpr u32 RECORD_BYTES = 32;
// What one call adds to `Control::calls`.
static constexpr u64 CALL = 65536;
static constexpr u32 WINDOW_SHIFT = 56;

enum Kind : u32 { ALL_REDUCE = 0, REDUCE_SCATTER = 1, ALL_GATHER = 2, ALL_TO_ALL = 3, BROADCAST = 4 };

// The buffers of one rank. A reference is what other ranks find a buffer by: an address, where all are in one process; elsewhere a window in the upper byte and what lies before
// the buffer there.
struct Local {
    u64 in, out, in_reference, out_reference;
};

// The same fields as `CallView` in `collective.rs`.
struct Call {
    Local locals[RANKS_MAX];
    // Elements where elements are reduced, else bytes; of all-reduce and broadcast all of them, of the others those of one rank.
    u64 count;
    u32 kind;
    u32 root;
    u32 element;
    Folding folding;
};

// Which call this is.
struct Turn {
    u64 number;
    u32 flag;
    u32 parity;

    WEFT_DEVICE explicit Turn(const Rank &me) {
        number = load_relaxed(&me.control(me.rank)->calls) / CALL;
        // Memory that nobody has written yet is zero, so no call has that flag. The one that would have it shares its flag with the call before it, which wrote elsewhere.
        flag = (u32)number != 0 ? (u32)number : 0xffffffffu;
        parity = (u32)number & 1;
    }
};

// The block's share of the call's number. Whoever still reads the number of this call is of this block, and has done so, or is of one that has not added its share.
WEFT_DEVICE void end_call(const Rank &me) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 share = blockIdx.x == 0 ? CALL - (gridDim.x - 1) : 1;
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&me.control(me.rank)->calls), "l"(share) : "memory");
    }
}

// ---- Packets ----

// What `source` has written for `reader` in this turn.
WEFT_DEVICE u8 *packets(const Rank &me, u32 reader, const Turn &turn, u32 source) {
    return me.heap(reader) + me.team.packets_at + (u64)(turn.parity * RANKS_MAX + source) * me.team.packets_a_rank;
}

// Bytes that do not lie at a multiple of eight, or are fewer than eight, are read and written by elements of two bytes or four; bytes of no kind in particular may lie anywhere. Not
// written out where it is called, since it is rare and would be called for every rank.
static __device__ __noinline__ u64 load_askew(const u8 *place, u32 there, u32 size) {
    u64 value = 0;
    for (u32 k = 0; k < there; k += size) {
        u64 element = size == 4 ? *(const u32 *)(place + k) : size == 2 ? *(const u16 *)(place + k) : place[k];
        value |= element << 8 * k;
    }
    return value;
}

static __device__ __noinline__ void store_askew(u8 *place, u32 there, u32 size, u64 value) {
    for (u32 k = 0; k < there; k += size) {
        u64 element = value >> 8 * k;
        if (size == 4) {
            *(u32 *)(place + k) = (u32)element;
        } else if (size == 2) {
            *(u16 *)(place + k) = (u16)element;
        } else {
            place[k] = (u8)element;
        }
    }
}

// How many of the eight bytes from `at` on are before the end.
WEFT_DEVICE u32 before_end(u64 at, u64 end) { return at >= end ? 0 : end - at < 8 ? (u32)(end - at) : 8; }

// Eight bytes from `at`, or fewer at the end.
WEFT_DEVICE u64 load_eight(const u8 *from, u64 at, u64 end, u32 size) {
    if (at + 8 <= end && ((u64)(from + at) & 7) == 0) return *(const u64 *)(from + at);
    return load_askew(from + at, before_end(at, end), size);
}

WEFT_DEVICE void store_eight(u8 *to, u64 at, u64 end, u32 size, u64 value) {
    if (at + 8 <= end && ((u64)(to + at) & 7) == 0) {
        *(u64 *)(to + at) = value;
    } else {
        store_askew(to + at, before_end(at, end), size, value);
    }
}

// The same pair of packets from every other rank, all on their way at once; `eight` of this rank is left as it is. False when they do not come.
WEFT_DEVICE bool receive(Rank &me, const Turn &turn, u64 at, u64 (&eight)[RANKS_MAX]) {
    if (me.failed) return false;
    const u32 ranks = me.team.ranks;
    u64 a[RANKS_MAX], b[RANKS_MAX];
    const u8 *from = packets(me, me.rank, turn, 0) + at;
#pragma unroll
    for (u32 peer = 0; peer < RANKS_MAX; peer++) a[peer] = b[peer] = 0;
    for (u32 looks = 1;; looks++) {
#pragma unroll
        for (u32 peer = 0; peer < RANKS_MAX; peer++) {
            if (peer < ranks && peer != me.rank && !are_marked(a[peer], b[peer], turn.flag)) load_pair(from + peer * me.team.packets_a_rank, a[peer], b[peer]);
        }
        u32 missing = RANKS_MAX;
#pragma unroll
        for (u32 peer = 0; peer < RANKS_MAX; peer++) {
            if (peer < ranks && peer != me.rank && !are_marked(a[peer], b[peer], turn.flag)) missing = peer;
        }
        if (missing == RANKS_MAX) break;
        if (looks % LOOKS_A_CLOCK == 0 && !me.patient(looks, missing)) return false;
    }
#pragma unroll
    for (u32 peer = 0; peer < RANKS_MAX; peer++) {
        if (peer < ranks && peer != me.rank) eight[peer] = eight_of(a[peer], b[peer]);
    }
    return true;
}

// This rank's own among those of all, without an index that is known only at run time.
WEFT_DEVICE void set_own(u64 (&eight)[RANKS_MAX], u32 rank, u64 value) {
#pragma unroll
    for (u32 peer = 0; peer < RANKS_MAX; peer++) {
        if (peer == rank) eight[peer] = value;
    }
}

// Sends eight bytes to the same place of every other rank.
WEFT_DEVICE void send_to_all(const Rank &me, const Turn &turn, u64 at, u64 value) {
    for (u32 step = 1; step < me.team.ranks; step++) {
        u32 peer = me.rank + step < me.team.ranks ? me.rank + step : me.rank + step - me.team.ranks;
        store_packets(packets(me, peer, turn, me.rank) + at, value, turn.flag);
    }
}

// Sends every other rank eight bytes of its own part: parts are `part` bytes long, and end with `total`. All are read before the first is sent.
WEFT_DEVICE void send_parts(const Rank &me, const Turn &turn, const u8 *in, u64 unit, u64 part, u64 total, u32 size) {
    const u32 ranks = me.team.ranks;
    u64 value[RANKS_MAX];
#pragma unroll
    for (u32 peer = 0; peer < RANKS_MAX; peer++) {
        if (peer < ranks && peer != me.rank) value[peer] = load_eight(in, peer * part + unit * 8, min((peer + 1) * part, total), size);
    }
#pragma unroll
    for (u32 peer = 0; peer < RANKS_MAX; peer++) {
        if (peer < ranks && peer != me.rank) store_packets(packets(me, peer, turn, me.rank) + unit * 16, value[peer], turn.flag);
    }
}

// ---- Bulk ----

// Where each rank's buffers are, as this block has been told.
struct Places {
    u64 in[RANKS_MAX];
    u64 out[RANKS_MAX];
};

WEFT_DEVICE u64 resolve(const Rank &me, u32 peer, u64 reference) {
    u64 window = reference >> WINDOW_SHIFT;
    if (window == 0) return reference;
    const u64 *bases = (const u64 *)(me.heap(me.rank) + me.team.windows_at);
    return bases[window * RANKS_MAX + peer] + (reference & ((1ull << WINDOW_SHIFT) - 1));
}

WEFT_DEVICE u8 *record(const Rank &me, u32 reader, const Turn &turn, u32 source) {
    return me.heap(reader) + me.team.records_at + ((u64)(turn.parity * BLOCKS_MAX + blockIdx.x) * RANKS_MAX + source) * RECORD_BYTES;
}

// All ranks have come, what they had written before is seen, and where their buffers are is in `places`. False where somebody did not come; then nothing may be touched.
WEFT_DEVICE bool meet_at_start(Rank &me, const Turn &turn, const Local &local, Places &places) {
    u32 peer = threadIdx.x;
    if (peer == me.rank) {
        places.in[peer] = local.in;
        places.out[peer] = local.out;
    } else if (peer < me.team.ranks) {
        me.fence();
        u8 *to = record(me, peer, turn, me.rank);
        store_packets(to, local.in_reference, turn.flag);
        store_packets(to + 16, local.out_reference, turn.flag);
        const u8 *from = record(me, me.rank, turn, peer);
        u64 a, b, c, d;
        bool came = look_until(me, peer, [&] {
            load_pair(from, a, b);
            load_pair(from + 16, c, d);
            return are_marked(a, b, turn.flag) && are_marked(c, d, turn.flag);
        });
        me.fence();
        if (came) {
            places.in[peer] = resolve(me, peer, eight_of(a, b));
            places.out[peer] = resolve(me, peer, eight_of(c, d));
        }
    }
    bool fine = __syncthreads_and(!me.failed);
    me.failed = !fine;
    return fine;
}

// What this block has read and written is read and written; the same is known of this block of all others.
WEFT_DEVICE void meet_at_end(Rank &me, const Turn &turn) {
    __syncthreads();
    u32 peer = threadIdx.x;
    if (peer < me.team.ranks && peer != me.rank) {
        u64 place = (u64)blockIdx.x * RANKS_MAX;
        me.fence();
        store_relaxed((u64 *)(me.heap(peer) + me.team.ends_at) + place + me.rank, turn.number);
        const u64 *own = (const u64 *)(me.heap(me.rank) + me.team.ends_at) + place + peer;
        look_until(me, peer, [&] { return load_relaxed(own) >= turn.number; });
        me.fence();
    }
}

// Loads of others' memory come after a meeting, and are not to be kept by this multiprocessor: each byte is read once.
WEFT_DEVICE uint4 load_vector(u64 from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

template <class Unit>
WEFT_DEVICE Unit load_unit(u64 from) {
    return *(const Unit *)from;
}

template <>
WEFT_DEVICE uint4 load_unit<uint4>(u64 from) {
    return load_vector(from);
}

WEFT_DEVICE u32 word_of(const uint4 &v, u32 word) { return word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w; }

}  // namespace weft

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_MULTIPROCESSOR)

#endif
