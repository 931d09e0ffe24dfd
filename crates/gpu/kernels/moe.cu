// Tokens to the ranks of their experts, and what the experts made of them back.
//
// Dispatch writes rows into the memory of the ranks that they are for, at places that every rank works out for itself, and keeps the places: combine reads the rows of a token from there, and sums them. Each row of the
// input is read once. Two layouts of what a rank receives. *Slots*: for each of its experts and each source a fixed number of rows, so that a source needs to know nothing of the others: for few tokens. *Compact*: a
// token once for a rank, however many of its experts are there, in the order of sources and their tokens; sources tell each other first how many rows they have for whom.
//
// A block has a range of the rank's tokens, the same in every call. A warp takes a piece of a row at a time. The order of everything is fixed, and no result depends on who came first.

#include "rows.cuh"

using namespace weft;

// The buffers of one rank. The same fields as `DispatchLocal` in `moe.rs`.
struct DispatchLocal {
    u64 in, experts, weights, places;
    u64 rows, scales, counts, row_experts, row_weights;
    u64 rows_reference, scales_reference, row_experts_reference, row_weights_reference;
    // A word of the host's, for a call that was void because somebody's rows would not have fitted.
    u64 overflow;
    u64 tokens;
};

// The same fields as `DispatchView` in `moe.rs`.
struct Dispatch {
    DispatchLocal locals[RANKS_MAX];
    // 2^32 / experts of a rank, rounded up.
    u64 owner_factor;
    u32 hidden;
    u32 experts;
    u32 experts_a_rank;
    u32 top_k;
    u32 tokens_max;
    u32 capacity;
    u32 narrow;
    u32 unused;
};

// The same fields as `CombineLocal` and `CombineView` in `moe.rs`.
struct CombineLocal {
    u64 in, in_reference, places, weights, out, tokens;
};

struct Combine {
    CombineLocal locals[RANKS_MAX];
    u32 hidden;
    u32 width;
};

// As the host has them.
static_assert(sizeof(Dispatch) == 8 * 120 + 40 && sizeof(Combine) == 8 * 48 + 8, "the views of calls");

static constexpr u32 TOP_K_MAX = 16;
static constexpr u32 EXPERTS_MAX = 1024;
static constexpr u32 SLOT_TOKENS_MAX = 256;
// Tokens of a block whose places are in shared memory at a time.
static constexpr u32 TOKENS_AT_ONCE = 128;
// A place: the rank in the upper bits, and the row there.
static constexpr u32 ROW_BITS = 28;
static constexpr u32 NOWHERE = 0xffffffffu;
// Vectors of sixteen bytes that a lane has on their way, and those of a piece.
static constexpr u32 DEPTH = 4;
static constexpr u32 PIECE = DEPTH * LANES;
// What a scale is for: 128 elements, sixteen vectors.
static constexpr u32 SCALED_VECTORS = 16;
// After what `exchange` uses of the packets: how many rows are for each expert.
static constexpr u64 COUNTS_AT = (u64)BLOCKS_MAX * 8 * 16;

static constexpr u32 NO_EXPERT = 0x7fff;
static constexpr u32 AGAIN = 0x8000;

struct Routes {
    u32 of[TOKENS_AT_ONCE][TOP_K_MAX];
};

// Where each rank's rows and scales are.
struct Bases {
    u64 rows[RANKS_MAX];
    u64 scales[RANKS_MAX];
    u64 row_experts[RANKS_MAX];
    u64 row_weights[RANKS_MAX];
};

WEFT_DEVICE u32 owner(const Dispatch &call, u32 expert) { return (u32)((u64)expert * call.owner_factor >> 32); }

// The experts of a token; whatever is no expert is -1.
WEFT_DEVICE void load_experts(const Dispatch &call, u64 experts, u32 token, int (&of)[TOP_K_MAX]) {
    const int *from = (const int *)experts + (u64)token * call.top_k;
    if (call.top_k % 4 == 0) {
#pragma unroll
        for (u32 four = 0; four < TOP_K_MAX / 4; four++) {
            int4 v = make_int4(-1, -1, -1, -1);
            if (four * 4 < call.top_k) v = ((const int4 *)from)[four];
            of[four * 4] = v.x;
            of[four * 4 + 1] = v.y;
            of[four * 4 + 2] = v.z;
            of[four * 4 + 3] = v.w;
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < TOP_K_MAX; k++) of[k] = k < call.top_k ? from[k] : -1;
    }
#pragma unroll
    for (u32 k = 0; k < TOP_K_MAX; k++) {
        if ((u32)of[k] >= call.experts) of[k] = -1;
    }
}

// A bit for each rank that has an expert of the token.
WEFT_DEVICE u32 ranks_of(const Dispatch &call, const int (&experts)[TOP_K_MAX]) {
    u32 ranks = 0;
#pragma unroll
    for (u32 k = 0; k < TOP_K_MAX; k++) {
        if (experts[k] >= 0) ranks |= 1u << owner(call, (u32)experts[k]);
    }
    return ranks;
}

// Writes rows to their places, a warp a piece of one at a time: `count` tokens from `first` on, each with at most `width` places.
template <bool NARROW>
WEFT_DEVICE void move_rows(const Dispatch &call, u64 in, u32 first, u32 count, u32 width, const volatile Routes &places, const volatile Bases &bases) {
    const u32 vectors = call.hidden / 8, pieces = (vectors + PIECE - 1) / PIECE;
    const u32 lane = threadIdx.x % LANES;
    for (u32 item = threadIdx.x / LANES; item < count * pieces; item += THREADS / LANES) {
        u32 token = item / pieces, begin = (item - token * pieces) * PIECE + lane;
        u64 from = in + ((u64)(first + token) * vectors + begin) * 16;
        uint4 got[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            got[d] = make_uint4(0, 0, 0, 0);
            if (begin + d * LANES < vectors) got[d] = load_vector(from + d * LANES * 16);
        }
        if (!NARROW) {
            for (u32 k = 0; k < width; k++) {
                u32 place = places.of[token][k];
                if (place == NOWHERE) continue;
                u64 to = bases.rows[place >> ROW_BITS] + ((u64)(place & ((1u << ROW_BITS) - 1)) * vectors + begin) * 16;
#pragma unroll
                for (u32 d = 0; d < DEPTH; d++) {
                    if (begin + d * LANES < vectors) store_vector(to + d * LANES * 16, got[d]);
                }
            }
        } else {
            u64 bytes[DEPTH];
            float scale[DEPTH];
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++) {
                float most = 0;
#pragma unroll
                for (u32 w = 0; w < 4; w++) most = Most()(most, Most()(fabsf(Bf16::widen(word_of(got[d], w), 0)), fabsf(Bf16::widen(word_of(got[d], w), 1))));
#pragma unroll
                for (u32 far = SCALED_VECTORS / 2; far > 0; far /= 2) most = Most()(most, __shfl_xor_sync(0xffffffffu, most, far));
                most = fmaxf(most, 1e-30f);
                scale[d] = most / E4M3_MAX;
                float back = E4M3_MAX / most;
                bytes[d] = 0;
#pragma unroll
                for (u32 w = 0; w < 4; w++) {
                    u32 word = word_of(got[d], w);
                    u32 two = narrow_e4m3(Bf16::widen(word, 0) * back) | narrow_e4m3(Bf16::widen(word, 1) * back) << 8;
                    bytes[d] |= (u64)two << 16 * w;
                }
            }
            for (u32 k = 0; k < width; k++) {
                u32 place = places.of[token][k];
                if (place == NOWHERE) continue;
                u64 at = (u64)(place & ((1u << ROW_BITS) - 1)) * vectors + begin;
                u64 to = bases.rows[place >> ROW_BITS] + at * 8, scales = bases.scales[place >> ROW_BITS];
#pragma unroll
                for (u32 d = 0; d < DEPTH; d++) {
                    if (begin + d * LANES >= vectors) continue;
                    *(u64 *)(to + d * LANES * 8) = bytes[d];
                    if (lane % SCALED_VECTORS == 0) *(float *)(scales + (at + d * LANES) / SCALED_VECTORS * 4) = scale[d];
                }
            }
        }
    }
}

WEFT_DEVICE void move_all(const Dispatch &call, u64 in, u32 first, u32 count, u32 width, const volatile Routes &places, const volatile Bases &bases) {
    if (call.narrow) {
        move_rows<true>(call, in, first, count, width, places, bases);
    } else {
        move_rows<false>(call, in, first, count, width, places, bases);
    }
}

// Two counts of what this rank has for experts of a peer.
WEFT_DEVICE u64 counts_for(const Dispatch &call, const volatile u32 *own, u32 peer, u32 pair) {
    u32 at = peer * call.experts_a_rank + 2 * pair;
    return own[at] | (u64)(2 * pair + 1 < call.experts_a_rank ? own[at + 1] : 0) << 32;
}

// One block of every rank tells every other how many rows it has for each of its experts.
WEFT_DEVICE void tell_counts(const Rank &me, const Turn &turn, const Dispatch &call, const volatile u32 *own) {
    const u32 pairs = (call.experts_a_rank + 1) / 2;
    for (u32 i = threadIdx.x; i < pairs * me.team.ranks; i += THREADS) {
        u32 peer = i / pairs, pair = i % pairs;
        if (peer != me.rank) store_packets(packets(me, peer, turn, me.rank) + COUNTS_AT + pair * 16, counts_for(call, own, peer, pair), turn.flag);
    }
}

// And writes what it is told: of each source (`apart`), or of all together.
WEFT_DEVICE void take_counts(Rank &me, const Turn &turn, const Dispatch &call, const volatile u32 *own, u64 counts, bool apart) {
    const u32 ranks = me.team.ranks, each = call.experts_a_rank;
    u32 *to = (u32 *)counts;
    for (u32 pair = threadIdx.x; pair < (each + 1) / 2; pair += THREADS) {
        u64 eight[RANKS_MAX] = {};
        set_own(eight, me.rank, counts_for(call, own, me.rank, pair));
        if (!receive(me, turn, COUNTS_AT + pair * 16, eight)) return;
        u32 low = 0, high = 0;
#pragma unroll
        for (u32 source = 0; source < RANKS_MAX; source++) {
            if (source >= ranks) break;
            if (apart) {
                to[2 * pair * ranks + source] = (u32)eight[source];
                if (2 * pair + 1 < each) to[(2 * pair + 1) * ranks + source] = (u32)(eight[source] >> 32);
            }
            low += (u32)eight[source];
            high += (u32)(eight[source] >> 32);
        }
        if (!apart) {
            to[2 * pair] = low;
            if (2 * pair + 1 < each) to[2 * pair + 1] = high;
        }
    }
}

template <u32 EIGHTS>
WEFT_DEVICE void find_bases(const Rank &me, const DispatchLocal &local, const Told<EIGHTS> &told, Bases &bases) {
    u32 peer = threadIdx.x;
    if (peer >= me.team.ranks) return;
    bool own = peer == me.rank;
    bases.rows[peer] = own ? local.rows : resolve(me, peer, told.of[peer][0]);
    bases.scales[peer] = own ? local.scales : resolve(me, peer, told.of[peer][1]);
    bases.row_experts[peer] = own ? local.row_experts : resolve(me, peer, told.of[peer][2]);
    bases.row_weights[peer] = own ? local.row_weights : resolve(me, peer, told.of[peer][3]);
}

KERNEL weft_moe_slots(const __grid_constant__ Team team, const __grid_constant__ Dispatch call) {
    __shared__ Routes places;
    __shared__ Bases bases;
    __shared__ Told<2> told;
    __shared__ u16 entries[SLOT_TOKENS_MAX * TOP_K_MAX];
    __shared__ u32 counts[EXPERTS_MAX];
    Rank me(team, blockIdx.y);
    const DispatchLocal &local = call.locals[blockIdx.y];
    const u32 ranks = team.ranks, top_k = call.top_k, tokens = (u32)local.tokens;
    if (threadIdx.x == 0) {
        told.of[me.rank][0] = local.rows_reference;
        told.of[me.rank][1] = local.scales_reference;
    }
    Turn turn(me);
    bool fine = tell(me, turn, told, me.begin());
    for (u32 i = threadIdx.x; i < call.experts; i += THREADS) counts[i] = 0;
    // While the others come: which expert each entry is, and whether the token has had it before.
    const int *experts = (const int *)local.experts;
    for (u32 i = threadIdx.x; i < tokens * top_k; i += THREADS) {
        u32 expert = (u32)experts[i], first = i / top_k * top_k, again = 0;
        for (u32 j = first; j < i; j++) again |= (u32)experts[j] == expert ? AGAIN : 0;
        entries[i] = (u16)(expert < call.experts ? expert | again : NO_EXPERT);
    }
    __syncthreads();
    const u32 chunk = (tokens + gridDim.x - 1) / gridDim.x;
    const u32 begin = min(blockIdx.x * chunk, tokens), end = min(begin + chunk, tokens);
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < tokens * top_k; i += THREADS) {
            if (entries[i] < call.experts) atomicAdd(&counts[entries[i]], 1);
        }
        __syncthreads();
        if (fine) tell_counts(me, turn, call, counts);
    }
    bool here = false;
    for (u32 first = begin; first < end || !here; first += TOKENS_AT_ONCE) {
        u32 count = min(TOKENS_AT_ONCE, end - first);
        // A warp for each entry counts the tokens before it that have the same expert.
        for (u32 pair = threadIdx.x / LANES; pair < count * top_k; pair += THREADS / LANES) {
            u32 entry = first * top_k + pair, before = 0;
            u32 expert = entries[entry] & ~AGAIN;
            for (u32 other = threadIdx.x % LANES; other < entry / top_k * top_k; other += LANES) before += entries[other] == expert;
            before = __reduce_add_sync(0xffffffffu, before);
            if (threadIdx.x % LANES == 0) {
                u32 to = expert == NO_EXPERT ? 0 : owner(call, expert);
                u32 row = ((expert - to * call.experts_a_rank) * ranks + me.rank) * call.tokens_max + before;
                u32 place = expert == NO_EXPERT ? NOWHERE : to << ROW_BITS | row;
                places.of[pair / top_k][pair % top_k] = entries[entry] & AGAIN ? NOWHERE : place;
                ((u32 *)local.places)[entry] = place;
            }
        }
        if (!here) {
            here = true;
            fine = hear(me, turn, told, fine);
            if (!fine) break;
            if (threadIdx.x < ranks) {
                u32 peer = threadIdx.x;
                bool own = peer == me.rank;
                bases.rows[peer] = own ? local.rows : resolve(me, peer, told.of[peer][0]);
                bases.scales[peer] = own ? local.scales : resolve(me, peer, told.of[peer][1]);
            }
        }
        __syncthreads();
        move_all(call, local.in, first, count, top_k, places, bases);
        __syncthreads();
    }
    if (fine) {
        if (blockIdx.x == 0) take_counts(me, turn, call, counts, local.counts, true);
        meet_at_end(me, turn);
    }
    end_call(me);
}

KERNEL weft_moe_compact(const __grid_constant__ Team team, const __grid_constant__ Dispatch call) {
    __shared__ Routes places;
    __shared__ Bases bases;
    __shared__ Told<8> told;
    __shared__ u32 counts[EXPERTS_MAX];
    // Rows of this block's tokens for each rank; of all of this rank's tokens; of those before this block's.
    __shared__ u32 chunk_rows[RANKS_MAX];
    __shared__ u32 rows[RANKS_MAX];
    __shared__ u32 next[RANKS_MAX];
    __shared__ u32 of_warp[TOKENS_AT_ONCE / LANES][RANKS_MAX];
    Rank me(team, blockIdx.y);
    const DispatchLocal &local = call.locals[blockIdx.y];
    const u32 ranks = team.ranks, top_k = call.top_k, tokens = (u32)local.tokens;
    const u32 chunk = (tokens + gridDim.x - 1) / gridDim.x;
    const u32 begin = min(blockIdx.x * chunk, tokens), end = min(begin + chunk, tokens);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    // No block has fewer tokens than the last, so that one counts for all.
    const bool counts_all = blockIdx.x == gridDim.x - 1;
    if (threadIdx.x < RANKS_MAX) chunk_rows[threadIdx.x] = rows[threadIdx.x] = next[threadIdx.x] = 0;
    if (counts_all) {
        for (u32 i = threadIdx.x; i < call.experts; i += THREADS) counts[i] = 0;
    }
    __syncthreads();
    u32 own_rows = 0;
    for (u32 first = begin + warp * LANES; first < end; first += THREADS) {
        u32 token = first + lane, to = 0;
        if (token < end) {
            int experts[TOP_K_MAX];
            load_experts(call, local.experts, token, experts);
            to = ranks_of(call, experts);
        }
#pragma unroll
        for (u32 peer = 0; peer < RANKS_MAX; peer++) {
            u32 all = __ballot_sync(0xffffffffu, to >> peer & 1);
            if (lane == peer) own_rows += __popc(all);
        }
    }
    if (lane < RANKS_MAX) atomicAdd(&chunk_rows[lane], own_rows);
    Turn turn(me);
    bool fine = me.begin();
    __syncthreads();
    // The blocks of this rank tell each other.
    if (fine && threadIdx.x < RANKS_MAX / 2) {
        u64 two = chunk_rows[2 * threadIdx.x] | (u64)chunk_rows[2 * threadIdx.x + 1] << 32;
        tell_own(me, turn, (u64)(blockIdx.x * (RANKS_MAX / 2) + threadIdx.x) * 16, two);
    }
    for (u32 i = threadIdx.x; fine && i < gridDim.x * (RANKS_MAX / 2); i += THREADS) {
        u64 two = 0;
        fine = hear_own(me, turn, (u64)i * 16, two);
        u32 block = i / (RANKS_MAX / 2), peer = i % (RANKS_MAX / 2) * 2;
        if ((u32)two != 0) atomicAdd(&rows[peer], (u32)two);
        if (two >> 32 != 0) atomicAdd(&rows[peer + 1], (u32)(two >> 32));
        if (block < blockIdx.x && (u32)two != 0) atomicAdd(&next[peer], (u32)two);
        if (block < blockIdx.x && two >> 32 != 0) atomicAdd(&next[peer + 1], (u32)(two >> 32));
    }
    fine = __syncthreads_and(fine);
    if (threadIdx.x == 0) {
        u64 *own = told.of[me.rank];
        own[0] = local.rows_reference;
        own[1] = local.scales_reference;
        own[2] = local.row_experts_reference;
        own[3] = local.row_weights_reference;
        for (u32 two = 0; two < 4; two++) own[4 + two] = rows[two * 2] | (u64)rows[two * 2 + 1] << 32;
    }
    fine = tell(me, turn, told, fine);
    fine = hear(me, turn, told, fine);
    if (fine) {
        find_bases(me, local, told, bases);
        // Where this rank's rows begin at each other, and whether everybody's fit: the same numbers everywhere.
        u32 needed = 0;
        if (threadIdx.x < ranks) {
            u32 before = 0;
            for (u32 source = 0; source < ranks; source++) {
                u32 rows_of = (u32)(told.of[source][4 + threadIdx.x / 2] >> 32 * (threadIdx.x % 2));
                before += source < me.rank ? rows_of : 0;
                needed += rows_of;
                if (blockIdx.x == 0 && threadIdx.x == me.rank && local.counts != 0) ((u32 *)local.counts)[call.experts_a_rank + source] = rows_of;
            }
            next[threadIdx.x] += before;
        }
        bool over = __syncthreads_or(needed > call.capacity);
        if (over) {
            if (blockIdx.x == 0 && needed > call.capacity) store_relaxed((u64 *)local.overflow, (u64)needed << 8 | (threadIdx.x + 1));
            for (u32 i = begin * ranks + threadIdx.x; i < end * ranks; i += THREADS) ((u32 *)local.places)[i] = NOWHERE;
            if (blockIdx.x == 0) {
                for (u32 i = threadIdx.x; i < call.experts_a_rank + ranks; i += THREADS) ((u32 *)local.counts)[i] = 0;
            }
        } else if (counts_all) {
            for (u32 token = threadIdx.x; token < tokens; token += THREADS) {
                int experts[TOP_K_MAX];
                load_experts(call, local.experts, token, experts);
#pragma unroll
                for (u32 k = 0; k < TOP_K_MAX; k++) {
                    bool again = false;
#pragma unroll
                    for (u32 j = 0; j < k; j++) again |= experts[j] == experts[k];
                    if (experts[k] >= 0 && !again) atomicAdd(&counts[experts[k]], 1);
                }
            }
            __syncthreads();
            tell_counts(me, turn, call, counts);
        }
        for (u32 first = begin; first < end && !over; first += TOKENS_AT_ONCE) {
            u32 count = min(TOKENS_AT_ONCE, end - first), token = first + threadIdx.x, to = 0;
            if (threadIdx.x < count) {
                int experts[TOP_K_MAX];
                load_experts(call, local.experts, token, experts);
                to = ranks_of(call, experts);
            }
            u32 before[RANKS_MAX];
            if (warp < TOKENS_AT_ONCE / LANES) {
#pragma unroll
                for (u32 peer = 0; peer < RANKS_MAX; peer++) {
                    u32 all = __ballot_sync(0xffffffffu, to >> peer & 1);
                    before[peer] = __popc(all & ((1u << lane) - 1));
                    if (lane == peer) of_warp[warp][peer] = __popc(all);
                }
            }
            __syncthreads();
            if (threadIdx.x < count) {
#pragma unroll
                for (u32 peer = 0; peer < RANKS_MAX; peer++) {
                    if (peer >= ranks) break;
                    u32 row = next[peer] + before[peer];
                    for (u32 other = 0; other < warp; other++) row += of_warp[other][peer];
                    u32 place = to >> peer & 1 ? peer << ROW_BITS | row : NOWHERE;
                    places.of[threadIdx.x][peer] = place;
                    ((u32 *)local.places)[(u64)token * ranks + peer] = place;
                }
            }
            __syncthreads();
            if (threadIdx.x < ranks) {
                for (u32 other = 0; other < TOKENS_AT_ONCE / LANES; other++) next[threadIdx.x] += of_warp[other][threadIdx.x];
            }
            // Which of a rank's experts a row is for, and their weights; an expert that a token has twice has both weights.
            for (u32 i = threadIdx.x; i < count * ranks; i += THREADS) {
                u32 nth = i / ranks, peer = i % ranks, place = places.of[nth][peer];
                if (place == NOWHERE) continue;
                u64 from = (u64)(first + nth) * top_k, at = (u64)(place & ((1u << ROW_BITS) - 1)) * top_k;
                const int *experts = (const int *)local.experts + from;
                const float *weights = (const float *)local.weights + from;
                for (u32 k = 0; k < top_k; k++) {
                    u32 expert = (u32)experts[k];
                    float weight = weights[k];
                    bool here = expert < call.experts && owner(call, expert) == peer;
                    for (u32 j = 0; j < top_k && here; j++) {
                        if (j == k || (u32)experts[j] != expert) continue;
                        if (j < k) here = false;
                        weight += weights[j];
                    }
                    ((int *)bases.row_experts[peer])[at + k] = here ? (int)(expert - peer * call.experts_a_rank) : -1;
                    ((float *)bases.row_weights[peer])[at + k] = here ? weight : 0.0f;
                }
            }
            move_all(call, local.in, first, count, ranks, places, bases);
            __syncthreads();
        }
        if (counts_all && !over) take_counts(me, turn, call, counts, local.counts, false);
        meet_at_end(me, turn);
    }
    end_call(me);
}

// Sums the rows of `count` tokens, a warp a piece of one at a time: WIDTH rows of AT_ONCE vectors are on their way before the first is used.
template <u32 WIDTH, u32 AT_ONCE>
WEFT_DEVICE void sum_rows(const Combine &call, u64 out, u32 first, u32 count, const volatile Routes &places, const volatile float (*weights)[TOP_K_MAX], const volatile u64 *in) {
    const u32 width = call.width, vectors = call.hidden / 8, pieces = (vectors + PIECE - 1) / PIECE;
    for (u32 item = threadIdx.x / LANES; item < count * pieces; item += THREADS / LANES) {
        u32 token = item / pieces, part = (item - token * pieces) * PIECE + threadIdx.x % LANES;
#pragma unroll 1
        for (u32 vector = part; vector < min(part + PIECE, vectors); vector += AT_ONCE * LANES) {
            float sum[AT_ONCE][8] = {};
#pragma unroll 1
            for (u32 some = 0; some < width; some += WIDTH) {
                uint4 got[WIDTH][AT_ONCE];
#pragma unroll
                for (u32 k = 0; k < WIDTH; k++) {
                    u32 place = some + k < width ? places.of[token][some + k] : NOWHERE;
#pragma unroll
                    for (u32 a = 0; a < AT_ONCE; a++) got[k][a] = make_uint4(0, 0, 0, 0);
                    if (place == NOWHERE) continue;
                    u64 from = in[place >> ROW_BITS] + ((u64)(place & ((1u << ROW_BITS) - 1)) * vectors + vector) * 16;
#pragma unroll
                    for (u32 a = 0; a < AT_ONCE; a++) {
                        if (vector + a * LANES < vectors) got[k][a] = load_vector(from + a * LANES * 16);
                    }
                }
#pragma unroll
                for (u32 k = 0; k < WIDTH; k++) {
                    // What came from nowhere adds nothing, whatever its weight.
                    if (some + k >= width || places.of[token][some + k] == NOWHERE) continue;
                    float weight = weights[token][some + k];
#pragma unroll
                    for (u32 a = 0; a < AT_ONCE; a++) {
#pragma unroll
                        for (u32 w = 0; w < 4; w++) {
                            sum[a][2 * w] = __fmaf_rn(weight, Bf16::widen(word_of(got[k][a], w), 0), sum[a][2 * w]);
                            sum[a][2 * w + 1] = __fmaf_rn(weight, Bf16::widen(word_of(got[k][a], w), 1), sum[a][2 * w + 1]);
                        }
                    }
                }
            }
#pragma unroll
            for (u32 a = 0; a < AT_ONCE; a++) {
                if (vector + a * LANES >= vectors) continue;
                uint4 result = make_uint4(Bf16::narrow(sum[a]), Bf16::narrow(sum[a] + 2), Bf16::narrow(sum[a] + 4), Bf16::narrow(sum[a] + 6));
                store_vector(out + ((u64)(first + token) * vectors + vector + a * LANES) * 16, result);
            }
        }
    }
}

KERNEL weft_moe_combine(const __grid_constant__ Team team, const __grid_constant__ Combine call) {
    __shared__ Routes places;
    __shared__ float weights[TOKENS_AT_ONCE][TOP_K_MAX];
    __shared__ Told<1> told;
    __shared__ u64 in[RANKS_MAX];
    Rank me(team, blockIdx.y);
    const CombineLocal &local = call.locals[blockIdx.y];
    const u32 width = call.width, tokens = (u32)local.tokens;
    if (threadIdx.x == 0) told.of[me.rank][0] = local.in_reference;
    Turn turn(me);
    bool fine = tell(me, turn, told, me.begin());
    fine = hear(me, turn, told, fine);
    if (fine) {
        if (threadIdx.x < team.ranks) in[threadIdx.x] = threadIdx.x == me.rank ? local.in : resolve(me, threadIdx.x, told.of[threadIdx.x][0]);
        const u32 chunk = (tokens + gridDim.x - 1) / gridDim.x;
        const u32 begin = min(blockIdx.x * chunk, tokens), end = min(begin + chunk, tokens);
        for (u32 first = begin; first < end; first += TOKENS_AT_ONCE) {
            u32 count = min(TOKENS_AT_ONCE, end - first);
            for (u32 i = threadIdx.x; i < count * width; i += THREADS) {
                u64 at = (u64)first * width + i;
                places.of[i / width][i % width] = ((const u32 *)local.places)[at];
                weights[i / width][i % width] = local.weights != 0 ? ((const float *)local.weights)[at] : 1.0f;
            }
            __syncthreads();
            if (width <= 2) {
                sum_rows<2, 2>(call, local.out, first, count, places, weights, in);
            } else if (width <= 4) {
                sum_rows<4, 2>(call, local.out, first, count, places, weights, in);
            } else {
                sum_rows<8, 1>(call, local.out, first, count, places, weights, in);
            }
            __syncthreads();
        }
        meet_at_end(me, turn);
    }
    end_call(me);
}
