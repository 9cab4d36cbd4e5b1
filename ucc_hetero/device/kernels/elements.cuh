/* Element types: half precisions, complex numbers, and the types in which they are computed. */
#include "arith.h"

struct half_t {
    unsigned short bits;
};
struct bfloat_t {
    unsigned short bits;
};
template <class R> struct pair {
    R re, im;
};
template <class R> __device__ pair<R> operator+(pair<R> a, pair<R> b) { return {a.re + b.re, a.im + b.im}; }
template <class R> __device__ pair<R> operator*(pair<R> a, pair<R> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> struct wide {
    typedef T type;
};
template <> struct wide<half_t> {
    typedef float type;
};
template <> struct wide<bfloat_t> {
    typedef float type;
};

template <class T> __device__ T load(T x) { return x; }
__device__ float load(half_t x) { return from_half(x.bits); }
__device__ float load(bfloat_t x) { return from_bhalf(x.bits); }

template <class T> struct store {
    static __device__ T from(T x) { return x; }
};
template <> struct store<half_t> {
    static __device__ half_t from(float x) { return {to_half(x)}; }
};
template <> struct store<bfloat_t> {
    static __device__ bfloat_t from(float x) { return {to_bhalf(x)}; }
};
