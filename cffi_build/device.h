/* Internals of the GPU side: the table of one runtime, and what the engine does with the device bound to this rank. */
#ifndef UCCH_DEVICE_H
#define UCCH_DEVICE_H

#include "ucch.h"

#include "device_api.h"

typedef struct device_ops {
#define DEVICE(name, params) int(*name) params;
#include "device_ops.h"
#undef DEVICE
} device_ops;

typedef struct device_symbol {
    const char *name;
    void **at;
    int need;
} device_symbol;

extern const device_ops ucch_cuda_ops, ucch_hip_ops;
extern const device_symbol ucch_cuda_symbols[], ucch_hip_symbols[];
int ucch_cuda_start(void);
int ucch_hip_start(void);

/* The device that this rank works with; -1 while there is none. */
int ucch_bound(void);
const device_ops *ucch_bound_ops(void);
int ucch_device_fail(int code, const char *what);

/* Make the bound device current in the calling thread, and restore what was. */
int ucch_device_enter(void);
void ucch_device_leave(int before);

/* Memory that is used again and again: allocating and freeing it would synchronise the device. */
void *ucch_pool_take_locked(int pinned, size_t bytes);
void ucch_pool_give_locked(void *memory);

#endif
