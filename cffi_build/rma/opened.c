/* Device memory of a peer's that our device reaches itself: memory of one vendor on one host, which the owner lends and
 * we borrow by the vendor's own names for it, or our own. What is put there and got from there our device copies, and
 * nothing lies in between. Where the runtimes refuse, slots carry it.
 *
 * To give it back is a call of the driver that waits for all that the device has been given, and keeps others from
 * recording events meanwhile (seen with CUDA 13). The worker's thread makes it, without the engine's lock, when no
 * stream waits for us, and none begins to before it has returned. To open memory takes a third of a millisecond, and
 * waits for no other thread. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/lock.h"
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

/* Its holder is in the driver: no thread takes it that has the engine's lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ucch_allocation *allocations;

/* Lend a region of the bound device: 0, or a failure. */
int ucch_region_lend(const ucch_region *region, void *lent) {
    key k = {{0}, 0};
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ucch_bound_ops()->lend(region->base, k.name, &k.offset), "lending device memory");
    memcpy(lent, &k, sizeof(k));
    return status;
}

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
        if (--t->users == 0) ucch_target_left_locked(t);
        ucch_unlock();
    }
    if (status) free(o);
    return status;
}

int ucch_target_opened(const ucch_target *t) { return t->seen != NULL; }

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
        if (o->is_owed) ucch_region_let_go_locked(o->peer, o->region);
        ucch_attend_locked(at);
        ucch_unlock();
    }
}
