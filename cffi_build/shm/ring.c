/* Rings of pinned memory between ranks, and the counters by which their streams pass them to each other.
 *
 * A channel is a ring in memory of the sender's (segment.c). The sender's stream copies a piece into it and writes how
 * many there are, the receiver's stream waits for that, copies the piece out and writes how many it has taken: two
 * devices of any vendors, and no host in between. Words only grow. Between hosts the receiver has such a ring, too, and
 * network threads keep the two alike (net/flow.c): the streams see no difference. */
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
/* Parts of a flow's tag. */
#define TO_BIT UCCH_FLOW_TAG_BIT
#define FROM_BIT 29
#define SERIAL_BIT 44

/* Bytes of a slot between hosts, at least. */
#define LEAST_SLOT ((size_t)16 << 10)

/* Lines of a part's header: counters of the channels to other ranks, and of those from other hosts; ends of calls; what
 * is garbage, here and by what other hosts say; and zeros, which stay. */
#define ZERO_LINES (UCCH_MOST_MOVES * sizeof(uint32_t) / LINE + 1)
enum { OUT_WORDS, IN_WORDS, ENDS, TAINTED, ZEROS, HEADER_END };

static size_t line_of(int what, int size) {
    size_t n = (size_t)size;
    size_t lines[] = {[OUT_WORDS] = 2 * n, [IN_WORDS] = 2 * n,   [ENDS] = MOST_CALLS,
                      [TAINTED] = 1 + n,   [ZEROS] = ZERO_LINES, [HEADER_END] = 0};
    size_t first = 0;
    for (int i = 0; i < what; i++)
        first += lines[i];
    return first;
}

static size_t header_of(int size) {
    return (line_of(HEADER_END, size) * LINE + HEADER_GRAIN - 1) / HEADER_GRAIN * HEADER_GRAIN;
}

static size_t near_ring(size_t far) {
    return far < NEAR_RING ? far : NEAR_RING;
}

static size_t stride_of(size_t slot) {
    return UCCH_FLOW_HEADER + slot;
}

static size_t wire_ring(size_t slot) {
    return (WIRE_DEPTH * stride_of(slot) + PAGE - 1) / PAGE * PAGE;
}

/* Other ranks of a rank's host, in its island and not, and those of other hosts. */
enum { NEAR, FAR, AWAY, KINDS };

static int kind_of(const int *islands, const int *hosts, int one, int other) {
    return hosts[one] != hosts[other] ? AWAY : islands[one] == islands[other] ? NEAR : FAR;
}

/* Bytes of the rings between ranks that rank `rank` can have with `room` for all it needs; zeros where that is too
 * little. `slot` is what a slot between hosts has at most. */
ucch_ring_sizes ucch_channels_offer(int rank, int size, const int *islands, const int *hosts, size_t room,
                                    size_t slot) {
    size_t many[KINDS] = {0}, header = header_of(size);
    for (int i = 0; i < size; i++)
        if (i != rank)
            many[kind_of(islands, hosts, rank, i)]++;
    ucch_ring_sizes none = {0, 0};
    if (room < header)
        return none;
    size_t left = room - header, equal = left / (many[NEAR] + many[FAR] + 2 * many[AWAY] + !size);
    while (slot >= LEAST_SLOT && many[AWAY] && wire_ring(slot) > equal)
        slot /= 2;
    left -= 2 * many[AWAY] * wire_ring(slot);
    size_t far = equal; /* all alike where there is little */
    if (many[FAR] && equal > NEAR_RING)
        far = (left - many[NEAR] * NEAR_RING) / many[FAR];
    far = far < MOST_RING ? far / (SHARED_DEPTH * PAGE) * (SHARED_DEPTH * PAGE) : MOST_RING;
    return far < LEAST_RING || slot < LEAST_SLOT ? none : (ucch_ring_sizes){far, slot};
}

/* Bytes of what one rank has for another: a ring to it, and between hosts one from it. */
static size_t rings_of(const ucch_channels *c, int one, int other) {
    const size_t bytes[] = {
        [NEAR] = near_ring(c->sizes.far), [FAR] = c->sizes.far, [AWAY] = 2 * wire_ring(c->sizes.slot)};
    return one == other ? 0 : bytes[kind_of(c->islands, c->hosts, one, other)];
}

/* Place in a rank's part of what it has for another; of rank `size`: where the part ends. */
static size_t place_of(const ucch_channels *c, int owner, int other) {
    size_t at = header_of(c->size);
    for (int i = 0; i < other; i++)
        at += rings_of(c, owner, i);
    return at;
}

static void forget(ucch_channels *c) {
    for (int i = 0; c->parts && i < c->size; i++)
        if (c->parts[i])
            ucch_mapping_give(c->parts[i]);
    free(c->parts);
    free(c->islands);
    free(c->hosts);
    free(c->out);
    free(c->in);
    free(c);
}

/* Channels of rank `rank` of `size`, with rings of these sizes; NULL where there is no memory. */
ucch_channels *ucch_channels_new(int rank, int size, const int *islands, const int *hosts, ucch_ring_sizes sizes) {
    ucch_channels *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    c->out = calloc((size_t)size, sizeof(*c->out));
    c->in = calloc((size_t)size, sizeof(*c->in));
    c->islands = calloc((size_t)size, sizeof(int));
    c->hosts = calloc((size_t)size, sizeof(int));
    c->parts = calloc((size_t)size, sizeof(*c->parts));
    c->rank = rank;
    c->size = size;
    c->sizes = sizes;
    pthread_mutex_init(&c->called.lock, NULL);
    int well = c->out && c->in && c->islands && c->hosts && c->parts;
    if (well) {
        memcpy(c->islands, islands, (size_t)size * sizeof(int));
        memcpy(c->hosts, hosts, (size_t)size * sizeof(int));
        c->parts[rank] = ucch_mapping_new(place_of(c, rank, size));
    }
    if (!well || !c->parts[rank]) {
        forget(c);
        return NULL;
    }
    memset(c->parts[rank]->memory, 0, header_of(size));
    return c;
}

/* The file with a rank's part; its peers have to know. */
int ucch_channels_file(const ucch_channels *c) {
    return c->parts[c->rank]->file;
}

static ucch_counter counter_at(const ucch_mapping *part, size_t line) {
    return (ucch_counter){(uint32_t *)(part->memory + line * LINE), part->seen + line * LINE};
}

/* The channel to `other` of the same host, in rank `owner`'s part. */
static ucch_channel shared_channel(const ucch_channels *c, int owner, int other) {
    const ucch_mapping *part = c->parts[owner];
    size_t at = place_of(c, owner, other), slot = rings_of(c, owner, other) / SHARED_DEPTH;
    size_t line = line_of(OUT_WORDS, c->size) + 2 * (size_t)other;
    return (ucch_channel){.published = counter_at(part, line),
                          .consumed = counter_at(part, line + 1),
                          .ring = part->memory + at,
                          .seen = part->seen + at,
                          .slot = slot,
                          .stride = slot,
                          .depth = SHARED_DEPTH,
                          .tainted = (uint64_t *)counter_at(part, line_of(TAINTED, c->size)).at};
}

/* A channel to or from `other` of another host, in our own part. */
static ucch_channel wire_channel(const ucch_channels *c, int other, int comes) {
    const ucch_mapping *part = c->parts[c->rank];
    size_t at = place_of(c, c->rank, other) + (comes ? wire_ring(c->sizes.slot) : 0) + UCCH_FLOW_HEADER;
    size_t line = line_of(comes ? IN_WORDS : OUT_WORDS, c->size) + 2 * (size_t)other;
    return (ucch_channel){.published = counter_at(part, line),
                          .consumed = counter_at(part, line + 1),
                          .ring = part->memory + at,
                          .seen = part->seen + at,
                          .slot = c->sizes.slot,
                          .stride = stride_of(c->sizes.slot),
                          .depth = WIRE_DEPTH,
                          .tainted = (uint64_t *)counter_at(part, line_of(TAINTED, c->size) + 1 + (size_t)other).at};
}

/* Get to know the part of rank `peer` of this host, a file of process `key`; our own first. 0, or a failure. */
int ucch_channels_meet(ucch_channels *c, int peer, uint64_t key, int pid, int file) {
    if (ucch_bound() < 0)
        return UCCH_FAIL_DEVICE;
    if (peer != c->rank)
        c->parts[peer] = ucch_mapping_open(key, pid, file, place_of(c, peer, c->size));
    int status = c->parts[peer] ? ucch_mapping_pin(c->parts[peer]) : UCCH_FAIL_PEER;
    if (status)
        return status;
    if (peer != c->rank) {
        c->in[peer] = shared_channel(c, peer, c->rank);
        return 0;
    }
    const ucch_mapping *own = c->parts[peer];
    c->tainted = (uint64_t *)counter_at(own, line_of(TAINTED, c->size)).at;
    for (int other = 0; other < c->size; other++)
        if (other != peer && c->hosts[other] == c->hosts[peer])
            c->out[other] = shared_channel(c, peer, other);
    for (size_t i = 0; i < MOST_CALLS; i++)
        c->done[i] = counter_at(own, line_of(ENDS, c->size) + i);
    return 0;
}

/* One way between two ranks over wires, told apart by a communicator's `serial` and the ranks. */
static ucch_flow *flow_of(ucch_channels *c, ucch_channel *channel, int from, int to, uint64_t key, uint64_t serial) {
    ucch_slots ring = {.slots = channel->ring - UCCH_FLOW_HEADER,
                       .stride = channel->stride,
                       .depth = WIRE_DEPTH,
                       .published = channel->published.at,
                       .consumed = channel->consumed.at,
                       .tainted_here = c->tainted,
                       .tainted_there = channel->tainted,
                       .calls = &c->called};
    uint64_t tag = serial << SERIAL_BIT | (uint64_t)from << FROM_BIT | (uint64_t)to << TO_BIT;
    return ucch_flow_new(&ring, from == c->rank, c->nwires, key, tag);
}

/* Reach rank `peer` of another host, which is process `key`, over the first `nwires` wires, which know it; after our
 * own part. 0, or a failure. */
int ucch_channels_carry(ucch_channels *c, int peer, uint64_t key, int nwires, uint64_t serial) {
    c->nwires = nwires;
    c->out[peer] = wire_channel(c, peer, 0);
    c->in[peer] = wire_channel(c, peer, 1);
    c->out[peer].flow = flow_of(c, &c->out[peer], c->rank, peer, key, serial);
    c->in[peer].flow = flow_of(c, &c->in[peer], peer, c->rank, key, serial);
    return c->out[peer].flow && c->in[peer].flow ? 0 : UCCH_FAIL_PEER;
}

static int count_from_zero(ucch_channels *c) {
    const device_ops *ops = ucch_bound_ops();
    const char *zeros = (const char *)counter_at(c->parts[c->rank], line_of(ZEROS, c->size)).at;
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
    c->await = ucch_kernel_of(&(ucch_task){.kind = UCCH_AWAIT});
    c->post = ucch_kernel_of(&(ucch_task){.kind = UCCH_POST});
    if (!status)
        status = count_from_zero(c);
    /* A try: what a stream cannot do is seen here. */
    if (!status)
        status = ucch_counter_wait((ucch_counter){NULL, c->done[0].seen}, 0, c->await, c->lane[0]);
    return status ? status : ucch_counter_signal(c->done[0], 0, c->post, c->lane[0]);
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
    int held = 0;
    for (int i = 0; i < c->size; i++) {
        held |= c->out[i].flow && ucch_flow_free(c->out[i].flow);
        held |= c->in[i].flow && ucch_flow_free(c->in[i].flow);
    }
    if (!held) /* libucp may still write to the rings */
        forget(c);
}

/* Whether all that went into a channel has been taken out, and its sender knows that. */
static int emptied(const ucch_channel *channel) {
    if (channel->flow)
        return ucch_flow_quiet(channel->flow);
    return __atomic_load_n(channel->consumed.at, __ATOMIC_ACQUIRE) == ucch_channel_pieces(channel);
}

/* Whether all that was queued has ended, and all that was sent has been taken; -1 when that will never be known,
 * because a call has failed. */
int ucch_channels_quiet(ucch_channels *c) {
    ucch_lock();
    ucch_channels_room(c);
    int quiet = c->failed ? -1 : c->landed == c->calls;
    for (int i = 0; i < c->size && quiet > 0; i++)
        quiet = i == c->rank || (emptied(&c->out[i]) && emptied(&c->in[i]));
    ucch_unlock();
    return quiet;
}

/* ---- calls ---- */

static uint32_t generation(uint64_t call) {
    return (uint32_t)(call / MOST_CALLS + 1);
}

int ucch_channels_done(const ucch_channels *c, ucch_ticket ticket) {
    return ucch_reached(c->done[ticket.slot].at, ticket.value);
}

/* Whether one more call may be under way. */
int ucch_channels_room(ucch_channels *c) {
    while (c->landed < c->calls && ucch_reached(c->done[c->landed % MOST_CALLS].at, generation(c->landed)))
        c->landed++;
    return c->calls - c->landed < MOST_CALLS;
}

/* Number that the next call writes at its end. */
ucch_ticket ucch_channels_ticket(ucch_channels *c) {
    ucch_ticket ticket = {(uint32_t)(c->calls % MOST_CALLS), generation(c->calls)};
    c->calls++;
    return ticket;
}

/* A call that could not be queued: no stream will say that it has ended. */
void ucch_channels_forfeit(ucch_channels *c, ucch_ticket ticket) {
    __atomic_store_n(c->done[ticket.slot].at, ticket.value, __ATOMIC_RELEASE);
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
        if (i != c->rank &&
            (!ucch_reached(c->in[i].published.at, ucch_channel_pieces(&c->in[i])) ||
             !ucch_reached(c->out[i].consumed.at, ucch_channel_pieces(&c->out[i]) - (uint32_t)c->out[i].depth)))
            return 1;
    return 0;
}

/* Why nothing comes from another host any more for call `number`, and from which rank; 0 while all is well. */
int ucch_channels_lost(const ucch_channels *c, uint64_t number, int *rank) {
    for (int i = 0; c->nwires && i < c->size; i++)
        for (int comes = 0; comes < 2; comes++) {
            const ucch_flow *flow = comes ? c->in[i].flow : c->out[i].flow;
            int status = flow ? ucch_flow_failed(flow, number) : 0;
            *rank = i;
            if (status)
                return status;
        }
    return 0;
}

/* ---- failures ---- */

static int taints(const uint64_t *tainted, uint64_t call) {
    uint64_t first = __atomic_load_n(tainted, __ATOMIC_ACQUIRE);
    return first && call + 1 >= first;
}

/* A rank that let its streams go on without what they waited for, before they had done this call's part: what they sent
 * then is garbage, also by way of others. -1 for none. Calls are counted alike on all ranks. */
int ucch_channels_tainted_by(const ucch_channels *c, ucch_ticket ticket) {
    uint64_t call = ((uint64_t)ticket.value - 1) * MOST_CALLS + ticket.slot;
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && taints(c->in[i].tainted, call))
            return i;
    return taints(c->tainted, call) ? c->rank : -1;
}

static void let_go(const ucch_channels *c) {
    for (int i = 0; i < c->size; i++) {
        if (i == c->rank)
            continue;
        __atomic_store_n(c->out[i].consumed.at, ucch_channel_pieces(&c->out[i]), __ATOMIC_RELEASE);
        __atomic_store_n(c->in[i].published.at, ucch_channel_pieces(&c->in[i]), __ATOMIC_RELEASE);
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

/* A call failed, `differs` by its number if others have called something else, or 0: its streams, and whoever waits for
 * them, must go on; all are told first what is not to be believed then. Nobody else waits for the counters that are
 * written here, but a peer's stream may write smaller numbers after us: it is done again until all is over. */
void ucch_channels_fail_locked(ucch_channels *c, uint64_t differs) {
    if (c->failed)
        return;
    c->failed = 1;
    ucch_channels_room(c);
    for (int i = 0; i < c->size; i++)
        if (c->out[i].flow)
            ucch_flow_differs(c->out[i].flow, differs);
    __atomic_store_n(c->tainted, c->landed + 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < c->size; i++)
        if (c->out[i].flow)
            ucch_flow_abort(c->out[i].flow);
    let_go(c);
    c->drain.kind = &draining;
    ucch_op_begin_locked(&c->drain, 0);
}
