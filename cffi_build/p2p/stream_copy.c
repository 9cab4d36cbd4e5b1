/* Stream copies: messages that streams do alone. A kernel beside the sender's stream copies the data into an extent of
 * chunks of its window, or of its arena (segment.c) where the receiver can open that; one beside the receiver's takes
 * it out, and no host takes part, so that neither side's stream ever waits for a thread that may be waiting for a
 * device. Both kernels have blocks with a slice of the message each, and the receiver's follow the sender's. */
#include <string.h>

#include "p2p/pipe.h"
#include "shm/ring.h"

/* Eight blocks (UCCH_BLOCKS) of 512 threads copy 32 MiB to pinned memory with 50 GB/s and from it with 46, four with 48
 * and 44; an H200's copy engines do 54, but the receiver's host would have to know where the data is. A slice is no
 * shorter than this. */
#define THREADS 512
#define SHORTEST ((size_t)64 << 10)

/* Whether messages with a process go by way of the sender's arena. */
static int is_near(uint64_t process) { return process && ucch_window_of(process)->arena && ucch_window_of(0)->near; }

static size_t slice_of(size_t bytes, int near) {
    size_t blocks = near ? (size_t)ucch_window_of(0)->blocks : UCCH_BLOCKS;
    size_t slice = (bytes / blocks + 4095) / 4096 * 4096;
    return slice < SHORTEST ? SHORTEST : slice;
}

static int blocks_of(size_t bytes, int near) {
    return (int)((bytes + slice_of(bytes, near) - 1) / slice_of(bytes, near));
}

static uint64_t slices(ucch_extent *extent) { return (extent->bytes + extent->slice - 1) / extent->slice; }

static uint64_t length_of(ucch_extent *extent, uint64_t k) {
    uint64_t left = extent->bytes - k * extent->slice;
    return left < extent->slice ? left : extent->slice;
}

/* Steps of slice `k` that have been put there, or taken. */
static uint32_t *steps(ucch_extent *extent, uint64_t k, int are_taken) {
    return &(are_taken ? extent->taken : extent->put)[k].word;
}

/* Whether all slices have been put there, or taken. */
static int all_steps(ucch_extent *extent, int are_taken) {
    for (uint64_t k = 0; k < slices(extent); k++) {
        uint64_t all = (length_of(extent, k) + UCCH_COPY_STEP - 1) / UCCH_COPY_STEP;
        if (!ucch_reached(steps(extent, k, are_taken), (uint32_t)all)) return 0;
    }
    return 1;
}

/* Whether data comes: the sender's kernel runs. */
int ucch_extent_begun(ucch_extent *extent) { return __atomic_load_n(steps(extent, 0, 0), __ATOMIC_ACQUIRE) != 0; }

/* Whether our stream has put all there, and told whoever waited for it. */
int ucch_extent_full(ucch_extent *extent) {
    return all_steps(extent, 0) && __atomic_load_n(&extent->rung, __ATOMIC_ACQUIRE);
}

/* Let our kernel go on without its receiver: what that still takes may be overwritten. */
void ucch_extent_stop(ucch_extent *extent) { __atomic_store_n((uint32_t *)&extent->stop, 1, __ATOMIC_RELEASE); }

/* Whether that may have happened. */
int ucch_extent_tainted(ucch_extent *extent) {
    return extent->room < extent->slice && __atomic_load_n((uint32_t *)&extent->stop, __ATOMIC_ACQUIRE);
}

/* Whether nobody uses a message's chunks any more: the receiver is done with it, and so is our kernel, which waits for
 * no receiver that does not want it. */
int ucch_extent_over(const control *c, ucch_extent *extent) {
    int closed = __atomic_load_n(&c->closed, __ATOMIC_ACQUIRE) != 0;
    if (extent && closed) ucch_extent_stop(extent);
    return extent ? (closed || all_steps(extent, 1)) && ucch_extent_full(extent) : closed;
}

/* ---- receiving by the host ---- */

/* Copy one step into memory of the host: 0, or a failure. From a device it is on its way then. */
static int fetch(ucch_pipe *p, uint64_t k, uint32_t step) {
    const ucch_extent *extent = p->extent;
    char *data = extent->near ? ucch_window_of(p->sender)->arena : ucch_window_of(p->sender)->chunks;
    uint64_t done = (uint64_t)step * UCCH_COPY_STEP, left = length_of(p->extent, k) - done;
    char *from = data + (size_t)(p->where - 1) * UCCH_CHUNK + k * extent->room + done % extent->room;
    char *into = p->buffer + k * extent->slice + done;
    size_t bytes = left < UCCH_COPY_STEP ? left : UCCH_COPY_STEP;
    if (extent->near) {
        int status = ucch_work_copy(UCCH_TO_HOST, into, from, bytes);
        return status ? status : ucch_work_mark(UCCH_TO_HOST, &p->event[0]);
    }
    memcpy(into, from, bytes);
    return 0;
}

/* Whether the step that is on its way from a device has come: as ucch_extent_receive. */
static int fetched(ucch_pipe *p) {
    int done = 1;
    int status = p->fetching ? ucch_event_ask(p->event[0], &done, &p->again) : 0;
    if (status || !done) return status;
    if (p->fetching) {
        uint32_t *taken = steps(p->extent, (uint64_t)p->fetching - 1, 1);
        __atomic_store_n(taken, *taken + 1, __ATOMIC_RELEASE);
    }
    p->fetching = 0;
    return 1;
}

/* Whether a device still copies into memory of the host. */
int ucch_extent_fetching(ucch_pipe *p) { return !fetched(p); }

/* Take what is there into memory of the host: 1 when that was all, 0 when not yet, or a failure. */
int ucch_extent_receive(ucch_pipe *p) {
    int status = fetched(p);
    for (uint64_t k = 0; status == 1 && !p->fetching && k < slices(p->extent); k++) {
        uint32_t there = __atomic_load_n(steps(p->extent, k, 0), __ATOMIC_ACQUIRE);
        for (uint32_t step = *steps(p->extent, k, 1); step < there && !p->fetching; step++) {
            int failure = fetch(p, k, step);
            if (failure) return failure;
            if (p->extent->near)
                p->fetching = (int)k + 1;
            else
                __atomic_store_n(steps(p->extent, k, 1), step + 1, __ATOMIC_RELEASE);
        }
    }
    return status == 1 ? all_steps(p->extent, 1) : status;
}

/* ---- streams ---- */

/* A stream of ours for what is copied beside one of the caller's. Copies wait there for that one's work, or for what a
 * peer sends to it: with one for all, they could wait for what is behind them. */
struct ucch_beside {
    void *of, *stream, *event;
    int known;
};

/* Streams of the caller's that have one of ours beside them, each way; and UCCH_OURS. */
#define MOST 5

static ucch_beside outward[MOST], inward[MOST];
char ucch_ours;

static void reserve(ucch_beside *b) {
    const device_ops *ops = ucch_bound_ops();
    if (!b->event && ops->event_new(&b->event)) b->event = NULL;
    if (!b->stream && ops->stream_new(&b->stream)) b->stream = NULL;
}

/* For Python: stands for no stream of the caller's. */
void *ucch_stream_ours(void) { return UCCH_OURS; }

/* Have the windows pinned, and all that streams need to take messages through them: while one is held, making another
 * could wait for it. `with_chunks`: for the device's copies, too. 0, or a failure. */
int ucch_windows_pin(int with_chunks) {
    ucch_lock();
    int before = ucch_device_enter(), status = ucch_windows_pin_locked(with_chunks);
    if (!status) {
        ucch_room_publish_locked();
        ucch_doorbells_reserve();
    }
    for (int i = 0; i < MOST && !status; i++) {
        reserve(&outward[i]);
        reserve(&inward[i]);
    }
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* The stream beside `stream`, or NULL where there are too many. */
static ucch_beside *beside_of(ucch_beside *all, void *stream) {
    ucch_beside *b = all;
    while (b < all + MOST && b->known && b->of != stream)
        b++;
    if (b == all + MOST || !b->stream || !b->event) return NULL;
    b->of = stream;
    b->known = 1;
    return b;
}

static void *kernel_locked(int kind) { return ucch_kernel_of(&(ucch_task){.kind = kind}); }

static int launch(void *kernel, ucch_stream_copy c, int blocks, void *stream) {
    void *arguments[] = {&c};
    return ucch_device_fail(ucch_bound_ops()->launch(kernel, (unsigned)blocks, THREADS, arguments, stream), "launch");
}

/* ---- sending ---- */

/* Take chunks for a message: for all of it, or for some steps at a time of every slice, so that the sender's kernel has
 * to wait for the receiver's. */
static size_t extent_for(ucch_pipe *p, size_t bytes, int near) {
    static const size_t least[] = {0, 16, 4, 1};
    size_t slice = slice_of(bytes, near);
    for (size_t i = 0; i < sizeof(least) / sizeof(*least); i++) {
        size_t room = least[i] ? least[i] * UCCH_COPY_STEP : slice;
        if (room > slice || (room < slice && !ucch_may_hold())) continue; /* our kernel would wait for the receiver's */
        p->many = (int)(((uint64_t)blocks_of(bytes, near) * room + UCCH_CHUNK - 1) / UCCH_CHUNK);
        p->first = ucch_extent_take_locked(p->many, near);
        if (p->first >= 0) return room;
    }
    p->many = 0;
    return 0;
}

/* A message that was left to hosts has ended, for us at least. */
void ucch_pipe_over_locked(ucch_pipe *p) {
    if (p->by_hosts) ucch_hosts_note(-1);
    p->by_hosts = 0;
}

/* No room for a message: it is left to hosts, unless a stream of its receiver's waits for it already with a credit of
 * ours, which is good for a chunk. The blocks have a part of that each. */
static size_t kept_for(ucch_pipe *p, const ucch_offer *offer, int near) {
    size_t slice = slice_of(offer->bytes, 0), room = slice < UCCH_COPY_STEP ? slice : UCCH_COPY_STEP;
    int able = offer->number && p->kernel && (p->beside || offer->stream != UCCH_OURS);
    able = able && (room == slice || ucch_may_hold()); /* too long for who waits, or our stream may wait, too */
    p->by_hosts = 1;
    ucch_hosts_note(1);
    if (!able || !ucch_mailbox_keep(offer->receiver, offer->tag, offer->number)) return 0;
    ucch_pipe_over_locked(p);
    p->many = 1;
    p->first = ucch_extent_keep_locked(near);
    return room;
}

/* Have what a message needs to go from stream to stream: 0, or UCCH_FAIL_MEMORY. */
int ucch_extent_offer_locked(ucch_pipe *p, ucch_rts *rts, const ucch_offer *offer) {
    int near = is_near(offer->receiver);
    ucch_pipe_over_locked(p);
    p->beside = beside_of(outward, offer->stream);
    p->kernel = kernel_locked(UCCH_STREAM_COPY);
    size_t room = p->beside && p->kernel ? extent_for(p, rts->bytes, near) : 0, slice = slice_of(rts->bytes, near);
    if (!room) {
        room = kept_for(p, offer, near);
        slice = slice_of(rts->bytes, 0);
    }
    if (!room) return UCCH_FAIL_MEMORY;
    rts->extent = (uint32_t)p->first + 1;
    rts->piece = slice;
    ucch_extent *extent = ucch_extent_at(0, p->first);
    memset(extent, 0, sizeof(*extent));
    extent->bytes = rts->bytes;
    extent->slice = rts->piece;
    extent->room = room;
    extent->near = (uint64_t)near;
    return 0;
}

/* Without the lock: who launches kernels may have to wait for room among those that have still to run. Let the stream
 * beside `stream` put the data where the receiver looks for it: 0, or a failure. */
int ucch_extent_put(ucch_pipe *p, uint64_t receiver, void *stream) {
    int near = p->extent->near != 0;
    ucch_stream_copy c = {.extent = ucch_window_of(0)->extents_seen + p->first, .buffer = p->buffer};
    c.data = (near ? ucch_window_of(0)->arena : ucch_window_of(0)->chunks_seen) + (size_t)p->first * UCCH_CHUNK;
    c.mailbox = ucch_window_of(receiver)->mailbox_seen;
    c.bytes = p->bytes;
    c.slice = p->piece;
    c.room = p->extent->room;
    void *where = p->beside ? p->beside->stream : stream; /* by credit, and no stream is left beside the caller's */
    int status = stream == UCCH_OURS || where == stream ? 0 : ucch_stream_follow(p->beside->event, stream, where);
    return status ? status : launch(p->kernel, c, (int)p->pieces, where);
}

/* ---- receiving ---- */

/* Nobody asks any more whether a stream is done with it. */
void ucch_posted_drop(ucch_pipe *p) {
    if (p->posted) ucch_posted_close_locked(p->posted);
    p->posted = NULL;
}

/* Have what a stream needs to take a message of process `sender`'s, into `buffer` with room for `bytes`: 0, or a
 * failure. `early`: one that has not been sent, as far as we know, nor is with hosts. */
int ucch_pipe_take_ready_locked(ucch_pipe *p, const ucch_expected *e, void *stream, int early) {
    int near = is_near(e->sender);
    p->beside = beside_of(inward, stream);
    p->kernel = kernel_locked(UCCH_STREAM_COPY);
    p->await = kernel_locked(UCCH_AWAIT);
    if (!p->beside || !p->kernel || !ucch_window_of(e->sender)->extents_seen) return UCCH_FAIL_MEMORY;
    if (early && !ucch_credit_take(e->sender, e->room, near)) return UCCH_FAIL_MEMORY;
    p->posted = ucch_posted_open_locked(e->sender, e->tag, e->number, blocks_of(e->room, near), early);
    if (!p->posted && early)
        ucch_credit_return(e->sender);
    else if (early && ucch_messages_by_hosts(e->sender) && ucch_posted_withdraw(p->posted))
        ucch_posted_drop(p);
    return p->posted ? 0 : UCCH_FAIL_MEMORY;
}

/* Without the lock, as above: let the stream beside `stream` take the message once it is known, and `stream` wait, if
 * it is one of the caller's. */
int ucch_pipe_take(ucch_pipe *p, const ucch_expected *e, void *stream) {
    ucch_stream_copy c = {.extent = ucch_window_of(e->sender)->extents_seen, .buffer = e->buffer, .bytes = e->room};
    c.data = ucch_window_of(e->sender)->chunks_seen;
    c.arena = ucch_window_of(e->sender)->arena;
    c.posted = ucch_posted_seen(p->posted);
    int status = ucch_posted_hold(p->posted, p->await, p->beside->stream);
    if (!status) status = launch(p->kernel, c, blocks_of(e->room, is_near(e->sender)), p->beside->stream);
    return status || stream == UCCH_OURS ? status : ucch_stream_follow(p->beside->event, p->beside->stream, stream);
}
