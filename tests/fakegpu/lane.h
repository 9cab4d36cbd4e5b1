/* The kernel that does one side of a message in a lane. Included by fakegpu.c. */

static uint32_t word_at(const void *word) { return __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE); }

static void put_word(void *word, uint32_t value) { __atomic_store_n((uint32_t *)word, value, __ATOMIC_SEQ_CST); }

/* True if a word has reached a number; false if the lane carries nothing any more. */
static int lane_reach(const ucch_lane_copy *c, const unsigned *word, uint32_t least) {
    for (unsigned us = 0; !there(word, least); look_later(&us))
        if (word_at(c->stop)) return 0;
    return 1;
}

static void lane_move(queue *s, const ucch_lane_copy *c, char *ring, char *data, size_t bytes) {
    int receives = c->flags & LANE_RECEIVES;
    touch(data), touch(ring);
    run_copy(s, &(work){.dst = receives ? data : ring, .src = receives ? ring : data, .bytes = bytes});
}

/* The slot with the header, and with a short message: whether it goes on. */
static int lane_head(queue *s, const ucch_lane_copy *c, ucch_lane_line *m, unsigned *base) {
    ucch_slot_header *h = (ucch_slot_header *)c->shorts - 1;
    if (c->flags & LANE_RECEIVES) {
        if (!lane_reach(c, c->short_published, c->number)) return 0;
        *m = (ucch_lane_line){.bytes = h->more[0], .tag = h->hash};
        *base = (unsigned)h->call;
        m->status = c->tag != UCCH_ANY_TAG && c->tag != m->tag ? LANE_OTHER_TAG
                    : m->bytes > c->bytes                      ? LANE_TOO_LONG
                                                               : 0;
        if (m->bytes <= c->limit && !m->status) lane_move(s, c, c->shorts, c->data, m->bytes);
        if (m->status) put_word(c->short_consumed + 1, c->number);
        put_word(c->short_consumed, c->number);
        return 1;
    }
    if (!lane_reach(c, c->short_consumed, c->number - UCCH_RING_SLOTS)) return 0;
    if (m->bytes <= c->limit) lane_move(s, c, c->shorts, c->data, m->bytes);
    h->call = *base;
    h->hash = m->tag;
    h->bytes = m->bytes <= c->limit ? m->bytes : 0;
    h->more[0] = m->bytes;
    put_word(c->short_published, c->number);
    return 1;
}

static int lane_piece(queue *s, const ucch_lane_copy *c, const ucch_lane_line *m, unsigned k, uint64_t at,
                      size_t bytes) {
    int receives = c->flags & LANE_RECEIVES;
    char *slot = c->longs + (uint64_t)(k % UCCH_RING_SLOTS) * c->stride;
    if (!lane_reach(c, receives ? c->published : c->consumed, receives ? k + 1 : k + 1 - UCCH_RING_SLOTS)) return 0;
    if (c->data && !m->status) lane_move(s, c, slot, c->data + at, bytes);
    if (!receives) {
        ucch_slot_header *h = (ucch_slot_header *)slot - 1;
        h->call = k;
        h->hash = m->tag;
        h->bytes = bytes;
    }
    put_word(receives ? c->consumed : c->published, k + 1);
    return 1;
}

static void run_lane(queue *s, ucch_lane_copy *c) {
    ucch_lane_line m = {.status = c->status, .tag = c->tag, .bytes = c->bytes};
    unsigned base = c->base;
    touch(c->short_published), touch(c->consumed), touch(c->line), touch(c->stop);
    int goes = c->flags & LANE_HEAD ? lane_head(s, c, &m, &base) : 1;
    uint64_t piece = UCCH_LANE_PIECE(m.bytes, c->slot), all = m.bytes > c->limit ? (m.bytes + piece - 1) / piece : 0;
    if (m.status && c->flags & LANE_LOSES) all = 0;
    for (uint64_t p = c->from; goes && p < all && p < c->to; p++) {
        uint64_t left = m.bytes - p * piece;
        goes = lane_piece(s, c, &m, base + (unsigned)p, p * piece, left < piece ? left : piece);
    }
    if (c->flags & LANE_LAST) {
        c->line->status = word_at(c->stop) ? LANE_STOPPED : m.status;
        c->line->tag = m.tag;
        c->line->bytes = m.bytes;
        put_word(&c->line->done, c->number);
    }
    free(c);
}
