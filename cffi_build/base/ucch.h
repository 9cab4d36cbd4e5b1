/* Internals shared by the C files of the native engine.
 *
 * One process-wide lock (lock.c) guards every call into libucc and libucp: UCX builds without multi-threading
 * assert otherwise, and with it nothing is gained by more than one thread inside. Functions named *_locked expect it.
 */
#ifndef UCCH_H
#define UCCH_H

#include "abi/calls.h"
#include "api/constants.h"

#include "api/api.h"

/* Seconds, and ns, of CLOCK_MONOTONIC. */
double ucch_now(void);
uint64_t ucch_now_ns(void);

/* What other threads, processes and devices read and write: a load sees all that was written before what it finds was
 * stored. */
#define UCCH_LOAD(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
#define UCCH_STORE(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)

/* True if a counter, which only grows and wraps around, has reached `least`. */
static inline int ucch_reached(const uint32_t *counter, uint32_t least) {
    return (int32_t)(UCCH_LOAD(counter) - least) >= 0;
}

/* Have the engine's lock up to the end of the block. */
#define UCCH_LOCKED __attribute__((cleanup(ucch_give_up))) int has_lock_ = (ucch_lock(), 1)
static inline void ucch_give_up(int *has_lock) { *has_lock ? ucch_unlock() : (void)0; }

/* Take an item out of the list that begins with `first`, if it is in there. */
#define UCCH_UNLINK(first, item, next)                                                                                 \
    do {                                                                                                               \
        __typeof__(item) *at_ = &(first);                                                                              \
        while (*at_ && *at_ != (item))                                                                                 \
            at_ = &(*at_)->next;                                                                                       \
        if (*at_) *at_ = (item)->next;                                                                                 \
    } while (0)

/* Put an item at the end of the list that begins with `first`. */
#define UCCH_APPEND(first, item, next)                                                                                 \
    do {                                                                                                               \
        __typeof__(item) *at_ = &(first);                                                                              \
        while (*at_)                                                                                                   \
            at_ = &(*at_)->next;                                                                                       \
        (item)->next = NULL;                                                                                           \
        *at_ = (item);                                                                                                 \
    } while (0)

int ucch_board_peer(const ucch_board *board, int rank);
void ucch_board_own_label(ucch_board *board, uint64_t seq, char *label);
uint32_t ucch_board_comm(const ucch_board *board);
int ucch_board_lossy(const ucch_board *board);
void ucch_board_ended_locked(ucch_board *board, ucch_op *op, int status, uint64_t bytes);
void ucch_board_dump_if_idle(ucch_board *board);
void ucch_board_blame(ucch_board *board, ucch_op *op);
void ucch_board_began(ucch_board *board, double now);
void ucch_board_launched(ucch_board *board, int more);
int ucch_board_stuck(ucch_board *board, uint64_t seq, double waited, int *peer);
int ucch_board_forsaken(ucch_board *board, int peer, double started, double now, double *left);

/* process.c: processes of this host */
void ucch_process_signal(int pid, int number);
void ucch_process_unbind_thread(void);

#endif
