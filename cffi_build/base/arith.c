/* Element-wise work on host memory: what libucc does not do there (float16), or does not do locally.
 *
 * Datatypes are UCC's predefined ids. Half precisions are combined in float and rounded to nearest even once. */
#include <complex.h>
#include <math.h>
#include <string.h>

#include "base/ucch.h"

enum { I8, I16, I32, I64, I128, U8, U16, U32, U64, U128, F16, F32, F64, BF16, F128, C64, C128 };
enum { SUM, PROD, MAX, MIN, LAND, LOR, LXOR, BAND, BOR, BXOR };

typedef struct half {
    uint16_t bits;
} half;
typedef struct bhalf {
    uint16_t bits;
} bhalf;

static float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static float from_half(half h) {
    uint32_t sign = (uint32_t)(h.bits & 0x8000) << 16, mantissa = h.bits & 0x3ff;
    int exponent = (h.bits >> 10) & 31;
    if (exponent == 31)
        return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent)
        return float_of(sign | (uint32_t)(exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

/* IEEE 754 binary32 to binary16, round to nearest, ties to even. */
static half to_half(float f) {
    uint32_t bits = bits_of(f), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000)
        return (half){(uint16_t)(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) /* 65520 and above round to infinity */
        return (half){(uint16_t)(sign | 0x7c00)};
    if (magnitude < 0x38800000) { /* below 2^-14: subnormal, in units of 2^-24; rintf rounds to even */
        return (half){(uint16_t)(sign | (uint16_t)rintf(float_of(magnitude) * 0x1p24f))};
    }
    magnitude += 0xfff + (magnitude >> 13 & 1) - (112u << 23);
    return (half){(uint16_t)(sign | magnitude >> 13)};
}

static float from_bhalf(bhalf b) {
    return float_of((uint32_t)b.bits << 16);
}

static bhalf to_bhalf(float f) {
    uint32_t bits = bits_of(f);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (bhalf){(uint16_t)(bits >> 16 | 0x40)};
    return (bhalf){(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

/* An element in memory of the caller's, wherever that begins and whatever it was written as. */
#define PLACE(type, name)                                                                                              \
    typedef struct {                                                                                                   \
        type is;                                                                                                       \
    } __attribute__((packed, may_alias)) name
#define LOOP(type, expr)                                                                                               \
    do {                                                                                                               \
        PLACE(type, place);                                                                                            \
        const place *restrict s = src;                                                                                 \
        place *restrict d = dst;                                                                                       \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            type a = d[i].is, b = s[i].is;                                                                             \
            d[i].is = (type)(expr);                                                                                    \
        }                                                                                                              \
    } while (0)
#define LOOP_HALF(type, from, to, expr)                                                                                \
    do {                                                                                                               \
        PLACE(type, place);                                                                                            \
        const place *restrict s = src;                                                                                 \
        place *restrict d = dst;                                                                                       \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            float a = from(d[i].is), b = from(s[i].is);                                                                \
            d[i].is = to(expr);                                                                                        \
        }                                                                                                              \
    } while (0)

#define CASE(op, loop, ...)                                                                                            \
    case op:                                                                                                           \
        loop(__VA_ARGS__);                                                                                             \
        return 0;

/* a op b with a the lower contribution. Integers wrap around, for which C has the unsigned ones only; the compiler
 * makes the operation as narrow as its result. */
#define WHOLE_OPS(type)                                                                                                \
    CASE(SUM, LOOP, type, (uint64_t)a + (uint64_t)b) CASE(PROD, LOOP, type, (uint64_t)a *(uint64_t)b)
#define REAL_OPS(loop, ...) CASE(SUM, loop, __VA_ARGS__, a + b) CASE(PROD, loop, __VA_ARGS__, (a) * (b))
/* Max and min keep NaN, as numpy does. */
#define ORDER_OPS(loop, ...)                                                                                           \
    CASE(MAX, loop, __VA_ARGS__, a != a || a > b ? a : b) CASE(MIN, loop, __VA_ARGS__, a != a || a < b ? a : b)
#define BIT_OPS(type)                                                                                                  \
    CASE(LAND, LOOP, type, (a) && (b))                                                                                 \
    CASE(LOR, LOOP, type, (a) || (b))                                                                                  \
    CASE(LXOR, LOOP, type, !a != !b)                                                                                   \
    CASE(BAND, LOOP, type, (a) & (b))                                                                                  \
    CASE(BOR, LOOP, type, (a) | (b))                                                                                   \
    CASE(BXOR, LOOP, type, (a) ^ (b))
#define COMBINE(name, ...)                                                                                             \
    static int name(int op, const void *src, void *dst, uint64_t n) {                                                  \
        switch (op) {                                                                                                  \
            __VA_ARGS__                                                                                                \
        default:                                                                                                       \
            return -1;                                                                                                 \
        }                                                                                                              \
    }
#define COMBINE_INT(name, type) COMBINE(name, WHOLE_OPS(type) ORDER_OPS(LOOP, type) BIT_OPS(type))
#define COMBINE_REAL(name, ...) COMBINE(name, REAL_OPS(__VA_ARGS__) ORDER_OPS(__VA_ARGS__))
#define COMBINE_COMPLEX(name, type) COMBINE(name, REAL_OPS(LOOP, type))

COMBINE_INT(combine_i8, int8_t)
COMBINE_INT(combine_i16, int16_t)
COMBINE_INT(combine_i32, int32_t)
COMBINE_INT(combine_i64, int64_t)
COMBINE_INT(combine_u8, uint8_t)
COMBINE_INT(combine_u16, uint16_t)
COMBINE_INT(combine_u32, uint32_t)
COMBINE_INT(combine_u64, uint64_t)
COMBINE_REAL(combine_f32, LOOP, float)
COMBINE_REAL(combine_f64, LOOP, double)
COMBINE_REAL(combine_f16, LOOP_HALF, half, from_half, to_half)
COMBINE_REAL(combine_bf16, LOOP_HALF, bhalf, from_bhalf, to_bhalf)
COMBINE_COMPLEX(combine_c64, float complex)
COMBINE_COMPLEX(combine_c128, double complex)

typedef int combine_fn(int op, const void *src, void *dst, uint64_t n);

static combine_fn *const combiners[] = {
    [I8] = combine_i8,   [I16] = combine_i16,   [I32] = combine_i32, [I64] = combine_i64,   [U8] = combine_u8,
    [U16] = combine_u16, [U32] = combine_u32,   [U64] = combine_u64, [F16] = combine_f16,   [F32] = combine_f32,
    [F64] = combine_f64, [BF16] = combine_bf16, [C64] = combine_c64, [C128] = combine_c128,
};

/* dst = dst op src, element by element. dtype: UCC datatype (id << 3). */
int ucch_combine(int op, int dtype, const void *src, void *dst, uint64_t n) {
    unsigned id = (unsigned)dtype >> 3;
    if (id >= sizeof(combiners) / sizeof(*combiners) || !combiners[id])
        return UCCH_FAIL_ARGUMENT;
    return combiners[id](op, src, dst, n) ? UCCH_FAIL_ARGUMENT : 0;
}

#define CONVERT(from_type, to_type, expr)                                                                              \
    do {                                                                                                               \
        PLACE(from_type, from_place);                                                                                  \
        PLACE(to_type, to_place);                                                                                      \
        const from_place *restrict s = src;                                                                            \
        to_place *restrict d = dst;                                                                                    \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            from_type x = s[i].is;                                                                                     \
            d[i].is = expr;                                                                                            \
        }                                                                                                              \
        return 0;                                                                                                      \
    } while (0)

/* Between float and the half precisions, both ways. */
int ucch_cast(int from, int to, const void *src, void *dst, uint64_t n) {
    from >>= 3;
    to >>= 3;
    if (from == F16 && to == F32)
        CONVERT(half, float, from_half(x));
    if (from == F32 && to == F16)
        CONVERT(float, half, to_half(x));
    if (from == BF16 && to == F32)
        CONVERT(bhalf, float, from_bhalf(x));
    if (from == F32 && to == BF16)
        CONVERT(float, bhalf, to_bhalf(x));
    return UCCH_FAIL_ARGUMENT;
}

#define SCALE(type, expr)                                                                                              \
    do {                                                                                                               \
        PLACE(type, place);                                                                                            \
        place *d = data;                                                                                               \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            type x = d[i].is;                                                                                          \
            d[i].is = expr;                                                                                            \
        }                                                                                                              \
        return 0;                                                                                                      \
    } while (0)

/* Divide by a rank count, in place; integers truncate towards zero (as torch's AVG). */
int ucch_scale(int dtype, void *data, uint64_t n, double by) {
    int64_t whole = (int64_t)by;
    switch (dtype >> 3) {
    case I8:
        SCALE(int8_t, (int8_t)(x / whole));
    case I16:
        SCALE(int16_t, (int16_t)(x / whole));
    case I32:
        SCALE(int32_t, (int32_t)(x / whole));
    case I64:
        SCALE(int64_t, x / whole);
    case U8:
        SCALE(uint8_t, (uint8_t)(x / (uint64_t)whole));
    case U16:
        SCALE(uint16_t, (uint16_t)(x / (uint64_t)whole));
    case U32:
        SCALE(uint32_t, (uint32_t)(x / (uint64_t)whole));
    case U64:
        SCALE(uint64_t, x / (uint64_t)whole);
    case F16:
        SCALE(half, to_half(from_half(x) / (float)by));
    case BF16:
        SCALE(bhalf, to_bhalf(from_bhalf(x) / (float)by));
    case F32:
        SCALE(float, x / (float)by);
    case F64:
        SCALE(double, x / by);
    case C64:
        SCALE(float complex, x / (float)by);
    case C128:
        SCALE(double complex, x / by);
    default:
        return UCCH_FAIL_ARGUMENT;
    }
}
