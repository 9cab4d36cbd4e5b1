/* Makes libucs fail, on request, to allocate memory for libucp's unexpected messages; loaded before libucs. */
#include <dlfcn.h>
#include <string.h>

static int out, refused;

/* Switch failures on or off; return the number of messages that had no memory so far. */
int run_out(int now) {
    __atomic_store_n(&out, now, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&refused, __ATOMIC_SEQ_CST);
}

void *ucs_mpool_get_grow(void *pool) {
    void *libucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_NOLOAD);
    const char *(*name)(void *) = (const char *(*)(void *))dlsym(libucs, "ucs_mpool_name");
    void *(*grow)(void *) = (void *(*)(void *))dlsym(libucs, "ucs_mpool_get_grow");
    dlclose(libucs);
    if (!__atomic_load_n(&out, __ATOMIC_SEQ_CST) || strcmp(name(pool), "ucp_am_bufs")) return grow(pool);
    __atomic_add_fetch(&refused, 1, __ATOMIC_SEQ_CST);
    return 0;
}
