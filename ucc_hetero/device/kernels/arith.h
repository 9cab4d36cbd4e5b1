/* Arithmetic of the engine and its kernels. Half precisions are computed in float and rounded once, to nearest even. */
#pragma once

/* `a` is the destination's element, the lower rank's contribution. Maximum and minimum propagate NaN, as in numpy. */
#define UCCH_SUM(a, b) ((a) + (b))
#define UCCH_PROD(a, b) ((a) * (b))
#define UCCH_MAX(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define UCCH_MIN(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
#define UCCH_LAND(a, b) ((a) && (b))
#define UCCH_LOR(a, b) ((a) || (b))
#define UCCH_LXOR(a, b) (!(a) != !(b))
#define UCCH_BAND(a, b) ((a) & (b))
#define UCCH_BOR(a, b) ((a) | (b))
#define UCCH_BXOR(a, b) ((a) ^ (b))

#ifdef __cplusplus
#define UCCH_ARITH static __device__
UCCH_ARITH float float_of(unsigned bits) { return __uint_as_float(bits); }
UCCH_ARITH unsigned bits_of(float f) { return __float_as_uint(f); }
#else
#include <math.h>
#include <string.h>
#define UCCH_ARITH static inline
UCCH_ARITH float float_of(unsigned bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
UCCH_ARITH unsigned bits_of(float f) {
    unsigned bits;
    memcpy(&bits, &f, 4);
    return bits;
}
#endif

UCCH_ARITH float from_half(unsigned short half) {
    unsigned magnitude = half & 0x7fff, sign = (unsigned)(half & 0x8000) << 16, rebias = 112u << 23;
    unsigned normal = (magnitude << 13) + rebias + (magnitude < 0x7c00 ? 0 : rebias); /* or infinity, or NaN */
    unsigned tiny = bits_of((float)(int)magnitude * 5.9604644775390625e-8f);
    return float_of(sign | (magnitude < 0x400 ? tiny : normal));
}

/* IEEE 754 binary32 to binary16, round to nearest, ties to even. */
UCCH_ARITH unsigned short to_half(float f) {
    unsigned bits = bits_of(f), magnitude = bits & 0x7fffffff;
    unsigned normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    unsigned tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000; /* below 2^-14: in units of 2^-24, those of 0.5 */
    unsigned half = magnitude < 0x38800000 ? tiny : normal;
    half = magnitude < 0x477ff000 ? half : 0x7c00; /* 65520 and above round to infinity */
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return (unsigned short)((bits >> 16 & 0x8000) | half);
}

UCCH_ARITH float from_bhalf(unsigned short half) { return float_of((unsigned)half << 16); }

UCCH_ARITH unsigned short to_bhalf(float f) {
    unsigned bits = bits_of(f);
    if ((bits & 0x7fffffff) > 0x7f800000) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Float8 of one vendor as that of the other. In E4M3FNUZ the same bits are half the number; it has no -0, whose bits
 * are its NaN. So the scale doubles one way and halves the other, where the largest number is 224 of that scale. */
UCCH_ARITH unsigned char e4m3fn_to_fnuz(unsigned char x) {
    return (unsigned char)((x & 0x7f) == 0x7f ? 0x80 : x == 0x80 ? 0 : x);
}
UCCH_ARITH unsigned char e4m3fnuz_to_fn(unsigned char x) {
    return (unsigned char)(x == 0x80 ? 0x7f : (x & 0x7f) == 0x7f ? x - 1 : x);
}
