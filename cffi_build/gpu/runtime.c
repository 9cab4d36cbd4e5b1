/* GPU runtimes, loaded by dlopen: loading, the device bound to this rank, its memory pool. Python decides which file to
 * load; the vendor's functions are in its adapter. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/gpu.h"

#define RUNTIMES 16

/* The engine's own adapters, followed by those of libraries. */
extern const device_adapter ucch_cuda, ucch_hip;
static const device_adapter *table[RUNTIMES] = {&ucch_cuda, &ucch_hip};

static int loaded[RUNTIMES];
static int memory_type[RUNTIMES];
static int bound_runtime = -1, bound_device, queues = 1;

/* ---- reasons of failures ---- */

/* Of this thread's last failure, and of the last failure in any thread. */
static _Thread_local char text[256];
static char last_text[sizeof(text)];
static pthread_mutex_t last_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((format(printf, 1, 2))) static void explain(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    pthread_mutex_lock(&last_lock);
    memcpy(last_text, text, sizeof(text));
    pthread_mutex_unlock(&last_lock);
}

/* Reason of this thread's last failure. */
const char *ucch_device_error(void) { return text; }

/* Reason of the last failure in any thread: an operation fails in the thread that makes progress, and threads that wait
 * for it ask here. Valid until this thread asks again. */
const char *ucch_device_last_error(void) {
    static _Thread_local char copy[sizeof(last_text)];
    pthread_mutex_lock(&last_lock);
    memcpy(copy, last_text, sizeof(copy));
    pthread_mutex_unlock(&last_lock);
    return copy;
}

static int is_loaded(int runtime) {
    if (runtime >= 0 && runtime < RUNTIMES && loaded[runtime]) return 1;
    explain("no GPU runtime is loaded");
    return 0;
}

/* Returns 0, or UCCH_FAIL_DEVICE with a reason if a function of the runtime has returned an error code. */
int ucch_device_check(int runtime, int code, const char *what) {
    const char *name = NULL;
    if (!code) return 0;
    if (table[runtime]->ops.error_name(code, &name) || !name) name = "error";
    explain("%s: %s (%d)", what, name, code);
    return UCCH_FAIL_DEVICE;
}

static int resolve(void *handle, const device_symbol *symbols, int store) {
    for (const device_symbol *s = symbols; s && s->name; s++) {
        void *found = dlsym(handle, s->name);
        if (!found && s->need) {
            explain("it has no symbol %s", s->name);
            return UCCH_FAIL_DEVICE;
        }
        if (store) *s->at = found;
    }
    return 0;
}

/* Index of the adapter of this name, or the first free one. */
static int index_of(const char *name) {
    int runtime = 0;
    while (runtime < RUNTIMES && table[runtime] && strcmp(table[runtime]->name, name))
        runtime++;
    return runtime;
}

/* The adapter that the library exports, or the engine's own of this name. */
static const device_adapter *adapter_of(const char *name, void *handle) {
    const device_adapter *own = dlsym(handle, "ucch_adapter");
    int runtime = index_of(name);
    if (runtime < RUNTIMES && !own) own = table[runtime];
    if (!own || runtime == RUNTIMES)
        explain("%s", own ? "there are too many adapters" : "it has no symbol ucch_adapter");
    else if (own->bytes != sizeof(*own) || strcmp(own->name, name))
        explain("its adapter is of another release or vendor");
    else
        return own;
    return NULL;
}

/* Load a runtime. Returns its number, or a failure with its reason in ucch_device_error(). A library may override the
 * memory type of its device memory (rehearsal libraries do) by exporting int ucch_memory_type(void). */
int ucch_device_load(const char *name, const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        explain("%s", why ? why : "dlopen failed");
        return UCCH_FAIL_DEVICE;
    }
    const device_adapter *found = adapter_of(name, handle);
    if (!found || resolve(handle, found->symbols, 0)) {
        dlclose(handle);
        return UCCH_FAIL_DEVICE;
    }
    resolve(handle, found->symbols, 1);
    int runtime = index_of(name);
    table[runtime] = found;
    int status = ucch_device_check(runtime, found->start(), "initialisation");
    if (status) return status; /* not closed: drivers do not support unloading */
    int (*own)(void) = (int (*)(void))dlsym(handle, "ucch_memory_type");
    memory_type[runtime] = own ? own() : found->memory_type;
    loaded[runtime] = 1;
    return runtime;
}

int ucch_device_memory_type(int runtime) { return is_loaded(runtime) ? memory_type[runtime] : -1; }

/* ---- for Python ---- */

/* Seconds between two queries of an event: an eighth of the time that a device takes to copy a chunk. */
#define ASK_S 5e-6

/* The operations of a runtime; NULL if it is not loaded. */
const device_ops *ucch_device_ops(int runtime) { return is_loaded(runtime) ? &table[runtime]->ops : NULL; }

/* UCCH_MEMORY_* of an address plus 4 times its device, or a failure. */
int ucch_device_pointer(int runtime, uintptr_t address) {
    int kind = UCCH_MEMORY_UNKNOWN, device = 0;
    if (!is_loaded(runtime)) return UCCH_FAIL_DEVICE;
    int status =
        ucch_device_check(runtime, table[runtime]->ops.pointer((const void *)address, &kind, &device), "pointer");
    return status ?: 4 * device + kind;
}

/* ---- the device of this rank ---- */

/* The progress thread may query events while other threads capture graphs, in which it has no part. */
static void relax(void) { ucch_capture_mode(UCCH_RELAXED); }

/* Bind the device that every thread with progress uses from now on. `number`: so many queues run its streams, which may
 * wait for work that is queued later. If 0, streams wait only for work that is queued already. Then there is no
 * deadlock even if streams share queues: whatever is ahead of a wait in a queue was queued before it, and so was what
 * it waits for, on any rank. */
int ucch_device_bind(int runtime, int device, int number) {
    int status =
        is_loaded(runtime) ? ucch_device_check(runtime, table[runtime]->ops.use(device), "use") : UCCH_FAIL_DEVICE;
    if (status < 0) return status;
    UCCH_LOCKED; /* the progress thread may be running already */
    bound_runtime = runtime;
    bound_device = device;
    queues = number;
    ucch_progress_inside(ucch_device_enter, ucch_device_leave, relax);
    return 0;
}

int ucch_may_hold(void) { return queues > 0; }

int ucch_queues(void) { return queues; }

int ucch_bound(void) { return bound_runtime; }

/* Type of the execution engine that UCC makes of a stream. */
int ucch_bound_engine(void) { return table[bound_runtime]->engine_type; }

const device_ops *ucch_bound_ops(void) { return bound_runtime < 0 ? NULL : &table[bound_runtime]->ops; }

int ucch_device_fail(int code, const char *what) { return ucch_device_check(bound_runtime, code, what); }

/* Set `done` if the stream has passed the event. Queries at most every ASK_S seconds, as each query blocks threads that
 * launch work for a moment. `again`: the time of the next query, kept by the caller. */
int ucch_event_ask(void *event, int *done, double *again) {
    double now = ucch_now();
    *done = 0;
    if (now < *again) return 0;
    int status = ucch_device_fail(ucch_bound_ops()->event_done(event, done), "event");
    *again = *done ? 0 : now + ASK_S;
    return status;
}

/* Number of the capture if a stream of the bound device is being captured in a graph, else 0. */
uint64_t ucch_stream_captures(uintptr_t stream) {
    int does = 0;
    uint64_t which = 0;
    if (bound_runtime < 0 || table[bound_runtime]->ops.stream_captures((void *)stream, &does, &which)) return 0;
    return does ? which : 0;
}

/* Exchange the calling thread's capture mode (UCCH_RELAXED). Returns the previous one. */
int ucch_capture_mode(int mode) {
    if (bound_runtime >= 0) table[bound_runtime]->ops.capture_mode(&mode);
    return mode;
}

/* Record an event, created at first use, in a stream. Returns 0 or a failure. */
int ucch_event_record(void **event, void *stream) {
    const device_ops *ops = ucch_bound_ops();
    int status = *event ? 0 : ucch_device_fail(ops->event_new(event), "event");
    return status ?: ucch_device_fail(ops->event_record(*event, stream), "record");
}

/* Let stream `then` wait for the current work of stream `first`, using an event. */
int ucch_stream_follow(void *event, void *first, void *then) {
    return ucch_event_record(&event, first) ?: ucch_device_fail(ucch_bound_ops()->stream_wait(then, event), "wait");
}

/* Make this process's device current. Returns the argument for ucch_device_leave; -2: nothing was changed. */
int ucch_device_enter(void) {
    if (bound_runtime < 0) return -2;
    int before = -1;
    const device_ops *ops = &table[bound_runtime]->ops;
    if (!ops->current(&before) && before == bound_device) return -2;
    ops->use(bound_device);
    return before;
}

void ucch_device_leave(int before) {
    if (before >= 0) table[bound_runtime]->ops.use(before);
}

/* Copy in a stream of this rank's device, whichever device is current, and wait for the copy if `waits`. */
int ucch_device_move(void *dst, const void *src, size_t bytes, void *stream, int waits) {
    const device_ops *ops = ucch_bound_ops();
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ops->copy(dst, src, bytes, stream), "copy");
    return status || !waits ? status : ucch_device_fail(ops->stream_sync(stream), "stream_sync");
}

/* ---- the pool ---- */

static int held;

/* Number of streams that are held by gates (gate.c). */
int ucch_gates_held(void) { return held; }

void ucch_hold_locked(int more) { held += more; }

#define GRAIN ((size_t)4096)

typedef struct block {
    void *memory;
    size_t bytes;
    int pinned, users;
    const void *owner; /* calls of one owner never run at the same time and share the block */
    struct block *next;
} block;

/* A lock of its own: programs give memory back at any time and in any thread. Progress takes it while holding the
 * engine's lock, so the runtime is not called under it: allocations take milliseconds, or wait for streams. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
UCCH_FREE_IN_FORKS(pool_lock)
static block *blocks;

/* Remove an idle block, for the caller to free; NULL if there is none. */
static block *take_idle(void) {
    pthread_mutex_lock(&pool_lock);
    block *b = blocks;
    while (b && b->users)
        b = b->next;
    if (b) UCCH_UNLINK(blocks, b, next);
    pthread_mutex_unlock(&pool_lock);
    return b;
}

/* Return idle memory to the runtime. */
static void drop_idle(void) {
    const device_ops *ops = ucch_bound_ops();
    for (block *b; (b = take_idle()); free(b))
        (b->pinned ? ops->unpin : ops->release)(b->memory);
}

static block *find_block(int pinned, size_t bytes, const void *owner) {
    block *best = NULL;
    for (block *b = blocks; b; b = b->next) {
        if (b->pinned != pinned || b->bytes < bytes) continue;
        if (b->users && owner && b->owner == owner) return b;
        if (!b->users && b->bytes <= 2 * bytes && (!best || b->bytes < best->bytes)) best = b;
    }
    return best;
}

/* Allocate a block in use; NULL with a reason if memory is exhausted. While streams are held no idle memory is returned
 * for it: that could wait for them, and they for the caller. */
static block *new_block(int pinned, size_t bytes, const void *owner) {
    const device_ops *ops = ucch_bound_ops();
    block *b = calloc(1, sizeof(*b));
    if (!b) return NULL;
    *b = (block){.bytes = bytes, .pinned = pinned, .users = 1, .owner = owner};
    int status = (pinned ? ops->pinned : ops->alloc)(&b->memory, bytes);
    if (status && !ucch_gates_held()) {
        drop_idle();
        status = (pinned ? ops->pinned : ops->alloc)(&b->memory, bytes);
    }
    if (!status) return b;
    free(b);
    ucch_device_fail(status, pinned ? "pinned memory" : "device memory");
    return NULL;
}

/* The smallest idle block of at most twice the size, or a new one. NULL with a reason if memory is exhausted, or if
 * there is no block and `may_add` is not set. Calls of one `owner` get the same block (owner NULL: it is not
 * shared). */
void *ucch_pool_take(int pinned, size_t bytes, const void *owner, int may_add) {
    bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&pool_lock);
    block *b = find_block(pinned, bytes, owner);
    if (b) {
        b->users++;
        b->owner = owner;
    }
    pthread_mutex_unlock(&pool_lock);
    if (b || !may_add || !(b = new_block(pinned, bytes, owner))) return b ? b->memory : NULL;
    pthread_mutex_lock(&pool_lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&pool_lock);
    return b->memory;
}

static block *block_of(const void *memory) {
    block *b = blocks;
    while (b && b->memory != memory)
        b = b->next;
    return b;
}

/* Stop sharing this memory with further calls of its owner. */
void ucch_pool_keep(const void *memory) {
    pthread_mutex_lock(&pool_lock);
    block *b = memory ? block_of(memory) : NULL;
    if (b) b->owner = NULL;
    pthread_mutex_unlock(&pool_lock);
}

void ucch_pool_give(void *memory) {
    pthread_mutex_lock(&pool_lock);
    block *b = memory ? block_of(memory) : NULL;
    if (b && --b->users == 0) b->owner = NULL;
    pthread_mutex_unlock(&pool_lock);
}
