/* A GPU runtime without a GPU: built with -DFAKE_CUDA as the CUDA driver library, with -DFAKE_HIP as the HIP runtime.
 *
 * Device memory is host memory, streams are threads that work slowly, and results are as late as possible: a copy
 * destroys its destination when it begins, waits, and only then reads its source; freed memory is overwritten at once
 * and never reused; new memory is garbage. An order that is right only by chance on a real GPU gives wrong data here: a
 * forgotten synchronisation, a wrong stream, a use after free or a missing wait.
 *
 * Streams share queues, which run their work one after the other: eight with CUDA (CUDA_DEVICE_MAX_CONNECTIONS), four
 * with HIP (GPU_MAX_HW_QUEUES). Only in the fake HIP: one engine for each direction makes copies between host and
 * device in the order of issue, whatever they wait for (not with HSA_ENABLE_SDMA=0); freeing waits for all streams of
 * the device; streams wait for signal memory only, and compare without wrap-around; the device sees host memory at
 * another address; memory that other processes open is coherent only if it is fine-grained, which needs
 * HSA_FORCE_FINE_GRAIN_PCIE or a link.
 *
 * FAKEGPU_DEVICES: number of devices (4). FAKEGPU_DELAY_US: least time of a copy or kernel, which takes up to twice
 * that (1000). FAKEGPU_NO_FLAGS: streams cannot wait for memory. FAKEGPU_CONNECTIONS: number of queues, regardless of
 * the runtime's settings (0: one for every stream). FAKEGPU_GOES_ON: behind a running kernel a queue goes on with other
 * streams, as CUDA's do, up to further work of the kernel's stream other than events; and the 35th stream, and every
 * 43rd one behind it, is made only when no kernel runs. FAKEGPU_NO_PEERS: no process can open another one's device
 * memory. FAKEGPU_XGMI: the devices are linked. FAKEGPU_PINNED_MB: limit of host memory that devices see. FAKEGPU_HIP:
 * the version (6). FAKEGPU_AHEAD: length of a stream's queue above which the caller waits, and with it all callers of
 * the driver (0: no limit). FAKEGPU_LAZY: kernels are loaded at their first launch, which waits until the device is
 * idle, and blocks all callers of the driver meanwhile. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#if defined(FAKE_CUDA) == defined(FAKE_HIP)
#error build with -DFAKE_CUDA or with -DFAKE_HIP
#endif

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_DEVICE = 101, NOT_READY = 600 };
enum { LAUNCH_FAILED = 719 };
enum { NOT_SUPPORTED = 801, ALREADY_MAPPED = 208 };
enum { FRESH = 0xCB, IN_WORK = 0xEE, FREED = 0xDB };
enum { DEVICE_MEMORY, PINNED_MEMORY, SIGNAL_MEMORY };
enum { SHAREABLE = 2 << 20, SPARSE = 64 << 20 };
enum { COPY, FILL, SCALE, RECORD, WAIT, HOLD, WRITE, KERNEL };
#define MOST_DEVICES 16
/* Polling interval in us of a queue that waits for other work. It grows with the wait up to the second value, as
 * hundreds of polling queues would leave no cores to others. */
#define LOOK_US 50
#define LONGEST_LOOK_US 5000

/* A wait for an event is for its latest recording; it may then be recorded again, in another stream. */
typedef struct recording {
    int reached;
    struct graph *of;      /* the graph that captured it, */
    struct recording *now; /* and the recording of the last launch */
} recording;

typedef struct event {
    recording *last;
} event;

typedef struct work {
    int kind;
    void *dst;
    const void *src;
    size_t bytes, rows, dst_pitch, src_pitch; /* 0 rows: a single row */
    float value;
    recording *recording;
    uint64_t ticket;
    struct stream *of; /* NULL: an engine's */
    struct work *next;
} work;

/* Work that runs in order. */
typedef struct queue {
    pthread_t thread;
    work *head, **tail;
    int users;
    unsigned seed;
    pthread_cond_t given; /* for its own thread alone: glibc before 2.41 may lose wake-ups of several waiters (25847) */
} queue;

typedef struct stream {
    queue *queue;
    int device, unfinished, ended;
    queue *beside; /* runs its kernels and the events behind them, if queues go on (FAKEGPU_GOES_ON) */
    int running;   /* works there */
    struct stream *next;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream *streams, *default_stream;
static queue *engines[2]; /* copies from the host, and to it */
static int misuses, started, open_streams, most_queues, given, closing;
/* Frequently used settings: the boards of this process's devices, a copy's least time, and a stream's longest queue. */
static int chosen[MOST_DEVICES], devices, least_us = 1000, most_ahead, lazy, goes_on;
static _Thread_local int current = -1;

/* A network thread must never call a driver, as the call may wait for data that this thread has to carry. */
static void refuse_network_threads(void) {
    static _Thread_local int known;
    char name[16] = "";
    if (!known && !prctl(PR_GET_NAME, name) && !strncmp(name, "ucch-wire", 9)) {
        fputs("fakegpu: a network thread calls the driver\n", stderr);
        abort();
    }
    known = 1;
}

static void enter(void) {
    refuse_network_threads();
    pthread_mutex_lock(&lock);
}

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

#ifdef FAKE_HIP
enum { HIP = 1 };
#else
enum { HIP = 0 };
#endif

static int hip_version(void) { return setting("FAKEGPU_HIP", 6); }

static int boards(void) {
    int n = setting("FAKEGPU_DEVICES", 4);
    return n < 0 ? 0 : n > MOST_DEVICES ? MOST_DEVICES : n;
}

/* HIP_VISIBLE_DEVICES selects boards, up to the first invalid one. */
static void choose_boards(void) {
    const char *list = HIP ? getenv("HIP_VISIBLE_DEVICES") : NULL, *at = list && *list ? list : NULL;
    for (devices = 0; devices < boards() && (!at || *at); devices++) {
        chosen[devices] = at ? atoi(at) : devices;
        if (chosen[devices] < 0 || chosen[devices] >= boards()) break;
        at = at ? strchr(at, ',') : NULL;
        at = at ? at + 1 : list && *list ? "" : NULL;
    }
}

/* The board of a device of this process; -1 if there is none. */
static int board_of(int device) { return device >= 0 && device < devices ? chosen[device] : -1; }

static int device_count(void) { return devices; }

#include "memory.h"

/* ---- streams ---- */

/* 0 for freed memory, which no work may change. */
static int live(const void *address) {
    const region *r = find(address);
    int freed = r && r->freed;
    __atomic_add_fetch(&misuses, freed, __ATOMIC_RELAXED);
    return !freed;
}

static int memory_left(size_t *room, size_t *all) {
    *room = *all = (size_t)80 << 30;
    enter();
    for (const region *r = regions; r; r = r->next)
        *room -= r->kind == DEVICE_MEMORY && !r->freed && !r->owner ? r->bytes : 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

#include "flip.h"

static void take_time(queue *s) { usleep((useconds_t)(least_us + (least_us ? rand_r(&s->seed) % least_us : 0))); }

static void run_copy(queue *s, const work *w) {
    char *dst = w->dst;
    const char *src = w->src;
    for (size_t i = 0; i < w->rows || !i; i++, dst += w->dst_pitch, src += w->src_pitch)
        if (live(dst) && (dst + w->bytes <= src || src + w->bytes <= dst)) memset(dst, IN_WORK, w->bytes);
    take_time(s);
    dst = w->dst;
    src = w->src;
    for (size_t i = 0; i < w->rows || !i; i++, dst += w->dst_pitch, src += w->src_pitch) {
        if (live(src) + live(dst) == 2) memmove(dst, src, w->bytes);
        flip(dst, (ssize_t)w->bytes);
    }
}

static void run_kernel(queue *s, const work *w) {
    float *data = w->dst;
    take_time(s);
    for (size_t i = 0; i < w->bytes / sizeof(float) && (i || live(data)); i++)
        data[i] = w->kind == FILL ? w->value : data[i] * w->value;
}

/* Sleep until a queue's next poll: this makes waits longer by a quarter at most. */
static void look_later(unsigned *us) {
    *us = *us ? *us + *us / 4 : LOOK_US;
    *us = *us < LONGEST_LOOK_US ? *us : LONGEST_LOOK_US;
    usleep(*us);
}

/* A stream waits. */
static void hold(const void *word, uint32_t least) {
    for (unsigned us = 0;; look_later(&us)) {
        uint32_t found = __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE);
        if (HIP ? found >= least : (int32_t)(found - least) >= 0) return;
    }
}

static int reached(const recording *r) { return __atomic_load_n(&r->reached, __ATOMIC_ACQUIRE); }

static int usable(void);
static int submit(void *handle, work w);
static void first_launch(int *loaded);

#include "blocks.h"

static void run(queue *s, const work *w) {
    switch (w->kind) {
    case COPY:
        run_copy(s, w);
        break;
    case FILL:
    case SCALE:
        run_kernel(s, w);
        break;
    case RECORD:
        __atomic_store_n(&w->recording->reached, 1, __ATOMIC_RELEASE);
        break;
    case WAIT:
        for (unsigned us = 0; !reached(w->recording); look_later(&us))
            ;
        break;
    case HOLD:
        hold(w->dst, (uint32_t)w->ticket);
        break;
    case KERNEL:
        run_launch(s, w->dst);
        break;
    default:
        __atomic_store_n((uint32_t *)w->dst, (uint32_t)w->ticket, __ATOMIC_RELEASE);
    }
}

#include "graphs.h"
#include "queues.h"

/* If a thread has selected no device, CUDA returns an error, and HIP uses device 0. */
static int usable(void) {
    if (HIP && current < 0) current = 0;
    return !started ? INVALID_VALUE : current < 0 ? INVALID_CONTEXT : OK;
}

/* Read the settings from the environment. */
static void read_settings(void) {
    least_us = setting("FAKEGPU_DELAY_US", 1000);
    most_ahead = setting("FAKEGPU_AHEAD", 0);
    lazy = setting("FAKEGPU_LAZY", 0);
    goes_on = !HIP && setting("FAKEGPU_GOES_ON", 0);
}

/* The same, and the number of queues that streams without work share: for ranks that run several cases. */
void fakegpu_settings(void) {
    read_settings();
    enter();
    most_queues = setting("FAKEGPU_CONNECTIONS", most_queues);
    for (stream *s = streams; s; s = s->next) {
        if (s->ended || s->unfinished) continue;
        s->queue->users--;
        s->queue = queue_for_locked();
    }
    pthread_mutex_unlock(&lock);
}

static int begin(void) {
    const char *fine = getenv("HSA_FORCE_FINE_GRAIN_PCIE");
    int told = HIP ? setting("GPU_MAX_HW_QUEUES", 4) : setting("CUDA_DEVICE_MAX_CONNECTIONS", 8);
    if (!started) {
        most_queues = setting("FAKEGPU_CONNECTIONS", told);
        fine_grained = !HIP || setting("FAKEGPU_XGMI", 0) || (fine && !strcmp(fine, "1"));
    }
    started = 1;
    choose_boards();
    read_settings();
    return device_count() ? OK : 100; /* no device */
}

static const char *failing;
static int before_failing;

static int fails(const char *name) {
    const char *which = __atomic_load_n(&failing, __ATOMIC_SEQ_CST);
    if (!which || (*which && strcmp(which, name))) return 0;
    return __atomic_fetch_sub(&before_failing, 1, __ATOMIC_SEQ_CST) == 0;
}

static int query(event *e) {
    if (e->last && e->last->of) return CAPTURED_EVENT;
    if (refused()) return refused();
    pass_driver();
    enter();
    int done = !e->last || reached(e->last);
    pthread_mutex_unlock(&lock);
    return done ? OK : NOT_READY;
}

static int flag_work(void *handle, void *word, uint32_t value, int kind) {
    if (setting("FAKEGPU_NO_FLAGS", 0)) return NOT_SUPPORTED;
    if (HIP && (kind == HOLD ? kind_of(word) != SIGNAL_MEMORY : kind_of(word) < 0)) return INVALID_VALUE;
    return submit(handle, (work){.kind = kind, .dst = word, .ticket = value});
}

static int bus(int device, char *text, int room) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    snprintf(text, (size_t)room, "0000:%02x:00.0", board_of(device) + 1);
    return OK;
}

static const char *error_name(int code) {
    return code == OUT_OF_MEMORY    ? "FAKE_OUT_OF_MEMORY"
           : code == INVALID_DEVICE ? "FAKE_INVALID_DEVICE"
           : code == NOT_SUPPORTED  ? "FAKE_NOT_SUPPORTED"
                                    : "FAKE_ERROR";
}

/* ---- for tests: kernels, accesses to freed memory, streams that were not destroyed, calls that gave them work,
 * whether a thread is blocked in pinning memory, and whether the driver is blocked ---- */

static void first_launch(int *loaded) {
    if (lazy) load_kernel(loaded);
}

#define ELEMENTWISE(name, what)                                                                                        \
    int fakegpu_##name(void *handle, float *data, size_t n, float value) {                                             \
        static int loaded;                                                                                             \
        first_launch(&loaded);                                                                                         \
        return submit(handle, (work){.kind = what, .dst = data, .bytes = n * sizeof(float), .value = value});          \
    }
ELEMENTWISE(fill, FILL)
ELEMENTWISE(scale, SCALE)

/* Free memory of a crew's previous case, which no work uses, without waiting. */
void fakegpu_forget(void *address) {
    region *r = find(address);
    enter();
    if (begins(r, address)) poison_locked(r);
    pthread_mutex_unlock(&lock);
}

/* After `more` calls of this name (CUDA's for both runtimes; "": of any name) let one fail. */
void fakegpu_fail(const char *name, int more) {
    __atomic_store_n(&failing, NULL, __ATOMIC_SEQ_CST);
    __atomic_store_n(&before_failing, more, __ATOMIC_SEQ_CST);
    __atomic_store_n(&failing, strdup(name), __ATOMIC_SEQ_CST);
}

void fakegpu_stand_pins(int on) { __atomic_store_n(&pins_stand, on, __ATOMIC_SEQ_CST); }

#define COUNT(name, of)                                                                                                \
    int fakegpu_##name(void) { return __atomic_load_n(&of, __ATOMIC_SEQ_CST); }
COUNT(misuses, misuses)
COUNT(streams, open_streams)
COUNT(given, given)
COUNT(closing, closing) /* calls that close another process's memory, and wait for the device */
COUNT(pins_waiting, pins_waiting)
COUNT(kept, kept)
COUNT(movers, movers)

/* UCC and UCX treat it as host memory, which it is. */
int ucch_memory_type(void) { return 0; }

#include "names.h"
