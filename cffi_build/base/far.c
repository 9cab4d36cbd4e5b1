/* Communicators on several hosts: hashes of this rank's calls, which other ranks compare with theirs, and what is known
 * of ranks of other hosts. Only the link thread (net/host_exchange.c) writes what is known; threads that wait for calls
 * read it without a lock. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* How long a request to probe links stays valid, in ns. */
#define ASKED_NS 2000000000u

/* Why messages of a rank cannot arrive: a link to its host is cut, or was while a call waited; or libucp has given up
 * its connection with this rank there. */
enum { NOT_CUT, LINK_CUT, BROKEN };

typedef struct rank_state {
    int fate;                 /* UCCH_THERE, or why no call after `last` can succeed */
    uint64_t last, failed;    /* failed: the first call that failed on the rank, or 0 */
    double since;             /* when this was heard */
    int cut;                  /* NOT_CUT, LINK_CUT or BROKEN */
    uint64_t lost_connection; /* when libucp gave up a connection with the rank, in ns; 0: it has not */
    int is_near;              /* on this host */
} rank_state;

struct ucch_far {
    int size;
    uint64_t called;                  /* the last call made or announced */
    uint64_t changed;                 /* the first call that was announced and then made differently or refused */
    uint32_t hashes[UCCH_CALLS_SEEN]; /* hashes of calls; 0: none */
    uint64_t differs;                 /* the first call that differs between hosts */
    int by;                           /* a rank whose call differs from this rank's */
    char label[UCCH_LABEL_BYTES];     /* what that rank called */
    char link[UCCH_PATH_BYTES];       /* the first link that was cut, valid if a rank has `cut` */
    uint64_t patience;                /* ns that an operation waits before links are probed; 0: never */
    uint64_t asked;                   /* when an operation last asked for that */
    rank_state ranks[];
};

ucch_far *ucch_far_new(int size) {
    ucch_far *far = calloc(1, sizeof(*far) + (size_t)size * sizeof(rank_state));
    if (far) far->size = size;
    return far;
}

/* This rank makes call `seq`, announces it, or refuses it. Under the engine's lock. */
void ucch_far_call(ucch_far *far, uint64_t seq, uint64_t signature) {
    /* The two signatures that are not hashes are even and stay as they are. */
    uint32_t hash = signature >> 32 ? (uint32_t)(signature ^ signature >> 32) | 1 : (uint32_t)signature;
    uint32_t *at = &far->hashes[seq % UCCH_CALLS_SEEN];
    uint64_t none = 0;
    int was_told = far->called == seq && *at != hash;
    __atomic_store_n(at, hash, __ATOMIC_RELAXED);
    UCCH_STORE(&far->called, seq);
    if (was_told) __atomic_compare_exchange_n(&far->changed, &none, seq, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* Take the first call whose hash other ranks have to be sent again; 0: none. */
uint64_t ucch_far_changed(ucch_far *far) { return __atomic_exchange_n(&far->changed, 0, __ATOMIC_ACQUIRE); }

uint64_t ucch_far_called(const ucch_far *far) { return UCCH_LOAD(&far->called); }

/* Hash of call `seq` as this rank made it; 0 if it has not made it or the hash was overwritten. */
uint32_t ucch_far_hash(const ucch_far *far, uint64_t seq) {
    if (seq > ucch_far_called(far)) return 0;
    uint32_t hash = __atomic_load_n(&far->hashes[seq % UCCH_CALLS_SEEN], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* an entry of `hashes` is written before `called` */
    return __atomic_load_n(&far->called, __ATOMIC_RELAXED) + 1 < seq + UCCH_CALLS_SEEN ? hash : 0;
}

/* ---- what is known of other ranks ---- */

void ucch_far_note_differs(ucch_far *far, uint64_t seq, int rank, const char *label) {
    if (far->differs && far->differs <= seq) return;
    UCCH_STORE(&far->differs, 0);
    far->by = rank;
    memcpy(far->label, label, UCCH_LABEL_BYTES);
    far->label[UCCH_LABEL_BYTES - 1] = 0;
    UCCH_STORE(&far->differs, seq);
}

/* Returns 1 if this is news. A rank that has left may still be found dead. */
int ucch_far_note_gone(ucch_far *far, int rank, int fate, uint64_t last, uint64_t failed) {
    if (rank < 0 || rank >= far->size || far->ranks[rank].fate >= fate) return 0;
    far->ranks[rank].failed = failed;
    far->ranks[rank].since = ucch_now();
    UCCH_STORE(&far->ranks[rank].last, fate == UCCH_LEFT ? last : 0);
    UCCH_STORE(&far->ranks[rank].fate, fate);
    return 1;
}

/* Returns -2 - rank for a rank whose call `seq`, or one before it, differs from this rank's; -1: none. */
int ucch_far_differs(const ucch_far *far, uint64_t seq) {
    uint64_t first = UCCH_LOAD(&far->differs);
    return first && first <= seq ? -2 - far->by : -1;
}

/* True if call `seq` cannot end because the rank is gone, or failed in it longer ago than the grace period. */
static int cannot_end(const rank_state *s, uint64_t seq) {
    int fate = UCCH_LOAD(&s->fate);
    if (!fate) return 0;
    if (fate >= UCCH_DIED || UCCH_LOAD(&s->last) < seq) return 1;
    return s->failed && s->failed <= seq && ucch_now() - s->since > UCCH_GRACE_FAR_S;
}

/* Returns -2 - rank for a rank because of which call `seq` can never end, preferably a dead one; -1: none. Call 0: dead
 * ranks only. */
int ucch_far_gone(const ucch_far *far, uint64_t seq) {
    int found = -1;
    for (int i = 0; i < far->size; i++) {
        if (!cannot_end(&far->ranks[i], seq)) continue;
        if (ucch_far_fate(far, i) >= UCCH_DIED) return -2 - i;
        if (found == -1) found = -2 - i;
    }
    return found;
}

/* The first call that a rank has reported as failed; 0: none. */
uint64_t ucch_far_given_up(const ucch_far *far, int rank) {
    return ucch_far_fate(far, rank) ? far->ranks[rank].failed : 0;
}

/* State of a rank: UCCH_THERE, UCCH_LEFT, UCCH_DIED or worse. */
int ucch_far_fate(const ucch_far *far, int rank) {
    if (rank < 0 || rank >= far->size) return UCCH_THERE;
    return UCCH_LOAD(&far->ranks[rank].fate);
}

void ucch_far_note_near(ucch_far *far, int rank) { far->ranks[rank].is_near = 1; }

/* The best state of the ranks of other hosts. */
int ucch_far_best_fate(const ucch_far *far) {
    int best = UCCH_DIED;
    for (int i = 0; i < far->size; i++)
        if (!far->ranks[i].is_near && ucch_far_fate(far, i) < best) best = ucch_far_fate(far, i);
    return best;
}

/* The number of the first call that a rank of another host made differently, with the rank and its label; 0: none. */
uint64_t ucch_far_difference(const ucch_far *far, int *rank, char *label) {
    uint64_t first = far ? UCCH_LOAD(&far->differs) : 0;
    *rank = first ? far->by : -1;
    if (first) memcpy(label, far->label, UCCH_LABEL_BYTES);
    return first;
}

/* ---- links that are cut ---- */

void ucch_far_set_timeout(ucch_far *far, double seconds) {
    __atomic_store_n(&far->patience, (uint64_t)(1e9 * seconds), __ATOMIC_RELAXED);
}

/* True if an operation has recently asked for links to be probed. */
int ucch_far_wants_probe(const ucch_far *far) {
    return ucch_now_ns() - __atomic_load_n(&far->asked, __ATOMIC_RELAXED) < ASKED_NS;
}

/* `link` is empty if libucp has given up a connection with the rank. */
void ucch_far_note_cut(ucch_far *far, int rank, const char *link) {
    if (!far->link[0]) memcpy(far->link, link, UCCH_PATH_BYTES);
    if (link[0] || !far->ranks[rank].cut) UCCH_STORE(&far->ranks[rank].cut, link[0] ? LINK_CUT : BROKEN);
}

/* libucp has given up a connection with a rank. Called by any thread. */
void ucch_far_lost_connection(ucch_far *far, int rank) {
    if (rank >= 0 && rank < far->size)
        __atomic_store_n(&far->ranks[rank].lost_connection, ucch_now_ns(), __ATOMIC_RELAXED);
}

/* True once, `seconds` after that, if the rank is still alive. */
int ucch_far_has_lost_connection(ucch_far *far, int rank, double seconds) {
    uint64_t since = __atomic_load_n(&far->ranks[rank].lost_connection, __ATOMIC_RELAXED);
    if (!since || 1e-9 * (double)(ucch_now_ns() - since) < seconds) return 0;
    __atomic_store_n(&far->ranks[rank].lost_connection, 0, __ATOMIC_RELAXED);
    return !ucch_far_fate(far, rank);
}

/* The cut link to a rank's host; "" if none is cut. */
const char *ucch_far_link(const ucch_far *far, int rank) {
    int known = rank >= 0 && rank < far->size && UCCH_LOAD(&far->ranks[rank].cut) == LINK_CUT;
    return known ? far->link : "";
}

/* True if an operation has waited long enough; it then asks for links to be probed. */
static int request_probe(ucch_far *far, double waited) {
    uint64_t patience = __atomic_load_n(&far->patience, __ATOMIC_RELAXED);
    if (!patience || 1e9 * waited < (double)patience) return 0;
    __atomic_store_n(&far->asked, ucch_now_ns(), __ATOMIC_RELAXED);
    return 1;
}

/* True if at least one link is cut, and the link of every rank of another host that is not gone. */
int ucch_far_is_cut_off(ucch_far *far, double waited) {
    int found = 0, is_late = request_probe(far, waited);
    for (int i = 0; i < far->size; i++) {
        int cut = __atomic_load_n(&far->ranks[i].cut, __ATOMIC_RELAXED), is_cut = cut == BROKEN || (cut && is_late);
        if (!far->ranks[i].is_near && !is_cut && !ucch_far_fate(far, i)) return 0;
        found |= is_cut;
    }
    return found;
}

/* A rank to whose host a link is cut, if the operation has waited long enough: `rank`, or any for -1. For `rank` also
 * if libucp has given up its connection, which calls of all ranks do not use. Returns -1 for none. */
int ucch_far_cut(ucch_far *far, double waited, int rank) {
    int is_late = request_probe(far, waited);
    for (int i = rank < 0 ? 0 : rank; i < far->size && (rank < 0 || i == rank); i++) {
        int cut = __atomic_load_n(&far->ranks[i].cut, __ATOMIC_RELAXED);
        if ((cut == LINK_CUT && is_late) || (cut == BROKEN && rank >= 0)) return i;
    }
    return -1;
}
