/* Messages whose data goes through a window: over libucp goes a header that says where it is, so that these messages
 * are matched with all others, by libucp and in order. The receiver of any message may get one; it tells by the tag. */
#include <stdlib.h>

#include "p2p/message.h"

/* Rounds of progress until a header that has begun to arrive has arrived: it is shorter than any eager limit. */
#define ROUNDS 100000

/* ---- sending ---- */

static void rts_sent(void *request, ucs_status_t status, void *data) {
    ucch_message *m = data;
    ucp_request_free(request);
    m->request = NULL;
    if (status < 0 && m->op.state == UCCH_ACTIVE) {
        ucch_pipe_abort_locked(m->pipe);
        m->moving = 0;
        ucch_message_end_locked(m, status);
    }
}

int ucch_message_pipe(ucch_message *m) {
    if (!m->pipe) m->pipe = ucch_pipe_new();
    return m->pipe ? 0 : UCCH_FAIL_MEMORY;
}

/* Send data of a message that has begun by way of this process's window. */
int ucch_message_offer_begun_locked(ucch_message *m, ucp_ep_h ep, const ucch_offer *offer) {
    m->moved = 1;
    int status = ucch_message_pipe(m);
    if (!status) status = ucch_pipe_offer_locked(m->pipe, offer, &m->rts);
    if (status) {
        ucch_message_end_locked(m, status);
        return status;
    }
    return ucch_rts_send_locked(m, ep, offer->tag);
}

/* Send the header of what has been offered: 0, or a failure, which has ended the message. */
int ucch_rts_send_locked(ucch_message *m, ucp_ep_h ep, uint64_t tag) {
    ucp_request_param_t p = ucch_message_params(m, rts_sent, 0);
    m->moving = m->moved = 1;
    ucch_pipe_offered_locked(m->pipe);
    void *request = ucp_tag_send_nbx(ep, &m->rts, sizeof(m->rts), tag | UCCH_RTS_TAG, &p);
    if (request && IS_STATUS(request)) {
        m->moving = 0;
        ucch_pipe_abort_locked(m->pipe);
        return ucch_message_begun_locked(m, request);
    }
    if (m->op.state == UCCH_ACTIVE) m->request = request;
    return 0;
}

/* ---- receiving ---- */

/* Where the data belongs, if a rendezvous header comes in: `data` with room for `bytes`. What comes as a plain message
 * goes to the memory that the receive names. */
void ucch_message_rendezvous(ucch_message *m, void *data, size_t bytes, int on_device) {
    m->by_rts = 1;
    m->data = data;
    m->room = bytes;
    m->on_device = on_device;
}

/* The header has come; begin to fetch the data: 0, or a failure. */
int ucch_rts_arrived_locked(ucch_message *m) {
    m->info.sender_tag &= ~UCCH_RTS_TAG;
    m->info.length = m->rts.bytes;
    int status = ucch_message_pipe(m);
    if (status)
        ucch_rts_decline_locked(&m->rts);
    else
        status = ucch_pipe_accept_locked(m->pipe, m->data, m->room, m->on_device, &m->rts);
    m->moving = m->moved = !status;
    return status;
}

/* Move on with the data of a message: 1 if it has ended. */
int ucch_rendezvous_pump_locked(ucch_message *m) {
    if (!m->moving) return 0;
    int status = ucch_pipe_pump_locked(m->pipe);
    if (!status || m->request) return 0;
    m->moving = 0;
    if (status < 0) ucch_pipe_abort_locked(m->pipe);
    ucch_message_end_locked(m, status < 0 ? status : UCS_OK);
    return 1;
}

/* Whether the data came, or went, through a window. */
int ucch_message_moved(ucch_message *m) { return m->moved || m->delivered; }

/* ---- probing ---- */

/* Whether a message is there. `keys` are the processes of the communicator's ranks and `me` is this one's rank in it: a
 * header then counts as long as its message, and its bit of the tag tells it. NULL where there are no headers. */
int ucch_probe(ucp_worker_h worker, uint64_t tag, uint64_t mask, int remove, const uint64_t *keys, int me,
               uint64_t *sender_tag, size_t *bytes, ucp_tag_message_h *matched) {
    ucp_tag_recv_info_t info = {0, 0};
    ucch_lock();
    ucp_worker_progress(worker);
    *matched = ucp_tag_probe_nb(worker, tag, mask, remove, &info);
    if (*matched && keys && (info.sender_tag & UCCH_RTS_TAG)) {
        uint64_t code = info.sender_tag & ~UCCH_RTS_TAG, source = (code & (UCCH_RTS_TAG - 1)) >> UCCH_SOURCE_BIT;
        info.length = ucch_window_waiting_locked(keys[source], code, me, remove);
    }
    ucch_unlock();
    *sender_tag = info.sender_tag;
    *bytes = info.length;
    return *matched != NULL;
}

/* Receive a message into nothing: its sender must not wait for ever. A header that does not come in time keeps its
 * place, which libucp may still write to. */
static void discard_locked(ucp_worker_h worker, ucp_tag_message_h matched, int is_rts) {
    ucp_request_param_t p = {.op_attr_mask = ATTR_DATATYPE, .datatype = BYTES};
    ucch_rts *rts = is_rts ? calloc(1, sizeof(*rts)) : NULL;
    void *request = ucp_tag_msg_recv_nbx(worker, rts, rts ? sizeof(*rts) : 0, matched, &p);
    int status = request ? IS_STATUS(request) ? (int)(intptr_t)request : 1 : 0;
    for (int i = 0; rts && status == 1 && i < ROUNDS; i++) {
        ucp_worker_progress(worker);
        status = ucp_request_check_status(request);
    }
    if (request && !IS_STATUS(request)) ucp_request_free(request);
    if (rts && !status) ucch_rts_decline_locked(rts);
    if (status != 1) free(rts);
}

void ucch_discard(ucp_worker_h worker, ucp_tag_message_h matched, int is_rts) {
    ucch_lock();
    discard_locked(worker, matched, is_rts);
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
        discard_locked(worker, matched, (info.sender_tag & UCCH_RTS_TAG) != 0);
    ucp_worker_progress(worker); /* what tells the senders so */
    ucch_unlock();
    return n;
}
