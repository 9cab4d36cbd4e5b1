/* GPU runtimes, found by dlopen: loading, the device bound to this rank, its memory pool. Which file to try is Python's
 * business, what a vendor's functions are that of its adapter. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/gpu.h"

#define RUNTIMES 16

/* The engine's own adapters, each in its file, and behind them those of libraries. */
extern const device_adapter ucch_cuda, ucch_hip;
static const device_adapter *table[RUNTIMES] = {&ucch_cuda, &ucch_hip};

static int loaded[RUNTIMES];
static int memory_type[RUNTIMES];
static int bound_runtime = -1, bound_device, may_hold = 1;

/* ---- the reasons of failures ---- */

/* Of this thread's last failure, and of the last one in any thread. */
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

/* Why a call that this thread made has failed. */
const char *ucch_device_error(void) { return text; }

/* Why the last call has failed, whichever thread made it: operations fail in the thread that makes progress, and
 * threads that wait for them ask here. Valid until this thread asks again. */
const char *ucch_device_last_error(void) {
    static _Thread_local char copy[sizeof(last_text)];
    pthread_mutex_lock(&last_lock);
    memcpy(copy, last_text, sizeof(copy));
    pthread_mutex_unlock(&last_lock);
    return copy;
}

static int ready(int runtime) {
    if (runtime >= 0 && runtime < RUNTIMES && loaded[runtime]) return 1;
    explain("no GPU runtime is loaded");
    return 0;
}

/* 0, or a failure with its reason, by the code that a runtime's function has returned. */
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

/* Where an adapter of this name is, or the first free place. */
static int place_of(const char *name) {
    int runtime = 0;
    while (runtime < RUNTIMES && table[runtime] && strcmp(table[runtime]->name, name))
        runtime++;
    return runtime;
}

/* Adapter of a library, or the engine's own of this name. */
static const device_adapter *adapter_of(const char *name, void *handle) {
    const device_adapter *own = dlsym(handle, "ucch_adapter");
    int runtime = place_of(name);
    if (runtime < RUNTIMES && !own) own = table[runtime];
    if (!own || runtime == RUNTIMES)
        explain("%s", own ? "there are too many adapters" : "it has no symbol ucch_adapter");
    else if (own->bytes != sizeof(*own) || strcmp(own->name, name))
        explain("its adapter is of another release or vendor");
    else
        return own;
    return NULL;
}

/* The runtime's number, or a failure with its reason in ucch_device_error(). A library may say under which memory type
 * UCC and UCX know its device memory (rehearsal libraries do): int ucch_memory_type(void). */
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
    int runtime = place_of(name);
    table[runtime] = found;
    int status = ucch_device_check(runtime, found->start(), "initialisation");
    if (status) return status; /* not closed: drivers do not like to be unloaded */
    int (*own)(void) = (int (*)(void))dlsym(handle, "ucch_memory_type");
    memory_type[runtime] = own ? own() : found->memory_type;
    loaded[runtime] = 1;
    return runtime;
}

int ucch_device_memory_type(int runtime) { return ready(runtime) ? memory_type[runtime] : -1; }

/* ---- for Python ---- */

/* Seconds between two questions about one event: an eighth of what a device takes to copy a chunk. */
#define ASK_S 5e-6

/* What a runtime can do; NULL where it is not loaded. */
const device_ops *ucch_device_ops(int runtime) { return ready(runtime) ? &table[runtime]->ops : NULL; }

/* Kind of memory at an address (UCCH_MEMORY_*), and of which device times 4; or a failure. */
int ucch_device_pointer(int runtime, uintptr_t address) {
    int kind = UCCH_MEMORY_UNKNOWN, device = 0;
    if (!ready(runtime)) return UCCH_FAIL_DEVICE;
    int status =
        ucch_device_check(runtime, table[runtime]->ops.pointer((const void *)address, &kind, &device), "pointer");
    return status ?: 4 * device + kind;
}

/* ---- the device of this rank ---- */

/* The progress thread may ask for events while other threads capture graphs, which it has no part in. */
static void relax(void) { ucch_capture_mode(UCCH_RELAXED); }

/* Every thread that makes progress works with this device from now on. `may`: streams may wait for work that has not
 * been queued yet. Otherwise they wait only for work that has: then nothing waits in a circle, whatever shares a queue,
 * as what is in front of a wait was queued before it, and so was what it waits for, at whatever rank. */
int ucch_device_bind(int runtime, int device, int may) {
    int status = ready(runtime) ? ucch_device_check(runtime, table[runtime]->ops.use(device), "use") : UCCH_FAIL_DEVICE;
    if (status < 0) return status;
    UCCH_LOCKED; /* the progress thread may be at work with it already */
    bound_runtime = runtime;
    bound_device = device;
    may_hold = may;
    ucch_progress_inside(ucch_device_enter, ucch_device_leave, relax);
    return 0;
}

int ucch_may_hold(void) { return may_hold; }

int ucch_bound(void) { return bound_runtime; }

/* Type of the engine that UCC is to make of a stream. */
int ucch_bound_engine(void) { return table[bound_runtime]->engine_type; }

const device_ops *ucch_bound_ops(void) { return bound_runtime < 0 ? NULL : &table[bound_runtime]->ops; }

int ucch_device_fail(int code, const char *what) { return ucch_device_check(bound_runtime, code, what); }

/* Sets `done` if the stream has passed the event; asked so often at most, as each question keeps threads that launch
 * work from the driver for a moment. `again`: when next, the caller's own. */
int ucch_event_ask(void *event, int *done, double *again) {
    double now = ucch_now();
    *done = 0;
    if (now < *again) return 0;
    int status = ucch_device_fail(ucch_bound_ops()->event_done(event, done), "event");
    *again = *done ? 0 : now + ASK_S;
    return status;
}

/* The number of the capture if a stream of the bound device is being captured in a graph, or 0. */
uint64_t ucch_stream_captures(uintptr_t stream) {
    int does = 0;
    uint64_t which = 0;
    if (bound_runtime < 0 || table[bound_runtime]->ops.stream_captures((void *)stream, &does, &which)) return 0;
    return does ? which : 0;
}

/* Exchange the calling thread's mode with captures (UCCH_RELAXED): returns the one before. */
int ucch_capture_mode(int mode) {
    if (bound_runtime >= 0) table[bound_runtime]->ops.capture_mode(&mode);
    return mode;
}

/* Record an event, made at first use, behind what is in a stream: 0, or a failure. */
int ucch_event_record(void **event, void *stream) {
    const device_ops *ops = ucch_bound_ops();
    int status = *event ? 0 : ucch_device_fail(ops->event_new(event), "event");
    return status ?: ucch_device_fail(ops->event_record(*event, stream), "record");
}

/* Let one stream wait for what is in another by now, by way of an event. */
int ucch_stream_follow(void *event, void *first, void *then) {
    return ucch_event_record(&event, first) ?: ucch_device_fail(ucch_bound_ops()->stream_wait(then, event), "wait");
}

/* Enter this process's device; returns the argument of ucch_device_leave: -2 when nothing was changed. */
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

/* Copy in a stream of this rank's device, whichever the calling thread has chosen, and wait for it if so wanted. */
int ucch_device_move(void *dst, const void *src, size_t bytes, void *stream, int waits) {
    const device_ops *ops = ucch_bound_ops();
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ops->copy(dst, src, bytes, stream), "copy");
    return status || !waits ? status : ucch_device_fail(ops->stream_sync(stream), "stream_sync");
}

/* ---- the pool ---- */

#define GRAIN ((size_t)4096)

typedef struct block {
    void *memory;
    size_t bytes;
    int pinned, users;
    const void *owner; /* calls of one owner never run at the same time, and share */
    struct block *next;
} block;

/* A lock of its own: programs are freed, and give memory back, at any time and in any thread. Progress wants it while
 * it holds the engine's, so the runtime is not called with it: allocations take milliseconds, or wait for streams. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;

/* Memory that is idle, which is the caller's to free; NULL without any. */
static block *take_idle(void) {
    pthread_mutex_lock(&pool_lock);
    block *b = blocks;
    while (b && b->users)
        b = b->next;
    if (b) UCCH_UNLINK(blocks, b, next);
    pthread_mutex_unlock(&pool_lock);
    return b;
}

/* Give idle memory back to the runtime. */
static void drop_idle(void) {
    const device_ops *ops = ucch_bound_ops();
    for (block *b; (b = take_idle()); free(b))
        (b->pinned ? ops->unpin : ops->release)(b->memory);
}

static block *find(int pinned, size_t bytes, const void *owner) {
    block *best = NULL;
    for (block *b = blocks; b; b = b->next) {
        if (b->pinned != pinned || b->bytes < bytes) continue;
        if (b->users && owner && b->owner == owner) return b;
        if (!b->users && b->bytes <= 2 * bytes && (!best || b->bytes < best->bytes)) best = b;
    }
    return best;
}

/* New memory of a user's; NULL with a reason when out of memory. */
static block *make(int pinned, size_t bytes, const void *owner) {
    const device_ops *ops = ucch_bound_ops();
    block *b = calloc(1, sizeof(*b));
    if (!b) return NULL;
    *b = (block){.bytes = bytes, .pinned = pinned, .users = 1, .owner = owner};
    int status = (pinned ? ops->pinned : ops->alloc)(&b->memory, bytes);
    if (status) {
        drop_idle();
        status = (pinned ? ops->pinned : ops->alloc)(&b->memory, bytes);
    }
    if (!status) return b;
    free(b);
    ucch_device_fail(status, pinned ? "pinned memory" : "device memory");
    return NULL;
}

/* The smallest idle block that is not more than twice as large, or a new one; NULL with a reason when out of memory,
 * and where there is none and `may_add` is not set. Calls of one `owner` get the same block (NULL: the block is not
 * shared). */
void *ucch_pool_take(int pinned, size_t bytes, const void *owner, int may_add) {
    bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&pool_lock);
    block *b = find(pinned, bytes, owner);
    if (b) {
        b->users++;
        b->owner = owner;
    }
    pthread_mutex_unlock(&pool_lock);
    if (b || !may_add || !(b = make(pinned, bytes, owner))) return b ? b->memory : NULL;
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

/* From now on this memory is not shared. */
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
