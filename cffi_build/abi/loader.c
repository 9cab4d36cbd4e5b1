/* dlopen of libucc and libucp, and the tables of their functions. Python decides which file to load. */
#include <dlfcn.h>
#include <link.h>
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

/* RTLD_NOW: a library that lacks a symbol fails here, with the symbol's name, and not at its first use. */
int ucch_preload(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL) ? 0 : fail(); }

typedef struct wanted {
    const char *name;
    char *path;
    size_t size;
} wanted;

static int is_wanted(struct dl_phdr_info *info, size_t size, void *data) {
    wanted *w = data;
    const char *file = strrchr(info->dlpi_name, '/');
    if (!file || strncmp(file + 1, w->name, strlen(w->name))) return 0;
    return (size_t)snprintf(w->path, w->size, "%s", info->dlpi_name) < w->size;
}

/* 1: `path` is that of a library in this process whose file name begins with `name`; 0: there is none. /proc/self/maps
 * tells it, too, but takes milliseconds where hundreds of files are mapped. */
int ucch_loaded(const char *name, char *path, size_t size) {
    return dl_iterate_phdr(is_wanted, &(wanted){name, path, size});
}

static int load_table(const char *path, const symbol *list) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return fail();
    ucch_symbols all = ucch_sym; /* a copy: a library that is refused changes nothing */
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
    for (const symbol *s = list; s->name; s++) /* threads may be using the other library */
        memcpy((char *)&ucch_sym + s->offset, (char *)&all + s->offset, sizeof(void *));
    return 0;
}

int ucch_load_ucc(const char *path) { return load_table(path, ucc_symbols); }

/* ---- messages that libucp drops ----
 *
 * libucp keeps unexpected messages in its own memory. If it gets no memory, libucp (1.12 to 1.22) logs that and drops
 * the message, and the next message with the same tag is matched in its place. The log handler runs in the thread that
 * is inside libucp, before that next message can be matched. The same holds for an active message in several parts. */
#define NO_ROOM "ucp recv descriptor is not allocated"
#define NO_ROOM_FOR_PARTS "failed to allocate buffer for assembling UCP AM (id %u)"

enum { LEVEL_FATAL, LEVEL_ERROR }; /* ucs_log_level_t */
enum { STOP, GO_ON };              /* ucs_log_func_rc_t */

typedef int (*log_handler)(const char *, unsigned, const char *, int, const void *, const char *, va_list);

static int losses;
static int muted; /* UCX_LOG_LEVEL=fatal: errors are not to be printed */

static int count_losses(const char *file, unsigned line, const char *function, int level, const void *component,
                        const char *format, va_list list) {
    if (!strcmp(format, NO_ROOM) || !strcmp(format, NO_ROOM_FOR_PARTS))
        __atomic_add_fetch(&losses, 1, __ATOMIC_RELAXED);
    return muted && level == LEVEL_ERROR ? STOP : GO_ON;
}

/* Number of messages that libucp has dropped in this process. */
int ucch_losses(void) { return __atomic_load_n(&losses, __ATOMIC_RELAXED); }

/* With UCX_LOG_LEVEL=fatal, raise the level to error: libucs checks it before it calls the handler. */
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

/* Add a log handler to the libucs of a loaded libucp. */
static void hear_of_losses(const char *path) {
    static void *heard;
    void *libucp = dlopen(path, RTLD_NOW | RTLD_NOLOAD), *push = libucp ? dlsym(libucp, "ucs_log_push_handler") : NULL;
    if (push && push != heard) {
        ((void (*)(log_handler))(uintptr_t)push)(count_losses);
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
