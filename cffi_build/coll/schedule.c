/* Queues whole calls in streams when they are made: copies to and from the channels of other ranks, kernels,
 * collectives of the vendor's library, and the waits between them. The devices then run the call alone: a host that
 * polled would call the driver, which delays other threads that launch work.
 *
 * The order of queueing prevents deadlock between ranks, even where a device runs all streams one after the other. It
 * goes stage by stage through the plan, which is the same on every rank: first the vendor's collectives; then the
 * messages: short ones over wires by one kernel, the others in rounds of a chunk per channel, in the plan's order, and
 * sends a round before their receives. */
#include <stdlib.h>

#include "coll/coll.h"

/* Calls that move fewer bytes run in the caller's stream alone: several streams cost more than they gain. */
#define ALONE_BYTES ((uint64_t)256 << 10)
/* Kernels in a graph that wait have few blocks. Longer moves are left to copies and to kernels that do not wait. */
#define LONG_MOVE ((size_t)1 << 20)
/* Pieces of each message that a kernel in a graph sends before it waits for a piece. Its moves run one after the other,
 * so this keeps other ranks and wires busy. Fewer than the slots of a ring. */
#define AHEAD 3
/* Kernel that moves short messages over wires: threads per block, most blocks per direction, and bytes of a piece per
 * block. */
#define COPY_THREADS 512
#define COPY_BLOCKS 2
#define COPY_SLICE ((uint64_t)16 << 10)

/* A counter that is still to be set, and its value. */
typedef struct pending {
    ucch_counter counter;
    uint32_t value;
} pending;

typedef struct queue {
    ucch_program *p;
    ucch_channels *c;
    ucch_launch *l;
    void *stream;       /* the caller's stream */
    int alone;          /* everything goes into the caller's stream */
    ucch_moves *fused;  /* moves of the kernel that does all of it, or NULL */
    int independent;    /* in a graph, several kernels: moves of one kernel do not depend on each other */
    int flushed;        /* the last step in a kernel that was launched */
    int bank;           /* bank of scratch; -1: none */
    pending to_tell[2]; /* of sends and of receives: set by the driver call that has their stream wait next */
    int turn;
    int used[STREAMS], seen[STREAMS][STREAMS], last[STREAMS];
} queue;

static int wait_for(void *stream, void *event) {
    return ucch_device_fail(ucch_bound_ops()->stream_wait(stream, event), "a stream's wait");
}

/* ---- kernels and waits ---- */

/* Launch the kernel of the moves so far. Pieces of channels are counted from here. */
static int flush(queue *q) {
    ucch_channels *c = q->c;
    if (q->p->is.in_graph && !q->independent) ucch_fused_join(q->p, q->fused);
    int status = q->fused->n ? ucch_fused_launch(q->p, q->fused, q->independent, q->stream) : 0;
    q->fused->n = 0;
    q->flushed = q->turn;
    for (int i = 0; q->p->is.in_graph && i < 2 * c->size * UCCH_RINGS; i++)
        if (c->out[i].steps) c->out[i].pieces = 0;
    return status;
}

static int wait_counter(queue *q, ucch_counter counter, uint32_t least, void *stream) {
    if (!q->fused || ucch_reached(counter.at, least)) return ucch_counter_wait(counter, least, q->c->await, stream);
    return ucch_fused_add(q->fused, (ucch_move){.wait = counter.seen, .least = least});
}

static int signal_counter(queue *q, ucch_counter counter, uint32_t value, void *stream) {
    return q->fused ? ucch_fused_add(q->fused, (ucch_move){.tell = counter.seen, .value = value})
                    : ucch_counter_signal(counter, value, q->c->await, stream);
}

static int wait_call(queue *q, uint64_t call, void *stream) {
    if (ucch_channels_done(q->c, call)) return 0;
    return wait_counter(q, q->c->done[call % MOST_CALLS], ucch_generation(call), stream);
}

/* ---- around the call ---- */

/* Order the caller's stream, which the other streams follow, behind earlier calls in one stream and those that used the
 * same scratch. */
static int follow_calls(queue *q) {
    int status = wait_call(q, q->c->alone, q->stream);
    return status || q->bank < 0 ? status : wait_call(q, q->c->user[q->bank], q->stream);
}

/* Order the caller's stream behind all earlier calls of the communicator, in any stream. */
static int begin_alone(queue *q) {
    ucch_channels *c = q->c;
    int status = wait_call(q, c->alone, q->stream);
    for (int i = 0; i < STREAMS && !status; i++)
        if (c->ahead[i]) {
            status = ucch_stream_follow(c->tail[i], c->streams[i], q->stream);
            c->ahead[i] = 0;
        }
    return status;
}

static void *stream_of(const queue *q, int which) { return q->alone ? q->stream : q->c->streams[which]; }

/* True if STREAM_LOCAL, which the caller's stream waits for, is behind everything in the other stream. */
static int behind_local(const queue *q, int other) {
    return q->used[STREAM_LOCAL] && q->last[other] && q->seen[STREAM_LOCAL][other] == q->last[other];
}

/* Let the caller's stream wait for the other streams, and signal the call's end. */
static int end_call(queue *q) {
    ucch_channels *c = q->c;
    int status = 0;
    for (int i = 0; i < STREAMS && !status; i++)
        if (q->used[i] && c->streams[i] != q->stream && !behind_local(q, i))
            status = ucch_stream_follow(c->tail[i], c->streams[i], q->stream);
    uint64_t call = q->l->call;
    if (q->bank >= 0) c->user[q->bank] = call;
    if (q->alone) c->alone = call;
    if (!status) status = signal_counter(q, c->done[call % MOST_CALLS], ucch_generation(call), q->stream);
    return status || !q->fused ? status : flush(q);
}

/* ---- steps ---- */

/* Let the stream of `s` wait for the steps that `s` depends on; of each other stream the last such step is enough. At
 * its first use in this call the stream waits for the caller's, unless such a step has. */
static int wait_for_deps(queue *q, const ucch_step *s) {
    const ucch_step *last[STREAMS] = {NULL};
    int own = ucch_stream_of(s), behind = q->used[own], status = 0;
    for (int k = 0; q->independent && k < s->is.ndeps; k++)
        if (q->p->steps[s->is.deps[k]].turn > q->flushed) return flush(q);
    if (q->alone) return 0;
    for (int k = 0; k < s->is.ndeps; k++) {
        const ucch_step *earlier = &q->p->steps[s->is.deps[k]];
        int other = ucch_stream_of(earlier);
        if (other != own && (!last[other] || earlier->turn > last[other]->turn)) last[other] = earlier;
    }
    q->used[own] = q->c->ahead[own] = 1;
    for (int other = 0; other < STREAMS && !status; other++)
        if (last[other] && last[other]->turn > q->seen[own][other]) {
            status = wait_for(stream_of(q, own), last[other]->end);
            q->seen[own][other] = last[other]->turn;
            behind = 1;
        }
    return status || behind ? status : wait_for(stream_of(q, own), q->c->began);
}

static int record_step(queue *q, ucch_step *s, void *stream) {
    s->turn = q->last[ucch_stream_of(s)] = ++q->turn;
    return q->alone || !s->marked ? 0 : ucch_event_record(&s->end, stream);
}

/* Run a local step as a copy or kernel of its own. */
static int run_local(ucch_task *t, void *stream) {
    if (t->kind == UCCH_COPY)
        return ucch_device_fail(ucch_bound_ops()->copy(t->dst, t->src, t->count * t->src_bytes, stream), "copy");
    void *function = ucch_kernel_of(t);
    return function ? ucch_kernel_run(function, t, stream) : UCCH_FAIL_DEVICE;
}

static int queue_local(queue *q, const ucch_step *s, void *stream) {
    ucch_task t;
    ucch_step_task(q->p, s, &t);
    size_t bytes = t.count * t.src_bytes;
    if (!bytes || (t.kind == UCCH_COPY && t.src == t.dst)) return 0;
    int alone = q->independent && (t.kind > UCCH_COMBINE || bytes > LONG_MOVE || q->fused->n == UCCH_MOST_MOVES);
    int status = alone ? flush(q) : 0;
    if (status || alone || !q->fused) return status ?: run_local(&t, stream);
    ucch_move m = {.src = t.src, .dst = t.dst, .kind = MOVE_COPY, .n = (uint32_t)bytes};
    if (t.kind != UCCH_COPY) m = (ucch_move){.src = t.src, .dst = t.dst, .kind = MOVE_COMBINE, .n = (uint32_t)t.count};
    return ucch_fused_add(q->fused, m);
}

/* Launch a collective of the vendor's library. */
static int launch_locked(ucch_program *p, ucch_step *s, ucch_launch *l, void *stream) {
    ucc_ee_h engine;
    int status = ucch_team_engine_locked(s->is.team, stream, l->alone, &engine);
    if (status < 0) return status;
    status = ucch_step_init_locked(p, s);
    if (status < 0) return status;
    if (UCCH_TRACING) l->each[l->n].event = ucch_trace_begin(p->is.number, (int)(s - p->steps), l->op.error.seq);
    l->each[l->n].request = s->request;
    l->each[l->n++].context = s->is.team->context;
    s->is.team->context->users++;
    status = ucch_team_post_locked(engine, s->request);
    s->request = NULL; /* the program may be used for its next call */
    return status;
}

static int queue_step(queue *q, ucch_step *s) {
    void *stream = stream_of(q, ucch_stream_of(s));
    int status = wait_for_deps(q, s);
    if (status) return status;
    if (s->is.kind == UCCH_STEP_COLL && q->p->is.in_graph) return UCCH_FAIL_ARGUMENT;
    if (s->is.kind == UCCH_STEP_COLL) {
        UCCH_LOCKED;
        status = launch_locked(q->p, s, q->l, stream);
    } else
        status = queue_local(q, s, stream);
    return status < 0 ? status : record_step(q, s, stream);
}

/* ---- messages ---- */

/* Add a piece in a graph. Its slot is known only when the kernel runs, from the channel's count. */
static int piece_in_graph(queue *q, ucch_channel *channel, const ucch_step *s, char *data, size_t bytes) {
    int is_recv = s->is.kind == UCCH_STEP_RECV;
    int status = q->fused->n == UCCH_MOST_MOVES ? flush(q) : 0;
    int waits = !is_recv || !channel->by_flags;
    ucch_move m = {.src = is_recv ? channel->seen : data,
                   .dst = is_recv ? data : channel->seen,
                   .wait = waits ? (is_recv ? channel->published : channel->consumed).seen : NULL,
                   .tell = (is_recv ? channel->consumed : channel->published).seen,
                   .least = is_recv ? 1u : 1u - UCCH_RING_SLOTS,
                   .value = ucch_channel_take(channel, 1),
                   .kind = !channel->by_flags ? MOVE_COPY
                           : is_recv          ? MOVE_LL_RECEIVE
                                              : MOVE_LL_SEND,
                   .n = (uint32_t)bytes,
                   .steps = channel->steps,
                   .slot = is_recv ? SLOT_SRC : SLOT_DST,
                   .stride = (uint32_t)channel->stride,
                   .tag = (uint32_t)s->is.tag};
    return status ?: ucch_fused_add(q->fused, m);
}

/* Consecutive pieces that are moved at once: `n` pieces of `bytes` bytes each, from `data` on. */
typedef struct chunk {
    char *data;
    size_t bytes;
    uint32_t n;
} chunk;

/* Pieces in the next chunk: up to half a ring over wires, else 1. Both ends compute the same, and all ranks queue
 * chunks in the same order. */
static uint32_t pieces_now(const ucch_channel *channel, uint64_t nth, uint64_t left) {
    uint64_t most = channel->flow && !channel->steps ? UCCH_RING_SLOTS / 2 : 1;
    return ucch_channel_chunk((uint32_t)channel->pieces, nth, left, most);
}

static int copy_chunk(queue *q, const ucch_channel *channel, uint32_t number, const chunk *part, int is_recv,
                      void *stream) {
    if (!q->fused) return ucch_channel_copy(channel, is_recv, number, part->n, part->data, part->bytes, stream);
    char *slot = channel->seen + number % UCCH_RING_SLOTS * channel->stride;
    return ucch_fused_add(q->fused, (ucch_move){.src = is_recv ? slot : part->data,
                                                .dst = is_recv ? part->data : slot,
                                                .kind = MOVE_COPY,
                                                .n = (uint32_t)part->bytes});
}

/* Move a chunk: wait until its slots are filled, or free; copy; tell the other end, by the driver call that waits for
 * the next chunk in this direction unless this one is the message's `last`. The other end does not stall meanwhile,
 * even where a device runs all streams one after the other: the ring has room for two chunks, and the next one comes
 * before anything that waits for this one. */
static int move_chunk(queue *q, ucch_channel *channel, const chunk *part, int is_recv, int last, void *stream) {
    uint32_t first = ucch_channel_take(channel, part->n), end = first + part->n;
    uint32_t least = is_recv ? end : end - UCCH_RING_SLOTS;
    ucch_counter wait = is_recv ? channel->published : channel->consumed;
    ucch_counter tell = is_recv ? channel->consumed : channel->published;
    pending before = q->to_tell[is_recv];
    int status = before.counter.seen ? ucch_counter_turn(before.counter, before.value, wait, least, q->c->await, stream)
                                     : wait_counter(q, wait, least, stream);
    q->to_tell[is_recv] = (pending){{NULL, NULL}, 0};
    if (!status) status = copy_chunk(q, channel, first, part, is_recv, stream);
    if (status || last || q->alone) return status ?: signal_counter(q, tell, end, stream);
    q->to_tell[is_recv] = (pending){tell, end};
    return 0;
}

static uint64_t pieces_of(const queue *q, const ucch_step *s) {
    size_t piece = ucch_piece_of(q->c, s);
    return (ucch_step_span(s)->count + piece - 1) / piece;
}

/* Prepare the first piece of a message. Returns 0 or a failure. */
static int begin_message(queue *q, ucch_step *s, ucch_channel *channel, void *stream) {
    int own_stream = ucch_stream_of(s), status = wait_for_deps(q, s);
    if (status || q->p->is.in_graph) return status;
    int last = channel->stream; /* stream of the channel's last message; calls in one stream are ordered by it */
    if (!q->alone) channel->stream = own_stream;
    if (!q->alone && last && last != own_stream)
        status = ucch_stream_follow(q->c->tail[last], q->c->streams[last], stream);
    if (status || !channel->flow) return status;
    /* Tell the network threads of the channel how this call divides its message. */
    return ucch_flow_expect(channel->flow, ucch_step_span(s)->count, ucch_piece_of(q->c, s), q->l->op.error.seq,
                            q->p->about.signature);
}

static int queue_chunk(queue *q, ucch_step *s, ucch_channel *channel) {
    const ucch_span *span = ucch_step_span(s);
    uint64_t nth = pieces_of(q, s) - s->left;
    size_t piece = ucch_piece_of(q->c, s), from = nth * piece;
    size_t length = span->count - from < piece ? span->count - from : piece;
    chunk part = {ucch_step_address(q->p, span) + from, length, pieces_now(channel, nth, s->left)};
    void *stream = stream_of(q, ucch_stream_of(s));
    int status = nth ? 0 : begin_message(q, s, channel, stream);
    s->left -= part.n;
    if (!status && q->p->is.in_graph)
        status = piece_in_graph(q, channel, s, part.data, length);
    else if (!status)
        status = move_chunk(q, channel, &part, s->is.kind == UCCH_STEP_RECV, !s->left, stream);
    return status || s->left ? status : record_step(q, s, stream);
}

/* Queue one chunk of every channel that has one left, or with `sends` of those to other ranks. Returns how many, or a
 * failure. Messages of a channel are queued one after the other. */
static int queue_round(queue *q, int first, int end, int sends, int goes_first) {
    int moved = 0;
    uint64_t round = ++q->c->round;
    for (int i = first; i < end; i++) {
        ucch_step *s = &q->p->steps[i];
        if (!s->left || (sends && s->is.kind == UCCH_STEP_RECV) || ucch_step_goes_first(s) != goes_first) continue;
        ucch_channel *channel = ucch_step_channel(q->c, s);
        if (channel->round == round) continue;
        channel->round = round;
        int status = queue_chunk(q, s, channel);
        if (status < 0) return status;
        moved++;
    }
    return moved;
}

static int goes_by_kernel(const ucch_step *s, int kind) {
    return s->is.kind == kind && s->left && ucch_stream_of(s) == STREAM_WIRES;
}

/* Add a message to the copy kernel, sends before receives. A message on the same ring as an earlier one begins behind
 * it. */
static int add_copy(queue *q, ucch_step *s, ucch_ring_copies *all, void *stream) {
    const ucch_span *span = ucch_step_span(s);
    ucch_channel *channel = ucch_step_channel(q->c, s);
    int is_recv = s->is.kind == UCCH_STEP_RECV, status = begin_message(q, s, channel, stream);
    if (status) return status;
    size_t piece = ucch_piece_of(q->c, s);
    uint32_t pieces = (uint32_t)pieces_of(q, s), begins = 0;
    unsigned *tell = (is_recv ? channel->consumed : channel->published).seen;
    for (unsigned k = 0; k < all->n; k++)
        if (all->each[k].tell == tell) begins = all->each[k].ends;
    all->each[all->n++] = (ucch_ring_copy){.data = ucch_step_address(q->p, span),
                                           .ring = channel->seen,
                                           .wait = (is_recv ? channel->published : channel->consumed).seen,
                                           .tell = tell,
                                           .bytes = span->count,
                                           .piece = (unsigned)piece,
                                           .stride = (unsigned)channel->stride,
                                           .before = ucch_channel_take(channel, pieces),
                                           .begins = begins,
                                           .ends = begins + pieces,
                                           .room = is_recv ? 0 : UCCH_RING_SLOTS};
    all->out += !is_recv;
    return 0;
}

/* Launch one kernel for both directions, with blocks for each, so that no rank waits for another one for ever where a
 * device runs one stream after the other. Rings, counters and the order of pieces are the same as for copies by the
 * driver, which the other end may use. The host releases the kernel like a stream, by setting its counters. */
static int launch_copies(const ucch_channels *c, ucch_ring_copies *all, void *stream) {
    uint64_t longest = 1;
    for (unsigned k = 0; k < all->n; k++) {
        const ucch_ring_copy *m = &all->each[k];
        uint64_t piece = m->bytes < m->piece ? m->bytes : m->piece;
        longest = piece > longest ? piece : longest;
    }
    uint64_t slices = (longest + COPY_SLICE - 1) / COPY_SLICE;
    all->width = slices < COPY_BLOCKS ? (unsigned)slices : COPY_BLOCKS;
    all->arrived = c->joined;
    void *arguments[] = {all};
    return ucch_device_fail(ucch_bound_ops()->launch(c->copies, 2 * all->width, COPY_THREADS, arguments, stream),
                            "launch");
}

/* Move the short messages over wires of these steps by one kernel. Returns 0 or a failure. If there are more than the
 * kernel takes, all are left to the rounds, in the same stream. */
static int queue_copy_kernel(queue *q, int first, int end) {
    static const int kinds[] = {UCCH_STEP_SEND, UCCH_STEP_RECV};
    ucch_ring_copies all = {.n = 0};
    void *stream = stream_of(q, STREAM_WIRES);
    int nmessages = 0, status = 0;
    for (int i = first; i < end; i++)
        nmessages += goes_by_kernel(&q->p->steps[i], q->p->steps[i].is.kind);
    if (q->fused || !nmessages || nmessages > UCCH_MOST_COPIES) return 0;
    for (int k = 0; k < 2; k++)
        for (int i = first; i < end && !status; i++)
            if (goes_by_kernel(&q->p->steps[i], kinds[k])) status = add_copy(q, &q->p->steps[i], &all, stream);
    if (!status) status = launch_copies(q->c, &all, stream);
    for (int i = first; i < end && !status; i++)
        if (goes_by_kernel(&q->p->steps[i], q->p->steps[i].is.kind)) {
            q->p->steps[i].left = 0;
            status = record_step(q, &q->p->steps[i], stream);
        }
    return status;
}

/* Queue the messages of a stage. Their order is the same on all ranks, whether a kernel moves some of them or not. */
static int queue_messages(queue *q, int first, int end) {
    for (int i = first; i < end; i++) {
        ucch_step *s = &q->p->steps[i];
        s->left = ucch_step_is_message(s) ? pieces_of(q, s) : 0;
    }
    int status = queue_copy_kernel(q, first, end);
    for (int goes_first = 1; goes_first >= 0 && !status; goes_first--) {
        for (int ahead = q->p->is.in_graph ? AHEAD : 1; ahead && !status; ahead--) {
            int sent = queue_round(q, first, end, 1, goes_first);
            status = sent < 0 ? sent : 0;
        }
        for (int moved = 1; moved > 0 && !status; status = moved < 0 ? moved : 0)
            moved = queue_round(q, first, end, 0, goes_first);
    }
    return status;
}

/* ---- the call ---- */

/* Allocate the scratch that the call needs. Returns 0 or a failure. Called before the call is published and without the
 * lock: allocations may wait for streams. */
int ucch_enqueue_scratch(ucch_program *p) {
    ucch_channels *c = p->channels;
    int bank = p->is.in_graph ? GRAPH_BANK : (int)(c->banked & 1);
    int status = p->is.tmp_bytes ? ucch_channels_scratch(c, bank, p->is.tmp_bytes) : 0;
    for (int i = 0; i < p->nsteps && !p->reserved && !status; i++)
        if (ucch_step_is_message(&p->steps[i])) status = ucch_step_reserve(c, &p->steps[i]);
    p->reserved |= !status;
    return status;
}

static uint64_t moved_by(const ucch_program *p) {
    uint64_t bytes = 0;
    for (int i = 0; i < p->nsteps; i++)
        bytes += ucch_step_is_message(&p->steps[i]) ? ucch_step_span(&p->steps[i])->count : 0;
    return bytes;
}

/* Queue the whole program with its current buffers. Returns 0, or a failure that leaves streams to be released. Called
 * without the lock, one call at a time. `l` is NULL in a graph. */
int ucch_enqueue(ucch_program *p, ucch_launch *l, void *stream) {
    ucch_channels *c = p->channels;
    uint64_t moved = moved_by(p);
    int fits = ucch_fused_fits(p, moved), graph = p->is.in_graph;
    ucch_moves fused;
    queue q = {.p = p, .c = c, .l = l, .stream = stream, .bank = -1, .independent = graph && !fits};
    fused.n = 0;
    q.fused = fits || graph ? &fused : NULL;
    q.alone = q.fused || moved < ALONE_BYTES;
    if (p->is.tmp_bytes && !graph) q.bank = (int)(c->banked++ & 1);
    if (p->is.tmp_bytes) p->base[UCCH_TMP] = c->scratch[graph ? GRAPH_BANK : q.bank];
    for (int i = 0; i < p->nsteps; i++)
        p->steps[i].turn = 0; /* steps that move nothing are not waited for */
    int status = graph     ? flush(&q)
                 : q.alone ? begin_alone(&q)
                           : follow_calls(&q) ?: ucch_event_record(&c->began, stream);
    for (int i = 0, end; i < p->nsteps && !status; i = end) {
        for (end = i; end < p->nsteps && p->steps[end].is.stage == p->steps[i].is.stage; end++)
            if (!ucch_step_is_message(&p->steps[end]) && !status) status = queue_step(&q, &p->steps[end]);
        if (!status) status = queue_messages(&q, i, end);
    }
    if (!status && graph) status = flush(&q);
    p->base[UCCH_TMP] = NULL;
    return status || graph ? status : end_call(&q);
}

/* Launch all collectives of a program into one stream. */
int ucch_post_steps_locked(ucch_program *p, ucch_launch *l, void *stream) {
    int status = 0;
    for (int i = 0; i < p->nsteps && status >= 0; i++)
        status = launch_locked(p, &p->steps[i], l, stream);
    return status;
}
