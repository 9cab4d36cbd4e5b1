/* Windows: shared memory that several vendors' devices copy to and from, for data between processes of one host.
 *
 * No library opens one vendor's device memory for another's, and a processor that copies between two processes is ten
 * times slower than the devices are. So every process has a window, an anonymous file that its peers map, and that all
 * of them have pinned: the sender's device copies pieces into it, the receiver's device copies them out. It begins with
 * room for the messages that are offered (pipe.c) and those that streams wait for (mailbox.c), and a front for each
 * chunk (stream_copy.c); the rest is chunks, for messages (room.c). These take no memory before they are pinned or
 * written to: where all devices are of one vendor, data lies in arenas (arena.c). */
#define _GNU_SOURCE
#include "shm/segment.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_WINDOWS 1024

static const ucch_window none;
static ucch_window own, peers[MOST_WINDOWS];
static int npeers, own_file = -1;

static size_t length_of(size_t chunks) {
    return UCCH_OFFERS_BYTES + UCCH_SLIPS_BYTES + chunks * (sizeof(ucch_run) + UCCH_CHUNK);
}

static int map(ucch_window *w, uint64_t key, int file, size_t chunks) {
    char *memory = mmap(NULL, length_of(chunks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if ((void *)memory == MAP_FAILED)
        return UCCH_FAIL_MEMORY;
    *w = (ucch_window){.key = key, .nchunks = chunks, .offers = memory};
    w->slips = (ucch_slip *)(memory + UCCH_OFFERS_BYTES);
    w->fronts = (ucch_run *)(w->slips + SLIPS + 1);
    w->chunks = (char *)(w->fronts + chunks);
    return 0;
}

/* This process's window, of so many chunks, anew in a child: 0, or a failure. */
int ucch_window_make_locked(uint64_t key, size_t many) {
    int file = memfd_create("ucc_hetero", MFD_CLOEXEC);
    int status = file < 0 || ftruncate(file, (off_t)length_of(many)) ? UCCH_FAIL_MEMORY : map(&own, key, file, many);
    if (!status)
        own_file = file;
    else if (file >= 0)
        close(file);
    return status;
}

int ucch_window_file(void) {
    return own_file;
}

/* A window by its process's key, 0: our own; without memory where there is none. */
const ucch_window *ucch_window_of(uint64_t key) {
    for (int i = 0; key && i < npeers; i++)
        if (peers[i].key == key)
            return &peers[i];
    return !key || key == own.key ? &own : &none;
}

/* Open an anonymous file of another process's, which runs in our namespaces as our user; -1 where that cannot be. */
int ucch_file_of(int pid, int file) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Map the window of another process; 0, or a failure. */
int ucch_window_open(uint64_t key, int pid, int file, size_t bytes) {
    ucch_lock();
    int known = ucch_window_of(key)->key == key, status = !known && npeers == MOST_WINDOWS ? UCCH_FAIL_MEMORY : 0;
    int here = known || status ? -1 : ucch_file_of(pid, file);
    if (!known && !status)
        status = here < 0 ? UCCH_FAIL_PEER : map(&peers[npeers], key, here, bytes / UCCH_CHUNK);
    npeers += !known && !status;
    if (here >= 0)
        close(here);
    ucch_unlock();
    return status;
}

/* Have the bound device see shared memory: 0, or a failure. */
int ucch_memory_pin(void *memory, size_t bytes, char **seen) {
    int status = ucch_device_fail(ucch_bound_ops()->host_register(memory, bytes), "pinning shared memory");
    void *there = NULL;
    if (!status)
        status = ucch_device_fail(ucch_bound_ops()->mapped(memory, &there), "address of shared memory");
    *seen = there;
    return status;
}

static int pin(ucch_window *w, int with_chunks) {
    int status = ucch_bound_ops() ? 0 : UCCH_FAIL_DEVICE;
    char *seen = NULL;
    if (!status && !w->slips_seen) {
        status = ucch_memory_pin(w->slips, (size_t)(w->chunks - (char *)w->slips), &seen);
        w->slips_seen = (ucch_slip *)seen;
        w->fronts_seen = status ? NULL : (ucch_run *)(w->slips_seen + SLIPS + 1);
    }
    if (!status && with_chunks && !w->chunks_seen)
        status = ucch_memory_pin(w->chunks, w->nchunks * UCCH_CHUNK, &w->chunks_seen);
    return status;
}

/* Pin all windows that are mapped: for the bound device's copies, or only what its kernels say to others. */
int ucch_windows_pin_locked(int with_chunks) {
    int status = pin(&own, with_chunks);
    for (int i = 0; i < npeers && !status; i++)
        status = pin(&peers[i], with_chunks);
    return status;
}

/* The first front of a run. */
ucch_run *ucch_run_at(uint64_t key, int first) {
    return ucch_window_of(key)->fronts + first;
}

uint64_t ucch_window_key(void) {
    return own.key;
}
