// What elements are, and what reductions of them mean: to the last bit what `plan/src/datatype.rs` says.
//
// Elements narrower than f32 are widened to it, folded in the order of the ranks, and rounded once. They are handled by words of four bytes, which hold one or two.
#ifndef WEFT_ELEMENTS_CUH
#define WEFT_ELEMENTS_CUH

#include "../include/weft/device.cuh"

namespace weft {

enum Fold : u32 { SUM = 0, PRODUCT = 1, LESSER = 2, GREATER = 3 };

// Results have one NaN. Those of the device's own arithmetic have another.
static constexpr u32 NAN_F32 = 0x7fc00000u;
static constexpr u32 NAN_F16 = 0x7e00u;
static constexpr u32 NAN_BF16 = 0x7fc0u;

// Elements that kernels reduce. The numbers are those of `collective.rs`.
enum Element : u32 { ELEMENT_F32 = 0, ELEMENT_F16 = 1, ELEMENT_BF16 = 2, ELEMENT_I32 = 3 };

// How a call folds. `scale` is 1, or what an average over two, four or eight ranks is multiplied with, which is the same as dividing; `divisor` is that of another average, or 0.
struct Folding {
    u32 fold;
    u32 divisor;
    float scale;
};

// Sums of floats are what most calls want, and have kernels of their own.
struct Sum {
    float scale;
    WEFT_DEVICE explicit Sum(const Folding &how) : scale(how.scale) {}
    WEFT_DEVICE float join(float a, float b) const { return __fadd_rn(a, b); }
    template <class E>
    WEFT_DEVICE float finish(float sum) const {
        return __fmul_rn(sum, scale);
    }
};

// The others ask at every step which they are.
struct Other {
    u32 fold, divisor;
    float scale;
    WEFT_DEVICE explicit Other(const Folding &how) : fold(how.fold), divisor(how.divisor), scale(how.scale) {}
    WEFT_DEVICE float join(float a, float b) const {
        float c;
        if (fold == SUM) return __fadd_rn(a, b);
        if (fold == PRODUCT) return __fmul_rn(a, b);
        if (fold == LESSER) {
            asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
        } else {
            asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
        }
        return c;
    }
    WEFT_DEVICE u32 join(u32 a, u32 b) const {
        if (fold == SUM) return a + b;
        if (fold == PRODUCT) return a * b;
        if (fold == LESSER) return (u32)min((int)a, (int)b);
        return (u32)max((int)a, (int)b);
    }
    template <class E>
    WEFT_DEVICE typename E::Wide finish(typename E::Wide value) const {
        return divisor != 0 ? E::divide(value, divisor) : E::scaled(value, scale);
    }
};

// Long when it is written out, and rarely wanted.
static __device__ __noinline__ float quotient(float of, float by) { return __fdiv_rn(of, by); }

struct F32 {
    typedef float Wide;
    typedef u32 Bits;
    static constexpr u32 A_WORD = 1;
    static WEFT_DEVICE float widen(u32 word, u32) { return __uint_as_float(word); }
    static WEFT_DEVICE float divide(float sum, u32 by) { return quotient(sum, (float)by); }
    static WEFT_DEVICE float scaled(float sum, float scale) { return __fmul_rn(sum, scale); }
    static WEFT_DEVICE u32 narrow_one(float wide) { return wide != wide ? NAN_F32 : __float_as_uint(wide); }
    static WEFT_DEVICE u32 narrow(const float *wide) { return narrow_one(wide[0]); }
};

struct F16 {
    typedef float Wide;
    typedef u16 Bits;
    static constexpr u32 A_WORD = 2;
    static WEFT_DEVICE float widen(u32 word, u32 half) {
        float wide;
        u16 bits = (u16)(word >> 16 * half);
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
    static WEFT_DEVICE float divide(float sum, u32 by) { return quotient(sum, (float)by); }
    static WEFT_DEVICE float scaled(float sum, float scale) { return __fmul_rn(sum, scale); }
    static WEFT_DEVICE u32 narrow_one(float wide) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        return wide != wide ? NAN_F16 : bits;
    }
    static WEFT_DEVICE u32 narrow(const float *wide) { return narrow_one(wide[0]) | narrow_one(wide[1]) << 16; }
};

struct Bf16 {
    typedef float Wide;
    typedef u16 Bits;
    static constexpr u32 A_WORD = 2;
    static WEFT_DEVICE float widen(u32 word, u32 half) { return __uint_as_float(half ? word & 0xffff0000u : word << 16); }
    static WEFT_DEVICE float divide(float sum, u32 by) { return quotient(sum, (float)by); }
    static WEFT_DEVICE float scaled(float sum, float scale) { return __fmul_rn(sum, scale); }
    static WEFT_DEVICE u32 narrow_one(float wide) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        return wide != wide ? NAN_BF16 : bits;
    }
    static WEFT_DEVICE u32 narrow(const float *wide) { return narrow_one(wide[0]) | narrow_one(wide[1]) << 16; }
};

struct I32 {
    typedef u32 Wide;
    typedef u32 Bits;
    static constexpr u32 A_WORD = 1;
    static WEFT_DEVICE u32 widen(u32 word, u32) { return word; }
    static WEFT_DEVICE u32 divide(u32 sum, u32 by) { return (u32)((int)sum / (int)by); }
    static WEFT_DEVICE u32 scaled(u32 sum, float) { return sum; }
    static WEFT_DEVICE u32 narrow_one(u32 wide) { return wide; }
    static WEFT_DEVICE u32 narrow(const u32 *wide) { return wide[0]; }
};

// One word of every rank becomes one. `word` tells the word of a rank; there are at most WIDTH ranks.
template <class E, class Op, u32 WIDTH, class Word>
WEFT_DEVICE u32 fold_words(const Op &op, u32 ranks, Word word) {
    typename E::Wide wide[E::A_WORD];
#pragma unroll
    for (u32 part = 0; part < E::A_WORD; part++) {
        wide[part] = E::widen(word(0), part);
#pragma unroll
        for (u32 rank = 1; rank < WIDTH; rank++) {
            if (rank < ranks) wide[part] = op.join(wide[part], E::widen(word(rank), part));
        }
        wide[part] = op.template finish<E>(wide[part]);
    }
    return E::narrow(wide);
}

// The same for a single element, in the lower bits.
template <class E, class Op, u32 WIDTH, class Word>
WEFT_DEVICE u32 fold_one(const Op &op, u32 ranks, Word word) {
    typename E::Wide wide = E::widen(word(0), 0);
#pragma unroll
    for (u32 rank = 1; rank < WIDTH; rank++) {
        if (rank < ranks) wide = op.join(wide, E::widen(word(rank), 0));
    }
    return E::narrow_one(op.template finish<E>(wide));
}

}  // namespace weft

#endif
