/* Stream-ordered work: it starts when a stream reaches the call, and the stream does not pass it before the data is
 * there, while the host goes on. In and out by a word in memory: to ask for an event is a call of the driver, in the
 * way of whoever launches kernels meanwhile. */
#include <pthread.h>
#include <stdlib.h>

#include "gpu/device.h"

/* Calls in flight for which nothing has to be allocated. */
#define CALLS 64

/* Words in use again: a word only grows, so that a stream which still has to look at it finds what it waits for. */
typedef struct word {
    ucch_flag flag;
    struct word *next;
} word;

static pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER;
static word *idle_words;
static int held;

/* Streams that wait for programs now. */
int ucch_gates_held(void) {
    return held;
}

/* Whether the next ticket would be 0: streams of some runtimes compare without wrapping. */
static int is_worn(ucch_flag flag) {
    return flag.ticket == UINT32_MAX;
}

static int take_word(ucch_flag *flag) {
    if (flag->at && !is_worn(*flag))
        return 0;
    pthread_mutex_lock(&words_lock);
    word *w = idle_words;
    if (w)
        idle_words = w->next;
    pthread_mutex_unlock(&words_lock);
    if (w) {
        *flag = w->flag;
        free(w);
        return 0;
    }
    flag->ticket = 0;
    int status = ucch_bound_ops()->flag((void **)&flag->at);
    if (status)
        flag->at = NULL;
    return status;
}

static void give_word(ucch_flag flag) {
    word *w = flag.at && !is_worn(flag) ? malloc(sizeof(*w)) : NULL;
    if (!w)
        return; /* lost: a few bytes */
    pthread_mutex_lock(&words_lock);
    *w = (word){flag, idle_words};
    idle_words = w;
    pthread_mutex_unlock(&words_lock);
}

/* Have words ready: while a stream is held, allocating one could wait for that very stream. */
void ucch_gate_reserve(void) {
    for (int i = 0; i < 2 * CALLS; i++) {
        ucch_flag flag = {NULL, 0};
        if (ucch_bound_ops()->flag((void **)&flag.at))
            return;
        give_word(flag);
    }
}

/* Whether a stream has still to write it. */
static int due(ucch_flag flag) {
    return flag.at && !ucch_reached(flag.at, flag.ticket);
}

/* Let the stream write when it gets here: 0, or a failure. A word that an earlier stream has still to write is left to
 * that: it would write less. */
static int write_in(ucch_flag *in, void *stream) {
    if (due(*in))
        in->at = NULL;
    if (take_word(in))
        return UCCH_FAIL_DEVICE;
    int status = ucch_bound_ops()->stream_write(stream, in->at, in->ticket + 1);
    in->ticket += !status;
    return status;
}

/* Mark the stream's point: what is behind the gate may start when it is reached. */
int ucch_gate_enter(ucch_gate *g, void *stream) {
    const device_ops *ops = ucch_bound_ops();
    if (!ops)
        return UCCH_FAIL_DEVICE;
    int status = 0;
    g->by_event = write_in(&g->in, stream) != 0;
    if (g->by_event) {
        status = g->event ? 0 : ucch_device_fail(ops->event_new(&g->event), "event");
        if (!status)
            status = ucch_device_fail(ops->event_record(g->event, stream), "record");
        g->again = 0;
    }
    g->closed = !status;
    return status;
}

/* Let the stream wait for the program's end: 1, or 0 where streams cannot wait for memory and the host has to. A word
 * serves all calls of its program: the stream waits until it has reached the call's ticket, and it only grows. */
int ucch_gate_hold(ucch_gate *g, void *stream) {
    if (!ucch_gate_promise_locked(g))
        return 0;
    if (!ucch_gate_wait(g, stream))
        return 1;
    ucch_gate_leave_locked(g);
    return 0;
}

/* Promise to a stream that it will be told of the gate's end: whether there is a word for that. */
int ucch_gate_promise_locked(ucch_gate *g) {
    if (take_word(&g->out))
        return 0;
    g->out.ticket++;
    g->held = 1;
    held++;
    return 1;
}

/* Without the lock: let a stream wait for what was promised. 0, or a failure. */
int ucch_gate_wait(const ucch_gate *g, void *stream) {
    return ucch_device_fail(ucch_bound_ops()->stream_hold(stream, g->out.at, g->out.ticket), "a stream's wait");
}

/* 1 when the stream has reached the call, 0 when not yet, negative on failure. */
int ucch_gate_open_locked(ucch_gate *g) {
    int done = 0, status = 0;
    if (!g->closed)
        return 1;
    if (g->by_event)
        status = ucch_event_ask(g->event, &done, &g->again);
    else
        done = !due(g->in);
    if (status)
        return status;
    g->closed = !done;
    return done;
}

/* The program has ended, well or not: the stream must go on in either case. */
void ucch_gate_leave_locked(ucch_gate *g) {
    g->closed = 0;
    if (g->held) {
        held--;
        __atomic_store_n(g->out.at, g->out.ticket, __ATOMIC_RELEASE);
    }
    g->held = 0;
}

/* Whether its stream has not got there yet, although nobody may wait for that any more. */
int ucch_gate_due(const ucch_gate *g) {
    int done = 1;
    if (g->by_event)
        ucch_bound_ops()->event_done(g->event, &done);
    return g->by_event ? !done : due(g->in);
}

void ucch_gate_free(ucch_gate *g) {
    give_word(g->out);
    if (!due(g->in))
        give_word(g->in);
    if (g->event && ucch_bound() >= 0)
        ucch_bound_ops()->event_free(g->event);
}
