/* Rings of pinned memory between ranks, and the counters by which their streams pass pieces to each other.
 *
 * A channel is a ring in memory of the sender (segment.c). Two ranks have several, for different message sizes. A ring
 * takes memory when its first message is queued. The ring follows from the message's size alone, so each end pins its
 * part by itself and does not wait for the other end. The sender's stream copies a piece into the ring and writes how
 * many pieces there are. The receiver's stream waits for that, copies the piece out and writes how many it has taken:
 * two devices of any vendors, without a host. The counters only grow. Between hosts the receiver has such a ring, too,
 * and network threads copy between the two (net/flow.c): the streams see no difference. */
#include "shm/shm.h"

#include <stdlib.h>
#include <string.h>

#define LINE ((size_t)64)
#define HEADER_GRAIN ((size_t)65536)
#define PAGE ((size_t)4096)
/* Pieces of a message, if they are long enough: with several, both devices and the wires work at the same time. */
#define PIECES 4
#define SHORTEST ((size_t)512 << 10)
#define SHORT_SLOT ((size_t)64 << 10)
/* Most wires of a ring with short slots. */
#define MANY_WIRES 6
/* Messages over wires longer than this many slots of the long ring use the longest ring, with fewer driver calls.
 * Shorter ones, like DDP's buckets, are soon over, and begin and end with short pieces. */
#define LONGEST_FROM (2 * UCCH_RING_SLOTS)
/* Slots of the longest ring, used over wires only, have twice the size, up to this: a flow's tag has no room for
 * more. */
#define LONGEST_SLOT ((size_t)16 << 20)
/* Fields of a flow's tag. */
#define RING_BIT UCCH_FLOW_TAG_BIT
#define TO_BIT UCCH_FLOW_SPREAD_BIT
#define FROM_BIT 30
#define NUMBER_BIT 45
#define MOST_NUMBERS ((uint64_t)1 << (63 - NUMBER_BIT)) /* then they repeat: UCCH_WIRE_EXPECTED is the next bit */

/* Counters on the device: of blocks of fused kernels, in calls and in graphs; how many have done a message and slot;
 * and what graphs count from one replay to the next, per channel too. */
typedef struct counts {
    ucch_by_move in_calls, in_graphs;
    uint32_t joined[UCCH_MOST_COPIES * UCCH_RING_SLOTS];
    ucch_replayed replayed;
    ucch_steps steps[];
} counts;

/* Words of a lane's blocks (lane.cuh). */
#define MEETINGS 16

static size_t counts_of(int size) {
    return sizeof(counts) +
           (2 * UCCH_RINGS * sizeof(ucch_steps) + UCCH_LANES * MEETINGS * sizeof(uint32_t)) * (size_t)size;
}

/* Lines of a part's header: number of peers that use it (ucch_mapping_peers); counters of channels to other ranks, and
 * from ranks of other hosts; ends of calls; first undefined call, here and as told by other hosts; words of calls in
 * graphs; ends of messages; and zeros. */
enum { PEERS, OUT_WORDS, IN_WORDS, ENDS, TAINTED, REPLAYS, LANES, ZEROS, HEADER_END };

static size_t line_of(int what, int size) {
    size_t n = (size_t)size, words = 2 * UCCH_RINGS * n;
    size_t lines[] = {[PEERS] = 1,
                      [OUT_WORDS] = words,
                      [IN_WORDS] = words,
                      [ENDS] = MOST_CALLS,
                      [TAINTED] = 1 + n,
                      [REPLAYS] = sizeof(ucch_replays) / LINE,
                      [LANES] = UCCH_LANES * n * (1 + UCCH_LANE_DEPTH),
                      [ZEROS] = counts_of(size) / LINE + 1,
                      [HEADER_END] = 0};
    size_t first = 0;
    for (int i = 0; i < what; i++)
        first += lines[i];
    return first;
}

/* Ranks that a part has room for (room takes no memory): communicators of similar size reuse each other's parts, and
 * find the rings pinned. */
static int room_for(int size) {
    int room = 4;
    while (room < size)
        room *= 2;
    return room;
}

static size_t header_of(int size) {
    return (line_of(HEADER_END, size) * LINE + HEADER_GRAIN - 1) / HEADER_GRAIN * HEADER_GRAIN;
}

/* True if devices pass the ring's data by NCCL's LL protocol (kernels/ll.cuh), with a flag in each word. Slots then
 * take twice the room. Old flags cannot be mistaken for new ones: nothing else uses such a ring, and a part that was
 * used in graphs is never reused. */
static int by_flags(int ring, int by_wire) { return ring == SHORT_GRAPH_RING && !by_wire; }

/* Data bytes of a ring's slots: wires carry shorter pieces than devices of one host pass each other. */
static size_t slot_of(const ucch_channels *c, int ring, int by_wire) {
    size_t twice = 2 * c->slot;
    size_t most[] = {[SHORT_RING] = SHORT_SLOT,
                     [MIDDLE_RING] = SHORTEST,
                     [LONG_RING] = by_wire ? c->slot : twice,
                     [SHORT_GRAPH_RING] = SHORT_SLOT,
                     [LONG_GRAPH_RING] = SHORTEST,
                     [SHORT_LANE_RING] = SHORT_SLOT,
                     [LONG_LANE_RING] = c->slot,
                     [MATCHED_LANE_RING] = c->slot,
                     [LONGEST_RING] = twice < LONGEST_SLOT ? twice : LONGEST_SLOT};
    int is_long = ring == LONG_RING || ring == LONGEST_RING;
    size_t bytes = is_long || most[ring] < c->slot ? most[ring] : c->slot;
    return by_flags(ring, by_wire) ? bytes / 2 : bytes;
}

/* Bytes of the header before a slot's data. */
static size_t header_bytes(int ring, int by_wire) { return by_wire || UCCH_BY_DEVICE(ring) ? UCCH_FLOW_HEADER : 0; }

static size_t stride_of(const ucch_channels *c, int ring, int by_wire) {
    return slot_of(c, ring, by_wire) * (by_flags(ring, by_wire) ? 2 : 1) + header_bytes(ring, by_wire);
}

static size_t pages_of(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Offset in a rank's part of a ring to `other`: on the same host, or (`wire`) to or from a rank of another host, which
 * is pinned in another length. For `other` = room: the size of the part. Nothing takes memory before it is pinned, so
 * every ring has the same space. */
static size_t offset_of(const ucch_channels *c, int other, int wire, int is_recv, int ring) {
    size_t at = 0, all = 0;
    for (int i = 0; i < UCCH_RINGS; i++) {
        at = i == ring ? all : at;
        all += pages_of(UCCH_RING_SLOTS * (stride_of(c, i, 0) + UCCH_FLOW_HEADER));
    }
    return header_of(c->room) + (3 * (size_t)other + (size_t)(wire ? 1 + is_recv : 0)) * all + at;
}

static void free_channels(ucch_channels *c) {
    for (int i = 0; c->peers && i < c->size; i++)
        if (c->peers[i].part) ucch_mapping_give(c->peers[i].part);
    free(c->peers);
    free(c->out);
    free(c);
}

/* Channels of rank `rank` of `size`, in process `key`; `slot`: data bytes of the longest slot between hosts. NULL if
 * memory is exhausted. */
ucch_channels *ucch_channels_new(uint64_t key, int rank, int size, const int *hosts, size_t slot) {
    ucch_channels *c = calloc(1, sizeof(*c));
    if (!c) return NULL;
    size_t n = (size_t)size;
    c->out = calloc(2 * n * UCCH_RINGS, sizeof(*c->out));
    c->in = c->out + n * UCCH_RINGS;
    c->peers = calloc(n, sizeof(*c->peers));
    c->rank = rank;
    c->size = size;
    c->room = room_for(size);
    c->slot = slot;
    for (int i = 0; c->peers && i < size; i++)
        c->peers[i].host = hosts[i];
    if (c->out && c->peers) c->peers[rank].part = ucch_mapping_new(key, offset_of(c, c->room, 0, 0, 0));
    if (!c->out || !c->peers || !c->peers[rank].part) {
        free_channels(c);
        return NULL;
    }
    return c;
}

/* Descriptor of this rank's part, for its peers. */
int ucch_channels_file(const ucch_channels *c) { return c->peers[c->rank].part->file; }

static ucch_counter counter_at(const ucch_mapping *part, size_t line) {
    return (ucch_counter){(uint32_t *)(part->memory + line * LINE), part->seen + line * LINE};
}

/* True if data to and from this rank goes over wires. */
int ucch_channels_by_wire(const ucch_channels *c, int peer) { return c->peers[peer].host != c->peers[c->rank].host; }

/* The channel between this rank and `peer`, its ring not pinned yet: in the sender's part, or between hosts in this
 * rank's. */
static ucch_channel channel(const ucch_channels *c, int peer, int is_recv, int ring) {
    int wire = ucch_channels_by_wire(c, peer), owner = is_recv && !wire ? peer : c->rank,
        other = owner == peer ? c->rank : peer;
    const ucch_mapping *part = c->peers[owner].part;
    size_t line =
        line_of(wire && is_recv ? IN_WORDS : OUT_WORDS, c->room) + 2 * ((size_t)other * UCCH_RINGS + (size_t)ring);
    size_t from = line_of(TAINTED, c->room) + (wire ? 1 + (size_t)peer : 0);
    return (ucch_channel){.published = counter_at(part, line),
                          .consumed = counter_at(part, line + 1),
                          .ring = part->memory + offset_of(c, other, wire, is_recv, ring) + header_bytes(ring, wire),
                          .slot = slot_of(c, ring, wire),
                          .stride = stride_of(c, ring, wire),
                          .by_flags = by_flags(ring, wire),
                          .tainted = (uint64_t *)counter_at(part, from).at};
}

static void channels_with(ucch_channels *c, int peer, int is_recv) {
    for (int ring = 0; ring < UCCH_RINGS; ring++)
        *ucch_channels_at(c, peer, is_recv, ring) = channel(c, peer, is_recv, ring);
}

/* Map the part of rank `peer` of this host, a file of process `key`; this rank's own comes first. Returns 0 or a
 * failure. */
int ucch_channels_map(ucch_channels *c, int peer, uint64_t key, int pid, int file) {
    if (ucch_bound() < 0) return UCCH_FAIL_DEVICE;
    size_t bytes = offset_of(c, c->room, 0, 0, 0), header = header_of(c->room);
    ucch_mapping *part = peer == c->rank ? c->peers[peer].part : ucch_mapping_open(key, pid, file, bytes);
    char *seen;
    int status = part ? ucch_mapping_pin(part, 0, header, &seen) : UCCH_FAIL_PEER;
    if (status) return status;
    if (peer != c->rank) {
        __atomic_add_fetch(ucch_mapping_peers(part), 1, __ATOMIC_SEQ_CST);
        c->peers[peer].part = part;
        channels_with(c, peer, 1);
        return 0;
    }
    const ucch_mapping *own = c->peers[peer].part;
    memset(own->memory + LINE, 0, header - LINE); /* peers may have counted themselves already, and use nothing else */
    c->tainted = (uint64_t *)counter_at(own, line_of(TAINTED, c->room)).at;
    for (int other = 0; other < c->size; other++)
        if (other != peer && !ucch_channels_by_wire(c, other)) channels_with(c, other, 0);
    for (size_t i = 0; i < MOST_CALLS; i++)
        c->done[i] = counter_at(own, line_of(ENDS, c->room) + i);
    return 0;
}

/* Wires that carry a ring. Rings of short pieces use fewer: waking more threads takes longer than they save. An
 * allgather of 1 MiB took 131 us with 6 wires, 231 with 8; an allreduce of 1 MiB, two ranks per host, 240 us with 3,
 * 240 to 305 with 4, 380 to 1290 with 6. */
static int wires_of(const ucch_channels *c, int ring) {
    int is_long = ring == LONG_RING || ring == LONGEST_RING, some = (3 * c->nwires + 3) / 4;
    return is_long ? c->nwires : some < MANY_WIRES ? some : MANY_WIRES;
}

/* Carry a ring to or from a rank of another host, with a tag made of the communicator's number, the ranks and the
 * ring. Returns 0 or a failure. Ranks tell each other of failures over the shortest ring. */
static int make_flow(ucch_channels *c, int peer, int is_recv, int ring) {
    ucch_channel *way = ucch_channels_at(c, peer, is_recv, ring);
    ucch_slots slots = {.slots = way->ring - UCCH_FLOW_HEADER,
                        .stride = way->stride,
                        .depth = UCCH_RING_SLOTS,
                        .published = way->published.at,
                        .consumed = way->consumed.at,
                        .tainted_here = c->tainted,
                        .tainted_there = way->tainted,
                        .tells = ring == SHORT_RING,
                        .by_device = UCCH_BY_DEVICE(ring)};
    uint64_t from = (uint64_t)(is_recv ? peer : c->rank), to = (uint64_t)(is_recv ? c->rank : peer);
    uint64_t tag = c->number % MOST_NUMBERS << NUMBER_BIT | from << FROM_BIT | to << TO_BIT;
    tag |= (uint64_t)ring << RING_BIT;
    ucch_flow *flow = ucch_flow_new(&slots, !is_recv, wires_of(c, ring), c->peers[peer].key, tag);
    UCCH_LOCKED; /* other threads check it for failures */
    way->flow = flow;
    return flow ? 0 : UCCH_FAIL_PEER;
}

/* Set up the channels with rank `peer` of another host, in process `key`, over the first `nwires` wires, which are
 * connected with it; after this rank's own part. Returns 0 or a failure. */
int ucch_channels_connect(ucch_channels *c, int peer, uint64_t key, int nwires, uint64_t number) {
    c->nwires = nwires;
    c->number = number;
    c->peers[peer].key = key;
    channels_with(c, peer, 0);
    channels_with(c, peer, 1);
    return make_flow(c, peer, 0, SHORT_RING) ?: make_flow(c, peer, 1, SHORT_RING);
}

/* The ring for messages of this size: the same at both ends. */
int ucch_ring_for(const ucch_channels *c, int peer, size_t bytes, int in_graph) {
    int wire = ucch_channels_by_wire(c, peer);
    if (in_graph) return bytes <= slot_of(c, SHORT_GRAPH_RING, wire) ? SHORT_GRAPH_RING : LONG_GRAPH_RING;
    return bytes <= slot_of(c, SHORT_RING, wire)                        ? SHORT_RING
           : bytes <= PIECES * slot_of(c, MIDDLE_RING, wire)            ? MIDDLE_RING
           : wire && bytes > LONGEST_FROM * slot_of(c, LONG_RING, wire) ? LONGEST_RING
                                                                        : LONG_RING;
}

ucch_channel *ucch_channels_at(const ucch_channels *c, int peer, int is_recv, int ring) {
    return &(is_recv ? c->in : c->out)[peer * UCCH_RINGS + ring];
}

/* Piece size of a message: the same at both ends. */
size_t ucch_channel_piece(const ucch_channel *channel, size_t bytes) {
    size_t piece = pages_of(bytes / PIECES);
    piece = piece < SHORTEST ? SHORTEST : piece;
    return piece < channel->slot ? piece : channel->slot;
}

/* Pieces that a copy engine moves at once, of `left` from the `nth` of a message on: up to `most` contiguous slots from
 * that of piece `number` on, fewer at the beginning and the end. A message's last piece may be shorter and is moved
 * alone. */
uint32_t ucch_channel_chunk(uint32_t number, uint64_t nth, uint64_t left, uint64_t most) {
    uint64_t room = UCCH_RING_SLOTS - number % UCCH_RING_SLOTS, few = nth ? 3 * nth : 1;
    uint64_t rest = left > 1 ? left - 1 : 1;
    most = most < few ? most : few;
    most = most < rest ? most : rest;
    return (uint32_t)(most < room ? most : room);
}

/* Let the stream copy `n` contiguous pieces of `bytes` bytes into the slots from that of piece `number` on, or out of
 * them (`is_recv`). Returns 0 or a failure. */
int ucch_channel_copy(const ucch_channel *channel, int is_recv, uint32_t number, uint32_t n, char *data, size_t bytes,
                      void *stream) {
    const device_ops *ops = ucch_bound_ops();
    char *slot = channel->ring + number % UCCH_RING_SLOTS * channel->stride;
    void *dst = is_recv ? data : slot, *src = is_recv ? slot : data;
    size_t to = is_recv ? bytes : channel->stride, from = is_recv ? channel->stride : bytes;
    return ucch_device_fail(
        n == 1 ? ops->copy(dst, src, bytes, stream) : ops->copy_rows(dst, to, src, from, bytes, n, stream), "copy");
}

static int pin_ring(ucch_channels *c, int peer, int is_recv, int ring) {
    int wire = ucch_channels_by_wire(c, peer);
    ucch_channel *way = ucch_channels_at(c, peer, is_recv, ring);
    if (way->seen) return 0;
    ucch_mapping *part = c->peers[is_recv && !wire ? peer : c->rank].part;
    size_t header = header_bytes(ring, wire), at = (size_t)(way->ring - header - part->memory);
    char *seen;
    int status = ucch_mapping_pin(part, at, pages_of(UCCH_RING_SLOTS * way->stride), &seen) ? UCCH_FAIL_PINNED : 0;
    if (!status && wire && !way->flow) status = make_flow(c, peer, is_recv, ring);
    if (!status) way->seen = seen + header;
    return status;
}

/* The lines of a lane, in which kernels report how messages ended, and the counters where their blocks meet. */
ucch_counter ucch_channels_lines(const ucch_channels *c, int peer, int which, unsigned **arrived) {
    size_t nth = UCCH_LANES * (size_t)peer + (size_t)which;
    *arrived = c->meetings + nth * MEETINGS;
    return counter_at(c->peers[c->rank].part, line_of(LANES, c->room) + nth * (1 + UCCH_LANE_DEPTH));
}

static pthread_mutex_t one_by_one = PTHREAD_MUTEX_INITIALIZER;

/* Pin a ring at its first use. Returns 0 or a failure. No peer takes part. */
int ucch_channels_ring(ucch_channels *c, int peer, int is_recv, int ring) {
    ucch_take(&one_by_one, UCCH_AT_PINNING);
    int status = pin_ring(c, peer, is_recv, ring);
    ucch_give(&one_by_one, UCCH_AT_PINNING);
    return status;
}

/* Slot size of a ring with a rank; 0: it has not been used. */
size_t ucch_channels_slot(const ucch_channels *c, int peer, int ring) {
    const ucch_channel *out = ucch_channels_at(c, peer, 0, ring);
    return out->seen || ucch_channels_at(c, peer, 1, ring)->seen ? out->slot : 0;
}

/* Pinned bytes of this rank's part. */
size_t ucch_channels_held(const ucch_channels *c) { return c->peers[c->rank].part->pinned; }

static int count_from_zero(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    const char *zeros = (const char *)counter_at(c->peers[c->rank].part, line_of(ZEROS, c->room)).at;
    ucch_counter replays = counter_at(c->peers[c->rank].part, line_of(REPLAYS, c->room));
    counts *all = ucch_pool_take(0, counts_of(c->size), NULL, 1);
    if (!all) return UCCH_FAIL_MEMORY;
    c->by_move = &all->in_calls;
    c->joined = all->joined;
    c->meetings = (unsigned *)(all->steps + 2 * UCCH_RINGS * (size_t)c->size);
    c->graphs = (ucch_graphs){.channels = c,
                              .words = (ucch_replays *)replays.at,
                              .seen = replays.seen,
                              .counts = &all->replayed,
                              .by_move = &all->in_graphs};
    for (int i = 0; i < 2 * c->size * UCCH_RINGS; i++)
        c->out[i].steps = UCCH_BY_DEVICE(i % UCCH_RINGS) ? &all->steps[i] : NULL;
    int status = ucch_device_fail(ops->copy(all, zeros, counts_of(c->size), c->streams[0]), "copy");
    return status ?: ucch_device_fail(ops->stream_sync(c->streams[0]), "stream");
}

/* Allocate what calls need, once all ranks are known. Returns 0 or a failure. */
int ucch_channels_open(ucch_channels *c) {
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    const device_ops *ops = ucch_bound_ops();
    int status = 0;
    ucch_streams_reserve();
    c->await = ucch_kernel_of(&(ucch_task){.kind = UCCH_AWAIT});
    c->copies = c->nwires && ucch_may_hold() ? ucch_kernel_of(&(ucch_task){.kind = UCCH_RING_COPY}) : NULL;
    for (int i = 0; i < STREAMS && !status; i++) {
        if (i == STREAM_WIRES && !c->copies) continue;
        status = ucch_stream_new(&c->streams[i]);
        if (!status) status = ucch_device_fail(ops->event_new(&c->tail[i]), "event");
    }
    if (!status) status = ucch_device_fail(ops->event_new(&c->began), "event") ?: count_from_zero(c);
    /* a trial: shows here what a stream cannot do */
    if (!status) status = ucch_counter_wait((ucch_counter){NULL, c->done[0].seen}, 0, c->await, c->streams[0]);
    return status ?: ucch_counter_signal(c->done[0], 0, c->await, c->streams[0]);
}

/* Free streams, events and memory of the device, which nothing uses any more. Memory that graphs may still write to is
 * kept; they no longer wait for other ranks. Returns 1 if there are graphs. */
static int free_on_device(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    int captured = c->graphs.watch.kind != NULL;
    if (captured) {
        __atomic_store_n(&c->graphs.words->stop.word, 1, __ATOMIC_SEQ_CST);
        UCCH_LOCKED;
        if (c->graphs.watch.state == UCCH_ACTIVE) ucch_op_end_locked(&c->graphs.watch, 0, -1, -1);
    }
    UCCH_ON_DEVICE;
    for (int i = 0; i < STREAMS; i++) {
        ucch_stream_free(c->streams[i]);
        if (c->tail[i]) ops->event_free(c->tail[i]);
        c->streams[i] = c->tail[i] = NULL;
    }
    if (c->began) ops->event_free(c->began);
    if (c->graphs.last) ops->event_free(c->graphs.last);
    c->began = c->graphs.last = NULL;
    if (captured) return 1;
    ucch_pool_give(c->by_move);
    c->by_move = NULL;
    for (int i = 0; i < BANKS; i++) {
        ucch_pool_give(c->scratch[i]);
        c->scratch[i] = NULL;
    }
    while (c->noutgrown)
        ucch_pool_give(c->outgrown[--c->noutgrown]);
    return 0;
}

/* Free everything; nothing may be under way, here or on a peer. */
void ucch_channels_free(ucch_channels *c) {
    int held = free_on_device(c);
    for (int i = 0; i < 2 * c->size * UCCH_RINGS; i++)
        held |= c->out[i].flow && ucch_flow_free(c->out[i].flow);
    if (!held) /* else libucp may still write to the rings */
        free_channels(c);
}

/* After a failure: free what is on the device, once its streams have no work any more. The rings are kept, as peers and
 * libucp may still use them. Returns 1, or 0 if it is too early. */
int ucch_channels_let_go(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    int all = ucch_channels_passed(c);
    if (!all) return 0;
    UCCH_ON_DEVICE;
    for (int i = 0; i < STREAMS; i++) {
        if (!c->streams[i]) continue;
        int done = 0, status = c->is_left ? 0 : ops->event_record(c->tail[i], c->streams[i]);
        if (!status) ops->event_done(c->tail[i], &done);
        all &= done;
    }
    c->is_left = 1;
    if (all) free_on_device(c);
    return all;
}

/* True if everything put into the channel has been taken out, and its sender knows that. */
static int emptied(const ucch_channel *channel) {
    if (channel->flow) return ucch_flow_quiet(channel->flow);
    uint32_t all = channel->steps ? UCCH_LOAD(channel->published.at) : ucch_channel_pieces(channel);
    return UCCH_LOAD(channel->consumed.at) == all;
}

/* 1 if all queued calls have ended and all pieces have been taken; -1 if that will never be known, because a call has
 * failed; else 0. */
int ucch_channels_quiet(ucch_channels *c) {
    UCCH_LOCKED;
    ucch_channels_room(c);
    int quiet = c->failed ? -1 : c->landed == c->calls;
    for (int i = 0; i < 2 * c->size * UCCH_RINGS && quiet > 0; i++)
        quiet = i / UCCH_RINGS % c->size == c->rank || UCCH_OF_LANE(i % UCCH_RINGS) || emptied(&c->out[i]);
    return quiet;
}

/* ---- calls ---- */

int ucch_channels_done(const ucch_channels *c, uint64_t call) {
    return ucch_reached(c->done[call % MOST_CALLS].at, ucch_generation(call));
}

/* True if one more call may be queued. */
int ucch_channels_room(ucch_channels *c) {
    while (c->landed < c->calls && ucch_channels_done(c, c->landed + 1))
        c->landed++;
    return c->calls - c->landed < MOST_CALLS;
}

/* True if streams have passed everything that was queued. */
int ucch_channels_passed(ucch_channels *c) {
    UCCH_LOCKED;
    ucch_channels_room(c);
    return c->landed == c->calls;
}

/* True if no earlier call is under way. */
int ucch_channels_first(ucch_channels *c, uint64_t call) {
    ucch_channels_room(c);
    return c->landed + 1 >= call;
}

/* Mark the end of a call that could not be queued: no stream will. */
void ucch_channels_end(ucch_channels *c, uint64_t call) {
    UCCH_STORE(c->done[call % MOST_CALLS].at, ucch_generation(call));
}

/* Provide scratch of this size in a bank. Smaller scratch may still be in use and is kept: sizes at least double. */
int ucch_channels_scratch(ucch_channels *c, int bank, size_t bytes) {
    if (bytes <= c->scratch_bytes[bank]) return 0;
    if (bytes < 2 * c->scratch_bytes[bank]) bytes = 2 * c->scratch_bytes[bank];
    void *memory = c->noutgrown < MOST_OUTGROWN ? ucch_pool_take(0, bytes, NULL, 1) : NULL;
    if (!memory) return UCCH_FAIL_MEMORY;
    c->outgrown[c->noutgrown++] = c->scratch[bank];
    c->scratch[bank] = memory;
    c->scratch_bytes[bank] = bytes;
    return 0;
}

/* True if streams of this rank still wait for other ranks. */
int ucch_channels_waiting(const ucch_channels *c) {
    for (int i = 0; i < c->size * UCCH_RINGS; i++)
        if (i / UCCH_RINGS != c->rank && !c->in[i].steps &&
            (!ucch_reached(c->in[i].published.at, ucch_channel_pieces(&c->in[i])) ||
             !ucch_reached(c->out[i].consumed.at, ucch_channel_pieces(&c->out[i]) - UCCH_RING_SLOTS)))
            return 1;
    return 0;
}

/* Why no more data comes from another host for call `number`, with the rank; 0: it does. */
int ucch_channels_lost(const ucch_channels *c, uint64_t number, int *rank) {
    for (int i = 0; c->nwires && i < 2 * c->size * UCCH_RINGS; i++) {
        int status = c->out[i].flow ? ucch_flow_failed(c->out[i].flow, number) : 0;
        *rank = i / UCCH_RINGS % c->size;
        if (status) return status;
    }
    return 0;
}

/* ---- failures ---- */

static int taints(const uint64_t *tainted, uint64_t call) {
    uint64_t first = UCCH_LOAD(tainted);
    return first && call >= first;
}

/* A rank that released its streams before they had done their part of this call: the data they then sent, also via
 * other ranks, is undefined. -1: none. All ranks number calls alike. */
int ucch_channels_tainted_by(const ucch_channels *c, uint64_t call) {
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && taints(c->in[i * UCCH_RINGS].tainted, call)) return i;
    return taints(c->tainted, call) ? c->rank : -1;
}

static void release_streams(const ucch_channels *c) {
    for (int i = 0; i < c->size * UCCH_RINGS; i++) {
        if (i / UCCH_RINGS == c->rank || c->out[i].steps) continue;
        UCCH_STORE(c->out[i].consumed.at, ucch_channel_pieces(&c->out[i]));
        UCCH_STORE(c->in[i].published.at, ucch_channel_pieces(&c->in[i]));
    }
}

/* Release the streams again. Returns whether all have passed. */
static int drain_locked(ucch_op *op) {
    ucch_channels *c = (ucch_channels *)op;
    release_streams(c);
    ucch_channels_room(c);
    if (c->landed != c->calls) return 0;
    ucch_op_end_locked(op, 0, -1, -1);
    return 1;
}

static const ucch_op_kind draining = {.way = UCCH_IN_STREAMS, .advance_locked = drain_locked};

/* A call has failed; `differs` is its number if other ranks made a different call, else 0. Its streams, and threads
 * that wait for them, must go on; before that the ranks are told which results are undefined. No other call waits for
 * the counters written here, but a peer's stream may overwrite them with smaller values: they are written again until
 * all streams have passed. */
void ucch_channels_fail_locked(ucch_channels *c, uint64_t differs) {
    if (c->failed) return;
    c->failed = 1;
    ucch_channels_room(c);
    for (int i = 0; i < c->size * UCCH_RINGS; i++)
        if (c->out[i].flow) ucch_flow_differs(c->out[i].flow, differs);
    __atomic_store_n(c->tainted, c->landed + 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < c->size * UCCH_RINGS; i++)
        if (c->out[i].flow) ucch_flow_wake(c->out[i].flow);
    __atomic_store_n(&c->graphs.words->stop.word, 1, __ATOMIC_SEQ_CST);
    release_streams(c);
    c->drain.kind = &draining;
    ucch_op_begin_locked(&c->drain, 0);
}
