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
/* Refusals of a rank that are remembered: a rank that refuses waits for nobody until its next call. */
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
    uint64_t seq; /* the last call entered or refused */
    char pad[48];
    uint64_t news; /* of slot 0: how many refusals there were, of all ranks; in a line that is hardly ever written */
    uint64_t refused;
    char more[48];
    notice notices[REFUSALS];
    arrival ring[RING];
} slot;

struct ucch_board {
    slot *slots;
    int n, mine;
    uint64_t seq, started; /* the last call, and the last one that was not refused */
    uint64_t since;        /* refusals of earlier calls are of no interest to those that start now */
    slot *told;            /* of ranks on other hosts: its notices */
    uint64_t heard;
    uint64_t quiet_news, quiet_since; /* with so much news nothing concerned calls from there on */
    int *ranks;
    uint64_t calls, bytes; /* finished well, and what they moved */
    double seconds;
    volatile int launches;
    int broken;             /* a call failed: the communicator starts no more */
    ucch_op *first_failure; /* that call, where nobody waits for it */
};

size_t ucch_board_bytes(int nslots) {
    return (size_t)nslots * sizeof(slot);
}

/* memory == NULL: a board of this rank alone (no peer shares the host's memory); it still counts calls. */
ucch_board *ucch_board_new(void *memory, int nslots, int mine, const int *ranks) {
    ucch_board *b = calloc(1, sizeof(*b));
    if (!b)
        return NULL;
    b->slots = memory;
    b->n = memory ? nslots : 0;
    b->mine = mine;
    b->ranks = calloc((size_t)nslots + 1, sizeof(int));
    b->told = calloc(1, sizeof(slot));
    if (!b->ranks || !b->told) {
        ucch_board_free(b);
        return NULL;
    }
    memcpy(b->ranks, ranks, (size_t)nslots * sizeof(int));
    if (b->n)
        b->slots[mine].pid = getpid();
    return b;
}

void ucch_board_free(ucch_board *b) {
    free(b->told);
    free(b->ranks);
    free(b);
}

void ucch_board_add(ucch_board *b, double seconds, uint64_t bytes) {
    b->calls++;
    b->seconds += seconds;
    b->bytes += bytes;
}

void ucch_board_stats(ucch_board *b, uint64_t *calls, double *seconds, uint64_t *bytes) {
    *calls = b->calls;
    *seconds = b->seconds;
    *bytes = b->bytes;
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
    if (!b->n)
        return seq;
    write_arrival(b, seq, signature, label);
    __atomic_store_n(&b->slots[b->mine].seq, seq, __ATOMIC_RELEASE);
    return seq;
}

/* Say what the next call will be, before it is entered: its teams are made first, by ranks that wait for each other.
 * Returns the number it will have. */
uint64_t ucch_board_announce(ucch_board *b, uint64_t signature, const char *label) {
    if (b->n)
        write_arrival(b, b->seq + 1, signature, label);
    return b->seq + 1;
}

/* The signature and, if asked for, the label with which a rank entered call `seq`: 1, or 0 where it has not, or has
 * moved on past the ring, be it while we read. */
static int read_arrival(const slot *s, uint64_t seq, uint64_t *signature, char *label) {
    const arrival *a = &s->ring[seq % RING];
    if (__atomic_load_n(&a->seq, __ATOMIC_ACQUIRE) != seq)
        return 0;
    *signature = __atomic_load_n(&a->signature, __ATOMIC_RELAXED);
    if (label)
        memcpy(label, a->label, LABEL);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&a->seq, __ATOMIC_RELAXED) == seq;
}

/* ---- refusals ---- */

/* A call that a rank's arguments cannot make counts as called, so that all ranks go on with the same number; those that
 * have entered it, or enter it later, learn why it comes to nothing. */
static void write_notice(slot *s, const ucch_refusal *refusal) {
    notice *n = &s->notices[s->refused++ % REFUSALS];
    uint64_t version = n->version + 1;
    __atomic_store_n(&n->version, version, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    n->refusal = *refusal;
    n->refusal.text[UCCH_REFUSAL_BYTES - 1] = 0;
    __atomic_store_n(&n->version, version + 1, __ATOMIC_RELEASE);
}

/* Calls of this rank come to nothing, because a call was refused: those who wait for it there are to know. */
void ucch_board_give_up(ucch_board *b, const ucch_refusal *refusal) {
    if (!b->n)
        return;
    write_notice(&b->slots[b->mine], refusal);
    __atomic_add_fetch(&b->slots[0].news, 1, __ATOMIC_SEQ_CST);
}

/* This rank refuses its next call, which may be announced already; returns its number. */
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
    write_notice(b->told, refusal);
    b->heard++;
}

static uint64_t news_of(const ucch_board *b) {
    return b->heard + (b->n ? __atomic_load_n(&b->slots[0].news, __ATOMIC_ACQUIRE) : 0);
}

/* Read a notice: 0 while it is being written, when whoever waits looks again, and for one never written. */
static int read_notice(const notice *n, ucch_refusal *r) {
    uint64_t version = __atomic_load_n(&n->version, __ATOMIC_ACQUIRE);
    *r = n->refusal;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return version && version % 2 == 0 && __atomic_load_n(&n->version, __ATOMIC_RELAXED) == version;
}

/* The latest refusal in a slot that concerns a call from `since` to `seq`; whether it is later than what was found. */
static int look_up(const slot *s, uint64_t since, uint64_t seq, ucch_refusal *found) {
    int better = 0;
    for (int i = 0; i < REFUSALS; i++) {
        ucch_refusal r;
        if (read_notice(&s->notices[i], &r) && r.last >= since && r.first <= seq && r.first > found->first) {
            *found = r;
            better = 1;
        }
    }
    return better;
}

/* Whether a call from `since` to `seq` was refused, and what is known of the latest one. */
int ucch_board_refused(ucch_board *b, uint64_t since, uint64_t seq, ucch_refusal *found) {
    uint64_t news = news_of(b);
    if (!news || (news == b->quiet_news && since >= b->quiet_since))
        return 0;
    ucch_refusal none = {0};
    found = found ? found : &none;
    found->first = 0;
    int any = look_up(b->told, since, seq, found);
    for (int i = 0; i < b->n; i++)
        any |= look_up(&b->slots[i], since, seq, found);
    ucch_refusal later = {0};
    if (!any && seq == b->seq) {
        int coming = look_up(b->told, since, UINT64_MAX, &later);
        for (int i = 0; i < b->n; i++)
            coming |= look_up(&b->slots[i], since, UINT64_MAX, &later);
        if (!coming) {
            b->quiet_news = news;
            b->quiet_since = since;
        }
    }
    return any;
}

static int says_of(const slot *s, int rank, uint64_t seq) {
    for (int i = 0; i < REFUSALS; i++) {
        ucch_refusal r;
        if (read_notice(&s->notices[i], &r) && r.by == rank && r.last >= seq)
            return 1;
    }
    return 0;
}

/* Whether a rank has refused call `seq`, or given it up because another one did. */
int ucch_board_left(ucch_board *b, int rank, uint64_t seq) {
    for (int i = 0; i < b->n; i++)
        if (b->ranks[i] == rank)
            return says_of(&b->slots[i], rank, seq);
    return says_of(b->told, rank, seq);
}

/* Whether a call up to the last one was refused, and this rank does not know of it. */
int ucch_board_stale(ucch_board *b) {
    return ucch_board_refused(b, b->since, b->seq, NULL);
}

/* Whether any other rank of this host has entered a call that it could have refused: 1; 0 when none will, -1 when that
 * is not known yet. */
int ucch_board_entered(ucch_board *b, uint64_t seq) {
    int open = 0;
    for (int i = 0; i < b->n; i++) {
        if (i == b->mine)
            continue;
        uint64_t signature;
        if (__atomic_load_n(&b->slots[i].seq, __ATOMIC_ACQUIRE) < seq)
            open = 1;
        else if (read_arrival(&b->slots[i], seq, &signature, NULL))
            return 1;
    }
    return -open;
}

/* The number of the call to come. */
uint64_t ucch_board_next(ucch_board *b) {
    return b->seq + 1;
}

/* The last call that this rank did not refuse. */
uint64_t ucch_board_started(ucch_board *b) {
    return b->started;
}

/* From which call on refusals concern what starts now. */
uint64_t ucch_board_since(ucch_board *b) {
    return b->since;
}

void ucch_board_settle(ucch_board *b, uint64_t since) {
    b->since = since;
}

/* The slot of a peer that entered call `seq` with another signature than ours, or -1. A peer that has not arrived
 * will see ours; one that has moved on past the ring had seen it. */
int ucch_board_mismatch(ucch_board *b, uint64_t seq) {
    if (b->n < 2)
        return -1;
    uint64_t ours, theirs;
    if (!read_arrival(&b->slots[b->mine], seq, &ours, NULL))
        return -1; /* we have moved on past the ring ourselves */
    for (int i = 0; i < b->n; i++)
        if (read_arrival(&b->slots[i], seq, &theirs, NULL) && theirs != ours)
            return i;
    return -1;
}

/* The slot of a peer that will never enter call `seq`, because it left or its process is gone; -1 for none. */
int ucch_board_gone(ucch_board *b, uint64_t seq) {
    for (int i = 0; i < b->n; i++) {
        slot *s = &b->slots[i];
        int64_t pid = __atomic_load_n(&s->pid, __ATOMIC_RELAXED);
        if (i == b->mine || pid == 0)
            continue;
        if (pid == LEFT ? __atomic_load_n(&s->seq, __ATOMIC_ACQUIRE) < seq : kill((pid_t)pid, 0) && errno == ESRCH)
            return i;
    }
    return -1;
}

/* Why call `seq` comes to nothing, and by whom, as far as can be seen; 0 where nothing is amiss, or without a board. Of
 * refusals those from call `since` on concern it. */
int ucch_board_verdict(ucch_board *b, uint64_t since, uint64_t seq, int *peer) {
    *peer = -1;
    if (b && ucch_board_refused(b, since, seq, NULL))
        return UCCH_FAIL_REFUSED;
    if (b)
        *peer = ucch_board_mismatch(b, seq);
    return *peer < 0 ? 0 : UCCH_FAIL_MISMATCH;
}

/* A rank as errors name it: its slot, or -2 less its number where it is on another host. */
int ucch_board_peer(const ucch_board *b, int rank) {
    for (int i = 0; b && i < b->n; i++)
        if (b->ranks[i] == rank)
            return i;
    return -2 - rank;
}

static int fate_of(const ucch_board *b, int i) {
    int64_t pid = __atomic_load_n(&b->slots[i].pid, __ATOMIC_RELAXED);
    if (pid == LEFT)
        return UCCH_LEFT;
    return pid && kill((pid_t)pid, 0) && errno == ESRCH ? UCCH_DIED : UCCH_THERE;
}

/* UCCH_THERE, UCCH_LEFT or UCCH_DIED for one slot, or for all of them but ours: the best of their fates. */
int ucch_board_fate(ucch_board *b, int slot) {
    if (slot != UCCH_ALL_PEERS)
        return slot < b->n ? fate_of(b, slot) : UCCH_THERE;
    int best = b->n > 1 ? UCCH_DIED : UCCH_THERE;
    for (int i = 0; i < b->n && best > UCCH_THERE; i++)
        if (i != b->mine && fate_of(b, i) < best)
            best = fate_of(b, i);
    return best;
}

void ucch_board_break(ucch_board *b) {
    b->broken = 1;
}

/* Our own label of a call; `label` stays as it is where that has been overwritten. */
void ucch_board_own_label(ucch_board *b, uint64_t seq, char *label) {
    uint64_t signature;
    char found[LABEL];
    if (b->n && read_arrival(&b->slots[b->mine], seq, &signature, found))
        memcpy(label, found, LABEL);
    label[LABEL - 1] = 0;
}

/* As ucch_board_break, for a call that nobody may be waiting for: it stays. */
void ucch_board_blame(ucch_board *b, ucch_op *op) {
    if (!b->first_failure)
        b->first_failure = op;
    b->broken = 1;
}

/* One more call in streams, or one less. */
void ucch_board_launched(ucch_board *b, int more) {
    b->launches += more;
}

/* Calls in streams that have not ended. */
int ucch_board_launches(ucch_board *b) {
    return b->launches;
}

ucch_op *ucch_board_first_failure(ucch_board *b) {
    return b->first_failure;
}

int ucch_board_broken(ucch_board *b) {
    return b->broken;
}

/* This rank makes no more calls. */
void ucch_board_leave(ucch_board *b) {
    if (b->n)
        __atomic_store_n(&b->slots[b->mine].pid, LEFT, __ATOMIC_RELEASE);
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
