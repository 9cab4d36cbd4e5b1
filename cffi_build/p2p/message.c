/* Tagged point-to-point messages over UCP; the data of long ones between devices may go by lanes (offer.c).
 *
 * A message may start when a stream reaches a point: by then the data to send is there, or the receive buffer may be
 * overwritten. Neither host nor stream waits and no Python runs: the progress thread polls (gpu/gate.c). Messages of a
 * communicator do not overtake each other: behind a send that waits for its stream, other sends to the same receiver
 * wait, too, and behind a receive all other receives. */
#include <stdlib.h>

#include "p2p/p2p.h"

/* Bits of a tag above the rank and the user's tag: the communicator. */
#define COMMUNICATOR(tag) ((tag) >> (UCCH_OFFER_BIT + 1))

static void sent(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    ucch_message *m = data;
    m->request = NULL;
    ucch_message_end_locked(m, status);
}

/* A receive has ended. If libucp has dropped a message, this one may be another that was matched in its place. */
static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    ucch_message *m = data;
    m->info = *info;
    m->came = 1;
    ucp_request_free(request);
    m->request = NULL;
    if (m->op.state != UCCH_ACTIVE) return;
    int lost = status != UCS_ERR_CANCELED && m->board && ucch_board_lossy(m->board);
    int by_lane = status || lost ? UCCH_LATER : ucch_offer_arrived_locked(m);
    if (by_lane == 0 || by_lane == 1) return;
    ucch_message_end_locked(m, lost ? UCCH_FAIL_LOST : by_lane == UCCH_LATER ? status : by_lane);
}

/* Start an active message in libucp. Returns 0, or a failure that has ended it. */
static int issue_locked(ucch_message *m) {
    const ucch_start *s = &m->start;
    if (s->what == START_OFFER) return ucch_offer_send_locked(m);
    if (s->what == START_RECV && !s->matched) ucch_claim_locked(m, NULL);
    ucp_tag_message_h matched = s->matched;
    m->start.matched = NULL;
    if (matched && s->found.serial) {
        ucch_discard_locked(m->worker, matched);
        int status = ucch_offer_taken_locked(m);
        if (status < 0) ucch_message_end_locked(m, status);
        return status;
    }
    if (s->what >= START_RECV) {
        ucp_request_param_t p = ucch_ucp_params(received, m, s->mem_type);
        /* a receive that fails at once would not report tag and length */
        p.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        m->came = 0;
        void *request = matched ? ucp_tag_msg_recv_nbx(m->worker, s->buffer, s->bytes, matched, &p)
                                : ucp_tag_recv_nbx(m->worker, s->buffer, s->bytes, s->tag, s->mask, &p);
        if (!m->came) return ucch_message_begun_locked(m, request);
        return m->op.state == UCCH_FAILED ? m->op.error.status : 0; /* called back before libucp returned */
    }
    ucp_request_param_t p = ucch_ucp_params(sent, m, s->mem_type);
    return ucch_message_begun_locked(m, s->what == START_SYNC
                                            ? ucp_tag_send_sync_nbx(s->ep, s->buffer, s->bytes, s->tag, &p)
                                            : ucp_tag_send_nbx(s->ep, s->buffer, s->bytes, s->tag, &p));
}

/* Start a message of a program, whose turn it is. Returns 0, or a failure that has ended it. */
int ucch_message_start_locked(ucch_message *m, ucp_worker_h worker, const ucch_start *start) {
    m->worker = worker;
    m->start = *start;
    m->request = NULL;
    ucch_op_begin_locked(&m->op, 0);
    return issue_locked(m);
}

/* ---- order ---- */

static ucch_message *waiting;

static int same_queue(const ucch_message *one, const ucch_message *other) {
    int receives = one->start.what == START_RECV;
    if (receives != (other->start.what == START_RECV)) return 0;
    if (COMMUNICATOR(one->start.tag) != COMMUNICATOR(other->start.tag)) return 0;
    return receives ? one->worker == other->worker : one->start.ep == other->start.ep;
}

/* True if an earlier message of the same queue still waits. */
static int has_earlier_pending(const ucch_message *m) {
    for (const ucch_message *each = waiting; each && each != m; each = each->behind)
        if (same_queue(each, m)) return 1;
    return 0;
}

/* The next message that is begun on `m` starts when `stream` reaches this point. Returns 0 or a failure. */
int ucch_message_after(ucch_message *m, void *stream) {
    if (ucch_bound() < 0) return UCCH_FAIL_DEVICE;
    if (m->op.state == UCCH_ACTIVE) return UCCH_FAIL_BUSY;
    UCCH_ON_DEVICE;
    return ucch_gate_enter(&m->gate, stream);
}

/* Take a message out of the queue of waiting ones: it starts now, or is cancelled. */
static void dequeue_locked(ucch_message *m) {
    if (!m->waits) return;
    UCCH_UNLINK(waiting, m, behind);
    m->waits = 0;
    ucch_gate_leave_locked(&m->gate);
}

/* Describe a message for the flight recorder. */
static void describe(ucch_message *m, int receives) {
    const ucch_start *s = &m->start;
    int has_tag = !receives || s->mask & USER_TAG;
    m->about.kind = receives ? UCCH_RECORD_RECEIVE : UCCH_RECORD_SEND;
    m->about.own = (s->tag & OWN_TAG) != 0;
    m->about.bytes = s->bytes;
    m->about.tag = has_tag ? (int32_t)(s->tag & USER_TAG) : -1;
    m->about.comm = ucch_board_comm(m->board);
    m->op.about = &m->about;
    m->op.late = m->waits;
}

/* True if libucp or a lane still uses it. */
static int is_under_way(const ucch_message *m) {
    return m->request != NULL || (m->lane_message && ucch_lane_message_held(m->lane_message));
}

/* Begin a message: now, or when its turn comes; `taken`: the probe that has the message to receive, or NULL. Returns 0
 * or a failure. */
static int begin(ucch_message *m, ucp_worker_h worker, const ucch_start *start, ucch_message *taken, double timeout) {
    if (m->op.state == UCCH_ACTIVE || (m->lanes && is_under_way(m))) return UCCH_FAIL_BUSY;
    UCCH_LOCKED;
    if (taken && !taken->start.matched) return UCCH_FAIL_BUSY;
    m->worker = worker;
    m->start = *start;
    int receives = start->what >= START_RECV;
    if (!receives) m->info = (ucp_tag_recv_info_t){start->tag, start->bytes};
    m->request = NULL;
    m->left = 0;
    m->by_lane = m->matched = m->moving = 0;
    m->waits = !taken && (m->gate.closed || has_earlier_pending(m));
    if (taken) ucch_claim_locked(m, taken);
    m->op.called_back = !m->waits;
    describe(m, receives);
    ucch_op_begin_locked(&m->op, timeout);
    if (!m->waits) return issue_locked(m);
    UCCH_APPEND(waiting, m, behind);
    return 0;
}

/* Start a waiting message if its turn has come. Returns whether it has. */
static int try_start_locked(ucch_message *m) {
    int status = has_earlier_pending(m) ? 0 : ucch_gate_open_locked(&m->gate);
    if (!status) return 0;
    dequeue_locked(m);
    ucch_op_started_locked(&m->op);
    ucch_op_called_back_locked(&m->op, 1);
    if (status < 0)
        ucch_message_end_locked(m, status);
    else
        issue_locked(m);
    return 1;
}

/* ---- sends and receives ---- */

static ucch_start start_of(int what, ucp_ep_h ep, const void *data, size_t bytes, uint64_t tag) {
    return (ucch_start){.what = what, .ep = ep, .buffer = (void *)(uintptr_t)data, .bytes = bytes, .tag = tag};
}

int ucch_send(ucch_message *m, ucp_worker_h worker, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
              int mem_type, int sync, double timeout) {
    ucch_start start = start_of(sync ? START_SYNC : START_SEND, ep, buffer, bytes, tag);
    start.mem_type = mem_type;
    return begin(m, worker, &start, NULL, timeout);
}

int ucch_recv(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag, uint64_t mask,
              int mem_type, double timeout) {
    ucch_start start = {
        .what = START_RECV, .buffer = buffer, .bytes = bytes, .tag = tag, .mask = mask, .mem_type = mem_type};
    return begin(m, worker, &start, NULL, timeout);
}

/* Start a message again as it was started last, without a time limit. Negative: the general way has to do it. */
int ucch_message_again(ucch_message *m) {
    ucch_start start = m->start;
    if (!m->worker || !m->board || ucch_board_broken(m->board)) return UCCH_FAIL_BROKEN;
    int status = begin(m, m->worker, &start, NULL, 0);
    if (UCCH_LOAD(&m->op.state) == UCCH_ACTIVE) ucch_progress_thread(1);
    return status;
}

/* Send device memory by lanes to rank `dest` of their communicator; ucch_message_lanes has set the memory. */
int ucch_send_offer(ucch_message *m, ucp_worker_h worker, ucp_ep_h ep, const void *data, size_t bytes, uint64_t tag,
                    int dest, double timeout) {
    ucch_start start = start_of(START_OFFER, ep, data, bytes, tag);
    start.dest = dest;
    return begin(m, worker, &start, NULL, timeout);
}

/* Receive the message that a probe has taken out; UCCH_FAIL_BUSY if it was received or discarded before. */
int ucch_recv_taken(ucch_message *m, void *buffer, size_t bytes, ucch_message *taken, int mem_type, double timeout) {
    ucch_start start = {.what = START_RECV,
                        .buffer = buffer,
                        .bytes = bytes,
                        .tag = taken->start.tag,
                        .mask = taken->start.mask,
                        .mem_type = mem_type};
    return begin(m, taken->worker, &start, taken, timeout);
}

/* Flush an endpoint, or close it behind all that was sent (`closes`); waited for like a message. */
int ucch_flush(ucch_message *m, ucp_ep_h ep, int closes, double timeout) {
    if (m->op.state == UCCH_ACTIVE) return UCCH_FAIL_BUSY;
    ucp_request_param_t p = ucch_ucp_params(sent, m, UCS_MEMORY_TYPE_HOST);
    m->request = NULL;
    m->left = 0;
    UCCH_LOCKED;
    ucch_op_begin_locked(&m->op, timeout);
    return ucch_message_begun_locked(m, closes ? ucp_ep_close_nbx(ep, &p) : ucp_ep_flush_nbx(ep, &p));
}

/* Let a message fail when its peer is gone. `peer` is a slot of the board, UCCH_ALL_PEERS for a receive from any
 * source; `rank` is its rank or -1. The board outlives the message. */
void ucch_message_watch(ucch_message *m, ucch_board *board, int peer, int rank) {
    m->board = board;
    m->peer = peer;
    m->about.peer = rank;
}

/* True if libucp or a stream still uses the message and its buffer, even if it has ended. */
int ucch_message_held(ucch_message *m) {
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    return m->op.state == UCCH_ACTIVE || is_under_way(m) || ucch_gate_due(&m->gate);
}

/* ---- one message ---- */

static int advance_locked(ucch_op *op) {
    ucch_message *m = (ucch_message *)op;
    return m->waits ? try_start_locked(m) : ucch_offer_advance_locked(m);
}

/* A dead peer's messages fail at once. A peer that ended normally may have sent before, so a receive from it fails
 * later, and only if nothing has matched it: only then can it be cancelled. */
static int check_locked(ucch_op *op, double now) {
    ucch_message *m = (ucch_message *)op;
    int bad = m->board ? ucch_board_check_message(m->board, m->peer, op->started, now, &m->left) : 0;
    int lost = m->board && m->start.what == START_RECV && ucch_board_lossy(m->board);
    if (lost && bad != UCCH_FAIL_REVOKED) return UCCH_FAIL_LOST;
    if (bad == UCCH_LATER && m->request) ucp_request_cancel(m->worker, m->request);
    return bad == UCCH_LATER ? 0 : bad;
}

/* A receive leaves the matching queue, or its data is discarded. A send stays with libucp until its endpoint closes;
 * its callback then finds the message inactive. The owner keeps message and buffer alive (Python never frees abandoned
 * ones). */
void ucch_message_abandon_locked(ucch_message *m) {
    dequeue_locked(m);
    if (m->start.what == START_OFFER) return;
    if (m->lanes) ucch_offer_abandon_locked(m);
    if (m->request) ucp_request_cancel(m->worker, m->request);
}

/* The op ends first: a callback run by the cancel then finds nothing to complete. */
static void give_up_locked(ucch_op *op, int status) {
    ucch_message *m = (ucch_message *)op;
    ucch_op_end_locked(op, status, -1, -1);
    ucch_message_abandon_locked(m);
}

/* Rounds advance those that wait for a stream or an earlier message, or whose data is on its way by a lane. */
static const ucch_op_kind kind = {UCCH_BY_WORKERS, advance_locked, check_locked, give_up_locked};

ucch_message *ucch_message_new(void) {
    ucch_message *m = calloc(1, sizeof(*m));
    if (!m) return NULL;
    m->op.kind = &kind;
    m->op.called_back = 1;
    return m;
}

void ucch_message_free(ucch_message *m) {
    if (m->start.what == START_PROBE && ucch_probe_dropped(m)) return;
    ucch_gate_free(&m->gate);
    if (m->lane_message) ucch_lane_message_free(m->lane_message);
    free(m);
}

ucch_op *ucch_message_op(ucch_message *m) { return &m->op; }

void ucch_message_cancel(ucch_message *m) {
    UCCH_LOCKED;
    if (m->op.state != UCCH_ACTIVE) return;
    if (m->waits) {
        dequeue_locked(m);
        ucch_message_end_locked(m, UCS_ERR_CANCELED);
    } else if (m->request)
        ucp_request_cancel(m->worker, m->request);
}
