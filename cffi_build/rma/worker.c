/* The worker of one-sided communication: incoming control messages, its threads, notifications and counters.
 *
 * The progress thread handles what peers send. While nothing comes it sleeps; the worker's own thread then waits on
 * libucp's event descriptor. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "rma/rma.h"

#define FORCE 0x1
/* Seconds that attention goes on after the last message. */
#define ARM_AFTER_S 1e-3
/* Most rounds of progress before a worker is destroyed. */
#define DYING 1000
/* Messages that are kept of peers with which this process has not connected yet. */
#define MOST_EARLY 256
/* Uses of a counter before their numbers repeat: a number must fit an int. */
#define USES ((uint64_t)1 << 21)
/* Limit of a counter's number with its use. */
#define MOST_COUNTER ((uint64_t)1 << 31)

/* ---- receiving ---- */

static void notify_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_rma *at = peer->at;
    if (h->other > MOST_COUNTER) return;
    uint64_t *counter = h->other ? ucch_rma_counter_of(at, h->other - 1) : NULL;
    if (counter) UCCH_STORE(counter, *counter + 1); /* read without the lock */
    if (h->other && !bytes) return;
    ucch_notification *n = malloc(sizeof(*n) + bytes);
    if (!n) at->lost++;
    if (!n) return;
    *n = (ucch_notification){.from = h->from, .bytes = bytes};
    if (bytes) memcpy(n->data, data, bytes);
    *at->last = n;
    at->last = &n->next;
    ucch_doorbell_ring();
}

static void leave_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_peer_lose(peer);
}

static void taken_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_transfer *t = ucch_chunk_taken_locked(peer, h);
    if (t) ucch_transfer_answered_locked(t, h->status);
}

static void answered_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_transfer *t = ucch_transfer_of(peer->at, h->serial);
    if (t && t->peer == peer) ucch_transfer_answered_locked(t, h->status);
}

/* Handler of each kind of message, and the most bytes that it may have. */
static const struct {
    void (*deliver)(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes);
    size_t most;
} kinds[] = {
    [UCCH_OPEN] = {ucch_open_asked_locked, 0},
    [UCCH_REVOKE] = {ucch_revoke_asked_locked, 0},
    [UCCH_HERE] = {ucch_chunk_here_locked, sizeof(ucch_here)},
    [UCCH_PULL] = {ucch_pull_asked_locked, (size_t)24 * UCCH_RMA_ENTRIES},
    [UCCH_MEET] = {ucch_meet_asked_locked, UCCH_RMA_REACH},
    [UCCH_NOTIFY] = {notify_locked, UCCH_RMA_NOTICE},
    [UCCH_LEAVE] = {leave_locked, 0},
    [UCCH_OPENED] = {answered_locked, 0},
    [UCCH_REVOKED] = {ucch_revoked_locked, 0},
    [UCCH_TAKEN] = {taken_locked, 0},
    [UCCH_MET] = {ucch_met_locked, UCCH_RMA_REACH},
    [UCCH_PULLED] = {answered_locked, 0},
};

static int was_closed(const ucch_rma *at, uint64_t uid) {
    const ucch_peer *p = at->peers;
    while (p && (p->uid != uid || p->ep))
        p = p->next;
    return p != NULL;
}

/* Keep a message until this process has connected with its sender, which may be first. What a closed peer had still
 * sent is not kept. */
static void keep_locked(ucch_rma *at, const ucch_header *h, const void *data, size_t bytes) {
    ucch_packet m = {h, sizeof(*h), (void *)data, bytes, 0};
    if (was_closed(at, h->from) || bytes > UCCH_RMA_NOTICE) return;
    if (!ucch_early_keep(&at->early, h->from, &m, MOST_EARLY)) at->lost += h->what == UCCH_NOTIFY;
}

static void deliver_locked(ucch_rma *at, const ucch_header *h, const void *data, size_t bytes) {
    ucch_peer *peer = ucch_peer_of(at, h->from);
    if (peer && peer->is_known)
        kinds[h->what].deliver(peer, h, data, bytes);
    else
        keep_locked(at, h, data, bytes);
}

static ucs_status_t on_active_message(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
                                      const ucp_am_recv_param_t *param) {
    ucch_rma *at = arg;
    ucch_header h;
    if (header_bytes != sizeof(h)) return UCS_OK;
    memcpy(&h, header, sizeof(h));
    int fits = h.version == UCCH_RMA_VERSION && h.what <= UCCH_PULLED && bytes <= kinds[h.what].most;
    if (!fits || param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) return UCS_OK;
    ucch_attend_locked(at);
    deliver_locked(at, &h, data, bytes);
    return UCS_OK;
}

/* Discards what peers still send to a worker that is about to be destroyed; libucp would print a warning. */
static ucs_status_t discard_message(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
                                    const ucp_am_recv_param_t *param) {
    return UCS_OK;
}

/* ---- attention ---- */

static int attend_locked(ucch_op *op) {
    ucch_rma *at = (ucch_rma *)((char *)op - offsetof(ucch_rma, attention));
    int busy = ucch_staged_poll_locked(at);
    double now = ucch_now();
    if (busy) at->heard = now;
    if (now - at->heard > ARM_AFTER_S && ucp_worker_arm(at->worker) == 0) {
        ucch_op_end_locked(op, 0, -1, -1);
        pthread_cond_broadcast(&at->calm);
    }
    return busy > 1;
}

/* It has no deadline, and is never abandoned. */
static const ucch_op_kind attention = {.way = UCCH_BY_WORKERS, .advance_locked = attend_locked};

static void *thread_main(void *arg) {
    ucch_rma *at = arg;
    struct pollfd files[2] = {{.fd = at->events, .events = POLLIN}, {.fd = at->called, .events = POLLIN}};
    ucch_process_unbind_thread();
    prctl(PR_SET_NAME, "ucch-rma");
    for (int goes_on = 1; goes_on;) {
        eventfd_t calls;
        if (poll(files, 2, -1) > 0 && files[1].revents && eventfd_read(at->called, &calls)) break;
        ucch_lock();
        ucch_attend_locked(at);
        while (at->has_thread && at->attention.state == UCCH_ACTIVE && !at->leaving)
            ucch_sleep_locked(&at->calm, 0);
        goes_on = at->has_thread;
        ucch_unlock();
        ucch_give_back(at);
    }
    return NULL;
}

/* ---- peers ---- */

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) { ((ucch_peer *)arg)->status = status; }

/* Connect with a peer. `process`: its pid if on this host, in the same pid namespace; libucp then uses shared memory,
 * which does not report a death. Operations with a peer on another host that wait longer than `patience` seconds (0: no
 * limit) fail if the link there is cut. NULL with a status on failure. */
ucch_peer *ucch_peer_new(ucch_rma *at, uint64_t uid, const void *address, size_t bytes, int process, double patience,
                         int *status) {
    ucch_peer *peer = calloc(1, sizeof(*peer) + bytes);
    *status = peer ? 0 : UCCH_FAIL_MEMORY;
    if (!peer) return NULL;
    peer->at = at;
    peer->uid = uid;
    peer->pid = process;
    peer->patience = patience;
    peer->bytes = bytes;
    memcpy(peer->address, address, bytes);
    peer->by_errors = !process;
    if (process) ucch_process_meet(process);
    peer->by_kernel = !peer->by_errors && at->by_kernel && process != getpid();
    ucch_lock();
    if (ucch_peer_of(at, uid)) *status = UCCH_FAIL_ARGUMENT;
    if (!*status) *status = ucch_ucp_connect(at->worker, address, peer->by_errors ? on_error : NULL, peer, &peer->ep);
    if (!*status) {
        peer->next = at->peers;
        at->peers = peer;
    }
    ucch_unlock();
    if (!*status) return peer;
    free(peer);
    return NULL;
}

/* Handle what the peer has sent before this process knew it. */
void ucch_peer_known(ucch_peer *peer) {
    UCCH_LOCKED;
    peer->is_known = 1;
    for (ucch_packet *m; (m = ucch_early_take(&peer->at->early, peer->uid)); free(m))
        deliver_locked(peer->at, m->header, m->data, m->bytes);
}

/* The peer counts as dead from now on. */
void ucch_peer_lose(ucch_peer *peer) {
    UCCH_LOCKED;
    if (!peer->status) peer->status = UCCH_FAIL_PEER;
    ucch_transfers_end_locked(peer->at, peer, UCCH_FAIL_PEER, 0);
}

/* Stop waiting for its connection to close. */
static void release_close_locked(ucch_peer *peer) {
    if (peer->closing) ucp_request_free(peer->closing);
    peer->closing = NULL;
}

/* Close the connection with a peer. It is freed with its worker, as libucp's requests refer to it. Transfers under way
 * with a dead peer are lost. */
void ucch_peer_leave(ucch_peer *peer, double timeout) {
    int is_gone = ucch_peer_status(peer) != 0;
    double until = ucch_now() + timeout;
    ucch_lock();
    ucch_transfers_end_locked(peer->at, peer, UCCH_FAIL_PEER, 1);
    ucch_unlock();
    while (ucch_staged_busy(peer) && ucch_now() < until)
        sched_yield(); /* the peer may use its slots again once this process has left */
    ucch_lock();
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (!t->users) ucch_target_return_locked(t);
    ucch_unlock();
    while (ucch_peer_leaving(peer) && ucch_now() < until)
        sched_yield(); /* and free its memory */
    ucch_lock();
    if (!is_gone) ucch_tell_locked(peer, (ucch_header){.what = UCCH_LEAVE}, NULL, 0);
    ucp_ep_h ep = peer->ep;
    peer->ep = NULL;
    ucch_peer_lose(peer);
    ucch_unlock();
    while (ucch_staged_busy(peer) && ucch_now() < until)
        sched_yield();
    if (!ucch_staged_busy(peer)) ucch_slots_free(peer);
    if (!ep || (is_gone && !peer->by_errors)) return;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = is_gone ? FORCE : 0};
    UCCH_LOCKED;
    void *request = ucp_ep_close_nbx(ep, &p);
    if (request && !IS_STATUS(request)) peer->closing = request;
    if (is_gone) release_close_locked(peer);
}

/* True once libucp has closed the connection with a peer that was left. */
int ucch_peer_left(ucch_peer *peer) {
    UCCH_LOCKED;
    if (peer->closing) ucp_worker_progress(peer->at->worker);
    if (peer->closing && ucp_request_check_status(peer->closing) == UCS_INPROGRESS) return 0;
    release_close_locked(peer);
    return 1;
}

/* Called after its worker has been destroyed. */
void ucch_peer_free(ucch_peer *peer) {
    ucch_lock();
    for (ucch_target *t = peer->targets; t; t = t->next)
        t->peer = NULL;
    UCCH_UNLINK(peer->at->peers, peer, next);
    ucch_unlock();
    if (!ucch_staged_busy(peer)) ucch_slots_free(peer);
    free(peer);
}

/* ---- start and stop ---- */

static int start_thread(ucch_rma *at) {
    int status = ucp_worker_get_efd(at->worker, &at->events);
    if (status) return status;
    at->called = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (at->called < 0) return UCCH_FAIL_MEMORY;
    ucch_lock(); /* has_thread is read with the lock */
    int started = at->has_thread = pthread_create(&at->thread, NULL, thread_main, at) == 0;
    ucch_unlock();
    if (started) return ucch_progress_thread(1) == 0 ? 0 : UCCH_FAIL_MEMORY;
    close(at->called);
    return UCCH_FAIL_MEMORY;
}

static int listen(ucch_rma *at, void *handler) {
    UCCH_LOCKED;
    return ucch_ucp_listen(at->worker, UCCH_AM_ID, handler, at);
}

/* Use a libucp worker for one-sided communication, with a unique uid; NULL with a status on failure. */
ucch_rma *ucch_rma_new(ucp_worker_h worker, uint64_t uid, int by_hardware, int by_kernel, int *status) {
    ucch_rma *at = calloc(1, sizeof(*at));
    *status = at ? 0 : UCCH_FAIL_MEMORY;
    if (!at) return NULL;
    at->worker = worker;
    at->uid = uid;
    at->losses = ucch_losses();
    at->by_hardware = by_hardware;
    at->by_kernel = by_kernel;
    at->last = &at->notifications;
    at->last_transfer = &at->transfers;
    at->attention.kind = &attention;
    ucch_cond_init(&at->calm);
    *status = listen(at, on_active_message);
    if (!*status) *status = start_thread(at);
    if (*status) {
        if (at->has_thread) ucch_rma_stop(at);
        free(at);
        return NULL;
    }
    UCCH_LOCKED;
    ucch_attend_locked(at);
    return at;
}

/* Stop. Returns 0, or not 0 if libucp still has requests: then nothing of it may be freed, nor the libucp worker. */
int ucch_rma_stop(ucch_rma *at) {
    ucch_lock();
    if (at->attention.state == UCCH_ACTIVE) ucch_op_end_locked(&at->attention, 0, -1, -1);
    ucch_transfers_end_locked(at, NULL, UCCH_FAIL_CANCELLED, 0); /* counters are waited for without a peer */
    ucch_rma_call_locked(at);
    at->has_thread = 0;
    ucch_unlock();
    pthread_join(at->thread, NULL);
    close(at->called);
    listen(at, discard_message);
    /* Sends to a dead process fail at once when tried. None may be left when the worker is destroyed: UCX 1.22 would
     * abort ("ucs_arbiter_group_is_empty"). */
    UCCH_LOCKED;
    for (int i = 0; i < DYING && ucp_worker_progress(at->worker); i++)
        ;
    for (ucch_peer *p = at->peers; p; p = p->next) {
        at->requests += p->closing && ucp_request_check_status(p->closing) == UCS_INPROGRESS;
        release_close_locked(p);
    }
    return at->requests;
}

/* Called after its worker has been destroyed. */
void ucch_rma_free(ucch_rma *at) {
    while (at->notifications) {
        ucch_notification *n = at->notifications;
        at->notifications = n->next;
        free(n);
    }
    ucch_early_drop(&at->early, UINT64_MAX);
    pthread_cond_destroy(&at->calm);
    free(at->reach);
    free(at);
}

/* ---- notifications and counters ---- */

/* Take the oldest notification. Returns its length, -1 if there is none, or, once, UCCH_FAIL_MEMORY if there was no
 * memory for some. */
int64_t ucch_notification_take(ucch_rma *at, uint64_t *from, void *data) {
    ucch_lock();
    int losses = ucch_losses(), lost = at->lost || losses != at->losses;
    ucch_notification *n = lost ? NULL : at->notifications;
    if (n && !(at->notifications = n->next)) at->last = &at->notifications;
    at->lost = 0;
    at->losses = losses;
    ucch_unlock();
    if (!n) return lost ? UCCH_FAIL_MEMORY : -1;
    int64_t bytes = (int64_t)n->bytes;
    *from = n->from;
    memcpy(data, n->data, n->bytes);
    free(n);
    return bytes;
}

uint64_t ucch_rma_counter(ucch_rma *at, int number) {
    uint64_t *counter = ucch_rma_counter_of(at, (uint64_t)number);
    return counter ? UCCH_LOAD(counter) : 0;
}

/* End a counter's use, so that notifications still on their way to it are ignored. Returns its number for the next
 * use. */
int ucch_rma_counter_next(ucch_rma *at, int number) {
    UCCH_LOCKED;
    uint64_t which = (uint64_t)number % UCCH_RMA_COUNTERS, use = ((uint64_t)number / UCCH_RMA_COUNTERS + 1) % USES;
    at->uses[which] = use;
    at->counters[which] = 0;
    return (int)(use * UCCH_RMA_COUNTERS + which);
}
