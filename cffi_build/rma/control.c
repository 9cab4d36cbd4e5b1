/* Control messages of one-sided communication: sending, and finding the objects that received ones refer to. */
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "rma/rma.h"

/* Seconds between two probes of a link. */
#define FOLLOW_S 1.0

ucch_peer *ucch_peer_of(ucch_rma *at, uint64_t uid) {
    ucch_peer *p = at->peers;
    while (p && (p->uid != uid || !p->ep)) /* a closed peer has no endpoint */
        p = p->next;
    return p;
}

ucch_region *ucch_region_of(ucch_rma *at, uint64_t id) {
    ucch_region *r = at->regions;
    while (r && r->id != id)
        r = r->next;
    return r && !r->closing ? r : NULL;
}

ucch_transfer *ucch_transfer_of(ucch_rma *at, uint64_t serial) {
    ucch_transfer *t = at->transfers;
    while (t && t->serial != serial)
        t = t->following;
    return t;
}

/* Find a counter by its number, which includes its use; NULL if that use has ended. */
uint64_t *ucch_rma_counter_of(ucch_rma *at, uint64_t number) {
    uint64_t which = number % UCCH_RMA_COUNTERS;
    return at->uses[which] == number / UCCH_RMA_COUNTERS ? &at->counters[which] : NULL;
}

/* ---- sending ---- */

typedef struct control_message {
    ucch_peer *to;
    ucch_header header;
    char data[];
} control_message;

static void posted(void *request, ucs_status_t status, void *data) {
    ucch_peer *peer = ((control_message *)data)->to;
    ucp_request_free(request);
    peer->at->requests--;
    if (status && !peer->status) peer->status = status; /* a message is missing */
    free(data);
}

/* Send a control message. Returns 0 or a failure. Its data goes with it, however long it is: later messages would
 * overtake one whose data the receiver fetches (rendezvous). */
int ucch_tell_locked(ucch_peer *peer, ucch_header header, const void *data, size_t bytes) {
    control_message *l = peer->ep ? malloc(sizeof(*l) + bytes) : NULL;
    if (!l) return peer->ep ? UCCH_FAIL_MEMORY : UCCH_FAIL_PEER;
    header.version = UCCH_RMA_VERSION;
    header.from = peer->at->uid;
    l->to = peer;
    l->header = header;
    if (bytes) memcpy(l->data, data, bytes);
    ucp_request_param_t p = ucch_ucp_params(posted, l, UCS_MEMORY_TYPE_HOST);
    p.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    p.flags = UCP_AM_SEND_FLAG_EAGER;
    void *request = ucp_am_send_nbx(peer->ep, UCCH_AM_ID, &l->header, sizeof(l->header), l->data, bytes, &p);
    if (!request || IS_STATUS(request))
        free(l);
    else
        peer->at->requests++;
    return STATUS_OF(request);
}

/* Returns 0 if the peer is alive, or a failure. The check is at most UCCH_RMA_FRESH_S old, as every transfer under way
 * calls this. */
int ucch_peer_status(ucch_peer *peer) {
    double now = ucch_now();
    if (peer->status || now - peer->looked < UCCH_RMA_FRESH_S) return peer->status;
    peer->looked = now;
    if (!peer->by_errors && ucch_process_ended(peer->pid)) peer->status = UCCH_FAIL_PEER;
    return peer->status;
}

/* The cut link to a peer, if something has waited for `waited` seconds, long enough to probe it; or NULL. */
const char *ucch_peer_cut_locked(ucch_peer *peer, double waited, double now) {
    if (!peer->patience || waited < peer->patience) return NULL;
    if (now - peer->followed > FOLLOW_S) {
        peer->followed = now;
        peer->is_cut = ucch_path_find_cut(peer->address, peer->bytes, peer->patience, peer->link);
    }
    return peer->is_cut ? peer->link : NULL;
}

/* Keep progress going for messages that come, for a while; not while the worker is being stopped, as nothing may refer
 * to it then. */
void ucch_attend_locked(ucch_rma *at) {
    at->heard = ucch_now();
    if (!at->has_thread || at->attention.state == UCCH_ACTIVE) return;
    ucch_op_begin_locked(&at->attention, 0);
    ucch_wake_locked();
}

/* Wake the worker's thread: it is to give memory back, or to end. */
void ucch_rma_call_locked(ucch_rma *at) {
    pthread_cond_broadcast(&at->calm);
    if (at->has_thread) eventfd_write(at->called, 1);
}
