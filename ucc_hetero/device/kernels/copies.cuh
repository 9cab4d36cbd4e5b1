/* Copies by a block. Loads and stores bypass caches, as other devices write the data, and several are in flight at a
 * time. On AMD each volatile access is waited for before the next; relaxed atomics of system scope are not (LLVM's
 * AMDGPUUsage, memory model). */
#ifdef __AMDGCN__
#define READ(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define WRITE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#else
#define READ(p) (*(const volatile T *)(p))
#define WRITE(p, v) (*(volatile T *)(p) = (v))
#endif
/* Sixteen bytes: one load or store in CUDA, two atomics on AMD. */
#if defined(__CUDA_ARCH__)
struct quad {
    unsigned long long x, y;
};
__device__ quad fetch(const quad *p) {
    quad v;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ void put(quad *p, quad v) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" : : "l"(p), "l"(v.x), "l"(v.y) : "memory");
}
#else
typedef unsigned long long quad;
#endif
template <class T> __device__ T fetch(const T *p) { return READ(p); }
template <class T> __device__ void put(T *p, T v) { WRITE(p, v); }
/* Each thread has `some` elements in flight. */
template <class T, unsigned some> __device__ void copy(void *to, const void *from, unsigned bytes) {
    const unsigned n = bytes / sizeof(T), far = some * blockDim.x;
    T *dst = (T *)to;
    const T *src = (const T *)from;
    unsigned i = threadIdx.x;
    for (; i + far - blockDim.x < n; i += far) {
        T held[some];
        for (unsigned k = 0; k < some; k++)
            held[k] = fetch(src + i + k * blockDim.x);
        for (unsigned k = 0; k < some; k++)
            put(dst + i + k * blockDim.x, held[k]);
    }
    for (; i < n; i += blockDim.x)
        put(dst + i, fetch(src + i));
}
__device__ unsigned long long alignment(const void *dst, const void *src, unsigned bytes) {
    return (unsigned long long)dst | (unsigned long long)src | bytes;
}
__device__ void copy_bytes(void *dst, const void *src, unsigned bytes) {
    unsigned long long all = alignment(dst, src, bytes);
    if (all % 8 == 0)
        copy<unsigned long long, 8>(dst, src, bytes);
    else if (all % 4 == 0)
        copy<unsigned, 8>(dst, src, bytes);
    else
        copy<unsigned char, 8>(dst, src, bytes);
}
/* For data aligned to sixteen bytes, in units of sixteen bytes, of which each thread has `some` in flight. */
template <unsigned some> __device__ void copy_quads(void *dst, const void *src, unsigned bytes) {
    if (alignment(dst, src, bytes) % 16 == 0)
        copy<quad, sizeof(quad) == 16 ? some : 8>(dst, src, bytes);
    else
        copy_bytes(dst, src, bytes);
}
