/* Shared pinned memory of one communicator's, for its channels (ring.c): every rank has an anonymous file that the
 * others map, apart from windows (segment.c), so that nobody's calls take the room of anybody's messages.
 *
 * What a communicator gives back stays mapped and pinned, on all of its ranks, for the next that wants as much: to
 * unpin it could wait for the device, and so for streams that wait for other ranks. */
#define _GNU_SOURCE
#include "shm/mapping.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shm/segment.h"

static ucch_mapping *all; /* the oldest first, so that ranks that give back in one order find each other's again */
static size_t pinned;     /* bytes of our own */

static ucch_mapping *keep(uint64_t key, int file, size_t bytes, int here) {
    ucch_mapping *m = calloc(1, sizeof(*m));
    void *memory = m ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, here, 0) : MAP_FAILED;
    if (memory == MAP_FAILED) {
        free(m);
        return NULL;
    }
    *m = (ucch_mapping){.key = key, .file = file, .used = 1, .bytes = bytes, .memory = memory};
    ucch_mapping **last = &all;
    while (*last)
        last = &(*last)->next;
    return *last = m;
}

/* One that is there: this file of a process's, or for `file` -1 any of its that nobody uses. */
static ucch_mapping *found(uint64_t key, int file, size_t bytes) {
    for (ucch_mapping *m = all; m; m = m->next)
        if (m->key == key && m->bytes == bytes && (file < 0 ? !m->used : m->file == file)) {
            m->used++;
            return m;
        }
    return NULL;
}

/* Memory of this process's, which has a window: all of its pages are there. NULL where there is no room. */
ucch_mapping *ucch_mapping_new(size_t bytes) {
    ucch_lock();
    ucch_mapping *m = found(ucch_window_key(), -1, bytes);
    int file = m ? -1 : memfd_create("ucc_hetero", MFD_CLOEXEC);
    if (file >= 0 && !ftruncate(file, (off_t)bytes) && !posix_fallocate(file, 0, (off_t)bytes))
        m = keep(ucch_window_key(), file, bytes, file);
    if (!m && file >= 0)
        close(file);
    ucch_unlock();
    return m;
}

/* That of another process; NULL where it cannot be opened. */
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes) {
    ucch_lock();
    ucch_mapping *m = found(key, file, bytes);
    int here = m ? -1 : ucch_file_of(pid, file);
    if (here >= 0) {
        m = keep(key, file, bytes, here);
        close(here);
    }
    ucch_unlock();
    return m;
}

/* Have the bound device see it: 0, or a failure. */
int ucch_mapping_pin(ucch_mapping *m) {
    if (m->seen)
        return 0;
    ucch_lock();
    int before = ucch_device_enter();
    int status = ucch_memory_pin(m->memory, m->bytes, &m->seen);
    pinned += !status && m->key == ucch_window_key() ? m->bytes : 0;
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* Nobody of ours uses it any more. */
void ucch_mapping_give(ucch_mapping *m) {
    ucch_lock();
    m->used--;
    ucch_unlock();
}

/* Bytes of our own that have been pinned for channels, in use or not. */
size_t ucch_channels_pinned(void) {
    ucch_lock();
    size_t bytes = pinned;
    ucch_unlock();
    return bytes;
}
