/* Slots that processes of one host see of each other: a file of memory that both have mapped and pinned. The sender's
 * device copies into it and the receiver's device out of it, and no processor copies in between. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rma/rma.h"
#include "shm/segment.h"

#define BYTES (UCCH_RMA_SLOTS * UCCH_RMA_STRIDE)

static int see(ucch_share *s, int file) {
    struct stat about;
    s->memory = s->seen = ucch_shared_map(file, BYTES);
    if (s->memory && !fstat(file, &about)) s->inode = about.st_ino;
    return s->memory ? 0 : UCCH_FAIL_MEMORY;
}

/* Where the data of a slot lies: behind what network threads say of it. */
size_t ucch_share_place(uint64_t slot) { return slot % UCCH_RMA_SLOTS * UCCH_RMA_STRIDE + UCCH_FLOW_HEADER; }

/* Memory of this process's; whether others are to open it: 0, or a failure. */
int ucch_share_make(ucch_share *s, int is_open) {
    if (s->memory) return 0;
    int file = memfd_create("ucc_hetero", MFD_CLOEXEC);
    if (file < 0) return UCCH_FAIL_MEMORY;
    int status = posix_fallocate(file, 0, (off_t)BYTES) ? UCCH_FAIL_MEMORY : see(s, file);
    if (!status && is_open)
        s->file = file;
    else
        close(file);
    return status;
}

/* That of a process of our host, which runs in our namespaces as our user: 0, or a failure. It may have closed the file
 * that it has spoken of, and have another one under that number. */
int ucch_share_open(ucch_share *s, int pid, const ucch_here *here) {
    int file = !s->memory && pid ? ucch_shared_open(pid, here->file) : -1;
    if (file >= 0) {
        see(s, file);
        close(file);
    }
    return s->memory && s->inode == here->inode ? 0 : UCCH_FAIL_MEMORY;
}

/* Have the bound device see it, if there is one: 0, or a failure. */
int ucch_share_pin(ucch_share *s) {
    if (s->is_pinned || ucch_bound() < 0) return 0;
    UCCH_ON_DEVICE;
    int status = ucch_shared_pin(s->memory, BYTES, &s->seen);
    s->is_pinned = !status;
    return status;
}

void ucch_share_free(ucch_share *s) {
    if (s->is_pinned) {
        UCCH_ON_DEVICE;
        ucch_bound_ops()->host_unregister(s->memory);
    }
    if (s->memory) munmap(s->memory, BYTES);
    if (s->file) close(s->file);
    *s = (ucch_share){0};
}

/* ---- slots ---- */

static void free_memory(ucch_slot *s) {
    if (s->held && s->is_pinned)
        ucch_pool_give(s->held);
    else
        free(s->held);
    s->held = NULL;
}

/* Memory of a free slot beside its data, pinned since there is a device, which reads the list of pieces. */
int ucch_slot_memory_locked(ucch_slot *s) {
    int pinned = ucch_bound() >= 0;
    size_t pieces = UCCH_RMA_PIECES * sizeof(*s->pieces), bytes = pieces + UCCH_RMA_PIECES * sizeof(*s->table);
    if (s->held && s->is_pinned == pinned) return 1;
    free_memory(s);
    s->held = pinned ? ucch_pool_take(1, bytes, NULL, 1) : malloc(bytes);
    if (!s->held) return 0;
    s->is_pinned = pinned;
    s->pieces = (ucch_piece *)s->held;
    s->table = (ucch_place *)(s->held + pieces);
    return 1;
}

/* Free the slots of a worker or a peer that has ended. */
void ucch_slots_free(ucch_slot *slots) {
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    for (ucch_slot *s = slots; s < slots + UCCH_RMA_SLOTS; s++) {
        if (s->event) ucch_bound_ops()->event_free(s->event);
        s->event = NULL;
        s->state = UCCH_FREE;
        free_memory(s);
    }
}
