/* Local steps on device memory. A copy, or a kernel that the vendor's run-time compiler has made
 * (ucc_hetero/device/kernels), is queued in a stream of the engine's own. Arithmetic without a kernel is done on the
 * host, piece by piece, through pinned memory. No thread waits: progress polls for the end. */
#include <stdlib.h>
#include <string.h>

#include "gpu/gpu.h"

/* Enough to saturate the memory of the largest devices, with several elements per thread. */
#define MOST_BLOCKS 2048
#define THREADS 256
/* Bytes of the wider operand in one piece of arithmetic. */
#define PIECE ((uint64_t)4 << 20)

/* One for each direction of copies. */
#define STREAMS (UCCH_ACROSS + 1)
/* Counters created in advance: two for each of 64 calls in streams. */
#define FLAGS 128
enum { IDLE, MOVING, FETCHING, STORING };

struct ucch_work {
    ucch_task task;
    int phase;
    uint64_t done, now; /* elements that are done, and in the current piece */
    char *one, *two;    /* pinned: the current piece of source and destination */
    void *event;
    double again;
};

/* ---- kernels ---- */

typedef struct kernel {
    int kind, op, dtype, to;
    void *function;
    struct kernel *next;
} kernel;

static kernel *kernels; /* only grows, at its head: may be read without a lock */

/* Only reductions have an operation, and only casts and pieces a second type. */
static int same(const kernel *k, int kind, int op, int dtype, int to) {
    return k->kind == kind && k->dtype == dtype && ((kind != UCCH_COMBINE && kind != UCCH_FUSED) || k->op == op) &&
           ((kind != UCCH_CAST && kind != UCCH_PIECES) || k->to == to);
}

/* Load a compiled kernel on the bound device. Returns 0 or a failure with its reason. */
int ucch_kernel_add(int kind, int op, int dtype, int to, const void *image) {
    const device_ops *ops = ucch_bound_ops();
    kernel *k = ops ? calloc(1, sizeof(*k)) : NULL;
    if (!k) return ops ? UCCH_FAIL_MEMORY : UCCH_FAIL_DEVICE;
    *k = (kernel){kind, op, dtype, to, NULL, NULL};
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ops->kernel(image, &k->function), "loading a kernel");
    if (status) {
        free(k);
        return status;
    }
    UCCH_LOCKED;
    k->next = kernels;
    UCCH_STORE(&kernels, k);
    return 0;
}

void *ucch_kernel_of(const ucch_task *t) {
    for (kernel *k = UCCH_LOAD(&kernels); k; k = k->next)
        if (same(k, t->kind, t->op, t->dtype, t->to)) return k->function;
    return NULL;
}

/* Launch a kernel with up to `blocks` blocks, each of which goes on with the next slice. */
int ucch_kernel_launch(void *function, uint64_t blocks, void **arguments, void *stream) {
    unsigned n = blocks < MOST_BLOCKS ? (unsigned)blocks : MOST_BLOCKS;
    return ucch_device_fail(ucch_bound_ops()->launch(function, n, THREADS, arguments, stream), "launch");
}

int ucch_kernel_run(void *function, ucch_task *t, void *stream) {
    void *arguments[] = {&t->src, &t->dst, &t->count, &t->factor};
    return ucch_kernel_launch(function, (t->count + THREADS - 1) / THREADS, arguments, stream);
}

/* ---- steps ---- */

static void *streams[STREAMS];

/* Do a task on the host, on `count` elements in host memory. */
int ucch_task_compute(const ucch_task *t, char *src, char *dst, uint64_t count) {
    switch (t->kind) {
    case UCCH_COMBINE:
        return ucch_combine(t->op, t->dtype, src, dst, count);
    case UCCH_CAST:
        return ucch_cast(t->dtype, t->to, src, dst, count);
    case UCCH_SCALE:
        return ucch_scale(t->dtype, dst, count, t->factor);
    default:
        memmove(dst, src, count * t->src_bytes);
        return 0;
    }
}

void ucch_work_free(ucch_work *w) {
    if (w && w->event && ucch_bound() >= 0) ucch_bound_ops()->event_free(w->event);
    free(w);
}

/* Create the streams and flags of the bound device. Returns 0 or a failure. Later, while a stream is held, creating
 * them could wait for that stream. */
int ucch_device_reserve(void) {
    int status = 0;
    ucch_flags_reserve(FLAGS);
    for (int way = 0; way < STREAMS && !status; way++)
        if (!streams[way]) status = ucch_stream_new(&streams[way]);
    return status;
}

void *ucch_way_stream(int way) { return streams[way]; }

/* Queue a copy in this direction, behind all others in it. */
int ucch_way_copy(int way, void *dst, const void *src, size_t bytes) {
    return ucch_device_fail(ucch_bound_ops()->copy(dst, src, bytes, streams[way]), "copy");
}

static int record_phase(ucch_work *w, int way, int phase) {
    w->phase = phase;
    return ucch_event_record(&w->event, streams[way]);
}

/* Queue the copies of the next piece's operands to the host. */
static int fetch(ucch_work *w) {
    const ucch_task *t = &w->task;
    uint64_t wide = t->src_bytes > t->dst_bytes ? t->src_bytes : t->dst_bytes, left = t->count - w->done;
    w->now = left < PIECE / wide ? left : PIECE / wide;
    int status = 0;
    if (t->kind != UCCH_SCALE)
        status = ucch_way_copy(UCCH_TO_HOST, w->one, t->src + w->done * t->src_bytes, w->now * t->src_bytes);
    if (!status && (t->kind == UCCH_COMBINE || t->kind == UCCH_SCALE))
        status = ucch_way_copy(UCCH_TO_HOST, w->two, t->dst + w->done * t->dst_bytes, w->now * t->dst_bytes);
    return status ?: record_phase(w, UCCH_TO_HOST, FETCHING);
}

static int send_back(ucch_work *w) {
    const ucch_task *t = &w->task;
    int status = ucch_task_compute(t, w->one, w->two, w->now);
    if (!status) status = ucch_way_copy(UCCH_TO_DEVICE, t->dst + w->done * t->dst_bytes, w->two, w->now * t->dst_bytes);
    return status ?: record_phase(w, UCCH_TO_DEVICE, STORING);
}

static void release_locked(ucch_work *w) {
    ucch_pool_give(w->one);
    ucch_pool_give(w->two);
    w->one = w->two = NULL;
    w->phase = IDLE;
}

static int overlap(const ucch_task *t) {
    uint64_t bytes = t->count * t->src_bytes;
    return t->dst < t->src + bytes && t->src < t->dst + bytes;
}

/* Begin a step, and create what it needs at first use. Returns 0 or a failure. Copies to lower addresses may overlap,
 * as for the result of an in-place reduce_scatter. */
int ucch_work_begin_locked(ucch_work **work, const ucch_task *task) {
    ucch_work *w = *work ? *work : (*work = calloc(1, sizeof(*w)));
    if (!w) return UCCH_FAIL_MEMORY;
    w->task = *task;
    w->done = w->now = 0;
    w->phase = IDLE;
    if (!task->count || (task->kind == UCCH_COPY && task->src == task->dst)) return 0;
    void *function = ucch_kernel_of(task);
    if (task->kind == UCCH_COPY ? overlap(task) : !function) { /* by the host */
        w->one = ucch_pool_take(1, PIECE, NULL, 1);
        w->two = ucch_pool_take(1, PIECE, NULL, 1);
        if (w->one && w->two) return fetch(w);
        release_locked(w);
        return UCCH_FAIL_MEMORY;
    }
    int status = function ? ucch_kernel_run(function, &w->task, streams[UCCH_ACROSS])
                          : ucch_way_copy(UCCH_ACROSS, task->dst, task->src, task->count * task->src_bytes);
    return status ?: record_phase(w, UCCH_ACROSS, MOVING);
}

/* Returns 1 if the step has finished, 0 if not yet, negative on failure. */
int ucch_work_poll_locked(ucch_work *w) {
    if (w->phase == IDLE) return 1;
    int done = 0, status = ucch_event_ask(w->event, &done, &w->again);
    if (status || !done) return status;
    if (w->phase == FETCHING) return send_back(w);
    if (w->phase == STORING && (w->done += w->now) < w->task.count) return fetch(w);
    release_locked(w);
    return 1;
}
