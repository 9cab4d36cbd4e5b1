/* Transfers: lists of pieces that are put into, or got from, a peer's region, and a notification behind them.
 *
 * Between host memories libucp moves each piece, a window at a time, and an endpoint flush tells when all have arrived;
 * the kernel copies a single short piece. Device data goes through slots (staged.c), as libucp's own protocols for it
 * are slow; a get then asks the owner to put. A notification is sent after the data has arrived: a libucp fence would
 * wait for everything that the worker has under way. */
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "rma/rma.h"

/* Most pieces in flight, and most posted in one round of progress. */
#define WINDOW 256
#define TURN 128
/* Bytes that the calling thread moves itself, in 70 us at most: waking another thread and sharing the lock and caches
 * takes as long. And bytes that it may move while holding the GIL. */
#define DIRECT_BYTES ((uint64_t)1 << 20)
#define SHORT_BYTES ((uint64_t)16 << 10)
/* Polls of libucp for that, beside one per piece and per SEGMENT bytes. */
#define LOOKS 4
#define SEGMENT ((uint64_t)256 << 10)

/* Phases of a transfer: waits for its turn; moves data; flushes, or has moved everything; waits for the peer's
 * answer. */
enum { WAITING, MOVING, FLUSHING, ASKED };

/* Over TCP the receiver's libucp performs puts, and aborts if it cannot answer a sender that has died; data from such a
 * sender cannot be recalled either. */
static int by_ucp(const ucch_transfer *t) {
    int may = !t->peer->by_errors || t->peer->at->by_hardware;
    return may && t->is.local && t->is.target && !t->is.local->on_device && !t->is.target->on_device && !t->rows.row;
}

static void end_locked(ucch_transfer *t, int status) {
    if (t->op.state != UCCH_ACTIVE) return;
    if (t->is.what == UCCH_RMA_AWAIT) {
        ucch_op_end_locked(&t->op, status, -1, -1);
        ucch_gate_leave_locked(&t->held);
        ucch_transfer_leave_locked(t);
        return;
    }
    if (!t->lists) { /* a peer's get is counted at the peer */
        t->peer->counts[status ? UCCH_RMA_FAILED : t->is.what]++;
        if (!status) t->peer->counts[UCCH_RMA_BYTES] += t->bytes;
    }
    if (t->lists)
        ucch_tell_locked(t->peer, (ucch_header){.what = UCCH_PULLED, .serial = t->asked, .status = status}, NULL, 0);
    ucch_op_end_locked(&t->op, status, -1, -1);
    ucch_gate_leave_locked(&t->gate);
    ucch_gate_leave_locked(&t->held);
    int by_device = ucch_transfer_by_device(t);
    if (status && t->phase == MOVING && !by_ucp(t) && !by_device) ucch_staged_leave_locked(t);
    if (t->in_flight && by_device) ucch_attend_locked(t->at);
    /* A dead process of this host reads our memory no more; our device may. */
    if (!t->in_flight || (t->peer->status && !t->peer->by_errors && !by_device)) ucch_transfer_leave_locked(t);
    if (t->lists && !t->in_flight) ucch_transfer_free(t);
}

/* A request of libucp, or the peer, has finished. */
static void request_done_locked(ucch_transfer *t, int status) {
    t->in_flight--;
    if (status && !t->status) t->status = status;
    if (t->op.state == UCCH_ACTIVE || t->in_flight) return;
    ucch_transfer_leave_locked(t);
    if (t->lists) ucch_transfer_free(t);
}

static void finished(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    ((ucch_transfer *)data)->at->requests--;
    request_done_locked(data, status);
}

static int begun(ucch_transfer *t, void *request) {
    int is_begun = request && !IS_STATUS(request);
    t->in_flight += is_begun;
    t->at->requests += is_begun;
    return STATUS_OF(request);
}

static void *post_locked(ucch_transfer *t, size_t i) {
    ucp_request_param_t p = ucch_ucp_params(finished, t, UCS_MEMORY_TYPE_HOST);
    p.op_attr_mask |= t->is.local->memh ? UCP_OP_ATTR_FIELD_MEMH : 0;
    p.memh = t->is.local->memh;
    char *here = t->is.local->base + t->is.mine[i];
    uint64_t there = t->is.target->base + t->is.theirs[i];
    return t->is.what == UCCH_RMA_PUT ? ucp_put_nbx(t->peer->ep, here, t->is.lengths[i], there, t->is.target->rkey, &p)
                                      : ucp_get_nbx(t->peer->ep, here, t->is.lengths[i], there, t->is.target->rkey, &p);
}

static int move_locked(ucch_transfer *t) {
    int moved = 0;
    while (!t->status && t->next < t->is.n && t->in_flight < WINDOW && moved < TURN) {
        size_t i = t->next++;
        moved++;
        if (t->is.lengths[i]) t->status = begun(t, post_locked(t, i));
        t->bytes += t->is.lengths[i];
    }
    return moved;
}

static int flush_locked(ucch_transfer *t) {
    ucp_request_param_t p = ucch_ucp_params(finished, t, UCS_MEMORY_TYPE_HOST);
    t->phase = FLUSHING;
    return begun(t, ucp_ep_flush_nbx(t->peer->ep, &p));
}

static int notify_locked(ucch_transfer *t) {
    if (!t->is.tells) return 0;
    ucch_header h = {.what = UCCH_NOTIFY, .other = (uint64_t)t->is.counter};
    t->peer->counts[UCCH_RMA_NOTICES]++;
    return ucch_tell_locked(t->peer, h, t->is.notification, t->is.notification_bytes);
}

/* Ask the owner to put: its offsets, ours, and the lengths. */
static int pull_locked(ucch_transfer *t) {
    size_t each = t->is.n * sizeof(uint64_t);
    char *lists = malloc(3 * each);
    if (!lists) return UCCH_FAIL_MEMORY;
    memcpy(lists, t->is.theirs, each);
    memcpy(lists + each, t->is.mine, each);
    memcpy(lists + 2 * each, t->is.lengths, each);
    ucch_header h = {.what = UCCH_PULL, .serial = t->serial, .region = t->there, .other = t->is.local->id};
    h.count = (uint32_t)t->is.n;
    int status = ucch_tell_locked(t->peer, h, lists, 3 * each);
    free(lists);
    for (size_t i = 0; i < t->is.n; i++)
        t->bytes += t->is.lengths[i];
    return status;
}

static int open_locked(ucch_transfer *t) {
    ucch_header h = {.what = UCCH_OPEN, .serial = t->serial, .region = t->there, .other = t->bytes};
    t->bytes = 0;
    return ucch_tell_locked(t->peer, h, NULL, 0);
}

/* True if an earlier transfer to the same peer is still under way. */
static int is_behind(const ucch_transfer *t) {
    for (const ucch_transfer *o = t->at->transfers; o && o != t; o = o->following)
        if (o->peer == t->peer && o->is.what != UCCH_RMA_AWAIT && o->op.state == UCCH_ACTIVE) return 1;
    return 0;
}

/* Returns 1 if our counter has reached the value, 0 if not yet, or a failure. */
static int counted_locked(ucch_transfer *t) {
    const uint64_t *counter = ucch_rma_counter_of(t->at, (uint64_t)t->is.counter);
    if (!counter) return UCCH_FAIL_CANCELLED;
    if (*counter < t->is.least) return 0;
    t->phase = FLUSHING; /* nothing else to do */
    return 1;
}

/* Leave WAITING, if the stream and earlier transfers are done. Returns 1, 0 if not yet, or a failure. */
static int start_locked(ucch_transfer *t) {
    if (t->is.what == UCCH_RMA_AWAIT) return counted_locked(t);
    int open = ucch_gate_open_locked(&t->gate);
    if (open != 1) return open;
    if (t->is.what == UCCH_RMA_FLUSH && is_behind(t)) return 0;
    t->phase = MOVING;
    ucch_op_started_locked(&t->op);
    int asks = t->is.what == UCCH_RMA_OPEN || (t->is.what == UCCH_RMA_GET && !by_ucp(t) && !ucch_transfer_by_device(t));
    if (!asks) return 1;
    t->phase = ASKED;
    int status = t->is.what == UCCH_RMA_OPEN ? open_locked(t) : pull_locked(t);
    return status ?: 1;
}

/* True if all data has been moved, as far as is known. */
static int has_moved_all(const ucch_transfer *t) { return (t->next == t->is.n || t->status) && !t->in_flight; }

static int advance_phase_locked(ucch_transfer *t) {
    int moved = 0;
    if (t->phase == WAITING && (moved = start_locked(t)) < 0) t->status = moved;
    if (t->is.target && t->is.target->is_stale && !t->status) t->status = UCCH_FAIL_STALE;
    if (t->phase == MOVING) moved += by_ucp(t) || !t->is.n ? move_locked(t) : ucch_staged_move_locked(t);
    if (t->phase == MOVING && has_moved_all(t) && !t->status) {
        int needs_flush = t->is.what == UCCH_RMA_FLUSH || (t->is.what == UCCH_RMA_PUT && by_ucp(t));
        if (!needs_flush) t->phase = FLUSHING;
        if (needs_flush) t->status = flush_locked(t);
    }
    return moved > 0;
}

static int advance_locked(ucch_op *op) {
    ucch_transfer *t = (ucch_transfer *)op;
    int moved = advance_phase_locked(t);
    if (t->status && !t->in_flight)
        end_locked(t, t->status);
    else if (t->phase == FLUSHING && !t->in_flight)
        end_locked(t, notify_locked(t));
    else
        return moved;
    return 1;
}

static int check_locked(ucch_op *op, double now) {
    ucch_transfer *t = (ucch_transfer *)op;
    if (!t->peer || ucch_peer_status(t->peer)) return t->peer ? UCCH_FAIL_PEER : 0;
    const char *link = ucch_peer_cut_locked(t->peer, now - op->started, now);
    if (!link) return 0;
    t->link = strdup(link);
    return UCCH_FAIL_CONNECTION;
}

static void abandon_locked(ucch_op *op, int status) { end_locked((ucch_transfer *)op, status); }

static const ucch_op_kind kind = {UCCH_BY_WORKERS, advance_locked, check_locked, abandon_locked};

/* ---- called from other files ---- */

/* The peer has answered: the request is done, or one slot has been emptied. */
void ucch_transfer_answered_locked(ucch_transfer *t, int status) {
    if (t->phase == ASKED && t->op.state == UCCH_ACTIVE)
        end_locked(t, status ? status : notify_locked(t));
    else if (t->in_flight > 0 && t->phase == MOVING)
        request_done_locked(t, status);
}

/* End all transfers with a peer; `only_by_device`: only those that our device copies directly. */
void ucch_transfers_end_locked(ucch_rma *at, const ucch_peer *peer, int status, int only_by_device) {
    for (ucch_transfer *t = at->transfers, *next; t; t = next) {
        next = t->following;
        if (t->peer == peer && (!only_by_device || ucch_transfer_by_device(t))) end_locked(t, status);
    }
}

/* Index of the first piece that is not inside a region of `room` bytes; -1: none. */
int64_t ucch_pieces_outside(uint64_t room, size_t n, const uint64_t *offsets, const uint64_t *bytes) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i] > room || offsets[i] > room - bytes[i]) return (int64_t)i;
    return -1;
}

/* Create a transfer with a peer, or (UCCH_RMA_AWAIT) of `at` alone. Memory that the order points to stays the
 * caller's. */
ucch_transfer *ucch_transfer_new(ucch_rma *at, ucch_peer *peer, const ucch_order *order) {
    ucch_transfer *t = calloc(1, sizeof(*t));
    if (!t) return NULL;
    t->op.kind = &kind;
    t->at = peer ? peer->at : at;
    t->peer = peer;
    t->is = *order;
    t->there = order->target ? order->target->id : order->region;
    t->bytes = order->bytes;
    if (order->rows) t->rows = *order->rows;
    return t;
}

ucch_op *ucch_transfer_op(ucch_transfer *t) { return &t->op; }

static void begin_locked(ucch_transfer *t, double timeout) {
    t->serial = ++t->at->serials;
    t->place = t->at->last_transfer;
    *t->place = t;
    t->at->last_transfer = &t->following;
    if (t->is.local) t->is.local->users++;
    if (t->is.target) t->is.target->users++;
    ucch_op_begin_locked(&t->op, timeout);
}

/* Complete a short transfer to a process of this host in the calling thread, if it has started and sends no
 * notification. */
static void finish_short_locked(ucch_transfer *t) {
    if (t->op.state != UCCH_ACTIVE || t->phase == WAITING || t->phase == ASKED) return;
    int is_short = t->next == t->is.n && t->bytes <= DIRECT_BYTES && !t->is.tells && !t->peer->by_errors && by_ucp(t);
    for (uint64_t i = is_short ? LOOKS + t->is.n + t->bytes / SEGMENT : 0; i && t->op.state == UCCH_ACTIVE; i--) {
        ucp_worker_progress(t->at->worker);
        if (t->op.state == UCCH_ACTIVE) advance_locked(&t->op);
    }
}

/* Record it in the flight recorder, unless it was complete when it began. */
static void record_locked(ucch_transfer *t) {
    ucch_record about = {.kind = (uint8_t)(UCCH_RECORD_TRANSFER + t->is.what), .own = !t->peer->by_errors};
    about.peer = (int32_t)(t->peer->uid >> 1 & UCCH_RMA_PROCESS);
    about.tag = t->is.tells;
    for (size_t i = 0; i < t->is.n; i++)
        about.bytes += t->is.lengths[i];
    t->op.late = t->phase == WAITING;
    t->op.record = ucch_flight_begin(&about, 0, t->op.started, !t->op.late);
}

/* True if a peer is alive and has not closed the connection: a process that was stopped first reads what has come
 * meanwhile. Copies by the kernel, for us or libucp, name the process by its pid, which may be reused after its end. */
static int is_there_locked(ucch_peer *peer) {
    double now = ucch_now();
    if (now - peer->read > UCCH_RMA_FRESH_S) {
        peer->read = now;
        for (int i = 0; i < LOOKS && peer->ep && ucp_worker_progress(peer->at->worker); i++)
            ;
    }
    return !ucch_peer_status(peer) && peer->ep;
}

/* Begin, when `stream` reaches this point if there is one. Returns 1 if the transfer is complete, 0 if under way, or a
 * failure. */
int ucch_transfer_begin(ucch_transfer *t, double timeout, int has_stream, void *stream) {
    int status = 0;
    if (has_stream) {
        UCCH_ON_DEVICE;
        status = ucch_gate_enter(&t->gate, stream);
    }
    if (status) return status;
    UCCH_LOCKED;
    int is_wait = t->is.what == UCCH_RMA_AWAIT;
    if (!is_wait && !is_there_locked(t->peer)) status = UCCH_FAIL_PEER;
    if (t->is.target && t->is.target->is_stale) status = UCCH_FAIL_STALE;
    if (t->is.target && !t->is.target->peer) status = UCCH_FAIL_PEER; /* closed since, with the connection */
    if (!status) {
        begin_locked(t, timeout);
        advance_locked(&t->op);
        finish_short_locked(t);
        status = t->op.state == UCCH_DONE && t->has_left;
        if (t->op.state == UCCH_ACTIVE && !is_wait) record_locked(t);
        if (!status) ucch_wake_locked();
    }
    return status;
}

/* Have the kernel copy one short piece between host memories of two processes. libucp would do the same, half a
 * microsecond slower. Returns 1 if copied. On a failure libucp does it from then on, and reports the error. */
static int copy_locked(ucch_peer *peer, int what, const ucch_region *local, const ucch_target *target, uint64_t mine,
                       uint64_t theirs, uint64_t bytes) {
    if (!peer->by_kernel || bytes > DIRECT_BYTES || local->on_device || target->on_device) return 0;
    if (!is_there_locked(peer) || !target->peer || target->is_stale) return 0;
    struct iovec here = {local->base + mine, bytes}, there = {(void *)(uintptr_t)(target->base + theirs), bytes};
    ssize_t n = what == UCCH_RMA_PUT ? process_vm_writev(peer->pid, &here, 1, &there, 1, 0)
                                     : process_vm_readv(peer->pid, &here, 1, &there, 1, 0);
    peer->by_kernel = n == (ssize_t)bytes;
    if (!peer->by_kernel) return 0;
    peer->counts[what]++;
    peer->counts[UCCH_RMA_BYTES] += bytes;
    return 1;
}

/* Begin a transfer of one piece. Returns the transfer, 1 if it is complete, or 0 if the arguments do not fit or it
 * cannot begin. */
uintptr_t ucch_transfer_piece(ucch_peer *peer, int what, ucch_region *local, ucch_target *target, uint64_t mine,
                              uint64_t theirs, uint64_t bytes, double timeout) {
    int fits = local->at == peer->at && target->peer == peer && ucch_pieces_outside(local->bytes, 1, &mine, &bytes) < 0;
    fits = fits && ucch_pieces_outside(target->bytes, 1, &theirs, &bytes) < 0;
    if (!fits) return 0;
    ucch_lock();
    int done = copy_locked(peer, what, local, target, mine, theirs, bytes);
    ucch_unlock();
    if (done) return 1;
    ucch_transfer *t =
        ucch_transfer_new(peer->at, peer, &(ucch_order){.what = what, .local = local, .target = target, .n = 1});
    if (!t) return 0;
    t->piece[0] = mine;
    t->piece[1] = theirs;
    t->piece[2] = bytes;
    t->is.mine = &t->piece[0];
    t->is.theirs = &t->piece[1];
    t->is.lengths = &t->piece[2];
    int status = ucch_transfer_begin(t, timeout, 0, NULL);
    if (!status) return (uintptr_t)t;
    ucch_transfer_free(t);
    return status > 0;
}

/* True if the transfer is short enough to hold the GIL. */
int ucch_transfer_is_short(const ucch_region *local, const ucch_target *target, uint64_t bytes) {
    return bytes <= SHORT_BYTES && !local->on_device && !target->on_device;
}

/* Let a stream wait for the transfer's end. Returns 1, or 0 if it has ended or streams cannot wait. */
int ucch_transfer_hold(ucch_transfer *t, void *stream) {
    ucch_lock();
    int may = ucch_may_hold() && t->op.state == UCCH_ACTIVE && !t->held.held;
    int held = may && ucch_gate_promise_locked(&t->held);
    ucch_unlock();
    if (!held) return 0;
    UCCH_ON_DEVICE;
    if (!ucch_gate_wait(&t->held, stream)) return 1;
    ucch_lock();
    ucch_gate_leave_locked(&t->held);
    ucch_unlock();
    return 0;
}

/* True if libucp or a stream still uses the transfer and its memory. */
int ucch_transfer_held(ucch_transfer *t) {
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    return t->op.state == UCCH_ACTIVE || t->in_flight || ucch_gate_due(&t->gate);
}

void ucch_transfer_free(ucch_transfer *t) {
    ucch_gate_free(&t->gate);
    ucch_gate_free(&t->held);
    free(t->lists);
    free(t->link);
    free(t);
}

/* PULL: a peer asks for data of a region. */
void ucch_pull_asked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_region *region = ucch_region_of(peer->at, h->region);
    size_t n = h->count, each = n * sizeof(uint64_t);
    uint64_t *lists = region && bytes == 3 * each && n ? malloc(bytes) : NULL;
    int status = !region ? UCCH_FAIL_STALE : lists ? 0 : UCCH_FAIL_MEMORY;
    if (lists) memcpy(lists, data, bytes);
    if (!status && ucch_pieces_outside(region->bytes, n, lists, lists + 2 * n) >= 0) status = UCCH_FAIL_RANGE;
    ucch_order order = {.what = UCCH_RMA_PUT, .local = region, .region = h->other, .n = n, .mine = lists};
    ucch_transfer *t = status ? NULL : ucch_transfer_new(NULL, peer, &order);
    if (!t) {
        free(lists);
        ucch_header no = {.what = UCCH_PULLED, .serial = h->serial, .status = status ? status : UCCH_FAIL_MEMORY};
        ucch_tell_locked(peer, no, NULL, 0);
        return;
    }
    t->lists = lists;
    t->is.theirs = lists + n;
    t->is.lengths = lists + 2 * n;
    t->asked = h->serial;
    begin_locked(t, 0);
}
