/* Stream-ordered work: it starts when a stream reaches the call, and the stream does not pass it before the data is
 * there, while the host goes on. In and out by counters in memory: to ask for an event is a call of the driver, which
 * delays threads that launch kernels meanwhile. */
#include "gpu/device.h"

static int held, barred;

/* Streams that wait for programs now. */
int ucch_gates_held(void) { return held; }

/* By 1, and by -1 when that is over: no stream begins to wait, as the driver does something that would wait for it. */
void ucch_gates_bar_locked(int by) { barred += by; }

/* Let the stream write when it gets here: 0, or a failure. A counter that an earlier stream has still to write is left
 * to that: it would write less. */
static int write_in(ucch_flag *in, void *stream) {
    if (ucch_flag_due(*in)) in->at = NULL;
    if (ucch_flag_next(in)) return UCCH_FAIL_DEVICE;
    int status = ucch_counter_signal(ucch_counter_of(*in), in->ticket, NULL, stream);
    in->ticket -= status != 0;
    return status;
}

/* Mark the stream's point: what is behind the gate may start when it is reached. */
int ucch_gate_enter(ucch_gate *g, void *stream) {
    if (ucch_bound() < 0) return UCCH_FAIL_DEVICE;
    g->again = 0;
    g->by_event = write_in(&g->in, stream) != 0;
    int status = g->by_event ? ucch_event_record(&g->event, stream) : 0;
    g->closed = !status;
    return status;
}

static void let_go(ucch_gate *g) {
    if (g->held) {
        held--;
        ucch_flag_pass(g->out);
    }
    g->held = 0;
}

/* Let the stream wait for the program's end: 1, or 0 where streams cannot wait for memory and the host has to. A
 * counter serves all calls of its program: the stream waits until it has reached the call's ticket, and it only grows.
 */
int ucch_gate_hold(ucch_gate *g, void *stream) {
    if (!ucch_gate_promise_locked(g)) return 0;
    if (!ucch_gate_wait(g, stream)) return 1;
    let_go(g);
    return 0;
}

/* Promise to a stream that it will be told of the gate's end: whether there is a counter for that, and it may wait. */
int ucch_gate_promise_locked(ucch_gate *g) {
    if (barred || ucch_flag_next(&g->out)) return 0;
    g->held = 1;
    held++;
    return 1;
}

/* Without the lock: let a stream wait for what was promised. 0, or a failure. */
int ucch_gate_wait(const ucch_gate *g, void *stream) {
    return ucch_counter_wait(ucch_counter_of(g->out), g->out.ticket, NULL, stream);
}

/* 1 when the stream has reached the call, 0 when not yet, negative on failure. */
int ucch_gate_open_locked(ucch_gate *g) {
    int done = 0, status = 0;
    if (!g->closed) return 1;
    if (g->by_event)
        status = ucch_event_ask(g->event, &done, &g->again);
    else
        done = !ucch_flag_due(g->in);
    if (status) return status;
    g->closed = !done;
    return done;
}

/* The program has ended, well or not: the stream must go on in either case. */
void ucch_gate_leave_locked(ucch_gate *g) {
    g->closed = 0;
    let_go(g);
}

/* True if its stream has not got there yet; no thread needs to wait for it any more. */
int ucch_gate_due(const ucch_gate *g) {
    int done = 1;
    if (g->by_event) ucch_bound_ops()->event_done(g->event, &done);
    return g->by_event ? !done : ucch_flag_due(g->in);
}

void ucch_gate_free(ucch_gate *g) {
    ucch_flag_give(g->out);
    if (!ucch_flag_due(g->in)) ucch_flag_give(g->in);
    if (g->event && ucch_bound() >= 0) ucch_bound_ops()->event_free(g->event);
}
