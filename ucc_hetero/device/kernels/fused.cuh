/* All of a short call (cffi_build/coll/fused.c), one move after the other. Every block does the same slice of each, and
 * the last to have done so tells other ranks. */
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

__device__ void combine(TO *dst, const FROM *src, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        element(dst[i], src[i], 0);
}
__device__ unsigned edge(unsigned bytes, unsigned block) {
    unsigned long long at = (unsigned long long)((bytes + 63) / 64) * block / gridDim.x * 64;
    return at < bytes ? (unsigned)at : bytes;
}
extern "C" __global__ RESIDENT void ucch(ucch_moves all) {
    for (unsigned k = 0; k < all.n; k++) {
        const ucch_move m = all.each[k];
        const unsigned bytes = m.kind == MOVE_COMBINE ? m.n * (unsigned)sizeof(TO) : m.n;
        const unsigned from = edge(bytes, blockIdx.x), to = edge(bytes, blockIdx.x + 1);
        if (m.wait && threadIdx.x == 0) AWAIT(m.wait, m.least);
        __syncthreads();
        char *dst = (char *)m.dst + from;
        const char *src = (const char *)m.src + from;
        if (m.kind == MOVE_COPY)
            copy_bytes(dst, src, to - from);
        else if (m.kind == MOVE_COMBINE)
            combine((TO *)dst, (const FROM *)src, (to - from) / sizeof(TO));
        DONE();
        __syncthreads();
        if (m.tell && threadIdx.x == 0) {
            __threadfence_system();
            if (gridDim.x == 1 || atomicInc(all.arrived + k, gridDim.x - 1) == gridDim.x - 1) {
                __threadfence_system();
                PUT(m.tell, m.value);
            }
        }
    }
}
