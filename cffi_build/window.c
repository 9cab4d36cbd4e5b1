/* Windows: shared memory that several vendors' devices copy to and from, for messages between processes of one host.
 *
 * No library opens one vendor's device memory for another's, and a processor that copies between two processes is ten
 * times slower than the devices are. So every process has a window, an anonymous file that its peers map, and that all
 * of them have pinned: the sender's device copies pieces into it, the receiver's device copies them out, and several
 * pieces are under way at a time. Nothing is taken from a window before the receiver is ready for the message: what
 * nobody receives must not keep others from being received. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "window.h"

/* Pieces of one message under way; the longest, which a device copies in 40 us, and the shortest. */
#define SLOTS 8
#define LONGEST ((size_t)2 << 20)
#define SHORTEST ((size_t)128 << 10)
/* Messages that a process has offered and that nobody has finished receiving. */
#define CONTROLS 8192
#define MOST_WINDOWS 1024

/* One message, in the sender's window: a cache line that the sender writes, and one that the receiver does. */
typedef struct control {
    uint64_t published; /* pieces that lie in their chunks */
    uint64_t number;    /* of the message among this sender's; 0 while there is none */
    uint64_t tag, bytes;
    int32_t dest;
    uint32_t aborted;
    uint16_t chunk[SLOTS];
    uint64_t reserved;
    uint64_t consumed;             /* pieces that have left their chunks */
    uint32_t taken, ready, closed; /* out of libucp's queue by a probe; being received; done with */
    uint32_t more[11];
} control;

typedef struct window {
    uint64_t key; /* of its process; numbers of processes are used again */
    int pinned;
    size_t chunks;
    char *memory;
} window;

enum { ENDED, OFFERED, SENDING, RECEIVING };

struct ucch_transfer {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t index; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
};

static window own, peers[MOST_WINDOWS];
static int npeers, own_file = -1;
static uint32_t free_controls[CONTROLS];
static uint16_t *free_chunks;
static size_t ncontrols, nchunks;
static uint64_t offered;
/* Controls, with how many chunks each, of messages given up that their receivers may still be copying. */
static struct {
    uint32_t index;
    int slots;
} orphans[CONTROLS];
static int norphans;

static control *controls(const window *w) {
    return (control *)w->memory;
}

static char *chunks(const window *w) {
    return w->memory + CONTROLS * sizeof(control);
}

static size_t length_of(size_t chunks) {
    return CONTROLS * sizeof(control) + chunks * LONGEST;
}

static int map(window *w, uint64_t key, int file, size_t chunks) {
    void *memory = mmap(NULL, length_of(chunks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return UCCH_FAIL_MEMORY;
    *w = (window){.key = key, .chunks = chunks, .memory = memory};
    return 0;
}

static int make_locked(uint64_t key, size_t many) {
    uint16_t *list = calloc(many, sizeof(*list));
    int file = memfd_create("ucc_hetero", MFD_CLOEXEC);
    int status = !list || file < 0 || ftruncate(file, (off_t)length_of(many)) ? UCCH_FAIL_MEMORY : 0;
    if (!status)
        status = map(&own, key, file, many);
    if (status) {
        free(list);
        if (file >= 0)
            close(file);
        return status;
    }
    own_file = file;
    free_chunks = list;
    norphans = 0;
    for (nchunks = 0; nchunks < many; nchunks++)
        free_chunks[nchunks] = (uint16_t)(many - 1 - nchunks);
    for (ncontrols = 0; ncontrols < CONTROLS; ncontrols++)
        free_controls[ncontrols] = (uint32_t)(CONTROLS - 1 - ncontrols);
    return 0;
}

/* This process's window, made at first use: its file, or a failure. `key` is the process's, so that a child makes one
 * of its own. `bytes` are wanted for its chunks, and then those that they have. */
int ucch_window_own(uint64_t key, size_t *bytes) {
    ucch_lock();
    int status = own.key != key ? make_locked(key, *bytes / LONGEST) : 0;
    *bytes = own.chunks * LONGEST;
    ucch_unlock();
    return status < 0 ? status : own_file;
}

/* NULL where there is none; no process has key 0. */
static window *window_of(uint64_t key) {
    if (!key)
        return NULL;
    for (int i = 0; i < npeers; i++)
        if (peers[i].key == key)
            return &peers[i];
    return key == own.key ? &own : NULL;
}

/* Map the window of another process that runs in our namespaces as our user; 0, or a failure. */
int ucch_window_open(uint64_t key, int pid, int file, size_t bytes) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    ucch_lock();
    int known = window_of(key) != NULL, status = !known && npeers == MOST_WINDOWS ? UCCH_FAIL_MEMORY : 0;
    int here = known || status ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (!known && !status)
        status = here < 0 ? UCCH_FAIL_PEER : map(&peers[npeers], key, here, bytes / LONGEST);
    npeers += !known && !status;
    if (here >= 0)
        close(here);
    ucch_unlock();
    return status;
}

static int pin(window *w) {
    const device_ops *ops = ucch_bound_ops();
    if (w->pinned || !ops)
        return w->pinned ? 0 : UCCH_FAIL_DEVICE;
    int status = ucch_device_fail(ops->host_register(chunks(w), w->chunks * LONGEST), "pinning shared memory");
    w->pinned = !status;
    return status;
}

/* Pin all windows that are mapped: for the bound device's copies. */
int ucch_windows_pin(void) {
    ucch_lock();
    int before = ucch_device_enter(), status = pin(&own);
    for (int i = 0; i < npeers && !status; i++)
        status = pin(&peers[i]);
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* ---- one message ---- */

ucch_transfer *ucch_transfer_new(void) {
    return calloc(1, sizeof(ucch_transfer));
}

void ucch_transfer_free(ucch_transfer *t) {
    for (int i = 0; t && i < SLOTS; i++)
        if (t->event[i] && ucch_bound() >= 0)
            ucch_bound_ops()->event_free(t->event[i]);
    free(t);
}

/* Pieces so long that several are under way. */
static size_t piece_of(size_t bytes) {
    size_t piece = (bytes / SLOTS + 4095) / 4096 * 4096;
    return piece < SHORTEST ? SHORTEST : piece > LONGEST ? LONGEST : piece;
}

/* Chunks of messages given up come back once their receivers have seen it. */
static void reclaim(void) {
    for (int i = 0; i < norphans;) {
        control *c = &controls(&own)[orphans[i].index];
        if (!__atomic_load_n(&c->closed, __ATOMIC_ACQUIRE)) {
            i++;
            continue;
        }
        for (int k = 0; k < orphans[i].slots; k++)
            free_chunks[nchunks++] = c->chunk[k];
        c->number = 0;
        free_controls[ncontrols++] = orphans[i].index;
        orphans[i] = orphans[--norphans];
    }
}

static void begin(ucch_transfer *t, int phase, const window *w, const ucch_token *token, void *buffer, int on_device) {
    t->phase = phase;
    t->on_device = on_device;
    t->buffer = buffer;
    t->base = chunks(w);
    t->at = &controls(w)[token->control];
    t->bytes = token->bytes;
    t->piece = token->piece;
    t->pieces = (token->bytes + token->piece - 1) / token->piece;
    t->asked = t->done = 0;
}

/* Have a message ready for whoever gets the token; its data stays where it is until then. */
int ucch_transfer_offer_locked(ucch_transfer *t, const ucch_offer *offer, ucch_token *token) {
    if (!ncontrols)
        reclaim();
    if (!own.memory || !ncontrols)
        return UCCH_FAIL_MEMORY;
    t->index = free_controls[--ncontrols];
    *token = (ucch_token){offer->bytes, piece_of(offer->bytes), own.key, t->index, 0};
    begin(t, OFFERED, &own, token, (void *)(uintptr_t)offer->data, offer->on_device);
    t->slots = 0;
    *t->at = (control){.tag = offer->tag, .bytes = offer->bytes, .dest = offer->dest};
    __atomic_store_n(&t->at->number, ++offered, __ATOMIC_RELEASE);
    return 0;
}

/* Bytes of the oldest message that `key`'s process has sent to rank `dest` under a tag and that is still in libucp's
 * queue, where there must be one; `take`: a probe takes it out. Messages of one tag are matched in their order. */
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take) {
    window *w = window_of(key);
    control *oldest = NULL;
    for (control *c = w ? controls(w) : NULL; w && c < controls(w) + CONTROLS; c++) {
        if (!__atomic_load_n(&c->number, __ATOMIC_ACQUIRE) || c->tag != tag || c->dest != dest)
            continue;
        if (!c->taken && !c->ready && !c->closed && (!oldest || c->number < oldest->number))
            oldest = c;
    }
    if (oldest && take)
        oldest->taken = 1;
    return oldest ? oldest->bytes : 0;
}

void ucch_token_decline_locked(const ucch_token *token) {
    window *w = window_of(token->key);
    if (w)
        __atomic_store_n(&controls(w)[token->control].closed, 1, __ATOMIC_RELEASE);
}

/* Begin to receive: 0, or a failure, after which the sender's side ends too. */
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token) {
    window *w = window_of(token->key);
    if (!w)
        return UCCH_FAIL_PEER;
    if (token->bytes > room) {
        ucch_token_decline_locked(token);
        return UCCH_FAIL_TRUNCATED;
    }
    begin(t, RECEIVING, w, token, buffer, on_device);
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
    return 0;
}

static size_t length(const ucch_transfer *t, uint64_t piece) {
    return piece + 1 < t->pieces ? t->piece : t->bytes - piece * t->piece;
}

/* Ask for the copy of one piece, between its place in the buffer and its chunk. */
static int ask(ucch_transfer *t) {
    int slot = (int)(t->asked % SLOTS), way = t->phase == SENDING ? UCCH_TO_HOST : UCCH_TO_DEVICE;
    char *mine = t->buffer + t->asked * t->piece, *chunk = t->base + t->at->chunk[slot] * LONGEST;
    char *dst = t->phase == SENDING ? chunk : mine, *src = t->phase == SENDING ? mine : chunk;
    size_t bytes = length(t, t->asked++);
    if (!t->on_device) {
        memcpy(dst, src, bytes);
        return 0;
    }
    int status = ucch_work_copy(way, dst, src, bytes);
    return status ? status : ucch_work_mark(way, &t->event[slot]);
}

/* Count the pieces whose copies are over. */
static int collect(ucch_transfer *t) {
    int done = 1, status = 0;
    while (t->done < t->asked) {
        if (t->on_device)
            status = ucch_device_fail(ucch_bound_ops()->event_done(t->event[t->done % SLOTS], &done), "event");
        if (status || !done)
            return status;
        t->done++;
    }
    return 0;
}

static void give_back(ucch_transfer *t) {
    while (t->slots)
        free_chunks[nchunks++] = t->at->chunk[--t->slots];
    t->at->number = 0;
    free_controls[ncontrols++] = t->index;
    t->phase = ENDED;
}

/* Take chunks once the receiver is ready: what there is, up to what is of use. */
static void take_chunks(ucch_transfer *t) {
    if (!__atomic_load_n(&t->at->ready, __ATOMIC_ACQUIRE))
        return;
    if (!nchunks)
        reclaim();
    if (!nchunks)
        return;
    while (nchunks && t->slots < SLOTS && (uint64_t)t->slots < t->pieces)
        t->at->chunk[t->slots++] = free_chunks[--nchunks];
    /* Piece k lies in slot k % SLOTS on both sides: with fewer chunks the slots share them, one piece at a time. */
    for (int i = t->slots; i < SLOTS; i++)
        t->at->chunk[i] = t->at->chunk[i % t->slots];
    t->phase = SENDING;
}

static int send_on(ucch_transfer *t) {
    uint64_t consumed = __atomic_load_n(&t->at->consumed, __ATOMIC_ACQUIRE);
    if (t->phase == OFFERED)
        take_chunks(t);
    int idle = t->asked == t->done;
    if (__atomic_load_n(&t->at->closed, __ATOMIC_ACQUIRE) && idle) { /* received, or wanted by nobody */
        give_back(t);
        return 1;
    }
    if (t->phase == OFFERED)
        return 0;
    int status = 0, most = t->slots == SLOTS || (uint64_t)t->slots == t->pieces ? t->slots : 1;
    while (!status && t->asked < t->pieces && t->asked - consumed < (uint64_t)most)
        status = ask(t);
    if (!status)
        status = collect(t);
    __atomic_store_n(&t->at->published, t->done, __ATOMIC_RELEASE);
    return status;
}

static int receive_on(ucch_transfer *t) {
    uint64_t published = __atomic_load_n(&t->at->published, __ATOMIC_ACQUIRE);
    int status = 0;
    while (!status && t->asked < published)
        status = ask(t);
    if (!status)
        status = collect(t);
    if (status)
        return status;
    __atomic_store_n(&t->at->consumed, t->done, __ATOMIC_RELEASE);
    if (t->done == t->pieces) {
        __atomic_store_n(&t->at->closed, 1, __ATOMIC_RELEASE);
        t->phase = ENDED;
        return 1;
    }
    return __atomic_load_n(&t->at->aborted, __ATOMIC_ACQUIRE) ? UCCH_FAIL_PEER : 0;
}

/* 1 when this side has finished, 0 when not yet, negative on failure. */
int ucch_transfer_pump_locked(ucch_transfer *t) {
    return t->phase == ENDED ? 1 : t->phase == RECEIVING ? receive_on(t) : send_on(t);
}

/* Whether a device still copies from or to the buffer. */
int ucch_transfer_busy_locked(ucch_transfer *t) {
    return t->asked != t->done && !collect(t) && t->asked != t->done;
}

/* Give up. The other side may still be copying: what a sender has lent to the message comes back when it has ended. Our
 * own copies that are under way come before any other into the same chunks, in the same stream. */
void ucch_transfer_abort_locked(ucch_transfer *t) {
    if (t->phase == ENDED)
        return;
    if (t->phase == RECEIVING)
        __atomic_store_n(&t->at->closed, 1, __ATOMIC_RELEASE);
    else {
        __atomic_store_n(&t->at->aborted, 1, __ATOMIC_RELEASE);
        orphans[norphans].index = t->index;
        orphans[norphans++].slots = t->slots;
    }
    t->phase = ENDED;
}
