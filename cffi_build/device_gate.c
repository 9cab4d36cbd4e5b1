/* Stream-ordered calls: the work starts when a stream reaches the call, and the stream does not pass it before the data
 * is there, while the host goes on. In by an event, out by a word in memory that the stream waits for. */
#include <stdlib.h>

#include "device.h"

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
    if (!g->word && ops->flag((void **)&g->word)) {
        g->word = NULL;
        return 0;
    }
    uint32_t ticket = g->ticket + 1;
    if (ops->stream_hold(stream, g->word, ticket))
        return 0;
    g->ticket = ticket;
    g->held = 1;
    return 1;
}

/* 1 when the stream has reached the call, 0 when not yet, negative on failure. */
int ucch_gate_open_locked(ucch_gate *g) {
    int done = 0;
    if (!g->closed)
        return 1;
    int status = ucch_device_fail(ucch_bound_ops()->event_done(g->event, &done), "event");
    if (status)
        return status;
    g->closed = !done;
    return done;
}

/* The program has ended, well or not: the stream must go on in either case. */
void ucch_gate_leave_locked(ucch_gate *g) {
    g->closed = 0;
    if (g->held)
        __atomic_store_n(g->word, g->ticket, __ATOMIC_RELEASE);
    g->held = 0;
}

/* The word stays: a stream may still have to look at it. */
void ucch_gate_free(ucch_gate *g) {
    if (g->event && ucch_bound() >= 0)
        ucch_bound_ops()->event_free(g->event);
}
