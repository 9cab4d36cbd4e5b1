/* Calls that a vendor's own library does alone, launched into the caller's stream: the stream orders them, so nothing
 * waits and nothing has to be polled for the next kernel to run. libucc calls it a triggered post on an execution
 * engine; TL/NCCL and TL/RCCL launch on the engine's stream at once. The requests are collected later. Calls that are
 * queued in several streams (schedule.c) are kept here too. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/wait.h"
#include "coll/stream_executor.h"

/* ucc_event_type_t and ucc_ee_type_t */
#define COMPUTE_COMPLETE 4
#define ENGINE_CUDA_STREAM 0
#define ENGINE_ROCM_STREAM 2

/* Streams known to one team; more than a program uses at a time. */
#define MOST_ENGINES 32

struct ucch_engine {
    void *stream;
    ucc_ee_h handle;
    ucch_engine *next;
};

static ucch_launch *first, **last = &first;
static int flying;
static _Thread_local int outcome;
static _Thread_local ucch_op *failed;

/* What became of the calling thread's last ucch_program_launch: 0, or why it failed. */
int ucch_launch_status(void) {
    return outcome;
}

/* That call, if it was begun and failed at once; it is not to be released. */
ucch_op *ucch_launch_failed(void) {
    return failed;
}

int ucch_launches(void) {
    return flying + ucch_channels_draining();
}

void ucch_engines_free(ucch_team *t) {
    for (ucch_engine *e = t->engines, *next; e; e = next) {
        next = e->next;
        ucc_ee_destroy(e->handle);
        free(e);
    }
    t->engines = NULL;
    t->nengines = 0;
}

static int engine_of(ucch_team *t, void *stream, int memory, ucc_ee_h *handle) {
    for (ucch_engine *e = t->engines; e; e = e->next)
        if (e->stream == stream) {
            *handle = e->handle;
            return 0;
        }
    if (t->nengines >= MOST_ENGINES && !flying)
        ucch_engines_free(t); /* streams come and go */
    ucch_engine *e = calloc(1, sizeof(*e));
    if (!e)
        return UCCH_FAIL_MEMORY;
    ucc_ee_params_t params = {.ee_type = memory == UCCH_TYPE_ROCM ? ENGINE_ROCM_STREAM : ENGINE_CUDA_STREAM,
                              .ee_context = stream,
                              .ee_context_size = sizeof(stream)};
    int status = ucc_ee_create(t->handle, &params, &e->handle);
    if (status < 0) {
        free(e);
        return status;
    }
    e->stream = stream;
    e->next = t->engines;
    t->engines = e;
    t->nengines++;
    *handle = e->handle;
    return 0;
}

/* Post on the engine, and take back the event with which libucc says so. */
static int post_locked(ucc_ee_h engine, ucc_coll_req_h request) {
    ucc_ev_t event = {.ev_type = COMPUTE_COMPLETE, .req = request}, *out = NULL;
    int status = ucc_collective_triggered_post(engine, &event);
    if (status < 0)
        return status;
    while (ucc_ee_get_event(engine, &out) == UCC_OK)
        ucc_ee_ack_event(engine, out);
    return 0;
}

int ucch_launch_step_locked(ucch_program *p, ucch_step *s, ucch_launch *l, void *stream) {
    ucc_ee_h engine;
    int status = engine_of(s->team, stream, p->mem_type[UCCH_RECV], &engine);
    if (status < 0)
        return status;
    status = ucch_step_init_locked(p, s);
    if (status < 0)
        return status;
    if (UCCH_TRACING)
        l->each[l->n].event = ucch_trace_begin_locked(p->number, (int)(s - p->steps), l->op.error.seq);
    l->each[l->n].request = s->request;
    l->each[l->n++].context = s->team->context;
    s->team->context->users++;
    status = post_locked(engine, s->request);
    s->request = NULL; /* the program is free for its next call */
    return status;
}

static int judge_locked(ucch_program *p, void *send, void *recv) {
    if (send && send == recv)
        return UCCH_ALIASED;
    if (p->board && ucch_board_broken(p->board))
        return UCCH_FAIL_BROKEN;
    return p->channels ? ucch_enqueue_ready(p) : 0;
}

/* Whether earlier calls on the program's teams have all been posted: the order of posting is that of calling. */
static int next_in_line(const ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++)
        if (p->steps[i].kind == STEP_COLL && p->steps[i].team->head)
            return 0;
    return 1;
}

static void end_locked(ucch_launch *l, int status, int peer) {
    if (UCCH_TRACING)
        ucch_trace_end_locked(l->event, status);
    if (status < 0) {
        l->op.error.status = status;
        l->op.error.peer = peer;
        l->op.error.elapsed = ucch_now() - l->op.started;
        if (l->board && !l->follower)
            ucch_board_blame(l->board, &l->op);
        if (l->channels)
            ucch_channels_poison_locked(l->channels);
    } else if (l->board)
        ucch_board_add(l->board, ucch_now() - l->op.started, l->bytes);
    ucch_program *p = l->follower;
    __atomic_store_n(&l->op.state, status < 0 ? UCCH_FAILED : UCCH_DONE, __ATOMIC_RELEASE);
    if (p) {
        p->queued = 0;
        ucch_op_end_locked(&p->op, status, -1, peer);
    }
}

/* All of a program into streams. */
static int issue_locked(ucch_program *p, ucch_launch *l, void *stream) {
    if (p->channels)
        return ucch_enqueue_locked(p, l, stream);
    int status = 0;
    for (int i = 0; i < p->nsteps && status >= 0; i++)
        status = ucch_launch_step_locked(p, &p->steps[i], l, stream);
    return status;
}

/* The program's own caller waits for it. */
static void follow_locked(ucch_program *p, ucch_launch *l) {
    l->follower = p;
    l->released = 1;
    p->queued = 1;
    p->op.error.seq = l->op.error.seq;
    ucch_op_begin_locked(&p->op, 0);
}

/* What a call asks for. */
typedef struct asked {
    ucch_program *p;
    void *send, *recv, *stream;
    double timeout;
    int follows; /* whoever made it waits for the program */
} asked;

static ucch_launch *launch_locked(const asked *a, int *status) {
    ucch_program *p = a->p;
    ucch_launch *l = calloc(1, sizeof(*l) + (size_t)p->nsteps * sizeof(l->each[0]));
    if (!l) {
        *status = UCCH_FAIL_MEMORY;
        return NULL;
    }
    p->base[UCCH_SEND] = a->send;
    p->base[UCCH_RECV] = a->recv;
    l->op.kind = UCCH_IS_LAUNCH;
    l->board = p->board;
    l->bytes = p->bytes;
    l->channels = p->channels;
    l->op.error = (ucch_error){.step = -1, .peer = -1};
    l->op.error.seq = p->board ? ucch_board_publish(p->board, p->signature, p->label) : 0;
    l->since = p->board ? ucch_board_since(p->board) : 0;
    if (UCCH_TRACING)
        l->event = ucch_trace_begin_locked(p->number, -1, l->op.error.seq);
    l->op.started = ucch_now();
    l->op.deadline = a->timeout > 0 ? l->op.started + a->timeout : 0;
    l->op.state = UCCH_ACTIVE;
    if (a->follows)
        follow_locked(p, l);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* as in host_executor.c: publish, then look */
    int bad = p->board ? ucch_board_mismatch(p->board, l->op.error.seq) : -1;
    if (p->board && ucch_board_refused(p->board, l->since, l->op.error.seq, NULL))
        *status = UCCH_FAIL_REFUSED;
    else
        *status = bad >= 0 ? UCCH_FAIL_MISMATCH : issue_locked(p, l, a->stream);
    if (*status < 0) { /* what was launched goes on, and is left alone */
        end_locked(l, *status, bad);
        return l;
    }
    *last = l;
    last = &l->next;
    flying++;
    return l;
}

/* NULL where nothing was begun: with a status below 0 it cannot be, with 0 it is not the call's turn yet. What is
 * queued in streams has to wait for its turn here: no other way fits what its peers do. */
static ucch_launch *launch(const asked *a, int *status) {
    ucch_launch *l = NULL;
    for (int later = 1; later;) {
        ucch_lock();
        int busy = a->follows && a->p->op.state == UCCH_ACTIVE, turn = next_in_line(a->p);
        int before = ucch_device_enter();
        *status = busy ? UCCH_FAIL_BUSY : judge_locked(a->p, a->send, a->recv);
        if (!*status && turn)
            l = launch_locked(a, status);
        later = a->p->channels && !l && (*status == UCCH_LATER || (!*status && !turn));
        ucch_device_leave(before);
        if (later) {
            ucch_progress_locked();
            ucch_police_locked(ucch_now());
        }
        ucch_unlock();
        if (later)
            sched_yield();
    }
    return l;
}

/* Launch a program whose steps are all collectives on device memory into `stream`, or that is queued in several.
 * Returns an op that the caller has to release. NULL when it was not: ucch_launch_status says why; 0: it is not this
 * call's turn yet, and the program has to be started as any other. */
ucch_op *ucch_program_launch(ucch_program *p, uintptr_t send, uintptr_t recv, double timeout, uintptr_t stream) {
    asked a = {p, (void *)send, (void *)recv, (void *)stream, timeout, 0};
    ucch_launch *l = launch(&a, &outcome);
    failed = l && outcome < 0 ? &l->op : NULL;
    if (l)
        ucch_progress_thread(1);
    return l && !failed ? &l->op : NULL;
}

/* Start a program that is queued in streams as if it were any other: its end is the program's. 0, or a failure. */
int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream) {
    asked a = {p, send, recv, stream, timeout, 1};
    int status = 0;
    return launch(&a, &status) ? 0 : status;
}

/* The caller will not look at it again. */
void ucch_launch_release(ucch_op *op) {
    ucch_launch *l = (ucch_launch *)op;
    ucch_lock();
    l->released = 1;
    int done = l->op.state == UCCH_DONE; /* one that failed stays: it is blamed, and its requests may be in use */
    ucch_unlock();
    if (done)
        free(l);
}

/* The vendor's kernel waits in its stream for peers that will not come, and so does whoever waits for the stream:
 * nobody may be left to raise anything, so it is said here. */
static void give_up_locked(ucch_launch *l, int status, int peer) {
    const char *why = status == UCCH_FAIL_TIMEOUT   ? "not complete in time"
                      : status == UCCH_FAIL_PEER    ? "another rank has left the job or died"
                      : status == UCCH_FAIL_REFUSED ? "another rank refused its part of the call"
                                                    : "another rank called something else";
    char label[UCCH_LABEL_BYTES] = "a call";
    if (l->board)
        ucch_board_own_label(l->board, l->op.error.seq, label);
    unsigned long long number = l->op.error.seq;
    /* The call that failed first has said it. */
    int heard = l->follower || status == UCCH_FAIL_BROKEN, goes_on = l->channels && !l->n;
    end_locked(l, status, peer);
    if (!heard)
        fprintf(stderr, "ucc_hetero: %s (call %llu of its communicator) in a stream: %s after %.3g s; %s\n", label,
                number, why, l->op.error.elapsed,
                goes_on ? "the stream goes on without its result" : "the stream cannot go on, end this process");
}

/* Another rank let its streams go on, or we did: nobody can tell what this call has brought. */
static int spoilt_locked(ucch_launch *l) {
    int by = l->channels ? ucch_channels_spoiler(l->channels, l->ticket) : -1;
    if (by < 0)
        return 0;
    int other = l->board ? ucch_board_mismatch(l->board, l->op.error.seq) : -1;
    if (other >= 0) /* that is why */
        give_up_locked(l, UCCH_FAIL_MISMATCH, other);
    else
        give_up_locked(l, by == l->channels->rank ? UCCH_FAIL_BROKEN : UCCH_FAIL_PEER, by);
    return 1;
}

static int collect_locked(ucch_launch *l) {
    if (l->channels && !ucch_channels_done(l->channels, l->ticket))
        return 0;
    int status = 0;
    for (int i = 0; i < l->n; i++) {
        if (l->each[i].request->status == UCC_INPROGRESS)
            return 0;
        status = l->each[i].request->status < 0 ? l->each[i].request->status : status;
    }
    for (int i = 0; i < l->n; i++) {
        if (UCCH_TRACING)
            ucch_trace_end_locked(l->each[i].event, status);
        l->each[i].context->users--;
        ucc_collective_finalize(l->each[i].request);
    }
    l->n = 0;
    if (status < 0 || !spoilt_locked(l))
        end_locked(l, status, -1);
    return 1;
}

/* Collect what has ended, after the contexts made progress; how many did. */
int ucch_launches_poll_locked(void) {
    int moved = 0;
    for (ucch_launch **at = &first; *at;) {
        ucch_launch *l = *at;
        if (l->op.state == UCCH_ACTIVE && !collect_locked(l)) {
            at = &l->next;
            continue;
        }
        *at = l->next;
        flying--;
        moved++;
        if (l->released && l->op.state == UCCH_DONE)
            free(l);
    }
    last = &first;
    while (*last)
        last = &(*last)->next;
    return moved + ucch_channels_drain_locked();
}

/* End what is past its deadline, and what waits for a peer that died or called something else. */
void ucch_launches_police_locked(double now, double suspicion) {
    for (ucch_launch *l = first; l; l = l->next) {
        if (l->op.state != UCCH_ACTIVE || now - l->op.started < suspicion)
            continue;
        if (l->board && ucch_board_refused(l->board, l->since, l->op.error.seq, NULL)) {
            give_up_locked(l, UCCH_FAIL_REFUSED, -1);
            continue;
        }
        int peer = l->board ? ucch_board_mismatch(l->board, l->op.error.seq) : -1, bad = UCCH_FAIL_MISMATCH;
        int needs_others = l->n || !l->channels || ucch_channels_waiting(l->channels);
        if (peer < 0 && l->board && needs_others) {
            peer = ucch_board_gone(l->board, l->op.error.seq);
            bad = UCCH_FAIL_PEER;
        }
        if (peer >= 0)
            give_up_locked(l, bad, peer);
        else if (!spoilt_locked(l) && l->op.deadline > 0 && now > l->op.deadline)
            give_up_locked(l, UCCH_FAIL_TIMEOUT, -1);
    }
}

/* Launches of a communicator that have not ended. */
int ucch_launches_of(ucch_board *board) {
    int n = 0;
    ucch_lock();
    for (ucch_launch *l = first; l; l = l->next)
        n += l->board == board && l->op.state == UCCH_ACTIVE;
    ucch_unlock();
    return n;
}
