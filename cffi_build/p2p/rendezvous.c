/* Messages whose data goes through a window: over libucp goes a token that says where it is, so that these messages are
 * matched with all others, by libucp and in order. The receiver of any message may get one; it tells by the tag. */
#include <stdlib.h>

#include "p2p/message.h"

/* Rounds of progress until a token that has begun to arrive has arrived: it is shorter than any eager limit. */
#define ROUNDS 100000

/* ---- sending ---- */

static void token_sent(void *request, ucs_status_t status, void *data) {
    ucch_message *m = data;
    ucp_request_free(request);
    m->request = NULL;
    if (status < 0 && m->op.state == UCCH_ACTIVE) {
        ucch_transfer_abort_locked(m->transfer);
        m->moving = 0;
        ucch_message_end_locked(m, status);
    }
}

int ucch_message_transfer(ucch_message *m) {
    if (!m->transfer)
        m->transfer = ucch_transfer_new();
    return m->transfer ? 0 : UCCH_FAIL_MEMORY;
}

/* Send data by way of this process's window; `timeout` as that of any message. */
int ucch_message_offer_locked(ucch_message *m, ucp_ep_h ep, const ucch_offer *offer, double timeout) {
    m->request = NULL;
    ucch_op_begin_locked(&m->op, timeout);
    return ucch_message_offer_begun_locked(m, ep, offer);
}

int ucch_message_offer_begun_locked(ucch_message *m, ucp_ep_h ep, const ucch_offer *offer) {
    m->moved = 1;
    int status = ucch_message_transfer(m);
    if (!status)
        status = ucch_transfer_offer_locked(m->transfer, offer, &m->token);
    if (status) {
        ucch_message_end_locked(m, status);
        return status;
    }
    return ucch_token_send_locked(m, ep, offer->tag);
}

/* Send the token of what has been offered: 0, or a failure, which has ended the message. */
int ucch_token_send_locked(ucch_message *m, ucp_ep_h ep, uint64_t tag) {
    ucp_request_param_t p = ucch_message_params(m, token_sent, 0);
    m->moving = m->moved = 1;
    ucch_transfer_offered_locked(m->transfer);
    void *request = ucp_tag_send_nbx(ep, &m->token, sizeof(m->token), tag | UCCH_TOKEN_TAG, &p);
    if (request && IS_STATUS(request)) {
        m->moving = 0;
        ucch_transfer_abort_locked(m->transfer);
        return ucch_message_begun_locked(m, request);
    }
    if (m->op.state == UCCH_ACTIVE)
        m->request = request;
    if (m->token.run && m->number)
        ucch_slips_tell(m->process, tag, m->number, m->token.run);
    return 0;
}

/* ---- receiving ---- */

/* Keep a queued message from the host: the caller will say which stream takes it. */
void ucch_message_later(ucch_message *m) {
    m->later = 1;
}

/* The message that is begun next is the `number`th under its tag between this process and another; both count, so that
 * their streams find each other. */
void ucch_message_number(ucch_message *m, uint64_t process, uint32_t number) {
    m->process = process;
    m->number = number;
}

/* Whether a stream may take the message now; if so, all is ready for that. */
static int take_ready_locked(ucch_message *m, ucch_expected *e, void *stream, int early) {
    int come = m->op.come, early_too = early && m->later && m->number && !m->waits && !m->moving && m->request;
    if (m->op.state != UCCH_ACTIVE || !(come || early_too) || ucch_message_transfer(m))
        return 0;
    *e = (ucch_expected){m->process, m->start.tag, m->number, m->data, m->room};
    if (come)
        e->sender = m->token.key;
    int ready = !ucch_transfer_expect_locked(m->transfer, e, stream);
    if (!ready)
        ucch_transfer_by_host_locked(m->transfer);
    m->op.come = 0;
    m->moving |= ready;
    return ready;
}

/* Let `stream` wait for the message, and have it in its place from then on: 1; or 0, and it is to be waited for. One
 * that has not come is only taken `early` where both sides have counted it; where it then does not come from a stream,
 * the host receives it, and the stream waits for that. */
int ucch_message_take(ucch_message *m, void *stream, int early) {
    ucch_expected expected;
    ucch_lock();
    int ready = take_ready_locked(m, &expected, stream, early);
    ucch_unlock();
    if (!ready)
        return 0;
    int before = ucch_device_enter(), status = ucch_take(m->transfer, &expected, stream);
    ucch_device_leave(before);
    if (!status)
        return 1;
    ucch_lock();
    if (m->op.state == UCCH_ACTIVE) {
        m->moving = 0;
        ucch_transfer_abort_locked(m->transfer);
        ucch_message_end_locked(m, status);
    }
    ucch_unlock();
    return status;
}

/* Where the data of a token belongs, if one comes in: `data` with room for `bytes`. What comes as a plain message goes
 * to the memory that the receive names. */
void ucch_message_tokens(ucch_message *m, void *data, size_t bytes, int on_device) {
    m->tokens = 1;
    m->data = data;
    m->room = bytes;
    m->on_device = on_device;
}

/* Begin to fetch what the message's token is about: 0, or a failure. */
int ucch_token_arrived_locked(ucch_message *m) {
    m->info.sender_tag &= ~UCCH_TOKEN_TAG;
    m->info.length = m->token.bytes;
    if (m->moving) { /* a stream waits for it */
        m->moved = 1;
        return ucch_transfer_met_locked(m->transfer, m->room, &m->token);
    }
    int status = ucch_message_transfer(m);
    if (status)
        ucch_token_decline_locked(&m->token);
    else
        status = ucch_transfer_accept_locked(m->transfer, m->data, m->room, m->on_device, &m->token);
    if (!status && m->later && ucch_transfer_queued(m->transfer)) {
        ucch_transfer_await_locked(m->transfer, m->data, m->on_device, &m->token);
        __atomic_store_n(&m->op.come, 1, __ATOMIC_RELEASE);
        if (m->op.heard)
            ucch_ring();
    }
    m->moving = m->moved = !status;
    return status;
}

/* Move on with the data of a message: 1 if it has ended. */
int ucch_rendezvous_pump_locked(ucch_message *m) {
    if (!m->moving)
        return 0;
    int status = ucch_transfer_pump_locked(m->transfer);
    if (!status || m->request)
        return 0;
    m->moving = 0;
    if (status < 0)
        ucch_transfer_abort_locked(m->transfer);
    ucch_message_end_locked(m, status < 0 ? status : UCS_OK);
    return 1;
}

/* Whether the data came, or went, through a window. */
int ucch_message_moved(ucch_message *m) {
    return m->moved;
}

/* ---- probing ---- */

/* Whether a message is there. `keys` are the processes of the communicator's ranks and `me` is this one's rank in it: a
 * token then counts as long as what it is about, and its bit of the tag tells it. NULL where there are no tokens. */
int ucch_probe(ucp_worker_h worker, uint64_t tag, uint64_t mask, int remove, const uint64_t *keys, int me,
               uint64_t *sender_tag, size_t *bytes, ucp_tag_message_h *matched) {
    ucp_tag_recv_info_t info = {0, 0};
    ucch_lock();
    ucp_worker_progress(worker);
    *matched = ucp_tag_probe_nb(worker, tag, mask, remove, &info);
    if (*matched && keys && (info.sender_tag & UCCH_TOKEN_TAG)) {
        uint64_t code = info.sender_tag & ~UCCH_TOKEN_TAG, source = (code & (UCCH_TOKEN_TAG - 1)) >> UCCH_SOURCE_BIT;
        info.length = ucch_window_waiting_locked(keys[source], code, me, remove);
    }
    ucch_unlock();
    *sender_tag = info.sender_tag;
    *bytes = info.length;
    return *matched != NULL;
}

/* Receive a message into nothing: its sender must not wait for ever. A token that does not come in time keeps its
 * place, which libucp may still write to. */
static void discard_locked(ucp_worker_h worker, ucp_tag_message_h matched, int is_token) {
    ucp_request_param_t p = {.op_attr_mask = ATTR_DATATYPE, .datatype = BYTES};
    ucch_token *token = is_token ? calloc(1, sizeof(*token)) : NULL;
    void *request = ucp_tag_msg_recv_nbx(worker, token, token ? sizeof(*token) : 0, matched, &p);
    int status = request ? IS_STATUS(request) ? (int)(intptr_t)request : 1 : 0;
    for (int i = 0; token && status == 1 && i < ROUNDS; i++) {
        ucp_worker_progress(worker);
        status = ucp_request_check_status(request);
    }
    if (request && !IS_STATUS(request))
        ucp_request_free(request);
    if (token && !status)
        ucch_token_decline_locked(token);
    if (status != 1)
        free(token);
}

void ucch_discard(ucp_worker_h worker, ucp_tag_message_h matched, int is_token) {
    ucch_lock();
    discard_locked(worker, matched, is_token);
    ucch_unlock();
}

/* Throw away what has arrived under such tags of ours and was never received; returns how many messages that were. */
int ucch_discard_all(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    ucp_tag_recv_info_t info;
    ucp_tag_message_h matched;
    int n = 0;
    ucch_lock();
    ucp_worker_progress(worker);
    for (; (matched = ucp_tag_probe_nb(worker, tag, mask, 1, &info)) != NULL; n++)
        discard_locked(worker, matched, (info.sender_tag & UCCH_TOKEN_TAG) != 0);
    ucp_worker_progress(worker); /* what tells the senders so */
    ucch_unlock();
    return n;
}
