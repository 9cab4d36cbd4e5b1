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
/* The header of a slot: what the sender says, and the receiver compares. */
__device__ ucch_slot_header *header(const void *data) { return (ucch_slot_header *)data - 1; }
__device__ void check(const ucch_moves &all, const ucch_move &m, const void *data) {
    const volatile ucch_slot_header *h = header(data);
    if (h->hash != all.hash || h->bytes != m.n) PUT(&all.replays->wrong.word, REPLAY_DIFFERS);
}
/* A kernel of a graph begins: another that still runs has the same slots. Hosts look at these words and at nothing
 * else. */
__device__ void enter(const ucch_moves &all) {
    if (atomicExch(&all.counts->running, 1)) PUT(&all.replays->wrong.word, REPLAY_OVERLAPS);
    PUT(&all.replays->begun.word, all.counts->ended + 1);
}
/* The last block has done its part: the channels have carried so many pieces more. */
__device__ void leave(const ucch_moves &all) {
    for (unsigned k = 0; k < all.n; k++)
        if (all.each[k].steps) ++*all.each[k].steps;
    all.counts->running = 0;
    PUT(&all.replays->ended.word, ++all.counts->ended);
}
extern "C" __global__ RESIDENT void ucch(ucch_moves all) {
    const bool first = blockIdx.x == 0 && threadIdx.x == 0;
    if (all.replays && first) enter(all);
    for (unsigned k = 0; k < all.n; k++) {
        const ucch_move m = all.each[k];
        const unsigned bytes = m.kind == MOVE_COMBINE ? m.n * (unsigned)sizeof(TO) : m.n;
        const unsigned from = edge(bytes, blockIdx.x), to = edge(bytes, blockIdx.x + 1);
        const unsigned step = m.steps ? GET(m.steps) + m.value : 0;
        const unsigned long long at = (unsigned long long)(step % UCCH_RING_SLOTS) * m.stride;
        char *dst = (char *)m.dst + (m.slot == SLOT_DST ? at : 0);
        const char *src = (const char *)m.src + (m.slot == SLOT_SRC ? at : 0);
        if (m.wait && threadIdx.x == 0) {
            if (all.replays)
                AWAIT_UNLESS(m.wait, step + m.least, &all.replays->stop.word);
            else
                AWAIT(m.wait, m.least);
        }
        __syncthreads();
        if (first && m.slot == SLOT_SRC) check(all, m, src);
        if (m.kind == MOVE_COPY)
            copy_bytes(dst + from, src + from, to - from);
        else if (m.kind == MOVE_COMBINE)
            combine((TO *)(dst + from), (const FROM *)(src + from), (to - from) / sizeof(TO));
        DONE();
        __syncthreads();
        if (m.tell && threadIdx.x == 0) {
            if (gridDim.x > 1) __threadfence_system();
            if (gridDim.x == 1 || atomicInc(all.arrived + k, gridDim.x - 1) == gridDim.x - 1) {
                if (m.slot == SLOT_DST) {
                    volatile ucch_slot_header *h = header(dst);
                    h->hash = all.hash;
                    h->bytes = m.n;
                }
                __threadfence_system();
                PUT(m.tell, m.steps ? step + 1 : m.value);
            }
        }
    }
    if (all.replays && threadIdx.x == 0 && atomicInc(all.counts->blocks, gridDim.x - 1) == gridDim.x - 1) leave(all);
}
