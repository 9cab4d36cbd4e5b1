/* The kernel that moves messages through rings which wires carry, as several blocks. Included by fakegpu.c. */

/* Where a block is: a round, and a message in it; and whether there has been one in this round, or may be later. */
typedef struct ring_block {
    unsigned round, k, more;
} ring_block;

/* A block's next piece: 0 when there is none. */
static int ring_next(const ucch_ring_copies *all, int comes, ring_block *at) {
    unsigned first = comes ? all->out : 0, end = comes ? all->n : all->out;
    for (;; at->k++) {
        if (at->k == end) {
            if (!at->more) return 0;
            *at = (ring_block){at->round + 1, first, 0};
        }
        const ucch_ring_copy *m = &all->each[at->k];
        at->more |= at->round < m->ends;
        if (at->round >= m->begins && at->round < m->ends) return 1;
    }
}

/* A block's slice of a piece, if it has come or has room: whether it was moved. */
static int ring_move(queue *s, const ucch_ring_copies *all, unsigned block, const ring_block *at) {
    const ucch_ring_copy *m = &all->each[at->k];
    int comes = block >= all->width;
    unsigned nth = at->round - m->begins, number = m->before + nth + 1, slot = (number - 1) % UCCH_RING_SLOTS;
    if (!there(m->wait, number - m->room)) return 0;
    uint64_t done = (uint64_t)nth * m->piece, left = m->bytes - done, bytes = left < m->piece ? left : m->piece;
    size_t from = edge(bytes, block % all->width, all->width), to = edge(bytes, block % all->width + 1, all->width);
    char *here = m->data + done + from, *away = m->ring + (uint64_t)slot * m->stride + from;
    run_copy(s, &(work){.dst = comes ? here : away, .src = comes ? away : here, .bytes = to - from});
    unsigned *arrived = &all->arrived[at->k * UCCH_RING_SLOTS + slot];
    if (++*arrived < all->width) return 1;
    *arrived = 0;
    write_word(m->tell, number);
    return 1;
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_ring(queue *s, ucch_ring_copies *all) {
    unsigned blocks = 2 * all->width, left = blocks;
    for (unsigned k = 0; k < all->n; k++)
        touch(all->each[k].data), touch(all->each[k].ring), touch(all->each[k].wait), touch(all->each[k].tell);
    ring_block *at = calloc(blocks, sizeof(*at));
    char *ended = calloc(blocks, 1);
    for (unsigned block = all->width; block < blocks; block++)
        at[block].k = all->out;
    for (unsigned us = 0; left;) {
        unsigned block = (unsigned)rand_r(&s->seed) % blocks;
        if (ended[block]) continue;
        if (!ring_next(all, block >= all->width, &at[block])) {
            ended[block] = 1;
            left--;
        } else if (ring_move(s, all, block, &at[block])) {
            at[block].k++;
            us = 0;
        } else
            look_later(&us);
    }
    free(at);
    free(ended);
    free(all);
}
