/* Words in memory that other devices read or write. They only grow, and wrap around (cffi_build/shm/channels.c). There
 * is a fence behind each polling loop and before each store, so the accesses themselves can be relaxed: on AMD an
 * acquire load would invalidate caches at every poll. RCCL uses relaxed loads too, except on GFX12.
 *
 * DONE: waits until this wave's stores have arrived. All threads call it before a barrier behind which one thread
 * notifies others. AMD's barrier does not wait for stores, and a fence covers only its own wave.
 * RESIDENT: limits registers so that as many blocks run at once as the device has threads for, on which the engine
 * relies when kernels wait for each other. Without it an A100 runs one such block per multiprocessor instead of four.
 * Hopper's kernels stay as measured: two blocks, or 264 on an H200, where ten messages may want 320. */
#ifdef __AMDGCN__
#if defined(__GFX12__)
#define GET(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#else
#define GET(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#endif
#define PUT(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#define NAP() __builtin_amdgcn_s_sleep(4)
#define BACKOFF() __builtin_amdgcn_s_sleep(40)
#if defined(__GFX12__)
#define DONE() asm volatile("s_wait_storecnt 0x0" ::: "memory")
#elif defined(__GFX10__) || defined(__GFX11__)
#define DONE() asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory")
#elif defined(__GFX9__)
#define DONE() asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define DONE() __threadfence_system()
#endif
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
#define RESIDENT __attribute__((amdgpu_flat_work_group_size(1, 512), amdgpu_waves_per_eu(16)))
#else
#define RESIDENT __attribute__((amdgpu_flat_work_group_size(1, 512), amdgpu_waves_per_eu(8)))
#endif
#else
#define GET(p) (*(volatile unsigned *)(p))
#define PUT(p, v) (*(volatile unsigned *)(p) = (v))
#define NAP() __nanosleep(40)
#define BACKOFF() __nanosleep(400)
#define DONE()
#if __CUDA_ARCH__ == 750
#define RESIDENT __launch_bounds__(512, 2)
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define RESIDENT __launch_bounds__(512, 3)
#elif __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ != 900
#define RESIDENT __launch_bounds__(512, 4)
#else
#define RESIDENT
#endif
#endif
__device__ void AWAIT(unsigned *word, unsigned long long n) {
    while ((int)(GET(word) - (unsigned)n) < 0)
        NAP();
    __threadfence_system();
}
/* The same, but stop if another word is 1 instead of 0: nothing will come. Both words are read at once, and compared
 * once. Returns that word. */
__device__ unsigned AWAIT_UNLESS(unsigned *word, unsigned n, unsigned *stop) {
    unsigned found;
    while ((int)(((found = GET(word)) - n) & (GET(stop) - 1)) < 0)
        NAP();
    __threadfence_system();
    return found;
}
__device__ void POST(unsigned *word, unsigned long long n) {
    __threadfence_system();
    PUT(word, (unsigned)n);
}
