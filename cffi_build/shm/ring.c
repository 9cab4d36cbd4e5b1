/* Rings of shared pinned memory between the ranks of one host, and the words by which streams pass them to each other.
 *
 * A channel is a ring in memory of the sender's (segment.c). The sender's stream copies a piece into it and writes how
 * many there are, the receiver's stream waits for that, copies the piece out and writes how many it has taken: two
 * devices of any vendors, and no host in between. Words only grow. */
#include "shm/ring.h"

#include <stdlib.h>
#include <string.h>

#define LINE ((size_t)64)
#define HEADER_GRAIN ((size_t)65536)
#define PAGE ((size_t)4096)
/* Within an island the vendor's library does all that is long; a place takes what one kernel moves. */
#define NEAR_RING ((size_t)2 << 20)
#define LEAST_RING ((size_t)512 << 10)
#define MOST_RING ((size_t)64 << 20)

/* At the end of a header's lines, and stay zero. */
#define ZERO_LINES (UCCH_MOST_MOVES * sizeof(uint32_t) / LINE + 1)

static size_t header_of(int size) {
    size_t lines = 2 * (size_t)size + MOST_CALLS + 1 + ZERO_LINES;
    return (lines * LINE + HEADER_GRAIN - 1) / HEADER_GRAIN * HEADER_GRAIN;
}

/* How many other ranks are in a rank's island. */
static size_t mates_of(int rank, int size, const int *islands) {
    size_t mates = 0;
    for (int i = 0; i < size; i++)
        mates += i != rank && islands[i] == islands[rank];
    return mates;
}

static size_t near_ring(size_t far) {
    return far < NEAR_RING ? far : NEAR_RING;
}

/* Bytes of each ring between islands that rank `rank` can have with `room` for all it needs; 0: none. */
size_t ucch_channels_offer(int rank, int size, const int *islands, size_t room) {
    size_t mates = mates_of(rank, size, islands), others = (size_t)size - 1 - mates, header = header_of(size);
    if (!others || room < header)
        return 0;
    size_t equal = (room - header) / (mates + others), far = equal; /* all alike where there is little */
    if (equal > NEAR_RING)
        far = (room - header - mates * NEAR_RING) / others;
    far = far < MOST_RING ? far / (RING * PAGE) * (RING * PAGE) : MOST_RING;
    return far < LEAST_RING ? 0 : far;
}

/* Bytes of what rank `rank` has for its words and rings. */
static size_t part_of(int rank, int size, const int *islands, size_t far) {
    size_t mates = mates_of(rank, size, islands), others = (size_t)size - 1 - mates;
    return header_of(size) + mates * near_ring(far) + others * far;
}

static void forget(ucch_channels *c) {
    for (int i = 0; c->parts && i < c->size; i++)
        if (c->parts[i])
            ucch_mapping_give(c->parts[i]);
    free(c->parts);
    free(c->islands);
    free(c->out);
    free(c->in);
    free(c);
}

/* Channels of rank `rank` of `size`, with rings of `far` bytes between islands; NULL where there is no memory. */
ucch_channels *ucch_channels_new(int rank, int size, const int *islands, size_t far) {
    ucch_channels *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    c->out = calloc((size_t)size, sizeof(*c->out));
    c->in = calloc((size_t)size, sizeof(*c->in));
    c->islands = calloc((size_t)size, sizeof(int));
    c->parts = calloc((size_t)size, sizeof(*c->parts));
    c->rank = rank;
    c->size = size;
    c->far = far;
    int well = c->out && c->in && c->islands && c->parts;
    if (well)
        c->parts[rank] = ucch_mapping_new(part_of(rank, size, islands, far));
    if (!well || !c->parts[rank]) {
        forget(c);
        return NULL;
    }
    memcpy(c->islands, islands, (size_t)size * sizeof(int));
    memset(c->parts[rank]->memory, 0, header_of(size));
    return c;
}

/* The file with a rank's part; its peers have to know. */
int ucch_channels_file(const ucch_channels *c) {
    return c->parts[c->rank]->file;
}

static ucch_word word_at(char *region, char *seen, int line) {
    size_t at = (size_t)line * LINE;
    return (ucch_word){(uint32_t *)(region + at), seen + at};
}

static size_t ring_of(const ucch_channels *c, int one, int other) {
    return c->islands[one] == c->islands[other] ? near_ring(c->far) : c->far;
}

/* The channel to `other` out of a region of rank `owner`'s. */
static ucch_channel channel_at(const ucch_channels *c, char *region, char *seen, int owner, int other) {
    size_t at = header_of(c->size);
    for (int i = 0; i < other; i++)
        at += i == owner ? 0 : ring_of(c, owner, i);
    return (ucch_channel){.published = word_at(region, seen, 2 * other),
                          .consumed = word_at(region, seen, 2 * other + 1),
                          .ring = region + at,
                          .seen = seen + at,
                          .slot = ring_of(c, owner, other) / RING};
}

/* Get to know the part of rank `peer`, a file of process `key`; our own too. 0, or a failure. */
int ucch_channels_meet(ucch_channels *c, int peer, uint64_t key, int pid, int file) {
    if (ucch_bound() < 0)
        return UCCH_FAIL_DEVICE;
    if (peer != c->rank)
        c->parts[peer] = ucch_mapping_open(key, pid, file, part_of(peer, c->size, c->islands, c->far));
    int status = c->parts[peer] ? ucch_mapping_pin(c->parts[peer]) : UCCH_FAIL_PEER;
    if (status)
        return status;
    char *region = c->parts[peer]->memory, *there = c->parts[peer]->seen;
    uint64_t *spoilt = (uint64_t *)(region + (2 * (size_t)c->size + MOST_CALLS) * LINE);
    if (peer != c->rank) {
        c->in[peer] = channel_at(c, region, there, peer, c->rank);
        c->in[peer].spoilt = spoilt;
        return 0;
    }
    c->spoilt = spoilt;
    for (int other = 0; other < c->size; other++)
        if (other != peer)
            c->out[other] = channel_at(c, region, there, peer, other);
    for (int i = 0; i < MOST_CALLS; i++)
        c->done[i] = word_at(region, there, 2 * c->size + i);
    return 0;
}

static int count_from_zero(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    const char *zeros = c->parts[c->rank]->memory + (2 * (size_t)c->size + MOST_CALLS + 1) * LINE;
    size_t bytes = UCCH_MOST_MOVES * sizeof(uint32_t);
    c->arrived = ucch_pool_take(0, bytes, NULL, 1);
    if (!c->arrived)
        return UCCH_FAIL_MEMORY;
    int status = ucch_device_fail(ops->copy(c->arrived, zeros, bytes, c->lane[0]), "copy");
    return status ? status : ucch_device_fail(ops->stream_sync(c->lane[0]), "stream");
}

static int open_locked(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    int status = 0;
    for (int i = 0; i < QUEUE_LANES && !status; i++) {
        status = ucch_device_fail(ops->stream_new(&c->lane[i]), "stream");
        if (!status)
            status = ucch_device_fail(ops->event_new(&c->tail[i]), "event");
    }
    if (!status)
        status = ucch_device_fail(ops->event_new(&c->began), "event");
    c->await = ucch_kernel_of_locked(&(ucch_task){.kind = UCCH_AWAIT});
    c->post = ucch_kernel_of_locked(&(ucch_task){.kind = UCCH_POST});
    if (!status)
        status = count_from_zero(c);
    /* A try: what a stream cannot do is seen here. */
    if (!status)
        status = ucch_channel_wait(c, (ucch_word){NULL, c->done[0].seen}, 0, c->lane[0]);
    return status ? status : ucch_channel_tell(c, c->done[0], 0, c->lane[0]);
}

/* Make what calls need; once the windows are pinned and everybody is known. 0, or a failure. */
int ucch_channels_open(ucch_channels *c) {
    ucch_lock();
    int before = ucch_device_enter(), status = open_locked(c);
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* Give everything back; nothing may be under way, here or with a peer. */
void ucch_channels_free(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    int before = ucch_device_enter();
    for (int i = 0; i < QUEUE_LANES; i++) {
        if (c->lane[i])
            ops->stream_free(c->lane[i]);
        if (c->tail[i])
            ops->event_free(c->tail[i]);
    }
    if (c->began)
        ops->event_free(c->began);
    ucch_device_leave(before);
    ucch_pool_give(c->arrived);
    ucch_pool_give(c->scratch[0]);
    ucch_pool_give(c->scratch[1]);
    for (int i = 0; i < c->noutgrown; i++)
        ucch_pool_give(c->outgrown[i]);
    forget(c);
}

/* Whether all that was queued has ended, and all that was sent has been taken; -1 when that will never be known,
 * because a call has failed. */
int ucch_channels_quiet(ucch_channels *c) {
    ucch_lock();
    ucch_channels_room(c);
    int quiet = c->poisoned ? -1 : c->landed == c->calls;
    for (int i = 0; i < c->size && quiet > 0; i++)
        quiet = i == c->rank || __atomic_load_n(c->out[i].consumed.at, __ATOMIC_ACQUIRE) == (uint32_t)c->out[i].pieces;
    ucch_unlock();
    return quiet;
}

/* ---- words ---- */

static int run(void *kernel, void *seen, uint32_t value, void *stream) {
    const void *none = NULL;
    uint64_t number = value;
    double unused = 0;
    void *arguments[] = {&none, &seen, &number, &unused};
    return ucch_bound_ops()->launch(kernel, 1, 1, arguments, stream);
}

/* Let the stream wait until the word has reached `least`; what is there already is not waited for. `await`: the kernel
 * that does so, where streams cannot wait for any memory. */
int ucch_word_wait(void *await, ucch_word word, uint32_t least, void *stream) {
    if (word.at && ucch_word_has(word, least))
        return 0;
    return ucch_device_fail(await ? run(await, word.seen, least, stream)
                                  : ucch_bound_ops()->stream_hold(stream, word.seen, least),
                            "a stream's wait for memory");
}

/* Let the stream write the word, behind all it did before; `post` likewise. */
int ucch_word_tell(void *post, ucch_word word, uint32_t value, void *stream) {
    return ucch_device_fail(post ? run(post, word.seen, value, stream)
                                 : ucch_bound_ops()->stream_write(stream, word.seen, value),
                            "a stream's write to memory");
}

int ucch_channel_wait(const ucch_channels *c, ucch_word word, uint32_t least, void *stream) {
    return ucch_word_wait(c->await, word, least, stream);
}

int ucch_channel_tell(const ucch_channels *c, ucch_word word, uint32_t value, void *stream) {
    return ucch_word_tell(c->post, word, value, stream);
}

/* ---- calls ---- */

static uint32_t generation(uint64_t call) {
    return (uint32_t)(call / MOST_CALLS + 1);
}

int ucch_channels_done(const ucch_channels *c, ucch_ticket ticket) {
    return ucch_word_has(c->done[ticket.slot], ticket.value);
}

/* Whether one more call may be under way. */
int ucch_channels_room(ucch_channels *c) {
    while (c->landed < c->calls && ucch_word_has(c->done[c->landed % MOST_CALLS], generation(c->landed)))
        c->landed++;
    return c->calls - c->landed < MOST_CALLS;
}

/* Number that the next call writes at its end. */
ucch_ticket ucch_channels_ticket(ucch_channels *c) {
    ucch_ticket ticket = {(uint32_t)(c->calls % MOST_CALLS), generation(c->calls)};
    c->calls++;
    return ticket;
}

/* Have this much scratch in a bank. What was too small may still be in use, and is kept: it at least doubles. */
int ucch_channels_scratch(ucch_channels *c, int bank, size_t bytes) {
    if (bytes <= c->scratch_bytes[bank])
        return 0;
    if (bytes < 2 * c->scratch_bytes[bank])
        bytes = 2 * c->scratch_bytes[bank];
    void *memory = ucch_pool_take(0, bytes, NULL, 1);
    if (!memory || c->noutgrown == MOST_OUTGROWN)
        return UCCH_FAIL_MEMORY;
    c->outgrown[c->noutgrown++] = c->scratch[bank];
    c->scratch[bank] = memory;
    c->scratch_bytes[bank] = bytes;
    return 0;
}

/* Whether streams here still wait for what others have not done. */
int ucch_channels_waiting(const ucch_channels *c) {
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && (!ucch_word_has(c->in[i].published, (uint32_t)c->in[i].pieces) ||
                             !ucch_word_has(c->out[i].consumed, (uint32_t)c->out[i].pieces - RING)))
            return 1;
    return 0;
}

/* ---- failures ---- */

static int spoils(const uint64_t *spoilt, uint64_t call) {
    uint64_t first = __atomic_load_n(spoilt, __ATOMIC_ACQUIRE);
    return first && call + 1 >= first;
}

/* A rank that let its streams go on without what they waited for, before they had done this call's part: what they sent
 * then is garbage, also by way of others. -1 for none. Calls are counted alike on all ranks. */
int ucch_channels_spoiler(const ucch_channels *c, ucch_ticket ticket) {
    uint64_t call = ((uint64_t)ticket.value - 1) * MOST_CALLS + ticket.slot;
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && spoils(c->in[i].spoilt, call))
            return i;
    return spoils(c->spoilt, call) ? c->rank : -1;
}

static void let_go(const ucch_channels *c) {
    for (int i = 0; i < c->size; i++) {
        if (i == c->rank)
            continue;
        __atomic_store_n(c->out[i].consumed.at, (uint32_t)c->out[i].pieces, __ATOMIC_RELEASE);
        __atomic_store_n(c->in[i].published.at, (uint32_t)c->in[i].pieces, __ATOMIC_RELEASE);
    }
}

/* Write again what lets streams go on: whether all of them have. */
static int drain_locked(ucch_op *op) {
    ucch_channels *c = (ucch_channels *)op;
    let_go(c);
    ucch_channels_room(c);
    if (c->landed != c->calls)
        return 0;
    ucch_op_end_locked(op, 0, -1, -1);
    return 1;
}

static const ucch_op_kind draining = {.way = UCCH_IN_STREAMS, .advance_locked = drain_locked};

/* A call failed: its streams, and whoever waits for them, must go on; all are told first what is not to be believed
 * then. Nobody else waits for the words that are written here, but a peer's stream may write smaller numbers after us:
 * it is done again until all is over. */
void ucch_channels_poison_locked(ucch_channels *c) {
    if (c->poisoned)
        return;
    c->poisoned = 1;
    ucch_channels_room(c);
    __atomic_store_n(c->spoilt, c->landed + 1, __ATOMIC_SEQ_CST);
    let_go(c);
    c->drain.kind = &draining;
    ucch_op_begin_locked(&c->drain, 0);
}
