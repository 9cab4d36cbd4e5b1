/* A page of memory shared by the ranks of one communicator on one host: who has arrived at which call.
 *
 * UCC returns OK with wrong data, or never, when ranks call different things; a dead peer is not noticed at all. Each
 * rank writes the signature of the call it enters into a slot of its own (one cache line, no lock). Whoever looks
 * later sees a peer that called something else, has not arrived, or whose process is gone. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ucch.h"

#define RING 64
/* Refusals of a rank that others may still have to read: with more it waits (ucch_board_room). */
#define REFUSALS 32
#define LABEL UCCH_LABEL_BYTES
#define LEFT (-1)

typedef struct arrival {
    uint64_t seq; /* 0 while being written */
    uint64_t signature;
    char label[LABEL];
} arrival;

/* A refusal as others read it; `version` is odd while it is written. */
typedef struct notice {
    uint64_t version;
    ucch_refusal refusal;
} notice;

typedef struct slot {
    int64_t pid;
    uint64_t seq;  /* the last call entered or refused */
    uint64_t open; /* calls entered that have not ended: who makes progress looks for their refusals */
    char pad[40];
    uint64_t news; /* of slot 0: how many refusals there were, of all ranks; in a line that is hardly ever written */
    uint64_t refused;
    uint64_t read; /* so much of the news */
    char more[40];
    notice notices[REFUSALS];
    arrival ring[RING];
} slot;

struct ucch_board {
    slot *slots;
    int n, mine;
    uint64_t seq, started; /* the last call, and the last one that was not refused */
    uint64_t since;        /* refusals of earlier calls are of no interest to those that start now */
    ucch_refusal *known;   /* read, or told by ranks on other hosts */
    int nread, room;
    uint64_t *versions;               /* of all notices, as they were read */
    uint64_t tickets[REFUSALS];       /* of our own: their numbers among the news */
    uint64_t heard, collected;        /* news from other hosts, and from this one */
    uint64_t quiet_news, quiet_since; /* with so much news nothing concerned calls from there on */
    int *ranks;
    uint64_t calls, bytes; /* finished well, and what they moved */
    double seconds;
    _Atomic int launches;
    _Atomic int broken;               /* a call failed: the communicator starts no more */
    _Atomic(ucch_op *) first_failure; /* that call, where nobody waits for it */
};

size_t ucch_board_bytes(int nslots) { return (size_t)nslots * sizeof(slot); }

/* memory == NULL: a board of this rank alone (no peer shares the host's memory); it still counts calls. */
ucch_board *ucch_board_new(void *memory, int nslots, int mine, const int *ranks) {
    ucch_board *b = calloc(1, sizeof(*b));
    if (!b) return NULL;
    b->slots = memory;
    b->n = memory ? nslots : 0;
    b->mine = mine;
    b->ranks = calloc((size_t)nslots + 1, sizeof(int));
    b->versions = calloc((size_t)b->n * REFUSALS + 1, sizeof(uint64_t));
    if (!b->ranks || !b->versions) {
        ucch_board_free(b);
        return NULL;
    }
    memcpy(b->ranks, ranks, (size_t)nslots * sizeof(int));
    if (b->n) b->slots[mine].pid = getpid();
    return b;
}

void ucch_board_free(ucch_board *b) {
    free(b->known);
    free(b->versions);
    free(b->ranks);
    free(b);
}

void ucch_board_add(ucch_board *b, double seconds, uint64_t bytes) {
    b->calls++;
    b->seconds += seconds;
    b->bytes += bytes;
}

void ucch_board_stats(ucch_board *b, uint64_t *calls, double *seconds, uint64_t *bytes) {
    ucch_lock();
    *calls = b->calls;
    *seconds = b->seconds;
    *bytes = b->bytes;
    ucch_unlock();
}

static void write_arrival(ucch_board *b, uint64_t seq, uint64_t signature, const char *label) {
    arrival *a = &b->slots[b->mine].ring[seq % RING];
    __atomic_store_n(&a->seq, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&a->signature, signature, __ATOMIC_RELAXED);
    memcpy(a->label, label, LABEL);
    __atomic_store_n(&a->seq, seq, __ATOMIC_RELEASE);
}

uint64_t ucch_board_publish(ucch_board *b, uint64_t signature, const char *label) {
    uint64_t seq = b->started = ++b->seq;
    if (!b->n) return seq;
    write_arrival(b, seq, signature, label);
    __atomic_store_n(&b->slots[b->mine].seq, seq, __ATOMIC_RELEASE);
    return seq;
}

/* Say what the next call will be, before it is entered: its teams are made first, by ranks that wait for each other.
 * Returns the number it will have. */
uint64_t ucch_board_announce(ucch_board *b, uint64_t signature, const char *label) {
    if (b->n) write_arrival(b, b->seq + 1, signature, label);
    return b->seq + 1;
}

/* The signature and, if asked for, the label with which a rank entered call `seq`: 1, or 0 where it has not, or has
 * moved on past the ring, be it while we read. */
static int read_arrival(const slot *s, uint64_t seq, uint64_t *signature, char *label) {
    const arrival *a = &s->ring[seq % RING];
    if (__atomic_load_n(&a->seq, __ATOMIC_ACQUIRE) != seq) return 0;
    *signature = __atomic_load_n(&a->signature, __ATOMIC_RELAXED);
    if (label) memcpy(label, a->label, LABEL);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&a->seq, __ATOMIC_RELAXED) == seq;
}

/* ---- refusals ---- */

static int fate_of(const ucch_board *b, int i) {
    int64_t pid = __atomic_load_n(&b->slots[i].pid, __ATOMIC_RELAXED);
    if (pid == LEFT) return UCCH_LEFT;
    return pid && kill((pid_t)pid, 0) && errno == ESRCH ? UCCH_DIED : UCCH_THERE;
}

/* Forget what is of no interest any more: as much as the page holds stays, for those who ask why. */
static void forget(ucch_board *b) {
    int recent = b->nread - REFUSALS * (b->n + 1), kept = 0;
    for (int i = 0; i < b->nread; i++)
        if (i >= recent || b->known[i].last >= b->since) b->known[kept++] = b->known[i];
    b->nread = kept;
}

static void remember_locked(ucch_board *b, const ucch_refusal *refusal) {
    int full = b->nread == b->room;
    if (full) forget(b);
    if (full && 2 * b->nread >= b->room) {
        int room = 2 * b->room + REFUSALS;
        ucch_refusal *known = realloc(b->known, (size_t)room * sizeof(*known));
        if (known) {
            b->known = known;
            b->room = room;
        }
    }
    if (b->nread == b->room) /* no memory */
        return;
    b->known[b->nread] = *refusal;
    b->known[b->nread++].text[UCCH_REFUSAL_BYTES - 1] = 0;
}

/* Read a notice that is not the one of `version`: 0 while it is being written, and for one never written. */
static int read_notice(const notice *n, uint64_t *version, ucch_refusal *r) {
    uint64_t now = __atomic_load_n(&n->version, __ATOMIC_ACQUIRE);
    if (now == *version || now % 2) return 0;
    *r = n->refusal;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&n->version, __ATOMIC_RELAXED) != now) return 0;
    *version = now;
    return 1;
}

/* Read what the others have written since the last time, and say so: they may write over it. A notice is counted when
 * it is complete, so that one which is being written is news to come. */
static void collect_locked(ucch_board *b) {
    uint64_t news = b->n ? __atomic_load_n(&b->slots[0].news, __ATOMIC_ACQUIRE) : 0;
    if (news == b->collected) return;
    ucch_refusal r;
    for (int i = 0; i < b->n * REFUSALS; i++)
        if (i / REFUSALS != b->mine && read_notice(&b->slots[i / REFUSALS].notices[i % REFUSALS], &b->versions[i], &r))
            remember_locked(b, &r);
    b->collected = news;
    __atomic_store_n(&b->slots[b->mine].read, news, __ATOMIC_RELEASE);
}

/* Calls of this rank come to nothing, because a call was refused: those who wait for it there are to know. */
void ucch_board_give_up(ucch_board *b, const ucch_refusal *refusal) {
    if (!b->n) return;
    ucch_lock();
    slot *s = &b->slots[b->mine];
    uint64_t at = s->refused++ % REFUSALS;
    notice *n = &s->notices[at];
    uint64_t version = n->version + 1;
    __atomic_store_n(&n->version, version, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    n->refusal = *refusal;
    __atomic_store_n(&n->version, version + 1, __ATOMIC_RELEASE);
    b->tickets[at] = __atomic_add_fetch(&b->slots[0].news, 1, __ATOMIC_SEQ_CST);
    remember_locked(b, refusal);
    ucch_unlock();
}

/* A call that a rank's arguments cannot make counts as called, so that all ranks go on with the same number; those that
 * have entered it, or enter it later, learn why it comes to nothing. It may be announced already. Returns its number.
 */
uint64_t ucch_board_refuse(ucch_board *b, int rank, const char *text) {
    uint64_t seq = ++b->seq;
    ucch_refusal refusal = {.first = seq, .last = seq, .call = seq, .rank = rank, .by = rank};
    strncpy(refusal.text, text, UCCH_REFUSAL_BYTES - 1);
    if (b->n) {
        __atomic_store_n(&b->slots[b->mine].ring[seq % RING].seq, 0, __ATOMIC_RELEASE);
        ucch_board_give_up(b, &refusal);
        __atomic_store_n(&b->slots[b->mine].seq, seq, __ATOMIC_RELEASE);
    }
    return seq;
}

/* Take note of the refusal of a rank on another host. */
void ucch_board_told(ucch_board *b, const ucch_refusal *refusal) {
    ucch_lock();
    remember_locked(b, refusal);
    b->heard++;
    ucch_unlock();
}

static uint64_t news_of(const ucch_board *b) {
    return b->heard + (b->n ? __atomic_load_n(&b->slots[0].news, __ATOMIC_ACQUIRE) : 0);
}

/* The latest refusal that concerns a call from `since` to `seq`, if there is one. */
static int look_up(const ucch_board *b, uint64_t since, uint64_t seq, ucch_refusal *found) {
    found->first = 0;
    for (int i = 0; i < b->nread; i++) {
        const ucch_refusal *r = &b->known[i];
        if (r->last >= since && r->first <= seq && r->first > found->first) *found = *r;
    }
    return found->first > 0;
}

/* Whether a call from `since` to `seq` was refused, and what is known of the latest one. */
int ucch_board_refused(ucch_board *b, uint64_t since, uint64_t seq, ucch_refusal *found) {
    uint64_t news = news_of(b);
    if (!news || (news == b->quiet_news && since >= b->quiet_since)) return 0;
    ucch_refusal here;
    ucch_lock();
    collect_locked(b);
    int any = look_up(b, since, seq, found ? found : &here);
    if (!any && seq == b->seq && !look_up(b, since, UINT64_MAX, &here)) {
        b->quiet_news = news;
        b->quiet_since = since;
    }
    ucch_unlock();
    return any;
}

/* Whether a rank has refused call `seq`, or given it up because another one did. */
int ucch_board_left(ucch_board *b, int rank, uint64_t seq) {
    int left = 0;
    ucch_lock();
    collect_locked(b);
    for (int i = 0; i < b->nread && !left; i++)
        left = b->known[i].by == rank && b->known[i].last >= seq;
    ucch_unlock();
    return left;
}

/* Whether a rank needs our oldest notice no more. Who is behind us has to read it, and who has calls under way; whoever
 * is ahead with nothing under way learns of all of them by the latest one. */
static int needs_no(const ucch_board *b, int i, uint64_t oldest) {
    const slot *s = &b->slots[i];
    if (i == b->mine || __atomic_load_n(&s->read, __ATOMIC_ACQUIRE) >= oldest) return 1;
    int ahead = __atomic_load_n(&s->seq, __ATOMIC_ACQUIRE) >= b->seq;
    return (ahead && !__atomic_load_n(&s->open, __ATOMIC_ACQUIRE)) || fate_of(b, i) != UCCH_THERE;
}

/* Whether this rank may refuse a call, or give calls up, now: 0 while somebody needs the notice that it would write
 * over. Looking reads those of the others, who may be waiting for us as well. */
int ucch_board_room(ucch_board *b) {
    int room = 1;
    ucch_lock();
    collect_locked(b);
    uint64_t refused = b->n ? b->slots[b->mine].refused : 0;
    for (int i = 0; i < b->n && refused >= REFUSALS && room; i++)
        room = needs_no(b, i, b->tickets[refused % REFUSALS]);
    ucch_unlock();
    return room;
}

/* One more call that is entered (before it is published), or one that has ended. Under the lock. */
void ucch_board_open(ucch_board *b, int more) {
    if (b->n) __atomic_store_n(&b->slots[b->mine].open, b->slots[b->mine].open + (uint64_t)more, __ATOMIC_RELEASE);
}

/* Whether a call up to the last one was refused, and this rank does not know of it. */
int ucch_board_stale(ucch_board *b) { return ucch_board_refused(b, b->since, b->seq, NULL); }

static int has_refused(const ucch_board *b, int rank, uint64_t seq) {
    for (int i = 0; i < b->nread; i++)
        if (b->known[i].call == seq && b->known[i].rank == rank) return 1;
    return 0;
}

/* Whether any other rank of this host has entered a call that it could have refused: 1; 0 when none will, -1 when that
 * is not known yet. */
int ucch_board_entered(ucch_board *b, uint64_t seq) {
    int open = 0, entered = 0;
    ucch_lock();
    for (int i = 0; i < b->n; i++) {
        if (i == b->mine) continue;
        int came = __atomic_load_n(&b->slots[i].seq, __ATOMIC_ACQUIRE) >= seq;
        collect_locked(b);
        open |= !came;
        entered |= came && !has_refused(b, b->ranks[i], seq);
    }
    ucch_unlock();
    return entered ? 1 : -open;
}

/* The number of the call to come. */
uint64_t ucch_board_next(ucch_board *b) { return b->seq + 1; }

/* The last call that this rank did not refuse. */
uint64_t ucch_board_started(ucch_board *b) { return b->started; }

/* From which call on refusals concern what starts now. */
uint64_t ucch_board_since(ucch_board *b) { return b->since; }

void ucch_board_settle(ucch_board *b, uint64_t since) { b->since = since; }

/* The slot of a peer that entered call `seq` with another signature than ours, or -1. A peer that has not arrived
 * will see ours; one that has moved on past the ring had seen it. */
int ucch_board_mismatch(ucch_board *b, uint64_t seq) {
    if (b->n < 2) return -1;
    uint64_t ours, theirs;
    if (!read_arrival(&b->slots[b->mine], seq, &ours, NULL)) return -1; /* we have moved on past the ring ourselves */
    for (int i = 0; i < b->n; i++)
        if (read_arrival(&b->slots[i], seq, &theirs, NULL) && theirs != ours) return i;
    return -1;
}

/* The slot of a peer that will never enter call `seq`, because it left or its process is gone; -1 for none. */
int ucch_board_gone(ucch_board *b, uint64_t seq) {
    for (int i = 0; i < b->n; i++) {
        slot *s = &b->slots[i];
        int64_t pid = __atomic_load_n(&s->pid, __ATOMIC_RELAXED);
        if (i == b->mine || pid == 0) continue;
        if (pid == LEFT ? __atomic_load_n(&s->seq, __ATOMIC_ACQUIRE) < seq : kill((pid_t)pid, 0) && errno == ESRCH)
            return i;
    }
    return -1;
}

/* Why call `seq` comes to nothing, and by whom, as far as can be seen; 0 where nothing is amiss, or without a board. Of
 * refusals those from call `since` on concern it. */
int ucch_board_verdict(ucch_board *b, uint64_t since, uint64_t seq, int *peer) {
    *peer = -1;
    if (b && ucch_board_refused(b, since, seq, NULL)) return UCCH_FAIL_REFUSED;
    if (b) *peer = ucch_board_mismatch(b, seq);
    return *peer < 0 ? 0 : UCCH_FAIL_MISMATCH;
}

/* A rank as errors name it: its slot, or -2 less its number where it is on another host. */
int ucch_board_peer(const ucch_board *b, int rank) {
    for (int i = 0; b && i < b->n; i++)
        if (b->ranks[i] == rank) return i;
    return -2 - rank;
}

/* UCCH_THERE, UCCH_LEFT or UCCH_DIED for one slot, or for all of them but ours: the best of their fates. */
int ucch_board_fate(ucch_board *b, int slot) {
    if (slot != UCCH_ALL_PEERS) return slot < b->n ? fate_of(b, slot) : UCCH_THERE;
    int best = b->n > 1 ? UCCH_DIED : UCCH_THERE;
    for (int i = 0; i < b->n && best > UCCH_THERE; i++)
        if (i != b->mine && fate_of(b, i) < best) best = fate_of(b, i);
    return best;
}

void ucch_board_break(ucch_board *b) { b->broken = 1; }

/* Our own label of a call; `label` stays as it is where that has been overwritten. */
void ucch_board_own_label(ucch_board *b, uint64_t seq, char *label) {
    uint64_t signature;
    char found[LABEL];
    if (b->n && read_arrival(&b->slots[b->mine], seq, &signature, found)) memcpy(label, found, LABEL);
    label[LABEL - 1] = 0;
}

/* As ucch_board_break, for a call that nobody may be waiting for: it stays. */
void ucch_board_blame(ucch_board *b, ucch_op *op) {
    if (!b->first_failure) b->first_failure = op;
    b->broken = 1;
}

/* One more call in streams, or one less. */
void ucch_board_launched(ucch_board *b, int more) {
    b->launches += more;
    ucch_board_open(b, more);
}

/* Calls in streams that have not ended. */
int ucch_board_launches(ucch_board *b) { return b->launches; }

ucch_op *ucch_board_first_failure(ucch_board *b) { return b->first_failure; }

int ucch_board_broken(ucch_board *b) { return b->broken; }

/* This rank makes no more calls. */
void ucch_board_leave(ucch_board *b) {
    if (b->n) __atomic_store_n(&b->slots[b->mine].pid, LEFT, __ATOMIC_RELEASE);
}

uint64_t ucch_board_seq(ucch_board *b, int i) {
    return i >= 0 && i < b->n ? __atomic_load_n(&b->slots[i].seq, __ATOMIC_ACQUIRE) : 0;
}

int ucch_board_label(ucch_board *b, int i, uint64_t seq, char *label) {
    uint64_t signature;
    int found = i >= 0 && i < b->n && read_arrival(&b->slots[i], seq, &signature, label);
    label[found ? LABEL - 1 : 0] = 0;
    return found ? 0 : -1;
}
