/* Mailbox: receives that are posted for a stream before anybody has heard of the message.
 *
 * A receiver that leaves the whole of a message to a stream posts a receive in the mailbox of its own window; the
 * sender looks there when it sends, and fills in where the message is. Once the data comes, the sender's kernel rings
 * the doorbell: only then the receiver's begins, as one that waits has a share of its device. So neither the
 * receiver's host nor its progress thread has any part in it: they may be waiting inside the driver for what that very
 * stream has still to do. Only what does not go from stream to stream is left to them; they hear of every message by
 * its header (rendezvous.c). */
#include <string.h>

#include "shm/segment.h"

enum { FREE, OPEN, LEFT };

/* In a posted receive's word while nothing is filled in: it has a credit of its sender's (room.c). */
#define CREDITED ((uint64_t)1 << 31)

/* Whether every block of the kernel has ended that waits there. */
int ucch_posted_gone(const ucch_posted *s) {
    for (uint32_t i = 0; i < s->blocks; i++)
        if (!__atomic_load_n(&s->gone[i].word, __ATOMIC_ACQUIRE)) return 0;
    return 1;
}

/* Whether nobody will touch it any more: our kernel has ended, and the sender's has rung the doorbell or will not. */
static int is_over(const ucch_posted *s) {
    return ucch_posted_gone(s) && (!s->extent || __atomic_load_n(&s->extent->rung, __ATOMIC_ACQUIRE));
}

static uint32_t uses(uint64_t word) { return (uint32_t)(word >> 32); }

/* Post a receive for message `number` under a tag from process `sender`, for a kernel of so many blocks; NULL where the
 * mailbox is full. With a credit of the sender's, which goes with it. */
ucch_posted *ucch_posted_open_locked(uint64_t sender, uint64_t tag, uint32_t number, int blocks, int credited) {
    static int last; /* those behind it have been free for longest */
    const ucch_window *w = ucch_window_of(0);
    for (int n = 0; w->mailbox_seen && n < MAILBOX; n++) {
        last = (last + 1) % MAILBOX;
        ucch_posted *s = &w->mailbox[last];
        if (s->state == OPEN || (s->state == LEFT && !is_over(s))) continue;
        __atomic_store_n(&s->state, FREE, __ATOMIC_RELEASE);
        uint64_t word = (uint64_t)(uses(s->word) + 1) << 32;
        __atomic_store_n(&s->word, credited ? word | CREDITED : word, __ATOMIC_SEQ_CST);
        memset(s->gone, 0, sizeof(s->gone));
        s->stop = 0;
        s->extent = NULL;
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
void ucch_posted_close_locked(ucch_posted *s) {
    __atomic_store_n(&s->state, is_over(s) ? FREE : LEFT, __ATOMIC_RELEASE);
}

/* By a host: it may be late, and the place in use again. */
static void ring(ucch_posted *s, uint32_t use) {
    uint32_t seen = __atomic_load_n(&s->doorbell.word, __ATOMIC_SEQ_CST);
    while ((int32_t)(use - seen) > 0 &&
           !__atomic_compare_exchange_n(&s->doorbell.word, &seen, use, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

/* The message is in an extent: its sender's kernel is to ring, unless it has been there. */
static void announce(ucch_posted *s, int i, uint32_t use, ucch_extent *extent) {
    __atomic_store_n(&extent->doorbell, (uint64_t)use << 32 | (uint32_t)(i + 1), __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&extent->put[0].word, __ATOMIC_SEQ_CST)) ring(s, use);
}

/* Fill in where the message is, unless that has been done or another receive has been posted there since `seen` was
 * read. Returns what counts. A credit of process `sender`'s goes back. */
static uint32_t fill(const ucch_window *w, ucch_posted *s, unsigned long long seen, uint32_t where, uint64_t sender) {
    uint32_t use = uses(seen);
    while (uses(seen) == use && !((uint32_t)seen & ~CREDITED)) {
        uint64_t filled = (uint64_t)use << 32 | where;
        if (!__atomic_compare_exchange_n(&s->word, &seen, filled, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        __atomic_sub_fetch(&w->credits->waiting, 1, __ATOMIC_SEQ_CST);
        if (seen & CREDITED) ucch_credit_return(sender);
        return where;
    }
    return (uint32_t)(seen & ~CREDITED);
}

/* Nothing has been queued for it yet, and its sender has perhaps left the message to hosts: whether it is withdrawn,
 * with the credit. Not where the sender has taken that up, or has filled it in. */
int ucch_posted_withdraw(ucch_posted *s) {
    unsigned long long seen = (uint64_t)uses(s->word) << 32 | CREDITED, none = (seen & ~CREDITED) | UCCH_NOWHERE;
    if (!__atomic_compare_exchange_n(&s->word, &seen, none, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
    __atomic_sub_fetch(&ucch_window_of(0)->credits->waiting, 1, __ATOMIC_SEQ_CST);
    ucch_credit_return(s->sender);
    s->blocks = 0;
    return 1;
}

/* Its place in our own mailbox. */
static int number_of(const ucch_posted *s) { return (int)(s - ucch_window_of(0)->mailbox); }

/* Say where the message of our own is, unless that has been said. Returns what counts. */
uint32_t ucch_posted_settle(ucch_posted *s, uint32_t where) {
    uint64_t seen = __atomic_load_n(&s->word, __ATOMIC_SEQ_CST);
    uint32_t found = fill(ucch_window_of(0), s, seen, where, s->sender);
    s->extent = found == UCCH_NOWHERE ? NULL : ucch_extent_at(s->sender, (int)found - 1);
    if (s->extent && found == where)
        announce(s, number_of(s), uses(seen), s->extent);
    else if (!s->extent)
        ring(s, uses(seen));
    return found;
}

/* Let its kernel go on, with data or without. */
void ucch_posted_stop(ucch_posted *s) {
    __atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
    ucch_posted_settle(s, UCCH_NOWHERE);
    ring(s, uses(s->word));
}

/* Let a stream wait for the doorbell, before the kernel. `await` is a kernel that waits, where streams wait for words
 * of their own only. */
int ucch_posted_hold(ucch_posted *s, void *await, void *stream) {
    ucch_counter doorbell = {&s->doorbell.word, &ucch_posted_seen(s)->doorbell};
    if (await && !ucch_reached(doorbell.at, uses(s->word)) &&
        !ucch_doorbell_hold(number_of(s), doorbell.at, uses(s->word), stream))
        return 0;
    return ucch_counter_wait(doorbell, uses(s->word), await, stream);
}

/* Its address for the kernel. */
ucch_posted *ucch_posted_seen(const ucch_posted *s) { return ucch_window_of(0)->mailbox_seen + number_of(s); }

static int waits_for(const ucch_posted *s, uint64_t tag, uint32_t number) {
    return __atomic_load_n(&s->state, __ATOMIC_SEQ_CST) == OPEN && s->sender == ucch_window_of(0)->key &&
           s->tag == tag && s->number == number;
}

/* The receive in a mailbox that waits for our message `number` under a tag, and its word; NULL without one. */
static ucch_posted *waiting_for(const ucch_window *w, uint64_t tag, uint32_t number, unsigned long long *seen) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!w->credits || !__atomic_load_n(&w->credits->waiting, __ATOMIC_SEQ_CST)) return NULL;
    for (int i = 0; i < MAILBOX; i++) {
        ucch_posted *s = &w->mailbox[i];
        if (!waits_for(s, tag, number)) continue;
        *seen = __atomic_load_n(&s->word, __ATOMIC_SEQ_CST);
        /* Had another been posted there since that reading, filling in would fail. */
        return waits_for(s, tag, number) ? s : NULL;
    }
    return NULL;
}

/* Our message `number` under a tag is queued: tell process `receiver`'s stream, if one waits already. The header has
 * been sent before, for those that come to wait from now on. */
void ucch_mailbox_deliver(uint64_t receiver, uint64_t tag, uint32_t number, uint32_t where) {
    unsigned long long seen = 0;
    const ucch_window *w = ucch_window_of(receiver);
    ucch_posted *s = waiting_for(w, tag, number, &seen);
    if (s && fill(w, s, seen, where, ucch_window_of(0)->key) == where)
        announce(s, (int)(s - w->mailbox), uses(seen), ucch_extent_at(0, (int)where - 1));
}

/* We have no room for the message: whether a stream waits for it with a credit of ours, which is taken up now. */
int ucch_mailbox_keep(uint64_t receiver, uint64_t tag, uint32_t number) {
    unsigned long long seen = 0;
    ucch_posted *s = waiting_for(ucch_window_of(receiver), tag, number, &seen);
    return s && (seen & CREDITED) &&
           __atomic_compare_exchange_n(&s->word, &seen, seen & ~CREDITED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
