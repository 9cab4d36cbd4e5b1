/* Calls in streams. A collective of one island is launched into the caller's stream by the vendor's library, so the
 * stream orders it and the host neither waits nor polls. libucc calls this a triggered post on an execution engine;
 * TL/NCCL and TL/RCCL launch on the engine's stream at once. The requests are collected later. Calls that are queued in
 * several streams (schedule.c) are also tracked here, and calls in graphs are watched. */
#include <stdio.h>
#include <stdlib.h>

#include "coll/coll.h"

static int under_way; /* launches that have not ended */
/* Held while one call is queued whole, without the engine's lock: the driver blocks a launching thread while a stream
 * is full or a kernel has to be loaded, until other ranks have done their part. The progress that those ranks need from
 * this one must go on. */
static pthread_mutex_t queueing = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int outcome;
static _Thread_local ucch_op *failed;

/* Status of the calling thread's last ucch_program_launch: 0, or why it failed. */
int ucch_launch_status(void) { return outcome; }

/* The op of that launch if it began and failed at once. The caller does not release it. */
ucch_op *ucch_launch_failed(void) { return failed; }

static void end_locked(ucch_launch *l, int status, int peer) {
    ucch_board_ended_locked(l->board, &l->op, status, l->about.bytes);
    if (status < 0 && !l->parent) ucch_board_blame(l->board, &l->op);
    int queued = l->call != 0; /* else no stream waits for another rank, and earlier calls go on */
    if (status < 0 && l->channels && (queued || status != UCCH_FAIL_REFUSED))
        ucch_channels_fail_locked(l->channels, status == UCCH_FAIL_MISMATCH ? l->op.error.seq : 0);
    ucch_board_launched(l->board, -1);
    under_way--;
    ucch_op_end_locked(&l->op, status, -1, peer);
    if (l->parent) ucch_op_end_locked(&l->parent->op, status, -1, peer);
}

static const char *reason(int status) {
    return status == UCCH_FAIL_TIMEOUT      ? "not complete in time"
           : status == UCCH_FAIL_PEER       ? "another rank has left the job or died"
           : status == UCCH_FAIL_CONNECTION ? "a connection with another rank has broken"
           : status == UCCH_FAIL_REFUSED    ? "another rank refused its part of the call"
           : status == UCCH_FAIL_REVOKED    ? "the communicator has been revoked"
           : status == UCCH_FAIL_OVERLAP    ? "two of them ran at a time"
                                            : "another rank called something else";
}

/* The vendor's kernel waits in its stream for ranks that will not come, and a thread that waits for the stream hangs
 * with it. No caller may be left to raise the error, so it is logged here. */
static void give_up_locked(ucch_launch *l, int status, int peer) {
    char label[UCCH_LABEL_BYTES] = "a call";
    ucch_board_own_label(l->board, l->op.error.seq, label);
    unsigned long long number = l->op.error.seq;
    /* the call that failed first was logged */
    int has_listener = l->parent || status == UCCH_FAIL_BROKEN, goes_on = l->channels && !l->n;
    end_locked(l, status, peer);
    if (!has_listener)
        fprintf(stderr, "ucc_hetero: %s (call %llu of its communicator) in a stream: %s after %.3g s; %s\n", label,
                number, reason(status), l->op.error.elapsed,
                goes_on ? "the stream goes on without its result" : "the stream cannot go on, end this process");
}

/* Why the call cannot complete, with the rank in `peer`: ranks of other hosts sent data that does not fit it, or are
 * dead. 0 if neither. */
static int find_lost(ucch_launch *l, int *peer) {
    int rank = -1, bad = l->channels ? ucch_channels_lost(l->channels, l->op.error.seq, &rank) : 0;
    if (bad) *peer = ucch_board_peer(l->board, rank);
    return bad;
}

/* Why the result is undefined, with the rank in `peer`: this rank or another one released its streams early. 0 if
 * not. */
static int find_tainted(ucch_launch *l, int *peer) {
    int by = l->channels ? ucch_channels_tainted_by(l->channels, l->call) : -1;
    if (by < 0) return 0;
    int bad = ucch_board_verdict(l->board, l->op.error.seq, peer);
    if (bad) return bad; /* that is the cause */
    *peer = ucch_board_peer(l->board, by);
    int why = find_lost(l, peer);
    return why ? why : by == l->channels->rank ? UCCH_FAIL_BROKEN : UCCH_FAIL_PEER;
}

/* Complete the launch if all of its work has ended. */
static int collect_locked(ucch_op *op) {
    ucch_launch *l = (ucch_launch *)op;
    if (l->queueing || (l->channels && !ucch_channels_done(l->channels, l->call))) return 0;
    int status = 0, peer = -1;
    for (int i = 0; i < l->n; i++) {
        if (l->each[i].request->status == UCC_INPROGRESS) return 0;
        status = l->each[i].request->status < 0 ? l->each[i].request->status : status;
    }
    for (int i = 0; i < l->n; i++) {
        if (UCCH_TRACING) ucch_trace_end(l->each[i].event, status);
        l->each[i].context->users--;
        ucch_request_drop_locked(l->each[i].request, 1);
    }
    l->n = 0;
    int bad = status < 0 ? 0 : find_tainted(l, &peer);
    if (bad)
        give_up_locked(l, bad, peer);
    else
        end_locked(l, status, -1);
    if (l->released && l->op.state == UCCH_DONE) free(l);
    return 1;
}

static int check_locked(ucch_op *op, double now) {
    ucch_launch *l = (ucch_launch *)op;
    int bad = ucch_board_verdict(l->board, op->error.seq, &op->error.peer);
    /* A refusal ends the calls behind it only: earlier calls of the channels complete before streams are released. */
    int early = bad == UCCH_FAIL_REFUSED && l->channels && !l->channels->failed;
    if (early && !ucch_channels_first(l->channels, l->call)) return 0;
    int needs_others = l->n || !l->channels || ucch_channels_waiting(l->channels);
    if (!bad && needs_others) bad = ucch_board_stuck(l->board, op->error.seq, now - op->started, &op->error.peer);
    if (!bad && needs_others) bad = find_lost(l, &op->error.peer);
    return bad ? bad : find_tainted(l, &op->error.peer);
}

static void abandon_locked(ucch_op *op, int status) { give_up_locked((ucch_launch *)op, status, op->error.peer); }

/* The caller has given up the program whose queued launch this is. */
static void abandon_parent_locked(ucch_op *op, int status) { give_up_locked(((ucch_program *)op)->queued, status, -1); }

static const ucch_op_kind kind = {UCCH_IN_STREAMS, collect_locked, check_locked, abandon_locked};
static const ucch_op_kind parent_kind = {.way = UCCH_BY_CONTEXTS, .abandon_locked = abandon_parent_locked};

/* ---- beginning ---- */

/* 0 if the call can be launched now, UCCH_LATER, or a failure. Called before the call is published. */
static int check_launch_locked(ucch_program *p, void *send, void *recv) {
    if (ucch_program_aliased(p, (uintptr_t)send, (uintptr_t)recv)) return UCCH_ALIASED;
    if (ucch_board_broken(p->board) || (p->channels && p->channels->failed)) return UCCH_FAIL_BROKEN;
    return p->channels && !ucch_channels_room(p->channels) ? UCCH_LATER : 0;
}

/* True if no earlier call is still queued on the program's teams: collectives are posted in the order of calls. */
static int next_in_line(const ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++)
        if (p->steps[i].is.kind == UCCH_STEP_COLL && p->steps[i].is.team->head) return 0;
    return 1;
}

/* Make the program's op follow the launch: the caller waits for the program. */
static void adopt_locked(ucch_program *p, ucch_launch *l) {
    l->parent = p;
    l->released = 1;
    p->queued = l;
    p->op.kind = &parent_kind;
    p->op.error.seq = l->op.error.seq;
    p->op.about = NULL; /* the launch's record is that of the call */
    ucch_op_begin_locked(&p->op, 0);
}

/* Arguments of a launch. */
typedef struct launch_args {
    ucch_program *p;
    void *send, *recv, *stream;
    double timeout;
    int has_parent; /* the caller waits for the program's op */
} launch_args;

/* Publish the call. From here on it has to end, in success or failure. */
static ucch_launch *begin_locked(const launch_args *a, int *status) {
    ucch_program *p = a->p;
    ucch_launch *l = calloc(1, sizeof(*l) + (size_t)p->nsteps * sizeof(l->each[0]));
    if (!l) {
        *status = UCCH_FAIL_MEMORY;
        return NULL;
    }
    p->base[UCCH_SEND] = a->send;
    p->base[UCCH_RECV] = a->recv;
    l->op.kind = &kind;
    l->board = p->board;
    l->about = p->about;
    l->about.kind = UCCH_RECORD_STREAM;
    l->op.late = 1; /* no host sees it start */
    l->channels = p->channels;
    ucch_board_launched(l->board, 1);
    l->alone = !under_way++;
    int peer, bad = ucch_program_enter_locked(p, &l->op, &l->about, a->timeout, &peer);
    if (a->has_parent) adopt_locked(p, l);
    if (!bad && l->channels) {
        l->call = ++l->channels->calls;
        l->queueing = 1;
    }
    *status = bad || l->channels ? bad : ucch_post_steps_locked(p, l, a->stream);
    if (*status < 0) /* what was launched goes on, and is left alone */
        end_locked(l, *status, peer);
    return l;
}

/* Queue the call, with `queueing` held. The call may have failed meanwhile like any other under way. */
static int enqueue(const launch_args *a, ucch_launch *l) {
    int status = ucch_enqueue(a->p, l, a->stream);
    UCCH_LOCKED;
    l->queueing = 0;
    if (status < 0) {
        ucch_channels_end(l->channels, l->call);
        if (l->op.state == UCCH_ACTIVE) end_locked(l, status, -1);
    }
    return status;
}

/* Returns NULL if nothing was begun: *status < 0 says why it cannot be, 0 that earlier calls come first. `later` is set
 * if the call has to wait here for its turn: a program queued in streams has no other way that fits its peers. */
static ucch_launch *try_launch(const launch_args *a, int *status, int *later) {
    ucch_program *p = a->p;
    ucch_launch *l = NULL;
    *status = p->channels ? ucch_enqueue_scratch(p) : 0;
    UCCH_LOCKED;
    int busy = a->has_parent && p->op.state == UCCH_ACTIVE, turn = next_in_line(p);
    if (!*status) *status = busy ? UCCH_FAIL_BUSY : check_launch_locked(p, a->send, a->recv);
    if (!*status && turn) l = begin_locked(a, status);
    *later = p->channels && !l && (*status == UCCH_LATER || (!*status && !turn));
    if (*later) {
        ucch_progress_locked();
        ucch_ops_check_deadlines_locked(ucch_now());
    }
    return l;
}

/* As try_launch; waits for the call's turn if `later` is set. */
static ucch_launch *launch(const launch_args *a, int *status) {
    ucch_launch *l = NULL;
    UCCH_ON_DEVICE;
    double began = ucch_now();
    for (int later = 1; later; later ? ucch_rest(ucch_now(), began) : 0) {
        if (a->p->channels) ucch_take(&queueing, UCCH_AT_QUEUE);
        l = try_launch(a, status, &later);
        if (a->p->channels) {
            if (l && *status >= 0) *status = enqueue(a, l);
            ucch_give(&queueing, UCCH_AT_QUEUE);
        }
    }
    return l;
}

/* Launch a program into `stream`: its steps are all collectives on device memory, or it is queued in several streams.
 * Returns an op that the caller has to release, or NULL if nothing was launched: ucch_launch_status says why; 0 there
 * means that earlier calls come first, and the program has to be started as any other. */
ucch_op *ucch_program_launch(ucch_program *p, uintptr_t send, uintptr_t recv, double timeout, uintptr_t stream) {
    outcome = 0;
    failed = NULL;
    if (ucch_stream_captures(stream)) return NULL; /* then ucch_program_capture is to be called */
    launch_args a = {p, (void *)send, (void *)recv, (void *)stream, timeout, 0};
    ucch_launch *l = launch(&a, &outcome);
    failed = l && outcome < 0 ? &l->op : NULL;
    if (l) ucch_progress_streams();
    return l && !failed ? &l->op : NULL;
}

/* As ucch_program_launch, for a call whose op is not needed. Returns 1 if it was launched. */
int ucch_program_leave(ucch_program *p, uintptr_t send, uintptr_t recv, double timeout, uintptr_t stream) {
    ucch_op *op = ucch_program_launch(p, send, recv, timeout, stream);
    if (op) ucch_launch_release(op);
    return op != NULL;
}

/* Start a program that is queued in streams, with the program's op as its end. Returns 0 or a failure. */
int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream) {
    launch_args a = {p, send, recv, stream, timeout, 1};
    int status = 0;
    return launch(&a, &status) ? 0 : status;
}

/* ---- calls in graphs ----
 *
 * No host takes part in a replay: the kernels count their starts and ends in pinned memory and write errors there. The
 * progress thread polls that memory. */

static uint32_t word_of(const ucch_line *line) { return UCCH_LOAD(&line->word); }

/* True if a replay has run for longer than the timeout. */
static int is_late(ucch_graphs *g, double now) {
    uint32_t begun = word_of(&g->words->begun), ended = word_of(&g->words->ended);
    if (begun != g->begun || ended != g->ended) g->since = now;
    g->begun = begun;
    g->ended = ended;
    return begun != ended && g->timeout > 0 && now - g->since > g->timeout;
}

static int check_graphs_locked(ucch_op *op, double now) {
    ucch_graphs *g = (ucch_graphs *)op;
    uint32_t wrong = word_of(&g->words->wrong);
    int late = is_late(g, now), rank = -1, under_way = g->begun != g->ended;
    op->error.peer = -1;
    if (wrong) return wrong == REPLAY_OVERLAPS ? UCCH_FAIL_OVERLAP : UCCH_FAIL_MISMATCH;
    int status = ucch_channels_lost(g->channels, op->error.seq, &rank);
    if (!status) rank = ucch_channels_tainted_by(g->channels, UINT64_MAX); /* its data is undefined */
    if (!status && rank >= 0 && rank != g->channels->rank) status = UCCH_FAIL_PEER;
    if (status) op->error.peer = ucch_board_peer(g->board, rank);
    int other = ucch_board_mismatch(g->board, op->error.seq); /* as published at capture */
    if (other != -1) {
        op->error.peer = other;
        return UCCH_FAIL_MISMATCH;
    }
    if (!status && under_way) status = ucch_board_stuck(g->board, 0, now - g->since, &op->error.peer);
    return status ? status : late ? UCCH_FAIL_TIMEOUT : 0;
}

/* No caller may be left to raise the error, so it is logged here; the communicator's next call raises it, too. */
static void abandon_graphs_locked(ucch_op *op, int status) {
    ucch_graphs *g = (ucch_graphs *)op;
    int first = !g->channels->failed; /* a failure of the channels was logged */
    op->started = g->since;
    ucch_channels_fail_locked(g->channels, 0);
    ucch_op_end_locked(op, status, -1, op->error.peer);
    ucch_board_blame(g->board, op);
    if (first)
        fprintf(stderr, "ucc_hetero: calls in graphs: %s; streams go on without their results\n", reason(status));
}

static const ucch_op_kind watching = {UCCH_IN_STREAMS, NULL, check_graphs_locked, abandon_graphs_locked};

/* Watch replays of a call that is captured, number `number` of the communicator. Each may take `timeout` seconds; 0: no
 * limit. */
static void watch_locked(ucch_graphs *g, ucch_board *board, uint64_t number, double timeout) {
    int begins = !g->watch.kind;
    g->watch.kind = &watching;
    g->watch.error.seq = number;
    g->board = board;
    g->timeout = timeout;
    if (begins) ucch_op_begin_locked(&g->watch, 0);
}

/* Let a captured stream wait for the communicator's previous call in this capture, whatever its stream: replayed calls
 * run one at a time. */
static int follow(ucch_graphs *g, void *stream) {
    uint64_t capture = ucch_stream_captures((uintptr_t)stream);
    int same = g->last && capture == g->capture;
    g->capture = capture;
    return same ? ucch_device_fail(ucch_bound_ops()->stream_wait(stream, g->last), "a stream's wait") : 0;
}

/* Publish a call that is about to be captured, if it can be; with `queueing` held. Messages are not published: only
 * their two ranks know of them. */
static int begin_capture(ucch_program *p, int is_call, double timeout) {
    int status = ucch_enqueue_scratch(p), peer = -1;
    UCCH_LOCKED;
    if (!status && (ucch_board_broken(p->board) || p->channels->failed)) status = UCCH_FAIL_BROKEN;
    if (status) return status;
    uint64_t number = ucch_board_next(p->board) - 1;
    if (is_call) {
        number = ucch_board_publish(p->board, p->about.signature, p->about.label);
        ucch_record_end(ucch_board_record(p->board, UCCH_RECORD_GRAPH, number, p->about.signature, p->about.label), 0);
        status = ucch_board_verdict(p->board, number, &peer);
    }
    watch_locked(&p->channels->graphs, p->board, number, timeout);
    return status;
}

/* Capture a program into the graph of `stream`: a collective (`is_call`), or messages. Memory that it needs and no
 * earlier capture has allocated is allocated or pinned now, outside the capture. Returns 0 or a failure. */
int ucch_program_capture(ucch_program *p, int is_call, uintptr_t send, uintptr_t recv, double timeout,
                         uintptr_t stream) {
    if (!p->fused) return UCCH_FAIL_COLD;
    if (ucch_program_aliased(p, send, recv)) return UCCH_ALIASED;
    UCCH_ON_DEVICE;
    int mode = ucch_capture_mode(UCCH_RELAXED);
    ucch_take(&queueing, UCCH_AT_QUEUE);
    p->base[UCCH_SEND] = (char *)send;
    p->base[UCCH_RECV] = (char *)recv;
    int status = begin_capture(p, is_call, timeout) ?: follow(&p->channels->graphs, (void *)stream);
    if (!status) status = ucch_enqueue(p, NULL, (void *)stream);
    if (!status) status = ucch_event_record(&p->channels->graphs.last, (void *)stream);
    ucch_give(&queueing, UCCH_AT_QUEUE);
    ucch_capture_mode(mode);
    ucch_progress_thread(1);
    return status;
}

/* The caller gives up its reference. */
void ucch_launch_release(ucch_op *op) {
    ucch_launch *l = (ucch_launch *)op;
    UCCH_LOCKED;
    l->released = 1;
    if (l->op.state == UCCH_DONE) free(l); /* a failed launch is kept: its requests may be in use */
}
