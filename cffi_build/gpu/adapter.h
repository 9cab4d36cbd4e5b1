/* Vendor adapter: all that the engine knows of a vendor, which its file fills (cuda.c, hip.c), or a shared library that
 * exports `const device_adapter ucch_adapter`, made with this header alone (docs/extending.md). */
#ifndef UCCH_ADAPTER_H
#define UCCH_ADAPTER_H

#include <stddef.h>
#include <stdint.h>

#include "api/constants.h"

/* Priority of the engine's streams, above the usual 0: their kernels are short, and others' streams wait for them. Both
 * runtimes take the nearest that there is. */
#define UCCH_STREAM_PRIORITY (-1)

typedef struct device_ops {
#define DEVICE(name, params) int(*name) params;
#include "gpu/ops.h"
#undef DEVICE
} device_ops;

/* A function of the vendor's library, where its address goes, and whether there is no runtime without it. */
typedef struct device_symbol {
    const char *name;
    void **at;
    int need;
} device_symbol;

typedef struct device_adapter {
    size_t bytes;                 /* of this structure: made for this release */
    const char *name;             /* `adapter` of the vendor's row (ucc_hetero/machine/vendors.py) */
    int memory_type;              /* under which UCC and UCX know its device memory (ucc_memory_type_t) */
    int engine_type;              /* under which UCC knows its streams (ucc_ee_type_t) */
    const device_symbol *symbols; /* of the library, up to one without a name; NULL: it is linked */
    int (*start)(void);
    device_ops ops;
} device_adapter;

#endif
