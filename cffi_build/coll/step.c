/* Steps of a program (a collective of libucc, a message, or local work), the queue of each team, and libucc's execution
 * engines for streams.
 *
 * Collectives of a team are posted in the order in which their programs were started, the same on every rank. The queue
 * holds the steps that are not posted yet. */
#include <stdlib.h>

#include "coll/coll.h"

#define COMPUTE_COMPLETE 4      /* ucc_event_type_t */
#define OPERATION_INITIALIZED 2 /* ucc_status_t: initialized, not started */

/* Execution engines kept per team: more than a program uses streams. */
#define MOST_ENGINES 32

struct ucch_engine {
    void *stream;
    ucc_ee_h handle;
    ucch_engine *next;
};

static const size_t dtype_bytes[] = {1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 2, 4, 8, 2, 16, 8, 16, 32};

size_t ucch_step_bytes(ucc_datatype_t dtype, uint64_t count) { return dtype_bytes[dtype >> 3] * count; }

char *ucch_step_address(const ucch_program *p, const ucch_span *span) {
    return p->base[span->base] ? p->base[span->base] + span->offset : NULL;
}

/* ---- tags between hosts ----
 *
 * libucc matches messages by the collective's number alone, so ranks of two hosts that make different calls would take
 * each other's data. Collectives of a team on several hosts therefore get a tag from the engine: the collective's
 * number, with the call's salt above its lowest bits. Two collectives with equal tags are never in flight together:
 * messages of the earlier one are sent before those of the later one. */

static uint16_t tag_of(const ucch_step *s) {
    uint32_t next = (s->is.team->number ^ s->program->is.salt << NUMBER_BITS) % (1 << TAG_BITS);
    return s->request ? s->args.tag : (uint16_t)next;
}

static int is_tagged(const ucch_step *s) { return s->is.team->tags && !s->program->is.on_device; }

/* True if the tag that the step will be posted with is not in use. */
int ucch_tag_is_free_locked(const ucch_step *s) {
    return !is_tagged(s) || !(s->is.team->tags[tag_of(s) / 64] >> tag_of(s) % 64 & 1);
}

/* Assign the tag of a collective whose request is about to be made. */
static void give_tag_locked(ucch_step *s) {
    if (!is_tagged(s)) return;
    s->args.tag = tag_of(s);
    s->args.mask |= MASK_TAG;
    s->is.team->number++;
}

/* Mark the tag as in use, or as free. */
static void hold_tag_locked(const ucch_step *s, int held) {
    if (!is_tagged(s)) return;
    uint64_t *word = &s->is.team->tags[s->args.tag / 64], bit = (uint64_t)1 << s->args.tag % 64;
    *word = held ? *word | bit : *word & ~bit;
}

/* ---- posting and polling ---- */

int ucch_step_init_locked(ucch_program *p, ucch_step *s) {
    /* Both forms of a buffer begin with its address; the offset of the memory type differs. */
    s->args.src.info.buffer = ucch_step_address(p, &s->is.src);
    s->args.dst.info.buffer = ucch_step_address(p, &s->is.dst);
    *(s->is.tables[0] ? &s->args.src.info_v.mem_type : &s->args.src.info.mem_type) = p->is.memory_type;
    *(s->is.tables[2] ? &s->args.dst.info_v.mem_type : &s->args.dst.info.mem_type) = p->is.memory_type;
    give_tag_locked(s);
    return ucc_collective_init(&s->args, &s->request, s->is.team->handle);
}

static int post_coll_locked(ucch_program *p, ucch_step *s) {
    int status = s->request ? 0 : ucch_step_init_locked(p, s);
    if (status < 0) return status;
    s->is.team->head = s->next;
    s->errors = ucch_endpoint_errors();
    status = ucc_collective_post(s->request);
    if (status < 0) return status;
    hold_tag_locked(s, 1);
    s->state = POSTED;
    return 0;
}

/* Describe a local step on device memory as a task for a kernel. */
void ucch_step_task(const ucch_program *p, const ucch_step *s, ucch_task *task) {
    int kind = s->is.kind - UCCH_STEP_LOCAL;
    *task = (ucch_task){
        .kind = kind,
        .op = s->is.op,
        .dtype = s->is.dtype,
        .to = s->is.to,
        .src = ucch_step_address(p, &s->is.src),
        .dst = ucch_step_address(p, &s->is.dst),
        .count = s->is.dst.count,
        .src_bytes = ucch_step_bytes((ucc_datatype_t)s->is.dtype, 1),
        .dst_bytes = ucch_step_bytes((ucc_datatype_t)(kind == UCCH_CAST ? s->is.to : s->is.dtype), 1),
        .factor = s->is.factor,
    };
}

static int post_local_locked(ucch_program *p, ucch_step *s) {
    ucch_task task;
    ucch_step_task(p, s, &task);
    s->state = p->is.on_device ? POSTED : FINISHED;
    if (!p->is.on_device) return ucch_task_compute(&task, task.src, task.dst, task.count);
    return ucch_work_begin_locked(&s->work, &task);
}

/* The message is an op of its own on the active list; its deadline is that of the program. */
static int post_message(ucch_program *p, ucch_step *s) {
    const ucch_span *span = ucch_step_span(s);
    /* Messages of successive calls of a program, and of unlike calls on two hosts, must not match. */
    uint64_t half = 1 << SALT_BITS / 2, salt = p->is.salt / half << SALT_BIT | p->is.salt % half << 11;
    uint64_t tag = (s->is.tag | (p->op.error.seq & 0x7fff) << 16) ^ salt;
    ucch_start start = {.what = s->is.kind == UCCH_STEP_SEND ? START_SEND : START_RECV,
                        .ep = s->is.ep,
                        .buffer = ucch_step_address(p, span),
                        .bytes = span->count,
                        .tag = tag,
                        .mask = ~(uint64_t)0,
                        .mem_type = p->is.memory_type};
    s->state = POSTED;
    return ucch_message_start_locked(s->message, s->is.worker, &start);
}

static int advance_exchange(ucch_program *p, ucch_step *s) {
    int state = ucch_exchange_go_on(ucch_board_parcels(p->board), &s->exchange, ucch_step_address(p, &s->is.src),
                                    s->is.src.count, ucch_step_address(p, &s->is.dst));
    s->state = state == 1 ? FINISHED : POSTED;
    return state;
}

/* Start a step whose dependencies have finished. */
int ucch_step_post_locked(ucch_program *p, ucch_step *s) {
    if (s->is.kind == UCCH_STEP_COLL) return post_coll_locked(p, s);
    if (s->is.kind == UCCH_STEP_EXCHANGE) {
        ucch_exchange_begin(ucch_board_parcels(p->board), &s->exchange, p->op.error.seq, p->about.signature);
        return advance_exchange(p, s);
    }
    return ucch_step_is_message(s) ? post_message(p, s) : post_local_locked(p, s);
}

/* Returns 1 if the posted step has finished, 0 if not yet, negative on failure. */
int ucch_step_poll_locked(ucch_program *p, ucch_step *s) {
    if (s->is.kind >= UCCH_STEP_LOCAL) {
        int status = ucch_work_poll_locked(s->work);
        if (status == 1) s->state = FINISHED;
        return status;
    }
    if (s->is.kind == UCCH_STEP_EXCHANGE) return advance_exchange(p, s);
    if (s->is.kind != UCCH_STEP_COLL) {
        ucch_op *op = ucch_message_op(s->message);
        if (op->state == UCCH_ACTIVE) return 0;
        s->state = FINISHED;
        if (op->state == UCCH_FAILED) return op->error.status;
        return s->is.kind == UCCH_STEP_RECV && ucch_board_lossy(p->board) ? UCCH_FAIL_LOST : 1;
    }
    int status = s->request->status;
    if (status == UCC_INPROGRESS) return 0;
    s->state = FINISHED;
    s->is.team->context->users--;
    hold_tag_locked(s, 0);
    /* An endpoint error may have hit this collective, and its data would be garbage. If a task of a libucc schedule has
     * failed, the schedule may report its state before the start (UCC_OPERATION_INITIALIZED). */
    int garbage = ucch_endpoint_errors() != s->errors || ucch_board_doubtful(p->board, p->op.error.seq);
    if (status > 0 || (status == 0 && garbage)) status = UCCH_UCC_NO_MESSAGE;
    if (!p->persistent) {
        /* A failed request is never finalized: libucc may still receive for it, and would count that for the next task
         * made in the same memory, which would then succeed without its data. */
        if (status == 0) ucc_collective_finalize(s->request);
        s->request = NULL;
    }
    if (status == 0 && ucch_board_lossy(p->board)) status = UCCH_FAIL_LOST; /* a lost message's tag is used again */
    return status < 0 ? status : 1;
}

/* ---- calls ---- */

/* True if the buffers overlap: Python runs such a call in place, or refuses it. */
int ucch_program_aliased(const ucch_program *p, uintptr_t send, uintptr_t recv) {
    if (!send || !recv) return 0;
    int64_t ahead = (int64_t)(recv - send);
    if (!ahead) return 1;
    return ahead > -p->is.received && ahead < p->is.sent && ahead != p->is.own;
}

/* Enter a call: begin its op, publish it to the other ranks, and compare it with what they have published. Returns 0,
 * or a status with the rank in `peer` if another rank called something else.
 *
 * Each rank publishes before it compares, so of two ranks that make different calls the later one sees it here, before
 * it sends any data; the earlier one sees it while it waits. Data of the wrong length must not be sent: libucc 1.4
 * crashes on receiving it. */
int ucch_program_enter_locked(const ucch_program *p, ucch_op *op, const ucch_record *about, double timeout, int *peer) {
    op->about = about;
    op->error.seq = ucch_board_publish(p->board, about->signature, about->label);
    if (UCCH_TRACING) op->event = ucch_trace_begin(p->is.number, -1, op->error.seq);
    ucch_op_begin_locked(op, timeout);
    ucch_board_began(p->board, op->started);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return ucch_board_verdict(p->board, op->error.seq, peer);
}

/* ---- teams ---- */

ucch_team *ucch_team_new(ucch_context *context, ucc_team_h handle) {
    ucch_team *team = calloc(1, sizeof(*team));
    if (!team) return NULL;
    team->handle = handle;
    team->context = context;
    return team;
}

/* Set up tags for a team on several hosts, before anything is posted on it. Returns 0 or a failure. */
int ucch_team_far(ucch_team *team) {
    team->tags = calloc((1 << TAG_BITS) / 64, sizeof(uint64_t));
    return team->tags ? 0 : UCCH_FAIL_MEMORY;
}

/* ---- the queue ---- */

void ucch_team_enqueue_locked(ucch_step *s) {
    UCCH_APPEND(s->is.team->head, s, next);
    s->is.team->context->users++;
}

/* Remove a step whose program has ended from the queue. */
void ucch_team_leave_locked(ucch_step *s) {
    UCCH_UNLINK(s->is.team->head, s, next);
    s->is.team->context->users--;
}

/* libucc numbers a team's collectives when their requests are made, so requests must be made in the queue's order on
 * every rank. On the host a request is made when its step is posted: it takes scratch memory, which a finished fragment
 * leaves in the cache. On a device, where scratch may have to be allocated, and for persistent requests, they are made
 * before the program starts; requests of steps ahead in the queue are made first. */
int ucch_team_init_requests_locked(ucch_team *team) {
    int status = 0;
    for (ucch_step *s = team->head; s && status >= 0; s = s->next)
        if (!s->request) status = ucch_step_init_locked(s->program, s);
    return status;
}

/* ---- streams ---- */

static void drop_engines(ucch_team *t) {
    for (ucch_engine *e = t->engines, *next; e; e = next) {
        next = e->next;
        ucc_ee_destroy(e->handle);
        free(e);
    }
    t->engines = NULL;
    t->nengines = 0;
}

/* Find or create the engine of a stream. `may_drop`: destroy all others first if there are too many. */
int ucch_team_engine_locked(ucch_team *t, void *stream, int may_drop, ucc_ee_h *handle) {
    for (ucch_engine *e = t->engines; e; e = e->next)
        if (e->stream == stream) {
            *handle = e->handle;
            return 0;
        }
    if (t->nengines >= MOST_ENGINES && may_drop)
        drop_engines(t); /* programs use new streams as old ones are destroyed */
    ucch_engine *e = calloc(1, sizeof(*e));
    if (!e) return UCCH_FAIL_MEMORY;
    ucc_ee_params_t params = {.ee_type = ucch_bound_engine(), .ee_context = stream, .ee_context_size = sizeof(stream)};
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

/* Post on a stream's engine, and acknowledge the event with which libucc confirms it. */
int ucch_team_post_locked(ucc_ee_h engine, ucc_coll_req_h request) {
    ucc_ev_t event = {.ev_type = COMPUTE_COMPLETE, .req = request}, *out = NULL;
    int status = ucc_collective_triggered_post(engine, &event);
    if (status < 0) return status;
    while (ucc_ee_get_event(engine, &out) == UCC_OK)
        ucc_ee_ack_event(engine, out);
    return 0;
}

/* ---- requests ---- */

/* Finalize a request unless it has failed (ucch_step_poll_locked), or was never started on a device: libucc would take
 * that for a failure of the vendor's library and use it for no more calls (ucc_tl_nccl_coll_finalize of UCC 1.4). Such
 * requests are leaked. */
void ucch_request_drop_locked(ucc_coll_req_h request, int on_device) {
    int status = request->status;
    if (status == UCC_OK || (status == OPERATION_INITIALIZED && !on_device)) ucc_collective_finalize(request);
}

void ucch_team_free(ucch_team *team) {
    UCCH_LOCKED;
    drop_engines(team);
    free(team->tags);
    free(team);
}

/* ---- queued in streams (schedule.c) ---- */

/* Slots of the longest message that kernels move: 8 MiB, or 9 MiB over six wires. DDP's default buckets are longer. */
#define MOST_SLOTS (UCCH_RING_SLOTS / 2)

/* True for a message over wires that is moved before the other messages of its stage, by a kernel if the device has
 * one. Longer messages are left to copy engines: a kernel takes a multiprocessor from matrix products that run beside
 * it and costs them a wave. Training of a model of 10^9 weights was 8 to 12 % slower when kernels of 2 or 8 blocks
 * moved all messages, while an allreduce of 1 MiB took 186 microseconds instead of 233, and one of 16 MiB, whose
 * messages have 8 MiB, 1188 instead of 1629 (two H200s). */
int ucch_step_goes_first(const ucch_step *s) {
    const ucch_channels *c = s->program->channels;
    return ucch_step_is_message(s) && ucch_channels_by_wire(c, s->is.peer) &&
           ucch_step_span(s)->count <= MOST_SLOTS * c->slot;
}

int ucch_stream_of(const ucch_step *s) {
    if (!ucch_step_is_message(s)) return s->is.kind == UCCH_STEP_COLL ? STREAM_NATIVE : STREAM_LOCAL;
    if (s->program->channels->copies && ucch_step_goes_first(s)) return STREAM_WIRES;
    return s->is.kind == UCCH_STEP_SEND ? STREAM_OUT : STREAM_IN;
}

static int ring_of(const ucch_channels *c, const ucch_step *s) {
    return ucch_ring_for(c, s->is.peer, ucch_step_span(s)->count, s->program->is.in_graph);
}

/* The channel of a message. */
ucch_channel *ucch_step_channel(const ucch_channels *c, const ucch_step *s) {
    return ucch_channels_at(c, s->is.peer, s->is.kind == UCCH_STEP_RECV, ring_of(c, s));
}

/* Piece size of a message, in bytes. */
size_t ucch_piece_of(const ucch_channels *c, const ucch_step *s) {
    return ucch_channel_piece(ucch_step_channel(c, s), ucch_step_span(s)->count);
}

/* Reserve the ring of a message. Returns 0 or a failure. */
int ucch_step_reserve(ucch_channels *c, const ucch_step *s) {
    if (!ucch_step_span(s)->count) return 0;
    return ucch_channels_ring(c, s->is.peer, s->is.kind == UCCH_STEP_RECV, ring_of(c, s));
}
