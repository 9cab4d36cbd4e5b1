/* dlopen of libucc and libucp, and the tables of their functions. Which file to try is Python's business. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "abi/calls.h"
#include "api/api.h"

ucch_symbols ucch_sym;

typedef struct symbol {
    const char *name;
    size_t offset;
} symbol;

static const symbol ucc_symbols[] = {
#define UCC_SYMBOL(ret, name, params, args) {#name, offsetof(ucch_symbols, name)},
#include "abi/symbols.h"
    {NULL, 0}};

static const symbol ucp_symbols[] = {
#define UCP_SYMBOL(ret, name, params, args) {#name, offsetof(ucch_symbols, name)},
#include "abi/symbols.h"
    {NULL, 0}};

static char load_error[1024];

const char *ucch_load_error(void) { return load_error; }

static int fail(void) {
    const char *why = dlerror();
    snprintf(load_error, sizeof(load_error), "%s", why ? why : "dlopen failed");
    return -1;
}

/* RTLD_NOW: a library that lacks a symbol fails here, with its name, instead of ending the process at first use. */
int ucch_preload(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL) ? 0 : fail(); }

static int load_table(const char *path, const symbol *list) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return fail();
    ucch_symbols all = ucch_sym; /* a library that is refused leaves nothing behind */
    for (const symbol *s = list; s->name; s++) {
        void *found = dlsym(handle, s->name);
        if (!found) {
            snprintf(load_error, sizeof(load_error), "%s has no symbol %s: too old or not the right library", path,
                     s->name);
            dlclose(handle);
            return -1;
        }
        memcpy((char *)&all + s->offset, &found, sizeof(found));
    }
    ucch_sym = all;
    return 0;
}

int ucch_load_ucc(const char *path) { return load_table(path, ucc_symbols); }

/* ---- messages that libucp throws away ----
 *
 * What comes in before it is received is kept in memory of libucp's. Where that cannot be had, libucp (1.12 to 1.22)
 * says so in its log and throws the message away, and the next one with its tag is taken for it. Whichever thread calls
 * libucp then is the one that hears of it, before the next message can be matched. */
#define NO_ROOM "ucp recv descriptor is not allocated"

enum { LEVEL_FATAL, LEVEL_ERROR }; /* ucs_log_level_t */
enum { STOP, GO_ON };              /* ucs_log_func_rc_t */

typedef int (*log_handler)(const char *, unsigned, const char *, int, const void *, const char *, va_list);

static int losses;
static int muted; /* UCX_LOG_LEVEL=fatal: errors are for us alone */

static int notice(const char *file, unsigned line, const char *function, int level, const void *component,
                  const char *format, va_list list) {
    if (!strcmp(format, NO_ROOM)) __atomic_add_fetch(&losses, 1, __ATOMIC_RELAXED);
    return muted && level == LEVEL_ERROR ? STOP : GO_ON;
}

/* How many messages libucp has thrown away in this process. */
int ucch_losses(void) { return __atomic_load_n(&losses, __ATOMIC_RELAXED); }

/* Have errors logged where they are not: libucs asks for the level first. */
static void raise_level(void *libucp) {
    typedef int (*getter)(const char *, char *, size_t);
    typedef int (*setter)(const char *, const char *);
    getter get = (getter)(uintptr_t)dlsym(libucp, "ucs_global_opts_get_value");
    setter set = (setter)(uintptr_t)dlsym(libucp, "ucs_global_opts_set_value");
    char level[16] = "";
    if (!get || !set || get("LOG_LEVEL", level, sizeof(level)) || strcasecmp(level, "fatal")) return;
    muted = 1;
    set("LOG_LEVEL", "error");
}

/* Hear of them from the libucs that belongs to a loaded libucp. */
static void hear_of_losses(const char *path) {
    static void *heard;
    void *libucp = dlopen(path, RTLD_NOW | RTLD_NOLOAD), *push = libucp ? dlsym(libucp, "ucs_log_push_handler") : NULL;
    if (push && push != heard) {
        ((void (*)(log_handler))(uintptr_t)push)(notice);
        raise_level(libucp);
        heard = push;
    }
    if (libucp) dlclose(libucp);
}

int ucch_load_ucp(const char *path) {
    int status = load_table(path, ucp_symbols);
    if (!status) hear_of_losses(path);
    return status;
}
