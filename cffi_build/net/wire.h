/* Wires: network threads, each with a UCX worker of its own that only sends or only receives (wire.c). */
#ifndef UCCH_WIRE_H
#define UCCH_WIRE_H

#include "base/ucch.h"

typedef struct ucch_wire ucch_wire;

/* Results of a user's turn: data moved, data is awaited, data may come without a doorbell, or comes with one that is
 * rung late. */
enum { UCCH_MOVED = 1, UCCH_AWAITED = 2, UCCH_WATCHED = 4, UCCH_RUNG_LATE = 8 };

/* Work of one wire's thread: `turn` is called again and again, with the wire's lock. */
typedef struct ucch_poller {
    int (*turn)(struct ucch_poller *poller);
    struct ucch_poller *next;
} ucch_poller;

ucp_context_h ucch_wire_context(int wire);
ucp_worker_h ucch_wire_worker(int wire);
ucp_ep_h ucch_wire_endpoint(int wire, uint64_t key, const int **failed);
void ucch_wire_serve(int wire, ucch_poller *poller);
void ucch_wire_dismiss(int wire, ucch_poller *poller);
void ucch_wire_lock(int wire);
void ucch_wire_unlock(int wire);
void ucch_wire_wake(int wire);
void ucch_wire_mark(int wire);
void ucch_wires_wake(int wire, int most);

#endif
