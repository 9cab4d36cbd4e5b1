/* The worker of one-sided communication: control messages that come in, the threads that see to them, notifications,
 * counters.
 *
 * What peers send is seen by the progress thread. While nothing comes it sleeps, and so does a thread of ours, until
 * the file of libucp's that says when something does. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/progress.h"
#include "rma/rma.h"

#define WHOLE 0x1
#define IS_RNDV ((uint64_t)1 << 17)
/* Attention goes on for as long after what came last. */
#define ARM_AFTER_S 1e-3
/* Rounds of progress at most before a worker is destroyed. */
#define DYING 1000
/* Of a counter, before they begin again: their numbers are those of an int. */
#define USES ((uint64_t)1 << 21)

/* ---- receiving ---- */

static void notify_locked(ucch_rma *at, const ucch_header *h, const void *data, size_t bytes) {
    uint64_t *counter = h->other ? ucch_rma_counter_of(at, h->other - 1) : NULL;
    if (counter) ++*counter;
    if (h->other && !bytes) return;
    ucch_notice *n = malloc(sizeof(*n) + bytes);
    if (!n) return;
    *n = (ucch_notice){.from = h->from, .bytes = bytes};
    if (bytes) memcpy(n->data, data, bytes);
    *at->last = n;
    at->last = &n->next;
    ucch_doorbell_ring();
}

static void deliver_locked(ucch_rma *at, const ucch_header *h, const void *data, size_t bytes) {
    ucch_peer *peer = ucch_peer_of(at, h->from);
    ucch_transfer *t = ucch_transfer_of(at, h->serial);
    if (!peer) return;
    if (h->what == UCCH_OPEN)
        ucch_open_asked_locked(peer, h);
    else if (h->what == UCCH_REVOKE)
        ucch_revoke_asked_locked(peer, h);
    else if (h->what == UCCH_NOTIFY)
        notify_locked(at, h, data, bytes);
    else if (h->what == UCCH_PULL)
        ucch_pull_asked_locked(peer, h, data, bytes);
    else if (h->what == UCCH_MEET)
        ucch_meet_asked_locked(peer, h, data, bytes);
    else if (h->what == UCCH_MET)
        ucch_met_locked(peer, h, data, bytes);
    else if (h->what == UCCH_HERE && bytes == sizeof(ucch_here))
        ucch_chunk_here_locked(peer, h, data);
    else if (h->what == UCCH_LEAVE)
        ucch_peer_lose(peer);
    else if (h->what == UCCH_TAKEN && (t = ucch_chunk_taken_locked(at, h)))
        ucch_transfer_answered_locked(t, h->status);
    else if (h->what == UCCH_REVOKED)
        ucch_revoked_locked(peer, h->region);
    else if (t && t->peer == peer && h->what != UCCH_TAKEN && h->what != UCCH_HERE)
        ucch_transfer_answered_locked(t, h->status);
}

typedef struct incoming {
    ucch_rma *at;
    ucch_header header;
    size_t bytes;
    char data[];
} incoming;

static void landed(void *request, ucs_status_t status, size_t bytes, void *data) {
    incoming *p = data;
    ucp_request_free(request);
    p->at->requests--;
    if (!status) deliver_locked(p->at, &p->header, p->data, p->bytes);
    ucch_attend_locked(p->at);
    free(p);
}

/* Receive what does not come at once. */
static ucs_status_t receive_locked(ucch_rma *at, const ucch_header *h, void *data, size_t bytes) {
    incoming *l = malloc(sizeof(*l) + bytes);
    if (!l) return UCS_ERR_INVALID_PARAM;
    *l = (incoming){at, *h, bytes};
    ucp_request_param_t p = ucch_ucp_params(landed, l, UCS_MEMORY_TYPE_HOST);
    void *request = ucp_am_recv_data_nbx(at->worker, data, l->data, bytes, &p);
    if (!request) deliver_locked(at, &l->header, l->data, bytes);
    if (!request || IS_STATUS(request))
        free(l);
    else
        at->requests++;
    return UCS_INPROGRESS;
}

/* True if a message may have so many bytes, and names an object that exists. */
static int is_sound(const ucch_header *h, size_t bytes) {
    static const size_t most[] = {[UCCH_HERE] = sizeof(ucch_here), [UCCH_PULL] = (size_t)24 * UCCH_RMA_ENTRIES,
                                  [UCCH_MEET] = UCCH_RMA_REACH,    [UCCH_MET] = UCCH_RMA_REACH,
                                  [UCCH_NOTIFY] = UCCH_RMA_NOTICE, [UCCH_PULLED] = 0};
    return h->version == UCCH_RMA_VERSION && h->what <= UCCH_PULLED && bytes <= most[h->what] &&
           (h->what != UCCH_NOTIFY || h->other <= (uint64_t)1 << 31);
}

static ucs_status_t come(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
                         const ucp_am_recv_param_t *param) {
    ucch_rma *at = arg;
    ucch_header h;
    if (header_bytes != sizeof(h)) return UCS_OK;
    memcpy(&h, header, sizeof(h));
    if (!is_sound(&h, bytes) || !ucch_peer_of(at, h.from)) return UCS_OK;
    int is_later = (param->recv_attr & IS_RNDV) != 0;
    ucch_attend_locked(at);
    if (is_later) return receive_locked(at, &h, data, bytes);
    deliver_locked(at, &h, data, bytes);
    return UCS_OK;
}

/* What peers have still sent to a worker that is about to go, of which libucp would print a warning otherwise. */
static ucs_status_t pass_over(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
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

static void ignore_locked(ucch_op *op, int status) { ucch_op_end_locked(op, status, -1, -1); }

static const ucch_op_kind attention = {UCCH_BY_WORKERS, attend_locked, NULL, ignore_locked};

static void *thread_main(void *arg) {
    ucch_rma *at = arg;
    struct pollfd files[2] = {{.fd = at->events, .events = POLLIN}, {.fd = at->calls[0], .events = POLLIN}};
    ucch_process_unbind_thread();
    for (int goes_on = 1; goes_on;) {
        char calls[64];
        if (poll(files, 2, -1) > 0 && files[1].revents && read(at->calls[0], calls, sizeof(calls)) < 0) break;
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

/* ---- its life ---- */

static int start_thread(ucch_rma *at) {
    int status = ucp_worker_get_efd(at->worker, &at->events);
    if (status) return status;
    if (pipe2(at->calls, O_CLOEXEC | O_NONBLOCK))
        return UCCH_FAIL_MEMORY; /* writers have the engine's lock and must not block */
    ucch_lock();                 /* it looks at has_thread with the lock, as others do */
    int started = at->has_thread = pthread_create(&at->thread, NULL, thread_main, at) == 0;
    ucch_unlock();
    return started && ucch_progress_thread(1) == 0 ? 0 : UCCH_FAIL_MEMORY;
}

static int listen(ucch_rma *at, void *handler) {
    ucp_am_handler_param_t p = {.field_mask = 0xf, .id = UCCH_AM_ID, .flags = WHOLE, .cb = handler, .arg = at};
    UCCH_LOCKED;
    return ucp_worker_set_am_recv_handler(at->worker, &p);
}

/* Let a worker take part, under a number that no other one has; NULL with a status where it cannot. */
ucch_rma *ucch_rma_new(ucp_worker_h worker, uint64_t uid, int by_hardware, int by_kernel, int *status) {
    ucch_rma *at = calloc(1, sizeof(*at));
    *status = at ? 0 : UCCH_FAIL_MEMORY;
    if (!at) return NULL;
    at->worker = worker;
    at->uid = uid;
    at->by_hardware = by_hardware;
    at->by_kernel = by_kernel;
    at->last = &at->notices;
    at->last_transfer = &at->transfers;
    at->attention.kind = &attention;
    ucch_cond_init(&at->calm);
    *status = listen(at, come);
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

/* Stop taking part: 0, or libucp still has something under way, and nothing of it may be freed, nor libucp's worker. */
int ucch_rma_stop(ucch_rma *at) {
    ucch_lock();
    if (at->attention.state == UCCH_ACTIVE) ucch_op_end_locked(&at->attention, 0, -1, -1);
    ucch_transfers_end_locked(at, NULL, UCCH_FAIL_CANCELLED, 0); /* waits for counters */
    ucch_rma_call_locked(at);
    at->has_thread = 0;
    ucch_unlock();
    pthread_join(at->thread, NULL);
    close(at->calls[0]);
    close(at->calls[1]);
    listen(at, pass_over);
    /* What libucp still has to send to a process that has died fails at once when it is tried. Nothing must be left
     * when the worker is destroyed: UCX 1.22 ends the process ("ucs_arbiter_group_is_empty"). */
    UCCH_LOCKED;
    for (int i = 0; i < DYING && ucp_worker_progress(at->worker); i++)
        ;
    for (ucch_peer *p = at->peers; p; p = p->next) {
        at->requests += p->closing && ucp_request_check_status(p->closing) == UCS_INPROGRESS;
        ucch_peer_forget_locked(p);
    }
    return at->requests;
}

/* After its worker has been destroyed. */
void ucch_rma_free(ucch_rma *at) {
    while (at->notices) {
        ucch_notice *n = at->notices;
        at->notices = n->next;
        free(n);
    }
    pthread_cond_destroy(&at->calm);
    free(at->reach);
    free(at);
}

/* ---- notifications and counters ---- */

/* Take the notification that came first: its length, or -1 where there is none. */
int64_t ucch_notice_take(ucch_rma *at, uint64_t *from, void *data) {
    ucch_lock();
    ucch_notice *n = at->notices;
    if (n && !(at->notices = n->next)) at->last = &at->notices;
    ucch_unlock();
    if (!n) return -1;
    int64_t bytes = (int64_t)n->bytes;
    *from = n->from;
    memcpy(data, n->data, n->bytes);
    free(n);
    return bytes;
}

uint64_t ucch_rma_counter(ucch_rma *at, int number) {
    uint64_t *counter = ucch_rma_counter_of(at, (uint64_t)number);
    return counter ? __atomic_load_n(counter, __ATOMIC_ACQUIRE) : 0;
}

/* End a counter's use, so that what is still on its way to it counts for nothing: its number in the next one. */
int ucch_rma_counter_next(ucch_rma *at, int number) {
    UCCH_LOCKED;
    uint64_t which = (uint64_t)number % UCCH_RMA_COUNTERS, use = ((uint64_t)number / UCCH_RMA_COUNTERS + 1) % USES;
    at->uses[which] = use;
    at->counters[which] = 0;
    return (int)(use * UCCH_RMA_COUNTERS + which);
}
