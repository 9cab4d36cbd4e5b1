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
#define NO_CONTROL UINT32_MAX

/* One message, in the sender's window: a cache line that the sender writes, and one that the receiver does. */
typedef struct control {
    uint64_t published; /* pieces that lie in their chunks */
    uint32_t aborted, chunk[SLOTS];
    uint32_t room[5];
    uint64_t consumed; /* pieces that have left them */
    uint32_t ready, closed;
    uint32_t more[12];
} control;

typedef struct window {
    int pid, pinned;
    size_t bytes, chunks;
    char *memory;
} window;

enum { ENDED, OFFERED, SENDING, RECEIVING };

struct ucch_transfer {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t number; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
};

static window own = {.pid = -1}, peers[MOST_WINDOWS];
static int npeers, own_file = -1;
static uint32_t free_controls[CONTROLS], *free_chunks;
static size_t ncontrols, nchunks;

static control *controls(const window *w) {
    return (control *)w->memory;
}

static char *chunks(const window *w) {
    return w->memory + CONTROLS * sizeof(control);
}

static int map(window *w, int file, size_t bytes) {
    size_t whole = CONTROLS * sizeof(control) + bytes / LONGEST * LONGEST;
    void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return UCCH_FAIL_MEMORY;
    *w = (window){.bytes = whole, .chunks = bytes / LONGEST, .memory = memory};
    return 0;
}

static int make_locked(size_t bytes) {
    own_file = memfd_create("ucc_hetero", MFD_CLOEXEC);
    if (own_file < 0)
        return UCCH_FAIL_MEMORY;
    free_chunks = calloc(bytes / LONGEST, sizeof(*free_chunks));
    int status =
        !free_chunks || ftruncate(own_file, (off_t)(CONTROLS * sizeof(control) + bytes)) ? UCCH_FAIL_MEMORY : 0;
    if (!status)
        status = map(&own, own_file, bytes);
    if (status)
        return status;
    own.pid = (int)getpid();
    for (nchunks = 0; nchunks < own.chunks; nchunks++)
        free_chunks[nchunks] = (uint32_t)(own.chunks - 1 - nchunks);
    for (ncontrols = 0; ncontrols < CONTROLS; ncontrols++)
        free_controls[ncontrols] = (uint32_t)(CONTROLS - 1 - ncontrols);
    return 0;
}

/* This process's window, made at first use: its file, or a failure. `bytes` are those of its chunks. */
int ucch_window_own(size_t bytes) {
    ucch_lock();
    int status = own.pid != (int)getpid() ? make_locked(bytes) : 0; /* a child's is not its parent's */
    ucch_unlock();
    return status < 0 ? status : own_file;
}

static window *window_of(int pid) {
    for (int i = 0; i < npeers; i++)
        if (peers[i].pid == pid)
            return &peers[i];
    return pid == own.pid ? &own : NULL;
}

/* Map the window of another process that runs in our namespaces as our user; 0, or a failure. */
int ucch_window_open(int pid, int file, size_t bytes) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    ucch_lock();
    int status = window_of(pid) ? 1 : npeers == MOST_WINDOWS ? UCCH_FAIL_MEMORY : 0;
    int here = status ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (!status && here < 0)
        status = UCCH_FAIL_PEER;
    if (!status && !(status = map(&peers[npeers], here, bytes)))
        peers[npeers++].pid = pid;
    if (here >= 0)
        close(here);
    ucch_unlock();
    return status < 0 ? status : 0;
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
int ucch_transfer_offer_locked(ucch_transfer *t, const void *buffer, size_t bytes, int on_device, ucch_token *token) {
    if (own.pid < 0 || !ncontrols)
        return UCCH_FAIL_MEMORY;
    t->number = free_controls[--ncontrols];
    *token = (ucch_token){bytes, piece_of(bytes), own.pid, t->number};
    memset(&controls(&own)[t->number], 0, sizeof(control));
    begin(t, OFFERED, &own, token, (void *)(uintptr_t)buffer, on_device);
    t->slots = 0;
    return 0;
}

void ucch_token_decline_locked(const ucch_token *token) {
    window *w = window_of(token->pid);
    if (w)
        __atomic_store_n(&controls(w)[token->control].closed, 1, __ATOMIC_RELEASE);
}

/* Begin to receive: 0, or a failure, after which the sender's side ends too. */
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token) {
    window *w = window_of(token->pid);
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
    free_controls[ncontrols++] = t->number;
    t->phase = ENDED;
}

/* Take chunks once the receiver is ready: what there is, up to what is of use. */
static void take_chunks(ucch_transfer *t) {
    if (!nchunks || !__atomic_load_n(&t->at->ready, __ATOMIC_ACQUIRE))
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

/* Give up. The other side may still be copying: what a sender has lent to the message is never used again. */
void ucch_transfer_abort_locked(ucch_transfer *t) {
    if (t->phase == ENDED)
        return;
    __atomic_store_n(t->phase == RECEIVING ? &t->at->closed : &t->at->aborted, 1, __ATOMIC_RELEASE);
    t->phase = ENDED;
}
