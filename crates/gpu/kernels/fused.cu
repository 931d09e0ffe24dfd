// All-reduce, residual and RMSNorm in one kernel, with or without rounding to eight bits.
//
// A row is the hidden state of one token. A block sums it over the ranks, adds the residual, keeps it in shared memory while it sums the squares, and writes what is normalised: nothing between the inputs and the
// results goes through memory. Where there are fewer rows than blocks, several blocks share one, and tell each other their sums of squares.
//
// By packets, everybody sends all its rows to all, and deals with all of them: for few rows. In bulk, rank r deals with rows r, r + ranks, ...: it reads them from all ranks, and
// writes residual and result to all. Sums are made in f32 in the order of the ranks, the residual last, and rounded once; the norm is that of the rounded row, so that it is the norm of what the next
// layer finds as its residual.

#include "rows.cuh"

using namespace weft;

enum Output : u32 { SAME = 0, E4M3_STATIC = 1, E4M3_BY_ROW = 2 };

// The buffers of one rank, and how other ranks find those that they reach. The same fields as `FusedLocal` in `fused.rs`.
struct FusedLocal {
    u64 in, residual, residual_out, out, scales;
    u64 in_reference, residual_out_reference, out_reference, scales_reference;
};

// The same fields as `FusedView` in `fused.rs`.
struct Fused {
    FusedLocal locals[RANKS_MAX];
    u64 weight[RANKS_MAX];
    u32 rows;
    u32 hidden;
    u32 output;
    float epsilon;
    float scale;
    // Blocks that share a row.
    u32 parts;
};


// As the host has it.
static_assert(sizeof(FusedLocal) == 72 && sizeof(Fused) == 8 * 72 + 64 + 24, "the view of a call");

extern __shared__ uint4 kept[];

// Where one rank's results are, or those of all.
struct Results {
    u64 residual_out[RANKS_MAX];
    u64 out[RANKS_MAX];
    u64 scales[RANKS_MAX];
    u32 count;
};

// A few words of a row: two of packets, four of a vector.
template <u32 WORDS>
struct alignas(WORDS * 4) Few {
    u32 word[WORDS];
};

template <u32 WORDS>
WEFT_DEVICE Few<WORDS> load_few(u64 from);

template <>
WEFT_DEVICE Few<2> load_few<2>(u64 from) {
    uint2 v = *(const uint2 *)from;
    return Few<2>{{v.x, v.y}};
}

template <>
WEFT_DEVICE Few<4> load_few<4>(u64 from) {
    uint4 v = *(const uint4 *)from;
    return Few<4>{{v.x, v.y, v.z, v.w}};
}

WEFT_DEVICE void store_few(u64 to, const Few<2> &few) { *(uint2 *)to = make_uint2(few.word[0], few.word[1]); }
WEFT_DEVICE void store_few(u64 to, const Few<4> &few) { *(uint4 *)to = make_uint4(few.word[0], few.word[1], few.word[2], few.word[3]); }

template <class E, u32 WORDS>
WEFT_DEVICE float squares_of(const Few<WORDS> &few) {
    float sum = 0;
#pragma unroll
    for (u32 w = 0; w < WORDS; w++) {
        float low = E::widen(few.word[w], 0), high = E::widen(few.word[w], 1);
        sum += low * low;
        sum += high * high;
    }
    return sum;
}

// What the kept row becomes, in f32, by pairs.
template <class E, u32 WORDS, class Take>
WEFT_DEVICE void normalised(const Few<WORDS> &row, const Few<WORDS> &weight, float inverse, Take take) {
#pragma unroll
    for (u32 w = 0; w < WORDS; w++) {
        take(w, E::widen(row.word[w], 0) * inverse * E::widen(weight.word[w], 0), E::widen(row.word[w], 1) * inverse * E::widen(weight.word[w], 1));
    }
}

// What of a row a thread has: every so many units from the first on, kept one after the other.
template <u32 WORDS>
struct Mine {
    u32 first, stride, units;
    // Of the first unit: on its way from the beginning.
    Few<WORDS> weight;
    u64 weights;

    WEFT_DEVICE Mine(const Fused &call, const Share &share) : first(share.part * THREADS + threadIdx.x), stride(share.parts * THREADS), units(call.hidden / (2 * WORDS)), weight(), weights(call.weight[blockIdx.y]) {
        if (first < units) weight = load_few<WORDS>(weights + first * sizeof(Few<WORDS>));
    }
    WEFT_DEVICE Few<WORDS> weight_of(u32 unit) const { return unit == first ? weight : load_few<WORDS>(weights + unit * sizeof(Few<WORDS>)); }
    static WEFT_DEVICE Few<WORDS> *own() { return (Few<WORDS> *)kept + threadIdx.x; }
};

// Normalises the row that is kept, of whose squares each thread has summed its own, and writes it to all results. Each thread reads what it kept itself. False when a thread has failed.
template <class E, u32 WORDS>
WEFT_DEVICE bool finish_row(Rank &me, const Turn &at_call, const Fused &call, const Share &share, const Mine<WORDS> &mine, const volatile Results &results, Partials &partials, u32 &turn, u32 row, float squares, bool fine) {
    float sum = over_row(me, at_call, share, partials, turn, squares, fine, Add());
    if (!fine) return false;
    float inverse = rsqrtf(sum / (float)call.hidden + call.epsilon);
    const Few<WORDS> *own = mine.own();
    if (call.output == SAME) {
        for (u32 unit = mine.first; unit < mine.units; unit += mine.stride, own += THREADS) {
            Few<WORDS> result;
            normalised<E, WORDS>(*own, mine.weight_of(unit), inverse, [&](u32 w, float low, float high) { result.word[w] = E::narrow_one(low) | E::narrow_one(high) << 16; });
            u64 at = ((u64)row * mine.units + unit) * sizeof(Few<WORDS>);
            for (u32 target = 0; target < results.count; target++) store_few(results.out[target] + at, result);
        }
        return true;
    }
    float scale = call.scale;
    if (call.output == E4M3_BY_ROW) {
        float most = 0;
        for (u32 unit = mine.first; unit < mine.units; unit += mine.stride, own += THREADS) {
            normalised<E, WORDS>(*own, mine.weight_of(unit), inverse, [&](u32, float low, float high) { most = Most()(most, Most()(fabsf(low), fabsf(high))); });
        }
        own = mine.own();
        most = over_row(me, at_call, share, partials, turn, most, fine, Most());
        if (!fine) return false;
        // Never nothing, so that a row of zeros has a scale.
        scale = fmaxf(most / E4M3_MAX, 1.0f / (E4M3_MAX * 512.0f));
        if (share.part == 0 && threadIdx.x < results.count) *(float *)(results.scales[threadIdx.x] + (u64)row * sizeof(float)) = scale;
    }
    float back = 1.0f / scale;
    for (u32 unit = mine.first; unit < mine.units; unit += mine.stride, own += THREADS) {
        u64 bytes = 0;
        normalised<E, WORDS>(*own, mine.weight_of(unit), inverse, [&](u32 w, float low, float high) {
            bytes |= (u64)(narrow_e4m3(low * back) | narrow_e4m3(high * back) << 8) << 16 * w;
        });
        u64 at = ((u64)row * mine.units + unit) * (2 * WORDS);
        for (u32 target = 0; target < results.count; target++) {
            if (WORDS == 4) {
                *(u64 *)(results.out[target] + at) = bytes;
            } else {
                *(u32 *)(results.out[target] + at) = (u32)bytes;
            }
        }
    }
    return true;
}

// One word of every rank and of the residual becomes one. The residual comes last.
template <class E, u32 WIDTH, class Word>
WEFT_DEVICE u32 sum_words(u32 ranks, u32 residual, Word word) {
    float wide[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        wide[half] = E::widen(word(0), half);
#pragma unroll
        for (u32 rank = 1; rank < WIDTH; rank++) {
            if (rank < ranks) wide[half] = __fadd_rn(wide[half], E::widen(word(rank), half));
        }
        wide[half] = __fadd_rn(wide[half], E::widen(residual, half));
    }
    return E::narrow(wide);
}

template <class E>
WEFT_DEVICE void fused_packets(const Team &team, const Fused &call) {
    __shared__ Partials partials;
    __shared__ Results results;
    Rank me(team, blockIdx.y);
    const FusedLocal &local = call.locals[blockIdx.y];
    const Share share = {call.parts, blockIdx.x % call.parts};
    const u32 begin = blockIdx.x / call.parts, step = gridDim.x / call.parts;
    const Mine<2> mine(call, share);
    u32 sums = 0;
    // What is needed first, and the number of the call, are on their way together.
    u64 first = 0, first_residual = 0;
    bool some = begin < call.rows && mine.first < mine.units;
    if (some) {
        u64 at = ((u64)begin * mine.units + mine.first) * 8;
        first = *(const u64 *)(local.in + at);
        first_residual = *(const u64 *)(local.residual + at);
    }
    if (threadIdx.x == 0) {
        results.out[0] = local.out;
        results.scales[0] = local.scales;
        results.count = 1;
    }
    Turn turn(me);
    bool fine = me.begin();
    for (u32 row = begin; fine && row < call.rows; row += step) {
        for (u32 unit = mine.first; unit < mine.units; unit += mine.stride) {
            u64 at = (u64)row * mine.units + unit;
            send_to_all(me, turn, at * 16, row == begin && unit == mine.first ? first : *(const u64 *)(local.in + at * 8));
        }
    }
    for (u32 row = begin; row < call.rows; row += step) {
        float squares = 0;
        Few<2> *own = mine.own();
        for (u32 unit = mine.first; fine && unit < mine.units; unit += mine.stride, own += THREADS) {
            u64 at = (u64)row * mine.units + unit;
            bool known = row == begin && unit == mine.first;
            u64 eight[RANKS_MAX] = {};
            u64 residual = known ? first_residual : *(const u64 *)(local.residual + at * 8);
            set_own(eight, me.rank, known ? first : *(const u64 *)(local.in + at * 8));
            fine = receive(me, turn, at * 16, eight);
            if (!fine) break;
            Few<2> sum;
            sum.word[0] = sum_words<E, RANKS_MAX>(team.ranks, (u32)residual, [&](u32 rank) { return (u32)eight[rank]; });
            sum.word[1] = sum_words<E, RANKS_MAX>(team.ranks, (u32)(residual >> 32), [&](u32 rank) { return (u32)(eight[rank] >> 32); });
            store_few(local.residual_out + at * 8, sum);
            *own = sum;
            squares += squares_of<E, 2>(sum);
        }
        fine = finish_row<E, 2>(me, turn, call, share, mine, results, partials, sums, row, squares, fine);
        if (!fine) break;
    }
    end_call(me);
}

// Sums what a thread has of a row over the ranks, keeps it, and writes it to all as the residual. AT_ONCE units of WIDTH ranks are on their way before the first is used. Tells the sum of the squares.
template <class E, u32 WIDTH, u32 AT_ONCE>
WEFT_DEVICE float sum_row(const Mine<4> &mine, u32 ranks, const volatile u64 *in, u64 residual, const volatile Results &results, u32 row) {
    float squares = 0;
    Few<4> *own = mine.own();
    for (u32 unit = mine.first; unit < mine.units; unit += AT_ONCE * mine.stride, own += AT_ONCE * THREADS) {
        u64 at = ((u64)row * mine.units + unit) * 16;
        uint4 got[AT_ONCE][WIDTH], last[AT_ONCE];
#pragma unroll
        for (u32 a = 0; a < AT_ONCE; a++) {
            u64 here = at + (u64)a * mine.stride * 16;
            bool there = a == 0 || unit + a * mine.stride < mine.units;
#pragma unroll
            for (u32 rank = 0; rank < WIDTH; rank++) {
                got[a][rank] = make_uint4(0, 0, 0, 0);
                if (rank < ranks && there) got[a][rank] = load_vector(in[rank] + here);
            }
            last[a] = make_uint4(0, 0, 0, 0);
            if (there) last[a] = load_vector(residual + here);
        }
#pragma unroll
        for (u32 a = 0; a < AT_ONCE; a++) {
            if (a > 0 && unit + a * mine.stride >= mine.units) break;
            Few<4> sum;
#pragma unroll
            for (u32 w = 0; w < 4; w++) sum.word[w] = sum_words<E, WIDTH>(ranks, word_of(last[a], w), [&](u32 rank) { return word_of(got[a][rank], w); });
            own[a * THREADS] = sum;
            squares += squares_of<E, 4>(sum);
            u64 here = at + (u64)a * mine.stride * 16;
            for (u32 target = 0; target < ranks; target++) store_few(results.residual_out[target] + here, sum);
        }
    }
    return squares;
}

template <class E>
WEFT_DEVICE void fused_bulk(const Team &team, const Fused &call) {
    __shared__ Partials partials;
    __shared__ Results results;
    __shared__ Told<4> told;
    __shared__ u64 in[RANKS_MAX];
    Rank me(team, blockIdx.y);
    const FusedLocal &local = call.locals[blockIdx.y];
    const u32 ranks = team.ranks;
    const Share share = {call.parts, blockIdx.x % call.parts};
    const u32 begin = blockIdx.x / call.parts * ranks + me.rank, step = gridDim.x / call.parts * ranks;
    const Mine<4> mine(call, share);
    u32 sums = 0;
    if (threadIdx.x == 0) {
        u64 *own = told.of[me.rank];
        own[0] = local.in_reference;
        own[1] = local.residual_out_reference;
        own[2] = local.out_reference;
        own[3] = local.scales_reference;
    }
    Turn turn(me);
    bool fine = tell(me, turn, told, me.begin());
    if (hear(me, turn, told, fine)) {
        if (threadIdx.x < ranks) {
            // Not all ranks begin with the same target; this rank's own is the first.
            u32 peer = threadIdx.x, nth = (peer + ranks - me.rank) % ranks;
            bool own = peer == me.rank;
            in[peer] = own ? local.in : resolve(me, peer, told.of[peer][0]);
            results.residual_out[nth] = own ? local.residual_out : resolve(me, peer, told.of[peer][1]);
            results.out[nth] = own ? local.out : resolve(me, peer, told.of[peer][2]);
            results.scales[nth] = own ? local.scales : resolve(me, peer, told.of[peer][3]);
            results.count = ranks;
        }
        __syncthreads();
        fine = true;
        for (u32 row = begin; fine && row < call.rows; row += step) {
            float squares = 0;
            if (ranks <= 2) {
                squares = sum_row<E, 2, 3>(mine, ranks, in, local.residual, results, row);
            } else if (ranks <= 4) {
                squares = sum_row<E, 4, 2>(mine, ranks, in, local.residual, results, row);
            } else {
                squares = sum_row<E, 8, 1>(mine, ranks, in, local.residual, results, row);
            }
            fine = finish_row<E, 4>(me, turn, call, share, mine, results, partials, sums, row, squares, true);
        }
        meet_at_end(me, turn);
    }
    end_call(me);
}

KERNEL weft_fused_packets_f16(const __grid_constant__ Team team, const __grid_constant__ Fused call) { fused_packets<F16>(team, call); }
KERNEL weft_fused_packets_bf16(const __grid_constant__ Team team, const __grid_constant__ Fused call) { fused_packets<Bf16>(team, call); }
KERNEL weft_fused_bulk_f16(const __grid_constant__ Team team, const __grid_constant__ Fused call) { fused_bulk<F16>(team, call); }
KERNEL weft_fused_bulk_bf16(const __grid_constant__ Team team, const __grid_constant__ Fused call) { fused_bulk<Bf16>(team, call); }
