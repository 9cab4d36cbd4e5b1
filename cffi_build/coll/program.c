/* Programs: a plan lowered for this rank by Python, as a flat list of steps with dependencies, and their execution
 * on the host without Python.
 *
 * A step starts when the steps that it depends on have finished and, for a collective, when it heads its team's
 * queue. Collectives of a team are posted in the order in which their programs were started, not in the order of
 * completion. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "coll/coll.h"

/* A step between hosts usually fails because a rank died. Seconds to wait for that news before the step's own status is
 * reported. */
#define CAUSE_WAIT_S 1.0

/* Seconds that a start waits while streams are held before it allocates device memory all the same. */
#define HELD_WAIT_S 0.02

/* Release libucc's requests while their teams still exist. A request in progress is left to libucc. */
void ucch_program_drop(ucch_program *p) {
    UCCH_LOCKED;
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        if (s->request) ucch_request_drop_locked(s->request, p->is.on_device);
        s->request = NULL;
    }
}

/* Take scratch memory: the program's own on the host, borrowed from the pool on a device. `owner` is the stream that
 * orders the calls which may share it, or NULL. Returns UCCH_LATER if memory would have to be allocated while a
 * stream is held: the allocation could wait for that stream, which waits for this rank. `force` allocates in spite
 * of that. */
static int take_scratch(ucch_program *p, const void *owner, int force) {
    if (p->base[UCCH_TMP] || !p->is.tmp_bytes) return 0;
    if (!p->is.on_device)
        return posix_memalign((void **)&p->base[UCCH_TMP], 4096, p->is.tmp_bytes) ? UCCH_FAIL_MEMORY : 0;
    int may_add = force || !ucch_gates_held();
    p->base[UCCH_TMP] = ucch_pool_take(0, p->is.tmp_bytes, owner, may_add);
    return p->base[UCCH_TMP] ? 0 : may_add ? UCCH_FAIL_MEMORY : UCCH_LATER;
}

static void give_scratch(ucch_program *p) {
    if (p->is.on_device)
        ucch_pool_give(p->base[UCCH_TMP]);
    else
        free(p->base[UCCH_TMP]);
    p->base[UCCH_TMP] = NULL;
}

/* Does not touch requests that ucch_program_drop left: their team may be destroyed. */
void ucch_program_free(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        if (s->message) ucch_message_free(s->message);
        ucch_work_free(s->work);
        if (s->end && ucch_bound() >= 0) ucch_bound_ops()->event_free(s->end);
    }
    ucch_gate_free(&p->gate);
    give_scratch(p);
    free(p);
}

ucch_op *ucch_program_op(ucch_program *p) { return &p->op; }

/* One buffer of a collective; its v-form if there are counts and displacements per rank. */
static ucc_coll_buffer_t buffer_of(const ucch_span *span, const uint64_t *const *table, ucc_datatype_t dtype) {
    ucc_coll_buffer_t side = {.info = {.count = span->count, .datatype = dtype}};
    if (table[0])
        side.info_v = (ucc_coll_buffer_info_v_t){
            .counts = (uint64_t *)table[0], .displacements = (uint64_t *)table[1], .datatype = dtype};
    return side;
}

static int set_step(ucch_program *p, ucch_step *s, const ucch_part *part) {
    ucc_datatype_t dtype = (ucc_datatype_t)part->dtype;
    *s = (ucch_step){.is = *part, .state = FINISHED, .program = p};
    if (part->kind == UCCH_STEP_COLL)
        s->args = (ucc_coll_args_t){.coll_type = part->coll,
                                    .op = part->op,
                                    .root = part->root,
                                    .flags = part->flags,
                                    .mask = part->flags ? MASK_FLAGS : 0,
                                    .src = buffer_of(&part->src, &part->tables[0], dtype),
                                    .dst = buffer_of(&part->dst, &part->tables[2], dtype)};
    if (part->kind == UCCH_STEP_EXCHANGE) {
        if (!ucch_board_parcels(p->board) || part->src.count > UCCH_PARCEL_BYTES) return UCCH_FAIL_ARGUMENT;
        s->exchange = (ucch_exchange){.is = &s->is, .count = part->bytes / ucch_step_bytes(dtype, 1)};
    }
    if (!ucch_step_is_message(s)) return 0;
    s->message = ucch_message_new();
    return s->message ? 0 : UCCH_FAIL_MEMORY;
}

/* Prepare a program that is queued in streams: steps that other streams wait for are marked to record an event. */
static int set_queued(ucch_program *p, const ucch_spec *spec) {
    p->fused = ucch_kernel_of(&(ucch_task){.kind = UCCH_FUSED, .op = spec->op, .dtype = spec->dtype});
    for (int i = 0; i < p->nsteps; i++)
        for (int k = 0; k < p->steps[i].is.ndeps; k++) {
            int earlier = p->steps[i].is.deps[k];
            if (earlier < 0 || earlier >= i) return UCCH_FAIL_ARGUMENT;
            p->steps[earlier].marked |= ucch_stream_of(&p->steps[earlier]) != ucch_stream_of(&p->steps[i]);
        }
    p->sliced = ucch_fused_sliced(p);
    p->element = ucch_step_bytes((ucc_datatype_t)spec->dtype, 1);
    return 0;
}

/* Create a program of `nsteps` steps. Memory that the steps point to stays the caller's. NULL on failure, with the
 * reason in `status`. */
ucch_program *ucch_program_new(ucch_board *board, const ucch_spec *spec, int nsteps, const ucch_part *steps,
                               int *status) {
    ucch_program *p = calloc(1, sizeof(*p) + (size_t)nsteps * sizeof(ucch_step));
    *status = UCCH_FAIL_MEMORY;
    if (!p) return NULL;
    *p = (ucch_program){.board = board,
                        .about = {.kind = UCCH_RECORD_CALL,
                                  .comm = ucch_board_comm(board),
                                  .signature = spec->signature,
                                  .bytes = spec->bytes},
                        .is = *spec,
                        .channels = spec->channels};
    strncpy(p->about.label, spec->label, UCCH_LABEL_BYTES - 1);
    p->is.salt %= 1 << SALT_BITS;
    *status = p->is.on_device && ucch_bound() < 0 ? UCCH_FAIL_ARGUMENT : 0;
    for (; p->nsteps < nsteps && !*status; p->nsteps++)
        *status = set_step(p, &p->steps[p->nsteps], &steps[p->nsteps]);
    if (!*status && p->channels) *status = set_queued(p, spec);
    if (!*status && !p->is.on_device) *status = take_scratch(p, NULL, 1);
    if (!*status) return p;
    ucch_program_free(p);
    return NULL;
}

/* ---- execution on the host ---- */

static int is_ready(const ucch_program *p, const ucch_step *s) {
    for (int k = 0; k < s->is.ndeps; k++)
        if (p->steps[s->is.deps[k]].state != FINISHED) return 0;
    return s->is.kind != UCCH_STEP_COLL || (s->is.team->head == s && ucch_tag_is_free_locked(s));
}

static void end_locked(ucch_program *p, int status, int step, int peer) {
    ucch_board_ended_locked(p->board, &p->op, status, p->about.bytes);
    ucch_board_open(p->board, -1);
    ucch_op_end_locked(&p->op, status, step, peer); /* last: its waiter may free the program */
}

/* Give a program up. Posted operations cannot be cancelled: requests in progress are left to libucc, with the buffers,
 * which the owner keeps alive. Steps not yet posted leave their team's queue, so that later programs can go on and
 * report their own failure. */
static void abandon_locked(ucch_program *p) {
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        s->event = 0; /* no end in the timeline: it shows where the call hung */
        if (s->is.kind == UCCH_STEP_COLL && s->state != FINISHED) ucch_team_leave_locked(s);
        if (s->is.kind == UCCH_STEP_EXCHANGE && s->state == POSTED)
            ucch_exchange_end(ucch_board_parcels(p->board), &s->exchange);
        if (s->message && s->state == POSTED) ucch_message_abandon_locked(s->message);
        s->state = FINISHED;
    }
    p->first = p->nsteps;
    ucch_gate_leave_locked(&p->gate);
}

static void fail_locked(ucch_program *p, int status, int step) {
    int peer, bad = ucch_board_verdict(p->board, p->op.error.seq, &peer);
    if (!bad && ucch_board_far(p->board)) {
        peer = ucch_board_gone(p->board, p->op.error.seq);
        if (peer != -1) bad = UCCH_FAIL_PEER;
    }
    end_locked(p, bad ? bad : status, step, peer);
    abandon_locked(p);
}

/* A step has failed. The call fails at once or, between hosts, once the cause is known. */
static void defer_failure_locked(ucch_program *p, int status, int step) {
    if (ucch_board_far(p->board) && ucch_board_gone(p->board, p->op.error.seq) == -1) {
        p->deferred = status;
        p->deferred_step = step;
        p->deferred_since = ucch_now();
    } else
        fail_locked(p, status, step);
}

static int advance_locked(ucch_op *op) {
    ucch_program *p = (ucch_program *)op;
    if (p->deferred) return 0;
    int moved = 0, open = ucch_gate_open_locked(&p->gate);
    if (open < 0) fail_locked(p, open, -1);
    if (open <= 0) return open < 0;
    if (p->op.late) ucch_op_started_locked(&p->op);
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = 0, before = s->state;
        if (s->state == WAITING && is_ready(p, s)) {
            if (UCCH_TRACING) s->event = ucch_trace_begin(p->is.number, i, p->op.error.seq);
            status = ucch_step_post_locked(p, s);
            moved++;
        }
        if (status >= 0 && s->state == POSTED) status = ucch_step_poll_locked(p, s);
        if (status < 0) {
            defer_failure_locked(p, status, i);
            return 1;
        }
        if (s->state == FINISHED) {
            moved += before != FINISHED; /* a step that has waited for an earlier one since does not move */
            if (UCCH_TRACING) ucch_trace_end(s->event, 0);
            s->event = 0;
            if (i == p->first) p->first++;
        }
    }
    if (p->first < p->nsteps) return moved;
    if (p->is.on_device && !p->persistent) give_scratch(p);
    ucch_gate_leave_locked(&p->gate);
    end_locked(p, 0, -1, -1);
    return moved;
}

/* True if a step awaits a message that libucp may have thrown away. */
static int has_lost_message(const ucch_program *p) {
    int awaits = 0;
    for (int i = p->first; i < p->nsteps && ucch_board_lossy(p->board); i++)
        awaits |= p->steps[i].state == POSTED &&
                  (p->steps[i].is.kind == UCCH_STEP_COLL || p->steps[i].is.kind == UCCH_STEP_RECV);
    return awaits;
}

static int check_locked(ucch_op *op, double now) {
    ucch_program *p = (ucch_program *)op;
    int bad = ucch_board_verdict(p->board, op->error.seq, &op->error.peer);
    if (!bad) bad = ucch_board_stuck(p->board, op->error.seq, now - op->started, &op->error.peer);
    if (bad || has_lost_message(p)) return bad ? bad : UCCH_FAIL_LOST;
    return p->deferred && now - p->deferred_since > CAUSE_WAIT_S ? p->deferred : 0;
}

/* The op ends before its steps are abandoned: a callback run by a cancel then finds nothing to complete. */
static void give_up_locked(ucch_op *op, int status) {
    ucch_program *p = (ucch_program *)op;
    end_locked(p, status, p->deferred && status == p->deferred ? p->deferred_step : -1, op->error.peer);
    abandon_locked((ucch_program *)op);
}

static const ucch_op_kind kind = {UCCH_BY_CONTEXTS, advance_locked, check_locked, give_up_locked};

static int init_all_locked(ucch_program *p) {
    for (int i = 0; p->is.on_device && i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = s->is.kind == UCCH_STEP_COLL && !s->request ? ucch_team_init_requests_locked(s->is.team) : 0;
        if (status < 0) {
            fail_locked(p, status, i);
            return status;
        }
    }
    return 0;
}

static int start_locked(ucch_program *p, void *send, void *recv, double timeout, const void *owner, int force) {
    if (p->op.state == UCCH_ACTIVE) return UCCH_FAIL_BUSY;
    if (ucch_program_aliased(p, (uintptr_t)send, (uintptr_t)recv)) return UCCH_ALIASED;
    if (ucch_board_broken(p->board)) return UCCH_FAIL_BROKEN;
    int status = take_scratch(p, owner, force);
    if (status < 0) return status;
    p->base[UCCH_SEND] = send;
    p->base[UCCH_RECV] = recv;
    p->first = p->deferred = 0;
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        s->state = WAITING;
        if (s->is.kind == UCCH_STEP_COLL) ucch_team_enqueue_locked(s);
    }
    ucch_board_open(p->board, 1);
    p->op.kind = &kind;
    p->op.late = p->gate.closed;
    int peer;
    if (ucch_program_enter_locked(p, &p->op, &p->about, timeout, &peer))
        fail_locked(p, UCCH_FAIL_MISMATCH, -1);
    else if (!init_all_locked(p))
        advance_locked(&p->op);
    return 0;
}

/* Where a call starts: on the host at once, or when `stream` reaches this point; with `ordered` the stream also waits
 * for its end. */
typedef struct start_point {
    int in_stream, ordered;
    void *stream;
} start_point;

/* `owner` is the handle plus 1, as the handle of the default stream is 0. Calls that one stream orders share
 * scratch. */
static int start_on_locked(ucch_program *p, void *send, void *recv, double timeout, start_point at, int force) {
    const void *owner = at.ordered ? (const char *)at.stream + 1 : NULL;
    int status = p->op.state == UCCH_ACTIVE ? UCCH_FAIL_BUSY : ucch_gate_enter(&p->gate, at.stream);
    if (!status) status = start_locked(p, send, recv, timeout, owner, force);
    ucch_wake_locked();
    if (status < 0) {
        p->gate.closed = 0;
        return status;
    }
    /* 0 also if the call has finished: the caller's wait then returns the result at once */
    int holds = at.ordered && p->op.state == UCCH_ACTIVE && ucch_gate_hold(&p->gate, at.stream);
    if (!holds) ucch_pool_keep(p->base[UCCH_TMP]);
    return holds;
}

/* Waits for held streams only briefly: they may wait for calls of other ranks, which may wait for this call. */
static int start(ucch_program *p, void *send, void *recv, double timeout, start_point at) {
    for (double until = ucch_now() + HELD_WAIT_S;; sched_yield()) {
        UCCH_LOCKED;
        UCCH_ON_DEVICE;
        int force = ucch_now() > until;
        int status = at.in_stream ? start_on_locked(p, send, recv, timeout, at, force)
                                  : start_locked(p, send, recv, timeout, NULL, force);
        if (status != UCCH_LATER) return status;
    }
}

int ucch_program_start(ucch_program *p, void *send, void *recv, double timeout) {
    if (p->channels) return ucch_program_queue(p, send, recv, timeout, p->channels->streams[STREAM_LOCAL]);
    return start(p, send, recv, timeout, (start_point){0, 0, NULL});
}

/* Start when `stream` reaches this point. Returns 1 if the stream waits for the end (`ordered`; the progress thread
 * must run), 0 if it does not and the caller has to wait. Holds the lock until the stream was told to wait: the program
 * must not end, and release the stream, before that. */
int ucch_program_start_on(ucch_program *p, void *send, void *recv, double timeout, void *stream, int ordered) {
    if (!p->channels) return start(p, send, recv, timeout, (start_point){1, ordered, stream});
    int status = ucch_program_queue(p, send, recv, timeout, stream);
    return status < 0 ? status : 1;
}

/* Start and wait, for blocking calls. Returns 1: done, 0: still running after `slice` seconds, negative: not
 * started. */
int ucch_program_run(ucch_program *p, void *send, void *recv, double timeout, double slice) {
    int status = ucch_program_start(p, send, recv, timeout);
    return status < 0 ? status : ucch_wait(&p->op, slice);
}

/* As ucch_program_run, for a caller that holds the GIL: waits only briefly, and never for the engine's lock. Returns
 * UCCH_LATER if another thread has that lock. `waits`: 0: start only, and wake the progress thread. */
int ucch_program_try(ucch_program *p, void *send, void *recv, double timeout, int waits) {
    if (p->channels || p->is.on_device || !ucch_trylock()) return UCCH_LATER;
    UCCH_ON_DEVICE;
    int status = start_locked(p, send, recv, timeout, NULL, 0);
    if (!status && waits) ucch_wait_briefly_locked(&p->op);
    if (!waits && p->op.state == UCCH_ACTIVE) ucch_progress_thread(1);
    ucch_unlock();
    return status < 0 ? status : ucch_peek(&p->op);
}

/* Start a persistent program with the buffers it is bound to. */
int ucch_program_again(ucch_program *p) {
    return ucch_program_start(p, p->base[UCCH_SEND], p->base[UCCH_RECV], p->timeout);
}

/* Bind a persistent program to its buffers. Its requests are made here, in the same order on every rank: libucc numbers
 * collectives when their requests are made. */
int ucch_program_persist(ucch_program *p, void *send, void *recv, double timeout) {
    if (ucch_program_aliased(p, (uintptr_t)send, (uintptr_t)recv)) return UCCH_ALIASED;
    int status = 0;
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    p->base[UCCH_SEND] = send;
    p->base[UCCH_RECV] = recv;
    p->persistent = 1;
    p->timeout = timeout;
    if (!p->channels) status = take_scratch(p, NULL, 1);
    for (int i = 0; !p->channels && i < p->nsteps && status >= 0; i++) {
        ucch_step *s = &p->steps[i];
        if (s->is.kind == UCCH_STEP_COLL) {
            s->args.flags |= FLAG_PERSISTENT;
            s->args.mask |= MASK_FLAGS;
            status = ucch_team_init_requests_locked(s->is.team);
            if (status >= 0) status = ucch_step_init_locked(p, s);
        }
    }
    return status;
}
