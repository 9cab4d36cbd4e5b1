/* A plan lowered for this rank: a flat list of steps with their dependencies, as Python builds it. */
#include <stdlib.h>
#include <string.h>

#include "coll/fused.h"

ucch_program *ucch_program_new(int nsteps, ucch_board *board, uint64_t signature, const char *label) {
    ucch_program *p = calloc(1, sizeof(*p));
    if (!p) return NULL;
    p->steps = calloc((size_t)nsteps + 1, sizeof(ucch_step));
    if (!p->steps) {
        free(p);
        return NULL;
    }
    p->nsteps = nsteps;
    p->board = board;
    p->about = (ucch_record){.kind = UCCH_RECORD_CALL, .comm = ucch_board_comm(board), .signature = signature};
    strncpy(p->about.label, label, LABEL - 1);
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
        if (s->request && s->request->status != UCC_INPROGRESS) ucc_collective_finalize(s->request);
        s->request = NULL;
    }
}

void ucch_program_drop(ucch_program *p) {
    ucch_lock();
    drop_requests_locked(p);
    ucch_unlock();
}

/* Scratch is the program's own on the host, and borrowed from the pool on a device; `owner`: the stream whose calls
 * wait for each other, NULL for none. UCCH_LATER where memory has to be allocated while a stream is held: that could
 * wait for the stream, and the stream for us; `anyway`: take that risk. */
int ucch_program_take_scratch(ucch_program *p, const void *owner, int anyway) {
    if (p->base[UCCH_TMP] || !p->tmp_bytes) return 0;
    if (!p->on_device) return posix_memalign((void **)&p->base[UCCH_TMP], 4096, p->tmp_bytes) ? UCCH_FAIL_MEMORY : 0;
    int may_add = anyway || !ucch_gates_held();
    p->base[UCCH_TMP] = ucch_pool_take(0, p->tmp_bytes, owner, may_add);
    return p->base[UCCH_TMP] ? 0 : may_add ? UCCH_FAIL_MEMORY : UCCH_LATER;
}

void ucch_program_give_scratch(ucch_program *p) {
    if (p->on_device)
        ucch_pool_give(p->base[UCCH_TMP]);
    else
        free(p->base[UCCH_TMP]);
    p->base[UCCH_TMP] = NULL;
}

/* Requests that were not dropped before are left alone: their team may be gone. */
void ucch_program_free(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        free(s->deps);
        for (int k = 0; k < 4; k++)
            free(s->tables[k]);
        if (s->message) ucch_message_free(s->message);
        ucch_work_free(s->work);
        if (s->end && ucch_bound() >= 0) ucch_bound_ops()->event_free(s->end);
    }
    ucch_gate_free(&p->gate);
    ucch_program_give_scratch(p);
    free(p->steps);
    free(p);
}

ucch_op *ucch_program_op(ucch_program *p) { return &p->op; }

int ucch_program_active(ucch_program *p) { return p->op.state == UCCH_ACTIVE; }

static ucch_step *step_at(ucch_program *p, int i) { return i >= 0 && i < p->nsteps ? &p->steps[i] : NULL; }

int ucch_program_coll(ucch_program *p, int step, ucch_team *team, int coll, int op, uint64_t flags, uint64_t root,
                      ucc_datatype_t dtype, ucch_span src, ucch_span dst) {
    ucch_step *s = step_at(p, step);
    if (!s) return UCCH_FAIL_ARGUMENT;
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
    if (!s || s->kind != STEP_COLL) return UCCH_FAIL_ARGUMENT;
    uint64_t **table = &s->tables[dst ? 2 : 0];
    size_t bytes = (size_t)n * sizeof(uint64_t);
    for (int k = 0; k < 2; k++) {
        table[k] = malloc(bytes + 1);
        if (!table[k]) return UCCH_FAIL_MEMORY;
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
    if (!s || !(s->message = ucch_message_new())) return s ? UCCH_FAIL_MEMORY : UCCH_FAIL_ARGUMENT;
    s->kind = STEP_SEND;
    s->ep = ep;
    s->tag = tag;
    s->src = src;
    return 0;
}

int ucch_program_recv(ucch_program *p, int step, ucp_worker_h worker, uint64_t tag, ucch_span dst) {
    ucch_step *s = step_at(p, step);
    if (!s || !(s->message = ucch_message_new())) return s ? UCCH_FAIL_MEMORY : UCCH_FAIL_ARGUMENT;
    s->kind = STEP_RECV;
    s->worker = worker;
    s->tag = tag;
    s->dst = dst;
    return 0;
}

/* A call's only step between ranks, by parcels on the board: `from` whom this rank reads, so many `bytes` of each from
 * `at` on; `src` and `dst` in bytes. */
int ucch_program_exchange(ucch_program *p, int step, int writes, int from, int combines, int op, int dtype, uint64_t at,
                          uint64_t bytes, ucch_span src, ucch_span dst) {
    ucch_step *s = step_at(p, step);
    if (!s || !ucch_board_post(p->board) || src.count > UCCH_PARCEL_BYTES) return UCCH_FAIL_ARGUMENT;
    s->kind = STEP_EXCHANGE;
    s->src = src;
    s->dst = dst;
    s->exchange = (ucch_exchange){.writes = writes, .from = from, .combines = combines, .op = op, .dtype = dtype};
    s->exchange.at = at;
    s->exchange.bytes = bytes;
    s->exchange.count = bytes / ucch_step_bytes((ucc_datatype_t)dtype, 1);
    return 0;
}

int ucch_program_local(ucch_program *p, int step, int kind, int op, int dtype, int to, ucch_span src, ucch_span dst,
                       double factor) {
    ucch_step *s = step_at(p, step);
    if (!s || kind < UCCH_COPY || kind > UCCH_SCALE) return UCCH_FAIL_ARGUMENT;
    s->kind = STEP_COPY + kind;
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
    if (!s) return UCCH_FAIL_ARGUMENT;
    free(s->deps);
    s->deps = malloc((size_t)n * sizeof(int) + 1);
    if (!s->deps) return UCCH_FAIL_MEMORY;
    memcpy(s->deps, earlier, (size_t)n * sizeof(int));
    s->ndeps = n;
    return 0;
}

/* The stage of the plan that a step belongs to, in the order of posting, and the rank at a message's other end. */
int ucch_program_stage(ucch_program *p, int step, int stage, int peer) {
    ucch_step *s = step_at(p, step);
    if (!s) return UCCH_FAIL_ARGUMENT;
    s->stage = stage;
    s->peer = peer;
    return 0;
}

/* Queue all of the program in streams; `bounce` is the place in its scratch for copies that overlap, `op` and `dtype`
 * those of its arithmetic; `in_graph`: where they are captured. Last of all: what other lanes wait for gets an event.
 */
int ucch_program_queued(ucch_program *p, ucch_channels *channels, size_t bounce, int op, int dtype, int in_graph) {
    p->channels = channels;
    p->in_graph = in_graph;
    p->bounce = bounce;
    p->fused = ucch_kernel_of(&(ucch_task){.kind = UCCH_FUSED, .op = op, .dtype = dtype});
    for (int i = 0; i < p->nsteps; i++)
        for (int k = 0; k < p->steps[i].ndeps; k++) {
            int earlier = p->steps[i].deps[k];
            if (earlier < 0 || earlier >= i) return UCCH_FAIL_ARGUMENT;
            p->steps[earlier].marked |= ucch_lane_of(&p->steps[earlier]) != ucch_lane_of(&p->steps[i]);
        }
    p->sliced = ucch_fused_sliced(p);
    p->element = ucch_step_bytes((ucc_datatype_t)dtype, 1);
    return 0;
}

int ucch_program_memory(ucch_program *p, int base, int mem_type) {
    if (base < 0 || base > UCCH_TMP) return UCCH_FAIL_ARGUMENT;
    p->mem_type[base] = mem_type;
    return 0;
}

/* The program's messages between hosts carry the call's salt. */
void ucch_program_salt(ucch_program *p, uint32_t salt) { p->salt = salt % (1 << SALT_BITS); }

/* Set the timeline's name of this program. */
void ucch_program_trace(ucch_program *p, uint32_t number) { p->number = number; }

void ucch_program_bytes(ucch_program *p, uint64_t bytes) { p->about.bytes = bytes; }

int ucch_program_tmp(ucch_program *p, size_t bytes) {
    p->tmp_bytes = bytes;
    return p->on_device ? 0 : ucch_program_take_scratch(p, NULL, 1);
}

/* The program works on memory of the bound device, with scratch there. */
int ucch_program_device(ucch_program *p) {
    if (ucch_bound() < 0) return UCCH_FAIL_ARGUMENT;
    p->on_device = 1;
    return 0;
}
