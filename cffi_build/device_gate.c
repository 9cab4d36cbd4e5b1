/* Stream-ordered calls: the work starts when a stream reaches the call, and the stream does not pass it before the data
 * is there, while the host goes on. In by an event, out by a word in memory that the stream waits for. */
#include <pthread.h>
#include <stdlib.h>

#include "device.h"

/* Words in use again: a word only grows, so that a stream which still has to look at it finds what it waits for. */
typedef struct word {
    uint32_t *at, ticket;
    struct word *next;
} word;

static pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER;
static word *idle_words;
static int held;

/* Streams that wait for programs now. */
int ucch_gates_held(void) {
    return held;
}

static int take_word(ucch_gate *g) {
    pthread_mutex_lock(&words_lock);
    word *w = idle_words;
    if (w)
        idle_words = w->next;
    pthread_mutex_unlock(&words_lock);
    if (w) {
        g->word = w->at;
        g->ticket = w->ticket;
        free(w);
        return 0;
    }
    return ucch_bound_ops()->flag((void **)&g->word);
}

static void give_word(uint32_t *at, uint32_t ticket) {
    word *w = malloc(sizeof(*w));
    if (!w)
        return; /* lost: a few bytes */
    pthread_mutex_lock(&words_lock);
    *w = (word){at, ticket, idle_words};
    idle_words = w;
    pthread_mutex_unlock(&words_lock);
}

/* Have words ready: while a stream is held, allocating one could wait for that very stream. */
void ucch_gate_reserve(int n) {
    for (int i = 0; i < n; i++) {
        void *at = NULL;
        if (ucch_bound_ops()->flag(&at))
            return;
        give_word(at, 0);
    }
}

/* Mark the stream's point: the program may start when it is reached. */
int ucch_gate_enter(ucch_gate *g, void *stream) {
    const device_ops *ops = ucch_bound_ops();
    if (!ops)
        return UCCH_FAIL_DEVICE;
    int status = g->event ? 0 : ucch_device_fail(ops->event_new(&g->event), "event");
    if (!status)
        status = ucch_device_fail(ops->event_record(g->event, stream), "record");
    g->closed = !status;
    return status;
}

/* Let the stream wait for the program's end: 1, or 0 where streams cannot wait for memory and the host has to. A word
 * serves all calls of its program: the stream waits until it has reached the call's ticket, and it only grows. */
int ucch_gate_hold(ucch_gate *g, void *stream) {
    const device_ops *ops = ucch_bound_ops();
    if (!g->word && take_word(g)) {
        g->word = NULL;
        return 0;
    }
    uint32_t ticket = g->ticket + 1;
    if (ops->stream_hold(stream, g->word, ticket))
        return 0;
    g->ticket = ticket;
    g->held = 1;
    held++;
    return 1;
}

/* 1 when the stream has reached the call, 0 when not yet, negative on failure. */
int ucch_gate_open_locked(ucch_gate *g) {
    int done = 0;
    if (!g->closed)
        return 1;
    int status = ucch_event_ask(g->event, &done, &g->again);
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
        __atomic_store_n(g->word, g->ticket, __ATOMIC_RELEASE);
    }
    g->held = 0;
}

void ucch_gate_free(ucch_gate *g) {
    if (g->word)
        give_word(g->word, g->ticket);
    if (g->event && ucch_bound() >= 0)
        ucch_bound_ops()->event_free(g->event);
}
