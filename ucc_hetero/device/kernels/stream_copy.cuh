/* One side of a message (cffi_build/p2p/stream_copy.c): every block has slices of it, and the receiver's follow the
 * sender's. A receiver learns from its slip (cffi_build/shm/mailbox.c) where the message is, and the sender rings its
 * bell once data is there. */
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

/* The posted receive in the mailbox. */
__device__ void look_up(ucch_carry &c) {
    const unsigned long long where = GET((unsigned *)&c.slip->word);
    __threadfence_system();
    c.run += where - 1;
    const volatile ucch_run *run = c.run;
    c.bytes = where == UCCH_NOWHERE || run->bytes > c.bytes ? 0 : run->bytes;
    c.slice = c.bytes ? run->slice : 1;
    c.room = c.bytes ? run->room : 1;
    c.data = (c.bytes && run->near ? c.arena : c.data) + (where - 1) * UCCH_CHUNK_BYTES;
}
__device__ void wait_for(unsigned *word, unsigned least, unsigned *stop) {
    while ((int)(GET(word) - least) < 0 && !GET(stop))
        NAP();
    __threadfence_system();
}
__device__ void ring(ucch_slip *slips, volatile ucch_run *run) {
    __threadfence_system();
    const unsigned long long whose = run->whose;
    if (whose)
        PUT(&slips[whose % 4294967296ull - 1].bell.word, (unsigned)(whose >> 32));
    __threadfence_system();
    run->rung = 1;
}
extern "C" __global__ RESIDENT void ucch(ucch_carry c) {
    __shared__ ucch_carry found;
    if (c.slip && threadIdx.x == 0) { /* alone: all threads of a block together took 50 microseconds for it */
        found = c;
        look_up(found);
    }
    __syncthreads();
    const unsigned long long bytes = c.slip ? found.bytes : c.bytes, slice = c.slip ? found.slice : c.slice;
    const unsigned long long room = c.slip ? found.room : c.room;
    ucch_run *run = c.slip ? found.run : c.run;
    char *data = c.slip ? found.data : c.data;
    for (unsigned long long k = blockIdx.x; k * slice < bytes; k += gridDim.x) {
        const unsigned long long from = k * slice, length = bytes - from < slice ? bytes - from : slice;
        unsigned *put = &run->put[k].word, *taken = &run->taken[k].word, step = 0;
        for (unsigned long long done = 0; done < length; done += UCCH_CARRY_STEP) {
            const unsigned some = length - done < UCCH_CARRY_STEP ? (unsigned)(length - done) : UCCH_CARRY_STEP;
            char *there = data + k * room + done % room, *here = c.buffer + from + done;
            step++;
            if (c.slip && threadIdx.x == 0)
                wait_for(put, step, &c.slip->stop);
            if (!c.slip && done >= room && threadIdx.x == 0)
                wait_for(taken, step - (unsigned)(room / UCCH_CARRY_STEP), (unsigned *)&run->stop);
            __syncthreads();
            copy_bytes(c.slip ? here : there, c.slip ? there : here, some);
            DONE();
            __syncthreads();
            if (threadIdx.x == 0)
                POST(c.slip ? taken : put, step);
            if (!c.slip && threadIdx.x == 0 && k == 0 && step == 1)
                ring(c.slips, run);
        }
    }
    if (c.slip && threadIdx.x == 0)
        POST(&c.slip->gone[blockIdx.x].word, 1);
}
