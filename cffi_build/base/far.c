/* A communicator that is on several hosts: what this rank has called, for other ranks to compare with their calls, and
 * what is known of the ranks of other hosts. The thread that hears of them (net/circle.c) alone writes what is known;
 * threads that wait for calls read it, without a lock. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* How long the wish for a look at links holds. */
#define ASKED_NS 2000000000u

/* A link to its host is, or was, cut while a call waited; or libucp has given up its connection with us there. */
enum { NOT_CUT, LINK_CUT, BROKEN };

typedef struct standing {
    int how;               /* UCCH_THERE, or why no call after `last` can end well */
    uint64_t last, failed; /* and the first call that has failed on it, or 0 */
    double since;          /* when that was heard */
    int cut;               /* NOT_CUT, or why nothing can come of it */
    uint64_t broke;        /* when libucp gave up a connection with it, in nanoseconds; 0: it has not */
    int is_near;           /* it is on this host */
} standing;

struct ucch_far {
    int size;
    uint64_t called;                  /* the last call, or the one that is being prepared */
    uint64_t changed;                 /* the first call that was announced, and made otherwise or refused since */
    uint32_t hashes[UCCH_CALLS_SEEN]; /* of the calls; 0: none */
    uint64_t differs;                 /* the first call that ranks of several hosts have made differently */
    int by;                           /* a rank that has made it differently from us */
    char label[UCCH_LABEL_BYTES];     /* and what it called */
    char link[UCCH_PATH_BYTES];       /* the first that was cut, once a rank has `cut` */
    uint64_t patience;                /* nanoseconds of waiting after which links are looked at; 0: never */
    uint64_t asked;                   /* when a call has last wanted that */
    standing ranks[];
};

ucch_far *ucch_far_new(int size) {
    ucch_far *far = calloc(1, sizeof(*far) + (size_t)size * sizeof(standing));
    if (far) far->size = size;
    return far;
}

/* This rank makes call `seq`, or refuses it. Under the engine's lock. */
void ucch_far_call(ucch_far *far, uint64_t seq, uint64_t signature) {
    /* The two signatures that are no hashes, which are even, stay as they are. */
    uint32_t hash = signature >> 32 ? (uint32_t)(signature ^ signature >> 32) | 1 : (uint32_t)signature;
    uint32_t *at = &far->hashes[seq % UCCH_CALLS_SEEN];
    uint64_t none = 0;
    int was_told = far->called == seq && *at != hash;
    __atomic_store_n(at, hash, __ATOMIC_RELAXED);
    UCCH_STORE(&far->called, seq);
    if (was_told) __atomic_compare_exchange_n(&far->changed, &none, seq, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* The first call that other ranks have to be told of anew, and 0 from then on. */
uint64_t ucch_far_changed(ucch_far *far) { return __atomic_exchange_n(&far->changed, 0, __ATOMIC_ACQUIRE); }

uint64_t ucch_far_called(const ucch_far *far) { return UCCH_LOAD(&far->called); }

/* A hash of call `seq` as this rank made it; 0 where it has not come to it, or does not remember. */
uint32_t ucch_far_hash(const ucch_far *far, uint64_t seq) {
    if (seq > ucch_far_called(far)) return 0;
    uint32_t hash = __atomic_load_n(&far->hashes[seq % UCCH_CALLS_SEEN], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* the place is written before the number of the call that goes there */
    return __atomic_load_n(&far->called, __ATOMIC_RELAXED) + 1 < seq + UCCH_CALLS_SEEN ? hash : 0;
}

/* ---- what is known ---- */

void ucch_far_note_differs(ucch_far *far, uint64_t seq, int rank, const char *label) {
    if (far->differs && far->differs <= seq) return;
    UCCH_STORE(&far->differs, 0);
    far->by = rank;
    memcpy(far->label, label, UCCH_LABEL_BYTES);
    far->label[UCCH_LABEL_BYTES - 1] = 0;
    UCCH_STORE(&far->differs, seq);
}

/* True if that was not known. A rank that has left may still be found dead. */
int ucch_far_note_gone(ucch_far *far, int rank, int how, uint64_t last, uint64_t failed) {
    if (rank < 0 || rank >= far->size || far->ranks[rank].how >= how) return 0;
    far->ranks[rank].failed = failed;
    far->ranks[rank].since = ucch_now();
    UCCH_STORE(&far->ranks[rank].last, how == UCCH_LEFT ? last : 0);
    UCCH_STORE(&far->ranks[rank].how, how);
    return 1;
}

/* -2 less a rank that made call `seq`, or one before it, differently from this one; -1 for none. */
int ucch_far_differs(const ucch_far *far, uint64_t seq) {
    uint64_t first = UCCH_LOAD(&far->differs);
    return first && first <= seq ? -2 - far->by : -1;
}

/* True if a call will not end with a rank that is gone, or has given it up so long ago that it would have ended here.
 */
static int cannot_end(const standing *s, uint64_t seq) {
    int how = UCCH_LOAD(&s->how);
    if (!how) return 0;
    if (how >= UCCH_DIED || UCCH_LOAD(&s->last) < seq) return 1;
    return s->failed && s->failed <= seq && ucch_now() - s->since > UCCH_GRACE_FAR_S;
}

/* -2 less a rank without which call `seq` will never end, one that has died where there is such a one; -1 for none.
 * Call 0: one that has died. */
int ucch_far_gone(const ucch_far *far, uint64_t seq) {
    int found = -1;
    for (int i = 0; i < far->size; i++) {
        if (!cannot_end(&far->ranks[i], seq)) continue;
        if (ucch_far_fate(far, i) >= UCCH_DIED) return -2 - i;
        if (found == -1) found = -2 - i;
    }
    return found;
}

/* The first call that a rank has said to have given up; 0 for none. */
uint64_t ucch_far_given_up(const ucch_far *far, int rank) {
    return ucch_far_fate(far, rank) ? far->ranks[rank].failed : 0;
}

/* How a rank is: UCCH_THERE, UCCH_LEFT, UCCH_DIED, or in which other way it is gone. */
int ucch_far_fate(const ucch_far *far, int rank) {
    if (rank < 0 || rank >= far->size) return UCCH_THERE;
    return UCCH_LOAD(&far->ranks[rank].how);
}

void ucch_far_note_near(ucch_far *far, int rank) { far->ranks[rank].is_near = 1; }

/* The best fate of the ranks of other hosts. */
int ucch_far_best_fate(const ucch_far *far) {
    int best = UCCH_DIED;
    for (int i = 0; i < far->size; i++)
        if (!far->ranks[i].is_near && ucch_far_fate(far, i) < best) best = ucch_far_fate(far, i);
    return best;
}

/* The first call that a rank of another host made differently, the rank, and what it called: its number, or 0. */
uint64_t ucch_far_difference(const ucch_far *far, int *rank, char *label) {
    uint64_t first = far ? UCCH_LOAD(&far->differs) : 0;
    *rank = first ? far->by : -1;
    if (first) memcpy(label, far->label, UCCH_LABEL_BYTES);
    return first;
}

/* ---- links that are cut ---- */

void ucch_far_patience(ucch_far *far, double seconds) {
    __atomic_store_n(&far->patience, (uint64_t)(1e9 * seconds), __ATOMIC_RELAXED);
}

/* True if a call has waited for long, just now. */
int ucch_far_is_asked(const ucch_far *far) {
    return ucch_now_ns() - __atomic_load_n(&far->asked, __ATOMIC_RELAXED) < ASKED_NS;
}

/* `link` is empty where libucp has given up a connection with the rank. */
void ucch_far_note_cut(ucch_far *far, int rank, const char *link) {
    if (!far->link[0]) memcpy(far->link, link, UCCH_PATH_BYTES);
    if (link[0] || !far->ranks[rank].cut) UCCH_STORE(&far->ranks[rank].cut, link[0] ? LINK_CUT : BROKEN);
}

/* libucp has given up a connection with a rank. By any thread. */
void ucch_far_broke(ucch_far *far, int rank) {
    if (rank >= 0 && rank < far->size) __atomic_store_n(&far->ranks[rank].broke, ucch_now_ns(), __ATOMIC_RELAXED);
}

/* True once, some time after that, if the rank is there all the same. */
int ucch_far_is_broken(ucch_far *far, int rank, double seconds) {
    uint64_t since = __atomic_load_n(&far->ranks[rank].broke, __ATOMIC_RELAXED);
    if (!since || 1e-9 * (double)(ucch_now_ns() - since) < seconds) return 0;
    __atomic_store_n(&far->ranks[rank].broke, 0, __ATOMIC_RELAXED);
    return !ucch_far_fate(far, rank);
}

/* The link to a rank's host that is cut; empty without one. */
const char *ucch_far_link(const ucch_far *far, int rank) {
    int known = rank >= 0 && rank < far->size && UCCH_LOAD(&far->ranks[rank].cut) == LINK_CUT;
    return known ? far->link : "";
}

/* True once a call has waited for long; links are looked at from then on. */
static int ask(ucch_far *far, double waited) {
    uint64_t patience = __atomic_load_n(&far->patience, __ATOMIC_RELAXED);
    if (!patience || 1e9 * waited < (double)patience) return 0;
    __atomic_store_n(&far->asked, ucch_now_ns(), __ATOMIC_RELAXED);
    return 1;
}

/* True if links to the hosts of all ranks of other ones that are not gone are cut, and of one at least. */
int ucch_far_is_cut_off(ucch_far *far, double waited) {
    int found = 0, is_late = ask(far, waited);
    for (int i = 0; i < far->size; i++) {
        int cut = __atomic_load_n(&far->ranks[i].cut, __ATOMIC_RELAXED), is_cut = cut == BROKEN || (cut && is_late);
        if (!far->ranks[i].is_near && !is_cut && !ucch_far_fate(far, i)) return 0;
        found |= is_cut;
    }
    return found;
}

/* The rank to whose host a link is cut, -1 for none, once a call has waited for long: `rank`, or any for -1. From
 * `rank` nothing comes either once libucp has given up its connection, which calls of all ranks do not use. */
int ucch_far_cut(ucch_far *far, double waited, int rank) {
    int is_late = ask(far, waited);
    for (int i = rank < 0 ? 0 : rank; i < far->size && (rank < 0 || i == rank); i++) {
        int cut = __atomic_load_n(&far->ranks[i].cut, __ATOMIC_RELAXED);
        if ((cut == LINK_CUT && is_late) || (cut == BROKEN && rank >= 0)) return i;
    }
    return -1;
}
