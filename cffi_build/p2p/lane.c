/* Lanes: messages on device memory that streams of two ranks pass to each other without a host.
 *
 * A lane is one direction between two ranks of a communicator with channels (shm/channels.c). It has two rings: every
 * message takes a slot of the first, for a header and the data of a short message; pieces of long messages take slots
 * of the second. A kernel of the sender, in the lane's stream, waits for a free slot, copies and signals; a kernel of
 * the receiver waits, copies and signals. So a sender runs ahead by as much as the rings hold, both ranks may send
 * first, and messages match in the order in which they were posted on both sides. The receiver's kernel compares the
 * header with the receive's arguments, and skips a message that does not match.
 *
 * A send may be ordered in the caller's stream: later work of the stream, such as refilling the buffer, does not change
 * the data sent. If the rings have room the stream moves the data itself, or waits for the move. If not, a stream that
 * waited for the receiver could deadlock, so the stream makes a copy, which is sent. A short send is always moved by
 * the caller's stream if the rings have room: two events fewer for driver and device.
 *
 * Where streams of a device share queues (no ucch_may_hold), or may share them while the lane's stream waits already
 * (may_wait), progress gives a kernel to its stream only when the kernel has nothing to wait for, part of a long
 * message at a time: then there is no deadlock. Long messages, or parts, that need not wait are moved by copy engines,
 * there and wherever a whole message is ready when it is posted (its slots are free, or filled already). Copies that
 * waited in a stream for slots would have to be released when a message is given up, and would then write to slots that
 * a receiver still reads; a kernel checks, and stops.
 *
 * Messages matched by libucp (offer.c) have lanes of their own with one ring for pieces. They are moved in the order of
 * the numbers that the receiver gives, and always in parts: no kernel waits for another message's data. For a receive
 * in host memory the host copies out of the ring itself. */
#include <stdlib.h>
#include <string.h>

#include "kernels/lane.h"
#include "p2p/p2p.h"

#define DEPTH UCCH_LANE_DEPTH
#define THREADS 512
/* Blocks for a short message, and to send and to receive a long one. Two blocks write to pinned memory as fast as more
 * (50 of the copy engines' 55 GB/s), and delay concurrent reads from it less: 64 MiB in each direction at once ran at
 * 38 GB/s each with two and eight blocks, 32 GB/s with eight and eight (H200). */
#define SHORT_BLOCKS 1
#define OUT_BLOCKS 2
#define IN_BLOCKS 8
/* Size from which copy engines move data that need not wait: 64 MiB in two directions at once ran at 26 GB/s each with
 * kernels and 32 GB/s with copies (two H200s), which leave all multiprocessors to other kernels. For shorter messages
 * kernels are faster. */
#define LONG ((uint64_t)4 << 20)
/* Most pieces of a copy: sender and receiver then work on one copy each while another one is ready. */
#define MOST (UCCH_RING_SLOTS / 4)

static ucch_lane_line *line_of(const ucch_lane *l, uint32_t number) { return &l->lines[1 + number % DEPTH]; }

/* ---- work for the stream ---- */

static uint32_t pieces_of(const ucch_lane *l, uint64_t bytes) {
    if (bytes <= l->shorts->slot && !l->is_matched) return 0;
    uint64_t piece = UCCH_LANE_PIECE(bytes, l->longs->slot);
    return (uint32_t)((bytes + piece - 1) / piece);
}

/* True if the pieces of a long message cannot arrive, as no receive so far had room for one; nothing can arrive behind
 * it. */
static int cannot_arrive(const ucch_lane *l) { return l->is_recv && l->shorts->flow && !l->longs->flow; }

/* Launch a kernel for the header (`head`) and pieces `from` to `to`; the `last` kernel of a message reports its end. */
static int launch(ucch_lane *l, const ucch_lane_message *m, int head, uint32_t from, uint32_t to, int last) {
    ucch_lane_copy c = {.shorts = l->shorts->seen + (m->number - 1) % UCCH_RING_SLOTS * l->shorts->stride,
                        .longs = l->longs->seen,
                        .short_published = l->shorts->published.seen,
                        .short_consumed = l->shorts->consumed.seen,
                        .published = l->longs->published.seen,
                        .consumed = l->longs->consumed.seen,
                        .stop = &l->lines_seen->done,
                        .arrived = l->arrived,
                        .line = l->lines_seen + 1 + m->number % DEPTH,
                        .data = m->status ? NULL : m->data,
                        .bytes = head ? m->bytes : m->found_bytes,
                        .tag = head ? m->tag : m->found_tag,
                        .number = m->number,
                        .base = m->base,
                        .limit = l->is_matched ? 0 : (unsigned)l->shorts->slot,
                        .slot = (unsigned)l->longs->slot,
                        .stride = (unsigned)l->longs->stride,
                        .from = from,
                        .to = to,
                        .status = (unsigned)m->status,
                        .flags = (l->is_recv ? LANE_RECEIVES : 0) | (head ? LANE_HEAD : 0) | (last ? LANE_LAST : 0)};
    c.flags |= cannot_arrive(l) ? LANE_LOSES : 0;
    int is_long = to > from && pieces_of(l, c.bytes);
    unsigned blocks = !is_long ? SHORT_BLOCKS : l->is_recv ? IN_BLOCKS : OUT_BLOCKS;
    void *arguments[] = {&c};
    return ucch_device_fail(ucch_bound_ops()->launch(l->kernel, blocks, THREADS, arguments, m->stream), "launch");
}

/* Order a message in the lane's stream behind the caller's stream as of its posting, and behind the previous message,
 * which the caller's stream may have moved. */
static int order_in_stream(ucch_lane *l, const ucch_lane_message *m) {
    const device_ops *ops = ucch_bound_ops();
    int refused = 0, is_behind = l->moved_by != l->stream;
    l->moved_by = m->stream;
    if (m->stream != l->stream) return 0;
    if (is_behind) refused = ops->stream_wait(l->stream, l->done[(m->number - 1) % DEPTH]);
    if (!refused) refused = ops->stream_wait(l->stream, l->entered[m->number % DEPTH]);
    return ucch_device_fail(refused, "a stream's wait");
}

/* Record an event behind a message's work in its stream. */
static int record_done(ucch_lane *l, const ucch_lane_message *m) {
    l->begun = m->number;
    return ucch_device_fail(ucch_bound_ops()->event_record(l->done[m->number % DEPTH], m->stream), "record");
}

/* Give the stream the whole message: its kernels may wait for the other rank. */
static int queue_all(ucch_lane *l, ucch_lane_message *m) {
    int status = order_in_stream(l, m) ?: launch(l, m, 1, 0, UINT32_MAX, 1) ?: record_done(l, m);
    UCCH_STORE(&m->queued, 1);
    return status;
}

/* Read the header of a message that has arrived, on the host. */
static void read_header(const ucch_lane *l, ucch_lane_message *m) {
    const char *slot = l->shorts->ring + (m->number - 1) % UCCH_RING_SLOTS * l->shorts->stride;
    const ucch_slot_header *h = (const ucch_slot_header *)slot - 1;
    m->found_bytes = h->more[0];
    m->found_tag = h->hash;
    m->base = (uint32_t)h->call;
    if (m->tag != UCCH_ANY_TAG && m->tag != m->found_tag)
        m->status = LANE_OTHER_TAG;
    else if (m->found_bytes > m->bytes)
        m->status = LANE_TOO_LONG;
}

/* Number of further pieces that a kernel can move without waiting. */
static uint32_t pieces_ready(const ucch_lane *l, const ucch_lane_message *m) {
    uint32_t next = m->base + m->done, left = m->pieces - m->done, there;
    if (l->is_recv)
        there = UCCH_LOAD(l->longs->published.at) - next;
    else
        there = UCCH_LOAD(l->longs->consumed.at) + UCCH_RING_SLOTS - next;
    return (int32_t)there < 0 ? 0 : there < left ? there : left;
}

/* Write a message's end into its line, as a kernel would. */
static void note_end(ucch_lane *l, const ucch_lane_message *m) {
    ucch_lane_line *line = line_of(l, m->number);
    line->status = (unsigned)m->status;
    line->tag = m->found_tag;
    line->bytes = m->found_bytes;
}

/* Write the headers of slots for wires, which read the piece's size there; a wire that is late may read that of a later
 * piece (net/flow.c). */
static void write_headers(const ucch_lane *l, const ucch_lane_message *m, uint32_t number, uint32_t n, uint64_t bytes) {
    for (uint32_t k = number; k != number + n; k++) {
        char *slot = l->longs->ring + k % UCCH_RING_SLOTS * l->longs->stride;
        ucch_slot_header *h = (ucch_slot_header *)slot - 1;
        h->call = k;
        h->hash = m->found_tag;
        UCCH_STORE(&h->bytes, bytes);
    }
}

/* Have a copy engine move pieces that need not wait, up to piece `to`, and signal the other rank. A chunk is moved only
 * when all of its pieces are ready: each copy and signal has a cost. */
static int copy_pieces(ucch_lane *l, ucch_lane_message *m, uint32_t to) {
    uint64_t piece = UCCH_LANE_PIECE(m->found_bytes, l->longs->slot);
    ucch_counter line = {&line_of(l, m->number)->done, &l->lines_seen[1 + m->number % DEPTH].done};
    int status = 0;
    while (m->done < to && !status) {
        uint32_t k = m->base + m->done, n = ucch_channel_chunk(k, m->done, m->pieces - m->done, MOST);
        if (n > to - m->done) break;
        uint64_t at = m->done * piece, bytes = m->found_bytes - at < piece ? m->found_bytes - at : piece;
        if (!l->is_recv && l->longs->flow) write_headers(l, m, k, n, bytes);
        if (m->data && !m->status)
            status = ucch_channel_copy(l->longs, l->is_recv, k, n, m->data + at, bytes, l->stream);
        if (!status)
            status = ucch_counter_signal(l->is_recv ? l->longs->consumed : l->longs->published, k + n,
                                         l->channels->await, l->stream);
        m->done += n;
    }
    if (status || m->done < m->pieces) return status;
    note_end(l, m);
    return ucch_counter_signal(line, m->number, l->channels->await, l->stream);
}

/* Give the stream the pieces that are ready. Returns 1 if it then has the whole message, 0 if not, or a failure. */
static int queue_pieces(ucch_lane *l, ucch_lane_message *m) {
    uint32_t from = m->done, to = from + pieces_ready(l, m);
    int status = 0;
    if (to > from && m->found_bytes >= LONG)
        status = copy_pieces(l, m, to);
    else if (to > from)
        status = launch(l, m, 0, from, m->done = to, to == m->pieces);
    if (m->done > from && !status) status = record_done(l, m);
    if (status || m->done < m->pieces) return status;
    UCCH_STORE(&m->queued, 1);
    return 1;
}

/* True if the lane's stream would not wait for the caller's stream or the previous message (order_in_stream). */
static int has_entered(const ucch_lane *l, const ucch_lane_message *m) {
    int entered = 1, behind = 1;
    if (m->stream != l->stream) return 1;
    if (l->moved_by != l->stream) ucch_bound_ops()->event_done(l->done[(m->number - 1) % DEPTH], &behind);
    if (behind) ucch_bound_ops()->event_done(l->entered[m->number % DEPTH], &entered);
    return behind && entered;
}

/* True if nothing keeps the lane's stream from reaching a message, and its header has come, or has a free slot. A send
 * may be behind a long one for whose pieces there is no room yet. */
static int can_start(const ucch_lane *l, const ucch_lane_message *m) {
    if (l->shares && !has_entered(l, m)) return 0;
    if (l->is_recv) return ucch_reached(l->shorts->published.at, m->number);
    return ucch_reached(l->shorts->consumed.at, m->number - UCCH_RING_SLOTS) &&
           ucch_reached(l->longs->consumed.at, m->base - UCCH_RING_SLOTS);
}

/* Give the stream what need not wait of a message. Returns 1 if it then has the whole message, 0 if not, or a
 * failure. */
static int queue_ready(ucch_lane *l, ucch_lane_message *m) {
    int status = 0;
    if (!m->headed) {
        if (!can_start(l, m)) return 0;
        if (l->is_recv) read_header(l, m);
        m->pieces = m->status && cannot_arrive(l) ? 0 : pieces_of(l, m->found_bytes);
        m->headed = 1;
        status = order_in_stream(l, m) ?: launch(l, m, 1, 0, 0, !m->pieces) ?: record_done(l, m);
    }
    return status ?: queue_pieces(l, m);
}

/* Copy arrived pieces to host memory, on the host; returns as queue_pieces. Waits until the stream has taken all of the
 * previous message, as both use one counter. */
static int copy_to_host(ucch_lane *l, ucch_lane_message *m) {
    if (!ucch_reached(l->longs->consumed.at, m->base + m->done)) return 0;
    uint64_t piece = UCCH_LANE_PIECE(m->bytes, l->longs->slot);
    for (uint32_t more = pieces_ready(l, m); more; more--, m->done++) {
        uint64_t at = m->done * piece, left = m->bytes - at;
        uint32_t k = m->base + m->done;
        const char *slot = l->longs->ring + k % UCCH_RING_SLOTS * l->longs->stride;
        if (m->data) memcpy(m->data + at, slot, left < piece ? left : piece);
        UCCH_STORE(l->longs->consumed.at, k + 1);
    }
    if (m->done < m->pieces) return 0;
    note_end(l, m);
    UCCH_STORE(&line_of(l, m->number)->done, m->number);
    UCCH_STORE(&m->queued, 1);
    return 1;
}

/* As queue_ready, for a message that libucp has matched, once its number is next. */
static int queue_matched(ucch_lane *l, ucch_lane_message *m) {
    if (l->posted != m->number) {
        if (l->posted + 1 != m->number || UCCH_LOAD(&l->taken[m->number % DEPTH])) return 0;
        l->posted = m->number;
        l->taken[m->number % DEPTH] = 1;
        m->base = l->pieces;
        l->pieces += m->pieces;
        if (!l->is_recv && l->longs->flow) ucch_flow_wake(l->longs->flow);
    }
    return m->by_host ? copy_to_host(l, m) : queue_pieces(l, m);
}

/* Give the streams work of waiting messages, in order; with the turn. Returns whether any was queued whole. */
static int queue_waiting(ucch_lane *l) {
    int moved = 0;
    while (l->waiting && !l->failed) {
        ucch_lane_message *m = l->waiting, *behind = m->behind; /* once queued, another thread may end and free it */
        int status = l->is_matched ? queue_matched(l, m) : queue_ready(l, m);
        if (status < 0) ucch_lane_fail(l, status);
        if (status <= 0) break;
        l->waiting = behind;
        if (!l->waiting) l->last = &l->waiting;
        moved = 1;
    }
    return moved;
}

/* ---- the end of a message ---- */

static void give_copy(ucch_lane_message *m) {
    if (m->copy) ucch_pool_give(m->copy);
    m->copy = NULL;
}

static int end_locked(ucch_lane_message *m, int status) {
    if (!status) give_copy(m); /* else a kernel may still read it */
    m->of->users--;
    UCCH_STORE(&m->of->taken[m->number % DEPTH], 0);
    ucch_op_end_locked(&m->op, status, -1, -1);
    return 1;
}

static int advance_locked(ucch_op *op) {
    ucch_lane_message *m = (ucch_lane_message *)op;
    ucch_lane *l = m->of;
    int moved = 0;
    int queued = UCCH_LOAD(&m->queued);
    if (!queued && !pthread_mutex_trylock(&l->turn)) {
        moved = queue_waiting(l);
        pthread_mutex_unlock(&l->turn);
        m->op.matched = queued = UCCH_LOAD(&m->queued);
        if (queued && m->op.has_listener) ucch_doorbell_ring();
    }
    const ucch_lane_line *line = line_of(l, m->number);
    if (!queued || UCCH_LOAD(&line->done) != m->number) return moved;
    m->found_bytes = line->bytes;
    m->found_tag = line->tag;
    if (line->status == LANE_STOPPED) return end_locked(m, l->failed ? l->failed : UCCH_FAIL_BROKEN);
    if (line->status > LANE_STOPPED && line->bytes > l->shorts->slot && cannot_arrive(l))
        ucch_lane_fail(l, UCCH_FAIL_BROKEN);
    if (line->status == LANE_TOO_LONG) return end_locked(m, UCCH_FAIL_TRUNCATED);
    if (line->status == LANE_OTHER_TAG) return end_locked(m, UCCH_FAIL_MISMATCH);
    if (m->sync && !ucch_reached(l->shorts->consumed.at, m->number)) return moved;
    return end_locked(m, 0);
}

static int check_locked(ucch_op *op, double now) {
    ucch_lane_message *m = (ucch_lane_message *)op;
    const ucch_lane *l = m->of;
    if (l->failed) return l->failed;
    int bad = ucch_board_check_message(m->board, m->slot, op->started, now, &m->left);
    const ucch_channel *rings[] = {l->shorts, l->longs};
    for (int i = 0; i < 2; i++)
        if (bad != UCCH_FAIL_REVOKED && rings[i]->flow && ucch_flow_failed(rings[i]->flow, UINT64_MAX))
            return UCCH_FAIL_CONNECTION;
    int is_there = l->is_recv && !l->is_matched && ucch_reached(l->shorts->published.at, m->number);
    if (bad != UCCH_LATER) return bad;
    return is_there ? 0 : UCCH_FAIL_PEER; /* a message that has arrived will be taken in time */
}

/* A message cannot be cancelled: the next one would match in its place. The lane fails. */
static void abandon_locked(ucch_op *op, int status) {
    ucch_lane_message *m = (ucch_lane_message *)op;
    ucch_lane_fail(m->of, status);
    end_locked(m, status);
}

static const ucch_op_kind in_streams = {UCCH_IN_STREAMS, advance_locked, check_locked, abandon_locked};
static const ucch_op_kind by_progress = {UCCH_BY_CONTEXTS, advance_locked, check_locked, abandon_locked};

/* ---- messages ---- */

ucch_lane_message *ucch_lane_message_new(void) { return calloc(1, sizeof(ucch_lane_message)); }

void ucch_lane_message_free(ucch_lane_message *m) {
    give_copy(m);
    if (m->of) ucch_lane_unref(m->of);
    free(m);
}

ucch_op *ucch_lane_message_op(ucch_lane_message *m) { return &m->op; }

/* True if another thread is giving the lane's streams work, perhaps that of a message that has been given up since. */
static int has_turn(ucch_lane *l) {
    int busy = pthread_mutex_trylock(&l->turn) != 0;
    if (!busy) pthread_mutex_unlock(&l->turn);
    return busy;
}

/* True if a stream may still use the message's memory, even if it has ended. */
int ucch_lane_message_held(const ucch_lane_message *m) {
    ucch_lane *l = m->of;
    if (m->op.state == UCCH_ACTIVE) return 1;
    if (!l || l->closed) return 0;
    int queued = UCCH_LOAD(&m->queued);
    if (!(queued || m->headed)) return has_turn(l);
    if (l->is_matched && (m->by_host || !m->done)) return 0;
    uint32_t done = UCCH_LOAD(&line_of(l, m->number)->done);
    if (queued || (int32_t)(done - m->number) >= 0) return (int32_t)(done - m->number) < 0;
    UCCH_ON_DEVICE;
    int passed = 1; /* given up when only part of it was given to the stream */
    ucch_bound_ops()->event_done(l->done[m->number % DEPTH], &passed);
    return !passed;
}

static void describe(ucch_lane_message *m, int peer, int is_recv) {
    m->about = (ucch_record){.kind = is_recv ? UCCH_RECORD_RECEIVE : UCCH_RECORD_SEND,
                             .bytes = m->bytes,
                             .peer = peer,
                             .tag = m->tag == UCCH_ANY_TAG ? -1 : (int32_t)m->tag,
                             .comm = ucch_board_comm(m->board)};
    m->op.about = &m->about;
}

/* Returns 0, or why the message cannot be posted now; with the lane's turn. */
static int check_post(ucch_lane *l, ucch_lane_message *m) {
    if (l->failed) return UCCH_FAIL_BROKEN;
    uint32_t refused = l->is_recv ? 0 : UCCH_LOAD(l->shorts->consumed.at + 1);
    if (refused != l->refused) {
        m->number = l->refused = refused;
        return UCCH_FAIL_REFUSED;
    }
    if (UCCH_LOAD(&l->taken[(l->posted + 1) % DEPTH])) return UCCH_LATER;
    return m->bytes > l->shorts->slot ? ucch_channels_ring(l->channels, l->peer, l->is_recv, LONG_LANE_RING) : 0;
}

/* True if all messages so far have ended. */
static int is_empty(const ucch_lane *l) { return UCCH_LOAD(&line_of(l, l->posted)->done) == l->posted; }

/* True if a send can end without its receiver and without another stream: the rings have room. */
static int ends_without_receiver(const ucch_lane *l, const ucch_lane_message *m, const void *stream) {
    uint32_t pieces = l->pieces + pieces_of(l, m->bytes);
    if (l->waiting || !(is_empty(l) || (l->from == stream && !l->mixed))) return 0;
    return ucch_reached(l->shorts->consumed.at, m->number - UCCH_RING_SLOTS) &&
           ucch_reached(l->longs->consumed.at, pieces - UCCH_RING_SLOTS);
}

/* True if such a send can be work of the caller's stream: that stream moved the previous message, or nothing is under
 * way. Copies by copy engines always use the lane's stream, and so do all messages where streams share queues. */
static int goes_directly(const ucch_lane *l, const ucch_lane_message *m, const void *stream) {
    return m->bytes < LONG && ucch_may_hold() && (is_empty(l) || l->moved_by == stream);
}

/* Let `stream` copy the data to send. */
static int copy_aside(ucch_lane_message *m, void *stream) {
    m->copy = ucch_pool_take(0, m->bytes, NULL, 1);
    if (!m->copy) return UCCH_FAIL_DEVICE;
    int status = ucch_device_fail(ucch_bound_ops()->copy(m->copy, m->data, m->bytes, stream), "copy");
    m->data = m->copy;
    return status;
}

/* True if a copy engine can move a whole long message now: its slots are free, or filled already. */
static int needs_no_wait(const ucch_lane *l, ucch_lane_message *m) {
    const ucch_channel *ring = l->shorts;
    if (m->bytes < LONG || !ucch_reached(l->is_recv ? ring->published.at : ring->consumed.at,
                                         l->is_recv ? m->number : m->number - UCCH_RING_SLOTS))
        return 0;
    if (l->is_recv) read_header(l, m);
    m->pieces = pieces_of(l, m->found_bytes);
    int fits = !m->status && m->found_bytes >= LONG && pieces_ready(l, m) == m->pieces;
    m->status = 0;
    return fits;
}

/* True if the stream may wait for the message. A second message that waits behind another one blocks the queue of both,
 * and with it other streams of this queue: 40 receives and 40 sends of two messages each, in as many streams on 32
 * queues, waited for ever, with one message each they did not (H200). */
static int may_wait(const ucch_lane *l, const ucch_lane_message *m) {
    if (!ucch_may_hold() || l->shares || l->waiting) return 0;
    int is_first = UCCH_LOAD(&line_of(l, m->number - 1)->done) == m->number - 1;
    return is_first || !ucch_streams_share(2 * l->channels->size);
}

/* Give the stream its work if possible, else later; with the lane's turn. */
static int queue(ucch_lane *l, ucch_lane_message *m) {
    if (may_wait(l, m)) {
        int status = needs_no_wait(l, m) ? queue_ready(l, m) : queue_all(l, m);
        if (status < 0) ucch_lane_fail(l, status);
        return status < 0 ? status : 0;
    }
    *l->last = m;
    l->last = &m->behind;
    queue_waiting(l);
    return 0;
}

/* Number the message, and queue it; with the lane's turn. */
static int post(ucch_lane *l, ucch_lane_message *m, void *stream) {
    int status = check_post(l, m);
    if (status) return status;
    m->number = l->posted + 1;
    int ordered = m->ordered && m->bytes, may_be_direct = ordered || m->bytes <= l->shorts->slot;
    int alone = !l->is_recv && may_be_direct && ends_without_receiver(l, m, stream);
    int direct = alone && goes_directly(l, m, stream);
    alone &= direct || !l->shares;
    m->stream = direct ? stream : l->stream;
    if (ordered && !alone) status = copy_aside(m, stream);
    if (!status && !direct)
        status = ucch_device_fail(ucch_bound_ops()->event_record(l->entered[m->number % DEPTH], stream), "record");
    if (status) return status;
    l->mixed = !is_empty(l) && (l->mixed || l->from != stream);
    l->from = stream;
    l->taken[++l->posted % DEPTH] = 1;
    m->base = l->pieces;
    if (!l->is_recv) {
        l->pieces += pieces_of(l, m->bytes);
        m->found_bytes = m->bytes;
        m->found_tag = m->tag;
        if (l->shorts->flow) ucch_flow_wake(l->shorts->flow);
    }
    status = queue(l, m);
    if (status || !ordered || !alone || direct) return status;
    return ucch_device_fail(ucch_bound_ops()->stream_wait(stream, l->done[m->number % DEPTH]), "a stream's wait");
}

/* Send to a rank, or receive from it, when `stream` reaches this point. Returns 0, UCCH_LATER if too many messages are
 * under way, or a failure. `slot` is the peer's on the board; `how` is made of UCCH_LANE_MESSAGE_*. */
int ucch_lane_message_post(ucch_lanes *all, ucch_lane_message *m, int peer, int slot, int how, uintptr_t data,
                           size_t bytes, uint64_t tag, uintptr_t stream, double timeout) {
    UCCH_ON_DEVICE;
    int status = 0, is_recv = !!(how & UCCH_LANE_MESSAGE_RECV);
    ucch_lane *l = ucch_lane_with(all, peer, is_recv, 0, &status);
    if (!l) return status;
    if (m->of != l) __atomic_add_fetch(&l->refs, 1, __ATOMIC_ACQ_REL); /* else it is a retry */
    *m = (ucch_lane_message){.of = l,
                             .board = all->board,
                             .slot = slot,
                             .data = (char *)data,
                             .bytes = bytes,
                             .tag = tag,
                             .sync = how & UCCH_LANE_MESSAGE_SYNC,
                             .ordered = how & UCCH_LANE_MESSAGE_ORDERED};
    describe(m, peer, is_recv);
    ucch_take(&l->turn, UCCH_AT_TURN);
    status = post(l, m, (void *)stream);
    ucch_give(&l->turn, UCCH_AT_TURN);
    if (status) return status;
    ucch_lock();
    int queued = UCCH_LOAD(&m->queued);
    m->op.kind = queued ? &in_streams : &by_progress;
    l->users++;
    ucch_op_begin_locked(&m->op, timeout);
    m->op.matched = queued;
    ucch_unlock();
    queued ? ucch_progress_streams() : (void)ucch_progress_thread(1);
    return 0;
}

/* ---- messages matched by libucp ---- */

static void queue_in_order(ucch_lane *l, ucch_lane_message *m) {
    ucch_lane_message **at = &l->waiting;
    while (*at && (int32_t)((*at)->number - m->number) < 0)
        at = &(*at)->behind;
    m->behind = *at;
    *at = m;
    if (!m->behind) l->last = &m->behind;
}

/* Move a message as number `*number` of its lane: the receiver is given the number here, and its sender has to be told.
 * Returns 0, UCCH_LATER while the lane is being made, or a failure. */
int ucch_lane_message_move_locked(ucch_lanes *all, ucch_lane_message *m, int peer, int how, char *data, uint64_t bytes,
                                  uint32_t *number) {
    int is_recv = !!(how & UCCH_LANE_MESSAGE_RECV), status;
    ucch_lane *l = ucch_lane_matched_locked(all, peer, is_recv, &status);
    if (!l) return status;
    if (is_recv) *number = ++l->promised;
    __atomic_add_fetch(&l->refs, 1, __ATOMIC_ACQ_REL);
    if (m->of) ucch_lane_unref(m->of);
    *m = (ucch_lane_message){.op.kind = &by_progress,
                             .of = l,
                             .board = all->board,
                             .slot = all->peers[peer].slot,
                             .stream = l->stream,
                             .number = *number,
                             .data = data,
                             .bytes = bytes,
                             .found_bytes = bytes,
                             .pieces = pieces_of(l, bytes),
                             .headed = 1,
                             .by_host = how & UCCH_LANE_MESSAGE_BY_HOST};
    queue_in_order(l, m);
    l->users++;
    ucch_op_begin_locked(&m->op, 0);
    return 0;
}

/* Give up a receive that is under way: its data is discarded, so that later messages can arrive. */
void ucch_lane_message_pass_locked(ucch_lane_message *m) { m->data = NULL; }

/* Give up a message whose sender cannot be told its number. */
void ucch_lane_message_abandon_locked(ucch_lane_message *m, int status) {
    if (m->op.state == UCCH_ACTIVE) abandon_locked(&m->op, status);
}

/* ---- streams that wait for messages ---- */

/* Let a stream wait until the message has been moved. Returns 1, 0 if the message has not been given to a stream yet,
 * or a failure. A `timeout` other than 0 counts from now. */
int ucch_lane_message_follow(ucch_lane_message *m, uintptr_t stream, double timeout) {
    if (UCCH_LOAD(&m->op.state) == UCCH_DONE) return 1;
    if (timeout > 0) ucch_op_deadline(&m->op, timeout);
    if (!UCCH_LOAD(&m->queued)) return 0;
    if (m->stream == (void *)stream) return 1;
    UCCH_ON_DEVICE;
    void *done = m->of->done[m->number % DEPTH];
    return ucch_device_fail(ucch_bound_ops()->stream_wait((void *)stream, done), "a stream's wait") ?: 1;
}
