/* Counters that streams and hosts wait for and signal, and gates: work that starts when a stream reaches a call, while
 * the stream waits for the work's end and the host goes on. Both directions use words in memory: querying an event is a
 * driver call, which delays other threads that launch kernels.
 *
 * Counters only grow, so a stream that checks one late still finds its value reached. The runtime's own counters (some
 * streams can wait for no other memory) are reused. */
#include <stdlib.h>

#include "gpu/gpu.h"

/* Launch a kernel that sets one word and waits for another; either may be NULL. */
static int run(void *kernel, void *told, uint32_t value, void *seen, uint32_t least, void *stream) {
    uint64_t numbers = (uint64_t)value << 32 | least;
    double unused = 0;
    void *arguments[] = {&told, &seen, &numbers, &unused};
    return ucch_bound_ops()->launch(kernel, 1, 1, arguments, stream);
}

/* Let the stream wait until the counter has reached `least`, unless it has already. `await`: the kernel that waits, for
 * streams that cannot wait for any memory. */
int ucch_counter_wait(ucch_counter counter, uint32_t least, void *await, void *stream) {
    if (counter.at && ucch_reached(counter.at, least)) return 0;
    return ucch_device_fail(await ? run(await, NULL, 0, counter.seen, least, stream)
                                  : ucch_bound_ops()->stream_hold(stream, counter.seen, least),
                            "a stream's wait for memory");
}

/* Let the stream set the counter after all earlier work; `await` as above. */
int ucch_counter_signal(ucch_counter counter, uint32_t value, void *await, void *stream) {
    return ucch_device_fail(await ? run(await, counter.seen, value, NULL, 0, stream)
                                  : ucch_bound_ops()->stream_write(stream, counter.seen, value),
                            "a stream's write to memory");
}

/* Let the stream set one counter and then wait for another, in one driver call if there is one. */
int ucch_counter_turn(ucch_counter told, uint32_t value, ucch_counter counter, uint32_t least, void *await,
                      void *stream) {
    if (!ucch_reached(counter.at, least)) {
        int refused = await ? run(await, told.seen, value, counter.seen, least, stream)
                            : ucch_bound_ops()->stream_turn(stream, told.seen, value, counter.seen, least);
        if (!refused) return 0;
    }
    return ucch_counter_signal(told, value, await, stream) ?: ucch_counter_wait(counter, least, await, stream);
}

/* ---- the runtime's own counters ---- */

typedef struct idle {
    ucch_flag flag;
    struct idle *next;
} idle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
UCCH_FREE_IN_FORKS(lock)
static idle *flags;

/* True if the next ticket would be 0: streams of some runtimes compare without wrapping. */
static int is_exhausted(ucch_flag flag) { return flag.ticket == UINT32_MAX; }

static int make_flag(ucch_flag *flag) {
    void *at = NULL;
    int status = ucch_bound_ops()->flag(&at);
    *flag = (ucch_flag){status ? NULL : at, 0};
    return status;
}

/* Take the flag's next ticket, with a new counter if it has none or is exhausted. Returns 0 or a failure. */
static int next_ticket(ucch_flag *flag) {
    if (!flag->at || is_exhausted(*flag)) {
        pthread_mutex_lock(&lock);
        idle *found = flags;
        if (found) flags = found->next;
        pthread_mutex_unlock(&lock);
        if (found) *flag = found->flag;
        free(found);
        if (!found && make_flag(flag)) return UCCH_FAIL_DEVICE;
    }
    flag->ticket++;
    return 0;
}

/* True if the counter has not reached the ticket yet. */
static int is_due(ucch_flag flag) { return flag.at && !ucch_reached(flag.at, flag.ticket); }

/* Put a flag back for reuse. */
static void put_back(ucch_flag flag) {
    idle *place = flag.at && !is_exhausted(flag) ? malloc(sizeof(*place)) : NULL;
    if (!place) return; /* leaked: a few bytes */
    pthread_mutex_lock(&lock);
    *place = (idle){flag, flags};
    flags = place;
    pthread_mutex_unlock(&lock);
}

/* Create some in advance: while a stream is held, allocating one could wait for that stream. */
void ucch_flags_reserve(int count) {
    ucch_flag flag;
    while (count-- > 0 && !make_flag(&flag))
        put_back(flag);
}

/* ---- gates ---- */

static int barred;

/* by = 1: no stream may be held from now on, as a driver call would wait for it; by = -1: it may again. */
void ucch_gates_bar_locked(int by) { barred += by; }

/* Let the stream write the next ticket when it reaches this point. Returns 0 or a failure. A counter that an earlier
 * stream still has to write gets replaced: that stream would write a smaller value. */
static int write_in(ucch_flag *in, void *stream) {
    if (is_due(*in)) in->at = NULL;
    if (next_ticket(in)) return UCCH_FAIL_DEVICE;
    int status = ucch_counter_signal((ucch_counter){in->at, in->at}, in->ticket, NULL, stream);
    in->ticket -= status != 0;
    return status;
}

/* Mark the stream's current point: the work behind the gate may start when the stream reaches it. */
int ucch_gate_enter(ucch_gate *g, void *stream) {
    if (ucch_bound() < 0) return UCCH_FAIL_DEVICE;
    g->again = 0;
    g->by_event = write_in(&g->in, stream) != 0;
    int status = g->by_event ? ucch_event_record(&g->event, stream) : 0;
    if (status) g->by_event = 0; /* there may be no event */
    g->closed = !status;
    return status;
}

static void release_stream(ucch_gate *g) {
    if (g->held) {
        ucch_hold_locked(-1);
        UCCH_STORE(g->out.at, g->out.ticket);
    }
    g->held = 0;
}

/* Let the stream wait for the program's end. Returns 1, or 0 if streams cannot wait for memory and the host has to
 * wait. One counter serves all calls of a program: the stream waits for the call's ticket. */
int ucch_gate_hold(ucch_gate *g, void *stream) {
    if (!ucch_gate_promise_locked(g)) return 0;
    if (!ucch_gate_wait(g, stream)) return 1;
    release_stream(g);
    return 0;
}

/* Reserve the counter by which the stream will be released. Returns 0 if there is none or streams must not be held. */
int ucch_gate_promise_locked(ucch_gate *g) {
    if (barred || next_ticket(&g->out)) return 0;
    g->held = 1;
    ucch_hold_locked(1);
    return 1;
}

/* Without the lock: let the stream wait for what ucch_gate_promise_locked reserved. Returns 0 or a failure. */
int ucch_gate_wait(const ucch_gate *g, void *stream) {
    return ucch_counter_wait((ucch_counter){g->out.at, g->out.at}, g->out.ticket, NULL, stream);
}

/* Returns 1 if the stream has reached the gate, 0 if not yet, negative on failure. */
int ucch_gate_open_locked(ucch_gate *g) {
    int done = 0, status = 0;
    if (!g->closed) return 1;
    if (g->by_event)
        status = ucch_event_ask(g->event, &done, &g->again);
    else
        done = !is_due(g->in);
    if (status) return status;
    g->closed = !done;
    return done;
}

/* The program has ended, in success or failure: release the stream. */
void ucch_gate_leave_locked(ucch_gate *g) {
    g->closed = 0;
    release_stream(g);
}

/* True if the stream has not reached the gate yet, though no thread waits for that any more. */
int ucch_gate_due(const ucch_gate *g) {
    int done = 1;
    if (g->by_event) ucch_bound_ops()->event_done(g->event, &done);
    return g->by_event ? !done : is_due(g->in);
}

void ucch_gate_free(ucch_gate *g) {
    put_back(g->out);
    if (!is_due(g->in)) put_back(g->in);
    if (g->event && ucch_bound() >= 0) ucch_bound_ops()->event_free(g->event);
}
