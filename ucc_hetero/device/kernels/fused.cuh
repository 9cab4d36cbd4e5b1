/* All of a short call (cffi_build/coll/fused.c), one move after the other. Each block does the same slice of every
 * move, and the last block to finish a move notifies other ranks. For moves that do not depend on each other one half
 * of the blocks sends while the other half receives. */
#include "blocks.cuh"
#include "copies.cuh"
#include "layout.h"
#include "ll.cuh"
#include "words.cuh"

__device__ void combine(TO *dst, const FROM *src, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        element(dst[i], src[i], 0);
}
/* Header of a slot: the sender writes it, the receiver compares it. */
__device__ ucch_slot_header *header(const void *data) { return (ucch_slot_header *)data - 1; }
__device__ void check(const ucch_moves &all, const ucch_move &m, const void *data) {
    const volatile ucch_slot_header *h = header(data);
    if (h->hash != all.hash + m.tag || h->bytes != m.n) PUT(&all.replays->wrong.word, REPLAY_DIFFERS);
}
/* The device's counts of the channels of a graph's kernel, read at once for all moves: the move's piece number, and the
 * number of the channel's pieces known to have been consumed. */
struct counted {
    unsigned step[UCCH_MOST_MOVES], taken[UCCH_MOST_MOVES];
};
__device__ void count(const ucch_moves &all, counted &now) {
    for (unsigned k = threadIdx.x; k < all.n; k += blockDim.x) {
        const ucch_move &m = all.each[k];
        now.step[k] = m.steps ? GET(&m.steps->pieces) + m.value : 0;
        now.taken[k] = m.steps ? GET(&m.steps->taken) : 0;
    }
}
/* Begin a kernel of a graph. If another one is `running`, it uses the same slots. Hosts read only these words. */
__device__ void enter(const ucch_moves &all, unsigned number, unsigned running) {
    if (running) PUT(&all.replays->wrong.word, REPLAY_OVERLAPS);
    PUT(&all.replays->begun.word, number);
}
/* The last block has finished: add the pieces that the channels have carried. */
__device__ void leave(const ucch_moves &all, const counted &now, unsigned number) {
    for (unsigned k = 0; k < all.n; k++)
        if (all.each[k].steps) PUT(&all.each[k].steps->pieces, now.step[k] + 1);
    PUT(&all.counts->running, 0);
    PUT(&all.counts->ended, number);
    PUT(&all.replays->ended.word, number);
}
/* Wait for what a move needs; only the first block does. A sender in a graph reads the receiver's word only once per
 * round of the ring, as a read of host memory takes as long as everything else. */
__device__ void await_move(const ucch_moves &all, const ucch_move &m, unsigned step, unsigned taken) {
    if (!all.replays)
        AWAIT(m.wait, m.least);
    else if (m.kind != MOVE_LL_SEND)
        AWAIT_UNLESS(m.wait, step + m.least, &all.replays->stop.word);
    else if ((int)(taken - (step + m.least)) < 0)
        PUT(&m.steps->taken, AWAIT_UNLESS(m.wait, step + m.least, &all.replays->stop.word));
}
/* Of the blocks that do a move the first one polls the word of another rank, and tells the others on the device: with
 * sixteen that polled host memory a broadcast of 16 MiB took twice as long (H200). Blocks of the LL protocol have no
 * words in common: they poll data, and seldom wait for a slot. */
__device__ void await_together(const ucch_moves &all, const ucch_move &m, unsigned k, unsigned block,
                               const counted &now, unsigned number) {
    if (m.kind == MOVE_LL_SEND || block == 0) await_move(all, m, now.step[k], now.taken[k]);
    if (m.kind == MOVE_LL_SEND || all.width == 1) return;
    if (block == 0) PUT(&all.by_move->passed[k], number);
    while (GET(&all.by_move->passed[k]) != number)
        NAP();
    __threadfence_system();
}
/* Notify another rank that all blocks have finished a move. A move whose data has flags needs this only for hosts. */
__device__ void tell(const ucch_moves &all, const ucch_move &m, unsigned k, unsigned step, void *dst) {
    const bool flags = m.kind >= MOVE_LL_SEND;
    if (all.width > 1 && !flags) __threadfence_system();
    if (all.width > 1 && atomicInc(&all.by_move->arrived[k], all.width - 1) != all.width - 1) return;
    if (m.slot == SLOT_DST && !flags) {
        volatile ucch_slot_header *h = header(dst);
        h->hash = all.hash + m.tag;
        h->bytes = m.n;
    }
    if (!flags) __threadfence_system();
    PUT(m.tell, m.steps ? step + 1 : m.value);
}
extern "C" __global__ RESIDENT void ucch(ucch_moves all) {
    __shared__ counted now;
    const bool halves = all.width < gridDim.x, receives = blockIdx.x >= all.width;
    const unsigned block = receives ? blockIdx.x - all.width : blockIdx.x;
    const bool first = block == 0 && threadIdx.x == 0;
    const bool enters = all.replays && blockIdx.x == 0 && threadIdx.x == blockDim.x - 1;
    /* These reads and exchanges are used only behind the barrier, so that all are in flight at once. */
    const unsigned running = enters ? atomicExch(&all.counts->running, 1) : 0;
    const unsigned number = all.replays ? GET(&all.counts->ended) + 1 : all.number;
    count(all, now);
    __syncthreads();
    if (enters) enter(all, number, running);
    for (unsigned k = 0; k < all.n; k++) {
        const ucch_move m = all.each[k];
        if (halves && receives != (m.slot == SLOT_SRC)) continue;
        const unsigned bytes = m.kind == MOVE_COMBINE ? m.n * (unsigned)sizeof(TO) : m.n;
        const unsigned from = (unsigned)edge(bytes, block, all.width), to = (unsigned)edge(bytes, block + 1, all.width);
        const unsigned step = now.step[k];
        const unsigned long long at = (unsigned long long)(step % UCCH_RING_SLOTS) * m.stride;
        char *dst = (char *)m.dst + (m.slot == SLOT_DST ? at : 0);
        const char *src = (const char *)m.src + (m.slot == SLOT_SRC ? at : 0);
        if (m.wait && threadIdx.x == 0) await_together(all, m, k, block, now, number);
        __syncthreads();
        if (first && m.kind == MOVE_COPY && m.slot == SLOT_SRC) check(all, m, src);
        if (m.kind == MOVE_COPY)
            copy_bytes(dst + from, src + from, to - from);
        else if (m.kind == MOVE_COMBINE)
            combine((TO *)(dst + from), (const FROM *)(src + from), (to - from) / sizeof(TO));
        else if (m.kind >= MOVE_LL_SEND)
            ll_move({m.kind == MOVE_LL_SEND ? (char *)src : dst, m.kind == MOVE_LL_SEND ? dst : (char *)src,
                     (const char *)m.own, m.kind, from, to, m.n, step + 1 ? step + 1 : 1, all.hash + m.tag},
                    all.replays);
        DONE();
        __syncthreads();
        if (m.tell && threadIdx.x == 0) tell(all, m, k, step, dst);
    }
    if (all.replays && threadIdx.x == 0 &&
        (gridDim.x == 1 || atomicInc(all.counts->blocks, gridDim.x - 1) == gridDim.x - 1))
        leave(all, now, number);
}
