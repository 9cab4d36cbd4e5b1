/* One side of a message (cffi_build/p2p/stream_copy.c): every block has slices of it, and the receiver's follow the
 * sender's. A receiver learns from its mailbox (cffi_build/shm/mailbox.c) where the message is, and the sender rings
 * the doorbell once data is there. */
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

/* Look up the message of a posted receive. */
__device__ void look_up(ucch_stream_copy &c) {
    const unsigned long long where = GET((unsigned *)&c.posted->word);
    __threadfence_system();
    c.extent += where - 1;
    const volatile ucch_extent *extent = c.extent;
    c.bytes = where == UCCH_NOWHERE || extent->bytes > c.bytes ? 0 : extent->bytes;
    c.slice = c.bytes ? extent->slice : 1;
    c.room = c.bytes ? extent->room : 1;
    c.data = (c.bytes && extent->near ? c.arena : c.data) + (where - 1) * UCCH_CHUNK_BYTES;
}
__device__ void wait_for(unsigned *word, unsigned least, unsigned *stop) {
    while ((int)(GET(word) - least) < 0 && !GET(stop))
        NAP();
    __threadfence_system();
}
__device__ void ring(ucch_posted *mailbox, volatile ucch_extent *extent) {
    __threadfence_system();
    const unsigned long long whose = extent->doorbell;
    if (whose) PUT(&mailbox[whose % 4294967296ull - 1].doorbell.word, (unsigned)(whose >> 32));
    __threadfence_system();
    extent->rung = 1;
}
extern "C" __global__ RESIDENT void ucch(ucch_stream_copy c) {
    __shared__ ucch_stream_copy found;
    if (c.posted && threadIdx.x == 0) { /* alone: all threads of a block together took 50 microseconds for it */
        found = c;
        look_up(found);
    }
    __syncthreads();
    const unsigned long long bytes = c.posted ? found.bytes : c.bytes, slice = c.posted ? found.slice : c.slice;
    const unsigned long long room = c.posted ? found.room : c.room;
    ucch_extent *extent = c.posted ? found.extent : c.extent;
    char *data = c.posted ? found.data : c.data;
    for (unsigned long long k = blockIdx.x; k * slice < bytes; k += gridDim.x) {
        const unsigned long long from = k * slice, length = bytes - from < slice ? bytes - from : slice;
        unsigned *put = &extent->put[k].word, *taken = &extent->taken[k].word, step = 0;
        for (unsigned long long done = 0; done < length; done += UCCH_COPY_STEP) {
            const unsigned some = length - done < UCCH_COPY_STEP ? (unsigned)(length - done) : UCCH_COPY_STEP;
            char *there = data + k * room + done % room, *here = c.buffer + from + done;
            step++;
            if (c.posted && threadIdx.x == 0) wait_for(put, step, &c.posted->stop);
            if (!c.posted && done >= room && threadIdx.x == 0)
                wait_for(taken, step - (unsigned)(room / UCCH_COPY_STEP), (unsigned *)&extent->stop);
            __syncthreads();
            copy_bytes(c.posted ? here : there, c.posted ? there : here, some);
            DONE();
            __syncthreads();
            if (threadIdx.x == 0) POST(c.posted ? taken : put, step);
            if (!c.posted && threadIdx.x == 0 && k == 0 && step == 1) ring(c.mailbox, extent);
        }
    }
    if (c.posted && threadIdx.x == 0) POST(&c.posted->gone[blockIdx.x].word, 1);
}
