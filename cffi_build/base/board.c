/* A page of memory shared by the ranks of one communicator on one host: who has arrived at which call.
 *
 * UCC returns OK with wrong data, or never, when ranks call different things; a dead peer is not noticed at all. Each
 * rank writes the signature of the call it enters into a slot of its own (one cache line, no lock). Whoever looks
 * later sees a peer that called something else, has not arrived, or whose process is gone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/far.h"
#include "base/flight.h"
#include "base/parcel.h"
#include "base/process.h"

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
    uint64_t
        behind; /* of the ranks of other hosts that the rank hears of: the last one's call, and its number plus one */
    uint64_t signal; /* makes the rank's process write its flight record, where its handler is set */
    uint64_t asked;  /* to do so, because of this call, by anyone */
    uint64_t since;  /* ns of CLOCK_MONOTONIC when that was */
    uint64_t began;  /* and when the last call that the engine runs was entered */
    uint64_t news;   /* of slot 0: how many refusals there were, of all ranks; in a line that is hardly ever written */
    uint64_t refused;
    uint64_t read;    /* so much of the news */
    uint64_t revoked; /* of slot 0: somebody of this host has heard that the communicator is revoked */
    uint64_t
        doubtful;  /* of slot 0: the last call that was under way on a rank when its process met an endpoint error */
    uint64_t last; /* of a rank that has left: the last call that it has done its part of */
    int64_t file;  /* the process's descriptor of its recorder's memory */
    char more[8];
    notice notices[REFUSALS];
    arrival ring[RING];
} slot;

struct ucch_board {
    ucch_board *next; /* of this process's */
    slot *slots;
    int n, mine;
    uint64_t seq, started; /* the last call, and the last one that was not refused */
    uint64_t failed;       /* the first call that failed on this rank alone; 0: none */
    uint64_t since;        /* refusals of earlier calls are of no interest to those that start now */
    ucch_refusal *known;   /* read, or told by ranks on other hosts */
    int nread, room;
    uint64_t *versions;               /* of all notices, as they were read */
    uint64_t tickets[REFUSALS];       /* of our own: their numbers among the news */
    uint64_t heard, collected;        /* news from other hosts, and from this one */
    uint64_t quiet_news, quiet_since; /* with so much news nothing concerned calls from there on */
    int *ranks;
    ucch_post post;
    ucch_far *far;         /* of a communicator that is on several hosts */
    uint32_t comm;         /* in the flight recorder */
    uint64_t calls, bytes; /* finished well, and what they moved */
    double seconds;
    int losses; /* of messages in this process, before it was made */
    _Atomic int launches;
    _Atomic int broken;               /* a call failed: the communicator starts no more */
    _Atomic int revoked;              /* as this rank has heard: all that is under way ends, on all ranks */
    _Atomic(ucch_op *) first_failure; /* that call, where nobody waits for it */
};

static int has_parcels(int nslots) { return nslots > 1 && nslots <= UCCH_PARCEL_RANKS; }

/* Slots, and behind them everybody's parcels. */
size_t ucch_board_bytes(int nslots) {
    return (size_t)nslots * (sizeof(slot) + (has_parcels(nslots) ? sizeof(ucch_parcels) : 0));
}

ucch_post *ucch_board_post(ucch_board *b) { return b && b->post.each ? &b->post : NULL; }

static int open_post(ucch_board *b) {
    if (!has_parcels(b->n)) return 1;
    b->post.each = calloc((size_t)b->n, sizeof(*b->post.each));
    b->post.n = b->n;
    b->post.mine = b->mine;
    for (int i = 0; b->post.each && i < b->n; i++)
        b->post.each[i] = (ucch_parcels *)(b->slots + b->n) + i;
    return b->post.each != NULL;
}

/* A communicator's page: a file of a process that runs as our user, or, without a path, memory of our own; NULL where
 * it cannot be had, or is too short. */
void *ucch_board_map(const char *path, size_t bytes) {
    struct stat about;
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1, flags = path ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
    void *page = MAP_FAILED;
    if (!path || (file >= 0 && !fstat(file, &about) && (size_t)about.st_size >= bytes))
        page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    if (file >= 0) close(file);
    return page == MAP_FAILED ? NULL : page;
}

void ucch_board_unmap(void *page, size_t bytes) { munmap(page, bytes); }

/* ---- data that cannot be trusted ---- */

static ucch_board *boards; /* under the lock */

/* An operation of libucc's in this process has ended in an endpoint's error. A task of libucc 1.4.0 may go on all the
 * same, and send to other ranks what it has not received, for which their part of the collective then ends well. Which
 * collective it was is not known: all ranks of this host are to know before they can have received anything. */
static void doubt_locked(void) {
    for (ucch_board *b = boards; b; b = b->next) {
        if (!b->n || !b->slots[b->mine].open) continue;
        uint64_t *doubtful = &b->slots[0].doubtful, known = __atomic_load_n(doubtful, __ATOMIC_RELAXED);
        while (known < b->seq &&
               !__atomic_compare_exchange_n(doubtful, &known, b->seq, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            ;
    }
}

/* True if what call `seq` has received may be what another rank of this host had not received itself. */
int ucch_board_doubtful(const ucch_board *b, uint64_t seq) {
    return b->n && __atomic_load_n(&b->slots[0].doubtful, __ATOMIC_ACQUIRE) >= seq;
}

static void enlist(ucch_board *b) {
    ucch_lock();
    b->next = boards;
    boards = b;
    ucch_endpoint_errors_tell(doubt_locked);
    ucch_unlock();
}

static void delist(const ucch_board *b) {
    ucch_lock();
    for (ucch_board **at = &boards; *at; at = &(*at)->next)
        if (*at == b) {
            *at = b->next;
            break;
        }
    ucch_unlock();
}

/* memory == NULL: a board of this rank alone (no peer shares the host's memory); it still counts calls. */
ucch_board *ucch_board_new(void *memory, int nslots, int mine, const int *ranks) {
    ucch_board *b = calloc(1, sizeof(*b));
    if (!b) return NULL;
    b->slots = memory;
    b->n = memory ? nslots : 0;
    b->mine = mine;
    b->losses = ucch_losses();
    b->ranks = calloc((size_t)nslots + 1, sizeof(int));
    b->versions = calloc((size_t)b->n * REFUSALS + 1, sizeof(uint64_t));
    if (!b->ranks || !b->versions || !open_post(b)) {
        ucch_board_free(b);
        return NULL;
    }
    memcpy(b->ranks, ranks, (size_t)nslots * sizeof(int));
    if (b->n) {
        b->slots[mine].pid = getpid();
        int file;
        b->slots[mine].signal = (uint64_t)ucch_flight_signal(&file);
        b->slots[mine].file = file;
    }
    enlist(b);
    return b;
}

void ucch_board_free(ucch_board *b) {
    delist(b);
    free(b->post.each);
    ucch_far_free(b->far);
    free(b->known);
    free(b->versions);
    free(b->ranks);
    free(b);
}

/* The communicator's `size` ranks are on several hosts. 0, or a failure. */
int ucch_board_reach(ucch_board *b, int size) {
    b->far = ucch_far_new(size);
    return b->far ? 0 : UCCH_FAIL_MEMORY;
}

ucch_far *ucch_board_far(const ucch_board *b) { return b->far; }

/* The first call that a rank of another host made differently, who, and what it called: its number, or 0. */
uint64_t ucch_board_differs(ucch_board *b, int *rank, char *label) { return ucch_far_difference(b->far, rank, label); }

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
    if (b->far) ucch_far_call(b->far, seq, signature);
    __atomic_store_n(&b->slots[b->mine].seq, seq, __ATOMIC_RELEASE);
    return seq;
}

/* Say what the next call will be, before it is entered: its teams are made first, by ranks that wait for each other.
 * Returns the number it will have. */
uint64_t ucch_board_announce(ucch_board *b, uint64_t signature, const char *label) {
    if (b->n) write_arrival(b, b->seq + 1, signature, label);
    if (b->far) ucch_far_call(b->far, b->seq + 1, signature);
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

static int fate_of(const ucch_board *b, int i) {
    int64_t pid = __atomic_load_n(&b->slots[i].pid, __ATOMIC_RELAXED);
    if (pid == LEFT) return UCCH_LEFT;
    return pid && ucch_process_ended((int)pid) ? UCCH_DIED : UCCH_THERE;
}

/* ---- the flight recorder ---- */

/* Set the number by which its records know the communicator. */
void ucch_board_name(ucch_board *b, uint32_t comm) { b->comm = comm; }

uint32_t ucch_board_comm(const ucch_board *b) { return b ? b->comm : 0; }

/* Record a call that no operation of ours runs. */
uint64_t ucch_board_record(ucch_board *b, int kind, uint64_t seq, uint64_t signature, const char *label) {
    ucch_record about = {.kind = (uint8_t)kind, .comm = b->comm, .signature = signature};
    strncpy(about.label, label, LABEL - 1);
    ucch_lock();
    uint64_t record = ucch_flight_begin(&about, seq, ucch_now(), 1);
    ucch_unlock();
    return record;
}

/* Call `seq` has failed with us. Where that is not because somebody is gone, as all ranks then see by themselves, those
 * of this host write what they do: one of them may be in user code, and the first to fail ends the job, as soon as
 * that is done. */
void ucch_board_ask_locked(ucch_board *b, uint64_t seq, int status) {
    for (int i = 0; i < b->n && (status == UCCH_FAIL_TIMEOUT || status == UCCH_FAIL_MISMATCH); i++) {
        slot *s = &b->slots[i];
        uint64_t before = __atomic_load_n(&s->asked, __ATOMIC_RELAXED);
        int64_t pid = __atomic_load_n(&s->pid, __ATOMIC_RELAXED); /* once: -1 would be everybody */
        if (i == b->mine || !s->signal || pid <= 0) continue;
        if (before < seq) __atomic_store_n(&s->since, (uint64_t)(1e9 * ucch_now()), __ATOMIC_RELAXED);
        if (before < seq && __atomic_compare_exchange_n(&s->asked, &before, seq, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
            ucch_process_signal((int)pid, (int)s->signal);
        ucch_flight_awaits_locked(pid, s->file, __atomic_load_n(&s->since, __ATOMIC_RELAXED));
    }
}

/* A rank of another host is gone. Who is in a call learns of it there, and fails; who is not writes what it does
 * instead, as it may be what the others have waited for, and the job may be about to be ended. */
void ucch_board_speak(ucch_board *b) {
    int file, number = ucch_flight_signal(&file);
    if (number && b->n && !__atomic_load_n(&b->slots[b->mine].open, __ATOMIC_ACQUIRE)) kill(getpid(), number);
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
    ucch_board_record(b, UCCH_RECORD_REFUSED, seq, 0, text);
    if (b->far) ucch_far_call(b->far, seq, 0);
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

/* Whether a call up to the last one was refused, and this rank does not know of it. A refusal that reaches beyond the
 * last one, as a rank that was ahead has given more up, concerns the calls to come, each by itself. */
int ucch_board_stale(ucch_board *b) { return b->since <= b->seq && ucch_board_refused(b, b->since, b->seq, NULL); }

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

/* A peer, as ucch_board_gone has it, that entered call `seq` with another signature than ours, or -1. A peer that has
 * not arrived will see ours; one that has moved on past the ring had seen it. */
int ucch_board_mismatch(ucch_board *b, uint64_t seq) {
    int other = b->far ? ucch_far_differs(b->far, seq) : -1;
    if (b->n < 2) return other;
    uint64_t ours, theirs;
    if (!read_arrival(&b->slots[b->mine], seq, &ours, NULL))
        return other; /* we have moved on past the ring ourselves */
    for (int i = 0; i < b->n; i++)
        if (read_arrival(&b->slots[i], seq, &theirs, NULL) && theirs != ours) return i;
    return other;
}

/* A peer that will not do its part of call `seq`, because it left or its process is gone: its slot, or -2 less its
 * number where it is on another host; -1 for none. */
int ucch_board_gone(ucch_board *b, uint64_t seq) {
    for (int i = 0; i < b->n; i++) {
        slot *s = &b->slots[i];
        int64_t pid = __atomic_load_n(&s->pid, __ATOMIC_ACQUIRE);
        if (i == b->mine || pid == 0) continue;
        if (pid == LEFT ? __atomic_load_n(&s->last, __ATOMIC_RELAXED) < seq : ucch_process_ended((int)pid)) return i;
    }
    return b->far ? ucch_far_gone(b->far, seq) : -1;
}

/* Why call `seq` comes to nothing, and by whom, as far as can be seen; 0 where nothing is amiss, or without a board. Of
 * refusals those from call `since` on concern it. */
int ucch_board_verdict(ucch_board *b, uint64_t since, uint64_t seq, int *peer) {
    *peer = -1;
    if (b && ucch_board_revoked(b)) return UCCH_FAIL_REVOKED;
    if (b && ucch_board_refused(b, since, seq, NULL)) return UCCH_FAIL_REFUSED;
    if (b) *peer = ucch_board_mismatch(b, seq);
    return *peer == -1 ? 0 : UCCH_FAIL_MISMATCH;
}

/* A rank as errors name it: its slot, or -2 less its number where it is on another host. */
int ucch_board_peer(const ucch_board *b, int rank) {
    for (int i = 0; b && i < b->n; i++)
        if (b->ranks[i] == rank) return i;
    return -2 - rank;
}

/* UCCH_THERE, UCCH_LEFT, UCCH_DIED or another way of being gone, for a peer as ucch_board_gone has it, or for all slots
 * but ours: the best of their fates. */
int ucch_board_fate(ucch_board *b, int slot) {
    if (slot < UCCH_ALL_PEERS) return b->far ? ucch_far_fate(b->far, -2 - slot) : UCCH_THERE;
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

int ucch_board_broken(ucch_board *b) { return b->broken || ucch_board_revoked(b); }

/* End all that is under way on this communicator and begin nothing more, on all ranks of this host. */
void ucch_board_revoke(ucch_board *b) {
    b->revoked = 1;
    if (b->n) __atomic_store_n(&b->slots[0].revoked, 1, __ATOMIC_RELEASE);
}

/* Whether libucp has thrown away a message since the communicator was made, which may have been one of it. */
int ucch_board_lossy(const ucch_board *b) { return b->losses != ucch_losses(); }

int ucch_board_revoked(ucch_board *b) {
    return b->revoked || (b->n && __atomic_load_n(&b->slots[0].revoked, __ATOMIC_ACQUIRE));
}

/* Call `seq` has failed with us. Where other ranks cannot see why, they are to know when this one leaves that its part
 * will not come: a message that was too long, for example, lets nothing be sent that was to follow. */
void ucch_board_failed(ucch_board *b, uint64_t seq, int status) {
    int seen = status == UCCH_FAIL_MISMATCH || status == UCCH_FAIL_PEER || status == UCCH_FAIL_REFUSED ||
               status == UCCH_FAIL_REVOKED;
    if (seen || status == UCCH_FAIL_TIMEOUT) return; /* theirs ends as well, and says who is missing */
    if (!b->failed || seq < b->failed) b->failed = seq;
}

/* Of the calls up to `called` the last one that this rank has done its part of, or will. */
uint64_t ucch_board_last(const ucch_board *b, uint64_t called) {
    return b->failed && b->failed <= called ? b->failed - 1 : called;
}

/* This rank makes no more calls. */
void ucch_board_leave(ucch_board *b) {
    if (!b->n) return;
    __atomic_store_n(&b->slots[b->mine].last, ucch_board_last(b, b->seq), __ATOMIC_RELAXED);
    __atomic_store_n(&b->slots[b->mine].pid, LEFT, __ATOMIC_RELEASE);
}

int ucch_board_has_left(const ucch_board *b) {
    return b->n && __atomic_load_n(&b->slots[b->mine].pid, __ATOMIC_ACQUIRE) == LEFT;
}

/* Of the ranks of other hosts that this one hears of, `rank` is the last: it has come to call `reached`. */
void ucch_board_behind_by(ucch_board *b, int rank, uint64_t reached) {
    uint64_t word = reached << 20 | (uint64_t)(rank + 1);
    if (b->n) __atomic_store_n(&b->slots[b->mine].behind, word, __ATOMIC_RELEASE);
}

/* The rank of another host that the rank of a slot knows not to have come to call `seq`; -1 for none. */
int ucch_board_behind(ucch_board *b, int i, uint64_t seq) {
    uint64_t word = i >= 0 && i < b->n ? __atomic_load_n(&b->slots[i].behind, __ATOMIC_ACQUIRE) : 0;
    return word && word >> 20 < seq ? (int)(word & ((1 << 20) - 1)) - 1 : -1;
}

/* The last call was entered at `now`. */
void ucch_board_began(ucch_board *b, double now) {
    if (b->n) __atomic_store_n(&b->slots[b->mine].began, (uint64_t)(1e9 * now), __ATOMIC_RELAXED);
}

/* Seconds since a rank's last call was entered; -1 where that is not known. */
double ucch_board_waits(ucch_board *b, int i) {
    uint64_t began = i >= 0 && i < b->n ? __atomic_load_n(&b->slots[i].began, __ATOMIC_RELAXED) : 0;
    return began ? ucch_now() - 1e-9 * (double)began : -1;
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
