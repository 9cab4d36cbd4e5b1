/* Regions of this process, peers, and regions of peers. A region ends when all peers have let go of it; what is put
 * there afterwards is refused here, before a byte is written. */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rma/rma.h"

#define FORCE 0x1

/* ---- peers ---- */

static void died(void *arg, ucp_ep_h ep, ucs_status_t status) { ((ucch_peer *)arg)->status = status; }

/* Connect. `process`: the peer's, where it is on this host and shares its process numbers; libucp then uses memory for
 * which it hears of no deaths. NULL with a status where that is impossible. */
ucch_peer *ucch_peer_new(ucch_rma *at, uint64_t uid, const void *address, int process, int *status) {
    ucch_peer *peer = calloc(1, sizeof(*peer));
    *status = peer ? 0 : UCCH_FAIL_MEMORY;
    if (!peer) return NULL;
    peer->at = at;
    peer->uid = uid;
    peer->pid = process;
    peer->process = process ? (int)syscall(SYS_pidfd_open, process, 0) : -1;
    peer->by_errors = peer->process < 0;
    peer->by_kernel = !peer->by_errors && at->by_kernel && process != getpid();
    ucch_lock();
    if (ucch_peer_of(at, uid)) *status = UCCH_FAIL_ARGUMENT;
    if (!*status) *status = ucch_ucp_connect(at->worker, address, peer->by_errors ? died : NULL, peer, &peer->ep);
    if (!*status) {
        peer->next = at->peers;
        at->peers = peer;
    }
    ucch_unlock();
    if (!*status) return peer;
    if (peer->process >= 0) close(peer->process);
    free(peer);
    return NULL;
}

/* From now on it counts as dead. */
void ucch_peer_lose(ucch_peer *peer) {
    UCCH_LOCKED;
    if (!peer->status) peer->status = UCCH_FAIL_PEER;
    ucch_transfers_end_locked(peer->at, peer, UCCH_FAIL_PEER, 0);
}

uint64_t ucch_peer_count(ucch_peer *peer, int which) { return peer->counts[which]; }

/* Free its slots; what a device or wires may still use stays. */
static void free_slots(ucch_peer *peer) {
    if (ucch_staged_busy(peer)) return;
    if (ucch_carriers_free(peer)) peer->ours = peer->theirs = (ucch_share){0};
    ucch_slots_free(peer->outward);
    ucch_slots_free(peer->inward);
    ucch_share_free(&peer->ours); /* which may wait for the device */
    ucch_share_free(&peer->theirs);
}

/* Nothing more comes from it or goes there; it is freed with its worker, as what libucp has to finish refers to it. A
 * peer that has died takes what is under way along. */
void ucch_peer_leave(ucch_peer *peer, double timeout) {
    int is_gone = ucch_peer_status(peer) != 0;
    double until = ucch_now() + timeout;
    ucch_lock();
    ucch_transfers_end_locked(peer->at, peer, UCCH_FAIL_PEER, 1);
    ucch_unlock();
    while (ucch_staged_busy(peer) && ucch_now() < until)
        sched_yield(); /* it may use its slots again when we have left */
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
    free_slots(peer);
    if (peer->process >= 0) close(peer->process);
    peer->process = -1;
    if (!ep || (is_gone && !peer->by_errors)) return;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = is_gone ? FORCE : 0};
    UCCH_LOCKED;
    void *request = ucp_ep_close_nbx(ep, &p);
    if (request && !IS_STATUS(request)) peer->closing = request;
    if (is_gone) ucch_peer_forget_locked(peer);
}

/* Do not look at the end of its connection any more. */
void ucch_peer_forget_locked(ucch_peer *peer) {
    if (peer->closing) ucp_request_free(peer->closing);
    peer->closing = NULL;
}

/* True once libucp has ended the connection with a peer that was left. */
int ucch_peer_left(ucch_peer *peer) {
    UCCH_LOCKED;
    if (peer->closing) ucp_worker_progress(peer->at->worker);
    if (peer->closing && ucp_request_check_status(peer->closing) == UCS_INPROGRESS) return 0;
    ucch_peer_forget_locked(peer);
    return 1;
}

/* After its worker has been destroyed. */
void ucch_peer_free(ucch_peer *peer) {
    ucch_lock();
    for (ucch_target *t = peer->targets; t; t = t->next)
        t->peer = NULL;
    UCCH_UNLINK(peer->at->peers, peer, next);
    ucch_unlock();
    free_slots(peer);
    free(peer->address);
    free(peer);
}

/* True if the kernel copies single short pieces between host memories, as far as is known. */
int ucch_peer_by_kernel(const ucch_peer *peer) { return peer->by_kernel; }

/* ---- regions ---- */

ucch_region *ucch_region_new(ucch_rma *at, uint64_t id, void *base, size_t bytes, int on_device, ucp_mem_h memh) {
    ucch_region *r = calloc(1, sizeof(*r));
    if (!r) return NULL;
    *r = (ucch_region){.at = at, .id = id, .base = base, .bytes = bytes, .on_device = on_device, .memh = memh};
    UCCH_LOCKED;
    r->next = at->regions;
    at->regions = r;
    return r;
}

/* Take it from all peers; nothing comes in any more. */
void ucch_region_revoke(ucch_rma *at, ucch_region *region) {
    UCCH_LOCKED;
    int is_first = !region->closing;
    region->closing = 1;
    for (ucch_peer *p = at->peers; p && is_first; p = p->next) {
        owed *o = p->status ? NULL : malloc(sizeof(*o));
        if (!o) continue;
        *o = (owed){p, region->owed};
        if (ucch_tell_locked(p, (ucch_header){.what = UCCH_REVOKE, .region = region->id}, NULL, 0))
            free(o);
        else
            region->owed = o;
    }
}

/* A peer has let go of a region. */
void ucch_revoked_locked(ucch_peer *peer, uint64_t region) {
    ucch_region *r = peer->at->regions;
    while (r && r->id != region)
        r = r->next;
    for (owed **at = r ? &r->owed : NULL, *o; at && (o = *at); at = &o->next)
        if (o->by == peer) {
            *at = o->next;
            free(o);
            return;
        }
}

/* How many peers and transfers still use it. */
int ucch_region_users(ucch_rma *at, ucch_region *region) {
    UCCH_LOCKED;
    int users = region->users;
    for (const owed *o = region->owed; o; o = o->next)
        users += !ucch_peer_status(o->by); /* the dead use nothing */
    return users;
}

void ucch_region_free(ucch_rma *at, ucch_region *region) {
    UCCH_LOCKED;
    UCCH_UNLINK(at->regions, region, next);
    for (owed *o; (o = region->owed); free(o))
        region->owed = o->next;
    free(region);
}

/* ---- regions of peers ---- */

ucch_target *ucch_target_new(ucch_peer *peer, uint64_t id, uint64_t base, size_t bytes, int on_device) {
    ucch_target *t = calloc(1, sizeof(*t));
    if (!t) return NULL;
    *t = (ucch_target){.peer = peer, .id = id, .base = base, .bytes = bytes, .on_device = on_device};
    UCCH_LOCKED;
    t->next = peer->targets;
    peer->targets = t;
    return t;
}

/* Unpack the key by which libucp reaches it. Another thread may have closed the peer. */
int ucch_target_key(ucch_target *t, const void *key) {
    UCCH_LOCKED;
    if (!t->peer->ep) return UCCH_FAIL_PEER;
    return ucp_ep_rkey_unpack(t->peer->ep, key, &t->rkey);
}

int ucch_target_stale(ucch_target *t) { return t->is_stale; }

int ucch_target_users(ucch_target *t) { return t->users; }

/* No transfer begins there any more. Its memory stays: a thread may be about to begin one. */
void ucch_target_close(ucch_target *t) {
    UCCH_LOCKED;
    if (t->peer) {
        if (t->rkey) ucp_rkey_destroy(t->rkey);
        ucch_target_return_locked(t);
        UCCH_UNLINK(t->peer->targets, t, next);
        t->rkey = NULL;
        t->peer = NULL;
    }
}

void ucch_target_free(ucch_target *t) {
    ucch_target_close(t);
    free(t);
}

void ucch_revoke_asked_locked(ucch_peer *peer, const ucch_header *h) {
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (t->id == h->region) {
            t->is_stale = 1;
            if (!t->users) ucch_target_return_locked(t);
        }
    ucch_region_let_go_locked(peer, h->region);
}

/* Say whether a region is there, with as many bytes. */
void ucch_open_asked_locked(ucch_peer *peer, const ucch_header *h) {
    ucch_region *region = ucch_region_of(peer->at, h->region);
    int is_there = region && region->bytes == h->other;
    ucch_tell_locked(peer,
                     (ucch_header){.what = UCCH_OPENED, .serial = h->serial, .status = is_there ? 0 : UCCH_FAIL_STALE},
                     NULL, 0);
}
