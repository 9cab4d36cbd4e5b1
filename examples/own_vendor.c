/* A vendor's adapter outside the package, for a software device with its own memory and streams (own_vendor.py).
 *
 *   cc -std=gnu11 -shared -fPIC -Icffi_build examples/own_vendor.c -o libsim.so -lpthread
 *
 * Its memory is host memory and its streams are threads. Unused memory is garbage, and a copy destroys its destination
 * before it reads its source: a missing synchronisation gives wrong data. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/adapter.h"

enum { OK, NO_MEMORY = 2, NO_DEVICE = 100, NOT_SUPPORTED = 801 };
enum { FRESH = 0xCB, IN_WORK = 0xEE, FREED = 0xDB };
enum { DEVICES = 2, LOOK_US = 50 };
enum { COPY, RECORD, WAIT, HOLD, WRITE, END };

/* ---- memory ---- */

typedef struct region {
    char *base;
    size_t bytes;
    int kind, device;
    struct region *next;
} region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static region *regions;
static _Thread_local int current = -1;

static int take(void **address, size_t bytes, int kind) {
    region *r = malloc(sizeof(*r));
    if (current < 0 || !r || posix_memalign(address, 4096, bytes)) {
        free(r);
        return current < 0 ? NO_DEVICE : NO_MEMORY;
    }
    memset(*address, FRESH, bytes);
    pthread_mutex_lock(&lock);
    *r = (region){*address, bytes, kind, current, regions};
    regions = r;
    pthread_mutex_unlock(&lock);
    return OK;
}

static int give(void *address) {
    pthread_mutex_lock(&lock);
    region **at = &regions;
    while (*at && (*at)->base != (char *)address)
        at = &(*at)->next;
    region *r = *at;
    if (r) *at = r->next;
    pthread_mutex_unlock(&lock);
    if (!r) return NO_MEMORY;
    memset(r->base, FREED, r->bytes);
    free(r->base);
    free(r);
    return OK;
}

static int sim_pointer(const void *address, int *kind, int *device) {
    *kind = UCCH_MEMORY_UNKNOWN;
    *device = 0;
    pthread_mutex_lock(&lock);
    for (region *r = regions; r; r = r->next)
        if ((const char *)address >= r->base && (const char *)address < r->base + r->bytes) {
            *kind = r->kind;
            *device = r->device;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

static int sim_alloc(void **address, size_t bytes) { return take(address, bytes, UCCH_MEMORY_DEVICE); }

static int sim_pinned(void **address, size_t bytes) { return take(address, bytes, UCCH_MEMORY_PINNED); }

static int sim_release(void *address) { return give(address); }

static int sim_unpin(void *address) { return give(address); }

static int sim_room(size_t *bytes) {
    *bytes = (size_t)4 << 30;
    return OK;
}

static int sim_host_register(void *address, size_t bytes) { return OK; }

static int sim_host_unregister(void *address) { return OK; }

static int sim_mapped(void *memory, void **seen) {
    *seen = memory;
    return OK;
}

static int sim_lend(const void *address, void *name, uint64_t *offset) { return NOT_SUPPORTED; }

static int sim_borrow(const void *name, void **address) { return NOT_SUPPORTED; }

static int sim_give_back(void *address) { return NOT_SUPPORTED; }

static int sim_flag(void **word) {
    *word = aligned_alloc(64, 64);
    return *word ? (memset(*word, 0, 64), OK) : NO_MEMORY;
}

/* ---- streams and events ---- */

/* A point in a stream. An event refers to its latest one, and may be recorded again while a stream waits for it. */
typedef struct point {
    atomic_int users, reached;
} point;

typedef struct event {
    point *last;
} event;

typedef struct work {
    int kind;
    void *dst;
    const void *src;
    size_t bytes;
    uint32_t value;
    point *point;
    struct work *next;
} work;

typedef struct stream {
    pthread_mutex_t lock;
    pthread_cond_t given, idle;
    work *head, **tail;
    int busy;
} stream;

static void leave(point *p) {
    if (p && atomic_fetch_sub(&p->users, 1) == 1) free(p);
}

static void run(const work *w) {
    switch (w->kind) {
    case COPY:
        if ((char *)w->dst + w->bytes <= (const char *)w->src || (const char *)w->src + w->bytes <= (char *)w->dst)
            memset(w->dst, IN_WORK, w->bytes);
        usleep(LOOK_US);
        memmove(w->dst, w->src, w->bytes);
        break;
    case RECORD:
        atomic_store(&w->point->reached, 1);
        break;
    case WAIT:
        while (!atomic_load(&w->point->reached))
            usleep(LOOK_US);
        break;
    case HOLD:
        while ((int32_t)(__atomic_load_n((uint32_t *)w->dst, __ATOMIC_ACQUIRE) - w->value) < 0)
            usleep(LOOK_US);
        break;
    case WRITE:
        __atomic_store_n((uint32_t *)w->dst, w->value, __ATOMIC_RELEASE);
    }
}

static void *worker(void *data) {
    stream *s = data;
    for (int kind = COPY; kind != END;) {
        pthread_mutex_lock(&s->lock);
        s->busy = s->head != NULL;
        while (!s->head) {
            pthread_cond_broadcast(&s->idle);
            pthread_cond_wait(&s->given, &s->lock);
        }
        s->busy = 1;
        work *w = s->head;
        s->head = w->next;
        s->tail = s->head ? s->tail : &s->head;
        pthread_mutex_unlock(&s->lock);
        run(w);
        kind = w->kind;
        leave(w->point);
        free(w);
    }
    free(s);
    return NULL;
}

static int sim_stream_new(void **out) {
    stream *s = calloc(1, sizeof(*s));
    pthread_t thread;
    if (!s) return NO_MEMORY;
    s->tail = &s->head;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->given, NULL);
    pthread_cond_init(&s->idle, NULL);
    if (pthread_create(&thread, NULL, worker, s)) return NO_MEMORY;
    pthread_detach(thread);
    *out = s;
    return OK;
}

static stream *stream_of(void *handle) {
    static void *first;
    pthread_mutex_lock(&lock);
    if (!handle && !first) sim_stream_new(&first);
    pthread_mutex_unlock(&lock);
    return handle ? handle : first;
}

static int submit(void *handle, work what) {
    stream *s = stream_of(handle);
    work *w = s ? malloc(sizeof(*w)) : NULL;
    if (!w) return NO_MEMORY;
    *w = what;
    if (w->point) atomic_fetch_add(&w->point->users, 1);
    pthread_mutex_lock(&s->lock);
    *s->tail = w;
    s->tail = &w->next;
    pthread_cond_signal(&s->given);
    pthread_mutex_unlock(&s->lock);
    return OK;
}

static int sim_stream_free(void *handle) { return submit(handle, (work){.kind = END}); }

static int sim_stream_sync(void *handle) {
    stream *s = stream_of(handle);
    pthread_mutex_lock(&s->lock);
    while (s->head || s->busy)
        pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return OK;
}

static int sim_copy(void *dst, const void *src, size_t bytes, void *stream) {
    return submit(stream, (work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
}

static int sim_copy_rows(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                         void *stream) {
    int status = OK;
    for (size_t i = 0; i < rows && status == OK; i++)
        status = sim_copy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, bytes, stream);
    return status;
}

static int sim_stream_hold(void *stream, void *word, uint32_t least) {
    return submit(stream, (work){.kind = HOLD, .dst = word, .value = least});
}

static int sim_stream_write(void *stream, void *word, uint32_t value) {
    return submit(stream, (work){.kind = WRITE, .dst = word, .value = value});
}

static int sim_stream_turn(void *stream, void *told, uint32_t value, void *word, uint32_t least) {
    return NOT_SUPPORTED;
}

static int sim_stream_captures(void *stream, int *does, uint64_t *which) { return NOT_SUPPORTED; }

static int sim_capture_mode(int *mode) { return NOT_SUPPORTED; }

static int sim_event_new(void **out) {
    *out = calloc(1, sizeof(event));
    return *out ? OK : NO_MEMORY;
}

static int sim_event_free(void *out) {
    leave(((event *)out)->last);
    free(out);
    return OK;
}

static int sim_event_record(void *out, void *stream) {
    event *e = out;
    point *p = calloc(1, sizeof(*p));
    if (!p) return NO_MEMORY;
    p->users = 1;
    leave(e->last);
    e->last = p;
    return submit(stream, (work){.kind = RECORD, .point = p});
}

static int sim_event_done(void *out, int *done) {
    const event *e = out;
    *done = !e->last || atomic_load(&e->last->reached);
    return OK;
}

static int sim_stream_wait(void *stream, void *out) {
    const event *e = out;
    return e->last ? submit(stream, (work){.kind = WAIT, .point = e->last}) : OK;
}

/* ---- devices ---- */

static int start(void) { return OK; }

static int sim_version(int *version) {
    *version = 1000;
    return OK;
}

static int sim_traits(int *bits) {
    *bits = UCCH_EAGER | UCCH_WAITS_ANYWHERE | UCCH_OWN_QUEUES | UCCH_TELLS_CURRENT;
    return OK;
}

static int sim_count(int *devices) {
    *devices = DEVICES;
    return OK;
}

static int sim_bus(int device, char *text, int room) {
    snprintf(text, (size_t)room, "0001:%02x:00.0", device);
    return OK;
}

static int sim_target(int device, char *text, int room) {
    *text = 0;
    return OK;
}

static int sim_current(int *device) {
    *device = current;
    return OK;
}

static int sim_use(int device) {
    current = device < DEVICES ? device : current;
    return device < DEVICES ? OK : NO_DEVICE;
}

/* Without a compiler: the host does its arithmetic. */
static int sim_kernel(const void *image, void **function) { return NOT_SUPPORTED; }

static int sim_launch(void *function, unsigned blocks, unsigned threads, void **arguments, void *stream) {
    return NOT_SUPPORTED;
}

static int sim_error_name(int code, const char **name) {
    *name = code == NO_MEMORY ? "SIM_NO_MEMORY" : code == NO_DEVICE ? "SIM_NO_DEVICE" : "SIM_NOT_SUPPORTED";
    return OK;
}

const device_adapter ucch_adapter = {
    .bytes = sizeof(device_adapter),
    .name = "sim",
    .start = start,
#define DEVICE(name, params) .ops.name = sim_##name,
#include "gpu/ops.h"
};
