/* The kernel that does one side of a message, as several blocks. Included by fakegpu.c. */
#include "../../cffi_build/api/constants.h"

/* Its arguments (cffi_build/p2p/stream_copy.c), how many blocks it is, and how far each is: its slice, and bytes of
 * that. */
typedef struct carry {
    char *front, *data, *arena, *buffer;
    char *slip, *slips;
    uint64_t bytes, slice, room;
    unsigned blocks;
} carry;

static uint32_t word_at(const void *word) {
    return __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE);
}

static void put_word(void *word, uint32_t value) {
    __atomic_store_n((uint32_t *)word, value, __ATOMIC_SEQ_CST);
}

/* The next step of a block's slice `k`, from `*done` on; 0 where it has to wait. */
static int carry_step(queue *s, const carry *c, char *run, uint64_t k, uint64_t length, uint64_t *done) {
    uint64_t *about = (uint64_t *)(run + UCCH_RUN_ABOUT);
    uint32_t step = (uint32_t)(*done / UCCH_CARRY_STEP) + 1;
    char *there = c->data + k * c->room + *done % c->room, *here = c->buffer + k * c->slice + *done;
    char *taken = run + UCCH_RUN_TAKEN + k * 64;
    if (c->slip && (int32_t)(word_at(run + k * 64) - step) < 0 && !word_at(c->slip + 8))
        return 0;
    if (!c->slip && *done >= c->room && !word_at(&about[5]) &&
        (int32_t)(word_at(taken) - (step - c->room / UCCH_CARRY_STEP)) < 0)
        return 0;
    touch(here), touch(there), touch(run);
    work w = {.dst = c->slip ? here : there, .src = c->slip ? there : here};
    w.bytes = length - *done < UCCH_CARRY_STEP ? length - *done : UCCH_CARRY_STEP;
    run_copy(s, &w);
    *done += w.bytes;
    put_word(c->slip ? taken : run + k * 64, step);
    if (!c->slip && !k && step == 1) {
        uint64_t whose = __atomic_load_n(&about[2], __ATOMIC_SEQ_CST);
        if (whose)
            put_word(c->slips + ((uint32_t)whose - 1) * UCCH_SLIP + UCCH_SLIP_BELL, (uint32_t)(whose >> 32));
        __atomic_store_n(&about[3], 1, __ATOMIC_RELEASE);
    }
    return 1;
}

static char *run_of(carry *c) {
    if (!c->slip)
        return c->front;
    uint32_t where = word_at(c->slip);
    char *run = c->front + (uint64_t)(where - 1) * UCCH_RUN_FRONT;
    const uint64_t *about = (const uint64_t *)(run + UCCH_RUN_ABOUT);
    int none = !where || where == UCCH_NOWHERE || about[0] > c->bytes;
    c->bytes = none ? 0 : about[0];
    c->slice = none ? 1 : about[1];
    c->room = none ? 1 : about[4];
    c->data = (!none && about[6] ? c->arena : c->data) + (uint64_t)(where - 1) * UCCH_CHUNK_BYTES;
    return run;
}

/* Every block goes its own pace: the next to do something is one of those that can, by chance. */
static void run_carry(queue *s, carry *c) {
    touch(c->front), touch(c->slip), touch(c->slips);
    char *run = run_of(c);
    uint64_t *slice = calloc(2 * c->blocks, sizeof(*slice)), *done = slice + c->blocks;
    unsigned left = c->blocks;
    for (unsigned b = 0; b < c->blocks; b++)
        slice[b] = b;
    while (left) {
        unsigned b = (unsigned)rand_r(&s->seed) % c->blocks;
        uint64_t from = slice[b] * c->slice, length = from < c->bytes ? c->bytes - from : 0;
        if (slice[b] == UINT64_MAX)
            continue;
        if (!length) {
            if (c->slip)
                put_word(c->slip + UCCH_SLIP_GONE + 64 * b, 1);
            slice[b] = UINT64_MAX;
            left--;
            continue;
        }
        length = length < c->slice ? length : c->slice;
        if (!carry_step(s, c, run, slice[b], length, &done[b]))
            usleep(20);
        if (done[b] == length) {
            slice[b] += c->blocks;
            done[b] = 0;
        }
    }
    free(slice);
    free(c);
}
