/* The arrival board: a page of memory shared by the ranks of one communicator on one host, which shows the call that
 * each rank has entered.
 *
 * UCC returns OK with wrong data, or never, when ranks make different calls, and notices no dead peer. So each rank
 * writes the signature of the call it enters into its own slot (one cache line, no lock). A rank that reads the slots
 * sees which peer made another call, has not arrived, or is dead. */
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

#define RING 64
#define LABEL UCCH_LABEL_BYTES

typedef struct arrival {
    uint64_t seq; /* 0 while being written */
    uint64_t signature;
    char label[LABEL];
} arrival;

/* A page serves one communicator of its ranks after the other; `use` increases with each. A rank that frees a
 * communicator that made no call writes only `given_back` and `pid`, which hold the number of the use. */
typedef struct slot {
    int64_t pid;     /* or minus the last use that this rank has left */
    uint64_t seq;    /* the last call entered or refused */
    uint64_t open;   /* calls entered and not ended */
    uint64_t behind; /* the connected rank of another host that is furthest behind: its call, and its rank plus one */
    uint64_t signal; /* signal that makes the rank's process write its flight records, if its handler is set */
    uint64_t asked;  /* the last call for which a rank has asked for these records */
    uint64_t since;  /* ns of CLOCK_MONOTONIC of that request */
    uint64_t began;  /* ns of CLOCK_MONOTONIC when the last call was entered */
    /* The next line is seldom written. In slot 0 it is for all ranks. */
    uint64_t revoked;      /* a rank of this host has heard that the communicator is revoked */
    uint64_t ending;       /* the first call that one rank refuses and another makes, if known; 0: none */
    uint64_t doubtful;     /* the last call under way on any rank whose process has met an endpoint error */
    uint64_t failed;       /* the first call that has failed on the rank; 0 for none */
    uint64_t since_failed; /* ns of CLOCK_MONOTONIC when the rank first had a failure */
    int64_t file;          /* descriptor of the process's flight recorder memory */
    uint64_t waited_since; /* ns of CLOCK_MONOTONIC: the call of `waits` */
    uint64_t given_back;   /* the last use that this rank has freed; it may still be in a call */
    ucch_refusal refused;  /* the last call that this rank has refused */
    ucch_refusal end;      /* the first refusal that ended the communicator, as this rank knows it */
    ucch_refusal waits; /* a call, not refused, in which a rank of another host waits and that this rank has not made */
    arrival ring[RING];
} slot;

struct ucch_board {
    ucch_board *next; /* list of this process's boards */
    slot *slots, *me; /* `me` is this rank's slot */
    int n, mine;
    uint64_t use; /* higher than that of earlier communicators with this page */
    uint64_t seq; /* the last call */
    ucch_parcel_table post;
    ucch_far *far;         /* set if the communicator is on several hosts */
    uint32_t comm;         /* its number in the flight recorder */
    uint64_t calls, bytes; /* calls that succeeded, and the bytes they moved */
    double seconds;
    int losses; /* messages lost in this process before the communicator was made */
    _Atomic int launches;
    _Atomic int broken;               /* a call has failed: no more calls are started */
    _Atomic(ucch_op *) first_failure; /* that call, if no thread waits for it */
    slot own;                         /* used if no other rank shares the page */
    int ranks[];                      /* rank of each slot */
};

static int has_parcels(int nslots) { return nslots > 1 && nslots <= UCCH_PARCEL_RANKS; }

/* Slots, followed by the parcels of all ranks. */
size_t ucch_board_bytes(int nslots) {
    return (size_t)nslots * (sizeof(slot) + (has_parcels(nslots) ? sizeof(ucch_parcels) : 0));
}

ucch_parcel_table *ucch_board_parcels(ucch_board *b) { return b->post.each ? &b->post : NULL; }

/* ---- data that cannot be trusted ---- */

static ucch_board *boards; /* guarded by the engine's lock */

/* Called when an operation of libucc in this process ends with an endpoint error. A task of libucc 1.4.0 may go on in
 * spite of it and send garbage, with which other ranks end their part of the collective successfully. Which collective
 * it was is not known, so all calls under way are marked, before another rank can have received anything. */
static void mark_doubtful_locked(void) {
    for (ucch_board *b = boards; b; b = b->next) {
        if (!b->me->open) continue;
        uint64_t *doubtful = &b->slots[0].doubtful, known = __atomic_load_n(doubtful, __ATOMIC_RELAXED);
        while (known < b->seq &&
               !__atomic_compare_exchange_n(doubtful, &known, b->seq, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            ;
    }
}

/* True if call `seq` may have received garbage from another rank of this host. */
int ucch_board_doubtful(const ucch_board *b, uint64_t seq) { return UCCH_LOAD(&b->slots[0].doubtful) >= seq; }

/* memory == NULL: a board for this rank alone; no other rank is on this host. */
ucch_board *ucch_board_new(void *memory, int nslots, int mine, const int *ranks, uint64_t use) {
    ucch_board *b = calloc(1, sizeof(*b) + (size_t)nslots * sizeof(int));
    if (!b) return NULL;
    b->slots = memory ? memory : &b->own;
    b->n = nslots;
    b->mine = mine;
    b->me = &b->slots[mine];
    b->use = use;
    b->losses = ucch_losses();
    if (has_parcels(b->n))
        b->post = (ucch_parcel_table){.each = (ucch_parcels *)(b->slots + b->n), .n = b->n, .mine = mine};
    memcpy(b->ranks, ranks, (size_t)nslots * sizeof(int));
    b->me->pid = getpid();
    int file;
    b->me->signal = (uint64_t)ucch_flight_signal(&file);
    b->me->file = file;
    UCCH_LOCKED;
    b->next = boards;
    boards = b;
    ucch_endpoint_errors_tell(mark_doubtful_locked);
    return b;
}

void ucch_board_free(ucch_board *b) {
    UCCH_LOCKED;
    UCCH_UNLINK(boards, b, next);
    free(b->far);
    free(b);
}

/* The process of slot `i`; 0 if it has left or has not joined this use of the page. */
static int64_t process_of(const ucch_board *b, int i, int *left) {
    int64_t pid = UCCH_LOAD(&b->slots[i].pid);
    *left = pid < 0 && (uint64_t)-pid >= b->use;
    return pid > 0 ? pid : 0;
}

/* Enter the processes of the slots' ranks: a process that dies before it makes its board is then known to be dead. */
void ucch_board_expect(ucch_board *b, const int *pids) {
    for (int i = 0; i < b->n; i++) {
        int64_t found = __atomic_load_n(&b->slots[i].pid, __ATOMIC_RELAXED);
        if (found <= 0 && found > -(int64_t)b->use) /* a rank that leaves meanwhile stays marked as left */
            __atomic_compare_exchange_n(&b->slots[i].pid, &found, pids[i], 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    }
}

/* The rank of slot `mine` frees its communicator, number `use` of this page. `unused`: it has made no call and waits
 * for no other rank. */
void ucch_board_give_back(void *page, int mine, uint64_t use, int unused) {
    slot *s = (slot *)page + mine;
    if (unused) UCCH_STORE(&s->pid, -(int64_t)use);
    UCCH_STORE(&s->given_back, use);
}

static int has_freed(const ucch_board *b, int i) { return UCCH_LOAD(&b->slots[i].given_back) >= b->use; }

/* True if the rank of slot `i` has freed the communicator or is about to; i < 0: if all ranks have. */
int ucch_board_given_back(const ucch_board *b, int i) {
    if (i >= 0) return has_freed(b, i);
    for (i = 0; i < b->n; i++)
        if (!has_freed(b, i)) return 0;
    return 1;
}

/* All ranks have given the page back: clear this rank's slot for the next communicator. */
void ucch_board_clear(ucch_board *b) {
    memset(b->me, 0, offsetof(slot, given_back));
    memset(&b->me->refused, 0, sizeof(slot) - offsetof(slot, refused));
    if (b->post.each) memset(&b->post.each[b->mine], 0, sizeof(ucch_parcels));
}

/* Set up the board for a communicator of `size` ranks on several hosts. Returns 0 or a failure. */
int ucch_board_add_far(ucch_board *b, int size) {
    b->far = ucch_far_new(size);
    for (int i = 0; i < b->n && b->far; i++)
        ucch_far_note_near(b->far, b->ranks[i]);
    return b->far ? 0 : UCCH_FAIL_MEMORY;
}

ucch_far *ucch_board_far(const ucch_board *b) { return b->far; }

/* Returns the number of the first call that a rank of another host made differently, with the rank and its label; 0 for
 * none. */
uint64_t ucch_board_differs(ucch_board *b, int *rank, char *label) { return ucch_far_difference(b->far, rank, label); }

/* Count a call that has succeeded. */
void ucch_board_add(ucch_board *b, double seconds, uint64_t bytes) {
    UCCH_LOCKED;
    b->calls++;
    b->seconds += seconds;
    b->bytes += bytes;
}

void ucch_board_stats(ucch_board *b, uint64_t *calls, double *seconds, uint64_t *bytes) {
    UCCH_LOCKED;
    *calls = b->calls;
    *seconds = b->seconds;
    *bytes = b->bytes;
}

/* ---- calls, and refused ones ---- */

/* Copy words of this page that may be written meanwhile; the sequence number beside them tells whether the copy is
 * whole. */
static void *copy_words(void *to, const void *from, size_t bytes) {
    uint64_t *dst = to;
    const uint64_t *src = from;
    for (size_t i = 0; i < bytes / sizeof(*dst); i++)
        __atomic_store_n(&dst[i], __atomic_load_n(&src[i], __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    return to;
}

/* Read the signature and (if not NULL) the label with which a rank entered call `seq`. Returns 0 if the rank has not
 * entered it, or if its ring entry has been overwritten, possibly during the read. */
static int read_arrival(const slot *s, uint64_t seq, uint64_t *signature, char *label) {
    const arrival *a = &s->ring[seq % RING];
    if (UCCH_LOAD(&a->seq) != seq) return 0;
    *signature = __atomic_load_n(&a->signature, __ATOMIC_RELAXED);
    uint64_t words[LABEL / sizeof(uint64_t)];
    if (label) memcpy(label, copy_words(words, a->label, LABEL), LABEL);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&a->seq, __ATOMIC_RELAXED) == seq;
}

static uint64_t call_of(const slot *s) { return UCCH_LOAD(&s->seq); }

static ucch_refusal refusal_by(uint64_t call, int rank, const char *text) {
    ucch_refusal made = {.call = call, .rank = rank};
    strncpy(made.text, text, UCCH_REFUSAL_BYTES - 1);
    return made;
}

static void write_refusal(ucch_refusal *at, const ucch_refusal *made) {
    __atomic_store_n(&at->call, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    copy_words(&at->rank, &made->rank, sizeof(*at) - offsetof(ucch_refusal, rank));
    UCCH_STORE(&at->call, made->call);
}

/* Returns 0 if the entry holds the refusal of another call, possibly written during the read. */
static int read_refusal(const ucch_refusal *at, uint64_t call, ucch_refusal *found) {
    if (UCCH_LOAD(&at->call) != call) return 0;
    found->call = call;
    copy_words(&found->rank, &at->rank, sizeof(*at) - offsetof(ucch_refusal, rank));
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    found->text[UCCH_REFUSAL_BYTES - 1] = 0;
    return __atomic_load_n(&at->call, __ATOMIC_RELAXED) == call;
}

static pthread_mutex_t end_lock = PTHREAD_MUTEX_INITIALIZER;

/* A rank refused a call that another rank makes. This ends the communicator from that call on, for all ranks of this
 * host. The earliest such call counts. */
void ucch_board_end(ucch_board *b, uint64_t call, int rank, const char *text) {
    uint64_t *ending = &b->slots[0].ending;
    ucch_refusal made = refusal_by(call, rank, text);
    pthread_mutex_lock(&end_lock);
    uint64_t known = UCCH_LOAD(ending);
    if (!known || call < known) write_refusal(&b->me->end, &made);
    while ((!known || call < known) &&
           !__atomic_compare_exchange_n(ending, &known, call, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE))
        ;
    pthread_mutex_unlock(&end_lock);
}

/* As ucch_board_end, for call `seq` that the rank of slot `i` refused. */
static void end_by_refusal(ucch_board *b, int i, uint64_t seq) {
    uint64_t signature;
    char label[LABEL] = "";
    ucch_refusal last;
    int whole = read_refusal(&b->slots[i].refused, seq, &last); /* 0 if the rank has refused a later call since */
    if (!whole) read_arrival(&b->slots[i], seq, &signature, label);
    label[LABEL - 1] = 0;
    ucch_board_end(b, seq, b->ranks[i], whole ? last.text : label);
}

/* Called before the ring entry of a refused call is overwritten: ends the communicator unless all ranks of this host
 * have refused it. */
static void end_unless_all_refused(ucch_board *b, uint64_t seq) {
    uint64_t theirs;
    for (int i = 0; i < b->n; i++)
        if (call_of(&b->slots[i]) < seq ||
            (read_arrival(&b->slots[i], seq, &theirs, NULL) && theirs != UCCH_REFUSED_CALL))
            end_by_refusal(b, b->mine, seq);
}

/* FNV-1a: equal on all ranks for equal calls. */
uint64_t ucch_board_signature(const char *label) {
    uint64_t found = 0xCBF29CE484222325;
    while (*label)
        found = (found ^ (uint8_t)*label++) * 0x100000001B3;
    return found;
}

static void write_arrival(ucch_board *b, uint64_t seq, uint64_t signature, const char *label) {
    arrival *a = &b->me->ring[seq % RING];
    if (a->signature == UCCH_REFUSED_CALL && a->seq) end_unless_all_refused(b, a->seq);
    __atomic_store_n(&a->seq, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&a->signature, signature, __ATOMIC_RELAXED);
    uint64_t words[LABEL / sizeof(uint64_t)];
    copy_words(a->label, memcpy(words, label, LABEL), LABEL);
    UCCH_STORE(&a->seq, seq);
    if (b->far) ucch_far_call(b->far, seq, signature);
}

uint64_t ucch_board_publish(ucch_board *b, uint64_t signature, const char *label) {
    uint64_t seq = ++b->seq;
    write_arrival(b, seq, signature, label);
    UCCH_STORE(&b->me->seq, seq);
    return seq;
}

/* Publish the next call before it is entered: its teams are made first, by ranks that wait for each other. Returns the
 * call's number. */
uint64_t ucch_board_announce(ucch_board *b, uint64_t signature, const char *label) {
    write_arrival(b, b->seq + 1, signature, label);
    return b->seq + 1;
}

/* True if the rank of slot `i` is in call `seq` or has made it. A rank whose ring has moved on made it: otherwise it
 * would have ended the communicator (end_unless_all_refused). */
static int has_made(const ucch_board *b, int i, uint64_t seq) {
    uint64_t theirs;
    if (call_of(&b->slots[i]) < seq) return 0;
    return !read_arrival(&b->slots[i], seq, &theirs, NULL) || theirs != UCCH_REFUSED_CALL;
}

/* This rank refuses its next call because of its arguments. The refusal is numbered as a call, so that all ranks can go
 * on if all refuse it. A rank that makes the call sees a difference, and the communicator ends. Returns the call's
 * number. */
uint64_t ucch_board_refuse(ucch_board *b, const char *text) {
    UCCH_LOCKED;
    uint64_t seq = ++b->seq;
    ucch_refusal mine = refusal_by(seq, b->ranks[b->mine], text);
    ucch_board_record(b, UCCH_RECORD_REFUSED, seq, 0, text);
    write_refusal(&b->me->refused, &mine);
    write_arrival(b, seq, UCCH_REFUSED_CALL, mine.text);
    UCCH_STORE(&b->me->seq, seq);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* publish, then compare, like ranks that make the call */
    for (int i = 0; i < b->n; i++)
        if (i != b->mine && has_made(b, i, seq)) end_by_refusal(b, b->mine, seq);
    return seq;
}

/* The first refused call that ended the communicator; 0: none. */
static uint64_t ending_of(const ucch_board *b) { return UCCH_LOAD(&b->slots[0].ending); }

/* Find a complete refusal of this call written by a rank of this host. Returns 0 if there is none. */
static int find_end(const ucch_board *b, uint64_t call, ucch_refusal *found) {
    for (int i = 0; i < b->n; i++)
        if (read_refusal(&b->slots[i].end, call, found)) return 1;
    return 0;
}

/* True if a refused call has ended the communicator; `found` has the refusal. found->rank is -1 if the rank that was to
 * write it has died. */
int ucch_board_refusal(const ucch_board *b, ucch_refusal *found) {
    uint64_t call = ending_of(b);
    for (int i = 0; i < 10000 && call; i++) {
        if (find_end(b, call, found)) return 1;
        sched_yield();
        call = ending_of(b);
    }
    *found = refusal_by(call, -1, "");
    return call != 0;
}

/* ---- which ranks are there ---- */

static int fate_of(const ucch_board *b, int i) {
    int left;
    int64_t pid = process_of(b, i, &left);
    if (left) return UCCH_LEFT;
    return pid && ucch_process_ended((int)pid) ? UCCH_DIED : UCCH_THERE;
}

/* ---- the flight recorder ---- */

/* Set the communicator's number in the flight recorder. */
void ucch_board_name(ucch_board *b, uint32_t comm) { b->comm = comm; }

uint32_t ucch_board_comm(const ucch_board *b) { return b ? b->comm : 0; }

/* Record a call that runs without an operation of the engine. */
uint64_t ucch_board_record(ucch_board *b, int kind, uint64_t seq, uint64_t signature, const char *label) {
    ucch_record about = {.kind = (uint8_t)kind, .comm = b->comm, .signature = signature};
    strncpy(about.label, label, LABEL - 1);
    UCCH_LOCKED;
    return ucch_flight_begin(&about, seq, ucch_now(), 1);
}

/* A call has failed on this rank by timeout or mismatch. The other ranks of this host are signalled to write their
 * flight records: one of them may be in user code, and the first rank to fail soon ends the job. Other failures come
 * from dead ranks, which every rank notices itself. */
static void request_dumps_locked(ucch_board *b, uint64_t seq, int status) {
    for (int i = 0; i < b->n && (status == UCCH_FAIL_TIMEOUT || status == UCCH_FAIL_MISMATCH); i++) {
        slot *s = &b->slots[i];
        uint64_t before = __atomic_load_n(&s->asked, __ATOMIC_RELAXED);
        int left;
        int64_t pid = process_of(b, i, &left); /* read once: a negative pid would signal a process group */
        if (i == b->mine || !s->signal || !pid) continue;
        if (before < seq) __atomic_store_n(&s->since, ucch_now_ns(), __ATOMIC_RELAXED);
        if (before < seq && __atomic_compare_exchange_n(&s->asked, &before, seq, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
            ucch_process_signal((int)pid, (int)s->signal);
        ucch_flight_awaits_locked(pid, s->file, __atomic_load_n(&s->since, __ATOMIC_RELAXED));
    }
}

/* A rank of another host is dead. A rank that is in a call fails there and writes its records. A rank that is in no
 * call writes them now: it may be the one that others waited for, and the job may be about to be ended. */
void ucch_board_dump_if_idle(ucch_board *b) {
    int file, number = ucch_flight_signal(&file);
    if (number && !UCCH_LOAD(&b->me->open)) kill(getpid(), number);
}

/* Count a call that is entered (before it is published), or ended. Under the lock. */
void ucch_board_open(ucch_board *b, int more) { UCCH_STORE(&b->me->open, b->me->open + (uint64_t)more); }

/* This rank's last call if any call is under way, else 0. */
uint64_t ucch_board_under_way(const ucch_board *b) { return UCCH_LOAD(&b->me->open) ? call_of(b->me) : 0; }

/* The number of the next call. */
uint64_t ucch_board_next(ucch_board *b) { return b->seq + 1; }

/* A peer (see ucch_board_gone) that entered call `seq` with another signature, or freed the communicator instead
 * although none of its calls had failed; -1 for none. A peer that has not arrived will see this rank's signature; a
 * peer whose ring has moved on has seen it. */
int ucch_board_mismatch(ucch_board *b, uint64_t seq) {
    int other = b->far ? ucch_far_differs(b->far, seq) : -1;
    if (b->n < 2) return other;
    uint64_t ours, theirs;
    if (!read_arrival(b->me, seq, &ours, NULL)) return other; /* this rank's own ring has moved on */
    for (int i = 0; i < b->n; i++)
        if ((read_arrival(&b->slots[i], seq, &theirs, NULL) && ucch_calls_differ(ours, theirs)) ||
            (has_freed(b, i) && call_of(&b->slots[i]) < seq && !ucch_board_given_up(b, i)))
            return i;
    return other;
}

/* Call `seq` has failed on this rank. It may still succeed on other ranks for a moment; later calls cannot. */
void ucch_board_failed(ucch_board *b, uint64_t seq) {
    if (!seq) return;
    UCCH_LOCKED;
    slot *s = b->me;
    if (!s->failed) __atomic_store_n(&s->since_failed, ucch_now_ns(), __ATOMIC_RELAXED);
    if (!s->failed || seq < s->failed) UCCH_STORE(&s->failed, seq);
}

/* A call of this rank that the engine ran has ended. */
void ucch_board_ended_locked(ucch_board *b, ucch_op *op, int status, uint64_t bytes) {
    op->ended = ucch_now();
    if (status >= 0) {
        ucch_board_add(b, op->ended - op->started, bytes);
        return;
    }
    ucch_board_failed(b, op->error.seq);
    request_dumps_locked(b, op->error.seq, status);
}

/* The first call that failed on this rank; 0: none. */
uint64_t ucch_board_has_failed(const ucch_board *b) { return UCCH_LOAD(&b->me->failed); }

/* True if call `seq` or one before it failed on a rank of this host longer ago than the grace period. */
static int failed_long_ago(const ucch_board *b, const slot *s, uint64_t seq) {
    double grace = b->far ? UCCH_GRACE_FAR_S : UCCH_GRACE_S;
    uint64_t failed = UCCH_LOAD(&s->failed);
    if (!failed || failed > seq) return 0;
    return ucch_now() - 1e-9 * (double)__atomic_load_n(&s->since_failed, __ATOMIC_RELAXED) > grace;
}

/* The first call that this peer (see ucch_board_gone) is known to have failed in; 0: none. */
uint64_t ucch_board_given_up(ucch_board *b, int peer) {
    if (peer < -1) return b->far ? ucch_far_given_up(b->far, -2 - peer) : 0;
    return peer >= 0 && peer < b->n ? UCCH_LOAD(&b->slots[peer].failed) : 0;
}

/* A peer because of which call `seq` can never end: it has died, left before the call, or failed in it. Returns its
 * slot, or -2 - rank if it is on another host, or -1 for none. A dead peer is preferred. */
int ucch_board_gone(ucch_board *b, uint64_t seq) {
    int far = b->far ? ucch_far_gone(b->far, seq) : -1, absent = -1;
    for (int i = 0; i < b->n; i++) {
        slot *s = &b->slots[i];
        int left;
        int64_t pid = process_of(b, i, &left);
        if (i == b->mine || (!pid && !left)) continue;
        if (pid && ucch_process_ended((int)pid)) return i;
        if (absent < 0 && ((left && call_of(s) < seq) || failed_long_ago(b, s, seq))) absent = i;
    }
    return absent < 0 || (far != -1 && ucch_far_fate(b->far, -2 - far) >= UCCH_DIED) ? far : absent;
}

/* True if a call up to `seq` was refused; `peer` is then the rank that refused it. On entry `peer` is a rank whose call
 * `seq` differs: if it refused that call, this ends the communicator. */
static int is_refused(ucch_board *b, uint64_t seq, int *peer) {
    uint64_t theirs = 0;
    int by_peer = *peer >= 0 && read_arrival(&b->slots[*peer], seq, &theirs, NULL) && theirs == UCCH_REFUSED_CALL;
    if (by_peer) end_by_refusal(b, *peer, seq);
    uint64_t ending = ending_of(b);
    ucch_refusal end;
    if (!ending || ending > seq) return by_peer;
    if (find_end(b, ending, &end)) *peer = ucch_board_peer(b, (int)end.rank);
    return 1;
}

/* Returns why call `seq` fails and the peer that causes it, as far as is visible now; 0: no reason to fail. */
int ucch_board_verdict(ucch_board *b, uint64_t seq, int *peer) {
    *peer = -1;
    if (ucch_board_revoked(b)) return UCCH_FAIL_REVOKED;
    *peer = ucch_board_mismatch(b, seq);
    if (is_refused(b, seq, peer)) return UCCH_FAIL_REFUSED;
    return *peer == -1 ? 0 : UCCH_FAIL_MISMATCH;
}

/* How errors name a rank: its slot, or -2 - rank if it is on another host. */
int ucch_board_peer(const ucch_board *b, int rank) {
    for (int i = 0; i < b->n; i++)
        if (b->ranks[i] == rank) return i;
    return -2 - rank;
}

/* The best fate of the other ranks of this host. */
static int best_fate(const ucch_board *b) {
    int best = UCCH_DIED;
    for (int i = 0; i < b->n && best > UCCH_THERE; i++)
        if (i != b->mine && fate_of(b, i) < best) best = fate_of(b, i);
    return best;
}

/* State of a peer (see ucch_board_gone): UCCH_THERE, UCCH_LEFT, UCCH_DIED or worse. UCCH_ALL_PEERS: the best state of
 * all other ranks. */
int ucch_board_fate(ucch_board *b, int slot) {
    if (slot < UCCH_ALL_PEERS) return b->far ? ucch_far_fate(b->far, -2 - slot) : UCCH_THERE;
    if (slot != UCCH_ALL_PEERS) return slot < b->n ? fate_of(b, slot) : UCCH_THERE;
    if (b->n < 2 && !b->far) return UCCH_THERE;
    int here = best_fate(b), elsewhere = b->far ? ucch_far_best_fate(b->far) : UCCH_DIED;
    return here < elsewhere ? here : elsewhere;
}

/* True if a receive that has waited for `waited` seconds can come from no rank: each other rank is dead, has left, or
 * is on a host whose link is cut. */
int ucch_board_is_cut_off(ucch_board *b, double waited) {
    return b->far && ucch_far_is_cut_off(b->far, waited) && best_fate(b) > UCCH_THERE;
}

/* UCCH_FAIL_CONNECTION if the link to the host of `*peer` (see ucch_board_gone) is cut and the operation has waited for
 * `waited` seconds; else 0. `*peer` of -1 means any host; it is then set to a rank of that host. */
int ucch_board_cut(ucch_board *b, double waited, int *peer) {
    if (!b->far || *peer >= 0) return 0;
    int rank = ucch_far_cut(b->far, waited, *peer == -1 ? -1 : -2 - *peer);
    if (rank >= 0) *peer = -2 - rank;
    return rank >= 0 ? UCCH_FAIL_CONNECTION : 0;
}

/* libucp has given up a connection with `peer` (see ucch_board_gone). */
void ucch_board_lost_connection(ucch_board *b, int peer) {
    if (b->far && peer < UCCH_ALL_PEERS) ucch_far_lost_connection(b->far, -2 - peer);
}

/* Why call `seq`, which has waited for `waited` seconds, can never end, with the peer that causes it; 0: it may. */
int ucch_board_stuck(ucch_board *b, uint64_t seq, double waited, int *peer) {
    *peer = ucch_board_gone(b, seq);
    return *peer == -1 ? ucch_board_cut(b, waited, peer) : UCCH_FAIL_PEER;
}

/* Seconds to wait for a message from a rank that has ended normally: it may be in flight. */
#define LEFT_GRACE_S 5

/* Why a message with `peer` (see ucch_board_fate), begun at `started`, can never end; 0: it may. UCCH_LATER: the peer
 * has left and nothing of it is in flight. `left`: when the peer was first seen to have left, or 0. */
int ucch_board_check_message(ucch_board *b, int peer, double started, double now, double *left) {
    int fate = ucch_board_fate(b, peer);
    if (ucch_board_revoked(b)) return UCCH_FAIL_REVOKED;
    if (fate >= UCCH_DIED) return UCCH_FAIL_PEER;
    int of_any = peer == UCCH_ALL_PEERS;
    if (of_any ? ucch_board_is_cut_off(b, now - started) : ucch_board_cut(b, now - started, &peer))
        return UCCH_FAIL_CONNECTION;
    if (fate == UCCH_LEFT && *left == 0) *left = now;
    return fate == UCCH_LEFT && now - *left > LEFT_GRACE_S ? UCCH_LATER : 0;
}

/* The addresses, ours and the peer's, of the cut link to the host of `rank`; "" if no link to it is cut. */
const char *ucch_board_link(const ucch_board *b, int rank) { return b->far ? ucch_far_link(b->far, rank) : ""; }

void ucch_board_break(ucch_board *b) { b->broken = 1; }

/* Copy this rank's own label of a call; `label` is unchanged if its ring entry was overwritten. */
void ucch_board_own_label(ucch_board *b, uint64_t seq, char *label) {
    uint64_t signature;
    char found[LABEL];
    if (read_arrival(b->me, seq, &signature, found)) memcpy(label, found, LABEL);
    label[LABEL - 1] = 0;
}

/* As ucch_board_own_label; for a refused call the reason. */
void ucch_board_own_text(ucch_board *b, uint64_t seq, char *text) {
    ucch_refusal last;
    if (read_refusal(&b->me->refused, seq, &last))
        memcpy(text, last.text, UCCH_REFUSAL_BYTES);
    else
        ucch_board_own_label(b, seq, text);
}

/* As ucch_board_break, for a call that may have no waiter: the op is kept for a later call to report. */
void ucch_board_blame(ucch_board *b, ucch_op *op) {
    if (!b->first_failure) b->first_failure = op;
    b->broken = 1;
}

/* Count a call in streams that begins (1) or ends (-1). */
void ucch_board_launched(ucch_board *b, int more) {
    b->launches += more;
    ucch_board_open(b, more);
}

/* Calls in streams that have not ended. */
int ucch_board_launches(ucch_board *b) { return b->launches; }

ucch_op *ucch_board_first_failure(ucch_board *b) { return b->first_failure; }

/* True if the next call cannot be made. A refused call ends only the calls behind it: ranks that have not reached it
 * still make the calls before it. */
int ucch_board_broken(ucch_board *b) {
    uint64_t ending = ending_of(b);
    return b->broken || ucch_board_revoked(b) || (ending && ending <= b->seq + 1);
}

/* Revoke: fail everything under way on this communicator and start nothing more, on all ranks of this host. */
void ucch_board_revoke(ucch_board *b) { UCCH_STORE(&b->slots[0].revoked, 1); }

/* True if libucp has dropped a message since the communicator was made; it may have belonged to this communicator. */
int ucch_board_lossy(const ucch_board *b) { return b->losses != ucch_losses(); }

int ucch_board_revoked(ucch_board *b) { return UCCH_LOAD(&b->slots[0].revoked) != 0; }

/* Mark that this rank makes no more calls. */
void ucch_board_leave(ucch_board *b) { UCCH_STORE(&b->me->pid, -(int64_t)b->use); }

int ucch_board_has_left(const ucch_board *b) { return UCCH_LOAD(&b->me->pid) < 0; }

/* Store the rank of another host, among those connected with this one, that is furthest behind, and the call it has
 * reached. */
void ucch_board_behind_by(ucch_board *b, int rank, uint64_t reached) {
    uint64_t word = reached << 20 | (uint64_t)(rank + 1);
    UCCH_STORE(&b->me->behind, word);
}

/* The rank of another host that the rank of slot `i` knows not to have reached call `seq`; -1: none. */
int ucch_board_behind(ucch_board *b, int i, uint64_t seq) {
    uint64_t word = i >= 0 && i < b->n ? UCCH_LOAD(&b->slots[i].behind) : 0;
    return word && word >> 20 < seq ? (int)(word & ((1 << 20) - 1)) - 1 : -1;
}

/* A rank of another host has waited since `since` in call `call`, which this rank has not reached; 0: in none. */
void ucch_board_waited_by(ucch_board *b, int rank, uint64_t call, const char *label, double since) {
    slot *s = b->me;
    if (s->waits.call == call && s->waits.rank == rank) return;
    ucch_refusal made = refusal_by(call, rank, label);
    __atomic_store_n(&s->waited_since, (uint64_t)(1e9 * since), __ATOMIC_RELAXED);
    write_refusal(&s->waits, &made);
}

/* The call in which `rank` of another host waits, as far as a rank of this host knows, with its label and for how many
 * seconds; 0: none. */
uint64_t ucch_board_waiter(const ucch_board *b, int rank, char *label, double *seconds) {
    for (int i = 0; i < b->n; i++) {
        const slot *s = &b->slots[i];
        ucch_refusal found;
        uint64_t call = UCCH_LOAD(&s->waits.call);
        if (!call || !read_refusal(&s->waits, call, &found) || found.rank != rank) continue;
        memcpy(label, found.text, LABEL);
        *seconds = ucch_now() - 1e-9 * (double)__atomic_load_n(&s->waited_since, __ATOMIC_RELAXED);
        return call;
    }
    return 0;
}

/* Store when the last call was entered. */
void ucch_board_began(ucch_board *b, double now) {
    __atomic_store_n(&b->me->began, (uint64_t)(1e9 * now), __ATOMIC_RELAXED);
}

/* Seconds since the rank of slot `i` entered its last call; -1: not known. */
double ucch_board_waits(ucch_board *b, int i) {
    uint64_t began = i >= 0 && i < b->n ? __atomic_load_n(&b->slots[i].began, __ATOMIC_RELAXED) : 0;
    return began ? ucch_now() - 1e-9 * (double)began : -1;
}

uint64_t ucch_board_seq(ucch_board *b, int i) { return i >= 0 && i < b->n ? UCCH_LOAD(&b->slots[i].seq) : 0; }

int ucch_board_label(ucch_board *b, int i, uint64_t seq, char *label) {
    uint64_t signature;
    int found = i >= 0 && i < b->n && read_arrival(&b->slots[i], seq, &signature, label);
    label[found ? LABEL - 1 : 0] = 0;
    if (!found && i >= 0 && i < b->n && has_freed(b, i) && call_of(&b->slots[i]) < seq) {
        strcpy(label, "Free");
        return 0;
    }
    return found ? 0 : -1;
}
