/* The kernel that does one side of a message, as several blocks. Included by fakegpu.c. */
#include "../../ucc_hetero/device/kernels/layout.h"

/* Its arguments, how many blocks it is, and how far each is: its slice, and bytes of that. */
typedef struct carry {
    ucch_carry of;
    unsigned blocks;
} carry;

static uint32_t word_at(const void *word) {
    return __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE);
}

static void put_word(void *word, uint32_t value) {
    __atomic_store_n((uint32_t *)word, value, __ATOMIC_SEQ_CST);
}

/* The next step of a block's slice `k`, from `*done` on; 0 where it has to wait. */
static int carry_step(queue *s, const ucch_carry *c, uint64_t k, uint64_t length, uint64_t *done) {
    ucch_run *run = c->run;
    uint32_t step = (uint32_t)(*done / UCCH_CARRY_STEP) + 1;
    char *there = c->data + k * c->room + *done % c->room, *here = c->buffer + k * c->slice + *done;
    if (c->slip && (int32_t)(word_at(&run->put[k]) - step) < 0 && !word_at(&c->slip->stop))
        return 0;
    if (!c->slip && *done >= c->room && !word_at(&run->stop) &&
        (int32_t)(word_at(&run->taken[k]) - (step - c->room / UCCH_CARRY_STEP)) < 0)
        return 0;
    touch(here), touch(there), touch(run);
    work w = {.dst = c->slip ? here : there, .src = c->slip ? there : here};
    w.bytes = length - *done < UCCH_CARRY_STEP ? length - *done : UCCH_CARRY_STEP;
    run_copy(s, &w);
    *done += w.bytes;
    put_word(c->slip ? &run->taken[k] : &run->put[k], step);
    if (!c->slip && !k && step == 1) {
        uint64_t whose = __atomic_load_n(&run->whose, __ATOMIC_SEQ_CST);
        if (whose)
            put_word(&c->slips[(uint32_t)whose - 1].bell, (uint32_t)(whose >> 32));
        __atomic_store_n(&run->rung, 1, __ATOMIC_RELEASE);
    }
    return 1;
}

/* The receiver's run, by its slip. */
static void find_run(ucch_carry *c) {
    uint32_t where = word_at(&c->slip->word);
    c->run += (uint64_t)where - 1;
    int none = !where || where == UCCH_NOWHERE || c->run->bytes > c->bytes;
    c->bytes = none ? 0 : c->run->bytes;
    c->slice = none ? 1 : c->run->slice;
    c->room = none ? 1 : c->run->room;
    c->data = (!none && c->run->near ? c->arena : c->data) + (uint64_t)(where - 1) * UCCH_CHUNK_BYTES;
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_carry(queue *s, carry *all) {
    ucch_carry *c = &all->of;
    touch(c->run), touch(c->slip), touch(c->slips);
    if (c->slip)
        find_run(c);
    uint64_t *slice = calloc(2 * all->blocks, sizeof(*slice)), *done = slice + all->blocks;
    unsigned left = all->blocks;
    for (unsigned b = 0; b < all->blocks; b++)
        slice[b] = b;
    while (left) {
        unsigned b = (unsigned)rand_r(&s->seed) % all->blocks;
        uint64_t from = slice[b] * c->slice, length = from < c->bytes ? c->bytes - from : 0;
        if (slice[b] == UINT64_MAX)
            continue;
        if (!length) {
            if (c->slip)
                put_word(&c->slip->gone[b], 1);
            slice[b] = UINT64_MAX;
            left--;
            continue;
        }
        length = length < c->slice ? length : c->slice;
        if (!carry_step(s, c, slice[b], length, &done[b]))
            usleep(20);
        if (done[b] == length) {
            slice[b] += all->blocks;
            done[b] = 0;
        }
    }
    free(slice);
    free(all);
}
