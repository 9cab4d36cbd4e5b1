/* Internals shared by the C files of the native engine.
 *
 * One process-wide lock (lock.c) guards every call into libucc and libucp: UCX built without multi-threading aborts
 * otherwise, and more threads inside gain nothing. Functions named *_locked expect the lock to be held. */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "abi/calls.h"
#include "api/api.h"
#include "api/constants.h"

/* Seconds, and ns, of CLOCK_MONOTONIC. */
double ucch_now(void);
uint64_t ucch_now_ns(void);

/* Loads and stores of words that other threads, processes and devices use. A load sees everything that was written
 * before the value it reads was stored. */
#define UCCH_LOAD(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
#define UCCH_STORE(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)

/* True if a counter, which only grows and wraps around, has reached `least`. */
static inline int ucch_reached(const uint32_t *counter, uint32_t least) {
    return (int32_t)(UCCH_LOAD(counter) - least) >= 0;
}

/* Hold the engine's lock until the end of the block. */
#define UCCH_LOCKED __attribute__((cleanup(ucch_give_up))) int has_lock_ = (ucch_lock(), 1)
static inline void ucch_give_up(int *has_lock) { *has_lock ? ucch_unlock() : (void)0; }

/* Take an item out of the list that begins with `first`, if it is in there. */
#define UCCH_UNLINK(first, item, next)                                                                                 \
    do {                                                                                                               \
        __typeof__(item) *at_ = &(first);                                                                              \
        while (*at_ && *at_ != (item))                                                                                 \
            at_ = &(*at_)->next;                                                                                       \
        if (*at_) *at_ = (item)->next;                                                                                 \
    } while (0)

/* Put an item at the end of the list that begins with `first`. */
#define UCCH_APPEND(first, item, next)                                                                                 \
    do {                                                                                                               \
        __typeof__(item) *at_ = &(first);                                                                              \
        while (*at_)                                                                                                   \
            at_ = &(*at_)->next;                                                                                       \
        (item)->next = NULL;                                                                                           \
        *at_ = (item);                                                                                                 \
    } while (0)

int ucch_board_peer(const ucch_board *board, int rank);
void ucch_board_own_label(ucch_board *board, uint64_t seq, char *label);
uint32_t ucch_board_comm(const ucch_board *board);
int ucch_board_lossy(const ucch_board *board);
void ucch_board_ended_locked(ucch_board *board, ucch_op *op, int status, uint64_t bytes);
void ucch_board_dump_if_idle(ucch_board *board);
void ucch_board_blame(ucch_board *board, ucch_op *op);
void ucch_board_began(ucch_board *board, double now);
void ucch_board_launched(ucch_board *board, int more);
void ucch_board_lost_connection(ucch_board *board, int peer);
int ucch_board_stuck(ucch_board *board, uint64_t seq, double waited, int *peer);
int ucch_board_check_message(ucch_board *board, int peer, double started, double now, double *left);

/* A message as it came. `is_later`: its data is still at the sender, and `data` is libucp's descriptor to fetch it. */
typedef struct ucch_packet {
    const void *header;
    size_t header_bytes;
    void *data;
    size_t bytes;
    int is_later;
} ucch_packet;

/* early.c: messages that are kept until their receivers exist */
typedef struct ucch_early ucch_early;
int ucch_early_keep(ucch_early **first, uint64_t id, const ucch_packet *message, int most);
ucch_packet *ucch_early_take(ucch_early **first, uint64_t id);
void ucch_early_drop(ucch_early **first, uint64_t below);

/* process.c: processes of this host */
void ucch_process_signal(int pid, int number);
void ucch_process_unbind_thread(void);

/* The timeline (trace.c): what every program, every step of it and every wire did, and when. */

extern int ucch_trace_on;

/* Off, as nearly always, the timeline costs this one branch. */
#define UCCH_TRACING __builtin_expect(__atomic_load_n(&ucch_trace_on, __ATOMIC_ACQUIRE), 0)

/* Number in the place of the program in an event of a wire. */
#define UCCH_TRACE_WIRE 0xffffffffu

/* By any thread. The number that begin returns, never 0, is what end takes. */
uint64_t ucch_trace_begin(uint32_t program, int step, uint64_t seq);
uint64_t ucch_trace_begin_wire(int wire, uint64_t peer, size_t bytes, uint64_t since);
void ucch_trace_end(uint64_t number, int status);

/* Operations: programs, messages, and calls in streams. Each kind has a table of functions that base calls (op.c). */

enum { UCCH_IDLE, UCCH_ACTIVE, UCCH_DONE, UCCH_FAILED };

/* Who advances an operation: rounds over UCC contexts, rounds over UCP workers too, or its stream. */
enum { UCCH_BY_CONTEXTS, UCCH_BY_WORKERS, UCCH_IN_STREAMS, UCCH_WAYS };

/* Functions of one kind of operation, called under the lock; NULL if there is nothing to do. */
typedef struct ucch_op_kind {
    int way;
    int (*advance_locked)(ucch_op *op);              /* make progress; returns whether anything moved */
    int (*check_locked)(ucch_op *op, double now);    /* 0, or why it can never end, with error.peer set */
    void (*abandon_locked)(ucch_op *op, int status); /* end it as failed; requests under way are left alone */
} ucch_op_kind;

struct ucch_op {
    const ucch_op_kind *kind; /* set before it begins */
    volatile int state;
    ucch_error error;
    double started;
    double deadline;  /* 0 = none */
    int has_listener; /* a thread sleeps until the doorbell rings at the op's end */
    int matched;      /* a message whose caller does the rest (p2p/lane.c) */
    int called_back;  /* a library's callback ends it, or comes before it can be advanced */
    /* Its record for the flight recorder, NULL for none; `late`: it starts later than it begins, as when a stream
     * reaches it; `ended`: when it ended, if known already. */
    const ucch_record *about;
    int late;
    double ended;
    uint64_t record, event; /* its numbers in the flight recorder and in the timeline */
    ucch_op *next, *prev;
};

int ucch_ops_under_way(int way);
void ucch_op_begin_locked(ucch_op *op, double timeout);
void ucch_op_started_locked(ucch_op *op);
void ucch_op_called_back_locked(ucch_op *op, int called_back);
void ucch_op_end_locked(ucch_op *op, int status, int step, int peer);
int ucch_ops_advance_locked(void);
void ucch_ops_check_deadlines_locked(double now);

/* The lock, and turns at it among threads that make progress (lock.c); ucch_lock and ucch_unlock are in api.h. */

extern _Atomic int ucch_spin_rounds;
/* Above 0 while other threads want this core: spinning would delay the thread that is waited for. */
extern _Atomic int ucch_crowded;

/* Locks in the order in which one thread may take them (docs/native.md). Any other lock is held for a moment, and no
 * lock is taken under it. Builds with sanitizers abort when a thread takes a lock out of order. */
enum {
    UCCH_AT_OPENED,
    UCCH_AT_QUEUE,
    UCCH_AT_MAKING,
    UCCH_AT_TURN,
    UCCH_AT_PINNING,
    UCCH_AT_ENGINE,
    UCCH_AT_LINKS,
    UCCH_AT_WIRE,
    UCCH_AT_FLOW,
    UCCH_LOCK_ORDER
};
void ucch_take(pthread_mutex_t *lock, int at);
void ucch_give(pthread_mutex_t *lock, int at);

/* When the process forks no thread holds this lock, which is taken last: the child may free what it inherits. */
#define UCCH_FREE_IN_FORKS(lock)                                                                                       \
    static void take_for_fork(void) { pthread_mutex_lock(&(lock)); }                                                   \
    static void give_after_fork(void) { pthread_mutex_unlock(&(lock)); }                                               \
    __attribute__((constructor)) static void free_in_forks(void) {                                                     \
        pthread_atfork(take_for_fork, give_after_fork, give_after_fork);                                               \
    }

void ucch_cond_init(pthread_cond_t *wake);
int ucch_cond_wait(pthread_cond_t *wake, pthread_mutex_t *lock, double seconds);
int ucch_trylock(void);
void ucch_let_others(void);
int ucch_lock_wanted(void);
void ucch_sleep_locked(pthread_cond_t *wake, double seconds);
void ucch_lock_after_fork(void);

/* The shortest nap that replaces a yield. */
#define UCCH_QUICK_NAP_S 20e-6
void ucch_note_yield(double from, double to);
int ucch_naps_instead(void);

int ucch_has_moved(int moved, double seconds);
double ucch_yield(double now);
double ucch_nap(double quiet);
double ucch_napped(double now, double asked);

/* Progress, by the thread and by waiting callers. */

/* Rounds of progress under one hold of the lock. */
#define UCCH_BATCH 8

/* A UCC context, or a UCP worker, of this process. */
struct ucch_context {
    ucc_context_h handle;
    ucp_worker_h worker;
    int users; /* programs in flight that use it */
    ucch_context *next;
};

int ucch_progress_locked(void);
void ucch_progress_inside(int (*enter)(void), void (*leave)(int before), void (*first)(void));
void ucch_wake_locked(void);
void ucch_progress_streams(void);
void ucch_wait_briefly_locked(ucch_op *op);

/* The flight recorder (flight.c): what the last operations of this process were, and how far they have come. */

/* Under the lock. ucch_flight_begin returns the record's number; 0: nothing is recorded. */
uint64_t ucch_flight_begin(const ucch_record *about, uint64_t seq, double now, int has_started);
void ucch_flight_started(uint64_t record, double now);

int ucch_flight_signal(int *file);
void ucch_flight_awaits_locked(int64_t pid, int64_t file, uint64_t since);
void ucch_flight_from(uint64_t record, int peer, int tag);
void ucch_flight_end(uint64_t record, int status, double now);
void ucch_flight_failed_locked(int status, double now);

/* Parcels: the data of short calls, on the page of the arrival board (parcel.c). */

/* Parcels per rank, for consecutive calls. */
#define UCCH_PARCELS 64

/* A rank's contribution to one call. */
typedef struct ucch_parcel {
    uint64_t call, signature; /* call: the last call that wrote it */
    char data[UCCH_PARCEL_BYTES];
} ucch_parcel;

/* The parcels of a rank. read[k]: this rank reads parcel k of no rank for calls up to this one. */
typedef struct ucch_parcels {
    uint64_t read[UCCH_PARCELS];
    ucch_parcel of[UCCH_PARCELS];
} ucch_parcels;

/* A rank's part in a short call. `is->from`: the slot whose parcel it reads, UCCH_ALL_PEERS or UCCH_NOBODY. From each
 * parcel it takes `bytes` at offset `at`, and reduces or concatenates them: `count` elements. */
typedef struct ucch_exchange ucch_exchange;
struct ucch_exchange {
    const ucch_part *is;
    uint64_t count;
    /* The call under way: */
    uint64_t call, signature;
    ucch_exchange *next;              /* next call of this rank that uses the same parcels */
    int queued, begun, written, came; /* came: number of parcels known to have arrived */
};

/* The parcels of all ranks of a board, by slot. */
typedef struct ucch_parcel_table {
    ucch_parcels *each; /* NULL where ranks do not share the memory */
    int n, mine;
    ucch_exchange *turns[UCCH_PARCELS]; /* this rank's calls under way, per parcel: the first one uses it */
} ucch_parcel_table;

ucch_parcel_table *ucch_board_parcels(ucch_board *board);

void ucch_exchange_begin(ucch_parcel_table *table, ucch_exchange *x, uint64_t call, uint64_t signature);
int ucch_exchange_go_on(ucch_parcel_table *table, ucch_exchange *x, const char *src, uint64_t bytes, char *dst);
void ucch_exchange_end(ucch_parcel_table *table, ucch_exchange *x);

/* Communicators on several hosts: what this rank has called, and what is known of ranks of other hosts (far.c). */

/* Calls whose hashes are kept, for comparison with those of ranks of other hosts. */
#define UCCH_CALLS_SEEN 8192
/* Seconds in which a call that failed on one rank may still succeed on others. On several hosts it is longer: their
 * ranks hear of the failure later, busy ones later still. */
#define UCCH_GRACE_S 1.0
#define UCCH_GRACE_FAR_S 5.0

/* True if two ranks made different calls, by their signatures or hashes of them. UCCH_ANY_CALL, which a rank publishes
 * while it sets up its next call, differs from a refused call only. */
static inline int ucch_calls_differ(uint64_t one, uint64_t other) {
    if (one == UCCH_ANY_CALL) return other == UCCH_REFUSED_CALL;
    if (other == UCCH_ANY_CALL) return one == UCCH_REFUSED_CALL;
    return one != other;
}

typedef struct ucch_far ucch_far;

ucch_far *ucch_far_new(int size);
void ucch_far_note_near(ucch_far *far, int rank);
void ucch_far_call(ucch_far *far, uint64_t seq, uint64_t signature);
int ucch_far_differs(const ucch_far *far, uint64_t seq);
int ucch_far_gone(const ucch_far *far, uint64_t seq);
uint64_t ucch_far_difference(const ucch_far *far, int *rank, char *label);
uint64_t ucch_far_given_up(const ucch_far *far, int rank);
int ucch_far_fate(const ucch_far *far, int rank);
int ucch_far_best_fate(const ucch_far *far);
int ucch_far_cut(ucch_far *far, double waited, int rank);
int ucch_far_is_cut_off(ucch_far *far, double waited);
void ucch_far_lost_connection(ucch_far *far, int rank);
const char *ucch_far_link(const ucch_far *far, int rank);

/* For the link thread alone, which writes what is known of other hosts. */
uint64_t ucch_far_changed(ucch_far *far);
uint64_t ucch_far_called(const ucch_far *far);
uint32_t ucch_far_hash(const ucch_far *far, uint64_t seq);
void ucch_far_note_differs(ucch_far *far, uint64_t seq, int rank, const char *label);
int ucch_far_note_gone(ucch_far *far, int rank, int fate, uint64_t last, uint64_t failed);

void ucch_far_set_timeout(ucch_far *far, double seconds);
int ucch_far_wants_probe(const ucch_far *far);
void ucch_far_note_cut(ucch_far *far, int rank, const char *link);
int ucch_far_has_lost_connection(ucch_far *far, int rank, double seconds);

ucch_far *ucch_board_far(const ucch_board *board);
void ucch_board_end(ucch_board *board, uint64_t call, int rank, const char *text);
void ucch_board_own_text(ucch_board *board, uint64_t seq, char *text);
int ucch_board_has_left(const ucch_board *board);
uint64_t ucch_board_has_failed(const ucch_board *board);
uint64_t ucch_board_under_way(const ucch_board *board);
void ucch_board_behind_by(ucch_board *board, int rank, uint64_t reached);
void ucch_board_waited_by(ucch_board *board, int rank, uint64_t call, const char *label, double since);
