/* Pipe: messages through windows (segment.c), by a sender's half and a receiver's half that copy in turn.
 *
 * Nothing is taken from a window before the receiver is ready for the message: what nobody receives must not keep
 * others from being received. Several pieces of a message are under way at a time. */
#include <stdlib.h>
#include <string.h>

#include "p2p/pipe.h"

/* The shortest piece; the longest fill a chunk, which a device copies in 40 us. */
#define SHORTEST ((size_t)128 << 10)

/* Between looks at what streams do, at most. */
#define LOOK_S 100e-6

static uint32_t free_controls[CONTROLS];
static size_t ncontrols;
static uint64_t offered;
/* Controls, with how many chunks each, of messages given up that their receivers may still be copying. */
static struct {
    uint32_t index;
    int slots, first, many;
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
        if (!ucch_extent_over(c, zombies[i].many ? ucch_extent_at(0, zombies[i].first) : NULL)) {
            i++;
            continue;
        }
        for (int k = 0; k < zombies[i].slots; k++)
            ucch_chunk_give_locked(c->chunk[k]);
        if (zombies[i].many) ucch_extent_give_locked(zombies[i].first, zombies[i].many);
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
    if (p) {
        ucch_posted_drop(p);
        ucch_pipe_over_locked(p);
    }
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
    p->where = rts->extent;
    p->sender = rts->key;
    p->extent = rts->extent ? ucch_extent_at(rts->key, (int)rts->extent - 1) : NULL;
    p->at = &controls(rts->key)[rts->control];
    p->bytes = rts->bytes;
    p->piece = rts->piece;
    p->pieces = (rts->bytes + rts->piece - 1) / rts->piece;
    p->asked = p->done = 0;
    p->left = ENDED;
    p->ours = p->fetching = 0;
    p->since = ucch_now();
    p->again = 0;
}

/* Have a message ready for whoever gets its header; its data stays where it is until then, or is queued in streams. */
int ucch_pipe_offer_locked(ucch_pipe *p, const ucch_offer *offer, ucch_rts *rts) {
    if (!has_window_locked()) return UCCH_FAIL_MEMORY;
    if (!ncontrols || offer->queued) reclaim_locked();
    if (!ncontrols) return UCCH_FAIL_MEMORY;
    p->index = free_controls[--ncontrols];
    *rts = (ucch_rts){offer->bytes, piece_of(offer->bytes), ucch_window_of(0)->key, p->index, 0};
    p->many = 0;
    if (offer->queued && ucch_extent_offer_locked(p, rts, offer)) {
        free_controls[ncontrols++] = p->index;
        return UCCH_FAIL_MEMORY;
    }
    begin(p, OFFERED, rts, (void *)(uintptr_t)offer->data, offer->on_device);
    p->slots = 0;
    p->eager = offer->eager;
    *p->at = (control){.tag = offer->tag, .bytes = offer->bytes, .dest = offer->dest};
    return 0;
}

/* The header goes out now: whoever probes for the message finds its length here. */
void ucch_pipe_offered_locked(ucch_pipe *p) { __atomic_store_n(&p->at->number, ++offered, __ATOMIC_RELEASE); }

/* Whether all of the data is queued in streams. */
int ucch_pipe_queued(const ucch_pipe *p) { return p->extent != NULL; }

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
    begin(p, rts->extent && on_device ? AWAITED : RECEIVING, rts, buffer, on_device);
    p->ours = p->phase == AWAITED;
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
    if (p->many) ucch_extent_give_locked(p->first, p->many);
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
    zombies[nzombies].slots = p->slots;
    zombies[nzombies].first = p->first;
    zombies[nzombies++].many = p->many;
}

static int send_on(ucch_pipe *p) {
    if (p->extent) {
        int is_over = ucch_extent_over(p->at, p->extent);
        if (!is_over && !(p->eager && ucch_extent_full(p->extent))) return 0;
        if (is_over)
            give_back(p);
        else
            leave(p);
        p->phase = ENDED;
        return 1;
    }
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

/* The data is there without the stream's help: it may go on. */
static void release_posted(ucch_pipe *p) {
    if (p->posted) ucch_posted_settle(p->posted, UCCH_NOWHERE);
    ucch_posted_drop(p);
}

static int receive_on(ucch_pipe *p) {
    uint64_t published = __atomic_load_n(&p->at->published, __ATOMIC_ACQUIRE);
    int status = 0;
    if (p->extent) {
        status = ucch_extent_receive(p);
        if (status == 1) p->done = p->asked = published = p->pieces;
        status = status < 0 ? status : 0;
    }
    while (!status && p->asked < published && p->asked - p->done < SLOTS)
        status = ask(p);
    if (!status) status = collect(p);
    if (status) return status;
    __atomic_store_n(&p->at->consumed, p->done, __ATOMIC_RELEASE);
    if (p->done == p->pieces) {
        __atomic_store_n(&p->at->closed, 1, __ATOMIC_RELEASE);
        release_posted(p);
        p->phase = ENDED;
        return 1;
    }
    return __atomic_load_n(&p->at->aborted, __ATOMIC_ACQUIRE) ? UCCH_FAIL_PEER : 0;
}

/* ---- taken by a stream, before it comes or once it has (stream_copy.c) ---- */

/* Receive a message that was queued: from now on it waits for a stream that takes it. */
void ucch_pipe_await_locked(ucch_pipe *p, void *buffer, int on_device, const ucch_rts *rts) {
    begin(p, AWAITED, rts, buffer, on_device);
    __atomic_store_n(&p->at->ready, 1, __ATOMIC_RELEASE);
}

/* Let a stream take a message, one that has come or one that has not: 0, or a failure, which leaves it as it was. */
int ucch_pipe_expect_locked(ucch_pipe *p, const ucch_expected *e, void *stream) {
    int early = p->phase != AWAITED;
    ucch_posted_drop(p);
    if (early && !ucch_may_hold()) return UCCH_FAIL_MEMORY;
    int status = ucch_pipe_take_ready_locked(p, e, stream, early);
    if (status) return status;
    if (p->phase == AWAITED) {
        p->phase = TAKING;
        ucch_posted_settle(p->posted, p->where);
        return 0;
    }
    p->phase = EXPECTED;
    p->buffer = e->buffer;
    p->extent = NULL;
    p->on_device = 1;
    p->asked = p->done = 0;
    p->left = ENDED;
    return 0;
}

/* The header of a message that a stream waits for has come: 0, or a failure. */
int ucch_pipe_matched_locked(ucch_pipe *p, size_t room, const ucch_rts *rts) {
    if (!rts->key || !ucch_window_of(rts->key)->offers) return UCCH_FAIL_PEER;
    if (rts->bytes > room) {
        ucch_rts_decline_locked(rts);
        return UCCH_FAIL_TRUNCATED;
    }
    begin(p, rts->extent ? TAKING : RECEIVING, rts, p->buffer, 1);
    __atomic_store_n(&p->at->ready, 1, __ATOMIC_RELEASE);
    if (rts->extent && ucch_posted_settle(p->posted, rts->extent) != rts->extent)
        return UCCH_FAIL_MISMATCH; /* another message of the tag was taken for it */
    return 0;
}

/* Receive as plain data, which the host has put at `landing`. */
int ucch_pipe_landed_locked(ucch_pipe *p, const void *landing, size_t bytes) {
    p->phase = LANDED;
    p->asked = 1;
    int status = ucch_work_copy(UCCH_TO_DEVICE, p->buffer, landing, bytes);
    return status ? status : ucch_work_mark(UCCH_TO_DEVICE, &p->event[0]);
}

/* No stream of the caller's takes it: one of ours does, behind which others wait, once its data comes. */
static int take_ourselves(ucch_pipe *p) {
    ucch_expected e = {p->sender, 0, 0, p->buffer, p->bytes};
    if (!ucch_extent_begun(p->extent) || ucch_pipe_expect_locked(p, &e, UCCH_OURS)) return 0;
    return ucch_pipe_take(p, &e, UCCH_OURS);
}

/* While a stream does the receiver's part: as below. */
static int take_on(ucch_pipe *p) {
    if (p->phase == AWAITED && p->ours) return take_ourselves(p);
    if (p->phase != TAKING || !ucch_posted_gone(p->posted)) return 0;
    ucch_posted_drop(p);
    p->phase = ENDED;
    return ucch_extent_tainted(p->extent) ? UCCH_FAIL_PEER : 1;
}

static int land_on(ucch_pipe *p) {
    int status = collect(p);
    if (status || p->done < p->asked) return status;
    release_posted(p);
    p->phase = ENDED;
    return 1;
}

/* No stream of the caller's takes it after all. */
void ucch_pipe_by_host_locked(ucch_pipe *p) { p->ours = p->phase == AWAITED; }

/* ---- moving on ---- */

/* Whether to look how far streams are: the longer they take the seldomer, as there may be many, and each look fetches
 * lines that a device has written. */
static int is_due(ucch_pipe *p) {
    double now = ucch_now(), more = (now - p->since) / 8;
    if (now < p->again) return 0;
    p->again = now + (more < LOOK_S ? more : LOOK_S);
    return 1;
}

/* 1 when this side has finished, 0 when not yet, negative on failure. */
int ucch_pipe_pump_locked(ucch_pipe *p) {
    switch (p->phase) {
    case ENDED:
        return 1;
    case EXPECTED: /* its header is waited for, or its time is over */
        return 0;
    case AWAITED:
    case TAKING:
        return is_due(p) ? take_on(p) : 0;
    case LANDED:
        return land_on(p);
    case RECEIVING:
        return receive_on(p);
    default:
        return p->extent && !is_due(p) ? 0 : send_on(p);
    }
}

/* Whether a device still copies from or to the buffer. */
int ucch_pipe_busy_locked(ucch_pipe *p) {
    if (p->left != ENDED) return !(p->left == TAKING ? ucch_posted_gone(p->posted) : ucch_extent_full(p->extent));
    if (p->fetching) return ucch_extent_fetching(p);
    return p->asked != p->done && !collect(p) && p->asked != p->done;
}

/* Give up. The other side may still be copying: what a sender has lent to the message comes back when it has ended. Our
 * own copies that are under way come before any other into the same chunks, in the same stream. */
void ucch_pipe_abort_locked(ucch_pipe *p) {
    if (p->phase == ENDED) return;
    int takes = p->phase == TAKING || p->phase == EXPECTED, receives = p->phase == RECEIVING || p->phase == AWAITED;
    p->left = takes ? TAKING : p->extent && p->phase == OFFERED ? OFFERED : ENDED;
    if (takes) /* our stream says itself when it is done with the sender's chunks */
        ucch_posted_stop(p->posted);
    else if (receives || p->phase == LANDED)
        release_posted(p);
    if (receives)
        __atomic_store_n(&p->at->closed, 1, __ATOMIC_RELEASE);
    else if (!takes && p->phase != LANDED) {
        __atomic_store_n(&p->at->aborted, 1, __ATOMIC_RELEASE);
        if (p->extent) ucch_extent_stop(p->extent);
        leave(p);
    }
    p->phase = ENDED;
}
