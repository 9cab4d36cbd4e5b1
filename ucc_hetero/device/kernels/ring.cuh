/* Short messages of a stage of a call that wires carry (cffi_build/coll/schedule.c). Half of the blocks send, the
 * others receive. In each round they move a piece of each message, of which every block does a slice; the last block to
 * finish notifies the other end. */
#include "blocks.cuh"
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

/* Units of sixteen bytes that a thread has in flight: few blocks must copy as much as the wires carry. */
#define DEEP 8
#if defined(__CUDA_ARCH__)
#define FEW __launch_bounds__(512)
#else
#define FEW RESIDENT
#endif
/* Polls less often than AWAIT, as wires take longer. */
__device__ void await_piece(unsigned *word, unsigned n) {
    while ((int)(GET(word) - n) < 0)
        BACKOFF();
    __threadfence_system();
}
extern "C" __global__ FEW void ucch(ucch_ring_copies all) {
    const bool incoming = blockIdx.x >= all.width;
    const unsigned block = blockIdx.x - (incoming ? all.width : 0);
    const unsigned first = incoming ? all.out : 0, end = incoming ? all.n : all.out;
    for (unsigned round = 0, more = 1; more; round++) {
        more = 0;
        for (unsigned k = first; k < end; k++) {
            const ucch_ring_copy m = all.each[k];
            more |= round < m.ends;
            if (round < m.begins || round >= m.ends) continue;
            const unsigned nth = round - m.begins, number = m.before + nth + 1;
            const unsigned slot = (number - 1) % UCCH_RING_SLOTS;
            const unsigned long long at = (unsigned long long)nth * m.piece, left = m.bytes - at;
            const unsigned long long bytes = left < m.piece ? left : m.piece;
            const unsigned long long from = edge(bytes, block, all.width), to = edge(bytes, block + 1, all.width);
            char *here = m.data + at + from, *there = m.ring + (unsigned long long)slot * m.stride + from;
            if (threadIdx.x == 0) await_piece(m.wait, number - m.room);
            __syncthreads();
            copy_quads<DEEP>(incoming ? here : there, incoming ? there : here, (unsigned)(to - from));
            DONE();
            __syncthreads();
            if (threadIdx.x == 0 && last_at(all.arrived + k * UCCH_RING_SLOTS + slot, all.width)) POST(m.tell, number);
        }
    }
}
