/* A GPU runtime without a GPU: built with -DFAKE_CUDA as the CUDA driver library, with -DFAKE_HIP as the HIP runtime.
 *
 * Device memory is host memory, streams are threads that work slowly, and nothing is ready before it is due: a copy
 * destroys its destination when it begins, takes its time, and only then reads its source; freed memory is overwritten
 * at once and never used again; fresh memory is garbage. So an order that is only accidentally right on a real GPU is
 * wrong here: a forgotten synchronisation, a wrong stream, a use after free and a missing wait show as wrong data.
 *
 * FAKEGPU_DEVICES: how many devices (4). FAKEGPU_DELAY_US: least time of a copy or kernel, which takes up to twice that
 * (1000). FAKEGPU_NO_FLAGS: streams cannot wait for memory. FAKEGPU_CONNECTIONS: streams that run beside each other;
 * more than these go one after the other, as on a device that has run out of connections (0: as many as there are).
 * FAKEGPU_ROOM_MB: how much memory of a device is said to be free (4096), whatever is allocated. FAKEGPU_NO_PEERS: no
 * process can open another one's device memory. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(FAKE_CUDA) == defined(FAKE_HIP)
#error build with -DFAKE_CUDA or with -DFAKE_HIP
#endif

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_DEVICE = 101, NOT_READY = 600 };
enum { NOT_SUPPORTED = 801 };
enum { FRESH = 0xCB, IN_WORK = 0xEE, FREED = 0xDB };
enum { DEVICE_MEMORY, PINNED_MEMORY };
enum { SHAREABLE = 2 << 20, SPARSE = 64 << 20 };
enum { COPY, FILL, SCALE, ADD, RECORD, WAIT, HOLD, WRITE, WHOLE, CARRY };
#define MOST_DEVICES 16
/* Whoever waits for something that is no work of its own looks for it this often, in us. */
#define LOOK_US 50

/* Whoever waits for an event waits for its last recording so far; it may be recorded anew, in another stream. */
typedef struct recording {
    int reached;
} recording;

typedef struct event {
    recording *last;
} event;

typedef struct work {
    int kind;
    void *dst;
    const void *src;
    size_t bytes;
    float value;
    recording *recording;
    uint64_t ticket;
    struct work *next;
} work;

typedef struct stream {
    pthread_t thread;
    work *head, **tail;
    int busy, ending;
    unsigned seed;
    pthread_cond_t given; /* of its own thread alone: glibc before 2.41 loses wake-ups of waiters in a crowd (25847) */
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream *default_stream;
static int misuses, started, open_streams;
static unsigned streams_made;
static _Thread_local int current = -1;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int device_count(void) {
    int n = setting("FAKEGPU_DEVICES", 4);
    return n < 0 ? 0 : n > MOST_DEVICES ? MOST_DEVICES : n;
}

#include "memory.h"

/* ---- streams ---- */

/* 0 for freed memory, which nothing changes any more. */
static int live(const void *address) {
    pthread_mutex_lock(&lock);
    region *r = find_locked(address);
    int freed = r && r->freed;
    misuses += freed;
    pthread_mutex_unlock(&lock);
    return !freed;
}

static int memory_left(size_t *room, size_t *all) {
    *room = *all = (size_t)setting("FAKEGPU_ROOM_MB", 4096) << 20;
    return OK;
}

static void take_time(stream *s) {
    int least = setting("FAKEGPU_DELAY_US", 1000);
    usleep((useconds_t)(least + (least ? rand_r(&s->seed) % least : 0)));
}

static void run_copy(stream *s, const work *w) {
    char *dst = w->dst;
    const char *src = w->src;
    if (live(dst) && (dst + w->bytes <= src || src + w->bytes <= dst))
        memset(dst, IN_WORK, w->bytes);
    take_time(s);
    if (live(src) + live(dst) == 2)
        memmove(dst, src, w->bytes);
}

static void run_kernel(stream *s, const work *w) {
    float *data = w->dst;
    take_time(s);
    for (size_t i = 0; i < w->bytes / sizeof(float) && (i || live(data)); i++)
        data[i] = w->kind == FILL ? w->value : data[i] * w->value;
}

/* dst = dst + src: what a kernel of the run-time compiler does here. */
static void run_add(stream *s, const work *w) {
    float *dst = w->dst;
    const float *src = w->src;
    take_time(s);
    if (live(dst) + live(src) == 2)
        for (size_t i = 0; i < w->bytes / sizeof(float); i++)
            dst[i] += src[i];
}

static int there(const void *word, uint32_t least) {
    return (int32_t)(__atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE) - least) >= 0;
}

static void hold(const void *word, uint32_t least) {
    while (!there(word, least))
        usleep(LOOK_US);
}

static int reached(const recording *r) {
    return __atomic_load_n(&r->reached, __ATOMIC_ACQUIRE);
}

#include "carry.h"
#include "whole.h"

static void run(stream *s, const work *w) {
    switch (w->kind) {
    case COPY:
        run_copy(s, w);
        break;
    case FILL:
    case SCALE:
        run_kernel(s, w);
        break;
    case ADD:
        run_add(s, w);
        break;
    case RECORD:
        __atomic_store_n(&w->recording->reached, 1, __ATOMIC_RELEASE);
        break;
    case WAIT:
        while (!reached(w->recording))
            usleep(LOOK_US);
        break;
    case HOLD:
        hold(w->dst, (uint32_t)w->ticket);
        break;
    case WHOLE:
        run_whole(s, w->dst);
        break;
    case CARRY:
        run_carry(s, w->dst);
        break;
    default:
        __atomic_store_n((uint32_t *)w->dst, (uint32_t)w->ticket, __ATOMIC_RELEASE);
    }
}

static void *worker(void *data) {
    stream *s = data;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->head && !s->ending)
            pthread_cond_wait(&s->given, &lock);
        work *w = s->head;
        if (!w)
            break;
        s->head = w->next;
        if (!s->head)
            s->tail = &s->head;
        s->busy = 1;
        pthread_mutex_unlock(&lock);
        run(s, w);
        free(w);
        pthread_mutex_lock(&lock);
        s->busy = 0;
    }
    pthread_mutex_unlock(&lock);
    free(s);
    return NULL;
}

static int new_stream(stream **out) {
    stream *s = calloc(1, sizeof(*s));
    if (!s)
        return OUT_OF_MEMORY;
    s->tail = &s->head;
    pthread_cond_init(&s->given, NULL);
    s->seed = ++streams_made * 2654435761u;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int status = pthread_create(&s->thread, &attributes, worker, s);
    pthread_attr_destroy(&attributes);
    if (status) {
        free(s);
        return OUT_OF_MEMORY;
    }
    *out = s;
    return OK;
}

static int make_stream(stream **out) {
    __atomic_add_fetch(&open_streams, 1, __ATOMIC_RELAXED);
    static stream *shared[MOST_DEVICES];
    static unsigned made;
    int most = setting("FAKEGPU_CONNECTIONS", 0);
    if (most <= 0)
        return new_stream(out);
    stream **one = &shared[made++ % (unsigned)(most < MOST_DEVICES ? most : MOST_DEVICES)];
    int status = *one ? OK : new_stream(one);
    *out = *one;
    return status;
}

static stream *stream_of(void *handle) {
    if (handle)
        return handle;
    pthread_mutex_lock(&lock);
    stream *s = default_stream;
    pthread_mutex_unlock(&lock);
    if (!s && make_stream(&s) == OK)
        default_stream = s;
    return s;
}

static int submit(void *handle, work w) {
    stream *s = stream_of(handle);
    work *copy = malloc(sizeof(*copy));
    if (!s || !copy) {
        free(copy);
        return OUT_OF_MEMORY;
    }
    *copy = w;
    copy->next = NULL;
    pthread_mutex_lock(&lock);
    *s->tail = copy;
    s->tail = &copy->next;
    pthread_cond_signal(&s->given);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Without a current device a real runtime refuses as well. */
static int usable(void) {
    return !started ? INVALID_VALUE : current < 0 ? INVALID_CONTEXT : OK;
}

static int begin(void) {
    started = 1;
    return device_count() ? OK : 100; /* no device */
}

static int copy_async(void *dst, const void *src, size_t bytes, void *handle) {
    return usable() ? usable() : submit(handle, (work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
}

static int end_stream(void *handle) {
    stream *s = handle;
    __atomic_sub_fetch(&open_streams, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lock);
    s->ending = !setting("FAKEGPU_CONNECTIONS", 0);
    pthread_cond_signal(&s->given);
    pthread_mutex_unlock(&lock);
    return OK;
}

static int synchronize(void *handle) {
    stream *s = stream_of(handle);
    pthread_mutex_lock(&lock);
    while (s->head || s->busy) {
        pthread_mutex_unlock(&lock);
        usleep(LOOK_US);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

static int record(event *e, void *handle) {
    if (usable())
        return usable();
    recording *r = calloc(1, sizeof(*r)); /* never freed: anybody may still wait for it */
    if (!r)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    e->last = r;
    pthread_mutex_unlock(&lock);
    return submit(handle, (work){.kind = RECORD, .recording = r});
}

static int wait_event(void *handle, event *e) {
    pthread_mutex_lock(&lock);
    recording *r = e->last;
    pthread_mutex_unlock(&lock);
    return r ? submit(handle, (work){.kind = WAIT, .recording = r}) : OK;
}

static int query(event *e) {
    pthread_mutex_lock(&lock);
    int done = !e->last || reached(e->last);
    pthread_mutex_unlock(&lock);
    return done ? OK : NOT_READY;
}

static int flag_work(void *handle, void *word, uint32_t value, int kind) {
    if (setting("FAKEGPU_NO_FLAGS", 0))
        return NOT_SUPPORTED;
    return submit(handle, (work){.kind = kind, .dst = word, .ticket = value});
}

static int bus(int device, char *text, int room) {
    if (device < 0 || device >= device_count())
        return INVALID_DEVICE;
    snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1);
    return OK;
}

static int error_name(int code, const char **name) {
    *name = code == OUT_OF_MEMORY    ? "FAKE_OUT_OF_MEMORY"
            : code == INVALID_DEVICE ? "FAKE_INVALID_DEVICE"
            : code == NOT_SUPPORTED  ? "FAKE_NOT_SUPPORTED"
                                     : "FAKE_ERROR";
    return OK;
}

/* ---- for tests: kernels, how often work touched freed memory, and streams that were not given back ---- */

int fakegpu_fill(void *handle, float *data, size_t n, float value) {
    return submit(handle, (work){.kind = FILL, .dst = data, .bytes = n * sizeof(float), .value = value});
}

int fakegpu_scale(void *handle, float *data, size_t n, float value) {
    return submit(handle, (work){.kind = SCALE, .dst = data, .bytes = n * sizeof(float), .value = value});
}

int fakegpu_misuses(void) {
    pthread_mutex_lock(&lock);
    int n = misuses;
    pthread_mutex_unlock(&lock);
    return n;
}

int fakegpu_streams(void) {
    return __atomic_load_n(&open_streams, __ATOMIC_RELAXED);
}

/* UCC and UCX see what it is: host memory. */
int ucch_memory_type(void) {
    return 0;
}

#include "rtc.h"

#include "names.h"
