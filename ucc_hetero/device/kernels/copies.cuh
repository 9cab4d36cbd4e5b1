/* Copies by a block. Loads and stores pass caches by, as others write what is read, and several are under way at a
 * time. On AMD a volatile access is waited for before the next begins; a relaxed atomic one of system scope is not
 * (LLVM's AMDGPUUsage, memory model). */
#ifdef __AMDGCN__
#define READ(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define WRITE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#else
#define READ(p) (*(const volatile T *)(p))
#define WRITE(p, v) (*(volatile T *)(p) = (v))
#endif
template <class T> __device__ void copy(void *to, const void *from, unsigned bytes) {
    const unsigned n = bytes / sizeof(T), some = 8, far = some * blockDim.x;
    T *dst = (T *)to;
    const T *src = (const T *)from;
    unsigned i = threadIdx.x;
    for (; i + far - blockDim.x < n; i += far) {
        T held[some];
        for (unsigned k = 0; k < some; k++)
            held[k] = READ(src + i + k * blockDim.x);
        for (unsigned k = 0; k < some; k++)
            WRITE(dst + i + k * blockDim.x, held[k]);
    }
    for (; i < n; i += blockDim.x)
        WRITE(dst + i, READ(src + i));
}
__device__ void copy_bytes(void *dst, const void *src, unsigned bytes) {
    unsigned long long all = (unsigned long long)dst | (unsigned long long)src | bytes;
    if (all % 8 == 0)
        copy<unsigned long long>(dst, src, bytes);
    else if (all % 4 == 0)
        copy<unsigned>(dst, src, bytes);
    else
        copy<unsigned char>(dst, src, bytes);
}
