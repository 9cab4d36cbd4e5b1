/* The kernel that does all of a call, as several blocks. Included by fakegpu.c. */

/* Its arguments (cffi_build/coll/fused.h), and how many blocks it is. */
typedef struct moves {
    uint64_t n;
    uint32_t *arrived;
    struct {
        const void *src;
        void *dst, *wait, *tell;
        uint32_t least, value, kind, n;
    } each[40];
    unsigned blocks;
} moves;

/* Where a block's slice begins, and its bytes. */
static size_t edge(size_t bytes, unsigned block, unsigned blocks) {
    size_t at = (bytes + 63) / 64 * block / blocks * 64;
    return at < bytes ? at : bytes;
}

static void run_move(queue *s, const moves *all, uint64_t k, unsigned block) {
    size_t bytes = all->each[k].n * (all->each[k].kind == 2 ? sizeof(float) : 1);
    size_t from = edge(bytes, block, all->blocks), to = edge(bytes, block + 1, all->blocks);
    work w = {.dst = (char *)all->each[k].dst + from, .src = (const char *)all->each[k].src + from, .bytes = to - from};
    if (all->each[k].kind == 1)
        run_copy(s, &w);
    if (all->each[k].kind == 2)
        run_add(s, &w);
    if (all->each[k].tell && ++all->arrived[k] == all->blocks) {
        all->arrived[k] = 0;
        __atomic_store_n((uint32_t *)all->each[k].tell, all->each[k].value, __ATOMIC_RELEASE);
    }
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_whole(queue *s, moves *all) {
    for (uint64_t k = 0; k < all->n; k++)
        touch(all->each[k].src), touch(all->each[k].dst), touch(all->each[k].wait), touch(all->each[k].tell);
    uint64_t *at = calloc(all->blocks, sizeof(*at)), left = all->n * all->blocks;
    while (left) {
        unsigned block = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t k = at[block];
        if (k == all->n)
            continue;
        if (all->each[k].wait && !there(all->each[k].wait, all->each[k].least)) {
            usleep(20);
            continue;
        }
        run_move(s, all, k, block);
        at[block]++;
        left--;
    }
    free(at);
    free(all);
}
