/* Messages whose data goes through a window: over libucp goes a token that says where it is, so that these messages are
 * matched with all others, by libucp and in order. The receiver of any message may get one; it tells by the tag. */
#include <stdlib.h>

#include "message.h"

/* Rounds of progress until a token that has begun to arrive has arrived: it is shorter than any eager limit. */
#define ROUNDS 100000
/* What a probe took out of libucp's queue, to look at its length, and nobody has received yet; oldest first. */
typedef struct found {
    ucp_worker_h worker;
    uint64_t tag;
    ucch_token token;
    struct found *next;
} found;

static found *looked_at;

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

static int transfer_of(ucch_message *m) {
    if (!m->transfer)
        m->transfer = ucch_transfer_new();
    return m->transfer ? 0 : UCCH_FAIL_MEMORY;
}

/* Send `bytes` of data by way of this process's window; `timeout` as that of any message. */
int ucch_message_offer_locked(ucch_message *m, ucp_ep_h ep, const void *data, size_t bytes, uint64_t tag, int on_device,
                              double timeout) {
    ucp_request_param_t p = ucch_message_params(m, token_sent, 0);
    m->request = NULL;
    m->moved = 1;
    ucch_op_begin_locked(&m->op, timeout);
    int status = transfer_of(m);
    if (!status)
        status = ucch_transfer_offer_locked(m->transfer, data, bytes, on_device, &m->token);
    if (status) {
        ucch_message_end_locked(m, status);
        return status;
    }
    m->moving = 1;
    void *request = ucp_tag_send_nbx(ep, &m->token, sizeof(m->token), tag | UCCH_TOKEN_TAG, &p);
    if (request && IS_STATUS(request)) {
        m->moving = 0;
        ucch_transfer_abort_locked(m->transfer);
        return ucch_message_begun_locked(m, request);
    }
    if (m->op.state == UCCH_ACTIVE)
        m->request = request;
    return 0;
}

int ucch_offer(ucch_message *m, ucp_worker_h worker, ucp_ep_h ep, const void *data, size_t bytes, uint64_t tag,
               int on_device, double timeout) {
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    m->worker = worker;
    m->left = 0;
    m->info = (ucp_tag_recv_info_t){tag, bytes};
    ucch_lock();
    int status = ucch_message_offer_locked(m, ep, data, bytes, tag, on_device, timeout);
    ucch_unlock();
    return status;
}

/* ---- receiving ---- */

/* Where the data of a token belongs, if one comes in: `data` with room for `bytes`. What comes as a plain message goes
 * to the memory that the receive names. */
void ucch_message_tokens(ucch_message *m, void *data, size_t bytes, int on_device) {
    m->tokens = 1;
    m->data = data;
    m->room = bytes;
    m->on_device = on_device;
}

/* Receive a token of a known sender's, and then its data. */
int ucch_message_expect_locked(ucch_message *m, ucp_worker_h worker, void *data, size_t bytes, uint64_t tag,
                               int on_device) {
    ucch_message_tokens(m, data, bytes, on_device);
    return ucch_message_recv_locked(m, worker, NULL, 0, tag | UCCH_TOKEN_TAG, 0);
}

/* Begin to fetch what the message's token is about: 0, or a failure. */
int ucch_token_arrived_locked(ucch_message *m) {
    m->info.sender_tag &= ~UCCH_TOKEN_TAG;
    m->info.length = m->token.bytes;
    int status = transfer_of(m);
    if (status)
        ucch_token_decline_locked(&m->token);
    else
        status = ucch_transfer_accept_locked(m->transfer, m->data, m->room, m->on_device, &m->token);
    m->moving = m->moved = !status;
    return status;
}

/* Move on with the data of a message: 1 if it has ended. */
int ucch_message_pump_locked(ucch_message *m) {
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

static void read_locked(ucp_worker_h worker, ucp_tag_message_h matched, ucch_token *token) {
    ucp_request_param_t p = {.op_attr_mask = ATTR_DATATYPE, .datatype = BYTES};
    void *request = ucp_tag_msg_recv_nbx(worker, token, sizeof(*token), matched, &p);
    if (!request || IS_STATUS(request))
        return;
    for (int i = 0; i < ROUNDS && ucp_request_check_status(request) == 1; i++)
        ucp_worker_progress(worker);
    ucp_request_free(request);
}

static found **find_locked(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    found **at = &looked_at;
    while (*at && ((*at)->worker != worker || ((*at)->tag & mask) != (tag & mask)))
        at = &(*at)->next;
    return at;
}

static found *take_locked(found **at) {
    found *f = *at;
    *at = f->next;
    return f;
}

/* Take a token out of libucp's queue and put it at the end of ours. */
static found *keep_locked(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    ucp_tag_recv_info_t info;
    found **at = &looked_at, *f = calloc(1, sizeof(*f));
    ucp_tag_message_h matched = f ? ucp_tag_probe_nb(worker, tag, mask, 1, &info) : NULL;
    if (!matched) {
        free(f);
        return NULL;
    }
    f->worker = worker;
    f->tag = info.sender_tag;
    read_locked(worker, matched, &f->token);
    while (*at)
        at = &(*at)->next;
    return *at = f;
}

/* A message that a matching probe took out is libucp's handle, or one of ours with the lowest bit set. */
static found *ours(ucp_tag_message_h matched) {
    uintptr_t bits = (uintptr_t)matched;
    return bits & 1 ? (found *)(bits & ~(uintptr_t)1) : NULL;
}

/* Begin to receive what a probe found before, if that is what is wanted: 1, and the message is on its way. */
int ucch_token_found_locked(ucch_message *m, uint64_t tag, uint64_t mask, ucp_tag_message_h matched) {
    found *f = matched ? ours(matched) : NULL;
    if (!matched && looked_at) {
        found **at = find_locked(m->worker, tag, mask);
        f = *at ? take_locked(at) : NULL;
    }
    if (!f)
        return 0;
    m->info.sender_tag = f->tag;
    m->token = f->token;
    free(f);
    int status = ucch_token_arrived_locked(m);
    if (status)
        ucch_message_end_locked(m, status);
    return 1;
}

int ucch_probe(ucp_worker_h worker, uint64_t tag, uint64_t mask, int remove, uint64_t *sender_tag, size_t *bytes,
               ucp_tag_message_h *matched) {
    ucp_tag_recv_info_t info = {0, 0};
    ucch_lock();
    ucp_worker_progress(worker);
    found **at = find_locked(worker, tag, mask), *f = *at;
    *matched = NULL;
    if (!f) {
        *matched = ucp_tag_probe_nb(worker, tag, mask, 0, &info);
        if (*matched && (info.sender_tag & UCCH_TOKEN_TAG)) {
            f = keep_locked(worker, tag, mask);
            at = find_locked(worker, tag, mask);
        } else if (*matched && remove)
            *matched = ucp_tag_probe_nb(worker, tag, mask, 1, &info);
    }
    if (f) {
        info = (ucp_tag_recv_info_t){f->tag & ~UCCH_TOKEN_TAG, f->token.bytes};
        *matched = (ucp_tag_message_h)((uintptr_t)f | 1);
        if (remove)
            take_locked(at);
    }
    ucch_unlock();
    *sender_tag = info.sender_tag;
    *bytes = info.length;
    return *matched != NULL;
}

static void decline_locked(found *f) {
    ucch_token_decline_locked(&f->token);
    free(f);
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
    if (ours(matched))
        decline_locked(ours(matched));
    else
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
    for (found **at; *(at = find_locked(worker, tag, mask)); n++)
        decline_locked(take_locked(at));
    for (; (matched = ucp_tag_probe_nb(worker, tag, mask, 0, &info)) != NULL; n++) {
        found *f = info.sender_tag & UCCH_TOKEN_TAG ? keep_locked(worker, tag, mask) : NULL;
        if (f)
            decline_locked(take_locked(find_locked(worker, tag, mask)));
        else
            discard_locked(worker, ucp_tag_probe_nb(worker, tag, mask, 1, &info));
    }
    ucp_worker_progress(worker); /* what tells the senders so */
    ucch_unlock();
    return n;
}
