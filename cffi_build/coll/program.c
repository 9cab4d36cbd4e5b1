/* A plan lowered for this rank: a flat list of steps with their dependencies, as Python builds it. */
#include <stdlib.h>
#include <string.h>

#include "coll/coll.h"

/* Release the library's requests while their teams still exist; what is in progress stays the library's. */
void ucch_program_drop(ucch_program *p) {
    UCCH_LOCKED;
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        if (s->request) ucch_request_drop_locked(s->request, p->is.on_device);
        s->request = NULL;
    }
}

/* Scratch is the program's own on the host, and borrowed from the pool on a device; `owner`: the stream whose calls
 * wait for each other, NULL for none. UCCH_LATER where memory has to be allocated while a stream is held: that could
 * wait for the stream, and the stream for us; `anyway`: take that risk. */
int ucch_program_take_scratch(ucch_program *p, const void *owner, int anyway) {
    if (p->base[UCCH_TMP] || !p->is.tmp_bytes) return 0;
    if (!p->is.on_device)
        return posix_memalign((void **)&p->base[UCCH_TMP], 4096, p->is.tmp_bytes) ? UCCH_FAIL_MEMORY : 0;
    int may_add = anyway || !ucch_gates_held();
    p->base[UCCH_TMP] = ucch_pool_take(0, p->is.tmp_bytes, owner, may_add);
    return p->base[UCCH_TMP] ? 0 : may_add ? UCCH_FAIL_MEMORY : UCCH_LATER;
}

void ucch_program_give_scratch(ucch_program *p) {
    if (p->is.on_device)
        ucch_pool_give(p->base[UCCH_TMP]);
    else
        free(p->base[UCCH_TMP]);
    p->base[UCCH_TMP] = NULL;
}

/* Requests that were not dropped before are left alone: their team may be gone. */
void ucch_program_free(ucch_program *p) {
    for (int i = 0; i < p->nsteps; i++) {
        ucch_step *s = &p->steps[i];
        if (s->message) ucch_message_free(s->message);
        ucch_work_free(s->work);
        if (s->end && ucch_bound() >= 0) ucch_bound_ops()->event_free(s->end);
    }
    ucch_gate_free(&p->gate);
    ucch_program_give_scratch(p);
    free(p);
}

ucch_op *ucch_program_op(ucch_program *p) { return &p->op; }

/* One side of a collective: with counts and displacements of each member it has the v-form. */
static ucc_coll_buffer_t side_of(const ucch_span *span, const uint64_t *const *table, ucc_datatype_t dtype) {
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
                                    .src = side_of(&part->src, &part->tables[0], dtype),
                                    .dst = side_of(&part->dst, &part->tables[2], dtype)};
    if (part->kind == UCCH_STEP_EXCHANGE) {
        if (!ucch_board_parcels(p->board) || part->src.count > UCCH_PARCEL_BYTES) return UCCH_FAIL_ARGUMENT;
        s->exchange = (ucch_exchange){.is = &s->is, .count = part->bytes / ucch_step_bytes(dtype, 1)};
    }
    if (!ucch_step_is_message(s)) return 0;
    s->message = ucch_message_new();
    return s->message ? 0 : UCCH_FAIL_MEMORY;
}

/* Have it queued in streams whole: steps that other streams wait for get an event. */
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

/* A program of these steps; what they point to stays the caller's. NULL with a failure in `status`. */
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
    if (!*status && !p->is.on_device) *status = ucch_program_take_scratch(p, NULL, 1);
    if (!*status) return p;
    ucch_program_free(p);
    return NULL;
}

/* Enter a call, whose operation begins: tell the other ranks of it, and look what they call. A status and `peer` where
 * that is something else, or 0.
 *
 * Of two ranks that call different things the later one sees it here, before it sends anything, because each publishes
 * before it looks; the earlier one then waits in vain and sees it too. Data of the wrong length must not arrive: libucc
 * 1.4 crashes on it. */
int ucch_program_enter_locked(const ucch_program *p, ucch_op *op, const ucch_record *about, double timeout, int *peer) {
    op->about = about;
    op->error.seq = ucch_board_publish(p->board, about->signature, about->label);
    if (UCCH_TRACING) op->event = ucch_trace_begin(p->is.number, -1, op->error.seq);
    ucch_op_begin_locked(op, timeout);
    ucch_board_began(p->board, op->started);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return ucch_board_verdict(p->board, op->error.seq, peer);
}
