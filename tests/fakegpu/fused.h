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

static void run_move(queue *s, const moves *all, uint64_t k, unsigned block) {
    size_t bytes = all->of.each[k].n * (all->of.each[k].kind == MOVE_COMBINE ? sizeof(float) : 1);
    size_t from = edge(bytes, block, all->blocks), to = edge(bytes, block + 1, all->blocks);
    work w = {
        .dst = (char *)all->of.each[k].dst + from, .src = (const char *)all->of.each[k].src + from, .bytes = to - from};
    if (all->of.each[k].kind == MOVE_COPY) run_copy(s, &w);
    if (all->of.each[k].kind == MOVE_COMBINE) run_add(s, &w);
    if (all->of.each[k].tell && ++all->of.arrived[k] == all->blocks) {
        all->of.arrived[k] = 0;
        __atomic_store_n(all->of.each[k].tell, all->of.each[k].value, __ATOMIC_RELEASE);
    }
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_fused(queue *s, moves *all) {
    for (uint64_t k = 0; k < all->of.n; k++)
        touch(all->of.each[k].src), touch(all->of.each[k].dst), touch(all->of.each[k].wait),
            touch(all->of.each[k].tell);
    uint64_t *at = calloc(all->blocks, sizeof(*at)), left = all->of.n * all->blocks;
    for (unsigned us = 0; left;) {
        unsigned block = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t k = at[block];
        if (k == all->of.n) continue;
        if (all->of.each[k].wait && !there(all->of.each[k].wait, all->of.each[k].least)) {
            look_later(&us);
            continue;
        }
        us = 0;
        run_move(s, all, k, block);
        at[block]++;
        left--;
    }
    free(at);
    free(all);
}
