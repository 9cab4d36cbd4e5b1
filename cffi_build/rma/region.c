/* Regions of this process, and those of peers: what is put there after their end is refused here, before a byte is
 * written. A region ends when all peers have let go of it.
 *
 * Device memory of a peer's may be reached by our device itself: memory of one vendor on one host, which the owner
 * lends and we borrow by the vendor's own names for it, or our own. What is put there and got from there our device
 * copies, and nothing lies in between. Where the runtimes refuse, slots carry it.
 *
 * To give it back is a call of the driver that waits for all that the device has been given, and keeps others from
 * recording events meanwhile (seen with CUDA 13). The worker's thread makes it, without the engine's lock, when no
 * stream waits for us, and none begins to before it has returned. To open memory takes a third of a millisecond, and
 * waits for no other thread. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rma/rma.h"

/* How often to look whether streams wait. */
#define LOOK_S 1e-3

/* A region's key for peers: the name of its allocation, and where it lies in that. */
typedef struct key {
    char name[UCCH_LENT_BYTES];
    uint64_t offset;
} key;
_Static_assert(sizeof(key) == UCCH_RMA_LENT, "as many bytes as Python makes room for");

/* An allocation of another process's, which is opened once, however many targets lie in it. */
struct ucch_allocation {
    char name[UCCH_LENT_BYTES];
    void *base;
    int users;
    ucch_allocation *next;
};

/* ---- our own ---- */

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
void ucch_region_revoke(ucch_region *region) {
    UCCH_LOCKED;
    int is_first = !region->closing;
    region->closing = 1;
    for (ucch_peer *p = region->at->peers; p && is_first; p = p->next) {
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
void ucch_revoked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_region *r = peer->at->regions;
    while (r && r->id != h->region)
        r = r->next;
    for (owed **at = r ? &r->owed : NULL, *o; at && (o = *at); at = &o->next)
        if (o->by == peer) {
            *at = o->next;
            free(o);
            return;
        }
}

/* How many peers and transfers still use it. */
int ucch_region_users(const ucch_region *region) {
    UCCH_LOCKED;
    int users = region->users;
    for (const owed *o = region->owed; o; o = o->next)
        users += !ucch_peer_status(o->by); /* the dead use nothing */
    return users;
}

void ucch_region_free(ucch_region *region) {
    UCCH_LOCKED;
    UCCH_UNLINK(region->at->regions, region, next);
    for (owed *o; (o = region->owed); free(o))
        region->owed = o->next;
    free(region);
}

/* Lend a region of the bound device: 0, or a failure. */
int ucch_region_lend(const ucch_region *region, void *lent) {
    key k = {{0}, 0};
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ucch_bound_ops()->lend(region->base, k.name, &k.offset), "lending device memory");
    memcpy(lent, &k, sizeof(k));
    return status;
}

/* ---- of peers ---- */

/* How many of a region's have still to be given back; whether its owner waits for that, if it has asked now. */
static int leaving(const ucch_peer *peer, uint64_t region, int is_owed) {
    int found = 0;
    for (ucch_opened *o = peer->at->leaving; o; o = o->next) {
        if (o->peer != peer || o->region != region) continue;
        o->is_owed |= is_owed;
        found++;
    }
    return found;
}

/* Tell the owner of a region, who waits for that, when nothing of ours uses it any more. */
static void let_go_locked(ucch_peer *peer, uint64_t region) {
    int users = leaving(peer, region, 1);
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (t->id == region) users += t->users;
    if (!users) ucch_tell_locked(peer, (ucch_header){.what = UCCH_REVOKED, .region = region}, NULL, 0);
}

/* Have it given back, which nothing of ours may use any more. */
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

/* True if any of a peer's has still to be given back. */
int ucch_peer_leaving(const ucch_peer *peer) {
    int found = 0;
    UCCH_LOCKED;
    for (const ucch_opened *o = peer->at->leaving; o; o = o->next)
        found |= o->peer == peer;
    return found;
}

/* Nothing of ours goes there any more. */
static void left_locked(ucch_target *t) {
    if (!t->is_stale) return;
    ucch_target_return_locked(t);
    let_go_locked(t->peer, t->id);
}

/* A transfer leaves the list of those under way; what refers to it from outside keeps it alive. */
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

/* Unpack the key by which libucp reaches it. Another thread may have closed the peer. */
int ucch_target_key(ucch_target *t, const void *key) {
    UCCH_LOCKED;
    if (!t->peer->ep) return UCCH_FAIL_PEER;
    return ucp_ep_rkey_unpack(t->peer->ep, key, &t->rkey);
}

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

void ucch_revoke_asked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    for (ucch_target *t = peer->targets; t; t = t->next)
        if (t->id == h->region) {
            t->is_stale = 1;
            if (!t->users) ucch_target_return_locked(t);
        }
    let_go_locked(peer, h->region);
}

/* Say whether a region is there, with as many bytes. */
void ucch_open_asked_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_region *region = ucch_region_of(peer->at, h->region);
    int is_there = region && region->bytes == h->other;
    ucch_header said = {.what = UCCH_OPENED, .serial = h->serial, .status = is_there ? 0 : UCCH_FAIL_STALE};
    ucch_tell_locked(peer, said, NULL, 0);
}

/* ---- memory that our device reaches ---- */

/* Its holder is in the driver: no thread takes it that has the engine's lock. */
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

/* Have our device reach a peer's region, which no other thread uses yet: 0, or a failure. Its owner, which may take it
 * back meanwhile, waits until this has ended. */
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

/* The first of those to be given back, when no stream waits for us, and none begins to: NULL when there are none. */
static ucch_opened *begin_to_leave(ucch_rma *at) {
    UCCH_LOCKED;
    while (at->leaving && at->has_thread && ucch_gates_held())
        ucch_sleep_locked(&at->calm, LOOK_S);
    ucch_opened *o = at->leaving;
    if (o) ucch_gates_bar_locked(1);
    return o;
}

/* By the worker's thread, or when that has ended: give back what is to be, and tell the owners. */
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
