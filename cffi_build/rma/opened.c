/* Device memory of a peer's that our device reaches itself: memory of one vendor on one host, which the owner lends and
 * we borrow by the vendor's own names for it, or our own. What is put there and got from there our device copies, and
 * nothing lies in between. Where the runtimes refuse, slots carry it. */
#include <string.h>

#include "rma/rma.h"

/* A region's key for peers: the name of its allocation, and where it lies in that. */
typedef struct key {
    char name[UCCH_LENT_BYTES];
    uint64_t offset;
} key;
_Static_assert(sizeof(key) == UCCH_RMA_LENT, "as many bytes as Python makes room for");

/* Lend a region of the bound device: 0, or a failure. */
int ucch_region_lend(const ucch_region *region, void *lent) {
    key k = {{0}, 0};
    int before = ucch_device_enter();
    int status = ucch_device_fail(ucch_bound_ops()->lend(region->base, k.name, &k.offset), "lending device memory");
    ucch_device_leave(before);
    memcpy(lent, &k, sizeof(k));
    return status;
}

/* Have our device reach a peer's region, which is not in use yet: 0, or a failure. */
int ucch_target_borrow(ucch_target *t, const void *lent) {
    key k;
    void *base = NULL;
    memcpy(&k, lent, sizeof(k));
    if (t->peer->uid == t->peer->at->uid) {
        t->opened = (char *)(uintptr_t)t->base;
        return 0;
    }
    int before = ucch_device_enter();
    int status = ucch_device_fail(ucch_bound_ops()->borrow(k.name, &base), "borrowing a peer's memory");
    ucch_device_leave(before);
    if (status) return status;
    t->borrowed = base;
    t->opened = (char *)base + k.offset;
    return 0;
}

int ucch_target_opened(const ucch_target *t) { return t->opened != NULL; }

/* With the lock, or before anybody else knows of it; nothing may be under way there. */
void ucch_target_return(ucch_target *t) {
    if (t->borrowed) {
        int before = ucch_device_enter();
        ucch_bound_ops()->give_back(t->borrowed);
        ucch_device_leave(before);
    }
    t->opened = t->borrowed = NULL;
}
