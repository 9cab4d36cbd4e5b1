/* One side of a message in a lane (cffi_build/p2p/lane.c). Each block does a slice of every piece, and the last block
 * to finish a piece notifies the other side. */
#include "blocks.cuh"
#include "copies.cuh"
#include "lane.h"
#include "layout.h"
#include "words.cuh"

/* Units of sixteen bytes that a thread has in flight. More than four leave too few registers for RESIDENT. */
#if __CUDA_ARCH__ == 900
#define QUADS 8
#else
#define QUADS 4
#endif
/* Words of a lane's blocks, behind the counters by slot: how many blocks have done the header, and the message; and how
 * far the first block has waited, for headers and for pieces. */
enum { HEADS = UCCH_RING_SLOTS, ENDS, HEADS_PASSED, PASSED };

/* True once a word has reached a number; false if the lane has ended. The first block polls the word of the other rank,
 * and tells the others on the device: many that poll host memory delay each other's data. */
__device__ bool reach(const ucch_lane_copy &c, unsigned *word, unsigned least, int which) {
    unsigned *passed = c.arrived + which;
    for (unsigned looks = 1; (int)(GET(blockIdx.x ? passed : word) - least) < 0; looks++) {
        if ((!blockIdx.x || looks % 64 == 0) && GET(c.stop)) return false;
        NAP();
    }
    __threadfence_system();
    if (!blockIdx.x) PUT(passed, least);
    return true;
}
__device__ volatile ucch_slot_header *header(char *data) { return (volatile ucch_slot_header *)data - 1; }
/* A block's view of a message. */
struct about {
    unsigned long long bytes, tag;
    unsigned base, status;
    bool goes;
};
/* The receiver reads the header; the sender's first block waits for a free slot for it. */
__device__ void open(const ucch_lane_copy &c, about &m) {
    const bool receives = c.flags & LANE_RECEIVES;
    m.bytes = c.bytes;
    m.tag = c.tag;
    m.base = c.base;
    m.status = c.status;
    m.goes = true;
    if (!(c.flags & LANE_HEAD)) return;
    if (!receives) {
        m.goes = blockIdx.x || reach(c, c.short_consumed, c.number - UCCH_RING_SLOTS, HEADS_PASSED);
        return;
    }
    m.goes = reach(c, c.short_published, c.number, HEADS_PASSED);
    if (!m.goes) return;
    const volatile ucch_slot_header *h = header(c.shorts);
    m.bytes = h->more[0];
    m.tag = h->hash;
    m.base = (unsigned)h->call;
    m.status = c.tag != UCCH_ANY_TAG && c.tag != m.tag ? LANE_OTHER_TAG : m.bytes > c.bytes ? LANE_TOO_LONG : 0;
}
/* The short ring's slot: the header, and the data of a short message. */
__device__ void do_head(const ucch_lane_copy &c, const about &m) {
    const bool receives = c.flags & LANE_RECEIVES, is_short = m.bytes <= c.limit;
    if (blockIdx.x == 0 && is_short && !m.status)
        copy_bytes(receives ? c.data : c.shorts, receives ? c.shorts : c.data, (unsigned)m.bytes);
    DONE();
    __syncthreads();
    if (threadIdx.x) return;
    if (!receives && blockIdx.x == 0) {
        volatile ucch_slot_header *h = header(c.shorts);
        h->call = m.base;
        h->hash = m.tag;
        h->bytes = is_short ? m.bytes : 0;
        h->more[0] = m.bytes;
        POST(c.short_published, c.number);
    } else if (receives && last_at(c.arrived + HEADS, gridDim.x)) {
        if (m.status) PUT(c.short_consumed + 1, c.number);
        POST(c.short_consumed, c.number);
    }
}
extern "C" __global__ RESIDENT void ucch(ucch_lane_copy c) {
    __shared__ about m;
    __shared__ bool goes;
    const bool receives = c.flags & LANE_RECEIVES;
    if (threadIdx.x == 0) open(c, m);
    __syncthreads();
    if (m.goes && (c.flags & LANE_HEAD)) do_head(c, m);
    const unsigned long long piece = UCCH_LANE_PIECE(m.bytes, c.slot);
    const bool lost = m.status && c.flags & LANE_LOSES;
    const unsigned long long all = m.bytes > c.limit && !lost ? (m.bytes + piece - 1) / piece : 0;
    for (unsigned p = c.from; m.goes && p < all && p < c.to; p++) {
        const unsigned k = m.base + p;
        char *there = c.longs + (unsigned long long)(k % UCCH_RING_SLOTS) * c.stride;
        const unsigned long long left = m.bytes - p * piece, bytes = left < piece ? left : piece;
        const unsigned long long from = edge(bytes, blockIdx.x, gridDim.x);
        const unsigned long long to = edge(bytes, blockIdx.x + 1, gridDim.x);
        if (threadIdx.x == 0)
            goes =
                receives ? reach(c, c.published, k + 1, PASSED) : reach(c, c.consumed, k + 1 - UCCH_RING_SLOTS, PASSED);
        __syncthreads();
        if (!goes) break;
        char *here = c.data + p * piece;
        if (c.data && !m.status)
            copy_quads<QUADS>((receives ? here : there) + from, (receives ? there : here) + from,
                              (unsigned)(to - from));
        DONE();
        __syncthreads();
        if (threadIdx.x == 0 && last_at(c.arrived + k % UCCH_RING_SLOTS, gridDim.x)) {
            if (!receives) {
                volatile ucch_slot_header *h = header(there);
                h->call = k;
                h->hash = m.tag;
                h->bytes = bytes;
            }
            POST(receives ? c.consumed : c.published, k + 1);
        }
    }
    __syncthreads();
    if (!(c.flags & LANE_LAST) || threadIdx.x || !last_at(c.arrived + ENDS, gridDim.x)) return;
    volatile ucch_lane_line *line = c.line;
    line->status = GET(c.stop) ? LANE_STOPPED : m.status;
    line->tag = m.tag;
    line->bytes = m.bytes;
    POST(&c.line->done, c.number);
}
