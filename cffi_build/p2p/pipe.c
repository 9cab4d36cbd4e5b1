/* Pipe: messages through windows (segment.c), by a sender's half and a receiver's half that copy in turn.
 *
 * Nothing is taken from a window before the receiver is ready for the message: what nobody receives must not keep
 * others from being received. Several pieces of a message are under way at a time. */
#include <stdlib.h>
#include <string.h>

#include "p2p/pipe.h"

/* The shortest piece; the longest fill a chunk, which a device copies in 40 us. */
#define SHORTEST ((size_t)128 << 10)

static uint32_t free_controls[CONTROLS];
static size_t ncontrols;
static uint64_t offered;
/* Controls, with how many chunks each, of messages given up that their receivers may still be copying. */
static struct {
    uint32_t index;
    int slots;
} zombies[CONTROLS];
static int nzombies;

static control *controls(uint64_t key) { return (control *)ucch_window_of(key)->offers; }

/* Whether there is a window; in a new one nothing is offered. */
static int has_window_locked(void) {
    static uint64_t known;
    if (known == ucch_window_of(0)->key) return known != 0;
    known = ucch_window_of(0)->key;
    nzombies = 0;
    for (ncontrols = 0; ncontrols < CONTROLS; ncontrols++)
        free_controls[ncontrols] = (uint32_t)(CONTROLS - 1 - ncontrols);
    return 1;
}

/* Chunks of messages given up come back once their receivers have seen it. */
static void reclaim_locked(void) {
    for (int i = 0; i < nzombies;) {
        control *c = &controls(0)[zombies[i].index];
        if (!__atomic_load_n(&c->closed, __ATOMIC_ACQUIRE)) {
            i++;
            continue;
        }
        for (int k = 0; k < zombies[i].slots; k++)
            ucch_chunk_give_locked(c->chunk[k]);
        c->number = 0;
        free_controls[ncontrols++] = zombies[i].index;
        zombies[i] = zombies[--nzombies];
    }
}

/* ---- one message ---- */

ucch_pipe *ucch_pipe_new(void) { return calloc(1, sizeof(ucch_pipe)); }

void ucch_pipe_free(ucch_pipe *p) {
    for (int i = 0; p && i < SLOTS; i++)
        if (p->event[i] && ucch_bound() >= 0) ucch_bound_ops()->event_free(p->event[i]);
    free(p);
}

/* Pieces so long that several are under way. */
static size_t piece_of(size_t bytes) {
    size_t piece = (bytes / SLOTS + 4095) / 4096 * 4096;
    return piece < SHORTEST ? SHORTEST : piece > UCCH_CHUNK ? UCCH_CHUNK : piece;
}

/* Both sides know what the message is. */
static void begin(ucch_pipe *p, int phase, const ucch_rts *rts, void *buffer, int on_device) {
    p->phase = phase;
    p->on_device = on_device;
    p->buffer = buffer;
    p->base = ucch_window_of(rts->key)->chunks;
    p->at = &controls(rts->key)[rts->control];
    p->bytes = rts->bytes;
    p->piece = rts->piece;
    p->pieces = (rts->bytes + rts->piece - 1) / rts->piece;
    p->asked = p->done = 0;
    p->again = 0;
}

/* Have a message ready for whoever gets its header; its data stays where it is until then. */
int ucch_pipe_offer_locked(ucch_pipe *p, const ucch_offer *offer, ucch_rts *rts) {
    if (!has_window_locked()) return UCCH_FAIL_MEMORY;
    if (!ncontrols) reclaim_locked();
    if (!ncontrols) return UCCH_FAIL_MEMORY;
    p->index = free_controls[--ncontrols];
    *rts = (ucch_rts){offer->bytes, piece_of(offer->bytes), ucch_window_of(0)->key, p->index, 0};
    begin(p, OFFERED, rts, (void *)(uintptr_t)offer->data, offer->on_device);
    p->slots = 0;
    *p->at = (control){.tag = offer->tag, .bytes = offer->bytes, .dest = offer->dest};
    return 0;
}

/* The header goes out now: whoever probes for the message finds its length here. */
void ucch_pipe_offered_locked(ucch_pipe *p) { __atomic_store_n(&p->at->number, ++offered, __ATOMIC_RELEASE); }

/* The number of an offer that is for rank `dest` under a tag and still in libucp's queue, and its bytes; 0 for another,
 * be it one that its sender puts in this place while we read. */
static uint64_t offer_waiting(const control *c, uint64_t tag, int dest, uint64_t *bytes) {
    uint64_t number = __atomic_load_n(&c->number, __ATOMIC_ACQUIRE);
    if (!number || c->tag != tag || c->dest != dest || c->taken || c->ready || c->closed) return 0;
    *bytes = c->bytes;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&c->number, __ATOMIC_RELAXED) == number ? number : 0;
}

/* Bytes of the oldest message that `key`'s process has sent to rank `dest` under a tag and that is still in libucp's
 * queue, where there must be one; `take`: a probe takes it out. Messages of one tag are matched in their order. */
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take) {
    control *all = key ? controls(key) : NULL, *oldest = NULL;
    uint64_t first = 0, bytes = 0;
    for (control *c = all; all && c < all + CONTROLS; c++) {
        uint64_t length, number = offer_waiting(c, tag, dest, &length);
        if (number && (!first || number < first)) {
            oldest = c;
            first = number;
            bytes = length;
        }
    }
    if (oldest && take) oldest->taken = 1;
    return bytes;
}

void ucch_rts_decline_locked(const ucch_rts *rts) {
    control *all = rts->key ? controls(rts->key) : NULL;
    if (all) __atomic_store_n(&all[rts->control].closed, 1, __ATOMIC_RELEASE);
}

/* Begin to receive: 0, or a failure, after which the sender's side ends too. */
int ucch_pipe_accept_locked(ucch_pipe *p, void *buffer, size_t room, int on_device, const ucch_rts *rts) {
    if (!rts->key || !controls(rts->key)) return UCCH_FAIL_PEER;
    if (rts->bytes > room) {
        ucch_rts_decline_locked(rts);
        return UCCH_FAIL_TRUNCATED;
    }
    begin(p, RECEIVING, rts, buffer, on_device);
    __atomic_store_n(&p->at->ready, 1, __ATOMIC_RELEASE);
    return 0;
}

/* Ask for the copy of one piece, between its place in the buffer and its chunk. */
static int ask(ucch_pipe *p) {
    int slot = (int)(p->asked % SLOTS), way = p->phase == SENDING ? UCCH_TO_HOST : UCCH_TO_DEVICE;
    char *mine = p->buffer + p->asked * p->piece;
    char *chunk = p->base + p->at->chunk[slot] * UCCH_CHUNK;
    char *dst = p->phase == SENDING ? chunk : mine, *src = p->phase == SENDING ? mine : chunk;
    size_t bytes = ucch_piece_length(p, p->asked++);
    if (!p->on_device) {
        memcpy(dst, src, bytes);
        return 0;
    }
    int status = ucch_work_copy(way, dst, src, bytes);
    return status ? status : ucch_work_mark(way, &p->event[slot]);
}

/* Count the pieces whose copies are over. */
static int collect(ucch_pipe *p) {
    int done = 1, status = 0;
    while (p->done < p->asked) {
        if (p->on_device) status = ucch_event_ask(p->event[p->done % SLOTS], &done, &p->again);
        if (status || !done) return status;
        p->done++;
    }
    return 0;
}

static void give_back(ucch_pipe *p) {
    while (p->slots)
        ucch_chunk_give_locked(p->at->chunk[--p->slots]);
    p->at->number = 0;
    free_controls[ncontrols++] = p->index;
    p->phase = ENDED;
}

/* Take chunks once the receiver is ready: what there is, up to what is of use. */
static void take_chunks(ucch_pipe *p) {
    if (!__atomic_load_n(&p->at->ready, __ATOMIC_ACQUIRE)) return;
    uint16_t chunk;
    if (!ucch_chunk_take_locked(&chunk)) {
        reclaim_locked();
        if (!ucch_chunk_take_locked(&chunk)) return;
    }
    do
        p->at->chunk[p->slots++] = chunk;
    while (p->slots < SLOTS && (uint64_t)p->slots < p->pieces && ucch_chunk_take_locked(&chunk));
    /* Piece k lies in slot k % SLOTS on both sides: with fewer chunks the slots share them, one piece at a time. */
    for (int i = p->slots; i < SLOTS; i++)
        p->at->chunk[i] = p->at->chunk[i % p->slots];
    p->phase = SENDING;
}

/* Note chunks lent to a message, to be taken back once its receiver has done with them. */
static void leave(const ucch_pipe *p) {
    zombies[nzombies].index = p->index;
    zombies[nzombies++].slots = p->slots;
}

static int send_on(ucch_pipe *p) {
    uint64_t consumed = __atomic_load_n(&p->at->consumed, __ATOMIC_ACQUIRE);
    if (p->phase == OFFERED) take_chunks(p);
    int idle = p->asked == p->done;
    if (__atomic_load_n(&p->at->closed, __ATOMIC_ACQUIRE) && idle) { /* received, or wanted by nobody */
        give_back(p);
        return 1;
    }
    if (p->phase == OFFERED) return 0;
    int status = 0, most = p->slots == SLOTS || (uint64_t)p->slots == p->pieces ? p->slots : 1;
    while (!status && p->asked < p->pieces && p->asked - consumed < (uint64_t)most)
        status = ask(p);
    if (!status) status = collect(p);
    __atomic_store_n(&p->at->published, p->done, __ATOMIC_RELEASE);
    return status;
}

static int receive_on(ucch_pipe *p) {
    uint64_t published = __atomic_load_n(&p->at->published, __ATOMIC_ACQUIRE);
    int status = 0;
    while (!status && p->asked < published && p->asked - p->done < SLOTS)
        status = ask(p);
    if (!status) status = collect(p);
    if (status) return status;
    __atomic_store_n(&p->at->consumed, p->done, __ATOMIC_RELEASE);
    if (p->done == p->pieces) {
        __atomic_store_n(&p->at->closed, 1, __ATOMIC_RELEASE);
        p->phase = ENDED;
        return 1;
    }
    return __atomic_load_n(&p->at->aborted, __ATOMIC_ACQUIRE) ? UCCH_FAIL_PEER : 0;
}

/* ---- moving on ---- */

/* 1 when this side has finished, 0 when not yet, negative on failure. */
int ucch_pipe_pump_locked(ucch_pipe *p) {
    if (p->phase == ENDED) return 1;
    return p->phase == RECEIVING ? receive_on(p) : send_on(p);
}

/* Whether a device still copies from or to the buffer. */
int ucch_pipe_busy_locked(ucch_pipe *p) { return p->asked != p->done && !collect(p) && p->asked != p->done; }

/* Give up. The other side may still be copying: what a sender has lent to the message comes back when it has ended. Our
 * own copies that are under way come before any other into the same chunks, in the same stream. */
void ucch_pipe_abort_locked(ucch_pipe *p) {
    if (p->phase == ENDED) return;
    if (p->phase == RECEIVING)
        __atomic_store_n(&p->at->closed, 1, __ATOMIC_RELEASE);
    else {
        __atomic_store_n(&p->at->aborted, 1, __ATOMIC_RELEASE);
        leave(p);
    }
    p->phase = ENDED;
}
