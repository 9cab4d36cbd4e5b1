/* Kernels: the package's own, compiled for the host (building.py). Included by fakegpu.c.
 *
 * Every thread of every block is a fiber of the queue's thread. The next fiber is drawn at random: at barriers, now and
 * then between two memory accesses, and when a fiber reads a word again, which is a wait. The compiler turns accesses
 * into calls of this file, as it would for ThreadSanitizer: they must be aligned, and in memory that the device sees
 * and that is not freed. Stores of AMD's branch, which are atomic, become visible late and in any order, up to a fence
 * of their own thread. Loads are never early: a missing fence after a wait is not found here. Blocks have fewer threads
 * than requested, so kernels must not rely on the number.
 */
#include <ucontext.h>

enum { MOST_FIBERS = 128, FIBER_STACK = 1 << 16, MOST_STORES = 8, LATELY = 64, MOST_LOOKS = 4000 };

typedef struct kernel {
    const char *name, *text;
    void (*enter)(void **arguments);
    size_t bytes; /* of its struct; 0: its arguments are four words */
} kernel;
extern const kernel fakegpu_kernels[]; /* ends with a row without a name */

typedef struct launch {
    const kernel *of;
    unsigned blocks, threads;
    size_t bytes;
    char arguments[];
} launch;

typedef struct block {
    unsigned here, arrived;
    char shared[4][1024];
} block;

/* A store that is not visible to other threads yet. */
typedef struct store {
    void *at;
    unsigned bytes;
    uint64_t value;
} store;

typedef struct fiber {
    unsigned place[4]; /* threadIdx, blockIdx, blockDim, gridDim (device.h) */
    struct block *in;
    ucontext_t context;
    char *stack;
    int stores, waits, ended;
    store late[MOST_STORES];
    unsigned written; /* number of its writes, and its reads since the last one */
    struct {
        const void *at;
        unsigned written;
    } read[LATELY];
} fiber;

/* The kernel that this thread runs, and the current fiber. */
typedef struct grid {
    queue *queue;
    fiber *fibers, *ready[MOST_FIBERS];
    unsigned n, blocks;
    unsigned long accesses, next; /* number so far; the one at which to switch fibers */
    ucontext_t context;
} grid;
static _Thread_local grid *running;
static _Thread_local fiber *self;
static _Thread_local int any_memory;

static unsigned drawn(unsigned end) { return (unsigned)rand_r(&running->queue->seed) % end; }

/* Switch to another fiber. */
static void give_way(void) { swapcontext(&self->context, &running->context); }

static void wait_a_while(void) {
    self->waits = 1;
    give_way();
}

static void fault(const char *what, const void *address) {
    fprintf(stderr, "fakegpu: a kernel %s (%p)\n", what, address);
    abort();
}

/* ---- memory ---- */

static void see_store(fiber *f, int i) {
    store *s = &f->late[i];
    if (s->bytes == 8) __atomic_store_n((uint64_t *)s->at, s->value, __ATOMIC_RELEASE);
    if (s->bytes == 4) __atomic_store_n((uint32_t *)s->at, (uint32_t)s->value, __ATOMIC_RELEASE);
    if (s->bytes == 1) __atomic_store_n((uint8_t *)s->at, (uint8_t)s->value, __ATOMIC_RELEASE);
    memmove(s, s + 1, (size_t)(--f->stores - i) * sizeof(*s));
}

/* Make one of the stores visible; of one address the first. */
static void see_any(fiber *f) {
    int i = (int)drawn((unsigned)f->stores), first = 0;
    while (f->late[first].at != f->late[i].at)
        first++;
    see_store(f, first);
}

static void see_all(fiber *f) {
    while (f->stores)
        see_any(f);
}

static int within(const void *at, const void *from, size_t bytes) {
    return (const char *)at >= (const char *)from && (const char *)at < (const char *)from + bytes;
}

static void look_at_region(const void *at, unsigned bytes) {
    static _Thread_local region *known[2];
    region *r = NULL;
    for (int i = 0; i < 2 && !r; i++)
        if (known[i] && (is_in(at, known[i]->base, known[i]->bytes) || is_in(at, known[i]->seen, known[i]->bytes)))
            r = known[i];
    if (!r) {
        r = find(at);
        known[0] = known[1];
        known[1] = r;
    }
    const char *end = (const char *)at + bytes - 1;
    if (!r || (r->seen && !is_in(at, r->seen, r->bytes))) fault("uses memory that the device does not see", at);
    if (!is_in(end, r->base, r->bytes) && !is_in(end, r->seen, r->bytes)) fault("goes past the end of memory", at);
    if (r->freed) fault("uses freed memory", at);
}

/* Switch to another fiber: in long kernels less and less often. */
static void stop_here(void) {
    running->next = running->accesses + drawn(2 + (unsigned)(running->accesses / 16));
    if (self->stores) see_any(self);
    give_way();
}

/* Called before each access. */
static void meet_memory(const void *at, unsigned bytes, int writes) {
    if (within(at, self->stack, FIBER_STACK)) return;
    int shared = within(at, self->in->shared, sizeof(self->in->shared));
    if (!shared) {
        if ((uintptr_t)at % bytes) fault("is at an address that is no element's", at);
        if (!any_memory) look_at_region(at, bytes);
    }
    for (int i = 0; i < self->stores; i++)
        if (within(at, self->late[i].at, self->late[i].bytes) || within(self->late[i].at, at, bytes)) see_all(self);
    unsigned slot = (unsigned)((uintptr_t)at / 4) * 2654435761u / (1u << 26);
    int again = !writes && !shared && self->read[slot].at == at && self->read[slot].written == self->written;
    self->written += (unsigned)writes;
    self->read[slot].at = at;
    self->read[slot].written = self->written;
    if (again)
        wait_a_while();
    else if (++running->accesses >= running->next)
        stop_here();
}

#define HOOK(kind, n, writes)                                                                                          \
    void __tsan_##kind##n(void *at) { meet_memory(at, n, writes); }                                                    \
    void __tsan_unaligned_##kind##n(void *at) { fault("is at an address that is no element's", at); }
#define HOOKS(n) HOOK(read, n, 0) HOOK(write, n, 1)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#define RANGE_HOOK(kind, writes)                                                                                       \
    void __tsan_##kind##_range(void *at, unsigned long bytes) {                                                        \
        for (unsigned long i = 0; i < bytes; i += 4)                                                                   \
            meet_memory((char *)at + i, 4, writes);                                                                    \
    }
RANGE_HOOK(read, 0)
RANGE_HOOK(write, 1)
void __tsan_init(void) {}
void __tsan_func_entry(void *from) {}
void __tsan_func_exit(void) {}

#define ATOMIC_HOOKS(n, type)                                                                                          \
    type __tsan_atomic##n##_load(const type *at, int order) {                                                          \
        meet_memory(at, n / 8, 0);                                                                                     \
        return __atomic_load_n(at, __ATOMIC_ACQUIRE);                                                                  \
    }                                                                                                                  \
    void __tsan_atomic##n##_store(type *at, type value, int order) {                                                   \
        meet_memory(at, n / 8, 1);                                                                                     \
        if (self->stores == MOST_STORES) see_any(self);                                                                \
        self->late[self->stores++] = (store){at, n / 8, value};                                                        \
    }
ATOMIC_HOOKS(8, uint8_t)
ATOMIC_HOOKS(32, uint32_t)
ATOMIC_HOOKS(64, uint64_t)

void __threadfence_system(void) {
    see_all(self);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

unsigned atomicExch(unsigned *at, unsigned value) {
    meet_memory(at, 4, 1);
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

unsigned atomicInc(unsigned *at, unsigned most) {
    meet_memory(at, 4, 1);
    unsigned was = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &was, was >= most ? 0 : was + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return was;
}

/* ---- blocks ---- */

unsigned fakegpu_place_of(int which) { return self->place[which]; }

void *fakegpu_shared(unsigned which) { return self->in->shared[which]; }

/* All fibers that have arrived continue, slowly at times. */
static void open_barrier(struct block *b) {
    b->arrived = 0;
    for (unsigned i = 0; i < running->blocks * self->place[2]; i++)
        if (running->fibers[i].in == b && !running->fibers[i].ended) running->ready[running->n++] = &running->fibers[i];
    if (!drawn(4 * running->blocks)) take_time(running->queue);
}

/* This fiber must be woken. */
static void leave_ready(void) {
    unsigned i = 0;
    while (running->ready[i] != self)
        i++;
    running->ready[i] = running->ready[--running->n];
}

void __syncthreads(void) {
    struct block *b = self->in;
    leave_ready();
    if (++b->arrived == b->here) open_barrier(b);
    give_way();
}

static void enter_kernel(unsigned low, unsigned high) {
    const launch *l = (const launch *)((uintptr_t)high << 32 | low);
    void *arguments[4];
    for (int i = 0; i < 4; i++)
        arguments[i] = (void *)(l->arguments + 8 * i);
    l->of->enter(arguments);
    see_all(self);
    self->ended = 1;
    struct block *b = self->in;
    leave_ready();
    if (--b->here && b->arrived == b->here) open_barrier(b);
    give_way();
}

static void begin_fiber(grid *g, const launch *l, struct block *blocks, char *stacks, unsigned i) {
    fiber *f = g->ready[g->n++] = &g->fibers[i];
    f->place[0] = i % l->threads;
    f->place[1] = i / l->threads;
    f->place[2] = l->threads;
    f->place[3] = l->blocks;
    f->in = &blocks[f->place[1]];
    f->in->here++;
    f->stack = stacks + (size_t)i * FIBER_STACK;
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = FIBER_STACK;
    makecontext(&f->context, (void (*)(void))enter_kernel, 2, (unsigned)(uintptr_t)l, (unsigned)((uintptr_t)l >> 32));
}

/* Only kernels that do not wait have many blocks, and any number of blocks works for them. */
static void shrink(launch *l, unsigned *seed) {
    if (l->blocks > 32) l->blocks = 1 + (unsigned)rand_r(seed) % 32;
    unsigned most = MOST_FIBERS / l->blocks, some = 1 + (unsigned)rand_r(seed) % 8;
    most = most < some ? most : some;
    if (l->threads > most) l->threads = most;
}

/* Number of threads that have not ended. */
static int run_launch(queue *s, launch *l) {
    static _Thread_local char *stacks;
    if (!stacks)
        stacks = mmap(NULL, MOST_FIBERS * FIBER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    take_time(s);
    shrink(l, &s->seed);
    unsigned all = l->blocks * l->threads;
    grid g = {.queue = s, .blocks = l->blocks};
    struct block *blocks = calloc(l->blocks, sizeof(*blocks));
    g.fibers = calloc(all, sizeof(*g.fibers));
    for (unsigned i = 0; i < all; i++)
        begin_fiber(&g, l, blocks, stacks, i);
    running = &g;
    for (unsigned us = 0, waits = 0, looks = 0; g.n;) {
        fiber *late = &g.fibers[drawn(all)];
        if (late->stores) see_any(late);
        self = g.ready[drawn(g.n)];
        self->waits = 0;
        swapcontext(&g.context, &self->context);
        waits = self->waits ? waits + 1 : 0;
        if (!waits) us = 0;
        if (waits <= 2 * g.n || waits % (8 * g.n)) continue;
        look_later(&us);
        if (any_memory && ++looks == MOST_LOOKS) break; /* the awaited data never arrives: report it to the caller */
    }
    int left = (int)g.n;
    self = NULL;
    running = NULL;
    free(g.fibers);
    free(blocks);
    free(l);
    return left;
}

/* ---- the run-time compiler, and launches ---- */

static int movers; /* number of kernels of several blocks that have moved messages */

/* Find a kernel by name, or by source; NULL if there is none. */
static const kernel *kernel_of(const char *name, const char *source) {
    const kernel *k = fakegpu_kernels;
    while (k->name && strcmp(source ? k->text : k->name, source ? source : name) != 0)
        k++;
    return k->name ? k : NULL;
}

static const kernel *made_of(const char *source) { return kernel_of(NULL, source); }

/* A kernel, and its image. */
typedef struct function {
    const kernel *of;
    const char *image;
    int loaded;
} function;

static launch *new_launch(const kernel *k, unsigned blocks, unsigned threads, void **arguments) {
    int single = k->bytes > 0;
    size_t bytes = single ? k->bytes : 32;
    launch *l = malloc(sizeof(*l) + bytes + 32);
    if (!l) return NULL;
    *l = (launch){k, blocks, threads, sizeof(*l) + bytes};
    for (int i = 0; i < (single ? 1 : 4); i++)
        memcpy(l->arguments + 8 * i, arguments[i], single ? bytes : 8);
    return l;
}

static int launch_kernel(void *handle_of_function, unsigned blocks, unsigned threads, void **arguments, void *handle) {
    function *f = handle_of_function;
    if (usable()) return usable();
    if (strcmp(f->of->name, f->image)) return INVALID_VALUE; /* the image, which was not copied, no longer exists */
    first_launch(&f->loaded);
    launch *l = new_launch(f->of, blocks, threads, arguments);
    if (!l) return OUT_OF_MEMORY;
    int moves = !strcmp(f->of->name, "ring") || (!strcmp(f->of->name, "lane") && blocks > 1);
    __atomic_add_fetch(&movers, moves, __ATOMIC_RELAXED);
    return submit(handle, (work){.kind = KERNEL, .dst = l});
}

/* True if it must not be captured: numbers among its arguments are valid for one run only. */
static int runs_once(const launch *l) { return strstr("await post lane ring", l->of->name) != NULL; }

static launch *again(const launch *l) { return memcpy(malloc(l->bytes), l, l->bytes); }

static int find_kernel(void **out, const void *module, const char *name) {
    const kernel *k = kernel_of(module, NULL);
    function *f = k && !strcmp(name, "ucch") ? malloc(sizeof(*f)) : NULL;
    if (f) *f = (function){k, module, HIP}; /* HIP loads all of a module */
    *out = f;
    return f ? OK : INVALID_VALUE;
}

/* Run a kernel synchronously, on memory of any kind: 0, or an error if it waits for ever. */
int fakegpu_run(const char *name, unsigned blocks, unsigned threads, void **arguments, unsigned seed) {
    const kernel *k = kernel_of(name, NULL);
    launch *l = k ? new_launch(k, blocks, threads, arguments) : NULL;
    queue of = {.seed = seed};
    any_memory = 1;
    int status = l ? run_launch(&of, l) : INVALID_VALUE;
    any_memory = 0;
    return status;
}
