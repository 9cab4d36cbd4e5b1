/* A flow: one direction of a ring between two hosts, which both have its slots. The sender's stream fills a slot and
 * counts it as published. Wires send it into the same slot on the receiver's host, where it is published. When the
 * receiver's stream has taken it out and counted it as consumed, the sender is told.
 *
 * A piece in a slot is cut into ranges. The next free wire takes the next range, unless it has WINDOW bytes of the flow
 * in flight: a connection that loses packets or has a slower link carries less, and does not hold up the others. All
 * wires together may have SHARE of their windows in flight: if a connection uses less than its window, after losing a
 * packet, others use more. The link's other direction has as much to carry, and a queue there delays acknowledgements.
 *
 * Each slot's data has a header, by which the receiver checks that both ranks made the same call. A piece is published
 * only when the receiver has made its own call, which states the expected size and call of each piece, and only if they
 * match. */
#include "net/net.h"

#include <stdlib.h>
#include <string.h>

#define MOST UCCH_MOST_WIRES
#define MAP_FIELDS (0x1 | 0x2 | 0x10) /* address, length, memory type */
/* Rounds of progress to let sends to a dead peer end. */
#define ROUNDS 1000
/* Bytes of a range, at least and at most. */
#define LEAST ((size_t)64 << 10)
#define LONGEST ((size_t)UCCH_WIRE_RANGE)
#define PAGE ((size_t)4096)
/* Most bytes that a wire may have in flight for a flow. The receiver acknowledges each quarter of it. What a connection
 * accepts at once is no measure: the kernel buffers megabytes. */
#define WINDOW ((size_t)1 << 20)
_Static_assert(WINDOW / LONGEST >= 4, "the receiver says something each time that a range or more has come");
/* Share of all windows that a flow may have in flight, in eighths. */
#define SHARE 6
/* Ranges that a wire sends in one turn. */
#define AT_ONCE 2

/* Kinds of messages: a range of a piece; to the sender: acknowledged pieces and ranges; to the receiver: the first call
 * whose data is undefined. */
enum { DATA, ACK, ABORT };

/* Header of a message. */
typedef struct envelope {
    uint64_t tag;            /* first */
    uint64_t number, more;   /* DATA: the piece. TAKEN: pieces consumed, and a lane's last refused message. ABORT: the
                                first undefined call, and the first call that differs between the ranks. */
    uint32_t kind, range, n; /* DATA: range of n. TAKEN: n ranges received by this wire so far */
} envelope;

/* A piece that this rank's call expects, with the call's number and hash. */
typedef struct due {
    uint64_t bytes, call, hash;
} due;

/* State of a range that is being sent: the wire that has it until libucp has sent it; `event` in the timeline. */
typedef struct sending {
    struct share *by;
    uint64_t event;
    envelope envelope;
} sending;

/* State of a receiver's slot: ranges that have come, and ranges of its piece. */
typedef struct filling {
    uint32_t came, ranges;
} filling;

/* One wire's share of a flow. */
typedef struct share {
    ucch_poller poller; /* first */
    ucch_flow *flow;
    int which;
    int under_way;                   /* requests that libucp has not completed */
    int has_new_data;                /* data has come since the last turn */
    uint32_t sent, confirmed;        /* ranges sent, and ranges acknowledged */
    uint32_t received, acknowledged; /* ranges received, and ranges acknowledged to the sender */
    int note_in_flight;              /* `note` is being sent */
    envelope note;
    ucch_connection *with;
    ucp_mem_h slots; /* the slots as registered for this wire; NULL: libucp registers them */
} share;

struct ucch_flow {
    ucch_slots ring;
    int sends, nwires, first; /* first: the wire that carries short pieces and control messages */
    int ranges;               /* per slot */
    size_t range;             /* bytes per range */
    uint32_t window;          /* most ranges that a wire may have in flight */
    uint32_t most, on_way;    /* ranges in flight of all wires: limit and current number */
    uint64_t tag, key;        /* key: of the peer process */
    uint64_t since;           /* start of the current wait, for the timeline */
    int failed;
    uint64_t differs; /* the first call that differs between the ranks; 0: none */
    pthread_mutex_t lock;
    due *dues;                /* expected pieces from `settled` on, by number modulo `room` */
    uint64_t room;            /* capacity of `dues` */
    uint64_t expected;        /* number of pieces that calls expect */
    uint64_t settled;         /* pieces published here (receiver), or consumed by the peer (sender) */
    uint64_t acked;           /* pieces consumed that were acknowledged to the sender */
    uint64_t next;            /* the piece whose range `next_range` is sent next, and its size */
    int next_range, is_begun; /* is_begun: the header of its slot is written */
    size_t next_bytes;
    int aborted;       /* the receiver has been told of a failure */
    sending *sendings; /* sender: by range of each slot */
    filling *fillings; /* receiver: by slot */
    share shares[MOST];
};

/* ---- small things ---- */

static ucch_slot_header *slot_of(const ucch_flow *f, uint64_t piece) {
    return (ucch_slot_header *)(f->ring.slots + piece % (uint64_t)f->ring.depth * f->ring.stride);
}

/* The first call whose data is undefined here; 0: none. */
static uint64_t tainted_from(const ucch_flow *f) { return UCCH_LOAD(f->ring.tainted_here); }

/* Number of a wire: sending and receiving wires alternate. */
static int wire_of(const ucch_flow *f, int which) { return 2 * which + !f->sends; }

/* True if this wire may carry ranges of a piece with `ranges` ranges; wires that carry none are not woken. */
static int may_carry(const ucch_flow *f, int which, int ranges) {
    return (which - f->first + f->nwires) % f->nwires < ranges;
}

/* Bytes of a range: each wire gets the same number of ranges of a full slot. */
static size_t range_for(size_t slot, int nwires) {
    size_t once = (size_t)nwires * LONGEST, each = (slot + once - 1) / once;
    size_t part = (slot / ((size_t)nwires * each) + PAGE - 1) / PAGE * PAGE;
    return part < LEAST ? LEAST : part;
}

/* Ranges of a piece: at least one, for the header. */
static int ranges_of(const ucch_flow *f, size_t bytes) {
    return bytes <= f->range ? 1 : (int)((bytes + f->range - 1) / f->range);
}

/* Address of a range; the first includes the header. */
static char *range_of(const ucch_flow *f, uint64_t piece, uint32_t range) {
    return (char *)slot_of(f, piece) + (range ? UCCH_FLOW_HEADER + (size_t)range * f->range : 0);
}

/* Bytes of a range of a piece, with the header if it is the first. */
static size_t length_of(const ucch_flow *f, size_t bytes, int range) {
    size_t from = (size_t)range * f->range, left = bytes - from;
    return (range ? 0 : UCCH_FLOW_HEADER) + (left < f->range ? left : f->range);
}

static int failed(const ucch_flow *f) { return UCCH_LOAD(&f->failed); }

static void fail(ucch_flow *f, int status) {
    int none = 0;
    __atomic_compare_exchange_n(&f->failed, &none, status, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Why the flow no longer carries data for call `number`; 0: it does. */
int ucch_flow_failed(const ucch_flow *f, uint64_t number) {
    int status = failed(f);
    return status == UCCH_FAIL_MISMATCH && number < UCCH_LOAD(&f->differs) ? 0 : status;
}

static void differ(ucch_flow *f, uint64_t call) {
    UCCH_STORE(&f->differs, call);
    fail(f, UCCH_FAIL_MISMATCH);
}

static ucp_request_param_t params_of(void *callback, void *data, ucp_mem_h memory) {
    ucp_request_param_t params = ucch_ucp_params(callback, data, UCS_MEMORY_TYPE_HOST);
    params.op_attr_mask |= memory ? UCP_OP_ATTR_FIELD_MEMH : 0;
    params.memh = memory;
    return params;
}

/* A request has ended. */
static void ended(ucch_flow *f, int status) {
    if (status && status != UCS_ERR_CANCELED) fail(f, UCCH_FAIL_CONNECTION);
}

/* Returns 1 if libucp will call back for this request; else it has ended. */
static int is_pending(share *s, void *request) {
    int is_begun = request && !IS_STATUS(request);
    s->under_way += is_begun;
    if (!is_begun) ended(s->flow, STATUS_OF(request));
    return is_begun;
}

static void note_sent(void *request, ucs_status_t status, void *data) {
    share *s = data;
    ucp_request_free(request);
    s->under_way--;
    s->note_in_flight = 0;
    ended(s->flow, status);
}

/* Send a control message, unless one is in flight. */
static void send_note(share *s, envelope note) {
    ucp_request_param_t params = params_of((void *)note_sent, s, NULL);
    note.tag = s->flow->tag;
    s->note = note;
    s->note_in_flight = is_pending(
        s, ucch_wire_send(wire_of(s->flow, s->which), s->with->ep, &s->note, sizeof(s->note), NULL, 0, &params));
}

/* ---- a sender's turn ---- */

static void range_ended(sending *r, int status) {
    ucch_trace_end(r->event, status);
    UCCH_STORE(&r->by, NULL);
}

static void range_sent(void *request, ucs_status_t status, void *data) {
    sending *r = data;
    ucp_request_free(request);
    r->by->under_way--;
    ended(r->by->flow, status);
    range_ended(r, status);
}

static sending *sending_of(const ucch_flow *f, uint64_t piece, int range) {
    return &f->sendings[(int)(piece % (uint64_t)f->ring.depth) * f->ranges + range];
}

/* A range of a piece of `bytes` bytes. */
typedef struct piece_range {
    uint64_t piece;
    size_t bytes;
    int range;
} piece_range;

static void send_range(share *s, piece_range which) {
    ucch_flow *f = s->flow;
    sending *r = sending_of(f, which.piece, which.range);
    ucp_request_param_t params = params_of((void *)range_sent, r, s->slots);
    size_t length = length_of(f, which.bytes, which.range);
    uint32_t range = (uint32_t)which.range, ranges = (uint32_t)ranges_of(f, which.bytes);
    r->envelope = (envelope){f->tag, which.piece, 0, DATA, range, ranges};
    r->event = UCCH_TRACING ? ucch_trace_begin_wire(wire_of(f, s->which), f->key, length, ucch_now_ns()) : 0;
    s->sent++;
    void *request = ucch_wire_send(wire_of(f, s->which), s->with->ep, &r->envelope, sizeof(r->envelope),
                                   range_of(f, which.piece, range), length, &params);
    if (!is_pending(s, request)) range_ended(r, STATUS_OF(request));
}

/* Wake the wires that may carry ranges of a piece of this size. */
static void wake_for(const ucch_flow *f, size_t bytes) {
    for (int i = 0; i < ranges_of(f, bytes) && i < f->nwires; i++)
        ucch_wire_mark(wire_of(f, (f->first + i) % f->nwires));
    ucch_wires_wake(wire_of(f, f->first), 1);
}

/* Write the header of the next piece, from this rank's call; a kernel has written it itself (`by_device`). With the
 * flow's lock. */
static void begin_piece(ucch_flow *f) {
    ucch_slot_header *s = slot_of(f, f->next);
    const due *d = &f->dues[f->next % f->room];
    f->next_bytes = f->ring.by_device ? UCCH_LOAD(&s->bytes) : d->bytes;
    /* a kernel has written the other fields, which other threads read */
    if (!f->ring.by_device) *s = (ucch_slot_header){d->call, d->hash, d->bytes, 0, 0, 0, {0}};
    s->number = f->next;
    s->tainted = tainted_from(f);
    s->differs = UCCH_LOAD(&f->differs); /* written before `tainted`, so read after it */
    f->is_begun = 1;
    if (f->ring.by_device) wake_for(f, f->next_bytes);
}

/* True if there is a piece to send, and the receiver has consumed the previous piece in its slot. */
static int has_piece(const ucch_flow *f) {
    uint64_t next = UCCH_LOAD(&f->next);
    return next < UCCH_LOAD(&f->settled) + (uint64_t)f->ring.depth &&
           ucch_reached(f->ring.published, (uint32_t)next + 1);
}

/* Take the next range if this wire may carry it, and libucp has finished with the previous one at its place (the
 * acknowledgement may come earlier). */
static int take_next(share *s, piece_range *taken) {
    ucch_flow *f = s->flow;
    if (!has_piece(f)) return 0;
    sending *r = sending_of(f, f->next, f->next_range);
    if (f->on_way >= f->most || UCCH_LOAD(&r->by)) return 0;
    if (!f->is_begun) begin_piece(f);
    int ranges = ranges_of(f, f->next_bytes);
    if (!may_carry(f, s->which, ranges)) return 0;
    *taken = (piece_range){f->next, f->next_bytes, f->next_range};
    r->by = s;
    f->on_way++;
    f->next_range = (taken->range + 1) % ranges;
    f->is_begun = f->next_range != 0;
    if (!f->is_begun) UCCH_STORE(&f->next, taken->piece + 1);
    return 1;
}

/* Send the next range, if there is one for this wire. Returns 1 if sent. */
static int send_next(share *s) {
    ucch_flow *f = s->flow;
    piece_range taken;
    if (s->sent - s->confirmed >= f->window || !has_piece(f)) return 0;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    int found = take_next(s, &taken);
    ucch_give(&f->lock, UCCH_AT_FLOW);
    if (found) send_range(s, taken);
    return found;
}

/* An acknowledgement: the sender's stream may refill slots, and fewer ranges are in flight. */
static void on_ack(share *s, const envelope *e) {
    ucch_flow *f = s->flow;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    f->on_way -= e->n - s->confirmed;
    s->confirmed = e->n;
    if (e->number > f->acked) {
        UCCH_STORE(&f->settled, e->number);
        UCCH_STORE(&f->acked, e->number);
        if (f->ring.by_device) UCCH_STORE(f->ring.consumed + 1, (uint32_t)e->more);
        UCCH_STORE(f->ring.consumed, (uint32_t)e->number);
    }
    ucch_give(&f->lock, UCCH_AT_FLOW);
}

static int send_abort(share *s) {
    ucch_flow *f = s->flow;
    uint64_t first = tainted_from(f);
    if (!first || !f->ring.tells || f->aborted || s->note_in_flight) return 0;
    f->aborted = 1;
    send_note(s, (envelope){.kind = ABORT, .number = first, .more = UCCH_LOAD(&f->differs)});
    return UCCH_MOVED;
}

static int turn_of_sender(share *s) {
    ucch_flow *f = s->flow;
    int found = 0, is_first = s->which == f->first;
    for (int i = 0; i < AT_ONCE && send_next(s); i++)
        found = UCCH_MOVED;
    uint64_t next = UCCH_LOAD(&f->next);
    if (f->ring.by_device) {
        if (is_first) UCCH_STORE(&f->expected, next);
        found |= is_first ? UCCH_WATCHED : UCCH_RUNG_LATE;
    }
    uint64_t expected = UCCH_LOAD(&f->expected);
    int waits = is_first ? UCCH_LOAD(&f->acked) < expected : s->under_way || next < expected;
    return found | (waits ? UCCH_AWAITED : 0);
}

/* ---- a receiver's turn ---- */

/* Note the first undefined call of the sender, and whether the ranks' calls differ. */
static void note_tainted(ucch_flow *f, uint64_t tainted, uint64_t differs) {
    if (tainted && differs) differ(f, differs);
    if (tainted) UCCH_STORE(f->ring.tainted_there, tainted);
}

/* True if the piece is the expected one. Replayed kernels check that themselves. */
static int is_expected(ucch_flow *f, const ucch_slot_header *s) {
    const due *d = &f->dues[f->settled % f->room];
    if (f->ring.by_device ||
        (s->call == d->call && s->hash == d->hash && s->bytes == d->bytes && s->number == f->settled))
        return 1;
    differ(f, s->call < d->call ? s->call : d->call);
    return 0;
}

static filling *filling_of(const ucch_flow *f, uint64_t piece) { return &f->fillings[piece % (uint64_t)f->ring.depth]; }

/* `came` is read first: until the first range has come, `ranges` is that of the slot's previous piece. */
static int is_complete(const filling *l) {
    uint32_t came = UCCH_LOAD(&l->came);
    return came && came == __atomic_load_n(&l->ranges, __ATOMIC_RELAXED);
}

/* Publish pieces that have come and match what this rank expects, in order. With the flow's lock. */
static void publish_arrivals(ucch_flow *f) {
    uint64_t before = f->settled;
    for (filling *l;
         (f->ring.by_device || f->settled < f->expected) && !failed(f) && is_complete(l = filling_of(f, f->settled));) {
        const ucch_slot_header *s = slot_of(f, f->settled);
        note_tainted(f, s->tainted, s->differs);
        if (!is_expected(f, s)) break;
        __atomic_store_n(&l->came, 0, __ATOMIC_RELAXED);
        UCCH_STORE(&f->settled, f->settled + 1);
    }
    if (f->settled != before) UCCH_STORE(f->ring.published, (uint32_t)f->settled);
    if (f->ring.by_device) UCCH_STORE(&f->expected, f->settled);
}

/* Record a range in the timeline; its beginning is not known here, so it is when the flow began to wait. */
static void note_arrival(const share *s, size_t bytes) {
    const ucch_flow *f = s->flow;
    if (!UCCH_TRACING) return;
    int awaited = UCCH_LOAD(&f->settled) < UCCH_LOAD(&f->expected);
    uint64_t now = ucch_now_ns(), since = awaited ? __atomic_load_n(&f->since, __ATOMIC_RELAXED) : now;
    ucch_trace_end(ucch_trace_begin_wire(wire_of(f, s->which), f->key, bytes, since ? since : now), 0);
}

/* A range has been stored in its slot. */
static void range_came(share *s, size_t bytes, filling *l) {
    ucch_flow *f = s->flow;
    note_arrival(s, bytes);
    s->received++;
    s->has_new_data = 1;
    if (__atomic_add_fetch(&l->came, 1, __ATOMIC_ACQ_REL) != __atomic_load_n(&l->ranges, __ATOMIC_RELAXED)) return;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    publish_arrivals(f);
    ucch_give(&f->lock, UCCH_AT_FLOW);
}

/* A range that libucp fetches from the sender. */
typedef struct fetch {
    share *by;
    filling *into;
} fetch;

static void fetched(void *request, ucs_status_t status, size_t bytes, void *data) {
    fetch l = *(fetch *)data;
    free(data);
    ucp_request_free(request);
    l.by->under_way--;
    ended(l.by->flow, status);
    if (!status) range_came(l.by, bytes, l.into);
}

static ucs_status_t fetch_range(share *s, filling *l, char *into, const ucch_packet *m) {
    fetch *data = malloc(sizeof(*data));
    if (!data) return UCS_ERR_NO_MEMORY;
    *data = (fetch){s, l};
    ucp_request_param_t params = params_of((void *)fetched, data, s->slots);
    void *request =
        ucp_am_recv_data_nbx(ucch_wire_worker(wire_of(s->flow, s->which)), m->data, into, m->bytes, &params);
    if (is_pending(s, request)) return UCS_INPROGRESS;
    if (!request) range_came(s, m->bytes, l);
    free(data);
    return UCS_INPROGRESS;
}

static ucs_status_t receive_range(share *s, const envelope *e, const ucch_packet *m) {
    ucch_flow *f = s->flow;
    uint64_t ahead = e->number - UCCH_LOAD(&f->settled);
    if (ahead >= (uint64_t)f->ring.depth || e->range >= e->n || e->n > (uint32_t)f->ranges ||
        m->bytes > length_of(f, f->ring.stride - UCCH_FLOW_HEADER, (int)e->range)) {
        fail(f, UCCH_FAIL_MISMATCH); /* for any call */
        return UCS_OK;
    }
    filling *l = filling_of(f, e->number);
    char *into = range_of(f, e->number, e->range);
    __atomic_store_n(&l->ranges, e->n, __ATOMIC_RELAXED);
    if (m->is_later) return fetch_range(s, l, into, m);
    memcpy(into, m->data, m->bytes);
    range_came(s, m->bytes, l);
    return UCS_OK;
}

/* Acknowledge ranges received by this wire, a quarter of the window at a time; the first wire also acknowledges
 * consumed pieces. */
static int send_ack(share *s) {
    ucch_flow *f = s->flow;
    int is_first = s->which == f->first;
    uint32_t more = is_first ? UCCH_LOAD(f->ring.consumed) - (uint32_t)f->acked : 0;
    if (s->note_in_flight || (!more && s->received - s->acknowledged < f->window / 4)) return 0;
    uint64_t taken = is_first ? f->acked + more : 0, refused = f->ring.by_device ? f->ring.consumed[1] : 0;
    s->acknowledged = s->received;
    if (more) UCCH_STORE(&f->acked, taken);
    send_note(s, (envelope){.kind = ACK, .number = taken, .more = refused, .n = s->received});
    return UCCH_MOVED;
}

static int turn_of_receiver(share *s) {
    ucch_flow *f = s->flow;
    int found = (s->has_new_data ? UCCH_MOVED : 0) | (f->ring.by_device ? UCCH_WATCHED : 0) | send_ack(s);
    uint64_t expected = UCCH_LOAD(&f->expected);
    s->has_new_data = 0;
    int waits = UCCH_LOAD(&f->settled) < expected || s->note_in_flight || (s->which == f->first && f->acked < expected);
    return found | (waits ? UCCH_AWAITED : 0);
}

/* ---- callbacks of the wire, with its lock ---- */

static ucs_status_t on_message(ucch_poller *poller, const ucch_packet *m) {
    share *s = (share *)poller;
    ucch_flow *f = s->flow;
    int status = failed(f);
    envelope e;
    if (m->header_bytes != sizeof(e)) return UCS_OK;
    memcpy(&e, m->header, sizeof(e));
    if (e.kind == ABORT && status != UCCH_FAIL_CONNECTION) note_tainted(f, e.number, e.more);
    if (e.kind == ACK && !status) on_ack(s, &e);
    return e.kind == DATA && !status ? receive_range(s, &e, m) : UCS_OK;
}

static int turn(ucch_poller *poller) {
    share *s = (share *)poller;
    ucch_flow *f = s->flow;
    int found = 0;
    if (UCCH_LOAD(&s->with->failed)) fail(f, UCCH_FAIL_CONNECTION);
    if (!failed(f)) found = f->sends ? turn_of_sender(s) : turn_of_receiver(s);
    if (f->sends && s->which == f->first && failed(f) != UCCH_FAIL_CONNECTION) found |= send_abort(s);
    /* after a failed call no thread waits for the rest */
    return tainted_from(f) ? found & UCCH_MOVED : found;
}

/* ---- calls ---- */

static int make_room(ucch_flow *f) {
    uint64_t room = 2 * f->room;
    due *more = malloc(room * sizeof(*more));
    if (!more) return UCCH_FAIL_MEMORY;
    for (uint64_t i = f->settled; i < f->expected; i++)
        more[i % room] = f->dues[i % f->room];
    free(f->dues);
    f->dues = more;
    f->room = room;
    return 0;
}

static int note_due(ucch_flow *f, due d) {
    uint64_t piece = f->expected;
    if (UCCH_TRACING && piece == f->settled) __atomic_store_n(&f->since, ucch_now_ns(), __ATOMIC_RELAXED);
    int status = piece - f->settled == f->room ? make_room(f) : 0;
    if (status) return status;
    f->dues[piece % f->room] = d;
    UCCH_STORE(&f->expected, piece + 1);
    return 0;
}

/* Expect a message of call `number`: `bytes` bytes in pieces of `piece`, the last of which may be shorter. Called
 * before the stream moves it. Returns 0 or a failure. */
int ucch_flow_expect(ucch_flow *f, size_t bytes, size_t piece, uint64_t number, uint64_t hash) {
    size_t left = bytes, one;
    int status;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    do {
        one = left < piece ? left : piece;
        status = note_due(f, (due){one, number, hash});
    } while (!status && (left -= one));
    if (!status && !f->sends) publish_arrivals(f);
    ucch_give(&f->lock, UCCH_AT_FLOW);
    if (!status) wake_for(f, bytes < piece ? bytes : piece);
    return status;
}

/* A call is about to fail here (`tainted_here`); `call` is the first that differs between the ranks if that is the
 * cause, to tell the sender's peer. */
void ucch_flow_differs(ucch_flow *f, uint64_t call) { UCCH_STORE(&f->differs, call); }

/* Wake the flow's first wire: there is a failure to tell the peer, or a stream will publish a piece soon, and nothing
 * else wakes the thread. */
void ucch_flow_wake(ucch_flow *f) { ucch_wire_wake(wire_of(f, f->first)); }

/* ---- start and end of flows ---- */

/* Add one wire's share as its poller; with the wire's lock. */
static int add_share(ucch_flow *f, int which, uint64_t key) {
    share *s = &f->shares[which];
    s->flow = f;
    s->which = which;
    s->with = ucch_wire_connection(wire_of(f, which), key);
    /* register once: registering takes longer than sending a range */
    ucp_mem_map_params_t slots = {
        .field_mask = MAP_FIELDS, .address = f->ring.slots, .memory_type = UCS_MEMORY_TYPE_HOST};
    slots.length = (size_t)f->ring.depth * f->ring.stride;
    if (ucp_mem_map(ucch_wire_context(wire_of(f, which)), &slots, &s->slots)) s->slots = NULL;
    if (!s->with) return UCCH_FAIL_CONNECTION;
    s->poller = (ucch_poller){.turn = turn, .on_message = on_message, .tag = f->tag};
    ucch_wire_add_poller(wire_of(f, which), &s->poller);
    return 0;
}

/* A direction of a ring with process `key` over the first `nwires` wires. `tag` is the same on both sides and unique in
 * both processes. The ring's counters are 0. NULL on failure. */
ucch_flow *ucch_flow_new(const ucch_slots *ring, int sends, int nwires, uint64_t key, uint64_t tag) {
    ucch_flow *f = calloc(1, sizeof(*f));
    if (!f) return NULL;
    size_t slot = ring->stride - UCCH_FLOW_HEADER;
    *f = (ucch_flow){.ring = *ring, .sends = sends, .nwires = nwires, .tag = tag, .key = key, .room = 64};
    uint64_t alike = 1; /* wires before the first slower one: only these carry short pieces */
    while (alike < (uint64_t)nwires && !ucch_wire_slower(wire_of(f, (int)alike)))
        alike++;
    f->first = (int)((tag >> UCCH_FLOW_SPREAD_BIT) % alike);
    f->range = range_for(slot, nwires);
    f->ranges = ranges_of(f, slot);
    f->window = (uint32_t)(WINDOW / f->range);
    f->most = nwires > 1 ? f->window * (uint32_t)nwires * SHARE / 8 : f->window;
    pthread_mutex_init(&f->lock, NULL);
    f->dues = calloc(f->room, sizeof(*f->dues));
    if (sends)
        f->sendings = calloc((size_t)ring->depth * (size_t)f->ranges, sizeof(*f->sendings));
    else
        f->fillings = calloc((size_t)ring->depth, sizeof(*f->fillings));
    int status = f->dues && (f->sendings || f->fillings) ? 0 : UCCH_FAIL_MEMORY;
    for (int i = 0; i < nwires && !status; i++) {
        ucch_wire_lock(wire_of(f, i));
        status = add_share(f, i, key);
        ucch_wire_unlock(wire_of(f, i));
    }
    if (status) ucch_flow_free(f);
    return status ? NULL : f;
}

/* True if all expected pieces have been consumed, and the sender knows. */
int ucch_flow_quiet(const ucch_flow *f) {
    uint32_t consumed = UCCH_LOAD(f->ring.consumed);
    uint64_t acked = UCCH_LOAD(&f->acked);
    if (f->ring.by_device) return consumed == UCCH_LOAD(f->ring.published) && (uint32_t)acked == consumed;
    return acked == UCCH_LOAD(&f->expected);
}

/* Free the flow; nothing may be in flight on either side. Returns not 0 if libucp still has requests: then flow and
 * ring are kept. */
int ucch_flow_free(ucch_flow *f) {
    int left = 0;
    for (int i = 0; i < f->nwires; i++) {
        share *s = &f->shares[i];
        ucch_wire_lock(wire_of(f, i));
        for (int k = 0; k < ROUNDS && s->under_way; k++)
            ucp_worker_progress(ucch_wire_worker(wire_of(f, i)));
        left += s->under_way;
        if (!s->under_way && s->slots) ucp_mem_unmap(ucch_wire_context(wire_of(f, i)), s->slots);
        ucch_wire_remove_poller(wire_of(f, i), &s->poller);
        ucch_wire_unlock(wire_of(f, i));
    }
    if (left) return left;
    pthread_mutex_destroy(&f->lock);
    free(f->dues);
    free(f->sendings);
    free(f->fillings);
    free(f);
    return 0;
}
