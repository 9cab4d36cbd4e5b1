/* Operations in flight: how they begin and end, what is done for them meanwhile, and how listeners hear of ends. */
#define _GNU_SOURCE

#include "base/base.h"

/* Peers are checked for death and for another call than ours after this long, then again at this distance. */
#define SUSPICION_S 0.002

static int under_way[UCCH_WAYS];
static ucch_op active = {.next = &active, .prev = &active};
static ucch_op *upcoming; /* in the round under way: one operation may end another */
static uint64_t failures;
static double recent; /* when the clock was looked at last, which can take longer than all else that is recorded */

static void count_locked(int way, int more) {
    __atomic_store_n(&under_way[way], under_way[way] + more, __ATOMIC_RELAXED);
}

/* Operations in flight that wait for progress made in this way; the lock is not needed. */
int ucch_ops_under_way(int way) { return __atomic_load_n(&under_way[way], __ATOMIC_RELAXED); }

/* Begin an operation. Those in streams go last, in order: of calls that fail together the first one counts. */
void ucch_op_begin_locked(ucch_op *op, double timeout) {
    op->error = (ucch_error){.status = 0, .step = -1, .peer = -1, .seq = op->error.seq};
    op->started = recent = ucch_now();
    op->deadline = timeout > 0 ? op->started + timeout : 0;
    op->ended = 0;
    op->record = op->about ? ucch_flight_begin(op->about, op->error.seq, op->started, !op->late) : 0;
    op->has_listener = op->matched = 0;
    op->state = UCCH_ACTIVE;
    ucch_op *behind = op->kind->way == UCCH_IN_STREAMS ? &active : active.next;
    op->next = behind;
    op->prev = behind->prev;
    behind->prev->next = op;
    behind->prev = op;
    count_locked(op->kind->way, 1);
}

/* One that was to begin later does so now. */
void ucch_op_started_locked(ucch_op *op) {
    if (op->late && op->record) ucch_flight_started(op->record, ucch_now());
    op->late = 0;
}

static void note_end_locked(ucch_op *op, int status) {
    double now = op->ended > 0 ? op->ended : status < 0 ? ucch_now() : recent;
    if (op->record) ucch_flight_end(op->record, status, now);
    if (status < 0) ucch_flight_failed_locked(status, now);
}

void ucch_op_end_locked(ucch_op *op, int status, int step, int peer) {
    op->prev->next = op->next;
    op->next->prev = op->prev;
    if (upcoming == op) upcoming = op->next;
    count_locked(op->kind->way, -1);
    op->matched = 0;
    if (status < 0) {
        op->error.status = status;
        op->error.step = step;
        op->error.peer = peer;
        op->error.elapsed = ucch_now() - op->started;
        __atomic_add_fetch(&failures, 1, __ATOMIC_RELEASE);
    }
    if (op->record || (status < 0 && op->kind->way == UCCH_IN_STREAMS)) note_end_locked(op, status);
    if (UCCH_TRACING && op->event) ucch_trace_end(op->event, status);
    op->event = 0;
    int has_listener = op->has_listener;
    /* Last: a thread that polls the state without the lock may reuse the operation from here on. */
    UCCH_STORE(&op->state, status < 0 ? UCCH_FAILED : UCCH_DONE);
    if (has_listener) ucch_doorbell_ring();
}

/* Count the time limit of what is in flight from now. */
void ucch_op_deadline(ucch_op *op, double timeout) {
    UCCH_LOCKED;
    if (op->state == UCCH_ACTIVE) op->deadline = timeout > 0 ? ucch_now() + timeout : 0;
}

/* How many operations have failed so far: whether there is any use in asking them all. */
uint64_t ucch_failures(void) { return UCCH_LOAD(&failures); }

/* ---- what is done for them ---- */

/* Move all of them on: whether anything has moved. */
int ucch_ops_advance_locked(void) {
    int moved = 0;
    for (ucch_op *op = active.next; op != &active; op = upcoming) {
        upcoming = op->next;
        if (op->kind->advance_locked) moved += op->kind->advance_locked(op);
    }
    return moved;
}

/* End what is past its deadline, and what waits for a peer that died or called something else; now and then. */
void ucch_ops_check_deadlines_locked(double now) {
    static double last;
    recent = now;
    if (now - last < SUSPICION_S) return;
    last = now;
    for (ucch_op *op = active.next; op != &active; op = upcoming) {
        upcoming = op->next;
        int bad = op->kind->check_locked && now - op->started > SUSPICION_S ? op->kind->check_locked(op, now) : 0;
        if (!bad && op->state == UCCH_ACTIVE && op->deadline > 0 && now > op->deadline) bad = UCCH_FAIL_TIMEOUT;
        if (bad) op->kind->abandon_locked(op, bad);
    }
}

/* ---- listening ---- */

static pthread_mutex_t bell = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rung;
static uint64_t rings;

__attribute__((constructor)) static void make_condition(void) { ucch_cond_init(&rung); }

/* Let listeners look again. */
void ucch_doorbell_ring(void) {
    pthread_mutex_lock(&bell);
    __atomic_add_fetch(&rings, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&rung);
    pthread_mutex_unlock(&bell);
}

/* How often the bell has rung. To be asked for before one looks at what is to be ended. */
uint64_t ucch_doorbell_count(void) { return __atomic_load_n(&rings, __ATOMIC_SEQ_CST); }

/* The bell rings when the operation ends, if it has not ended by now. */
void ucch_listen(ucch_op *op) {
    UCCH_LOCKED;
    op->has_listener = op->state == UCCH_ACTIVE;
}

/* Sleep until the bell has rung more than `known` times, `seconds` at most. Makes no progress: the thread does. */
void ucch_doorbell_wait(uint64_t known, double seconds) {
    double until = ucch_now() + seconds, left = seconds;
    pthread_mutex_lock(&bell);
    for (; rings == known && left > 0; left = until - ucch_now())
        ucch_cond_wait(&rung, &bell, left);
    pthread_mutex_unlock(&bell);
}
