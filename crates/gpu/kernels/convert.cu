// Blocks of a paged cache that become blocks of another: other layouts, other element types, for thousands of stretches in one launch.
//
// A nest of three loops around runs of elements is shared by all stretches of a kind; a warp takes a chunk of one stretch at a time. An item is what a lane moves at once: sixteen
// bytes on the wider side where everything is aligned to that. Its number is divided by the lengths of the loops, which are multiplications, and four items of a lane are on their way
// before the first is stored. The words are those of `program.rs`, which has the same walk in Rust, for tests on machines without a device.

#include "elements.cuh"
#include "float8.cuh"

using namespace weft;

static constexpr u32 NESTS_MAX = 16;
// Items of a lane on their way at once.
static constexpr u32 DEPTH = 4;
static constexpr u32 CHUNK = DEPTH * LANES;
static constexpr u32 WHOLE_WARP = 0xffffffffu;

enum Code : u32 { BYTES = 0, CODE_F32 = 1, CODE_F16 = 2, CODE_BF16 = 3, CODE_E4M3 = 4 };
enum Flag : u32 { FROM_FIXED = 1, FROM_BESIDE = 2, TO_FIXED = 4, TO_BESIDE = 8, LONG_RUN = 16 };

// A division by a number that is known beforehand: of what is below 2^31.
struct Divisor {
    u32 by, multiplier, shift;
};

struct Nest {
    // The first unit of work that is of this nest, how many each stretch has, and where its stretches begin.
    u32 first_unit, chunks, first_stretch;
    // What elements are, two codes, and how many an item has.
    u32 from, to, width;
    // Of `Flag`; elements of a run; items of a run and of a stretch.
    u32 flags, run, items_a_run, items;
    Divisor by_run, by_inner, by_middle;
    float factor, inverse;
    u32 unused;
    u64 from_strides[3], to_strides[3], from_scale_strides[3], to_scale_strides[3];
};
static_assert(sizeof(Nest) == 184, "as program.rs has it");

struct Stretch {
    u64 from, to, from_scales, to_scales;
};

struct Program {
    const Nest *nests;
    const Stretch *stretches;
    u32 count, units;
    // What the greatest magnitude of a run is multiplied with to be its scale.
    float shrink;
    u32 unused;
};

WEFT_DEVICE u32 quotient_of(u32 n, const Divisor &d) { return (u32)(((u64)n * d.multiplier) >> d.shift); }

// Where an item lies: in which run, and which item of it.
struct Item {
    u32 a, b, c, within;
    WEFT_DEVICE u64 at(const u64 *strides) const { return a * strides[0] + b * strides[1] + c * strides[2]; }
};

WEFT_DEVICE Item item_of(const Nest &nest, u32 i) {
    Item item;
    u32 run = quotient_of(i, nest.by_run);
    item.within = i - run * nest.by_run.by;
    u32 outer = quotient_of(run, nest.by_inner);
    item.c = run - outer * nest.by_inner.by;
    item.a = quotient_of(outer, nest.by_middle);
    item.b = outer - item.a * nest.by_middle.by;
    return item;
}

// So many bytes in registers, and how they are loaded and stored. What is read is not read again.
template <u32 BYTES>
struct Packed;
template <>
struct Packed<16> {
    uint4 v;
    WEFT_DEVICE void load(u64 at) { v = __ldcs((const uint4 *)at); }
    WEFT_DEVICE void store(u64 at) const { __stwb((uint4 *)at, v); }
    WEFT_DEVICE u32 word(u32 nth) const { return nth == 0 ? v.x : nth == 1 ? v.y : nth == 2 ? v.z : v.w; }
    WEFT_DEVICE void set(u32 nth, u32 word) {
        if (nth == 0) v.x = word;
        if (nth == 1) v.y = word;
        if (nth == 2) v.z = word;
        if (nth == 3) v.w = word;
    }
};
template <>
struct Packed<8> {
    uint2 v;
    WEFT_DEVICE void load(u64 at) { v = __ldcs((const uint2 *)at); }
    WEFT_DEVICE void store(u64 at) const { __stwb((uint2 *)at, v); }
    WEFT_DEVICE u32 word(u32 nth) const { return nth == 0 ? v.x : v.y; }
    WEFT_DEVICE void set(u32 nth, u32 word) {
        if (nth == 0) v.x = word;
        if (nth == 1) v.y = word;
    }
};
template <>
struct Packed<4> {
    u32 v;
    WEFT_DEVICE void load(u64 at) { v = __ldcs((const u32 *)at); }
    WEFT_DEVICE void store(u64 at) const { __stwb((u32 *)at, v); }
    WEFT_DEVICE u32 word(u32) const { return v; }
    WEFT_DEVICE void set(u32, u32 word) { v = word; }
};
template <>
struct Packed<2> {
    u16 v;
    WEFT_DEVICE void load(u64 at) { v = *(const u16 *)at; }
    WEFT_DEVICE void store(u64 at) const { *(u16 *)at = v; }
    WEFT_DEVICE u32 word(u32) const { return v; }
    WEFT_DEVICE void set(u32, u32 word) { v = (u16)word; }
};
template <>
struct Packed<1> {
    u8 v;
    WEFT_DEVICE void load(u64 at) { v = *(const u8 *)at; }
    WEFT_DEVICE void store(u64 at) const { *(u8 *)at = v; }
    WEFT_DEVICE u32 word(u32) const { return v; }
    WEFT_DEVICE void set(u32, u32 word) { v = (u8)word; }
};

// Elements in packed words. Lower bits come first.
template <u32 CODE>
struct Coded;
template <>
struct Coded<CODE_F32> {
    static constexpr u32 BYTES = 4;
    static WEFT_DEVICE float widen(u32 bits) { return __uint_as_float(bits); }
    static WEFT_DEVICE u32 narrow(float wide) { return F32::narrow_one(wide); }
};
template <>
struct Coded<CODE_F16> {
    static constexpr u32 BYTES = 2;
    static WEFT_DEVICE float widen(u32 bits) { return F16::widen(bits, 0); }
    static WEFT_DEVICE u32 narrow(float wide) { return F16::narrow_one(wide) & 0xffffu; }
};
template <>
struct Coded<CODE_BF16> {
    static constexpr u32 BYTES = 2;
    static WEFT_DEVICE float widen(u32 bits) { return __uint_as_float(bits << 16); }
    static WEFT_DEVICE u32 narrow(float wide) { return Bf16::narrow_one(wide) & 0xffffu; }
};
template <>
struct Coded<CODE_E4M3> {
    static constexpr u32 BYTES = 1;
    static WEFT_DEVICE float widen(u32 bits) { return widen_e4m3(bits); }
    static WEFT_DEVICE u32 narrow(float wide) { return narrow_e4m3(wide); }
};

template <class C, u32 WIDTH>
struct Row {
    static constexpr u32 A_WORD = WIDTH * C::BYTES < 4 ? WIDTH : 4 / C::BYTES;
    Packed<WIDTH * C::BYTES> packed;
    WEFT_DEVICE float get(u32 nth) const {
        u32 bits = packed.word(nth / A_WORD) >> (nth % A_WORD) * C::BYTES * 8;
        return C::widen(C::BYTES == 4 ? bits : bits & ((1u << C::BYTES * 8 % 32) - 1));
    }
    WEFT_DEVICE void set_all(const float *numbers) {
#pragma unroll
        for (u32 word = 0; word < WIDTH / A_WORD; word++) {
            u32 bits = 0;
#pragma unroll
            for (u32 nth = 0; nth < A_WORD; nth++) bits |= C::narrow(numbers[word * A_WORD + nth]) << nth * C::BYTES * 8 % 32;
            packed.set(word, bits);
        }
    }
};

// Bytes as they are.
template <u32 BYTES>
WEFT_DEVICE void move_items(const Nest &nest, const Stretch &at, u32 chunk, u32 lane) {
    Packed<BYTES> items[DEPTH];
    u64 to[DEPTH];
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        u32 i = chunk * CHUNK + d * LANES + lane;
        if (i >= nest.items) break;
        Item item = item_of(nest, i);
        items[d].load(at.from + item.at(nest.from_strides) + (u64)item.within * BYTES);
        to[d] = at.to + item.at(nest.to_strides) + (u64)item.within * BYTES;
    }
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        if (chunk * CHUNK + d * LANES + lane < nest.items) items[d].store(to[d]);
    }
}

// What the elements of a run are multiplied with when they are read.
WEFT_DEVICE float factor_of(const Nest &nest, const Stretch &at, const Item &item) {
    if (nest.flags & FROM_BESIDE) return *(const float *)(at.from_scales + item.at(nest.from_scale_strides));
    return nest.factor;
}

template <class From, u32 WIDTH>
WEFT_DEVICE void widen_row(const Nest &nest, const Row<From, WIDTH> &row, float factor, float *numbers) {
#pragma unroll
    for (u32 nth = 0; nth < WIDTH; nth++) {
        numbers[nth] = row.get(nth);
        if (nest.flags & (FROM_FIXED | FROM_BESIDE)) numbers[nth] = __fmul_rn(numbers[nth], factor);
    }
}

// Elements that become others, by scales that are known.
template <class From, class To, u32 WIDTH>
WEFT_DEVICE void cast_items(const Nest &nest, const Stretch &at, u32 chunk, u32 lane) {
    Row<From, WIDTH> rows[DEPTH];
    float factors[DEPTH];
    u64 to[DEPTH];
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        u32 i = chunk * CHUNK + d * LANES + lane;
        if (i >= nest.items) break;
        Item item = item_of(nest, i);
        rows[d].packed.load(at.from + item.at(nest.from_strides) + (u64)item.within * (WIDTH * From::BYTES));
        factors[d] = factor_of(nest, at, item);
        to[d] = at.to + item.at(nest.to_strides) + (u64)item.within * (WIDTH * To::BYTES);
    }
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        if (chunk * CHUNK + d * LANES + lane >= nest.items) break;
        float numbers[WIDTH];
        widen_row<From, WIDTH>(nest, rows[d], factors[d], numbers);
#pragma unroll
        for (u32 nth = 0; nth < WIDTH; nth++) {
            if (nest.flags & TO_FIXED) numbers[nth] = __fmul_rn(numbers[nth], nest.inverse);
        }
        Row<To, WIDTH> row;
        row.set_all(numbers);
        row.packed.store(to[d]);
    }
}

// The scale of numbers whose greatest magnitude has these bits, which are ordered like the magnitudes, NaN above infinity above all else.
WEFT_DEVICE float scale_for(u32 greatest, float shrink) {
    if (greatest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    return fmaxf(__fmul_rn(__uint_as_float(greatest), shrink), __uint_as_float(1u << 23));
}

template <u32 WIDTH>
WEFT_DEVICE u32 greatest_of(const float *numbers) {
    u32 greatest = 0;
#pragma unroll
    for (u32 nth = 0; nth < WIDTH; nth++) greatest = max(greatest, __float_as_uint(numbers[nth]) & 0x7fffffffu);
    return greatest;
}

template <u32 WIDTH>
WEFT_DEVICE void store_scaled(u64 to, float *numbers, float inverse) {
#pragma unroll
    for (u32 nth = 0; nth < WIDTH; nth++) numbers[nth] = __fmul_rn(numbers[nth], inverse);
    Row<Coded<CODE_E4M3>, WIDTH> row;
    row.set_all(numbers);
    row.packed.store(to);
}

// Elements that become codes with a scale for each run, which is chosen here: lanes that have a run between them agree on it. A run has as many slots as lanes have it,
// a power of two of them, and the last may be empty.
template <class From, u32 WIDTH>
WEFT_DEVICE void quantise_items(const Nest &nest, const Stretch &at, u32 chunk, u32 lane, float shrink) {
    Row<From, WIDTH> rows[DEPTH];
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        u32 i = chunk * CHUNK + d * LANES + lane;
        Item item = item_of(nest, i);
        bool there = i < nest.items && item.within < nest.items_a_run;
        if (there) rows[d].packed.load(at.from + item.at(nest.from_strides) + (u64)item.within * (WIDTH * From::BYTES));
    }
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) {
        float numbers[WIDTH];
        u32 i = chunk * CHUNK + d * LANES + lane, greatest = 0;
        Item item = item_of(nest, i);
        bool there = i < nest.items && item.within < nest.items_a_run;
        if (there) {
            widen_row<From, WIDTH>(nest, rows[d], factor_of(nest, at, item), numbers);
            greatest = greatest_of<WIDTH>(numbers);
        }
#pragma unroll 1
        for (u32 far = nest.by_run.by / 2; far > 0; far /= 2) greatest = max(greatest, __shfl_xor_sync(WHOLE_WARP, greatest, far));
        if (!there) continue;
        float scale = scale_for(greatest, shrink);
        store_scaled<WIDTH>(at.to + item.at(nest.to_strides) + (u64)item.within * WIDTH, numbers, __fdiv_rn(1.0f, scale));
        if (item.within == 0) *(float *)(at.to_scales + item.at(nest.to_scale_strides)) = scale;
    }
}

// The same where a run is more than a warp has at once: a chunk is a run, and it is looked at twice.
template <class From, u32 WIDTH>
WEFT_DEVICE void quantise_run(const Nest &nest, const Stretch &at, u32 run, u32 lane, float shrink) {
    Item item = item_of(nest, run * nest.by_run.by);
    u64 from = at.from + item.at(nest.from_strides), to = at.to + item.at(nest.to_strides);
    float factor = factor_of(nest, at, item), numbers[WIDTH];
    u32 greatest = 0;
#pragma unroll 1
    for (u32 i = lane; i < nest.items_a_run; i += LANES) {
        Row<From, WIDTH> row;
        row.packed.load(from + (u64)i * (WIDTH * From::BYTES));
        widen_row<From, WIDTH>(nest, row, factor, numbers);
        greatest = max(greatest, greatest_of<WIDTH>(numbers));
    }
#pragma unroll
    for (u32 far = LANES / 2; far > 0; far /= 2) greatest = max(greatest, __shfl_xor_sync(WHOLE_WARP, greatest, far));
    float scale = scale_for(greatest, shrink), inverse = __fdiv_rn(1.0f, scale);
#pragma unroll 1
    for (u32 i = lane; i < nest.items_a_run; i += LANES) {
        Row<From, WIDTH> row;
        row.packed.load(from + (u64)i * (WIDTH * From::BYTES));
        widen_row<From, WIDTH>(nest, row, factor, numbers);
        store_scaled<WIDTH>(to + (u64)i * WIDTH, numbers, inverse);
    }
    if (lane == 0) *(float *)(at.to_scales + item.at(nest.to_scale_strides)) = scale;
}

// What is done to a chunk of elements of one kind that become those of another. They have sixteen bytes at most on either side; or they are single ones, where they do not lie as vectors do.
template <u32 FROM, u32 TO>
struct Cast {
    static constexpr u32 WIDTH = FROM == CODE_F32 || TO == CODE_F32 ? 4 : 8;
    static constexpr bool AHEAD = FROM != CODE_F32 && TO != CODE_E4M3;
    float shrink;
    template <u32 ELEMENTS>
    WEFT_DEVICE void of(const Nest &nest, const Stretch &at, u32 chunk, u32 lane) const {
        if constexpr (TO == CODE_E4M3) {
            if (nest.flags & LONG_RUN) return quantise_run<Coded<FROM>, ELEMENTS>(nest, at, chunk, lane, shrink);
            if (nest.flags & TO_BESIDE) return quantise_items<Coded<FROM>, ELEMENTS>(nest, at, chunk, lane, shrink);
        }
        cast_items<Coded<FROM>, Coded<TO>, ELEMENTS>(nest, at, chunk, lane);
    }
    WEFT_DEVICE void operator()(const Nest &nest, const Stretch &at, u32 chunk, u32 lane) const {
        if (nest.width == WIDTH) {
            of<WIDTH>(nest, at, chunk, lane);
        } else {
            of<1>(nest, at, chunk, lane);
        }
    }
};

struct Move {
    static constexpr bool AHEAD = true;
    WEFT_DEVICE void operator()(const Nest &nest, const Stretch &at, u32 chunk, u32 lane) const {
        if (nest.width == 16) {
            move_items<16>(nest, at, chunk, lane);
        } else if (nest.width == 4) {
            move_items<4>(nest, at, chunk, lane);
        } else {
            move_items<1>(nest, at, chunk, lane);
        }
    }
};

// A unit of work: a chunk of a stretch of a nest.
struct Unit {
    u32 nest, chunk;
    Stretch at;
    WEFT_DEVICE void find(const Program &program, const Nest *nests, u32 unit) {
        nest = 0;
        while (nest + 1 < program.count && unit >= nests[nest + 1].first_unit) nest++;
        const Nest &of = nests[nest];
        u32 nth = (unit - of.first_unit) / of.chunks;
        chunk = unit - of.first_unit - nth * of.chunks;
        at = program.stretches[of.first_stretch + nth];
    }
};

template <class Work>
WEFT_DEVICE void carry_out(const Program &program, const Work &work) {
    __shared__ Nest nests[NESTS_MAX];
    for (u32 i = threadIdx.x; i < program.count * sizeof(Nest) / sizeof(u32); i += blockDim.x) ((u32 *)nests)[i] = ((const u32 *)program.nests)[i];
    __syncthreads();
    u32 lane = threadIdx.x % LANES, unit = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, warps = gridDim.x * blockDim.x / LANES;
    if (unit >= program.units) return;
    Unit next;
    next.find(program, nests, unit);
#pragma unroll 1
    for (;;) {
        Unit now = next;
        unit += warps;
        // Where the next one begins is on its way while this one is done, if there are registers for it.
        if (Work::AHEAD && unit < program.units) next.find(program, nests, unit);
        work(nests[now.nest], now.at, now.chunk, lane);
        if (unit >= program.units) return;
        if (!Work::AHEAD) next.find(program, nests, unit);
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) weft_move(const __grid_constant__ Program program) { carry_out(program, Move()); }

#define WEFT_CAST(name, from, to) \
    extern "C" __global__ void __launch_bounds__(256, 3) name(const __grid_constant__ Program program) { carry_out(program, Cast<from, to>{program.shrink}); }

WEFT_CAST(weft_f32_to_f16, CODE_F32, CODE_F16)
WEFT_CAST(weft_f32_to_bf16, CODE_F32, CODE_BF16)
WEFT_CAST(weft_f32_to_fp8_e4m3, CODE_F32, CODE_E4M3)
WEFT_CAST(weft_f16_to_f32, CODE_F16, CODE_F32)
WEFT_CAST(weft_f16_to_bf16, CODE_F16, CODE_BF16)
WEFT_CAST(weft_f16_to_fp8_e4m3, CODE_F16, CODE_E4M3)
WEFT_CAST(weft_bf16_to_f32, CODE_BF16, CODE_F32)
WEFT_CAST(weft_bf16_to_f16, CODE_BF16, CODE_F16)
WEFT_CAST(weft_bf16_to_fp8_e4m3, CODE_BF16, CODE_E4M3)
WEFT_CAST(weft_fp8_e4m3_to_f32, CODE_E4M3, CODE_F32)
WEFT_CAST(weft_fp8_e4m3_to_f16, CODE_E4M3, CODE_F16)
WEFT_CAST(weft_fp8_e4m3_to_bf16, CODE_E4M3, CODE_BF16)
WEFT_CAST(weft_fp8_e4m3_to_fp8_e4m3, CODE_E4M3, CODE_E4M3)
