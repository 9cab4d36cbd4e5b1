/* Internals of the GPU part: what the engine does with the device bound to this rank. */
#pragma once
#include "base/base.h"

#include "api/device_api.h"
#include "gpu/adapter.h"
#include "kernels/layout.h"

/* Runtime of the device bound to this rank; -1: none. */
int ucch_bound(void);
int ucch_may_hold(void);
int ucch_queues(void);
const device_ops *ucch_bound_ops(void);
int ucch_bound_engine(void);
int ucch_device_fail(int code, const char *what);
int ucch_event_record(void **event, void *stream);
int ucch_stream_follow(void *event, void *first, void *then);
int ucch_event_ask(void *event, int *done, double *again);

/* streams.c */
void ucch_streams_reserve(void);
int ucch_streams_share(int more);
int ucch_stream_new(void **stream);
int ucch_stream_spare(void **stream);
void ucch_stream_free(void *stream);
void *ucch_stream_common(void);

/* Memory that is reused: allocating and freeing it would synchronize the device. */
void ucch_pool_keep(const void *memory);

/* Make this process's device current until the end of the block. */
#define UCCH_ON_DEVICE __attribute__((cleanup(ucch_leave_device))) int device_before_ = ucch_device_enter()
static inline void ucch_leave_device(const int *before) { ucch_device_leave(*before); }

/* Directions of copies, each with a stream of its own. */
enum { UCCH_TO_HOST, UCCH_TO_DEVICE, UCCH_ACROSS };

/* A local step on device memory: `count` elements of src_bytes and dst_bytes each. */
typedef struct ucch_task {
    int kind, op, dtype, to;
    char *src, *dst;
    uint64_t count;
    size_t src_bytes, dst_bytes;
    double factor;
} ucch_task;

typedef struct ucch_work ucch_work;

void *ucch_kernel_of(const ucch_task *task);
int ucch_kernel_launch(void *function, uint64_t blocks, void **arguments, void *stream);
int ucch_kernel_run(void *function, ucch_task *task, void *stream);

int ucch_task_compute(const ucch_task *task, char *src, char *dst, uint64_t count);
void ucch_work_free(ucch_work *work);
int ucch_work_begin_locked(ucch_work **work, const ucch_task *task);
int ucch_work_poll_locked(ucch_work *work);
void *ucch_way_stream(int way);
int ucch_way_copy(int way, void *dst, const void *src, size_t bytes);

/* A counter (ucch_reached) that streams and hosts wait for and signal: its address on the host and on the device. */
typedef struct ucch_counter {
    uint32_t *at;
    void *seen;
} ucch_counter;

/* A counter of the runtime's own, and the value it has once its streams and hosts have done what was asked. */
typedef struct ucch_flag {
    uint32_t *at, ticket;
} ucch_flag;

int ucch_counter_wait(ucch_counter counter, uint32_t least, void *await, void *stream);
int ucch_counter_signal(ucch_counter counter, uint32_t value, void *await, void *stream);
int ucch_counter_turn(ucch_counter told, uint32_t value, ucch_counter counter, uint32_t least, void *await,
                      void *stream);
void ucch_flags_reserve(int count);

/* Entry and exit of a stream-ordered call: the flag that its stream writes on reaching it (or an event if it cannot
 * write), and the flag that the stream waits for. */
typedef struct ucch_gate {
    ucch_flag in, out;
    void *event;
    int closed, by_event, held;
    double again;
} ucch_gate;

int ucch_gate_enter(ucch_gate *gate, void *stream);
void ucch_gates_bar_locked(int by);
void ucch_hold_locked(int more);
int ucch_gate_hold(ucch_gate *gate, void *stream);
int ucch_gate_promise_locked(ucch_gate *gate);
int ucch_gate_wait(const ucch_gate *gate, void *stream);
int ucch_gate_open_locked(ucch_gate *gate);
void ucch_gate_leave_locked(ucch_gate *gate);
int ucch_gate_due(const ucch_gate *gate);
void ucch_gate_free(ucch_gate *gate);
