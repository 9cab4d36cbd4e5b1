/* The kernel that does one side of a message, as several blocks. Included by fakegpu.c. */

/* Its arguments, how many blocks it is, and how far each is: its slice, and bytes of that. */
typedef struct stream_copy {
    ucch_stream_copy of;
    unsigned blocks;
} stream_copy;

static uint32_t word_at(const void *word) { return __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE); }

static void put_word(void *word, uint32_t value) { __atomic_store_n((uint32_t *)word, value, __ATOMIC_SEQ_CST); }

/* The next step of a block's slice `k`, from `*done` on; 0 where it has to wait. */
static int copy_step(queue *s, const ucch_stream_copy *c, uint64_t k, uint64_t length, uint64_t *done) {
    ucch_extent *extent = c->extent;
    uint32_t step = (uint32_t)(*done / UCCH_COPY_STEP) + 1;
    char *there = c->data + k * c->room + *done % c->room, *here = c->buffer + k * c->slice + *done;
    if (c->posted && (int32_t)(word_at(&extent->put[k]) - step) < 0 && !word_at(&c->posted->stop)) return 0;
    if (!c->posted && *done >= c->room && !word_at(&extent->stop) &&
        (int32_t)(word_at(&extent->taken[k]) - (step - c->room / UCCH_COPY_STEP)) < 0)
        return 0;
    touch(here), touch(there), touch(extent);
    work w = {.dst = c->posted ? here : there, .src = c->posted ? there : here};
    w.bytes = length - *done < UCCH_COPY_STEP ? length - *done : UCCH_COPY_STEP;
    run_copy(s, &w);
    *done += w.bytes;
    put_word(c->posted ? &extent->taken[k] : &extent->put[k], step);
    if (!c->posted && !k && step == 1) {
        uint64_t whose = __atomic_load_n(&extent->doorbell, __ATOMIC_SEQ_CST);
        if (whose) put_word(&c->mailbox[(uint32_t)whose - 1].doorbell, (uint32_t)(whose >> 32));
        __atomic_store_n(&extent->rung, 1, __ATOMIC_RELEASE);
    }
    return 1;
}

/* The extent of a posted receive. */
static void find_extent(ucch_stream_copy *c) {
    uint32_t where = word_at(&c->posted->word);
    c->extent += (uint64_t)where - 1;
    int none = !where || where == UCCH_NOWHERE || c->extent->bytes > c->bytes;
    c->bytes = none ? 0 : c->extent->bytes;
    c->slice = none ? 1 : c->extent->slice;
    c->room = none ? 1 : c->extent->room;
    c->data = (!none && c->extent->near ? c->arena : c->data) + (uint64_t)(where - 1) * UCCH_CHUNK_BYTES;
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_stream_copy(queue *s, stream_copy *all) {
    ucch_stream_copy *c = &all->of;
    touch(c->extent), touch(c->posted), touch(c->mailbox);
    if (c->posted) find_extent(c);
    uint64_t *slice = calloc(2 * all->blocks, sizeof(*slice)), *done = slice + all->blocks;
    unsigned left = all->blocks;
    for (unsigned b = 0; b < all->blocks; b++)
        slice[b] = b;
    for (unsigned us = 0; left;) {
        unsigned b = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t from = slice[b] * c->slice, length = from < c->bytes ? c->bytes - from : 0;
        if (slice[b] == UINT64_MAX) continue;
        if (!length) {
            if (c->posted) put_word(&c->posted->gone[b], 1);
            slice[b] = UINT64_MAX;
            left--;
            continue;
        }
        length = length < c->slice ? length : c->slice;
        if (copy_step(s, c, slice[b], length, &done[b]))
            us = 0;
        else
            look_later(&us);
        if (done[b] == length) {
            slice[b] += all->blocks;
            done[b] = 0;
        }
    }
    free(slice);
    free(all);
}
