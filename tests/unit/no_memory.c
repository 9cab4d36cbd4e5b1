/* Lets allocations fail; to be loaded first (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic size_t least, most;
static _Atomic int before = -1;

/* Of the next allocations of at least `from` and less than `to` bytes let one fail, the first after `good` others. */
void no_memory(size_t from, size_t to, int good) {
    least = from;
    most = to;
    before = good;
}

/* True once it has failed. */
int has_failed(void) { return before < 0; }

void *malloc(size_t bytes) {
    static void *(*next)(size_t);
    if (!next) next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    if (before >= 0 && bytes >= least && bytes < most && before-- == 0) return NULL;
    return next(bytes);
}
