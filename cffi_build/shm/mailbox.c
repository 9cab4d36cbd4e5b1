/* Slips: where a stream waits for a message that nobody has heard of yet.
 *
 * A receiver that leaves the whole of a message to a stream writes on a slip, in its own window, what it waits for; the
 * sender looks there when it sends, and fills in where the message is. Once the data comes, the sender's kernel rings
 * the slip's bell: only then the receiver's begins, as one that waits has a share of its device. So neither the
 * receiver's host nor its progress thread has any part in it: they may be waiting inside the driver for what that very
 * stream has still to do. Only what does not go from stream to stream is left to them; they hear of every message by
 * its token (rendezvous.c). */
#include <string.h>

#include "shm/ring.h"
#include "shm/segment.h"

enum { FREE, OPEN, LEFT };

/* In a slip's word while nothing is filled in: its sender has promised the message's way (room.c). */
#define PROMISED ((uint64_t)1 << 31)

/* Whether every block of the kernel has ended that waits there. */
int ucch_slip_gone(const ucch_slip *s) {
    for (uint32_t i = 0; i < s->blocks; i++)
        if (!__atomic_load_n(&s->gone[i].word, __ATOMIC_ACQUIRE))
            return 0;
    return 1;
}

/* Whether nobody will touch it any more: our kernel has ended, and the sender's has rung the bell or will not. */
static int is_over(const ucch_slip *s) {
    return ucch_slip_gone(s) && (!s->run || __atomic_load_n(&s->run->rung, __ATOMIC_ACQUIRE));
}

static uint32_t uses(uint64_t word) {
    return (uint32_t)(word >> 32);
}

/* A slip for message `number` under a tag from process `sender`, for a kernel of so many blocks; NULL where all are in
 * use. With a promise of the sender's, which goes with it. */
ucch_slip *ucch_slip_open_locked(uint64_t sender, uint64_t tag, uint32_t number, int blocks, int promised) {
    static int last; /* those behind it have been free for longest */
    const ucch_window *w = ucch_window_of(0);
    for (int n = 0; w->slips_seen && n < SLIPS; n++) {
        last = (last + 1) % SLIPS;
        ucch_slip *s = &w->slips[last];
        if (s->state == OPEN || (s->state == LEFT && !is_over(s)))
            continue;
        __atomic_store_n(&s->state, FREE, __ATOMIC_RELEASE);
        uint64_t word = (uint64_t)(uses(s->word) + 1) << 32;
        __atomic_store_n(&s->word, promised ? word | PROMISED : word, __ATOMIC_SEQ_CST);
        memset(s->gone, 0, sizeof(s->gone));
        s->stop = 0;
        s->run = NULL;
        s->number = number;
        s->blocks = (uint32_t)blocks;
        s->sender = sender;
        s->tag = tag;
        __atomic_add_fetch(&w->credits->waiting, 1, __ATOMIC_SEQ_CST);
        __atomic_store_n(&s->state, OPEN, __ATOMIC_SEQ_CST);
        return s;
    }
    return NULL;
}

/* Nobody asks about it any more; it is used again once all is over. */
void ucch_slip_close_locked(ucch_slip *s) {
    __atomic_store_n(&s->state, is_over(s) ? FREE : LEFT, __ATOMIC_RELEASE);
}

/* By a host: it may be late, and the slip in use again. */
static void ring(ucch_slip *s, uint32_t use) {
    uint32_t seen = __atomic_load_n(&s->bell.word, __ATOMIC_SEQ_CST);
    while ((int32_t)(use - seen) > 0 &&
           !__atomic_compare_exchange_n(&s->bell.word, &seen, use, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

/* The slip's message is in a run: its sender's kernel is to ring, unless it has been there. */
static void announce(ucch_slip *s, int i, uint32_t use, ucch_run *run) {
    __atomic_store_n(&run->whose, (uint64_t)use << 32 | (uint32_t)(i + 1), __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&run->put[0].word, __ATOMIC_SEQ_CST))
        ring(s, use);
}

/* Fill in where the message is, unless that has been done or the slip is no longer what it was when `seen` was read.
 * Returns what counts. Nobody needs a promise of process `sender`'s any more. */
static uint32_t fill(const ucch_window *w, ucch_slip *s, unsigned long long seen, uint32_t where, uint64_t sender) {
    uint32_t use = uses(seen);
    while (uses(seen) == use && !((uint32_t)seen & ~PROMISED)) {
        uint64_t filled = (uint64_t)use << 32 | where;
        if (!__atomic_compare_exchange_n(&s->word, &seen, filled, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        __atomic_sub_fetch(&w->credits->waiting, 1, __ATOMIC_SEQ_CST);
        if (seen & PROMISED)
            ucch_promise_end(sender);
        return where;
    }
    return (uint32_t)(seen & ~PROMISED);
}

/* Nothing has been queued for it yet, and its sender has perhaps left the message to hosts: whether the slip is let go,
 * with the promise. Not where the sender keeps that, or has filled it in. */
int ucch_slip_withdraw(ucch_slip *s) {
    unsigned long long seen = (uint64_t)uses(s->word) << 32 | PROMISED, none = (seen & ~PROMISED) | UCCH_NOWHERE;
    if (!__atomic_compare_exchange_n(&s->word, &seen, none, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return 0;
    __atomic_sub_fetch(&ucch_window_of(0)->credits->waiting, 1, __ATOMIC_SEQ_CST);
    ucch_promise_end(s->sender);
    s->blocks = 0;
    return 1;
}

/* Of our own slips. */
static int number_of(const ucch_slip *s) {
    return (int)(s - ucch_window_of(0)->slips);
}

/* Say where our slip's message is, unless that has been said. Returns what counts. */
uint32_t ucch_slip_settle(ucch_slip *s, uint32_t where) {
    uint64_t seen = __atomic_load_n(&s->word, __ATOMIC_SEQ_CST);
    uint32_t found = fill(ucch_window_of(0), s, seen, where, s->sender);
    s->run = found == UCCH_NOWHERE ? NULL : ucch_run_at(s->sender, (int)found - 1);
    if (s->run && found == where)
        announce(s, number_of(s), uses(seen), s->run);
    else if (!s->run)
        ring(s, uses(seen));
    return found;
}

/* Let its kernel go on, with data or without. */
void ucch_slip_stop(ucch_slip *s) {
    __atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
    ucch_slip_settle(s, UCCH_NOWHERE);
    ring(s, uses(s->word));
}

/* Let a stream wait for the bell, before the kernel. `await` is a kernel that waits, where streams wait for words of
 * their own only. */
int ucch_slip_hold(ucch_slip *s, void *await, void *stream) {
    ucch_word bell = {&s->bell.word, &ucch_slip_seen(s)->bell};
    if (await && !ucch_word_has(bell, uses(s->word)) && !ucch_bell_hold(number_of(s), bell.at, uses(s->word), stream))
        return 0;
    return ucch_word_wait(await, bell, uses(s->word), stream);
}

/* Its address for the kernel. */
ucch_slip *ucch_slip_seen(const ucch_slip *s) {
    return ucch_window_of(0)->slips_seen + number_of(s);
}

static int waits_for(const ucch_slip *s, uint64_t tag, uint32_t number) {
    return __atomic_load_n(&s->state, __ATOMIC_SEQ_CST) == OPEN && s->sender == ucch_window_of(0)->key &&
           s->tag == tag && s->number == number;
}

/* The slip of process `receiver` that waits for our message `number` under a tag, and its word; NULL without one. */
static ucch_slip *waiting_for(const ucch_window *w, uint64_t tag, uint32_t number, unsigned long long *seen) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!w->credits || !__atomic_load_n(&w->credits->waiting, __ATOMIC_SEQ_CST))
        return NULL;
    for (int i = 0; i < SLIPS; i++) {
        ucch_slip *s = &w->slips[i];
        if (!waits_for(s, tag, number))
            continue;
        *seen = __atomic_load_n(&s->word, __ATOMIC_SEQ_CST);
        /* Had the slip been put to another use since that reading, filling in would fail. */
        return waits_for(s, tag, number) ? s : NULL;
    }
    return NULL;
}

/* Our message `number` under a tag is queued: tell process `receiver`'s stream, if one waits already. The token has
 * been sent before, for those that come to wait from now on. */
void ucch_slips_tell(uint64_t receiver, uint64_t tag, uint32_t number, uint32_t where) {
    unsigned long long seen = 0;
    const ucch_window *w = ucch_window_of(receiver);
    ucch_slip *s = waiting_for(w, tag, number, &seen);
    if (s && fill(w, s, seen, where, ucch_window_of(0)->key) == where)
        announce(s, (int)(s - w->slips), uses(seen), ucch_run_at(0, (int)where - 1));
}

/* We have no room for the message: whether a stream waits for it with our promise, which is taken up now. */
int ucch_slips_keep(uint64_t receiver, uint64_t tag, uint32_t number) {
    unsigned long long seen = 0;
    ucch_slip *s = waiting_for(ucch_window_of(receiver), tag, number, &seen);
    return s && (seen & PROMISED) &&
           __atomic_compare_exchange_n(&s->word, &seen, seen & ~PROMISED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
