/* Runs programs without Python.
 *
 * A step is started when the steps it names have finished and, for a collective, when it heads its team's queue: the
 * order on a team is the order in which programs were started, never that of completion. */
#include <sched.h>

#include "coll/stream_executor.h"

/* Seconds that a start waits for held streams before it allocates while they are. */
#define PATIENCE_S 0.02

static int ready(const ucch_program *p, const ucch_step *s) {
    for (int k = 0; k < s->ndeps; k++)
        if (p->steps[s->deps[k]].state != FINISHED)
            return 0;
    return s->kind != STEP_COLL || s->team->head == s;
}

static void enqueue_locked(ucch_step *s) {
    ucch_team *t = s->team;
    s->next = NULL;
    if (t->tail)
        t->tail->next = s;
    else
        t->head = s;
    t->tail = s;
    t->context->users++;
}

static void dequeue_locked(ucch_step *s) {
    ucch_team *t = s->team;
    t->head = s->next;
    if (!t->head)
        t->tail = NULL;
}

static int start_step_locked(ucch_program *p, ucch_step *s) {
    if (s->kind == STEP_COLL) {
        int status = s->request ? 0 : ucch_step_init_locked(p, s);
        if (status < 0)
            return status;
        dequeue_locked(s);
    }
    return ucch_step_post_locked(p, s);
}

int ucch_program_check_locked(ucch_program *p) {
    if (!p->board || p->queued)
        return 0;
    if (ucch_board_refused(p->board, p->since, p->op.error.seq, NULL))
        return UCCH_FAIL_REFUSED;
    int peer = ucch_board_mismatch(p->board, p->op.error.seq);
    int bad = UCCH_FAIL_MISMATCH;
    if (peer < 0) {
        peer = ucch_board_gone(p->board, p->op.error.seq);
        bad = UCCH_FAIL_PEER;
    }
    p->op.error.peer = peer;
    return peer < 0 ? 0 : bad;
}

static void end_event_locked(uint64_t *event, int status) {
    ucch_trace_end_locked(*event, status);
    *event = 0;
}

static void finish_locked(ucch_program *p) {
    if (UCCH_TRACING)
        end_event_locked(&p->event, 0);
    if (p->board)
        ucch_board_add(p->board, ucch_now() - p->op.started, p->bytes);
    if (p->on_device && !p->persistent)
        ucch_program_give_scratch(p);
    ucch_gate_leave_locked(&p->gate);
    ucch_op_end_locked(&p->op, 0, -1, -1);
}

static void fail_locked(ucch_program *p, int status, int step) {
    int peer = -1;
    if (p->board && ucch_board_refused(p->board, p->since, p->op.error.seq, NULL))
        status = UCCH_FAIL_REFUSED;
    else if (p->board && (peer = ucch_board_mismatch(p->board, p->op.error.seq)) >= 0)
        status = UCCH_FAIL_MISMATCH;
    ucch_op_end_locked(&p->op, status, step, peer);
    ucch_program_abandon_locked(p);
}

int ucch_program_advance_locked(ucch_program *p) {
    if (p->queued)
        return 0;
    int moved = 0, open = ucch_gate_open_locked(&p->gate);
    if (open < 0)
        fail_locked(p, open, -1);
    if (open <= 0)
        return open < 0;
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = 0;
        if (s->state == WAITING && ready(p, s)) {
            if (UCCH_TRACING)
                s->event = ucch_trace_begin_locked(p->number, i, p->op.error.seq);
            status = start_step_locked(p, s);
            moved++;
        }
        if (status >= 0 && s->state == POSTED)
            status = ucch_step_poll_locked(p, s);
        if (status < 0) {
            fail_locked(p, status, i);
            return 1;
        }
        if (s->state == FINISHED) {
            moved++;
            if (UCCH_TRACING)
                end_event_locked(&s->event, 0);
            if (i == p->first)
                p->first++;
        }
    }
    if (p->first == p->nsteps)
        finish_locked(p);
    return moved;
}

/* What was posted cannot be taken back: requests still in progress are left to libucc, with the buffers that the
 * owner keeps alive; the rest of this program leaves the queues so that others can report their own fate. */
void ucch_program_abandon_locked(ucch_program *p) {
    if (UCCH_TRACING)
        end_event_locked(&p->event, p->op.error.status);
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        s->event = 0; /* without an end in the timeline: that is where it hung */
        if (s->kind == STEP_COLL && s->state != FINISHED) {
            s->team->context->users--;
            ucch_step **at = &s->team->head, *last = NULL;
            while (*at) {
                if (*at == s)
                    *at = s->next;
                else {
                    last = *at;
                    at = &(*at)->next;
                }
            }
            s->team->tail = last;
        }
        if (s->message && s->state == POSTED)
            ucch_message_abandon_locked(s->message);
        s->state = FINISHED;
    }
    p->first = p->nsteps;
    ucch_gate_leave_locked(&p->gate);
}

/* libucc numbers a team's collectives when their requests are made, which has to be in one order on every rank: that of
 * the team's queue. On the host they are made when their turn comes, as each takes scratch: that of a fragment that is
 * done serves another, still in the cache. On a device, where it may have to be allocated, and for persistent requests
 * they are made before anything begins; what stands before them in their queues comes first. */
static int make_queued_locked(ucch_team *team) {
    int status = 0;
    for (ucch_step *s = team->head; s && status >= 0; s = s->next)
        if (!s->request)
            status = ucch_step_init_locked(s->program, s);
    return status;
}

static int init_all_locked(ucch_program *p) {
    for (int i = 0; p->on_device && i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = s->kind == STEP_COLL && !s->request ? make_queued_locked(s->team) : 0;
        if (status < 0) {
            fail_locked(p, status, i);
            return status;
        }
    }
    return 0;
}

/* Of two ranks that call different things the later one sees it here, before it sends anything, because each publishes
 * before it looks; the earlier one then waits in vain and sees it too. Data of the wrong length must not arrive: libucc
 * 1.4 crashes on it. */
static int expected_otherwise(ucch_program *p) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return p->board && (ucch_board_refused(p->board, p->since, p->op.error.seq, NULL) ||
                        ucch_board_mismatch(p->board, p->op.error.seq) >= 0);
}

static int start_locked(ucch_program *p, void *send, void *recv, double timeout, const void *owner, int anyway) {
    if (p->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    if (send && send == recv)
        return UCCH_ALIASED;
    if (p->board && ucch_board_broken(p->board))
        return UCCH_FAIL_BROKEN;
    if (p->board && ucch_board_stale(p->board))
        return UCCH_STALE;
    int status = ucch_program_take_scratch(p, owner, anyway);
    if (status < 0)
        return status;
    p->base[UCCH_SEND] = send;
    p->base[UCCH_RECV] = recv;
    p->first = 0;
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        s->state = WAITING;
        if (s->kind == STEP_COLL)
            enqueue_locked(s);
    }
    p->op.error.seq = p->board ? ucch_board_publish(p->board, p->signature, p->label) : 0;
    p->since = p->board ? ucch_board_since(p->board) : 0;
    if (UCCH_TRACING)
        p->event = ucch_trace_begin_locked(p->number, -1, p->op.error.seq);
    ucch_op_begin_locked(&p->op, timeout);
    if (expected_otherwise(p))
        fail_locked(p, UCCH_FAIL_MISMATCH, -1);
    else if (!init_all_locked(p))
        ucch_program_advance_locked(p);
    return 0;
}

/* Not for long: the held streams may wait for calls of other ranks, which may wait for this one. */
int ucch_program_start(ucch_program *p, void *send, void *recv, double timeout) {
    if (p->channels)
        return ucch_program_queue(p, send, recv, timeout, p->channels->lane[LANE_LOCAL]);
    for (double until = ucch_now() + PATIENCE_S;;) {
        ucch_lock();
        int before = ucch_device_enter();
        int status = start_locked(p, send, recv, timeout, NULL, ucch_now() > until);
        ucch_device_leave(before);
        ucch_unlock();
        if (status != UCCH_LATER)
            return status;
        sched_yield();
    }
}

static int start_on_locked(ucch_program *p, void *send, void *recv, double timeout, void *stream, int ordered,
                           int anyway) {
    /* Handles of streams may be 0; calls that the stream orders share their scratch. */
    const void *owner = ordered ? (const char *)stream + 1 : NULL;
    int status = p->op.state == UCCH_ACTIVE ? UCCH_FAIL_BUSY : ucch_gate_enter(&p->gate, stream);
    if (!status)
        status = start_locked(p, send, recv, timeout, owner, anyway);
    ucch_wake_locked();
    if (status < 0) {
        p->gate.closed = 0;
        return status;
    }
    /* 0 also for what has finished already: the host's wait then costs nothing and takes the result */
    int holds = ordered && p->op.state == UCCH_ACTIVE && ucch_gate_hold(&p->gate, stream);
    if (!holds) {
        ucch_pool_keep(p->base[UCCH_TMP]);
        ucch_pool_keep(p->base[UCCH_PIN]);
    }
    return holds;
}

/* Start when `stream` gets here. With `ordered` the stream waits for the end, and the progress thread must run: 1; 0
 * when it does not (not wanted, or impossible: then the caller has to wait). Under the lock up to the stream's wait:
 * the program must not end, and so let go of the stream, before the stream was told to wait. */
int ucch_program_start_on(ucch_program *p, void *send, void *recv, double timeout, void *stream, int ordered) {
    if (p->channels) {
        int status = ucch_program_queue(p, send, recv, timeout, stream);
        return status < 0 ? status : 1;
    }
    for (double until = ucch_now() + PATIENCE_S;;) {
        ucch_lock();
        int before = ucch_device_enter();
        int status = start_on_locked(p, send, recv, timeout, stream, ordered, ucch_now() > until);
        ucch_device_leave(before);
        ucch_unlock();
        if (status != UCCH_LATER)
            return status;
        sched_yield();
    }
}

/* Start and wait in one call, for blocking calls: 1 done, 0 still going after `slice` seconds, negative not started. */
int ucch_program_run(ucch_program *p, void *send, void *recv, double timeout, double slice) {
    int status = ucch_program_start(p, send, recv, timeout);
    return status < 0 ? status : ucch_wait(&p->op, slice);
}

/* Start a persistent program with the buffers that it was bound to. */
int ucch_program_again(ucch_program *p) {
    return ucch_program_start(p, p->base[UCCH_SEND], p->base[UCCH_RECV], p->timeout);
}

/* Bind a persistent program to its buffers: the requests are made here, in program order, alike on every rank
 * (libucc numbers collectives when they are made, so they could not be remade at different times on different ranks).
 */
int ucch_program_persist(ucch_program *p, void *send, void *recv, double timeout) {
    if (send && send == recv)
        return UCCH_ALIASED;
    int status = 0;
    ucch_lock();
    p->base[UCCH_SEND] = send;
    p->base[UCCH_RECV] = recv;
    p->persistent = 1;
    p->timeout = timeout;
    int before = ucch_device_enter();
    if (!p->channels)
        status = ucch_program_take_scratch(p, NULL, 1);
    for (int i = 0; !p->channels && i < p->nsteps && status >= 0; i++) {
        ucch_step *s = &p->steps[i];
        if (s->kind == STEP_COLL) {
            s->args.flags |= FLAG_PERSISTENT;
            s->args.mask |= MASK_FLAGS;
            status = make_queued_locked(s->team);
            if (status >= 0)
                status = ucch_step_init_locked(p, s);
        }
    }
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}
