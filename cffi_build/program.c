/* A plan lowered for this rank: a flat list of steps with their dependencies, run without Python.
 *
 * A step is started when the steps it names have finished and, for a collective, when it heads its team's queue: the
 * order on a team is the order in which programs were started, never that of completion (HAZARDS H20). */
#include <stdlib.h>
#include <string.h>

#include "device.h"

#define UCC_OK 0
#define UCC_INPROGRESS 1
#define FLAG_PERSISTENT 0x2
#define MASK_FLAGS 0x1
#define LABEL UCCH_LABEL_BYTES

enum { STEP_COLL, STEP_SEND, STEP_RECV, STEP_COPY, STEP_COMBINE, STEP_CAST, STEP_SCALE };
enum { WAITING, POSTED, FINISHED };

struct ucch_step {
    int kind, state;
    int ndeps, *deps;
    ucch_program *program;
    ucch_step *next; /* in the team's queue */
    ucch_team *team;
    ucc_coll_args_t args;
    ucc_coll_req_h request;
    ucch_span src, dst;
    uint64_t *tables[4]; /* counts and displacements of source and destination */
    ucch_message *message;
    ucch_work *work; /* a local step of a program on device memory */
    ucp_ep_h ep;
    ucp_worker_h worker;
    uint64_t tag;
    int op, dtype, to;
    double factor;
};

struct ucch_program {
    ucch_op op; /* first: a program is an op */
    int nsteps, first;
    ucch_step *steps;
    char *base[4];
    int mem_type[4];
    int persistent, on_device;
    double timeout; /* of a persistent program's starts */
    size_t tmp_bytes, pin_bytes;
    ucch_gate gate;
    uint64_t bytes; /* of the caller's data, for the statistics */
    ucch_board *board;
    uint64_t signature;
    char label[LABEL];
};

static const size_t dtype_bytes[] = {1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 2, 4, 8, 2, 16, 8, 16, 32};

static size_t bytes_of(ucc_datatype_t dtype, uint64_t count) {
    return dtype_bytes[dtype >> 3] * count;
}

/* ---- building ---- */

ucch_program *ucch_program_new(int nsteps, ucch_board *board, uint64_t signature, const char *label) {
    ucch_program *p = calloc(1, sizeof(*p));
    if (!p)
        return NULL;
    p->steps = calloc((size_t)nsteps + 1, sizeof(ucch_step));
    if (!p->steps) {
        free(p);
        return NULL;
    }
    p->op.kind = UCCH_IS_PROGRAM;
    p->nsteps = nsteps;
    p->board = board;
    p->signature = signature;
    strncpy(p->label, label, LABEL - 1);
    for (int i = 0; i < nsteps; i++) {
        p->steps[i].program = p;
        p->steps[i].state = FINISHED;
    }
    return p;
}

/* Release the library's requests while their teams still exist; what is in progress stays the library's. */
static void drop_requests_locked(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        if (s->request && s->request->status != UCC_INPROGRESS)
            ucc_collective_finalize(s->request);
        s->request = NULL;
    }
}

void ucch_program_drop(ucch_program *p) {
    ucch_lock();
    drop_requests_locked(p);
    ucch_unlock();
}

/* Scratch is the program's own on the host, and borrowed from the pool on a device. */
static int take_scratch(ucch_program *p) {
    if (p->base[UCCH_TMP] || p->base[UCCH_PIN])
        return 0;
    if (!p->on_device)
        return p->tmp_bytes && posix_memalign((void **)&p->base[UCCH_TMP], 4096, p->tmp_bytes) ? UCCH_FAIL_MEMORY : 0;
    if (p->tmp_bytes && !(p->base[UCCH_TMP] = ucch_pool_take(0, p->tmp_bytes)))
        return UCCH_FAIL_MEMORY;
    if (p->pin_bytes && !(p->base[UCCH_PIN] = ucch_pool_take(1, p->pin_bytes)))
        return UCCH_FAIL_MEMORY;
    return 0;
}

static void give_scratch(ucch_program *p) {
    if (p->on_device) {
        ucch_pool_give(p->base[UCCH_TMP]);
        ucch_pool_give(p->base[UCCH_PIN]);
    } else
        free(p->base[UCCH_TMP]);
    p->base[UCCH_TMP] = p->base[UCCH_PIN] = NULL;
}

/* Requests that were not dropped before are left alone: their team may be gone. */
void ucch_program_free(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        free(s->deps);
        for (int k = 0; k < 4; k++)
            free(s->tables[k]);
        if (s->message)
            ucch_message_free(s->message);
        ucch_work_free(s->work);
    }
    ucch_gate_free(&p->gate);
    give_scratch(p);
    free(p->steps);
    free(p);
}

ucch_op *ucch_program_op(ucch_program *p) {
    return &p->op;
}

int ucch_program_active(ucch_program *p) {
    return p->op.state == UCCH_ACTIVE;
}

static ucch_step *step_at(ucch_program *p, int i) {
    return i >= 0 && i < p->nsteps ? &p->steps[i] : NULL;
}

int ucch_program_coll(ucch_program *p, int step, ucch_team *team, int coll, int op, uint64_t flags, uint64_t root,
                      ucc_datatype_t dtype, ucch_span src, ucch_span dst) {
    ucch_step *s = step_at(p, step);
    if (!s)
        return UCCH_FAIL_ARGUMENT;
    s->kind = STEP_COLL;
    s->team = team;
    s->src = src;
    s->dst = dst;
    s->args.coll_type = coll;
    s->args.op = op;
    s->args.root = root;
    s->args.flags = flags;
    s->args.mask = flags ? MASK_FLAGS : 0;
    s->args.src.info.count = src.count;
    s->args.src.info.datatype = dtype;
    s->args.dst.info.count = dst.count;
    s->args.dst.info.datatype = dtype;
    return 0;
}

/* Give one side per-member counts and displacements (elements): it becomes the v-form of the buffer. */
int ucch_program_counts(ucch_program *p, int step, int dst, int n, const uint64_t *counts, const uint64_t *displs) {
    ucch_step *s = step_at(p, step);
    if (!s || s->kind != STEP_COLL)
        return UCCH_FAIL_ARGUMENT;
    uint64_t **table = &s->tables[dst ? 2 : 0];
    size_t bytes = (size_t)n * sizeof(uint64_t);
    for (int k = 0; k < 2; k++) {
        table[k] = malloc(bytes + 1);
        if (!table[k])
            return UCCH_FAIL_MEMORY;
        memcpy(table[k], k ? displs : counts, bytes);
    }
    ucc_coll_buffer_t *side = dst ? &s->args.dst : &s->args.src;
    ucc_datatype_t dtype = side->info.datatype;
    side->info_v.counts = table[0];
    side->info_v.displacements = table[1];
    side->info_v.datatype = dtype;
    return 0;
}

int ucch_program_send(ucch_program *p, int step, ucp_ep_h ep, uint64_t tag, ucch_span src) {
    ucch_step *s = step_at(p, step);
    if (!s || !(s->message = ucch_message_new()))
        return s ? UCCH_FAIL_MEMORY : UCCH_FAIL_ARGUMENT;
    s->kind = STEP_SEND;
    s->ep = ep;
    s->tag = tag;
    s->src = src;
    return 0;
}

int ucch_program_recv(ucch_program *p, int step, ucp_worker_h worker, uint64_t tag, ucch_span dst) {
    ucch_step *s = step_at(p, step);
    if (!s || !(s->message = ucch_message_new()))
        return s ? UCCH_FAIL_MEMORY : UCCH_FAIL_ARGUMENT;
    s->kind = STEP_RECV;
    s->worker = worker;
    s->tag = tag;
    s->dst = dst;
    return 0;
}

int ucch_program_local(ucch_program *p, int step, int kind, int op, int dtype, int to, ucch_span src, ucch_span dst,
                       double factor) {
    static const int kinds[] = {STEP_COPY, STEP_COMBINE, STEP_CAST, STEP_SCALE};
    ucch_step *s = step_at(p, step);
    if (!s || kind < 0 || kind > 3)
        return UCCH_FAIL_ARGUMENT;
    s->kind = kinds[kind];
    s->op = op;
    s->dtype = dtype;
    s->to = to;
    s->src = src;
    s->dst = dst;
    s->factor = factor;
    return 0;
}

int ucch_program_after(ucch_program *p, int step, int n, const int *earlier) {
    ucch_step *s = step_at(p, step);
    if (!s)
        return UCCH_FAIL_ARGUMENT;
    free(s->deps);
    s->deps = malloc((size_t)n * sizeof(int) + 1);
    if (!s->deps)
        return UCCH_FAIL_MEMORY;
    memcpy(s->deps, earlier, (size_t)n * sizeof(int));
    s->ndeps = n;
    return 0;
}

int ucch_program_memory(ucch_program *p, int base, int mem_type) {
    if (base < 0 || base > 3)
        return UCCH_FAIL_ARGUMENT;
    p->mem_type[base] = mem_type;
    return 0;
}

void ucch_program_bytes(ucch_program *p, uint64_t bytes) {
    p->bytes = bytes;
}

int ucch_program_tmp(ucch_program *p, size_t bytes) {
    p->tmp_bytes = bytes;
    return p->on_device ? 0 : take_scratch(p);
}

/* The program works on memory of the bound device, with scratch there and `pinned` bytes of pinned memory. */
int ucch_program_device(ucch_program *p, size_t pinned) {
    if (ucch_bound() < 0)
        return UCCH_FAIL_ARGUMENT;
    p->on_device = 1;
    p->pin_bytes = pinned;
    return 0;
}

/* ---- running ---- */

static char *address(const ucch_program *p, const ucch_span *span) {
    return p->base[span->base] ? p->base[span->base] + span->offset : NULL;
}

static int init_locked(ucch_program *p, ucch_step *s) {
    /* Both forms of a buffer begin with its address; the memory type follows at another place in each. */
    s->args.src.info.buffer = address(p, &s->src);
    s->args.dst.info.buffer = address(p, &s->dst);
    *(s->tables[0] ? &s->args.src.info_v.mem_type : &s->args.src.info.mem_type) = p->mem_type[s->src.base];
    *(s->tables[2] ? &s->args.dst.info_v.mem_type : &s->args.dst.info.mem_type) = p->mem_type[s->dst.base];
    return ucc_collective_init(&s->args, &s->request, s->team->handle);
}

static int post_coll_locked(ucch_step *s) {
    int status = ucc_collective_post(s->request);
    if (status < 0)
        return status;
    s->state = POSTED;
    return 0;
}

static int on_device_locked(ucch_program *p, ucch_step *s) {
    static const int kinds[] = {
        [STEP_COPY] = UCCH_COPY, [STEP_COMBINE] = UCCH_COMBINE, [STEP_CAST] = UCCH_CAST, [STEP_SCALE] = UCCH_SCALE};
    ucch_task task = {
        .kind = kinds[s->kind],
        .op = s->op,
        .dtype = s->dtype,
        .to = s->to,
        .way = s->dst.base == UCCH_PIN   ? UCCH_TO_HOST
               : s->src.base == UCCH_PIN ? UCCH_TO_DEVICE
                                         : UCCH_ACROSS,
        .src = address(p, &s->src),
        .dst = address(p, &s->dst),
        .count = s->dst.count,
        .src_bytes = bytes_of((ucc_datatype_t)s->dtype, 1),
        .dst_bytes = bytes_of((ucc_datatype_t)(s->kind == STEP_CAST ? s->to : s->dtype), 1),
        .factor = s->factor,
    };
    if (!s->work && !(s->work = ucch_work_new()))
        return UCCH_FAIL_MEMORY;
    s->state = POSTED;
    return ucch_work_begin_locked(s->work, &task);
}

static int local_locked(ucch_program *p, ucch_step *s) {
    if (p->on_device)
        return on_device_locked(p, s);
    char *src = address(p, &s->src), *dst = address(p, &s->dst);
    int status = 0;
    switch (s->kind) {
    case STEP_COPY:
        memmove(dst, src, bytes_of((ucc_datatype_t)s->dtype, s->src.count));
        break;
    case STEP_COMBINE:
        status = ucch_combine(s->op, s->dtype, src, dst, s->src.count);
        break;
    case STEP_CAST:
        status = ucch_cast(s->dtype, s->to, src, dst, s->src.count);
        break;
    default:
        status = ucch_scale(s->dtype, dst, s->dst.count, s->factor);
    }
    s->state = FINISHED;
    return status;
}

/* The message ops of a program are ops of their own on the active list; their deadline is the program's. */
static int post_message(ucch_program *p, ucch_step *s) {
    ucch_span *span = s->kind == STEP_SEND ? &s->src : &s->dst;
    /* Successive calls of a program must not take each other's messages. */
    uint64_t tag = s->tag | (p->op.error.seq & 0x7fff) << 16;
    int mem_type = p->mem_type[span->base];
    int status = s->kind == STEP_SEND
                     ? ucch_message_send_locked(s->message, s->ep, address(p, span), span->count, tag, mem_type)
                     : ucch_message_recv_locked(s->message, s->worker, address(p, span), span->count, tag, mem_type);
    s->state = POSTED;
    return status;
}

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
        dequeue_locked(s);
        return post_coll_locked(s);
    }
    return s->kind == STEP_SEND || s->kind == STEP_RECV ? post_message(p, s) : local_locked(p, s);
}

/* 1 when the posted step has finished, 0 when not yet, negative on failure. */
static int poll_step_locked(ucch_program *p, ucch_step *s) {
    if (s->kind >= STEP_COPY) {
        int status = ucch_work_poll_locked(s->work);
        if (status == 1)
            s->state = FINISHED;
        return status;
    }
    if (s->kind != STEP_COLL) {
        ucch_op *op = ucch_message_op(s->message);
        if (op->state == UCCH_ACTIVE)
            return 0;
        s->state = FINISHED;
        return op->state == UCCH_FAILED ? op->error.status : 1;
    }
    int status = s->request->status;
    if (status == UCC_INPROGRESS)
        return 0;
    s->state = FINISHED;
    s->team->context->users--;
    if (!p->persistent) {
        ucc_collective_finalize(s->request);
        s->request = NULL;
    }
    return status < 0 ? status : 1;
}

int ucch_program_check_locked(ucch_program *p) {
    if (!p->board)
        return 0;
    int peer = ucch_board_mismatch(p->board, p->op.error.seq);
    int bad = UCCH_FAIL_MISMATCH;
    if (peer < 0) {
        peer = ucch_board_gone(p->board, p->op.error.seq);
        bad = UCCH_FAIL_PEER;
    }
    p->op.error.peer = peer;
    return peer < 0 ? 0 : bad;
}

static void finish_locked(ucch_program *p) {
    if (p->board)
        ucch_board_add(p->board, ucch_now() - p->op.started, p->bytes);
    if (p->on_device && !p->persistent)
        give_scratch(p);
    ucch_gate_leave_locked(&p->gate);
    ucch_op_end_locked(&p->op, 0, -1, -1);
}

static void fail_locked(ucch_program *p, int status, int step) {
    int peer = -1;
    if (p->board && (peer = ucch_board_mismatch(p->board, p->op.error.seq)) >= 0)
        status = UCCH_FAIL_MISMATCH;
    ucch_op_end_locked(&p->op, status, step, peer);
    ucch_program_abandon_locked(p);
}

int ucch_program_advance_locked(ucch_program *p) {
    int moved = 0, open = ucch_gate_open_locked(&p->gate);
    if (open < 0)
        fail_locked(p, open, -1);
    if (open <= 0)
        return open < 0;
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = 0;
        if (s->state == WAITING && ready(p, s)) {
            status = start_step_locked(p, s);
            moved++;
        }
        if (status >= 0 && s->state == POSTED)
            status = poll_step_locked(p, s);
        if (status < 0) {
            fail_locked(p, status, i);
            return 1;
        }
        if (s->state == FINISHED) {
            moved++;
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
    for (int i = p->first; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
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

/* Make all requests at the start, in program order: libucc numbers a team's collectives when they are made, and steps
 * come to their turns in another order on each rank. A persistent program has them already. */
static int init_all_locked(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        int status = s->kind == STEP_COLL && !s->request ? init_locked(p, s) : 0;
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
    return p->board && ucch_board_mismatch(p->board, p->op.error.seq) >= 0;
}

static int start_locked(ucch_program *p, void *send, void *recv, double timeout) {
    if (p->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    if (send && send == recv)
        return UCCH_ALIASED;
    if (p->board && ucch_board_broken(p->board))
        return UCCH_FAIL_BROKEN;
    int status = take_scratch(p);
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
    ucch_op_begin_locked(&p->op, timeout);
    if (expected_otherwise(p))
        fail_locked(p, UCCH_FAIL_MISMATCH, -1);
    else if (!init_all_locked(p))
        ucch_program_advance_locked(p);
    return 0;
}

int ucch_program_start(ucch_program *p, void *send, void *recv, double timeout) {
    ucch_lock();
    int before = ucch_device_enter();
    int status = start_locked(p, send, recv, timeout);
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* Start when `stream` gets here. With `ordered` the stream waits for the end, and the progress thread must run: 1; 0
 * when it does not (not wanted, or impossible: then the caller has to wait). Under the lock up to the stream's wait:
 * the program must not end, and so let go of the stream, before the stream was told to wait. */
int ucch_program_start_on(ucch_program *p, void *send, void *recv, double timeout, void *stream, int ordered) {
    ucch_lock();
    int before = ucch_device_enter();
    int status = p->op.state == UCCH_ACTIVE ? UCCH_FAIL_BUSY : ucch_gate_enter(&p->gate, stream);
    if (!status)
        status = start_locked(p, send, recv, timeout);
    ucch_wake_locked();
    if (status < 0)
        p->gate.closed = 0;
    else if (ordered && p->op.state == UCCH_ACTIVE)
        status = ucch_gate_hold(&p->gate, stream);
    else
        status = ordered;
    ucch_device_leave(before);
    ucch_unlock();
    return status;
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
    status = take_scratch(p);
    for (int i = 0; i < p->nsteps && status >= 0; i++) {
        ucch_step *s = &p->steps[i];
        if (s->kind == STEP_COLL) {
            s->args.flags |= FLAG_PERSISTENT;
            s->args.mask |= MASK_FLAGS;
            status = init_locked(p, s);
        }
    }
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}
