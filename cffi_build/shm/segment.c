/* Segments: memory of a process that other processes of its host, and their devices, can access.
 *
 * No library opens one vendor's device memory for the other's, and a CPU that copies between two processes is ten times
 * slower than the devices. So each process has anonymous files that its peers map, and all of them pin them: the
 * sender's device copies pieces into one, the receiver's device copies them out. A communicator has one such file per
 * rank for its channels (channels.c). A file takes no memory before it is pinned or written. */
#include "shm/shm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static ucch_mapping *all; /* oldest first: ranks that give mappings back in the same order reuse matching ones */
static size_t pinned;     /* bytes of this process's files */

/* Pin shared memory for the bound device. Returns 0 or a failure. */
static int pin(void *memory, size_t bytes, char **seen) {
    const device_ops *ops = ucch_bound_ops();
    void *there = NULL;
    int status = ucch_device_fail(ops->host_register(memory, bytes), "pinning shared memory");
    if (status) return status;
    status = ucch_device_fail(ops->mapped(memory, &there), "address of shared memory");
    if (status) ops->host_unregister(memory);
    if (!status) *seen = there;
    return status;
}

static ucch_mapping *add_mapping(uint64_t key, int file, size_t bytes, int here) {
    ucch_mapping *m = calloc(1, sizeof(*m));
    struct stat about;
    char *memory = m && !fstat(here, &about) ? ucch_shared_map(here, 0, bytes) : NULL;
    if (!memory) {
        free(m);
        return NULL;
    }
    *m = (ucch_mapping){.key = key, .file = file, .inode = about.st_ino, .used = 1, .bytes = bytes, .memory = memory};
    UCCH_APPEND(all, m, next);
    return m;
}

/* True if no process uses this process's file any more. */
static int is_unused(const ucch_mapping *m) { return !m->used && !(m->ranges && UCCH_LOAD(ucch_mapping_peers(m))); }

/* Find an existing mapping: this file of a process, or for `file` -1 any of its files that is unused. */
static ucch_mapping *find_mapping(uint64_t key, int file, size_t bytes) {
    for (ucch_mapping *m = all; m; m = m->next)
        if (m->key == key && m->bytes == bytes && (file < 0 ? is_unused(m) : m->file == file)) {
            m->used++;
            return m;
        }
    return NULL;
}

/* A file of this process (`key`) whose ranges are to be pinned; NULL on failure. */
ucch_mapping *ucch_mapping_new(uint64_t key, size_t bytes) {
    UCCH_LOCKED;
    ucch_mapping *m = find_mapping(key, -1, bytes);
    if (m) return m;
    int file = memfd_create("ucc_hetero", MFD_CLOEXEC);
    if (file >= 0 && !ftruncate(file, (off_t)bytes)) m = add_mapping(key, file, bytes, file);
    if (!m && file >= 0) close(file);
    if (m) m->ours = 1;
    return m;
}

/* A file of another process; NULL if it cannot be opened. */
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes) {
    UCCH_LOCKED;
    ucch_mapping *m = find_mapping(key, file, bytes);
    int here = m ? -1 : ucch_shared_open(pid, file);
    if (here >= 0) {
        m = add_mapping(key, file, bytes, here);
        close(here);
    }
    return m;
}

/* Pin whole pages of a mapping for the bound device, which sees them at `seen`. Returns 0 or a failure. Waits for no
 * stream, but the driver may be blocked by a thread that does: so it is called without the lock, by the mapping's only
 * user. */
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen) {
    ucch_range *r = m->ranges;
    while (r && (r->at != at || r->bytes != bytes))
        r = r->next;
    if (!r) {
        UCCH_ON_DEVICE;
        r = malloc(sizeof(*r));
        int status = !r || (m->ours && posix_fallocate(m->file, (off_t)at, (off_t)bytes)) ? UCCH_FAIL_MEMORY : 0;
        if (!status) status = pin(m->memory + at, bytes, seen);
        if (status) {
            free(r);
            return status;
        }
        *r = (ucch_range){at, bytes, *seen, m->ranges};
        m->ranges = r;
        m->pinned += bytes;
        __atomic_add_fetch(&pinned, m->ours ? bytes : 0, __ATOMIC_RELAXED);
    }
    *seen = r->seen;
    m->seen = at ? m->seen : r->seen;
    return 0;
}

/* Release a mapping that its owner, or a peer (ucch_mapping_peers), uses. It stays mapped and pinned, on all ranks, for
 * the next communicator of similar size: unpinning could wait for the device, and so for streams that wait for other
 * ranks. */
void ucch_mapping_give(ucch_mapping *m) {
    UCCH_LOCKED;
    m->used--;
    if (!m->ours) __atomic_sub_fetch(ucch_mapping_peers(m), 1, __ATOMIC_SEQ_CST);
}

/* Unmap memory that has no other user; without the lock, as the driver may wait for the device. */
void ucch_mapping_drop(ucch_mapping *m) {
    ucch_lock();
    UCCH_UNLINK(all, m, next);
    ucch_unlock();
    for (ucch_range *r; (r = m->ranges); free(r)) {
        ucch_bound_ops()->host_unregister(m->memory + r->at);
        m->ranges = r->next;
    }
    ucch_shared_unmap(m->memory, m->bytes);
    if (m->ours) close(m->file);
    __atomic_sub_fetch(&pinned, m->ours ? m->pinned : 0, __ATOMIC_RELAXED);
    free(m);
}

/* Pinned bytes of this process's files, in use or not. */
size_t ucch_channels_pinned(void) { return __atomic_load_n(&pinned, __ATOMIC_RELAXED); }
