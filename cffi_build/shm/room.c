/* Shares of our window (segment.c): what is left, and for whom.
 *
 * A quarter is for messages that hosts move; of the rest some chunks are for credits, and all others for what goes from
 * stream to stream. A stream waits for a message that has not been sent only with a credit of the sender's, which is
 * good for a chunk, so that it is left to no host: hosts may be kept from the device by what is queued behind a stream
 * that waits. Receivers take credits out of the sender's window, and they go with posted receives (mailbox.c). The
 * sender says that it leaves a message to hosts before it looks for a posted receive with a credit for it, and a
 * receiver looks for that once its own is posted: one of both sees the other. */
#include <stdlib.h>
#include <string.h>

#include "shm/segment.h"

/* Streams run so far ahead of their senders; more chunks would not be there for long messages. */
#define MOST_CREDITS 16

static char *used; /* by chunk; the first `nkept` are there for credits */
static size_t nchunks, nkept, most;
static size_t lent; /* to messages that streams copy, but for those by credit */

/* A new window of so many chunks; a quarter of it, and one chunk at least, is for messages that hosts move. */
static int begin_locked(size_t many) {
    size_t all = many * 3 / 4 < many ? many * 3 / 4 : 0;
    char *flags = calloc(many + 1, 1);
    if (!flags) return UCCH_FAIL_MEMORY;
    free(used);
    used = flags;
    nchunks = many;
    lent = 0;
    nkept = all - all * 2 / 3 < MOST_CREDITS ? all - all * 2 / 3 : MOST_CREDITS;
    most = all - nkept;
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

/* Tell others how many credits there are. */
void ucch_room_publish_locked(void) {
    const ucch_window *w = ucch_window_of(0);
    if (!w->credits) return;
    __atomic_store_n(&w->credits->holds, (uint32_t)ucch_may_hold(), __ATOMIC_RELEASE);
    __atomic_store_n(&w->credits->most_near, (uint32_t)(w->near < nkept ? w->near : nkept), __ATOMIC_RELEASE);
    __atomic_store_n(&w->credits->most, (uint32_t)nkept, __ATOMIC_RELEASE);
}

/* This process's arena, made at first use with so many bytes: 0, and what others open it by (UCCH_SHARE_BYTES); or a
 * failure. It has a window. */
int ucch_arena_own(size_t bytes, void *handle) {
    if (!ucch_bound_ops() || !ucch_window_of(0)->key) return UCCH_FAIL_DEVICE;
    ucch_lock();
    int status = ucch_arena_make_locked(bytes, handle);
    ucch_room_publish_locked();
    ucch_unlock();
    return status;
}

/* One chunk of our own for messages that hosts move: 1, or 0 where none is free. */
int ucch_chunk_take_locked(uint16_t *chunk) {
    for (size_t i = nkept; i < nchunks; i++)
        if (!used[i]) {
            used[i] = 1;
            *chunk = (uint16_t)i;
            return 1;
        }
    return 0;
}

void ucch_chunk_give_locked(uint16_t chunk) { used[chunk] = 0; }

/* Chunks of our own that nobody uses, but for those that are kept. */
int ucch_window_room(void) {
    int room = 0;
    ucch_lock();
    for (size_t i = nkept; i < nchunks; i++)
        room += !used[i];
    ucch_unlock();
    return room;
}

/* Neighbouring chunks for one message that goes from stream to stream: the first of them, or -1. `is_near`: with places
 * in our arena. */
int ucch_extent_take_locked(int many, int is_near) {
    size_t near = ucch_window_of(0)->near, limit = is_near && near < nchunks ? near : nchunks, n = 0;
    for (size_t i = nkept; i < limit && lent + (size_t)many <= most; i++) {
        n = used[i] ? 0 : n + 1;
        if (n < (size_t)many) continue;
        lent += n;
        memset(used + i + 1 - n, 1, n);
        return (int)(i + 1 - n);
    }
    return -1;
}

/* The chunk of a credit that has been taken up: there are no more credits than chunks. */
int ucch_extent_keep_locked(int is_near) {
    for (size_t n = 0; n < nkept; n++) {
        size_t i = is_near ? n : nkept - 1 - n;
        if (!used[i]) {
            used[i] = 1;
            return (int)i;
        }
    }
    return -1;
}

void ucch_extent_give_locked(int first, int many) {
    memset(used + first, 0, (size_t)many);
    if ((size_t)first < nkept)
        ucch_credit_return(0);
    else
        lent -= (size_t)many;
}

/* ---- credits ---- */

/* Take a credit of process `key`, which leaves a message of up to so many bytes to no host then: 1, or 0 where there is
 * none. */
int ucch_credit_take(uint64_t key, size_t bytes, int is_near) {
    ucch_credits *p = ucch_window_of(key)->credits;
    if (!p || (bytes > UCCH_CHUNK && !__atomic_load_n(&p->holds, __ATOMIC_ACQUIRE))) return 0;
    uint32_t limit = __atomic_load_n(is_near ? &p->most_near : &p->most, __ATOMIC_ACQUIRE);
    uint32_t given = __atomic_load_n(&p->given, __ATOMIC_ACQUIRE);
    while (given < limit)
        if (__atomic_compare_exchange_n(&p->given, &given, given + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 1;
    return 0;
}

/* It has been used, or nobody needs it; `key` 0: ours. */
void ucch_credit_return(uint64_t key) {
    ucch_credits *p = ucch_window_of(key)->credits;
    if (p) __atomic_sub_fetch(&p->given, 1, __ATOMIC_SEQ_CST);
}

/* One more of our messages is left to hosts, or one less. */
void ucch_hosts_note(int more) {
    ucch_credits *p = ucch_window_of(0)->credits;
    if (p) __atomic_add_fetch(&p->by_hosts, (uint32_t)more, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* How many messages process `key` has left to hosts; 0: we. */
int ucch_messages_by_hosts(uint64_t key) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ucch_credits *p = ucch_window_of(key)->credits;
    return p ? (int)__atomic_load_n(&p->by_hosts, __ATOMIC_SEQ_CST) : 0;
}
