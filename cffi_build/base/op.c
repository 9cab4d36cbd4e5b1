/* Operations in flight: begin and end, deadlines, and wake-ups of threads that listen for an end. */

#include "base/base.h"

/* Seconds before peers of an operation are first checked for death or a different call, and between checks; up to
 * LONGEST_S where a check, of thousands of messages, would take more than CHECK_SHARE of the time. */
#define SUSPICION_S 0.002
#define LONGEST_S 0.05
#define CHECK_SHARE 0.05

static int under_way[UCCH_WAYS];
/* Operations in flight that rounds advance, and those that others end, such as posted receives: libucp calls back. */
static ucch_op active = {.next = &active, .prev = &active}, called_back = {.next = &called_back, .prev = &called_back};
static ucch_op *upcoming; /* the next op of the round under way: an op may end another one */
static uint64_t failures;
static double recent; /* when the clock was last read; reading it again can cost more than the rest of a record */

static void count_locked(int way, int more) {
    __atomic_store_n(&under_way[way], under_way[way] + more, __ATOMIC_RELAXED);
}

/* Operations in flight with this way of progress. Needs no lock. */
int ucch_ops_under_way(int way) { return __atomic_load_n(&under_way[way], __ATOMIC_RELAXED); }

/* Operations in streams go to the end of their list, in order: of calls that fail together, the first is reported. */
static void link_locked(ucch_op *op) {
    ucch_op *list = op->called_back || !op->kind->advance_locked ? &called_back : &active;
    ucch_op *behind = op->kind->way == UCCH_IN_STREAMS ? list : list->next;
    op->next = behind;
    op->prev = behind->prev;
    behind->prev->next = op;
    behind->prev = op;
}

static void unlink_locked(ucch_op *op) {
    op->prev->next = op->next;
    op->next->prev = op->prev;
    if (upcoming == op) upcoming = op->next;
}

/* Begin an operation. */
void ucch_op_begin_locked(ucch_op *op, double timeout) {
    op->error = (ucch_error){.status = 0, .step = -1, .peer = -1, .seq = op->error.seq};
    op->started = recent = ucch_now();
    op->deadline = timeout > 0 ? op->started + timeout : 0;
    op->ended = 0;
    op->record = op->about ? ucch_flight_begin(op->about, op->error.seq, op->started, !op->late) : 0;
    op->has_listener = op->matched = 0;
    op->state = UCCH_ACTIVE;
    link_locked(op);
    count_locked(op->kind->way, 1);
}

/* From now on a library's callback comes next, or rounds advance the operation. */
void ucch_op_called_back_locked(ucch_op *op, int called_back) {
    int moves = op->state == UCCH_ACTIVE && op->called_back != called_back;
    if (moves) unlink_locked(op);
    op->called_back = called_back;
    if (moves) link_locked(op);
}

/* An operation that was to start later starts now. */
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
    unlink_locked(op);
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
    /* last: a thread that polls the state without the lock may reuse the op from here on */
    UCCH_STORE(&op->state, status < 0 ? UCCH_FAILED : UCCH_DONE);
    if (has_listener) ucch_doorbell_ring();
}

/* Restart the deadline of an active operation: `timeout` seconds from now, 0: none. */
void ucch_op_deadline(ucch_op *op, double timeout) {
    UCCH_LOCKED;
    if (op->state == UCCH_ACTIVE) op->deadline = timeout > 0 ? ucch_now() + timeout : 0;
}

/* Number of operations that have failed so far: tells callers whether it is worth checking each. */
uint64_t ucch_failures(void) { return UCCH_LOAD(&failures); }

/* ---- rounds ---- */

/* Advance the operations that are to be. Returns whether anything moved. */
int ucch_ops_advance_locked(void) {
    int moved = 0;
    for (ucch_op *op = active.next; op != &active; op = upcoming) {
        upcoming = op->next;
        moved += op->kind->advance_locked(op);
    }
    return moved;
}

static void check_list_locked(const ucch_op *list, double now) {
    for (ucch_op *op = list->next; op != list; op = upcoming) {
        upcoming = op->next;
        int bad = op->kind->check_locked && now - op->started > SUSPICION_S ? op->kind->check_locked(op, now) : 0;
        if (!bad && op->state == UCCH_ACTIVE && op->deadline > 0 && now > op->deadline) bad = UCCH_FAIL_TIMEOUT;
        if (bad) op->kind->abandon_locked(op, bad);
    }
}

/* End operations that are past their deadline, or whose peer has died or called something else. */
void ucch_ops_check_deadlines_locked(double now) {
    static double next;
    recent = now;
    if (now < next) return;
    check_list_locked(&active, now);
    check_list_locked(&called_back, now);
    double end = ucch_now(), pause = (end - now) / CHECK_SHARE;
    next = end + (pause < SUSPICION_S ? SUSPICION_S : pause < LONGEST_S ? pause : LONGEST_S);
}

/* ---- listening ---- */

static pthread_mutex_t bell = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rung;
static uint64_t rings;

__attribute__((constructor)) static void make_condition(void) { ucch_cond_init(&rung); }

/* Wake all listeners. */
void ucch_doorbell_ring(void) {
    pthread_mutex_lock(&bell);
    __atomic_add_fetch(&rings, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&rung);
    pthread_mutex_unlock(&bell);
}

/* How often the doorbell has rung. To be read before the caller checks its operations. */
uint64_t ucch_doorbell_count(void) { return __atomic_load_n(&rings, __ATOMIC_SEQ_CST); }

/* Ring the doorbell when the operation ends, if it is still active. */
void ucch_listen(ucch_op *op) {
    UCCH_LOCKED;
    op->has_listener = op->state == UCCH_ACTIVE;
}

/* Sleep until the doorbell has rung more than `known` times, at most `seconds`. Makes no progress: the progress thread
 * does. */
void ucch_doorbell_wait(uint64_t known, double seconds) {
    double until = ucch_now() + seconds, left = seconds;
    pthread_mutex_lock(&bell);
    for (; rings == known && left > 0; left = until - ucch_now())
        ucch_cond_wait(&rung, &bell, left);
    pthread_mutex_unlock(&bell);
}
