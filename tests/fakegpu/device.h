/* Built-ins of CUDA's and HIP's compilers, for kernels that are compiled for the host (building.py, blocks.h). */
#include <cmath>
#include <cstddef>
#include <cstring>

#define __device__
#define __global__

struct fakegpu_place {
    unsigned x;
};
extern "C" {
unsigned fakegpu_place_of(int which) __attribute__((const));
void *fakegpu_shared(unsigned which) __attribute__((const));
void __syncthreads(void);
void __threadfence_system(void);
unsigned atomicExch(unsigned *at, unsigned value);
unsigned atomicInc(unsigned *at, unsigned most);
}
#define threadIdx (fakegpu_place{fakegpu_place_of(0)})
#define blockIdx (fakegpu_place{fakegpu_place_of(1)})
#define blockDim (fakegpu_place{fakegpu_place_of(2)})
#define gridDim (fakegpu_place{fakegpu_place_of(3)})

/* Reading a word again is a wait (blocks.h). */
static inline void __nanosleep(unsigned) {}
static inline void __builtin_amdgcn_s_sleep(int) {}

static inline float __uint_as_float(unsigned u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    std::memcpy(&u, &f, 4);
    return u;
}

/* A kernel's argument is a struct, or source, destination, number of elements and a factor. */
#define UNSEEN __attribute__((no_sanitize("thread")))
template <class A> UNSEEN static void fakegpu_enter(void (*kernel)(A), void **p) { kernel(*(A *)p[0]); }
template <class S, class D>
UNSEEN static void fakegpu_enter(void (*kernel)(S, D, unsigned long long, double), void **p) {
    kernel(*(S *)p[0], *(D *)p[1], *(unsigned long long *)p[2], *(double *)p[3]);
}
template <class A> constexpr size_t fakegpu_bytes(void (*)(A)) { return sizeof(A); }
template <class S, class D> constexpr size_t fakegpu_bytes(void (*)(S, D, unsigned long long, double)) { return 0; }

/* As blocks.h has it. */
struct fakegpu_kernel {
    const char *name, *text;
    void (*enter)(void **arguments);
    size_t bytes;
};
