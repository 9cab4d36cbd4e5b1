/* Chunks of our window (segment.c): which of them are free. */
#include <stdlib.h>

#include "shm/segment.h"

static char *used; /* by chunk */
static size_t nchunks;

/* A new window of so many chunks. */
static int begin_locked(size_t many) {
    char *flags = calloc(many + 1, 1);
    if (!flags) return UCCH_FAIL_MEMORY;
    free(used);
    used = flags;
    nchunks = many;
    return 0;
}

/* This process's window, made at first use: its file, or a failure. `key` is the process's, so that a child makes one
 * of its own. `bytes` are wanted for its chunks, and then those that they have. */
int ucch_window_own(uint64_t key, size_t *bytes) {
    ucch_lock();
    const ucch_window *w = ucch_window_of(0);
    int status = w->key == key ? 0 : begin_locked(*bytes / UCCH_CHUNK);
    if (!status && w->key != key) status = ucch_window_make_locked(key, *bytes / UCCH_CHUNK);
    *bytes = w->nchunks * UCCH_CHUNK;
    ucch_unlock();
    return status < 0 ? status : w->file;
}

/* One chunk of our own: 1, or 0 where none is free. */
int ucch_chunk_take_locked(uint16_t *chunk) {
    for (size_t i = 0; i < nchunks; i++)
        if (!used[i]) {
            used[i] = 1;
            *chunk = (uint16_t)i;
            return 1;
        }
    return 0;
}

void ucch_chunk_give_locked(uint16_t chunk) { used[chunk] = 0; }

/* Chunks of our own that nobody uses. */
int ucch_window_room(void) {
    int room = 0;
    ucch_lock();
    for (size_t i = 0; i < nchunks; i++)
        room += !used[i];
    ucch_unlock();
    return room;
}
