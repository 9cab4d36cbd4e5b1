/* The kernel that does all of a call, as several blocks. Included by fakegpu.c. */

/* Its arguments, and how many blocks it is. */
typedef struct moves {
    ucch_moves of;
    unsigned blocks;
} moves;

/* Where a block's slice begins, and its bytes. */
static size_t edge(size_t bytes, unsigned block, unsigned blocks) {
    size_t at = (bytes + 63) / 64 * block / blocks * 64;
    return at < bytes ? at : bytes;
}

static void write_word(unsigned *word, unsigned value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Number of a piece of a graph's, among all that have gone by its channel. */
static unsigned step_of(const ucch_move *m) { return m->steps ? *m->steps + m->value : 0; }

/* The move with its slot. */
static ucch_move placed(const ucch_move *m) {
    ucch_move out = *m;
    size_t at = (size_t)(step_of(m) % UCCH_RING_SLOTS) * m->stride;
    if (m->slot == SLOT_SRC) out.src = (const char *)m->src + at;
    if (m->slot == SLOT_DST) out.dst = (char *)m->dst + at;
    return out;
}

static int may_go(const moves *all, const ucch_move *m) {
    if (!m->wait || there(m->wait, (all->of.replays ? step_of(m) : 0) + m->least)) return 1;
    return all->of.replays && there(&all->of.replays->stop.word, 1);
}

/* All blocks have done their part of a move. */
static void tell(const moves *all, const ucch_move *m) {
    if (m->slot == SLOT_DST) {
        ((ucch_slot_header *)m->dst - 1)->hash = all->of.hash;
        ((ucch_slot_header *)m->dst - 1)->bytes = m->n;
    }
    write_word(m->tell, m->steps ? step_of(m) + 1 : m->value);
}

static void run_move(queue *s, const moves *all, uint64_t k, unsigned block) {
    ucch_move m = placed(&all->of.each[k]);
    size_t bytes = m.n * (m.kind == MOVE_COMBINE ? sizeof(float) : 1);
    size_t from = edge(bytes, block, all->blocks), to = edge(bytes, block + 1, all->blocks);
    work w = {.dst = (char *)m.dst + from, .src = (const char *)m.src + from, .bytes = to - from};
    const ucch_slot_header *h = (const ucch_slot_header *)m.src - 1;
    if (m.slot == SLOT_SRC && !block && (h->hash != all->of.hash || h->bytes != m.n))
        write_word(&all->of.replays->wrong.word, REPLAY_DIFFERS);
    if (m.kind == MOVE_COPY) run_copy(s, &w);
    if (m.kind == MOVE_COMBINE) run_add(s, &w);
    if (m.tell && ++all->of.arrived[k] == all->blocks) {
        all->of.arrived[k] = 0;
        tell(all, &m);
    }
}

static void begin_replay(const moves *all) {
    ucch_replayed *counts = all->of.counts;
    if (__atomic_exchange_n(&counts->running, 1, __ATOMIC_SEQ_CST))
        write_word(&all->of.replays->wrong.word, REPLAY_OVERLAPS);
    write_word(&all->of.replays->begun.word, counts->ended + 1);
}

static void end_replay(const moves *all) {
    for (uint64_t k = 0; k < all->of.n; k++)
        if (all->of.each[k].steps) ++*all->of.each[k].steps;
    all->of.counts->running = 0;
    write_word(&all->of.replays->ended.word, ++all->of.counts->ended);
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_fused(queue *s, moves *all) {
    for (uint64_t k = 0; k < all->of.n; k++)
        touch(all->of.each[k].src), touch(all->of.each[k].dst), touch(all->of.each[k].wait),
            touch(all->of.each[k].tell);
    uint64_t *at = calloc(all->blocks, sizeof(*at)), left = all->of.n * all->blocks;
    if (all->of.replays) begin_replay(all);
    for (unsigned us = 0; left;) {
        unsigned block = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t k = at[block];
        if (k == all->of.n) continue;
        if (!may_go(all, &all->of.each[k])) {
            look_later(&us);
            continue;
        }
        us = 0;
        run_move(s, all, k, block);
        at[block]++;
        left--;
    }
    if (all->of.replays) end_replay(all);
    free(at);
    free(all);
}
