// Eight-bit floats: four bits of exponent, three of mantissa, as `plan` has `fp8_e4m3`.
#ifndef WEFT_FLOAT8_CUH
#define WEFT_FLOAT8_CUH

#include "../include/weft/device.cuh"

namespace weft {

// To nearest, ties to even, saturating. The instruction for it came later than the oldest devices that these kernels are for.
WEFT_DEVICE u32 narrow_e4m3(float wide) {
    u32 bits = __float_as_uint(wide), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
    // Above 2^-6 the upper bits are those of the result, but for where exponents begin; below, steps are of 2^-9.
    u32 normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
    // 2^14 as f32 has steps of 2^-9, and the sum is rounded to them.
    u32 small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;
    u32 value = magnitude < 0x3c800000u ? small : normal - (120u << 3);
    value = min(value, 0x7eu);
    if (magnitude > 0x7f800000u) return 0x7f;
    return sign | value;
}

// The bits as the top of an f32 with a wrong bias, also where they are subnormal; a multiplication by 2^120 puts it right exactly.
WEFT_DEVICE float widen_e4m3(u32 code) {
    u32 magnitude = code & 0x7f;
    float value = __fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float(247u << 23));
    u32 bits = magnitude == 0x7f ? 0x7fc00000u : __float_as_uint(value);
    return __uint_as_float(bits | (code & 0x80) << 24);
}

}  // namespace weft

#endif
