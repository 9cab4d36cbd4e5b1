/* Element-wise arithmetic in host memory that libucc does not do there (float16), or only between ranks. */
#include <complex.h>

#include "base/base.h"

#include "kernels/arith.h"

enum { I8, I16, I32, I64, I128, U8, U16, U32, U64, U128, F16, F32, F64, BF16, F128, C64, C128 };
enum { E4M3FN = UCCH_E4M3FN >> 3, E4M3FNUZ = UCCH_E4M3FNUZ >> 3 };
enum { SUM, PROD, MAX, MIN, LAND, LOR, LXOR, BAND, BOR, BXOR };

/* An element in the caller's memory, at any alignment and of any declared type. */
#define PLACE(type, name)                                                                                              \
    typedef struct {                                                                                                   \
        type is;                                                                                                       \
    } __attribute__((packed, may_alias)) name
/* Loop over elements stored as `kept` and computed as `type`; `from` and `to` convert between them. */
#define LOOP(kept, type, from, to, expr)                                                                               \
    do {                                                                                                               \
        PLACE(kept, place);                                                                                            \
        const place *restrict s = src;                                                                                 \
        place *restrict d = dst;                                                                                       \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            type a = from(d[i].is), b = from(s[i].is);                                                                 \
            d[i].is = (kept)to(expr);                                                                                  \
        }                                                                                                              \
    } while (0)
#define SAME(x) (x)
#define PLAIN(type) type, type, SAME, SAME

#define CASE(op, ...)                                                                                                  \
    case op:                                                                                                           \
        LOOP(__VA_ARGS__);                                                                                             \
        return 0;

/* a op b, where a is the contribution of the lower rank. Integers wrap around, which C guarantees for unsigned types
 * only; the compiler narrows the operation to the result's type. */
#define WHOLE_OPS(type)                                                                                                \
    CASE(SUM, PLAIN(type), UCCH_SUM((uint64_t)a, (uint64_t)b))                                                         \
    CASE(PROD, PLAIN(type), UCCH_PROD((uint64_t)a, (uint64_t)b))
#define SUM_OPS(...) CASE(SUM, __VA_ARGS__, UCCH_SUM(a, b)) CASE(PROD, __VA_ARGS__, UCCH_PROD(a, b))
#define ORDER_OPS(...) CASE(MAX, __VA_ARGS__, UCCH_MAX(a, b)) CASE(MIN, __VA_ARGS__, UCCH_MIN(a, b))
#define BIT_OPS(type)                                                                                                  \
    CASE(LAND, PLAIN(type), UCCH_LAND(a, b))                                                                           \
    CASE(LOR, PLAIN(type), UCCH_LOR(a, b))                                                                             \
    CASE(LXOR, PLAIN(type), UCCH_LXOR(a, b))                                                                           \
    CASE(BAND, PLAIN(type), UCCH_BAND(a, b))                                                                           \
    CASE(BOR, PLAIN(type), UCCH_BOR(a, b))                                                                             \
    CASE(BXOR, PLAIN(type), UCCH_BXOR(a, b))
#define COMBINE(id, ...)                                                                                               \
    case id:                                                                                                           \
        switch (op) { __VA_ARGS__ }                                                                                    \
        break;
#define COMBINE_INT(id, type) COMBINE(id, WHOLE_OPS(type) ORDER_OPS(PLAIN(type)) BIT_OPS(type))
#define COMBINE_REAL(id, ...) COMBINE(id, SUM_OPS(__VA_ARGS__) ORDER_OPS(__VA_ARGS__))
#define COMBINE_COMPLEX(id, type) COMBINE(id, SUM_OPS(PLAIN(type)))

/* Versions with and without AVX2, chosen by the loader; sanitizers do not support that. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* dst = dst op src, element by element. dtype: UCC datatype (id << 3). */
WIDE int ucch_combine(int op, int dtype, const void *src, void *dst, uint64_t n) {
    switch (dtype >> 3) {
        COMBINE_INT(I8, int8_t)
        COMBINE_INT(I16, int16_t)
        COMBINE_INT(I32, int32_t)
        COMBINE_INT(I64, int64_t)
        COMBINE_INT(U8, uint8_t)
        COMBINE_INT(U16, uint16_t)
        COMBINE_INT(U32, uint32_t)
        COMBINE_INT(U64, uint64_t)
        COMBINE_REAL(F32, PLAIN(float))
        COMBINE_REAL(F64, PLAIN(double))
        COMBINE_REAL(F16, uint16_t, float, from_half, to_half)
        COMBINE_REAL(BF16, uint16_t, float, from_bhalf, to_bhalf)
        COMBINE_COMPLEX(C64, float complex)
        COMBINE_COMPLEX(C128, double complex)
    }
    return UCCH_FAIL_ARGUMENT;
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

/* Every number of one half precision in the other: a look-up is six times as fast as computing it. */
static uint16_t bhalf_of[1 << 16], half_of[1 << 16];

static void make_tables(void) {
    for (unsigned x = 0; x < 1 << 16; x++) {
        bhalf_of[x] = to_bhalf(from_half((uint16_t)x));
        half_of[x] = to_half(from_bhalf((uint16_t)x));
    }
}

/* Convert between float32 and both half precisions, between these two, and between the vendors' float8 formats. */
WIDE int ucch_cast(int from, int to, const void *src, void *dst, uint64_t n) {
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

/* Divide by a rank count, in place. Integers truncate towards zero, like torch's AVG. */
WIDE int ucch_scale(int dtype, void *data, uint64_t n, double by) {
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
