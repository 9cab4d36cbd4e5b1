/* Arithmetic on the device: kernels that the vendor's run-time compiler has made (ucc_hetero/device/kernels), by
 * what they do. What none has been made for is done on the host (copy_engine.c). */
#include <stdlib.h>

#include "gpu/device.h"

/* Enough to keep the memory of the largest devices busy, with threads that each do several elements. */
#define MOST_BLOCKS 2048
#define THREADS 256

typedef struct kernel {
    int kind, op, dtype, to;
    void *function;
    struct kernel *next;
} kernel;

static kernel *kernels; /* only grows, at its head: read without a lock */

/* Only a combination has an operation, and only a cast and pieces another type. */
static int same(const kernel *k, int kind, int op, int dtype, int to) {
    return k->kind == kind && k->dtype == dtype && ((kind != UCCH_COMBINE && kind != UCCH_FUSED) || k->op == op) &&
           ((kind != UCCH_CAST && kind != UCCH_PIECES) || k->to == to);
}

/* Load a compiled kernel on the bound device: 0, or a failure with its reason. */
int ucch_kernel_add(int kind, int op, int dtype, int to, const void *image) {
    const device_ops *ops = ucch_bound_ops();
    kernel *k = ops ? calloc(1, sizeof(*k)) : NULL;
    if (!k) return ops ? UCCH_FAIL_MEMORY : UCCH_FAIL_DEVICE;
    *k = (kernel){kind, op, dtype, to, NULL, NULL};
    UCCH_ON_DEVICE;
    int status = ucch_device_fail(ops->kernel(image, &k->function), "loading a kernel");
    if (status) {
        free(k);
        return status;
    }
    UCCH_LOCKED;
    k->next = kernels;
    __atomic_store_n(&kernels, k, __ATOMIC_RELEASE);
    return 0;
}

void *ucch_kernel_of(const ucch_task *t) {
    for (kernel *k = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE); k; k = k->next)
        if (same(k, t->kind, t->op, t->dtype, t->to)) return k->function;
    return NULL;
}

int ucch_kernel_launch(void *function, const ucch_task *t, void *stream) {
    const void *src = t->src;
    void *dst = t->dst;
    uint64_t count = t->count, blocks = (count + THREADS - 1) / THREADS;
    double factor = t->factor;
    void *arguments[] = {&src, &dst, &count, &factor};
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    return ucch_device_fail(ucch_bound_ops()->launch(function, (unsigned)blocks, THREADS, arguments, stream), "launch");
}

/* Copy and convert pieces, by a list that the device can read until that is done. */
int ucch_kernel_pieces(void *function, const ucch_pieces *all, void *stream) {
    uint64_t slice = all->rows.row ? UCCH_PIECE_SLICE : UCCH_PLAIN_SLICE;
    uint64_t blocks = all->n * ((all->most + slice - 1) / slice);
    void *arguments[] = {(void *)all};
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    return ucch_device_fail(ucch_bound_ops()->launch(function, (unsigned)blocks, THREADS, arguments, stream), "launch");
}
