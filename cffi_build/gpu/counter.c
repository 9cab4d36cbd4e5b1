/* Counters in memory that streams and hosts wait for and signal. All only grow, so that a stream which still has to
 * look at one finds what it waits for. Those of the runtime's own, as some streams wait for no other memory, are used
 * again. */
#include <pthread.h>
#include <stdlib.h>

#include "gpu/device.h"

/* A kernel that sets one word and waits for another, either of which may be none. */
static int run(void *kernel, void *told, uint32_t value, void *seen, uint32_t least, void *stream) {
    uint64_t numbers = (uint64_t)value << 32 | least;
    double unused = 0;
    void *arguments[] = {&told, &seen, &numbers, &unused};
    return ucch_bound_ops()->launch(kernel, 1, 1, arguments, stream);
}

/* Let the stream wait until the counter has reached `least`; what is there already is not waited for. `await`: the
 * kernel that does so, where streams cannot wait for any memory. */
int ucch_counter_wait(ucch_counter counter, uint32_t least, void *await, void *stream) {
    if (counter.at && ucch_reached(counter.at, least)) return 0;
    return ucch_device_fail(await ? run(await, NULL, 0, counter.seen, least, stream)
                                  : ucch_bound_ops()->stream_hold(stream, counter.seen, least),
                            "a stream's wait for memory");
}

/* Let the stream set the counter, behind all it did before; `await` likewise. */
int ucch_counter_signal(ucch_counter counter, uint32_t value, void *await, void *stream) {
    return ucch_device_fail(await ? run(await, counter.seen, value, NULL, 0, stream)
                                  : ucch_bound_ops()->stream_write(stream, counter.seen, value),
                            "a stream's write to memory");
}

/* Let the stream set a counter and then wait for another one, by one call of the driver where it has such a call. */
int ucch_counter_turn(ucch_counter told, uint32_t value, ucch_counter counter, uint32_t least, void *await,
                      void *stream) {
    if (!ucch_reached(counter.at, least)) {
        int refused = await ? run(await, told.seen, value, counter.seen, least, stream)
                            : ucch_bound_ops()->stream_turn(stream, told.seen, value, counter.seen, least);
        if (!refused) return 0;
    }
    int status = ucch_counter_signal(told, value, await, stream);
    return status ? status : ucch_counter_wait(counter, least, await, stream);
}

/* ---- the runtime's own ---- */

typedef struct idle {
    ucch_flag flag;
    struct idle *next;
} idle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static idle *flags;

/* True if the next ticket would be 0: streams of some runtimes compare without wrapping. */
static int is_exhausted(ucch_flag flag) { return flag.ticket == UINT32_MAX; }

static int make(ucch_flag *flag) {
    void *at = NULL;
    int status = ucch_bound_ops()->flag(&at);
    *flag = (ucch_flag){status ? NULL : at, 0};
    return status;
}

/* Have a counter, with one more ticket: 0, or a failure. */
int ucch_flag_next(ucch_flag *flag) {
    if (!flag->at || is_exhausted(*flag)) {
        pthread_mutex_lock(&lock);
        idle *found = flags;
        if (found) flags = found->next;
        pthread_mutex_unlock(&lock);
        if (found) *flag = found->flag;
        free(found);
        if (!found && make(flag)) return UCCH_FAIL_DEVICE;
    }
    flag->ticket++;
    return 0;
}

/* True if its ticket has still to be reached. */
int ucch_flag_due(ucch_flag flag) { return flag.at && !ucch_reached(flag.at, flag.ticket); }

/* Give it back. */
void ucch_flag_give(ucch_flag flag) {
    idle *place = flag.at && !is_exhausted(flag) ? malloc(sizeof(*place)) : NULL;
    if (!place) return; /* lost: a few bytes */
    pthread_mutex_lock(&lock);
    *place = (idle){flag, flags};
    flags = place;
    pthread_mutex_unlock(&lock);
}

/* Have some ready: while a stream is held, allocating one could wait for that very stream. */
void ucch_flags_reserve(int count) {
    ucch_flag flag;
    while (count-- > 0 && !make(&flag))
        ucch_flag_give(flag);
}
