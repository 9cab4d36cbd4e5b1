/* Regions that this process exposes, and targets: the regions of peers that it writes to and reads from. An access to a
 * closed region is refused by the process that begins it, before a byte moves. A region is closed once all peers have
 * acknowledged that they no longer use it.
 *
 * Device memory of a peer on the same host and of the same vendor can be mapped here: the owner lends an IPC handle, we
 * borrow (open) it, and our device copies directly. A region of this process itself needs no handle. Where the runtime
 * refuses, the data goes through slots.
 *
 * To close an IPC mapping, the driver waits for all work of the device and meanwhile blocks other threads from
 * recording events (seen with CUDA 13). So the worker's thread closes it, without the engine's lock, at a time when no
 * stream waits for us, and no stream may begin to wait until it is done. To open one takes a third of a millisecond and
 * waits for nothing. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rma/rma.h"

/* Seconds between checks whether streams wait. */
#define LOOK_S 1e-3

/* Key by which a peer opens a region: the IPC handle of its allocation, and the region's offset in it. */
typedef struct key {
    char name[UCCH_LENT_BYTES];
    uint64_t offset;
} key;
_Static_assert(sizeof(key) == UCCH_RMA_LENT, "as many bytes as Python makes room for");

/* A mapped allocation of another process, opened once for all targets in it. */
struct ucch_allocation {
    char name[UCCH_LENT_BYTES];
    void *base;
    int users;
    ucch_allocation *next;
};

/* ---- regions of this process ---- */

ucch_region *ucch_region_new(ucch_rma *at, uint64_t id, void *base, size_t bytes, int on_device, ucp_mem_h memh) {
    ucch_region *r = calloc(1, sizeof(*r));
    if (!r) return NULL;
    *r = (ucch_region){.at = at, .id = id, .base = base, .bytes = bytes, .on_device = on_device, .memh = memh};
    UCCH_LOCKED;
    r->next = at->regions;
    at->regions = r;
    return r;
}

/* Close a region: ask all peers to stop using it. Nothing is received into it any more. */
void ucch_region_revoke(ucch_region *region) {
    UCCH_LOCKED;
    int is_first = !region->closing;
    region->closing = 1;
    for (ucch_peer *p = region->at->peers; p && is_first; p = p->next) {
        owed *o = p->status ? NULL : malloc(sizeof(*o));
        int status = p->status ? UCCH_FAIL_PEER : UCCH_FAIL_MEMORY;
        if (o) status = ucch_tell_locked(p, (ucch_header){.what = UCCH_REVOKE, .region = region->id}, NULL, 0);
        region->users += status == UCCH_FAIL_MEMORY; /* it may go on, for ever */
        if (status) free(o);
        if (status) continue;
        *o = (owed){p, region->owed};
        region->owed = o;
        if (!p->owes++) p->owes_since = ucch_now();
    }
}

/* Remove an entry of a list of what peers owe. */
static void paid_locked(owed **at) {
    owed *o = *at;
    o->by->owes--;
    o->by->owes_since = ucch_now();
    *at = o->next;
    free(o);
}

/* A peer has acknowledged that it no longer uses a region. */
void ucch_revoked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_region *r = peer->at->regions;
    while (r && r->id != h->region)
        r = r->next;
    for (owed **at = r ? &r->owed : NULL, *o; at && (o = *at); at = &o->next)
        if (o->by == peer) {
            paid_locked(at);
            return;
        }
}

/* Number of peers and transfers that still use a region. With a `patience` of 0 or more, without peers that have
 * released no region for so many seconds although they should. */
int ucch_region_users(const ucch_region *region, double patience) {
    UCCH_LOCKED;
    int users = region->users;
    for (const owed *o = region->owed; o; o = o->next) {
        int silent = patience >= 0 && ucch_now() - o->by->owes_since >= patience;
        users += !silent && !ucch_peer_status(o->by); /* dead peers use nothing */
    }
    return users;
}

void ucch_region_free(ucch_region *region) {
    UCCH_LOCKED;
    UCCH_UNLINK(region->at->regions, region, next);
    while (region->owed)
        paid_locked(&region->owed);
    free(region);
}

/* Make the key of a region on the bound device. Returns 0, or a failure. */
int ucch_region_lend(const ucch_region *region, void *lent) {
    key k = {{0}, 0};
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ucch_bound_ops()->lend(region->base, k.name, &k.offset), "lending device memory");
    memcpy(lent, &k, sizeof(k));
    return status;
}

/* ---- targets: regions of peers ---- */

/* Acknowledge to a region's owner that this process no longer uses it, unless something here still does. */
static void let_go_locked(ucch_peer *peer, uint64_t region) {
    int users = 0;
    for (ucch_opened *o = peer->at->leaving; o; o = o->next) {
        if (o->peer != peer || o->region != region) continue;
        o->is_owed = 1; /* the owner waits for the end of this mapping, and is told */
        users++;
    }
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (t->id == region) users += t->users;
    if (!users) ucch_tell_locked(peer, (ucch_header){.what = UCCH_REVOKED, .region = region}, NULL, 0);
}

/* Queue a target's mapping to be closed. No transfer uses it any more. */
void ucch_target_return_locked(ucch_target *t) {
    ucch_opened *o = t->opened;
    t->opened = NULL;
    t->seen = NULL;
    if (!o) return;
    ucch_rma *at = t->peer->at;
    o->is_owed = t->is_stale;
    o->next = at->leaving;
    at->leaving = o;
    ucch_rma_call_locked(at);
}

/* True if a mapping of this peer's memory is still to be closed. */
int ucch_peer_leaving(const ucch_peer *peer) {
    int found = 0;
    UCCH_LOCKED;
    for (const ucch_opened *o = peer->at->leaving; o; o = o->next)
        found |= o->peer == peer;
    return found;
}

/* The last transfer to a target has ended: if its owner has closed the region, let it go. */
static void left_locked(ucch_target *t) {
    if (!t->is_stale) return;
    ucch_target_return_locked(t);
    let_go_locked(t->peer, t->id);
}

/* Take a transfer off the list of those under way. Its memory stays as long as something refers to it. */
void ucch_transfer_leave_locked(ucch_transfer *t) {
    if (t->has_left) return;
    t->has_left = 1;
    *t->place = t->following;
    *(t->following ? &t->following->place : &t->at->last_transfer) = t->place;
    if (t->is.local) t->is.local->users--;
    if (t->is.target && --t->is.target->users == 0) left_locked(t->is.target);
}

ucch_target *ucch_target_new(ucch_peer *peer, uint64_t id, uint64_t base, size_t bytes, int on_device) {
    ucch_target *t = calloc(1, sizeof(*t));
    if (!t) return NULL;
    *t = (ucch_target){.peer = peer, .id = id, .base = base, .bytes = bytes, .on_device = on_device};
    UCCH_LOCKED;
    t->next = peer->targets;
    peer->targets = t;
    return t;
}

/* Unpack libucp's remote key of a target. Fails if another thread has closed the peer. */
int ucch_target_key(ucch_target *t, const void *key) {
    UCCH_LOCKED;
    if (!t->peer->ep) return UCCH_FAIL_PEER;
    return ucp_ep_rkey_unpack(t->peer->ep, key, &t->rkey);
}

/* Begin no more transfers to a target. Its memory stays: another thread may hold it to begin one. */
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

void ucch_revoke_asked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (t->id == h->region) {
            t->is_stale = 1;
            if (!t->users) ucch_target_return_locked(t);
        }
    let_go_locked(peer, h->region);
}

/* Answer a peer whether a region exists and has the number of bytes that it expects. */
void ucch_open_asked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_region *region = ucch_region_of(peer->at, h->region);
    int is_there = region && region->bytes == h->other;
    ucch_header said = {.what = UCCH_OPENED, .serial = h->serial, .status = is_there ? 0 : UCCH_FAIL_STALE};
    ucch_tell_locked(peer, said, NULL, 0);
}

/* ---- mappings of peers' device memory ---- */

/* Held during calls of the driver: a thread that has the engine's lock must not take it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ucch_allocation *allocations;

static int open_alone(ucch_allocation *a) {
    UCCH_ON_DEVICE;
    return ucch_device_fail(ucch_bound_ops()->borrow(a->name, &a->base), "opening the peer's memory");
}

static int open_once(const char *name, ucch_allocation **found) {
    int status = 0;
    ucch_take(&lock, UCCH_AT_OPENED);
    ucch_allocation *a = allocations;
    while (a && memcmp(a->name, name, UCCH_LENT_BYTES))
        a = a->next;
    if (!a) {
        a = calloc(1, sizeof(*a));
        status = a ? 0 : UCCH_FAIL_MEMORY;
        if (a) memcpy(a->name, name, UCCH_LENT_BYTES);
        if (!status) status = open_alone(a);
        if (status) {
            free(a);
        } else {
            a->next = allocations;
            allocations = a;
        }
    }
    if (!status) a->users++;
    ucch_give(&lock, UCCH_AT_OPENED);
    *found = status ? NULL : a;
    return status;
}

static void close_once(ucch_allocation *a) {
    ucch_take(&lock, UCCH_AT_OPENED);
    if (--a->users == 0) {
        UCCH_UNLINK(allocations, a, next);
        UCCH_ON_DEVICE;
        ucch_bound_ops()->give_back(a->base);
        free(a);
    }
    ucch_give(&lock, UCCH_AT_OPENED);
}

/* Map a peer's region into our device's address space. No other thread uses the target yet. Returns 0, or a failure.
 * The owner may close the region meanwhile, and then waits until this call has ended. */
int ucch_target_borrow(ucch_target *t, const void *lent) {
    key k;
    memcpy(&k, lent, sizeof(k));
    ucch_opened *o = calloc(1, sizeof(*o));
    int is_own = t->peer->pid == getpid();
    ucch_lock();
    int status = !o ? UCCH_FAIL_MEMORY : t->is_stale ? UCCH_FAIL_STALE : 0;
    t->users += !status;
    ucch_unlock();
    if (!status) {
        status = is_own ? 0 : open_once(k.name, &o->in);
        ucch_lock();
        if (!status) {
            *o = (ucch_opened){.in = o->in, .peer = t->peer, .region = t->id};
            t->seen = is_own ? (char *)(uintptr_t)t->base : (char *)o->in->base + k.offset;
            t->opened = o;
        }
        if (--t->users == 0) left_locked(t);
        ucch_unlock();
    }
    if (status) free(o);
    return status;
}

/* Wait until no stream waits for us, then bar streams from beginning to. Returns the first mapping to be closed, or
 * NULL. */
static ucch_opened *begin_to_leave(ucch_rma *at) {
    UCCH_LOCKED;
    while (at->leaving && at->has_thread && ucch_gates_held())
        ucch_sleep_locked(&at->calm, LOOK_S);
    ucch_opened *o = at->leaving;
    if (o) ucch_gates_bar_locked(1);
    return o;
}

/* Close the queued mappings and tell the owners that wait. Called by the worker's thread, or after that has ended. */
void ucch_give_back(ucch_rma *at) {
    for (ucch_opened *o; (o = begin_to_leave(at)); free(o)) {
        if (o->in) close_once(o->in);
        ucch_lock();
        ucch_gates_bar_locked(-1);
        UCCH_UNLINK(at->leaving, o, next);
        if (o->is_owed) let_go_locked(o->peer, o->region);
        ucch_attend_locked(at);
        ucch_unlock();
    }
}
