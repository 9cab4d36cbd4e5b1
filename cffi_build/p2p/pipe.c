/* Messages through windows (segment.c): what a sender has offered, and who copies when.
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
} orphans[CONTROLS];
static int norphans;

static control *controls(uint64_t key) {
    return (control *)ucch_window_of(key)->offers;
}

/* Whether there is a window; in a new one nothing is offered. */
static int has_window_locked(void) {
    static uint64_t known;
    if (known == ucch_window_of(0)->key)
        return known != 0;
    known = ucch_window_of(0)->key;
    norphans = 0;
    for (ncontrols = 0; ncontrols < CONTROLS; ncontrols++)
        free_controls[ncontrols] = (uint32_t)(CONTROLS - 1 - ncontrols);
    return 1;
}

/* Chunks of messages given up come back once their receivers have seen it. */
static void reclaim_locked(void) {
    for (int i = 0; i < norphans;) {
        control *c = &controls(0)[orphans[i].index];
        if (!ucch_run_over(c, orphans[i].many ? ucch_run_at(0, orphans[i].first) : NULL)) {
            i++;
            continue;
        }
        for (int k = 0; k < orphans[i].slots; k++)
            ucch_chunk_give_locked(c->chunk[k]);
        if (orphans[i].many)
            ucch_run_give_locked(orphans[i].first, orphans[i].many);
        c->number = 0;
        free_controls[ncontrols++] = orphans[i].index;
        orphans[i] = orphans[--norphans];
    }
}

/* ---- one message ---- */

ucch_transfer *ucch_transfer_new(void) {
    return calloc(1, sizeof(ucch_transfer));
}

void ucch_transfer_free(ucch_transfer *t) {
    for (int i = 0; t && i < SLOTS; i++)
        if (t->event[i] && ucch_bound() >= 0)
            ucch_bound_ops()->event_free(t->event[i]);
    if (t) {
        ucch_slip_drop(t);
        ucch_transfer_over_locked(t);
    }
    free(t);
}

/* Pieces so long that several are under way. */
static size_t piece_of(size_t bytes) {
    size_t piece = (bytes / SLOTS + 4095) / 4096 * 4096;
    return piece < SHORTEST ? SHORTEST : piece > UCCH_CHUNK ? UCCH_CHUNK : piece;
}

/* Both sides know what the message is. */
static void begin(ucch_transfer *t, int phase, const ucch_token *token, void *buffer, int on_device) {
    t->phase = phase;
    t->on_device = on_device;
    t->buffer = buffer;
    t->base = ucch_window_of(token->key)->chunks;
    t->where = token->run;
    t->sender = token->key;
    t->run = token->run ? ucch_run_at(token->key, (int)token->run - 1) : NULL;
    t->at = &controls(token->key)[token->control];
    t->bytes = token->bytes;
    t->piece = token->piece;
    t->pieces = (token->bytes + token->piece - 1) / token->piece;
    t->asked = t->done = 0;
    t->left = ENDED;
    t->ours = t->fetching = 0;
    t->since = ucch_now();
    t->again = 0;
}

/* Have a message ready for whoever gets the token; its data stays where it is until then, or is queued in streams. */
int ucch_transfer_offer_locked(ucch_transfer *t, const ucch_offer *offer, ucch_token *token) {
    if (!has_window_locked())
        return UCCH_FAIL_MEMORY;
    if (!ncontrols || offer->queued)
        reclaim_locked();
    if (!ncontrols)
        return UCCH_FAIL_MEMORY;
    t->index = free_controls[--ncontrols];
    *token = (ucch_token){offer->bytes, piece_of(offer->bytes), ucch_window_of(0)->key, t->index, 0};
    t->many = 0;
    if (offer->queued && ucch_run_offer_locked(t, token, offer)) {
        free_controls[ncontrols++] = t->index;
        return UCCH_FAIL_MEMORY;
    }
    begin(t, OFFERED, token, (void *)(uintptr_t)offer->data, offer->on_device);
    t->slots = 0;
    t->eager = offer->eager;
    *t->at = (control){.tag = offer->tag, .bytes = offer->bytes, .dest = offer->dest};
    return 0;
}

/* The token goes out now: whoever probes for the message finds its length here. */
void ucch_transfer_offered_locked(ucch_transfer *t) {
    __atomic_store_n(&t->at->number, ++offered, __ATOMIC_RELEASE);
}

/* Whether all of the data is queued in streams. */
int ucch_transfer_queued(const ucch_transfer *t) {
    return t->run != NULL;
}

/* The number of an offer that is for rank `dest` under a tag and still in libucp's queue, and its bytes; 0 for another,
 * be it one that its sender puts in this place while we read. */
static uint64_t offer_waiting(const control *c, uint64_t tag, int dest, uint64_t *bytes) {
    uint64_t number = __atomic_load_n(&c->number, __ATOMIC_ACQUIRE);
    if (!number || c->tag != tag || c->dest != dest || c->taken || c->ready || c->closed)
        return 0;
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
    if (oldest && take)
        oldest->taken = 1;
    return bytes;
}

void ucch_token_decline_locked(const ucch_token *token) {
    control *all = token->key ? controls(token->key) : NULL;
    if (all)
        __atomic_store_n(&all[token->control].closed, 1, __ATOMIC_RELEASE);
}

/* Begin to receive: 0, or a failure, after which the sender's side ends too. */
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token) {
    if (!token->key || !controls(token->key))
        return UCCH_FAIL_PEER;
    if (token->bytes > room) {
        ucch_token_decline_locked(token);
        return UCCH_FAIL_TRUNCATED;
    }
    begin(t, token->run && on_device ? AWAITED : RECEIVING, token, buffer, on_device);
    t->ours = t->phase == AWAITED;
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
    return 0;
}

/* Ask for the copy of one piece, between its place in the buffer and its chunk. */
static int ask(ucch_transfer *t) {
    int slot = (int)(t->asked % SLOTS), way = t->phase == SENDING ? UCCH_TO_HOST : UCCH_TO_DEVICE;
    char *mine = t->buffer + t->asked * t->piece;
    char *chunk = t->base + t->at->chunk[slot] * UCCH_CHUNK;
    char *dst = t->phase == SENDING ? chunk : mine, *src = t->phase == SENDING ? mine : chunk;
    size_t bytes = ucch_piece_length(t, t->asked++);
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
            status = ucch_event_ask(t->event[t->done % SLOTS], &done, &t->again);
        if (status || !done)
            return status;
        t->done++;
    }
    return 0;
}

static void give_back(ucch_transfer *t) {
    if (t->many)
        ucch_run_give_locked(t->first, t->many);
    while (t->slots)
        ucch_chunk_give_locked(t->at->chunk[--t->slots]);
    t->at->number = 0;
    free_controls[ncontrols++] = t->index;
    t->phase = ENDED;
}

/* Take chunks once the receiver is ready: what there is, up to what is of use. */
static void take_chunks(ucch_transfer *t) {
    if (!__atomic_load_n(&t->at->ready, __ATOMIC_ACQUIRE))
        return;
    uint16_t chunk;
    if (!ucch_chunk_take_locked(&chunk)) {
        reclaim_locked();
        if (!ucch_chunk_take_locked(&chunk))
            return;
    }
    do
        t->at->chunk[t->slots++] = chunk;
    while (t->slots < SLOTS && (uint64_t)t->slots < t->pieces && ucch_chunk_take_locked(&chunk));
    /* Piece k lies in slot k % SLOTS on both sides: with fewer chunks the slots share them, one piece at a time. */
    for (int i = t->slots; i < SLOTS; i++)
        t->at->chunk[i] = t->at->chunk[i % t->slots];
    t->phase = SENDING;
}

/* Note chunks lent to a message, to be taken back once its receiver has done with them. */
static void leave(const ucch_transfer *t) {
    orphans[norphans].index = t->index;
    orphans[norphans].slots = t->slots;
    orphans[norphans].first = t->first;
    orphans[norphans++].many = t->many;
}

static int send_on(ucch_transfer *t) {
    if (t->run) {
        int is_over = ucch_run_over(t->at, t->run);
        if (!is_over && !(t->eager && ucch_run_full(t->run)))
            return 0;
        if (is_over)
            give_back(t);
        else
            leave(t);
        t->phase = ENDED;
        return 1;
    }
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

/* The data is there without the stream's help: it may go on. */
static void slip_release(ucch_transfer *t) {
    if (t->slip)
        ucch_slip_settle(t->slip, UCCH_NOWHERE);
    ucch_slip_drop(t);
}

static int receive_on(ucch_transfer *t) {
    uint64_t published = __atomic_load_n(&t->at->published, __ATOMIC_ACQUIRE);
    int status = 0;
    if (t->run) {
        status = ucch_run_receive(t);
        if (status == 1)
            t->done = t->asked = published = t->pieces;
        status = status < 0 ? status : 0;
    }
    while (!status && t->asked < published && t->asked - t->done < SLOTS)
        status = ask(t);
    if (!status)
        status = collect(t);
    if (status)
        return status;
    __atomic_store_n(&t->at->consumed, t->done, __ATOMIC_RELEASE);
    if (t->done == t->pieces) {
        __atomic_store_n(&t->at->closed, 1, __ATOMIC_RELEASE);
        slip_release(t);
        t->phase = ENDED;
        return 1;
    }
    return __atomic_load_n(&t->at->aborted, __ATOMIC_ACQUIRE) ? UCCH_FAIL_PEER : 0;
}

/* ---- taken by a stream, before it comes or once it has (stream_copy.c) ---- */

/* Receive a message that was queued: from now on it waits for a stream that takes it. */
void ucch_transfer_await_locked(ucch_transfer *t, void *buffer, int on_device, const ucch_token *token) {
    begin(t, AWAITED, token, buffer, on_device);
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
}

/* Let a stream take a message, one that has come or one that has not: 0, or a failure, which leaves it as it was. */
int ucch_transfer_expect_locked(ucch_transfer *t, const ucch_expected *e, void *stream) {
    int early = t->phase != AWAITED;
    ucch_slip_drop(t);
    if (early && !ucch_may_hold())
        return UCCH_FAIL_MEMORY;
    int status = ucch_take_ready_locked(t, e, stream, early);
    if (status)
        return status;
    if (t->phase == AWAITED) {
        t->phase = TAKING;
        ucch_slip_settle(t->slip, t->where);
        return 0;
    }
    t->phase = EXPECTED;
    t->buffer = e->buffer;
    t->run = NULL;
    t->on_device = 1;
    t->asked = t->done = 0;
    t->left = ENDED;
    return 0;
}

/* The token of a message that a stream waits for has come: 0, or a failure. */
int ucch_transfer_met_locked(ucch_transfer *t, size_t room, const ucch_token *token) {
    if (!token->key || !ucch_window_of(token->key)->offers)
        return UCCH_FAIL_PEER;
    if (token->bytes > room) {
        ucch_token_decline_locked(token);
        return UCCH_FAIL_TRUNCATED;
    }
    begin(t, token->run ? TAKING : RECEIVING, token, t->buffer, 1);
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
    if (token->run && ucch_slip_settle(t->slip, token->run) != token->run)
        return UCCH_FAIL_MISMATCH; /* another message of the tag was taken for it */
    return 0;
}

/* Receive as plain data, which the host has put at `landing`. */
int ucch_transfer_landed_locked(ucch_transfer *t, const void *landing, size_t bytes) {
    t->phase = LANDED;
    t->asked = 1;
    int status = ucch_work_copy(UCCH_TO_DEVICE, t->buffer, landing, bytes);
    return status ? status : ucch_work_mark(UCCH_TO_DEVICE, &t->event[0]);
}

/* No stream of the caller's takes it: one of ours does, behind which others wait, once its data comes. */
static int take_ourselves(ucch_transfer *t) {
    ucch_expected e = {t->sender, 0, 0, t->buffer, t->bytes};
    if (!ucch_run_begun(t->run) || ucch_transfer_expect_locked(t, &e, UCCH_OURS))
        return 0;
    return ucch_take(t, &e, UCCH_OURS);
}

/* While a stream does the receiver's part: as below. */
static int take_on(ucch_transfer *t) {
    if (t->phase == AWAITED && t->ours)
        return take_ourselves(t);
    if (t->phase != TAKING || !ucch_slip_gone(t->slip))
        return 0;
    ucch_slip_drop(t);
    t->phase = ENDED;
    return ucch_run_spoilt(t->run) ? UCCH_FAIL_PEER : 1;
}

static int land_on(ucch_transfer *t) {
    int status = collect(t);
    if (status || t->done < t->asked)
        return status;
    slip_release(t);
    t->phase = ENDED;
    return 1;
}

/* No stream of the caller's takes it after all. */
void ucch_transfer_by_host_locked(ucch_transfer *t) {
    t->ours = t->phase == AWAITED;
}

/* ---- moving on ---- */

/* Whether to look how far streams are: the longer they take the seldomer, as there may be many, and each look fetches
 * lines that a device has written. */
static int is_due(ucch_transfer *t) {
    double now = ucch_now(), more = (now - t->since) / 8;
    if (now < t->again)
        return 0;
    t->again = now + (more < LOOK_S ? more : LOOK_S);
    return 1;
}

/* 1 when this side has finished, 0 when not yet, negative on failure. */
int ucch_transfer_pump_locked(ucch_transfer *t) {
    switch (t->phase) {
    case ENDED:
        return 1;
    case EXPECTED: /* its token is waited for, or it has run into its time */
        return 0;
    case AWAITED:
    case TAKING:
        return is_due(t) ? take_on(t) : 0;
    case LANDED:
        return land_on(t);
    case RECEIVING:
        return receive_on(t);
    default:
        return t->run && !is_due(t) ? 0 : send_on(t);
    }
}

/* Whether a device still copies from or to the buffer. */
int ucch_transfer_busy_locked(ucch_transfer *t) {
    if (t->left != ENDED)
        return !(t->left == TAKING ? ucch_slip_gone(t->slip) : ucch_run_full(t->run));
    if (t->fetching)
        return ucch_run_fetching(t);
    return t->asked != t->done && !collect(t) && t->asked != t->done;
}

/* Give up. The other side may still be copying: what a sender has lent to the message comes back when it has ended. Our
 * own copies that are under way come before any other into the same chunks, in the same stream. */
void ucch_transfer_abort_locked(ucch_transfer *t) {
    if (t->phase == ENDED)
        return;
    int takes = t->phase == TAKING || t->phase == EXPECTED, receives = t->phase == RECEIVING || t->phase == AWAITED;
    t->left = takes ? TAKING : t->run && t->phase == OFFERED ? OFFERED : ENDED;
    if (takes) /* our stream says itself when it is done with the sender's chunks */
        ucch_slip_stop(t->slip);
    else if (receives || t->phase == LANDED)
        slip_release(t);
    if (receives)
        __atomic_store_n(&t->at->closed, 1, __ATOMIC_RELEASE);
    else if (!takes && t->phase != LANDED) {
        __atomic_store_n(&t->at->aborted, 1, __ATOMIC_RELEASE);
        if (t->run)
            ucch_run_stop(t->run);
        leave(t);
    }
    t->phase = ENDED;
}
