/* Short messages of a stage that wires carry, by one kernel, and not by waits, copies and writes of each piece.
 *
 * Both directions are one kernel, with blocks of its own for either, so that no rank waits for another one for ever
 * where a device runs one stream after the other. Rings, words and the order of pieces are those of copies by the
 * driver, which the other end may do; the host lets the kernel go as it lets streams go, by the words. */
#include "coll/stream_executor.h"

#define THREADS 512
/* Blocks of either direction. */
#define WIDTH 2
#define SLICE ((uint64_t)16 << 10)

/* One more message, of pieces that are counted now; what is sent before what is received. One that has the ring of
 * another begins behind it. */
void ucch_copies_add(ucch_ring_copies *all, ucch_channel *channel, char *data, size_t bytes, int comes) {
    size_t piece = ucch_channel_piece(channel, bytes);
    uint32_t pieces = (uint32_t)((bytes + piece - 1) / piece), begins = 0;
    unsigned *tell = (comes ? channel->consumed : channel->published).seen;
    for (unsigned k = 0; k < all->n; k++)
        if (all->each[k].tell == tell) begins = all->each[k].ends;
    all->each[all->n++] = (ucch_ring_copy){.data = data,
                                           .ring = channel->seen,
                                           .wait = (comes ? channel->published : channel->consumed).seen,
                                           .tell = tell,
                                           .bytes = bytes,
                                           .piece = (unsigned)piece,
                                           .stride = (unsigned)channel->stride,
                                           .before = ucch_channel_take(channel, pieces),
                                           .begins = begins,
                                           .ends = begins + pieces,
                                           .room = comes ? 0 : UCCH_RING_SLOTS};
    all->out += !comes;
}

int ucch_copies_launch(const ucch_channels *c, ucch_ring_copies *all, void *stream) {
    uint64_t longest = 1;
    for (unsigned k = 0; k < all->n; k++) {
        const ucch_ring_copy *m = &all->each[k];
        uint64_t piece = m->bytes < m->piece ? m->bytes : m->piece;
        longest = piece > longest ? piece : longest;
    }
    uint64_t slices = (longest + SLICE - 1) / SLICE;
    all->width = slices < WIDTH ? (unsigned)slices : WIDTH;
    all->arrived = c->joined;
    void *arguments[] = {all};
    return ucch_device_fail(ucch_bound_ops()->launch(c->copies, 2 * all->width, THREADS, arguments, stream), "launch");
}
