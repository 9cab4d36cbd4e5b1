/* Messages through windows that streams do alone: what is sent is in the sender's chunks once its stream has got there,
 * and the receiver's stream waits for that. The token goes before; no host takes part from then on, so that neither
 * side's stream ever waits for a thread that may be waiting for a device. */
#include <string.h>

#include "transfer.h"

/* Before the data, in the sender's chunks: a line with how many pieces the sender's stream has put there, one that the
 * receiver's writes when it has taken all, and one that the sender's writes at its end: who lets streams go writes the
 * first. */
#define CLOSED 64
#define DONE 128
#define DATA ((size_t)4096)
/* More than any count of pieces: lets streams go. */
#define LET_GO 0x3fffffff

char *ucch_run_at(uint64_t key, int first) {
    size_t bytes;
    return (char *)ucch_window_memory(key, &bytes) + (size_t)first * UCCH_CHUNK;
}

static int reached(char *run, size_t line, uint64_t least) {
    return ucch_word_has((ucch_word){(uint32_t *)(run + line), NULL}, (uint32_t)least);
}

/* Whether the receiver's stream has taken all. */
int ucch_run_taken(char *run) {
    return reached(run, CLOSED, 1);
}

/* Whether the sender's stream has put all there. */
int ucch_run_there(char *run) {
    return reached(run, DONE, 1);
}

/* Whoever waits for the data goes on without it. */
void ucch_run_let_go(char *run) {
    __atomic_store_n((uint32_t *)run, LET_GO, __ATOMIC_RELEASE);
}

/* Whether nobody uses a message's chunks any more: the receiver is done with it, and so are our own copies. */
int ucch_run_over(const control *c, char *run) {
    int closed = __atomic_load_n(&c->closed, __ATOMIC_ACQUIRE) != 0;
    return run ? (closed || ucch_run_taken(run)) && ucch_run_there(run) : closed;
}

/* Where the data of a piece lies. */
char *ucch_run_piece(const ucch_transfer *t, uint64_t piece) {
    return t->run + DATA + piece * t->piece;
}

/* ---- streams ---- */

/* A stream of ours for what is copied beside one of the caller's. Copies wait there for that one's work, or for what a
 * peer sends to it: with one for all, they could wait for what is behind them. */
typedef struct beside {
    void *of, *stream, *event;
    int known;
} beside;

/* Streams of the caller's that have one of ours beside them, each way. */
#define MOST 4

static beside outward[MOST], inward[MOST];

static void reserve(beside *b) {
    const device_ops *ops = ucch_bound_ops();
    if (!b->event && ops->event_new(&b->event))
        b->event = NULL;
    if (!b->stream && ops->stream_new(&b->stream))
        b->stream = NULL;
}

/* Have the streams ready: while one is held, making another could wait for it. */
void ucch_beside_reserve(void) {
    for (int i = 0; i < MOST; i++) {
        reserve(&outward[i]);
        reserve(&inward[i]);
    }
}

/* The stream beside `stream`, or NULL where there are too many. */
static beside *beside_of(beside *all, void *stream) {
    beside *b = all;
    while (b < all + MOST && b->known && b->of != stream)
        b++;
    if (b == all + MOST || !b->stream || !b->event)
        return NULL;
    b->of = stream;
    b->known = 1;
    return b;
}

static void *kernel(int kind) {
    return ucch_kernel_of_locked(&(ucch_task){.kind = kind});
}

/* A word of the run, by the device's address too. */
static int word_of(const ucch_transfer *t, size_t line, ucch_word *word) {
    char *seen;
    int status = ucch_device_fail(ucch_bound_ops()->mapped(t->base, (void **)&seen), "address of shared memory");
    if (!status)
        *word = (ucch_word){(uint32_t *)(t->run + line), seen + (t->run - t->base) + line};
    return status;
}

/* Let one stream wait for what is in another by now. */
static int follow(beside *b, void *first, void *then) {
    const device_ops *ops = ucch_bound_ops();
    int status = ucch_device_fail(ops->event_record(b->event, first), "record");
    return status ? status : ucch_device_fail(ops->stream_wait(then, b->event), "wait");
}

static int copy(const ucch_transfer *t, uint64_t k, int out, void *stream) {
    char *mine = t->buffer + k * t->piece, *theirs = ucch_run_piece(t, k);
    return ucch_device_fail(
        ucch_bound_ops()->copy(out ? theirs : mine, out ? mine : theirs, ucch_piece_length(t, k), stream), "copy");
}

/* ---- sending ---- */

/* Have room for the whole of a message: 0, or UCCH_FAIL_MEMORY. */
int ucch_run_offer_locked(ucch_transfer *t, ucch_token *token, void *stream) {
    int many = (int)((DATA + token->bytes + UCCH_CHUNK - 1) / UCCH_CHUNK);
    t->first = beside_of(outward, stream) ? ucch_run_take_locked(many) : -1;
    if (t->first < 0)
        return UCCH_FAIL_MEMORY;
    t->many = many;
    token->run = (uint32_t)t->first + 1;
    memset(ucch_run_at(0, t->first), 0, DATA);
    return 0;
}

/* Let the stream beside `stream` put all pieces where the receiver looks for them: 0, or a failure. */
int ucch_run_put_locked(ucch_transfer *t, void *stream) {
    beside *b = beside_of(outward, stream);
    ucch_word published, done;
    int status = word_of(t, 0, &published);
    if (!status)
        status = word_of(t, DONE, &done);
    if (!status)
        status = follow(b, stream, b->stream);
    for (uint64_t k = 0; k < t->pieces && !status; k++) {
        status = copy(t, k, 1, b->stream);
        if (!status)
            status = ucch_word_tell(kernel(UCCH_POST), published, (uint32_t)k + 1, b->stream);
    }
    return status ? status : ucch_word_tell(kernel(UCCH_POST), done, 1, b->stream);
}

/* ---- receiving ---- */

/* Let a stream beside `stream` take all pieces, and `stream` wait for that: 0, or a failure. */
int ucch_transfer_take_locked(ucch_transfer *t, void *stream) {
    beside *b = beside_of(inward, stream);
    ucch_word published, closed;
    int status = b ? word_of(t, 0, &published) : UCCH_FAIL_MEMORY;
    if (!status)
        status = word_of(t, CLOSED, &closed);
    for (uint64_t k = 0; k < t->pieces && !status; k++) {
        status = ucch_word_wait(kernel(UCCH_AWAIT), published, (uint32_t)k + 1, b->stream);
        if (!status)
            status = copy(t, k, 0, b->stream);
        if (!status)
            t->phase = TAKING;
    }
    if (!status)
        status = ucch_word_tell(kernel(UCCH_POST), closed, 1, b->stream);
    return status ? status : follow(b, b->stream, stream);
}
