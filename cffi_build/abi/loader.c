/* dlopen of libucc and libucp, and the tables of their functions. Which file to try is Python's business. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "abi/calls.h"
#include "api/api.h"

ucch_symbols ucch_sym;
/* Table of the network threads: the same, or that of a libucp which they have to themselves. */
const ucch_symbols *ucch_wire_sym = &ucch_sym;
static ucch_symbols own_sym;

typedef struct symbol {
    const char *name;
    size_t offset;
    int need;
} symbol;

static const symbol ucc_symbols[] = {
#define UCC_SYMBOL(ret, name, params, args, need) {#name, offsetof(ucch_symbols, name), need},
#define UCC_VOID_SYMBOL(ret, name, params, args, need) {#name, offsetof(ucch_symbols, name), need},
#include "abi/symbols.h"
    {NULL, 0, 0}};

static const symbol ucp_symbols[] = {
#define UCP_SYMBOL(ret, name, params, args, need) {#name, offsetof(ucch_symbols, name), need},
#define UCP_VOID_SYMBOL(ret, name, params, args, need) {#name, offsetof(ucch_symbols, name), need},
#include "abi/symbols.h"
    {NULL, 0, 0}};

#define MOST_SYMBOLS 64
_Static_assert(sizeof(ucc_symbols) / sizeof(symbol) <= MOST_SYMBOLS, "room for all of libucc's");
_Static_assert(sizeof(ucp_symbols) / sizeof(symbol) <= MOST_SYMBOLS, "room for all of libucp's");

static char load_error[1024];

const char *ucch_load_error(void) { return load_error; }

static int fail(void) {
    const char *why = dlerror();
    snprintf(load_error, sizeof(load_error), "%s", why ? why : "dlopen failed");
    return -1;
}

/* RTLD_NOW: a library that lacks a symbol fails here, with its name, instead of ending the process at first use. */
int ucch_preload(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL) ? 0 : fail(); }

/* Load a library that calls functions of others which need it; these are loaded next. */
int ucch_preload_lazily(const char *path) { return dlopen(path, RTLD_LAZY | RTLD_LOCAL) ? 0 : fail(); }

static int load_table(const char *path, const symbol *list, ucch_symbols *table) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return fail();
    void *found[MOST_SYMBOLS] = {0};
    size_t n = 0;
    for (const symbol *s = list; s->name; s++, n++) {
        found[n] = dlsym(handle, s->name);
        if (!found[n] && s->need) {
            snprintf(load_error, sizeof(load_error), "%s has no symbol %s: too old or not the right library", path,
                     s->name);
            dlclose(handle);
            return -1;
        }
    }
    /* Only a complete set goes in: a refused candidate must not leave half of itself behind. */
    n = 0;
    for (const symbol *s = list; s->name; s++, n++)
        memcpy((char *)table + s->offset, &found[n], sizeof(void *));
    return 0;
}

int ucch_load_ucc(const char *path) { return load_table(path, ucc_symbols, &ucch_sym); }

int ucch_load_ucp(const char *path) { return load_table(path, ucp_symbols, &ucch_sym); }

/* A second libucp, whose names in memory are not those of the first. */
int ucch_load_wire_ucp(const char *path) { return load_table(path, ucp_symbols, &own_sym); }

/* Before there are wires: whether they use the second one. */
void ucch_wire_use(int own) { ucch_wire_sym = own ? &own_sym : &ucch_sym; }
