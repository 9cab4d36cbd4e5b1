/* Element-wise work on host memory: what libucc does not do there (float16), or does not do locally.
 *
 * Datatypes are UCC's predefined ids. */
#include <complex.h>
#include <pthread.h>

#include "base/ucch.h"

#include "kernels/arith.h"

enum { I8, I16, I32, I64, I128, U8, U16, U32, U64, U128, F16, F32, F64, BF16, F128, C64, C128 };
enum { E4M3FN = UCCH_E4M3FN >> 3, E4M3FNUZ = UCCH_E4M3FNUZ >> 3 };
enum { SUM, PROD, MAX, MIN, LAND, LOR, LXOR, BAND, BOR, BXOR };

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
#define LOOP_HALF(from, to, expr)                                                                                      \
    do {                                                                                                               \
        PLACE(uint16_t, place);                                                                                        \
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
    CASE(SUM, LOOP, type, UCCH_SUM((uint64_t)a, (uint64_t)b))                                                          \
    CASE(PROD, LOOP, type, UCCH_PROD((uint64_t)a, (uint64_t)b))
#define REAL_OPS(loop, ...) CASE(SUM, loop, __VA_ARGS__, UCCH_SUM(a, b)) CASE(PROD, loop, __VA_ARGS__, UCCH_PROD(a, b))
#define ORDER_OPS(loop, ...) CASE(MAX, loop, __VA_ARGS__, UCCH_MAX(a, b)) CASE(MIN, loop, __VA_ARGS__, UCCH_MIN(a, b))
#define BIT_OPS(type)                                                                                                  \
    CASE(LAND, LOOP, type, UCCH_LAND(a, b))                                                                            \
    CASE(LOR, LOOP, type, UCCH_LOR(a, b))                                                                              \
    CASE(LXOR, LOOP, type, UCCH_LXOR(a, b))                                                                            \
    CASE(BAND, LOOP, type, UCCH_BAND(a, b))                                                                            \
    CASE(BOR, LOOP, type, UCCH_BOR(a, b))                                                                              \
    CASE(BXOR, LOOP, type, UCCH_BXOR(a, b))
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
COMBINE_REAL(combine_f16, LOOP_HALF, from_half, to_half)
COMBINE_REAL(combine_bf16, LOOP_HALF, from_bhalf, to_bhalf)
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
    if (id >= sizeof(combiners) / sizeof(*combiners) || !combiners[id]) return UCCH_FAIL_ARGUMENT;
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

/* All numbers of either half precision in the other: looked up six times as fast as computed. */
static uint16_t bhalf_of[1 << 16], half_of[1 << 16];

static void make_tables(void) {
    for (unsigned x = 0; x < 1 << 16; x++) {
        bhalf_of[x] = to_bhalf(from_half((uint16_t)x));
        half_of[x] = to_half(from_bhalf((uint16_t)x));
    }
}

/* Between float and the half precisions, and between the float8 of vendors, both ways. */
int ucch_cast(int from, int to, const void *src, void *dst, uint64_t n) {
    from >>= 3;
    to >>= 3;
    if (from == F16 && to == F32) CONVERT(uint16_t, float, from_half(x));
    if (from == F32 && to == F16) CONVERT(float, uint16_t, to_half(x));
    if (from == BF16 && to == F32) CONVERT(uint16_t, float, from_bhalf(x));
    if (from == F32 && to == BF16) CONVERT(float, uint16_t, to_bhalf(x));
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if ((from == F16 && to == BF16) || (from == BF16 && to == F16)) pthread_once(&once, make_tables);
    if (from == F16 && to == BF16) CONVERT(uint16_t, uint16_t, bhalf_of[x]);
    if (from == BF16 && to == F16) CONVERT(uint16_t, uint16_t, half_of[x]);
    if (from == E4M3FN && to == E4M3FNUZ) CONVERT(uint8_t, uint8_t, e4m3fn_to_fnuz(x));
    if (from == E4M3FNUZ && to == E4M3FN) CONVERT(uint8_t, uint8_t, e4m3fnuz_to_fn(x));
    return UCCH_FAIL_ARGUMENT;
}

#define SCALE(id, type, expr)                                                                                          \
    case id: {                                                                                                         \
        PLACE(type, place);                                                                                            \
        place *d = data;                                                                                               \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            type x = d[i].is;                                                                                          \
            d[i].is = (type)(expr);                                                                                    \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

/* Divide by a rank count, in place; integers truncate towards zero (as torch's AVG). */
int ucch_scale(int dtype, void *data, uint64_t n, double by) {
    int64_t whole = (int64_t)by;
    switch (dtype >> 3) {
        SCALE(I8, int8_t, x / whole)
        SCALE(I16, int16_t, x / whole)
        SCALE(I32, int32_t, x / whole)
        SCALE(I64, int64_t, x / whole)
        SCALE(U8, uint8_t, x / (uint64_t)whole)
        SCALE(U16, uint16_t, x / (uint64_t)whole)
        SCALE(U32, uint32_t, x / (uint64_t)whole)
        SCALE(U64, uint64_t, x / (uint64_t)whole)
        SCALE(F16, uint16_t, to_half(from_half(x) / (float)by))
        SCALE(BF16, uint16_t, to_bhalf(from_bhalf(x) / (float)by))
        SCALE(F32, float, x / (float)by)
        SCALE(F64, double, x / by)
        SCALE(C64, float complex, x / (float)by)
        SCALE(C128, double complex, x / by)
    default:
        return UCCH_FAIL_ARGUMENT;
    }
}
