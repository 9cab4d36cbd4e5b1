/* Vendor adapter: everything that the engine knows of a vendor. It is filled by a file of the engine (cuda.c, hip.c),
 * or by a shared library that exports `const device_adapter ucch_adapter` and needs this header alone
 * (docs/extending.md). */
#ifndef UCCH_ADAPTER_H
#define UCCH_ADAPTER_H

#include <stddef.h>
#include <stdint.h>

#include "api/constants.h"

/* Priority of the engine's streams, above the default 0: their kernels are short, and streams of the application wait
 * for them. Both runtimes clamp it to what the device has. */
#define UCCH_STREAM_PRIORITY (-1)

typedef struct device_ops {
#define DEVICE(name, params) int(*name) params;
#include "gpu/ops.h"
#undef DEVICE
} device_ops;

/* A function of the vendor's library, where its address is stored, and whether it is required. */
typedef struct device_symbol {
    const char *name;
    void **at;
    int need;
} device_symbol;

typedef struct device_adapter {
    size_t bytes;                 /* sizeof this structure: the adapter was made for this release */
    const char *name;             /* `adapter` in the vendor's row (ucc_hetero/machine/vendors.py) */
    int memory_type;              /* type of its device memory for UCC and UCX (ucc_memory_type_t) */
    int engine_type;              /* type of its streams for UCC (ucc_ee_type_t) */
    const device_symbol *symbols; /* functions to look up, up to a row without a name; NULL: the library is linked */
    int (*start)(void);
    device_ops ops;
} device_adapter;

#endif
