/* Tagged point-to-point messages over UCP. */
#include <sched.h>
#include <stdlib.h>

#include "ucch.h"

#define ATTR_CALLBACK 0x2
#define ATTR_USER_DATA 0x4
#define ATTR_DATATYPE 0x8
#define ATTR_MEMORY_TYPE 0x40
#define ATTR_RECV_INFO 0x80
#define BYTES 8 /* ucp_dt_make_contig(1) */
#define UCS_TRUNCATED (-9)
#define UCS_CANCELED (-16)
#define UCS_OK 0
#define IS_STATUS(p) ((uintptr_t)(p) >= (uintptr_t)-100)
/* Seconds for which a receive goes on hoping after its sender has ended well: what it sent may still be on its way. */
#define LEFT_GRACE_S 5

struct ucch_message {
    ucch_op op;
    ucp_worker_h worker;
    void *request;
    ucp_tag_recv_info_t info;
    ucch_board *board; /* whose slot `peer` says how the other side is; NULL = not known */
    int peer;
    double left; /* when the peer was first seen to have ended; 0 = not yet */
};

ucch_message *ucch_message_new(void) {
    ucch_message *m = calloc(1, sizeof(*m));
    if (m)
        m->op.kind = UCCH_IS_MESSAGE;
    return m;
}

void ucch_message_free(ucch_message *m) {
    free(m);
}

ucch_op *ucch_message_op(ucch_message *m) {
    return &m->op;
}

static void complete_locked(ucch_message *m, int status) {
    if (m->op.state != UCCH_ACTIVE)
        return;
    if (status == UCS_TRUNCATED)
        status = UCCH_FAIL_TRUNCATED;
    else if (status == UCS_CANCELED)
        status = m->left ? UCCH_FAIL_PEER : UCCH_FAIL_CANCELLED;
    ucch_op_end_locked(&m->op, status, -1, -1);
}

static void sent(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    ucch_message *m = data;
    m->request = NULL;
    complete_locked(m, status);
}

static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    ucch_message *m = data;
    m->info = *info;
    sent(request, status, data);
}

static int begun_locked(ucch_message *m, void *p) {
    if (p == NULL)
        complete_locked(m, UCS_OK);
    else if (IS_STATUS(p))
        complete_locked(m, (int)(intptr_t)p);
    else if (m->op.state == UCCH_ACTIVE)
        m->request = p;
    return m->op.state == UCCH_FAILED ? m->op.error.status : 0;
}

static ucp_request_param_t params(ucch_message *m, void *callback, int mem_type) {
    ucp_request_param_t p = {
        .op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA | ATTR_DATATYPE | ATTR_MEMORY_TYPE,
        .cb = callback,
        .datatype = BYTES,
        .user_data = m,
        .memory_type = mem_type,
    };
    return p;
}

int ucch_send(ucch_message *m, ucp_worker_h worker, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
              int mem_type, int sync, double timeout) {
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucp_request_param_t p = params(m, sent, mem_type);
    m->worker = worker;
    m->request = NULL;
    m->left = 0;
    m->info = (ucp_tag_recv_info_t){tag, bytes};
    ucch_lock();
    ucch_op_begin_locked(&m->op, timeout);
    int status = begun_locked(m, sync ? ucp_tag_send_sync_nbx(ep, buffer, bytes, tag, &p)
                                      : ucp_tag_send_nbx(ep, buffer, bytes, tag, &p));
    ucch_unlock();
    return status;
}

int ucch_message_send_locked(ucch_message *m, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
                             int mem_type) {
    ucp_request_param_t p = params(m, sent, mem_type);
    m->request = NULL;
    ucch_op_begin_locked(&m->op, 0);
    return begun_locked(m, ucp_tag_send_nbx(ep, buffer, bytes, tag, &p));
}

int ucch_message_flush_locked(ucch_message *m, ucp_ep_h ep, double timeout) {
    ucp_request_param_t p = params(m, sent, 0);
    p.op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA;
    m->request = NULL;
    m->left = 0;
    ucch_op_begin_locked(&m->op, timeout);
    return begun_locked(m, ucp_ep_flush_nbx(ep, &p));
}

int ucch_message_recv_locked(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag,
                             int mem_type) {
    ucp_request_param_t p = params(m, received, mem_type);
    m->worker = worker;
    m->request = NULL;
    ucch_op_begin_locked(&m->op, 0);
    return begun_locked(m, ucp_tag_recv_nbx(worker, buffer, bytes, tag, ~(uint64_t)0, &p));
}

static int receive(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag, uint64_t mask,
                   ucp_tag_message_h matched, int mem_type, double timeout) {
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucp_request_param_t p = params(m, received, mem_type);
    p.op_attr_mask |= ATTR_RECV_INFO; /* filled when the receive completes on the spot, without a callback */
    p.recv_info = &m->info;
    m->worker = worker;
    m->request = NULL;
    m->left = 0;
    ucch_lock();
    ucch_op_begin_locked(&m->op, timeout);
    int status = begun_locked(m, matched ? ucp_tag_msg_recv_nbx(worker, buffer, bytes, matched, &p)
                                         : ucp_tag_recv_nbx(worker, buffer, bytes, tag, mask, &p));
    ucch_unlock();
    return status;
}

int ucch_recv(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag, uint64_t mask,
              int mem_type, double timeout) {
    return receive(m, worker, buffer, bytes, tag, mask, NULL, mem_type, timeout);
}

int ucch_recv_matched(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, ucp_tag_message_h matched,
                      int mem_type, double timeout) {
    return receive(m, worker, buffer, bytes, 0, 0, matched, mem_type, timeout);
}

int ucch_probe(ucp_worker_h worker, uint64_t tag, uint64_t mask, int remove, uint64_t *sender_tag, size_t *bytes,
               ucp_tag_message_h *matched) {
    ucp_tag_recv_info_t info = {0, 0};
    ucch_lock();
    ucp_worker_progress(worker);
    *matched = ucp_tag_probe_nb(worker, tag, mask, remove, &info);
    ucch_unlock();
    *sender_tag = info.sender_tag;
    *bytes = info.length;
    return *matched != NULL;
}

void ucch_message_info(ucch_message *m, uint64_t *sender_tag, size_t *bytes) {
    *sender_tag = m->info.sender_tag;
    *bytes = m->info.length;
}

/* Receive a probed message into nothing: its sender must not wait for ever. */
static void discard_locked(ucp_worker_h worker, ucp_tag_message_h matched) {
    ucp_request_param_t p = {.op_attr_mask = ATTR_DATATYPE, .datatype = BYTES};
    void *request = ucp_tag_msg_recv_nbx(worker, NULL, 0, matched, &p);
    if (request && !IS_STATUS(request))
        ucp_request_free(request);
}

void ucch_discard(ucp_worker_h worker, ucp_tag_message_h matched) {
    ucch_lock();
    discard_locked(worker, matched);
    ucch_unlock();
}

/* Throw away what has arrived under such tags and was never received; returns how many messages that were. */
int ucch_discard_all(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    ucp_tag_recv_info_t info;
    ucp_tag_message_h matched;
    int n = 0;
    ucch_lock();
    ucp_worker_progress(worker);
    while ((matched = ucp_tag_probe_nb(worker, tag, mask, 1, &info)) != NULL) {
        discard_locked(worker, matched);
        n++;
    }
    ucp_worker_progress(worker); /* what tells the senders so */
    ucch_unlock();
    return n;
}

/* Let a message fail when its peer is gone. `peer` is a slot of the board, UCCH_ALL_PEERS for a receive from anyone
 * where everyone has a slot. The board outlives what is in flight. */
void ucch_message_watch(ucch_message *m, ucch_board *board, int peer) {
    m->board = board;
    m->peer = peer;
}

/* A peer that died fails its messages at once. One that ended well may have sent before, so that a receive from it
 * fails later, and only if nothing has matched it: only such a receive can be cancelled. */
int ucch_message_check_locked(ucch_message *m, double now) {
    int fate = m->board ? ucch_board_fate(m->board, m->peer) : 0;
    if (fate == UCCH_DIED)
        return UCCH_FAIL_PEER;
    if (fate == UCCH_LEFT) {
        if (m->left == 0)
            m->left = now;
        else if (now - m->left > LEFT_GRACE_S && m->request)
            ucp_request_cancel(m->worker, m->request);
    }
    return 0;
}

/* Whether libucp still uses the message and its buffer, although it has ended for us. */
int ucch_message_held(ucch_message *m) {
    ucch_lock();
    int held = m->op.state == UCCH_ACTIVE || m->request != NULL;
    ucch_unlock();
    return held;
}

/* A receive is taken out of the matching queue; a send stays libucp's until its endpoint closes, and the callback then
 * finds the message no longer active. The owner keeps message and buffer alive (Python never frees abandoned ones). */
void ucch_message_abandon_locked(ucch_message *m) {
    if (m->request)
        ucp_request_cancel(m->worker, m->request);
}

void ucch_message_cancel(ucch_message *m) {
    ucch_lock();
    if (m->op.state == UCCH_ACTIVE && m->request)
        ucp_request_cancel(m->worker, m->request);
    ucch_unlock();
}

ucp_ep_h ucch_ep_new(ucp_worker_h worker, const void *address, int *status) {
    /* Error mode NONE: with PEER, ROCm IPC and default shared memory drop out (docs/native.md). */
    ucp_ep_params_t p = {.field_mask = 0x1 | 0x2, .address = address, .err_mode = 0};
    ucp_ep_h ep = NULL;
    ucch_lock();
    *status = ucp_ep_create(worker, &p, &ep);
    ucch_unlock();
    return *status ? NULL : ep;
}

int ucch_ep_close(ucp_worker_h worker, ucp_ep_h ep, double timeout) {
    ucp_request_param_t p = {0};
    double until = ucch_now() + timeout;
    ucch_lock();
    void *request = ucp_ep_close_nbx(ep, &p);
    int status = 0;
    if (IS_STATUS(request))
        status = (int)(intptr_t)request;
    else if (request) {
        while ((status = ucp_request_check_status(request)) == 1 && ucch_now() < until) {
            ucp_worker_progress(worker);
            ucch_unlock();
            sched_yield();
            ucch_lock();
        }
        ucp_request_free(request);
    }
    ucch_unlock();
    return status;
}
