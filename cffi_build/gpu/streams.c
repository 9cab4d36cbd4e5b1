/* Streams of the bound device for this library's work.
 *
 * Some are made in advance. A driver may wait for running kernels when it makes a stream, and such a kernel may wait
 * for what this process does next: CUDA waits when a process makes its 35th stream, and every 43rd one behind it (H200,
 * driver 580). A stream takes half a MiB of the device. */
#include "gpu/gpu.h"

/* Streams made in advance, and how few may be left of them. */
#define SPARES 64
#define FEWEST 16
/* Streams that the program and other libraries may have made. */
#define OTHERS 8

static void *spares[SPARES], *common;
static int left, used, most;

static int make(void **stream) { return ucch_device_fail(ucch_bound_ops()->stream_new(stream), "stream"); }

/* Make streams in advance if few are left, and no stream waits for a call or message of this process; only as many as
 * the device has room for. */
void ucch_streams_reserve(void) {
    if (!ucch_may_hold() || UCCH_LOAD(&left) >= FEWEST || ucch_ops_under_way(UCCH_IN_STREAMS)) return;
    if (!common && make(&common)) return;
    for (int i = 0; i < SPARES; i++) {
        void *none = NULL, *stream = NULL;
        if (UCCH_LOAD(&spares[i])) continue;
        if (make(&stream)) return;
        if (__atomic_compare_exchange_n(&spares[i], &none, stream, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            __atomic_add_fetch(&left, 1, __ATOMIC_RELAXED);
        else
            ucch_bound_ops()->stream_free(stream);
    }
}

static void count_use(void) {
    int now = __atomic_add_fetch(&used, 1, __ATOMIC_RELAXED);
    if (now > UCCH_LOAD(&most)) UCCH_STORE(&most, now);
}

/* Take a stream that was made in advance, in the order of their making. Returns 0 if none is left. */
int ucch_stream_spare(void **stream) {
    for (int i = 0; i < SPARES; i++) {
        if (!UCCH_LOAD(&spares[i]) || !(*stream = __atomic_exchange_n(&spares[i], NULL, __ATOMIC_ACQ_REL))) continue;
        __atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED);
        count_use();
        return 1;
    }
    return 0;
}

/* Get a stream that is not ordered with the default stream. Returns 0 or a failure. */
int ucch_stream_new(void **stream) {
    if (ucch_stream_spare(stream)) return 0;
    int status = make(stream);
    if (!status) count_use();
    return status;
}

/* Give a stream back, if there is one; it has no work any more. */
void ucch_stream_free(void *stream) {
    if (!stream) return;
    __atomic_sub_fetch(&used, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < SPARES && !ucch_stream_captures((uintptr_t)stream); i++) {
        void *none = NULL;
        if (!__atomic_compare_exchange_n(&spares[i], &none, stream, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        __atomic_add_fetch(&left, 1, __ATOMIC_RELAXED);
        return;
    }
    ucch_bound_ops()->stream_free(stream);
}

/* The stream of lanes that find no spare one, in which nothing may wait; NULL if it could not be made. */
void *ucch_stream_common(void) { return common; }

/* True if streams may share queues, with so many more of them. */
int ucch_streams_share(int more) { return UCCH_LOAD(&most) + more + OTHERS > ucch_queues(); }
