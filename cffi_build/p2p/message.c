/* Tagged point-to-point messages over UCP: their data, or a token for data that waits in a window (segment.c). */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "p2p/message.h"

#define ATTR_CALLBACK 0x2
#define ATTR_USER_DATA 0x4
#define ATTR_MEMORY_TYPE 0x40
#define ATTR_RECV_INFO 0x80
#define UCS_TRUNCATED (-9)
#define UCS_CANCELED (-16)
/* Seconds for which a receive goes on hoping after its sender has ended well: what it sent may still be on its way. */
#define LEFT_GRACE_S 5

ucch_message *ucch_message_new(void) {
    ucch_message *m = calloc(1, sizeof(*m));
    if (m)
        m->op.kind = UCCH_IS_MESSAGE;
    return m;
}

void ucch_message_free(ucch_message *m) {
    ucch_transfer_free(m->transfer);
    ucch_gate_free(&m->gate);
    free(m);
}

ucch_op *ucch_message_op(ucch_message *m) {
    return &m->op;
}

void ucch_message_end_locked(ucch_message *m, int status) {
    if (m->op.state != UCCH_ACTIVE)
        return;
    if (status == UCS_TRUNCATED)
        status = UCCH_FAIL_TRUNCATED;
    else if (status == UCS_CANCELED)
        status = m->left ? UCCH_FAIL_PEER : UCCH_FAIL_CANCELLED;
    if (m->transfer)
        ucch_transfer_over_locked(m->transfer);
    ucch_op_end_locked(&m->op, status, -1, -1);
}

static void sent(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    ucch_message *m = data;
    m->request = NULL;
    ucch_message_end_locked(m, status);
}

/* Where libucp is to put what comes in: a token needs its room, however little the caller has. */
void *ucch_message_landing(ucch_message *m, void *buffer, size_t *bytes) {
    m->landing = buffer;
    m->landing_room = *bytes;
    m->moving = m->moved = 0;
    if (!m->tokens || *bytes >= sizeof(m->token))
        return buffer;
    *bytes = sizeof(m->token);
    return &m->token;
}

static void arrived_locked(ucch_message *m, int status) {
    if (m->tokens && !status) {
        int is_short = m->landing_room < sizeof(m->token);
        if (m->info.sender_tag & UCCH_TOKEN_TAG) {
            if (!is_short)
                memcpy(&m->token, m->landing, sizeof(m->token));
            status = ucch_token_arrived_locked(m);
            if (!status)
                return;
        } else if (is_short && m->info.length > m->landing_room)
            status = UCS_TRUNCATED;
        else if (is_short)
            memcpy(m->landing, &m->token, m->info.length);
    }
    if (m->moving && !status) { /* a stream waits for it */
        status = ucch_transfer_landed_locked(m->transfer, m->landing, m->info.length);
        m->moved = 1;
        if (!status)
            return;
    }
    if (m->moving)
        ucch_transfer_abort_locked(m->transfer);
    m->moving = 0;
    ucch_message_end_locked(m, status);
}

static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    ucch_message *m = data;
    m->info = *info;
    ucp_request_free(request);
    m->request = NULL;
    if (m->op.state == UCCH_ACTIVE)
        arrived_locked(m, status);
}

static int settled(ucch_message *m) {
    return m->op.state == UCCH_FAILED ? m->op.error.status : 0;
}

int ucch_message_begun_locked(ucch_message *m, void *p) {
    if (p == NULL)
        ucch_message_end_locked(m, UCS_OK);
    else if (IS_STATUS(p))
        ucch_message_end_locked(m, (int)(intptr_t)p);
    else if (m->op.state == UCCH_ACTIVE)
        m->request = p;
    return settled(m);
}

/* As above, of a receive. */
static int posted_locked(ucch_message *m, void *p) {
    if (p != NULL)
        return ucch_message_begun_locked(m, p);
    arrived_locked(m, UCS_OK);
    return settled(m);
}

ucp_request_param_t ucch_message_params(ucch_message *m, void *callback, int mem_type) {
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
    ucch_start start = {.what = sync ? START_SYNC : START_SEND, .ep = ep, .bytes = bytes, .tag = tag};
    start.buffer = (void *)(uintptr_t)buffer;
    start.mem_type = mem_type;
    m->worker = worker;
    m->info = (ucp_tag_recv_info_t){tag, bytes};
    return ucch_later_begin(m, &start, timeout);
}

int ucch_message_send_locked(ucch_message *m, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
                             int mem_type) {
    ucp_request_param_t p = ucch_message_params(m, sent, mem_type);
    m->request = NULL;
    ucch_op_begin_locked(&m->op, 0);
    return ucch_message_begun_locked(m, ucp_tag_send_nbx(ep, buffer, bytes, tag, &p));
}

int ucch_message_flush_locked(ucch_message *m, ucp_ep_h ep, double timeout) {
    ucp_request_param_t p = ucch_message_params(m, sent, 0);
    p.op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA;
    m->request = NULL;
    m->left = 0;
    ucch_op_begin_locked(&m->op, timeout);
    return ucch_message_begun_locked(m, ucp_ep_flush_nbx(ep, &p));
}

static ucp_request_param_t receive_params(ucch_message *m, int mem_type) {
    ucp_request_param_t p = ucch_message_params(m, received, mem_type);
    p.op_attr_mask |= ATTR_RECV_INFO; /* filled when the receive completes on the spot, without a callback */
    p.recv_info = &m->info;
    return p;
}

int ucch_message_recv_locked(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag,
                             int mem_type) {
    ucp_request_param_t p = receive_params(m, mem_type);
    m->worker = worker;
    m->request = NULL;
    ucch_op_begin_locked(&m->op, 0);
    void *landing = ucch_message_landing(m, buffer, &bytes);
    return posted_locked(m, ucp_tag_recv_nbx(worker, landing, bytes, tag, ~(uint64_t)0, &p));
}

/* Hand a message that was begun to libucp, as it was asked for: 0, or a failure that has ended it. */
int ucch_message_issue_locked(ucch_message *m) {
    const ucch_start *s = &m->start;
    if (s->what == START_TOKEN) {
        ucch_offer offer = {
            .data = s->buffer, .bytes = s->bytes, .on_device = s->on_device, .dest = s->dest, .tag = s->tag};
        return ucch_message_offer_begun_locked(m, s->ep, &offer);
    }
    if (s->what == START_OFFERED)
        return ucch_token_send_locked(m, s->ep, s->tag);
    if (s->what == START_RECV) {
        ucp_request_param_t p = receive_params(m, s->mem_type);
        size_t bytes = s->bytes;
        void *landing = ucch_message_landing(m, s->buffer, &bytes);
        return posted_locked(m, ucp_tag_recv_nbx(m->worker, landing, bytes, s->tag, s->mask, &p));
    }
    ucp_request_param_t p = ucch_message_params(m, sent, s->mem_type);
    return ucch_message_begun_locked(m, s->what == START_SYNC
                                            ? ucp_tag_send_sync_nbx(s->ep, s->buffer, s->bytes, s->tag, &p)
                                            : ucp_tag_send_nbx(s->ep, s->buffer, s->bytes, s->tag, &p));
}

int ucch_recv(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag, uint64_t mask,
              int mem_type, double timeout) {
    ucch_start start = {.what = START_RECV, .buffer = buffer, .bytes = bytes, .tag = tag, .mask = mask};
    start.mem_type = mem_type;
    m->worker = worker;
    return ucch_later_begin(m, &start, timeout);
}

/* Receive what a matching probe has taken out of libucp's queue. */
int ucch_recv_matched(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, ucp_tag_message_h matched,
                      int mem_type, double timeout) {
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucp_request_param_t p = receive_params(m, mem_type);
    m->worker = worker;
    m->request = NULL;
    m->left = 0;
    ucch_lock();
    ucch_op_begin_locked(&m->op, timeout);
    void *landing = ucch_message_landing(m, buffer, &bytes);
    int status = posted_locked(m, ucp_tag_msg_recv_nbx(worker, landing, bytes, matched, &p));
    ucch_unlock();
    return status;
}

void ucch_message_info(ucch_message *m, uint64_t *sender_tag, size_t *bytes) {
    *sender_tag = m->info.sender_tag;
    *bytes = m->info.length;
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

/* Whether libucp or a stream still uses the message and its buffer, although it has ended for us. */
int ucch_message_held(ucch_message *m) {
    ucch_lock();
    int held = m->op.state == UCCH_ACTIVE || m->request != NULL;
    if (!held) {
        int before = ucch_device_enter();
        held = (m->transfer && ucch_transfer_busy_locked(m->transfer)) || ucch_gate_due(&m->gate);
        ucch_device_leave(before);
    }
    ucch_unlock();
    return held;
}

/* A receive is taken out of the matching queue; a send stays libucp's until its endpoint closes, and the callback then
 * finds the message no longer active. The owner keeps message and buffer alive (Python never frees abandoned ones). */
void ucch_message_abandon_locked(ucch_message *m) {
    if (m->waits && m->start.what == START_OFFERED) { /* nobody ever hears of it */
        ucch_token_decline_locked(&m->token);
        ucch_transfer_abort_locked(m->transfer);
    }
    if (m->moving) {
        ucch_transfer_abort_locked(m->transfer);
        m->moving = 0;
        ucch_message_end_locked(m, UCS_CANCELED);
    }
    ucch_later_forget_locked(m);
    if (m->request)
        ucp_request_cancel(m->worker, m->request);
}

void ucch_message_cancel(ucch_message *m) {
    ucch_lock();
    if (m->op.state == UCCH_ACTIVE && m->waits) {
        ucch_later_forget_locked(m);
        ucch_message_end_locked(m, UCS_CANCELED);
    } else if (m->op.state == UCCH_ACTIVE && m->op.come) { /* no stream is to take it */
        m->moving = 0;
        ucch_transfer_abort_locked(m->transfer);
        ucch_message_end_locked(m, UCS_CANCELED);
    } else if (m->op.state == UCCH_ACTIVE && m->request)
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
