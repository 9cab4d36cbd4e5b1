/* One direction of a ring between two hosts. Its slots are on both: the sender's stream fills one here and counts it as
 * published, threads send it, the receiver's threads have it put into the same slot there and publish it, and once the
 * receiver's stream has taken it out and counted it as consumed, a credit for the slot goes back.
 *
 * A slot is cut into ranges, which the wires take in turn, so that all of them carry a long piece and one a short one,
 * and each range has a receive posted ahead. Before the first range is a header, by which the receiver knows that both
 * ranks made the same call: pieces are published once the receiver has made its own, which says how long a piece is due
 * and of what call, and only if that fits. */
#define _GNU_SOURCE
#include "net/flow.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "base/trace.h"

#define MOST UCCH_MOST_WIRES
#define MAP_FIELDS (0x1 | 0x2 | 0x10) /* address, length, memory type */
/* Rounds of progress until receives that were taken back have ended. */
#define ROUNDS 1000
/* Bytes of a range. */
#define LEAST ((size_t)64 << 10)
#define LONGEST ((size_t)UCCH_WIRE_RANGE)
#define PAGE ((size_t)4096)

/* Kinds of messages, in the tag below the flow's own bits: data by the number of its range, behind which are the
 * others. */
enum { DATA, CREDIT, ABORT, KINDS };
#define NOTES ((1 << UCCH_FLOW_TAG_BIT) - KINDS)

/* Piece that this rank has called for, with the call's number and a hash of it. */
typedef struct due {
    uint64_t bytes, call, hash;
} due;

/* A message of a few numbers to or from a peer; `request` while it is under way. */
typedef struct note {
    ucch_flow *flow;
    void *request;
    int which, done; /* by which wire it comes */
    ucp_tag_recv_info_t received;
    uint64_t said[2];
} note;

/* Receive of a range: how many have come, how many of these are published, and the last piece of them. Of a sender's
 * range it is the last send's event in the timeline. */
typedef struct range_state {
    note posted;
    uint64_t arrived, taken, piece, event;
} range_state;

/* A wire's part in a flow: pieces whose ranges it has sent. */
typedef struct share {
    ucch_poller poller; /* first */
    ucch_flow *flow;
    int which;
    uint64_t count;
    int under_way; /* sends that libucp has */
    int news;      /* something has been received, or is to be posted again */
    const int *lost;
    ucp_ep_h ep;
    ucp_mem_h slots; /* as registered for the wire; NULL: libucp sees to it */
} share;

struct ucch_flow {
    ucch_slots ring;
    int sends, nwires, first; /* the wire that carries first ranges, and what the ranks tell each other */
    int ranges;               /* of a slot */
    size_t range;             /* bytes of one */
    uint64_t tag, key;        /* the peer's */
    uint64_t since;           /* when the timeline has the flow begin to await what it awaits */
    int failed;
    uint64_t differs; /* the first call that the ranks have made in different ways; 0: none */
    pthread_mutex_t lock;
    due *dues;                 /* of pieces from `settled` on, by their number */
    uint64_t room;             /* of them */
    uint64_t expected;         /* pieces called for */
    uint64_t settled;          /* pieces published here (a receiver's), or consumed there (a sender's) */
    uint64_t told;             /* pieces consumed, as the receiver has told the sender */
    range_state *range_states; /* by range of all slots */
    note abort, credit;
    share shares[MOST];
};

/* ---- small things ---- */

static ucch_slot_header *slot_of(const ucch_flow *f, uint64_t piece) {
    return (ucch_slot_header *)(f->ring.slots + piece % (uint64_t)f->ring.depth * f->ring.stride);
}

/* The first call, plus one, whose data here is undefined; 0 while there is none. */
static uint64_t tainted_from(const ucch_flow *f) { return __atomic_load_n(f->ring.tainted_here, __ATOMIC_ACQUIRE); }

/* Number of the wire: each one that sends is followed by one that receives. */
static int wire_of(const ucch_flow *f, int which) { return 2 * which + !f->sends; }

/* The wire that a range goes by; of several flows not the same one first. */
static int carrier_of(const ucch_flow *f, int range) { return (f->first + range) % f->nwires; }

/* Bytes of a range: so few that each wire has one of a slot's, or each has as many. */
static size_t range_for(size_t slot, int nwires) {
    size_t once = (size_t)nwires * LONGEST, each = (slot + once - 1) / once;
    size_t part = (slot / ((size_t)nwires * each) + PAGE - 1) / PAGE * PAGE;
    return part < LEAST ? LEAST : part;
}

/* Ranges of a piece of so many bytes: one at least, for the header. */
static int ranges_of(const ucch_flow *f, size_t bytes) {
    return bytes <= f->range ? 1 : (int)((bytes + f->range - 1) / f->range);
}

/* Where a range begins, the header included in the first. */
static char *range_of(const ucch_flow *f, uint64_t piece, int range) {
    return (char *)slot_of(f, piece) + (range ? UCCH_FLOW_HEADER + (size_t)range * f->range : 0);
}

/* Bytes of a range of a piece. */
static size_t length_of(const ucch_flow *f, size_t bytes, int range) {
    size_t from = (size_t)range * f->range, left = bytes - from;
    return (range ? 0 : UCCH_FLOW_HEADER) + (left < f->range ? left : f->range);
}

/* Number of a range among those of all slots. */
static int index_of(const ucch_flow *f, uint64_t piece, int range) {
    return (int)(piece % (uint64_t)f->ring.depth) * f->ranges + range;
}

static int failed(const ucch_flow *f) { return __atomic_load_n(&f->failed, __ATOMIC_ACQUIRE); }

static void fail(ucch_flow *f, int status) {
    int none = 0;
    __atomic_compare_exchange_n(&f->failed, &none, status, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Why the flow carries nothing any more, as far as call `number` is concerned: 0 while it does. */
int ucch_flow_failed(const ucch_flow *f, uint64_t number) {
    int status = failed(f);
    return status == UCCH_FAIL_MISMATCH && number < __atomic_load_n(&f->differs, __ATOMIC_ACQUIRE) ? 0 : status;
}

static void differ(ucch_flow *f, uint64_t call) {
    __atomic_store_n(&f->differs, call, __ATOMIC_RELEASE);
    fail(f, UCCH_FAIL_MISMATCH);
}

static void fail_by(ucch_flow *f, int ucs) {
    fail(f, ucs == UCS_ERR_MESSAGE_TRUNCATED ? UCCH_FAIL_MISMATCH
                                             : UCCH_FAIL_PEER); /* of a mismatch, any call may be it */
}

static ucp_request_param_t params_of(void *callback, void *data, ucp_mem_h memory) {
    ucp_request_param_t params = ucch_ucp_params(callback, data, UCS_MEMORY_TYPE_HOST);
    params.op_attr_mask |= memory ? UCP_OP_ATTR_FIELD_MEMH : 0;
    params.memh = memory;
    return params;
}

static uint64_t tag_of(const ucch_flow *f, int kind, uint64_t which) {
    return f->tag | (kind == DATA ? which : (uint64_t)(NOTES + kind));
}

/* ---- messages ---- */

static void note_ended(note *n, int status) {
    n->request = NULL;
    n->done = status == 0;
    if (status && status != UCS_ERR_CANCELED) fail_by(n->flow, status);
}

static void note_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    note *n = data;
    ucp_request_free(request);
    n->received = *info;
    n->flow->shares[n->which].news = 1;
    note_ended(n, status);
}

static void note_sent(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    note_ended(data, status);
}

static void begun(note *n, void *request) {
    if (request == NULL || IS_STATUS(request))
        note_ended(n, STATUS_OF(request));
    else
        n->request = request;
}

static void receive(int which, note *n, void *into, size_t bytes, int kind, uint64_t index) {
    ucp_mem_h memory = kind == DATA ? n->flow->shares[which].slots : NULL;
    ucp_request_param_t params = params_of((void *)note_received, n, memory);
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO; /* where it is there already */
    params.recv_info = &n->received;
    n->which = which;
    n->done = 0;
    begun(n, ucp_tag_recv_nbx(ucch_wire_worker(wire_of(n->flow, which)), into, bytes, tag_of(n->flow, kind, index),
                              ~(uint64_t)0, &params));
}

/* By the first wire. */
static void receive_note(note *n, int kind) { receive(n->flow->first, n, n->said, sizeof(n->said), kind, 0); }

static void send_note(note *n, int kind) {
    ucp_request_param_t params = params_of((void *)note_sent, n, NULL);
    n->done = 0;
    begun(n, ucp_tag_send_nbx(n->flow->shares[n->flow->first].ep, n->said, sizeof(n->said), tag_of(n->flow, kind, 0),
                              &params));
}

/* ---- a sender's turn ---- */

static void ended(range_state *l, int status) {
    ucch_trace_end(l->event, status);
    l->event = 0;
}

static void range_sent(void *request, ucs_status_t status, void *data) {
    range_state *l = data;
    ucch_flow *f = l->posted.flow;
    ucp_request_free(request);
    f->shares[carrier_of(f, (int)(l - f->range_states) % f->ranges)].under_way--;
    ended(l, status);
    if (status && status != UCS_ERR_CANCELED) fail_by(f, status);
}

static void send_range(ucch_flow *f, int which, uint64_t piece, size_t bytes, int range) {
    range_state *l = &f->range_states[index_of(f, piece, range)];
    ucp_request_param_t params = params_of((void *)range_sent, l, f->shares[which].slots);
    ended(l, 0); /* a credit may be here before libucp says so */
    if (UCCH_TRACING)
        l->event = ucch_trace_begin_wire(wire_of(f, which), f->key, length_of(f, bytes, range), ucch_now_ns());
    void *request = ucp_tag_send_nbx(f->shares[which].ep, range_of(f, piece, range), length_of(f, bytes, range),
                                     tag_of(f, DATA, (uint64_t)index_of(f, piece, range)), &params);
    if (request && !IS_STATUS(request)) {
        f->shares[which].under_way++;
        return;
    }
    if (request) fail_by(f, STATUS_OF(request));
    ended(l, STATUS_OF(request));
}

/* A piece, as its rank's host has called for it or its kernel has written. */
static due about(ucch_flow *f, uint64_t piece) {
    const ucch_slot_header *s = slot_of(f, piece);
    if (f->ring.by_device) return (due){.bytes = __atomic_load_n(&s->bytes, __ATOMIC_ACQUIRE)};
    ucch_take(&f->lock, UCCH_AT_FLOW);
    due found = f->dues[piece % f->room];
    ucch_give(&f->lock, UCCH_AT_FLOW);
    return found;
}

/* Wake the wires that have ranges of so many bytes. */
static void wake_for(const ucch_flow *f, size_t bytes) {
    for (int range = 0; range < ranges_of(f, bytes) && range < f->nwires; range++)
        ucch_wire_mark(wire_of(f, carrier_of(f, range)));
    ucch_wires_wake(wire_of(f, f->first), 1);
}

/* Send a wire's ranges of a piece. */
static void send_piece(ucch_flow *f, int which, uint64_t piece) {
    due d = about(f, piece);
    ucch_slot_header *s = slot_of(f, piece);
    if (__atomic_load_n(&f->settled, __ATOMIC_SEQ_CST) > piece) return; /* this may have been a later one's */
    if (which == f->first) { /* the rest is there already where a kernel has written it, and others read it */
        if (!f->ring.by_device) *s = (ucch_slot_header){d.call, d.hash, d.bytes, 0, 0, 0, {0}};
        s->number = piece;
        s->tainted = tainted_from(f);
        s->differs = __atomic_load_n(&f->differs, __ATOMIC_ACQUIRE); /* written before */
        if (f->ring.by_device) wake_for(f, d.bytes);
    }
    for (int range = 0; range < ranges_of(f, d.bytes); range++)
        if (carrier_of(f, range) == which) send_range(f, which, piece, d.bytes, range);
}

/* Take note of credits: the sender's stream may fill the slots again. */
static int on_credit(ucch_flow *f) {
    if (!f->credit.done) return 0;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    __atomic_store_n(&f->settled, f->credit.said[0], __ATOMIC_RELEASE);
    ucch_give(&f->lock, UCCH_AT_FLOW);
    __atomic_store_n(&f->told, f->credit.said[0], __ATOMIC_RELEASE);
    if (f->ring.by_device) __atomic_store_n(f->ring.consumed + 1, (uint32_t)f->credit.said[1], __ATOMIC_RELEASE);
    __atomic_store_n(f->ring.consumed, (uint32_t)f->credit.said[0], __ATOMIC_RELEASE);
    receive_note(&f->credit, CREDIT);
    return UCCH_MOVED;
}

static int send_abort(ucch_flow *f) {
    uint64_t first = tainted_from(f);
    if (!first || !f->ring.tells || f->abort.said[0]) return 0;
    f->abort.said[0] = first;
    f->abort.said[1] = __atomic_load_n(&f->differs, __ATOMIC_ACQUIRE);
    send_note(&f->abort, ABORT);
    return UCCH_MOVED;
}

static int turn_of_sender(ucch_flow *f, int which) {
    share *s = &f->shares[which];
    int found = 0;
    uint64_t settled = __atomic_load_n(&f->settled, __ATOMIC_ACQUIRE);
    s->count = s->count < settled ? settled : s->count; /* there was nothing for this wire in those */
    for (; ucch_reached(f->ring.published, (uint32_t)s->count + 1); s->count++) {
        send_piece(f, which, s->count);
        found = UCCH_MOVED;
    }
    if (f->ring.by_device && which == f->first) __atomic_store_n(&f->expected, s->count, __ATOMIC_RELEASE);
    uint64_t expected = __atomic_load_n(&f->expected, __ATOMIC_ACQUIRE);
    if (which != f->first) {
        found |= f->ring.by_device ? UCCH_RUNG_LATE : 0;
        return found | (s->under_way || s->count < expected ? UCCH_AWAITED : 0);
    }
    found |= on_credit(f) | (f->ring.by_device ? UCCH_WATCHED : 0);
    return found | (f->told < expected ? UCCH_AWAITED : 0);
}

/* ---- a receiver's turn ---- */

/* Ranges of a piece, if all of it is there; 0 where it is not. */
static int complete(const ucch_flow *f, uint64_t piece) {
    int ranges = 1;
    for (int range = 0; range < ranges && range < f->ranges; range++) {
        const range_state *l = &f->range_states[index_of(f, piece, range)];
        if (__atomic_load_n(&l->arrived, __ATOMIC_ACQUIRE) == l->taken) return 0;
        if (!range) ranges = ranges_of(f, slot_of(f, piece)->bytes);
    }
    return ranges;
}

static void take(ucch_flow *f, uint64_t piece, int ranges) {
    for (int range = 0; range < ranges && range < f->ranges; range++) {
        range_state *l = &f->range_states[index_of(f, piece, range)];
        __atomic_store_n(&l->piece, piece, __ATOMIC_RELAXED);
        __atomic_store_n(&l->taken, l->taken + 1, __ATOMIC_RELEASE);
    }
}

/* The sender's data is garbage from a call on, as it says; and whether ranks called different things. */
static void note_tainted(ucch_flow *f, uint64_t tainted, uint64_t differs) {
    if (tainted && differs) differ(f, differs);
    if (tainted) __atomic_store_n(f->ring.tainted_there, tainted, __ATOMIC_RELEASE);
}

/* True if a piece is the one that this rank has called for; kernels that are replayed see to that themselves. */
static int fits(ucch_flow *f, const ucch_slot_header *s) {
    const due *d = &f->dues[f->settled % f->room];
    if (f->ring.by_device ||
        (s->call == d->call && s->hash == d->hash && s->bytes == d->bytes && s->number == f->settled))
        return 1;
    differ(f, s->call < d->call ? s->call : d->call);
    return 0;
}

/* Publish what has arrived and was called for, in order, if it fits. With the flow's lock. */
static void settle_arrivals(ucch_flow *f) {
    uint64_t before = f->settled;
    for (int ranges;
         (f->ring.by_device || f->settled < f->expected) && !failed(f) && (ranges = complete(f, f->settled));) {
        const ucch_slot_header *s = slot_of(f, f->settled);
        note_tainted(f, s->tainted, s->differs);
        if (!fits(f, s)) break;
        take(f, f->settled, ranges);
        __atomic_store_n(&f->settled, f->settled + 1, __ATOMIC_RELEASE);
    }
    if (f->settled != before) __atomic_store_n(f->ring.published, (uint32_t)f->settled, __ATOMIC_RELEASE);
}

static void post_range(ucch_flow *f, int which, int index) {
    size_t slot = f->ring.stride - UCCH_FLOW_HEADER;
    uint64_t piece = (uint64_t)(index / f->ranges); /* any that goes there */
    int range = index % f->ranges;
    receive(which, &f->range_states[index].posted, range_of(f, piece, range), length_of(f, slot, range), DATA,
            (uint64_t)index);
}

/* Note a range in the timeline: under way, as far as one can tell, since the flow has had something to await. */
static void note_arrival(const ucch_flow *f, int which, size_t bytes) {
    if (!UCCH_TRACING) return;
    int awaited = __atomic_load_n(&f->settled, __ATOMIC_ACQUIRE) < __atomic_load_n(&f->expected, __ATOMIC_ACQUIRE);
    uint64_t now = ucch_now_ns(), since = awaited ? __atomic_load_n(&f->since, __ATOMIC_RELAXED) : now;
    ucch_trace_end(ucch_trace_begin_wire(wire_of(f, which), f->key, bytes, since ? since : now), 0);
}

/* Of a wire's ranges: count what has come in, and post again the receives of what has been taken out. */
static int look_at_ranges(ucch_flow *f, int which, int *waiting) {
    int found = 0, news = f->shares[which].news;
    f->shares[which].news = 0;
    for (int i = 0; news && i < f->ring.depth * f->ranges; i++) {
        range_state *l = &f->range_states[i];
        if (carrier_of(f, i % f->ranges) != which || l->posted.request) continue;
        if (l->posted.done) {
            l->posted.done = 0;
            note_arrival(f, which, l->posted.received.length);
            __atomic_store_n(&l->arrived, l->arrived + 1, __ATOMIC_RELEASE);
            found = UCCH_MOVED;
        } else if (__atomic_load_n(&l->taken, __ATOMIC_ACQUIRE) == l->arrived &&
                   ucch_reached(f->ring.consumed, (uint32_t)__atomic_load_n(&l->piece, __ATOMIC_RELAXED) + 1))
            post_range(f, which, i);
        f->shares[which].news |= !l->posted.request;
    }
    *waiting |= f->shares[which].news;
    return found;
}

static int on_abort(ucch_flow *f) {
    if (!f->abort.done) return 0;
    f->abort.done = 0;
    note_tainted(f, f->abort.said[0], f->abort.said[1]);
    return UCCH_MOVED;
}

/* By the first wire: the sender may fill again what has been taken out. */
static int send_credit(ucch_flow *f) {
    uint32_t more = __atomic_load_n(f->ring.consumed, __ATOMIC_ACQUIRE) - (uint32_t)f->told;
    if (!more || f->credit.request) return 0;
    f->credit.said[0] = f->told + more;
    f->credit.said[1] = f->ring.by_device ? f->ring.consumed[1] : 0; /* the last message of a lane that was refused */
    __atomic_store_n(&f->told, f->credit.said[0], __ATOMIC_RELEASE);
    send_note(&f->credit, CREDIT);
    return UCCH_MOVED;
}

static int turn_of_receiver(ucch_flow *f, int which) {
    int waiting = 0, found = look_at_ranges(f, which, &waiting);
    if (found) {
        ucch_take(&f->lock, UCCH_AT_FLOW);
        settle_arrivals(f);
        if (f->ring.by_device) __atomic_store_n(&f->expected, f->settled, __ATOMIC_RELEASE);
        ucch_give(&f->lock, UCCH_AT_FLOW);
    }
    if (f->ring.by_device) found |= UCCH_WATCHED;
    uint64_t expected = __atomic_load_n(&f->expected, __ATOMIC_ACQUIRE);
    if (which == f->first) {
        found |= send_credit(f);
        waiting |= f->told < expected || f->credit.request;
    }
    waiting |= __atomic_load_n(&f->settled, __ATOMIC_ACQUIRE) < expected;
    return found | (waiting ? UCCH_AWAITED : 0);
}

/* Called by the threads of all of its wires, each with its wire's lock. */
static int turn(ucch_poller *poller) {
    const share *s = (share *)poller;
    ucch_flow *f = s->flow;
    int which = s->which, found = 0;
    if (__atomic_load_n(s->lost, __ATOMIC_ACQUIRE)) fail(f, UCCH_FAIL_PEER);
    if (!failed(f)) found = f->sends ? turn_of_sender(f, which) : turn_of_receiver(f, which);
    if (which == f->first && failed(f) != UCCH_FAIL_PEER) found |= f->sends ? send_abort(f) : on_abort(f);
    /* Once a call has failed here, no thread waits for the rest. */
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
    __atomic_store_n(&f->expected, piece + 1, __ATOMIC_RELEASE);
    return 0;
}

/* This rank's call `number` brings, or takes, so many bytes more, in pieces of which all but the last have `piece`;
 * before its stream does. 0, or a failure. */
int ucch_flow_due(ucch_flow *f, size_t bytes, size_t piece, uint64_t number, uint64_t hash) {
    size_t left = bytes, one;
    int status;
    ucch_take(&f->lock, UCCH_AT_FLOW);
    do {
        one = left < piece ? left : piece;
        status = note_due(f, (due){one, number, hash});
    } while (!status && (left -= one));
    if (!status && !f->sends) settle_arrivals(f);
    ucch_give(&f->lock, UCCH_AT_FLOW);
    if (!status) wake_for(f, bytes < piece ? bytes : piece);
    return status;
}

/* A call is about to fail here, and data to be garbage (`tainted_here`): note from which call on the ranks differ, if
 * that is why, as a sender's peer is to know. */
void ucch_flow_differs(ucch_flow *f, uint64_t call) { __atomic_store_n(&f->differs, call, __ATOMIC_RELEASE); }

/* A failure has come, of which the peer is to be told, or a stream will put data in soon: nothing else tells the
 * thread. */
void ucch_flow_wake(ucch_flow *f) { ucch_wire_wake(wire_of(f, f->first)); }

/* ---- making and ending flows ---- */

/* With the wire's lock: have the wire serve its share. */
static int join(ucch_flow *f, int which, uint64_t key) {
    share *s = &f->shares[which];
    s->poller.turn = turn;
    s->flow = f;
    s->which = which;
    s->ep = ucch_wire_endpoint(wire_of(f, which), key, &s->lost);
    /* Once for all that goes through them: it takes longer than a range on its way. */
    ucp_mem_map_params_t slots = {
        .field_mask = MAP_FIELDS, .address = f->ring.slots, .memory_type = UCS_MEMORY_TYPE_HOST};
    slots.length = (size_t)f->ring.depth * f->ring.stride;
    if (ucp_mem_map(ucch_wire_context(wire_of(f, which)), &slots, &s->slots)) s->slots = NULL;
    if (!s->ep) return UCCH_FAIL_PEER;
    ucch_wire_serve(wire_of(f, which), &s->poller);
    for (int i = 0; !f->sends && i < f->ring.depth * f->ranges; i++)
        if (carrier_of(f, i % f->ranges) == which) post_range(f, which, i);
    s->news = 1;
    if (which == f->first && f->sends)
        receive_note(&f->credit, CREDIT);
    else if (which == f->first && f->ring.tells)
        receive_note(&f->abort, ABORT);
    return 0;
}

/* A direction of a ring with process `key`, over the first `nwires` wires; `tag`, alike on both sides, tells it from
 * all others between two processes. The ring's words are 0. NULL: it cannot be. */
ucch_flow *ucch_flow_new(const ucch_slots *ring, int sends, int nwires, uint64_t key, uint64_t tag) {
    ucch_flow *f = calloc(1, sizeof(*f));
    if (!f) return NULL;
    *f = (ucch_flow){.ring = *ring, .sends = sends, .nwires = nwires, .tag = tag, .room = 64};
    f->key = key;
    f->first = (int)((tag >> UCCH_FLOW_SPREAD_BIT) % (uint64_t)nwires);
    f->range = range_for(ring->stride - UCCH_FLOW_HEADER, nwires);
    f->ranges = ranges_of(f, ring->stride - UCCH_FLOW_HEADER);
    size_t all = (size_t)ring->depth * (size_t)f->ranges;
    pthread_mutex_init(&f->lock, NULL);
    f->abort.flow = f->credit.flow = f;
    f->dues = calloc(f->room, sizeof(*f->dues));
    f->range_states = calloc(all, sizeof(*f->range_states));
    int status = f->dues && f->range_states ? 0 : UCCH_FAIL_MEMORY;
    for (size_t i = 0; !status && i < all; i++)
        f->range_states[i].posted.flow = f;
    for (int i = 0; i < nwires && !status; i++) {
        ucch_wire_lock(wire_of(f, i));
        status = join(f, i, key);
        ucch_wire_unlock(wire_of(f, i));
    }
    if (status) ucch_flow_free(f);
    return status ? NULL : f;
}

/* True if all pieces that were called for have been consumed, and their sender knows. */
int ucch_flow_quiet(const ucch_flow *f) {
    uint32_t consumed = __atomic_load_n(f->ring.consumed, __ATOMIC_ACQUIRE);
    if (f->ring.by_device)
        return consumed == __atomic_load_n(f->ring.published, __ATOMIC_ACQUIRE) && (uint32_t)f->told == consumed;
    return __atomic_load_n(&f->told, __ATOMIC_ACQUIRE) == __atomic_load_n(&f->expected, __ATOMIC_ACQUIRE);
}

/* Count the requests that libucp has of a wire's part in a flow. Receives are taken back if so wanted. */
static int held(ucch_flow *f, int which, int cancel) {
    note *notes[] = {&f->credit, &f->abort};
    int many = f->shares[which].under_way, all = f->sends || !f->range_states ? 0 : f->ring.depth * f->ranges;
    for (int i = -2; i < all; i++) {
        note *n = i < 0 ? notes[i + 2] : &f->range_states[i].posted;
        if ((i < 0 ? f->first : carrier_of(f, i % f->ranges)) != which || !n->request) continue;
        many++;
        if (cancel && (n == &f->credit) == f->sends)
            ucp_request_cancel(ucch_wire_worker(wire_of(f, which)), n->request);
    }
    return many;
}

/* Nothing is under way any more, here and there: give everything back. Not 0: libucp still has something of it, and it
 * stays, with its ring. */
int ucch_flow_free(ucch_flow *f) {
    int left = 0;
    for (int i = 0; i < f->nwires; i++) {
        ucch_wire_lock(wire_of(f, i));
        held(f, i, 1);
        for (int k = 0; k < ROUNDS && held(f, i, 0); k++)
            ucp_worker_progress(ucch_wire_worker(wire_of(f, i)));
        int still = held(f, i, 0);
        left += still;
        if (!still && f->shares[i].slots) ucp_mem_unmap(ucch_wire_context(wire_of(f, i)), f->shares[i].slots);
        ucch_wire_dismiss(wire_of(f, i), &f->shares[i].poller);
        ucch_wire_unlock(wire_of(f, i));
    }
    if (left) return left;
    pthread_mutex_destroy(&f->lock);
    free(f->dues);
    free(f->range_states);
    free(f);
    return 0;
}
