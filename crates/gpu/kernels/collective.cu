// Collectives between ranks that reach each other's memory: several in one process, several processes on one device, or peers behind a link.
//
// Every call is a meeting: each rank hears from each other rank in it. A rank that is in call e + 1 has therefore ended call e, since its kernels come one after the other on its
// stream, and whoever has ended call e + 1 may write again what was read in call e. That is why everything that peers write, packets and records, is there twice, for even and odd calls, and why
// nothing is ever waited for before it is written.
//
// Two protocols. *Packets*: four bytes and the number of the call in one word of eight. A reader that sees the number has the bytes, so a small call is one hop, without a fence.
// *Bulk*: all ranks tell each other where their buffers are, which says too that they have come; then they read and write each other's buffers at once; then they meet again. Each input is
// read once and each output written once.
//
// Block b of a rank deals with block b of the others and with no other block. All blocks of all ranks of one device have to be on it at the same time: the host launches no more
// than fit. No number comes from the host that changes from call to call, so a launch can be captured in a graph and replayed.

#include "meeting.cuh"

using namespace weft;

// Eight bytes of every rank become eight.
template <class E, class Op>
WEFT_DEVICE u64 fold_pair(const Folding &how, u32 ranks, const u64 (&eight)[RANKS_MAX]) {
    Op op(how);
    u32 low = fold_words<E, Op, RANKS_MAX>(op, ranks, [&](u32 rank) { return (u32)eight[rank]; });
    u32 high = fold_words<E, Op, RANKS_MAX>(op, ranks, [&](u32 rank) { return (u32)(eight[rank] >> 32); });
    return low | (u64)high << 32;
}

// Whichever elements they are: asked once for eight bytes, so that there is one kernel for all.
WEFT_DEVICE u64 fold_eight(const Call &call, u32 ranks, const u64 (&eight)[RANKS_MAX]) {
    const Folding &how = call.folding;
    bool sum = how.fold == SUM && how.divisor == 0;
    if (call.element == ELEMENT_BF16) return sum ? fold_pair<Bf16, Sum>(how, ranks, eight) : fold_pair<Bf16, Other>(how, ranks, eight);
    if (call.element == ELEMENT_F16) return sum ? fold_pair<F16, Sum>(how, ranks, eight) : fold_pair<F16, Other>(how, ranks, eight);
    if (call.element == ELEMENT_F32) return sum ? fold_pair<F32, Sum>(how, ranks, eight) : fold_pair<F32, Other>(how, ranks, eight);
    return fold_pair<I32, Other>(how, ranks, eight);
}

WEFT_DEVICE u32 size_of_element(u32 element) { return element == ELEMENT_F16 || element == ELEMENT_BF16 ? 2 : 4; }

// All-reduce in one hop: everybody sends everything to everybody, and reduces all of it.
KERNEL weft_one_shot(const __grid_constant__ Team team, const __grid_constant__ Call call) {
    Rank me(team, blockIdx.y);
    const u8 *in = (const u8 *)call.locals[blockIdx.y].in;
    u8 *out = (u8 *)call.locals[blockIdx.y].out;
    u32 size = size_of_element(call.element);
    u64 bytes = call.count * size, units = (bytes + 7) / 8;
    u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, stride = (u64)gridDim.x * THREADS;
    // On its way while the number of the call is.
    u64 own = first < units ? load_eight(in, first * 8, bytes, size) : 0;
    Turn turn(me);
    if (me.begin()) {
        for (u64 unit = first; unit < units; unit += stride) {
            send_to_all(me, turn, unit * 16, unit == first ? own : load_eight(in, unit * 8, bytes, size));
        }
        for (u64 unit = first; unit < units; unit += stride) {
            u64 eight[RANKS_MAX] = {};
            set_own(eight, me.rank, unit == first ? own : load_eight(in, unit * 8, bytes, size));
            if (!receive(me, turn, unit * 16, eight)) break;
            store_eight(out, unit * 8, bytes, size, fold_eight(call, team.ranks, eight));
        }
    }
    end_call(me);
}

// Reduce-scatter in one hop: everybody sends every rank its part. All-reduce in two: then everybody sends its reduced part to all.
KERNEL weft_two_shot(const __grid_constant__ Team team, const __grid_constant__ Call call) {
    Rank me(team, blockIdx.y);
    const u8 *in = (const u8 *)call.locals[blockIdx.y].in;
    u8 *out = (u8 *)call.locals[blockIdx.y].out;
    bool all = call.kind == ALL_REDUCE;
    u32 size = size_of_element(call.element);
    u64 bytes = call.count * size;
    // All parts are sent as if they were of one length, so that everybody hears from everybody however little there is.
    u64 units = all ? ((bytes + 7) / 8 + team.ranks - 1) / team.ranks : (bytes + 7) / 8;
    u64 part = all ? units * 8 : bytes, total = all ? bytes : bytes * team.ranks;
    u64 second = team.packets_a_rank / 2;
    u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, stride = (u64)gridDim.x * THREADS;
    u64 own_end = min((me.rank + 1) * part, total);
    Turn turn(me);
    if (me.begin()) {
        for (u64 unit = first; unit < units; unit += stride) send_parts(me, turn, in, unit, part, total, size);
        for (u64 unit = first; unit < units; unit += stride) {
            u64 eight[RANKS_MAX] = {};
            set_own(eight, me.rank, load_eight(in, me.rank * part + unit * 8, own_end, size));
            if (!receive(me, turn, unit * 16, eight)) break;
            u64 value = fold_eight(call, team.ranks, eight);
            if (all) {
                send_to_all(me, turn, second + unit * 16, value);
                store_eight(out, me.rank * part + unit * 8, own_end, size, value);
            } else {
                store_eight(out, unit * 8, bytes, size, value);
            }
        }
        for (u64 unit = first; all && unit < units; unit += stride) {
            u64 eight[RANKS_MAX];
            if (!receive(me, turn, second + unit * 16, eight)) break;
#pragma unroll
            for (u32 peer = 0; peer < RANKS_MAX; peer++) {
                if (peer < team.ranks && peer != me.rank) store_eight(out, peer * part + unit * 8, min((peer + 1) * part, total), size, eight[peer]);
            }
        }
    }
    end_call(me);
}

// Where results go: the first is this rank's own, so that not all ranks write to the same one at the same time.
struct Targets {
    u64 to[RANKS_MAX];
    u32 count;
    // How the buffers lie to each other: the bits below sixteen in which their addresses differ, or that any of them has.
    u32 askew;
};

// Reduces `vectors` of sixteen bytes from the same place of all inputs, and writes them to all targets. DEPTH of them, of WIDTH ranks, are on their way before the first is used.
template <class E, class Op, u32 WIDTH, u32 DEPTH>
WEFT_DEVICE void reduce_vectors(const Op &op, const volatile Places &places, const volatile Targets &targets, u32 ranks, u64 in_at, u64 out_at, u64 vectors) {
    u64 stride = (u64)gridDim.x * THREADS;
    for (u64 begin = (u64)blockIdx.x * THREADS + threadIdx.x; begin < vectors; begin += stride * DEPTH) {
        uint4 got[DEPTH][WIDTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
#pragma unroll
            for (u32 rank = 0; rank < WIDTH; rank++) {
                if (rank < ranks && begin + d * stride < vectors) got[d][rank] = load_vector(places.in[rank] + in_at + (begin + d * stride) * 16);
            }
        }
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            if (begin + d * stride >= vectors) break;
            u32 word[4];
#pragma unroll
            for (u32 w = 0; w < 4; w++) word[w] = fold_words<E, Op, WIDTH>(op, ranks, [&](u32 rank) { return word_of(got[d][rank], w); });
            uint4 value = make_uint4(word[0], word[1], word[2], word[3]);
            u64 at = out_at + (begin + d * stride) * 16;
            for (u32 target = 0; target < targets.count; target++) *(uint4 *)(targets.to[target] + at) = value;
        }
    }
}

// The same one by one, for what lies before and after the vectors, and for buffers that lie askew to each other: `head` elements, and `tail` after a gap of so many bytes.
template <class E, class Op, u32 WIDTH>
WEFT_DEVICE void reduce_elements(const Op &op, const volatile Places &places, const volatile Targets &targets, u32 ranks, u64 in_at, u64 out_at, u64 head, u64 gap, u64 tail) {
    typedef typename E::Bits Bits;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < head + tail; i += (u64)gridDim.x * THREADS) {
        u64 at = i * sizeof(Bits) + (i < head ? 0 : gap);
        u32 got[WIDTH];
#pragma unroll
        for (u32 rank = 0; rank < WIDTH; rank++) {
            if (rank < ranks) got[rank] = *(const Bits *)(places.in[rank] + in_at + at);
        }
        Bits value = (Bits)fold_one<E, Op, WIDTH>(op, ranks, [&](u32 rank) { return got[rank]; });
        for (u32 target = 0; target < targets.count; target++) *(Bits *)(targets.to[target] + out_at + at) = value;
    }
}

// All-reduce and reduce-scatter: each rank reduces one part of all inputs, and writes it to all outputs, or to its own.
template <class E, class Op, u32 WIDTH, u32 DEPTH>
WEFT_DEVICE void bulk_reduce(const Team &team, const Call &call) {
    __shared__ Places places;
    __shared__ Targets targets;
    constexpr u64 SIZE = sizeof(typename E::Bits);
    Rank me(team, blockIdx.y);
    Turn turn(me);
    me.begin();
    if (meet_at_start(me, turn, call.locals[blockIdx.y], places)) {
        bool all = call.kind == ALL_REDUCE;
        u32 ranks = team.ranks;
        u64 bytes = call.count * SIZE;
        u64 part = all ? ((bytes + ranks - 1) / ranks + 15) / 16 * 16 : bytes;
        u64 in_at = all ? min(me.rank * part, bytes) : me.rank * part;
        u64 out_at = all ? in_at : 0;
        u64 left = all ? min(part, bytes - in_at) : part;
        u64 begin = (places.in[0] + in_at) & 15;
        if (threadIdx.x == 0) {
            u32 count = all ? ranks : 1;
            u64 askew = 0;
#pragma unroll 1
            for (u32 rank = 0; rank < ranks; rank++) askew |= (places.in[rank] + in_at) ^ begin;
#pragma unroll 1
            for (u32 step = 0; step < count; step++) {
                targets.to[step] = places.out[(me.rank + step) % ranks];
                askew |= (targets.to[step] + out_at) ^ begin;
            }
            targets.count = count;
            targets.askew = (u32)askew & 15;
        }
        __syncthreads();
        u64 head = targets.askew != 0 ? left : min((16 - begin) & 15, left);
        u64 vectors = (left - head) / 16, tail = left - head - vectors * 16;
        Op op(call.folding);
        reduce_vectors<E, Op, WIDTH, DEPTH>(op, places, targets, ranks, in_at + head, out_at + head, vectors);
        reduce_elements<E, Op, WIDTH>(op, places, targets, ranks, in_at, out_at, head / SIZE, vectors * 16, tail / SIZE);
        meet_at_end(me, turn);
    }
    end_call(me);
}

#define BULK(NAME, ...)                                                                                           \
    KERNEL weft_bulk_##NAME(const __grid_constant__ Team team, const __grid_constant__ Call call) { \
        bulk_reduce<__VA_ARGS__>(team, call);                                                                     \
    }

// The fewer ranks, the more vectors of each are on their way.
BULK(f32_sum_2, F32, Sum, 2, 4)
BULK(f32_sum_4, F32, Sum, 4, 2)
BULK(f32_sum_8, F32, Sum, 8, 1)
BULK(f16_sum_2, F16, Sum, 2, 4)
BULK(f16_sum_4, F16, Sum, 4, 2)
BULK(f16_sum_8, F16, Sum, 8, 1)
BULK(bf16_sum_2, Bf16, Sum, 2, 4)
BULK(bf16_sum_4, Bf16, Sum, 4, 2)
BULK(bf16_sum_8, Bf16, Sum, 8, 1)
BULK(f32_other, F32, Other, 8, 1)
BULK(f16_other, F16, Other, 8, 1)
BULK(bf16_other, Bf16, Other, 8, 1)
BULK(i32_other, I32, Other, 8, 1)

// ---- Moves ----

// The same bytes for all targets: `whole` units of so many bytes from `begin` on, four of a thread on their way before the first is stored.
template <class Unit>
WEFT_DEVICE void fan_out(u64 from, const volatile Targets &targets, u64 begin, u64 whole) {
    constexpr u32 DEPTH = 4;
    u64 stride = (u64)gridDim.x * THREADS;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < whole; i += stride * DEPTH) {
        Unit got[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            if (i + d * stride < whole) got[d] = load_unit<Unit>(from + begin + (i + d * stride) * sizeof(Unit));
        }
        for (u32 target = 0; target < targets.count; target++) {
            u64 to = targets.to[target] + begin + i * sizeof(Unit);
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++) {
                if (i + d * stride < whole) *(Unit *)(to + d * stride * sizeof(Unit)) = got[d];
            }
        }
    }
}

// To each target its own bytes: those for rank r lie `r * bytes` after `from`. One unit for each rank is on its way before the first is stored, or several where there are few ranks.
template <class Unit, u32 WIDTH, u32 DEPTH>
WEFT_DEVICE void deal_out(u64 from, const volatile Places &places, u32 ranks, u64 to_at, u64 bytes) {
    u64 whole = bytes / sizeof(Unit), stride = (u64)gridDim.x * THREADS;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < whole; i += stride * DEPTH) {
        Unit got[DEPTH][WIDTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
#pragma unroll
            for (u32 rank = 0; rank < WIDTH; rank++) {
                if (rank < ranks && i + d * stride < whole) got[d][rank] = load_unit<Unit>(from + rank * bytes + (i + d * stride) * sizeof(Unit));
            }
        }
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
#pragma unroll
            for (u32 rank = 0; rank < WIDTH; rank++) {
                if (rank < ranks && i + d * stride < whole) *(Unit *)(places.out[rank] + to_at + (i + d * stride) * sizeof(Unit)) = got[d][rank];
            }
        }
    }
}

// All-gather, all-to-all and broadcast of bytes, by packets.
KERNEL weft_move_packets(const __grid_constant__ Team team, const __grid_constant__ Call call) {
    __shared__ Places places;
    Rank me(team, blockIdx.y);
    const Local &local = call.locals[blockIdx.y];
    const u8 *in = (const u8 *)local.in;
    u8 *out = (u8 *)local.out;
    u64 bytes = call.count, units = (bytes + 7) / 8;
    u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, stride = (u64)gridDim.x * THREADS;
    Turn turn(me);
    me.begin();
    if (call.kind == BROADCAST) {
        bool root = me.rank == call.root;
        const u8 *from = packets(me, me.rank, turn, call.root);
        for (u64 unit = first; unit < units; unit += stride) {
            u64 value;
            if (root) {
                value = load_eight(in, unit * 8, bytes, 1);
                send_to_all(me, turn, unit * 16, value);
            } else {
                u64 a, b;
                if (!look_until(me, call.root, [&] {
                        load_pair(from + unit * 16, a, b);
                        return are_marked(a, b, turn.flag);
                    }))
                    break;
                value = eight_of(a, b);
            }
            store_eight(out, unit * 8, bytes, 1, value);
        }
        // Those that only receive are heard of too: every call is a meeting.
        if (blockIdx.x == 0) meet_at_start(me, turn, local, places);
    } else if (!me.failed) {
        bool same = call.kind == ALL_GATHER;
        for (u64 unit = first; unit < units; unit += stride) {
            if (same) {
                send_to_all(me, turn, unit * 16, load_eight(in, unit * 8, bytes, 1));
            } else {
                send_parts(me, turn, in, unit, bytes, bytes * team.ranks, 1);
            }
        }
        u64 own_at = same ? 0 : me.rank * bytes;
        for (u64 unit = first; unit < units; unit += stride) {
            u64 eight[RANKS_MAX] = {};
            set_own(eight, me.rank, load_eight(in, own_at + unit * 8, own_at + bytes, 1));
            if (!receive(me, turn, unit * 16, eight)) break;
#pragma unroll
            for (u32 peer = 0; peer < RANKS_MAX; peer++) {
                if (peer < team.ranks) store_eight(out, peer * bytes + unit * 8, (peer + 1) * bytes, 1, eight[peer]);
            }
        }
    }
    end_call(me);
}

// The same in bulk. All-gather: everybody writes its input to all outputs. Broadcast: everybody reads its part of the root's input, and writes it to all outputs, so that all
// ranks share the work. All-to-all: everybody writes to every output what is meant for it.
KERNEL weft_move_bulk(const __grid_constant__ Team team, const __grid_constant__ Call call) {
    __shared__ Places places;
    __shared__ Targets targets;
    Rank me(team, blockIdx.y);
    u32 ranks = team.ranks;
    Turn turn(me);
    me.begin();
    if (meet_at_start(me, turn, call.locals[blockIdx.y], places)) {
        u64 bytes = call.count;
        if (call.kind == ALL_TO_ALL) {
            u64 from = places.in[me.rank], to_at = me.rank * bytes;
            u64 askew = from | bytes;
#pragma unroll 1
            for (u32 rank = 0; rank < ranks; rank++) askew |= places.out[rank];
            if (askew % 16 != 0) {
                if (askew % 4 == 0) {
                    deal_out<u32, 8, 1>(from, places, ranks, to_at, bytes);
                } else if (askew % 2 == 0) {
                    deal_out<u16, 8, 1>(from, places, ranks, to_at, bytes);
                } else {
                    deal_out<u8, 8, 1>(from, places, ranks, to_at, bytes);
                }
            } else if (ranks <= 2) {
                deal_out<uint4, 2, 4>(from, places, ranks, to_at, bytes);
            } else if (ranks <= 4) {
                deal_out<uint4, 4, 2>(from, places, ranks, to_at, bytes);
            } else {
                deal_out<uint4, 8, 1>(from, places, ranks, to_at, bytes);
            }
        } else {
            bool gather = call.kind == ALL_GATHER;
            u64 part = (bytes / ranks + 15) / 16 * 16 + 16;
            u64 at = gather ? 0 : min(me.rank * part, bytes);
            u64 left = gather ? bytes : min(part, bytes - at);
            u64 from = places.in[gather ? me.rank : call.root] + at;
            if (threadIdx.x == 0) {
                u32 count = 0;
                u64 askew = from;
#pragma unroll 1
                for (u32 step = 0; step < ranks; step++) {
                    u64 to = places.out[(me.rank + step) % ranks] + (gather ? me.rank * bytes : at);
                    // In place, what is there already is left there.
                    if (to == from) continue;
                    askew |= to;
                    targets.to[count++] = to;
                }
                targets.count = count;
                targets.askew = (u32)askew & 15;
            }
            __syncthreads();
            u32 askew = targets.askew;
            u64 done = 0;
            if (askew % 16 == 0) {
                fan_out<uint4>(from, targets, 0, left / 16);
                done = left / 16 * 16;
            } else if (askew % 4 == 0) {
                fan_out<u32>(from, targets, 0, left / 4);
                done = left / 4 * 4;
            } else if (askew % 2 == 0) {
                fan_out<u16>(from, targets, 0, left / 2);
                done = left / 2 * 2;
            }
            fan_out<u8>(from, targets, done, left - done);
        }
        meet_at_end(me, turn);
    }
    end_call(me);
}

// ---- Measures ----

// Two ranks of one launch hand a word to and fro, `rounds` times, and tell how many nanoseconds it took: with `bare`, the words alone; else as signals that carry memory with them.
extern "C" __global__ void weft_round_trip(const __grid_constant__ Team team, u32 rounds, u32 bare, u64 *took_ns) {
    Rank me(team, blockIdx.y);
    u64 *word = me.signals();
    u32 peer = me.rank ^ 1;
    // Rank 0's word is written by rank 1 alone, and by it only later: both begin from the same number, whoever comes first.
    u64 base = load_relaxed(me.of(0, word)), began = 0;
    for (u32 round = 1; round <= rounds; round++) {
        // The first round is for both to come.
        if (round == 2) began = clock_ns();
        for (u32 turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (me.rank == 0)) {
                if (bare) {
                    store_relaxed(me.of(peer, word), base + round);
                } else {
                    signal<Thread>(me, peer, word, base + round);
                }
            } else if (bare) {
                if (!look_until(me, peer, [&] { return load_relaxed(word) >= base + round; })) return;
            } else if (!wait<Thread>(me, word, base + round, peer)) {
                return;
            }
        }
    }
    if (me.rank == 0) *took_ns = clock_ns() - began;
}
