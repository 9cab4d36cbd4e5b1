/* Arenas: device memory that other processes with devices of one vendor on a host have opened, for messages between
 * their streams (stream_copy.c). The words that go with them are in the windows, as hosts look at these; the data never
 * leaves the devices. An arena has a place for every chunk of its process's window, as far as it goes.
 *
 * Memory of the caller's is not opened itself: handles are of whole allocations, which its allocator may give back or
 * make in ways that have no handles. */
#include <string.h>

#include "shm/segment.h"

#define MOST_ARENAS 256
/* Blocks with a slice each that copy a message: an H200's NVLink carries 256 MiB each way at a time with 286 GB/s by 32
 * blocks, 236 by 16, 142 by 8 (benchmarks/results/h200-2026-11-22-arena). */
#define MOST UCCH_MOST_BLOCKS
/* Kernels that may wait for each other and have all to run at a time, of 512 threads a block: those of five streams of
 * the caller's each way. */
#define KERNELS 10
#define THREADS 512

static struct {
    uint64_t key; /* of the process: a child has none */
    char *memory;
    size_t chunks;
    int blocks;
    ucch_share handle;
} own;

static struct {
    uint64_t key;
    char *seen;
} peers[MOST_ARENAS];
static int npeers;

static int blocks(void) {
    int device = 0, most = 0;
    const device_ops *ops = ucch_bound_ops();
    if (ops->current(&device) || ops->resident(device, THREADS, &most) || most <= 0)
        return UCCH_BLOCKS;
    most /= KERNELS;
    return most > MOST ? MOST : most < 1 ? 1 : most;
}

static int make(size_t bytes) {
    const device_ops *ops = ucch_bound_ops();
    void *memory = NULL;
    int status = ucch_device_fail(ops->alloc_shared(&memory, bytes), "alloc");
    if (status)
        return status;
    status = ucch_device_fail(ops->share(memory, &own.handle), "sharing device memory");
    if (status) {
        ops->release(memory);
        return status;
    }
    own.memory = memory;
    own.chunks = bytes / UCCH_CHUNK;
    own.blocks = blocks();
    own.key = ucch_window_key();
    return 0;
}

/* This process's arena, made at first use with so many bytes: 0, and what others open it by (UCCH_SHARE_BYTES); or a
 * failure. It has a window. */
int ucch_arena_own(size_t bytes, void *handle) {
    if (!ucch_bound_ops() || !ucch_window_key())
        return UCCH_FAIL_DEVICE;
    ucch_lock();
    int before = ucch_device_enter(), status = own.key == ucch_window_key() ? 0 : make(bytes);
    ucch_device_leave(before);
    ucch_room_near_locked(ucch_arena_chunks());
    ucch_unlock();
    memcpy(handle, &own.handle, sizeof(own.handle));
    return status;
}

static char **found(uint64_t key) {
    for (int i = 0; i < npeers; i++)
        if (peers[i].key == key)
            return &peers[i].seen;
    return NULL;
}

/* Open the arena of another process, which knows this one by `key`: 0, or a failure. */
int ucch_arena_open(uint64_t key, const void *handle) {
    ucch_lock();
    char **at = found(key);
    void *there = NULL;
    int before = ucch_device_enter(), status = !at && npeers == MOST_ARENAS ? UCCH_FAIL_MEMORY : 0;
    if (!status && !(at && *at))
        status = ucch_device_fail(ucch_bound_ops()->open_shared(&there, handle), "opening device memory of a peer");
    ucch_device_leave(before);
    if (!status && there && at)
        *at = there;
    else if (!status && there) {
        peers[npeers].key = key;
        peers[npeers++].seen = there;
    }
    ucch_unlock();
    return status;
}

/* Do without the arena of a process, as it cannot open ours. */
void ucch_arena_close(uint64_t key) {
    ucch_lock();
    char **at = found(key);
    int before = ucch_device_enter();
    if (at && *at)
        ucch_bound_ops()->close_shared(*at);
    if (at)
        *at = NULL;
    ucch_device_leave(before);
    ucch_unlock();
}

/* Where our device sees the arena of a process; NULL where messages with it have none. `key` 0: our own. */
char *ucch_arena_seen(uint64_t key) {
    if (!key)
        return own.memory;
    char **at = found(key);
    return at ? *at : NULL;
}

/* Chunks that have a place in ours; 0 without one. */
size_t ucch_arena_chunks(void) {
    return own.key && own.key == ucch_window_key() ? own.chunks : 0;
}

/* Blocks of kernels that copy to or from one. */
int ucch_arena_blocks(void) {
    return own.blocks;
}
