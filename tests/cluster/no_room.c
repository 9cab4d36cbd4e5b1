/* Libucs without memory for what libucp is to keep until it is received, while it is told so; loaded before it. */
#include <dlfcn.h>
#include <string.h>

static int out, refused;

/* Have it run out of memory, or not; how many messages had no room before. */
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
