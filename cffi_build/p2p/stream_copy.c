/* Messages that streams do alone: a kernel beside the sender's stream copies the data into chunks of its window, or of
 * its arena (segment.c) where the receiver can open that; one beside the receiver's takes it out, and no host takes
 * part, so that neither side's stream ever waits for a thread that may be waiting for a device. Both kernels have
 * blocks with a slice of the message each, and the receiver's follow the sender's. */
#include <string.h>

#include "p2p/pipe.h"
#include "shm/ring.h"

/* Eight blocks (UCCH_BLOCKS) of 512 threads copy 32 MiB to pinned memory with 50 GB/s and from it with 46, four with 48
 * and 44; an H200's copy engines do 54, but the receiver's host would have to know where the data is. A slice is no
 * shorter than this. */
#define THREADS 512
#define SHORTEST ((size_t)64 << 10)

/* Whether messages with a process go by way of the sender's arena. */
static int is_near(uint64_t process) {
    return process && ucch_window_of(process)->arena && ucch_window_of(0)->near;
}

static size_t slice_of(size_t bytes, int near) {
    size_t blocks = near ? (size_t)ucch_window_of(0)->blocks : UCCH_BLOCKS;
    size_t slice = (bytes / blocks + 4095) / 4096 * 4096;
    return slice < SHORTEST ? SHORTEST : slice;
}

static int blocks_of(size_t bytes, int near) {
    return (int)((bytes + slice_of(bytes, near) - 1) / slice_of(bytes, near));
}

static uint64_t slices(ucch_run *run) {
    return (run->bytes + run->slice - 1) / run->slice;
}

static uint64_t length_of(ucch_run *run, uint64_t k) {
    uint64_t left = run->bytes - k * run->slice;
    return left < run->slice ? left : run->slice;
}

/* Steps of slice `k` that have been put there, or taken. */
static uint32_t *steps(ucch_run *run, uint64_t k, int are_taken) {
    return &(are_taken ? run->taken : run->put)[k].word;
}

/* Whether all slices have been put there, or taken. */
static int all_steps(ucch_run *run, int are_taken) {
    for (uint64_t k = 0; k < slices(run); k++) {
        uint64_t all = (length_of(run, k) + UCCH_CARRY_STEP - 1) / UCCH_CARRY_STEP;
        if (!ucch_reached(steps(run, k, are_taken), (uint32_t)all))
            return 0;
    }
    return 1;
}

/* Whether data comes: the sender's kernel runs. */
int ucch_run_begun(ucch_run *run) {
    return __atomic_load_n(steps(run, 0, 0), __ATOMIC_ACQUIRE) != 0;
}

/* Whether our stream has put all there, and told whoever waited for it. */
int ucch_run_full(ucch_run *run) {
    return all_steps(run, 0) && __atomic_load_n(&run->rung, __ATOMIC_ACQUIRE);
}

/* Let our kernel go on without its receiver: what that still takes may be overwritten. */
void ucch_run_stop(ucch_run *run) {
    __atomic_store_n((uint32_t *)&run->stop, 1, __ATOMIC_RELEASE);
}

/* Whether that may have happened. */
int ucch_run_spoilt(ucch_run *run) {
    return run->room < run->slice && __atomic_load_n((uint32_t *)&run->stop, __ATOMIC_ACQUIRE);
}

/* Whether nobody uses a message's chunks any more: the receiver is done with it, and so is our kernel, which waits for
 * no receiver that does not want it. */
int ucch_run_over(const control *c, ucch_run *run) {
    int closed = __atomic_load_n(&c->closed, __ATOMIC_ACQUIRE) != 0;
    if (run && closed)
        ucch_run_stop(run);
    return run ? (closed || all_steps(run, 1)) && ucch_run_full(run) : closed;
}

/* ---- receiving by the host ---- */

/* Copy one step into memory of the host: 0, or a failure. From a device it is on its way then. */
static int fetch(ucch_transfer *t, uint64_t k, uint32_t step) {
    const ucch_run *run = t->run;
    char *data = run->near ? ucch_window_of(t->sender)->arena : ucch_window_of(t->sender)->chunks;
    uint64_t done = (uint64_t)step * UCCH_CARRY_STEP, left = length_of(t->run, k) - done;
    char *from = data + (size_t)(t->where - 1) * UCCH_CHUNK + k * run->room + done % run->room;
    char *into = t->buffer + k * run->slice + done;
    size_t bytes = left < UCCH_CARRY_STEP ? left : UCCH_CARRY_STEP;
    if (run->near) {
        int status = ucch_work_copy(UCCH_TO_HOST, into, from, bytes);
        return status ? status : ucch_work_mark(UCCH_TO_HOST, &t->event[0]);
    }
    memcpy(into, from, bytes);
    return 0;
}

/* Whether the step that is on its way from a device has come: as ucch_run_receive. */
static int fetched(ucch_transfer *t) {
    int done = 1;
    int status = t->fetching ? ucch_event_ask(t->event[0], &done, &t->again) : 0;
    if (status || !done)
        return status;
    if (t->fetching) {
        uint32_t *taken = steps(t->run, (uint64_t)t->fetching - 1, 1);
        __atomic_store_n(taken, *taken + 1, __ATOMIC_RELEASE);
    }
    t->fetching = 0;
    return 1;
}

/* Whether a device still copies into memory of the host. */
int ucch_run_fetching(ucch_transfer *t) {
    return !fetched(t);
}

/* Take what is there into memory of the host: 1 when that was all, 0 when not yet, or a failure. */
int ucch_run_receive(ucch_transfer *t) {
    int status = fetched(t);
    for (uint64_t k = 0; status == 1 && !t->fetching && k < slices(t->run); k++) {
        uint32_t there = __atomic_load_n(steps(t->run, k, 0), __ATOMIC_ACQUIRE);
        for (uint32_t step = *steps(t->run, k, 1); step < there && !t->fetching; step++) {
            int failure = fetch(t, k, step);
            if (failure)
                return failure;
            if (t->run->near)
                t->fetching = (int)k + 1;
            else
                __atomic_store_n(steps(t->run, k, 1), step + 1, __ATOMIC_RELEASE);
        }
    }
    return status == 1 ? all_steps(t->run, 1) : status;
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
    if (!b->event && ops->event_new(&b->event))
        b->event = NULL;
    if (!b->stream && ops->stream_new(&b->stream))
        b->stream = NULL;
}

/* For Python: stands for no stream of the caller's. */
void *ucch_stream_ours(void) {
    return UCCH_OURS;
}

/* Have the windows pinned, and all that streams need to take messages through them: while one is held, making another
 * could wait for it. `with_chunks`: for the device's copies, too. 0, or a failure. */
int ucch_windows_pin(int with_chunks) {
    ucch_lock();
    int before = ucch_device_enter(), status = ucch_windows_pin_locked(with_chunks);
    if (!status) {
        ucch_room_publish_locked();
        ucch_bells_reserve();
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
    if (b == all + MOST || !b->stream || !b->event)
        return NULL;
    b->of = stream;
    b->known = 1;
    return b;
}

static void *kernel_locked(int kind) {
    return ucch_kernel_of_locked(&(ucch_task){.kind = kind});
}

static int launch(void *kernel, ucch_carry c, int blocks, void *stream) {
    void *arguments[] = {&c};
    return ucch_device_fail(ucch_bound_ops()->launch(kernel, (unsigned)blocks, THREADS, arguments, stream), "launch");
}

/* ---- sending ---- */

/* Take chunks for a message: for all of it, or for some steps at a time of every slice, so that the sender's kernel has
 * to wait for the receiver's. */
static size_t run_for(ucch_transfer *t, size_t bytes, int near) {
    static const size_t least[] = {0, 16, 4, 1};
    size_t slice = slice_of(bytes, near);
    for (size_t i = 0; i < sizeof(least) / sizeof(*least); i++) {
        size_t room = least[i] ? least[i] * UCCH_CARRY_STEP : slice;
        if (room > slice || (room < slice && !ucch_may_hold()))
            continue; /* our kernel would wait for the receiver's */
        t->many = (int)(((uint64_t)blocks_of(bytes, near) * room + UCCH_CHUNK - 1) / UCCH_CHUNK);
        t->first = ucch_run_take_locked(t->many, near);
        if (t->first >= 0)
            return room;
    }
    t->many = 0;
    return 0;
}

/* A message that was left to hosts has ended, for us at least. */
void ucch_transfer_over_locked(ucch_transfer *t) {
    if (t->by_hosts)
        ucch_hosts_note(-1);
    t->by_hosts = 0;
}

/* No room for a message: it is left to hosts, unless a stream of its receiver's waits for it already and we have
 * promised it a chunk. The blocks have a part of that each. */
static size_t kept_for(ucch_transfer *t, const ucch_offer *offer, int near) {
    size_t slice = slice_of(offer->bytes, 0), room = slice < UCCH_CARRY_STEP ? slice : UCCH_CARRY_STEP;
    int able = offer->number && t->kernel && (t->beside || offer->stream != UCCH_OURS);
    able = able && (room == slice || ucch_may_hold()); /* too long for who waits, or our stream may wait, too */
    t->by_hosts = 1;
    ucch_hosts_note(1);
    if (!able || !ucch_slips_keep(offer->receiver, offer->tag, offer->number))
        return 0;
    ucch_transfer_over_locked(t);
    t->many = 1;
    t->first = ucch_run_keep_locked(near);
    return room;
}

/* Have what a message needs to go from stream to stream: 0, or UCCH_FAIL_MEMORY. */
int ucch_run_offer_locked(ucch_transfer *t, ucch_token *token, const ucch_offer *offer) {
    int near = is_near(offer->receiver);
    ucch_transfer_over_locked(t);
    t->beside = beside_of(outward, offer->stream);
    t->kernel = kernel_locked(UCCH_CARRY);
    size_t room = t->beside && t->kernel ? run_for(t, token->bytes, near) : 0, slice = slice_of(token->bytes, near);
    if (!room) {
        room = kept_for(t, offer, near);
        slice = slice_of(token->bytes, 0);
    }
    if (!room)
        return UCCH_FAIL_MEMORY;
    token->run = (uint32_t)t->first + 1;
    token->piece = slice;
    ucch_run *run = ucch_run_at(0, t->first);
    memset(run, 0, sizeof(*run));
    run->bytes = token->bytes;
    run->slice = token->piece;
    run->room = room;
    run->near = (uint64_t)near;
    return 0;
}

/* Without the lock: who launches kernels may have to wait for room among those that have still to run. Let the stream
 * beside `stream` put the data where the receiver looks for it: 0, or a failure. */
int ucch_run_put(ucch_transfer *t, uint64_t receiver, void *stream) {
    int near = t->run->near != 0;
    ucch_carry c = {.run = ucch_window_of(0)->fronts_seen + t->first, .buffer = t->buffer};
    c.data = (near ? ucch_window_of(0)->arena : ucch_window_of(0)->chunks_seen) + (size_t)t->first * UCCH_CHUNK;
    c.slips = ucch_window_of(receiver)->slips_seen;
    c.bytes = t->bytes;
    c.slice = t->piece;
    c.room = t->run->room;
    void *where = t->beside ? t->beside->stream : stream; /* promised, and no stream is left beside the caller's */
    int status = stream == UCCH_OURS || where == stream ? 0 : ucch_stream_follow(t->beside->event, stream, where);
    return status ? status : launch(t->kernel, c, (int)t->pieces, where);
}

/* ---- receiving ---- */

/* Nobody asks any more whether a stream is done with it. */
void ucch_slip_drop(ucch_transfer *t) {
    if (t->slip)
        ucch_slip_close_locked(t->slip);
    t->slip = NULL;
}

/* Have what a stream needs to take a message of process `sender`'s, into `buffer` with room for `bytes`: 0, or a
 * failure. `early`: one that has not been sent, as far as we know, nor is with hosts. */
int ucch_take_ready_locked(ucch_transfer *t, const ucch_expected *e, void *stream, int early) {
    int near = is_near(e->sender);
    t->beside = beside_of(inward, stream);
    t->kernel = kernel_locked(UCCH_CARRY);
    t->await = kernel_locked(UCCH_AWAIT);
    if (!t->beside || !t->kernel || !ucch_window_of(e->sender)->fronts_seen)
        return UCCH_FAIL_MEMORY;
    if (early && !ucch_promise_begin(e->sender, e->room, near))
        return UCCH_FAIL_MEMORY;
    t->slip = ucch_slip_open_locked(e->sender, e->tag, e->number, blocks_of(e->room, near), early);
    if (!t->slip && early)
        ucch_promise_end(e->sender);
    else if (early && ucch_messages_by_hosts(e->sender) && ucch_slip_withdraw(t->slip))
        ucch_slip_drop(t);
    return t->slip ? 0 : UCCH_FAIL_MEMORY;
}

/* Without the lock, as above: let the stream beside `stream` take the message once it is known, and `stream` wait, if
 * it is one of the caller's. */
int ucch_take(ucch_transfer *t, const ucch_expected *e, void *stream) {
    ucch_carry c = {.run = ucch_window_of(e->sender)->fronts_seen, .buffer = e->buffer, .bytes = e->room};
    c.data = ucch_window_of(e->sender)->chunks_seen;
    c.arena = ucch_window_of(e->sender)->arena;
    c.slip = ucch_slip_seen(t->slip);
    int status = ucch_slip_hold(t->slip, t->await, t->beside->stream);
    if (!status)
        status = launch(t->kernel, c, blocks_of(e->room, is_near(e->sender)), t->beside->stream);
    return status || stream == UCCH_OURS ? status : ucch_stream_follow(t->beside->event, t->beside->stream, stream);
}
