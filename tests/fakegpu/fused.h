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
static unsigned step_of(const ucch_move *m) { return m->steps ? m->steps->pieces + m->value : 0; }

/* The move with its slot. */
static ucch_move placed(const ucch_move *m) {
    ucch_move out = *m;
    size_t at = (size_t)(step_of(m) % UCCH_RING_SLOTS) * m->stride;
    if (m->slot == SLOT_SRC) out.src = (const char *)m->src + at;
    if (m->slot == SLOT_DST) out.dst = (char *)m->dst + at;
    return out;
}

/* ---- words with flags: four bytes of data and the piece's number; the call's hash and the length come first ---- */

/* The word before whose data so many bytes of the message lie; `at` below 0: those of its head. */
static uint64_t *flagged(const void *slot, int64_t at) { return (uint64_t *)slot + at; }

static uint32_t head_of(const moves *all, const ucch_move *m, int64_t at) {
    uint64_t hash = all->of.hash + m->tag;
    uint32_t head[] = {(uint32_t)hash, (uint32_t)(hash >> 32), m->n, 0};
    return head[UCCH_LL_HEAD + at];
}

/* Words from the first of a slice, with the head's if it is the message's first, up to its end. */
static void range_of(size_t from, size_t to, int64_t *first, int64_t *end) {
    *first = from ? (int64_t)from / 4 : -UCCH_LL_HEAD;
    *end = (int64_t)(to + 7) / 8 * 2;
}

static int has_come(const moves *all, const ucch_move *m, size_t from, size_t to) {
    int64_t at, end, all_there = 1;
    for (range_of(from, to, &at, &end); at < end; at++) {
        uint64_t found = __atomic_load_n(flagged(m->src, at), __ATOMIC_ACQUIRE);
        int there = (uint32_t)(found >> 32) == step_of(m) + 1;
        if (there && at < 0 && (uint32_t)found != head_of(all, m, at))
            write_word(&all->of.replays->wrong.word, REPLAY_DIFFERS);
        all_there &= there;
    }
    return (int)all_there;
}

/* The last word first, and slowly: a receiver that does not look at each is wrong. */
static void send_flagged(queue *s, const moves *all, const ucch_move *m, size_t from, size_t to) {
    int64_t first, end;
    range_of(from, to, &first, &end);
    for (int64_t at = end; at-- > first;) {
        uint32_t data = at < 0 ? head_of(all, m, at) : 0;
        size_t past = (size_t)at * 4, left = at < 0 || past >= to ? 0 : to - past < 4 ? to - past : 4;
        if (left && live(m->src)) memcpy(&data, (const char *)m->src + past, left);
        if (at == first || at == (first + end) / 2) take_time(s);
        __atomic_store_n(flagged(m->dst, at), (uint64_t)(step_of(m) + 1) << 32 | data, __ATOMIC_RELEASE);
    }
}

/* A float and one that has come. */
static uint32_t sum_of(const char *own, uint32_t data) {
    float one, other;
    memcpy(&other, &data, 4);
    if (!live(own)) return data;
    memcpy(&one, own, 4);
    other += one;
    memcpy(&data, &other, 4);
    return data;
}

/* Data, or what comes of it and of this rank's own. */
static void take_flagged(queue *s, const ucch_move *m, size_t from, size_t to) {
    char *dst = m->dst;
    const char *own = m->kind == MOVE_LL_RECEIVE ? NULL : m->own;
    if (to > from && live(dst) && dst != own) memset(dst + from, IN_WORK, to - from);
    take_time(s);
    for (size_t past = from; past < to && live(dst); past += 4) {
        uint32_t data = (uint32_t)__atomic_load_n(flagged(m->src, (int64_t)past / 4), __ATOMIC_ACQUIRE);
        if (own) data = sum_of(own + past, data);
        memcpy(dst + past, &data, to - past < 4 ? to - past : 4);
    }
}

/* True if a block's part of a move can be done. */
static int may_go(const moves *all, const ucch_move *of, unsigned block) {
    ucch_move placed_of = placed(of), *m = &placed_of;
    if (m->kind >= MOVE_LL_RECEIVE) {
        if (has_come(all, m, edge(m->n, block, all->blocks), edge(m->n, block + 1, all->blocks))) return 1;
        return there(&all->of.replays->stop.word, 1);
    }
    if (!m->wait || there(m->wait, (all->of.replays ? step_of(m) : 0) + m->least)) return 1;
    return all->of.replays && there(&all->of.replays->stop.word, 1);
}

/* All blocks have done their part of a move. */
static void tell(const moves *all, const ucch_move *m) {
    if (m->slot == SLOT_DST && m->kind == MOVE_COPY) {
        ((ucch_slot_header *)m->dst - 1)->hash = all->of.hash + m->tag;
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
    if (m.kind == MOVE_COPY && m.slot == SLOT_SRC && !block && (h->hash != all->of.hash + m.tag || h->bytes != m.n))
        write_word(&all->of.replays->wrong.word, REPLAY_DIFFERS);
    if (m.kind == MOVE_COPY) run_copy(s, &w);
    if (m.kind == MOVE_COMBINE) run_add(s, &w);
    if (m.kind == MOVE_LL_SEND) send_flagged(s, all, &m, from, to);
    if (m.kind >= MOVE_LL_RECEIVE) take_flagged(s, &m, from, to);
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
        if (all->of.each[k].steps) ++all->of.each[k].steps->pieces;
    all->of.counts->running = 0;
    write_word(&all->of.replays->ended.word, ++all->of.counts->ended);
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_fused(queue *s, moves *all) {
    for (uint64_t k = 0; k < all->of.n; k++)
        touch(all->of.each[k].src), touch(all->of.each[k].dst), touch(all->of.each[k].wait),
            touch(all->of.each[k].tell), touch(all->of.each[k].own);
    uint64_t *at = calloc(all->blocks, sizeof(*at)), left = all->of.n * all->blocks;
    if (all->of.replays) begin_replay(all);
    for (unsigned us = 0; left;) {
        unsigned block = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t k = at[block];
        if (k == all->of.n) continue;
        if (!may_go(all, &all->of.each[k], block)) {
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
