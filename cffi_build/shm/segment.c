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
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_WINDOWS 1024

typedef struct window {
    uint64_t key; /* of its process; numbers of processes are used again */
    size_t chunks;
    char *memory, *seen, *slips_seen; /* as the device knows the chunks, and the slips and fronts; NULL: not pinned */
} window;

static window own, peers[MOST_WINDOWS];
static int npeers, own_file = -1;

static char *slips(const window *w) {
    return w->memory + UCCH_OFFERS_BYTES;
}

static char *fronts(const window *w) {
    return slips(w) + UCCH_SLIPS_BYTES;
}

static char *chunks(const window *w) {
    return fronts(w) + w->chunks * UCCH_RUN_FRONT;
}

static size_t length_of(size_t chunks) {
    return UCCH_OFFERS_BYTES + UCCH_SLIPS_BYTES + chunks * (UCCH_RUN_FRONT + UCCH_CHUNK);
}

static int map(window *w, uint64_t key, int file, size_t chunks) {
    void *memory = mmap(NULL, length_of(chunks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return UCCH_FAIL_MEMORY;
    *w = (window){.key = key, .chunks = chunks, .memory = memory};
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

/* NULL where there is none; no process has key 0. */
static window *window_of(uint64_t key) {
    if (!key)
        return NULL;
    for (int i = 0; i < npeers; i++)
        if (peers[i].key == key)
            return &peers[i];
    return key == own.key ? &own : NULL;
}

/* Map the window of another process that runs in our namespaces as our user; 0, or a failure. */
int ucch_window_open(uint64_t key, int pid, int file, size_t bytes) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    ucch_lock();
    int known = window_of(key) != NULL, status = !known && npeers == MOST_WINDOWS ? UCCH_FAIL_MEMORY : 0;
    int here = known || status ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (!known && !status)
        status = here < 0 ? UCCH_FAIL_PEER : map(&peers[npeers], key, here, bytes / UCCH_CHUNK);
    npeers += !known && !status;
    if (here >= 0)
        close(here);
    ucch_unlock();
    return status;
}

static int pin_part(void *memory, size_t bytes, char **seen) {
    int status = ucch_device_fail(ucch_bound_ops()->host_register(memory, bytes), "pinning shared memory");
    void *there = NULL;
    if (!status)
        status = ucch_device_fail(ucch_bound_ops()->mapped(memory, &there), "address of shared memory");
    *seen = there;
    return status;
}

static int pin(window *w, int with_chunks) {
    int status = ucch_bound_ops() ? 0 : UCCH_FAIL_DEVICE;
    if (!status && !w->slips_seen)
        status = pin_part(slips(w), UCCH_SLIPS_BYTES + w->chunks * UCCH_RUN_FRONT, &w->slips_seen);
    if (!status && with_chunks && !w->seen)
        status = pin_part(chunks(w), w->chunks * UCCH_CHUNK, &w->seen);
    return status;
}

/* Pin all windows that are mapped: for the bound device's copies, or only what its kernels say to others. */
int ucch_windows_pin_locked(int with_chunks) {
    int status = pin(&own, with_chunks);
    for (int i = 0; i < npeers && !status; i++)
        status = pin(&peers[i], with_chunks);
    return status;
}

/* The chunks of a process's window, one after the other, and their bytes; `key` 0: our own. NULL without one. */
void *ucch_window_memory(uint64_t key, size_t *bytes) {
    const window *w = key ? window_of(key) : own.memory ? &own : NULL;
    *bytes = w ? w->chunks * UCCH_CHUNK : 0;
    return w ? chunks(w) : NULL;
}

/* Likewise, where the bound device sees them. */
void *ucch_window_seen(uint64_t key) {
    const window *w = key ? window_of(key) : &own;
    return w ? w->seen : NULL;
}

/* The fronts of its chunks, and as the bound device sees them; NULL without. */
char *ucch_window_fronts(uint64_t key) {
    const window *w = key ? window_of(key) : own.memory ? &own : NULL;
    return w ? fronts(w) : NULL;
}

char *ucch_window_fronts_seen(uint64_t key) {
    char *seen = ucch_window_slips_seen(key);
    return seen ? seen + UCCH_SLIPS_BYTES : NULL;
}

/* The first front of a run. */
char *ucch_run_at(uint64_t key, int first) {
    return ucch_window_fronts(key) + (size_t)first * UCCH_RUN_FRONT;
}

/* Where its messages are offered. NULL without one. */
void *ucch_window_offers(uint64_t key) {
    const window *w = key ? window_of(key) : &own;
    return w ? w->memory : NULL;
}

/* Where its streams wait for messages. NULL without one. */
void *ucch_window_slips(uint64_t key) {
    const window *w = key ? window_of(key) : own.memory ? &own : NULL;
    return w ? slips(w) : NULL;
}

/* Likewise, as the bound device sees them; NULL before they are pinned. */
void *ucch_window_slips_seen(uint64_t key) {
    const window *w = key ? window_of(key) : &own;
    return w ? w->slips_seen : NULL;
}

uint64_t ucch_window_key(void) {
    return own.key;
}
