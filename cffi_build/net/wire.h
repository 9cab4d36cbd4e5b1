/* Wires: network threads, each with a UCX worker of its own that only sends or only receives (wire.c). */
#ifndef UCCH_WIRE_H
#define UCCH_WIRE_H

#include "base/ucch.h"

typedef struct ucch_wire ucch_wire;

/* Results of a user's turn: data moved, data is awaited, data may come without a doorbell, or comes with one that is
 * rung late. */
enum { UCCH_MOVED = 1, UCCH_AWAITED = 2, UCCH_WATCHED = 4, UCCH_RUNG_LATE = 8 };

/* Message that has come by a wire. `is_later`: its data is still at the sender, and `data` what libucp fetches it by.
 */
typedef struct ucch_packet {
    const void *header;
    size_t header_bytes;
    void *data;
    size_t bytes;
    int is_later;
} ucch_packet;

/* In a tag: who receives is there before anything is sent, and what comes without it is for one that has gone. */
#define UCCH_WIRE_EXPECTED ((uint64_t)1 << 63)

/* Work of one wire's thread: `turn` is called again and again, and `come` with messages of its tag, by which their
 * headers begin; both with the wire's lock. `come` says UCS_INPROGRESS if it has libucp fetch the data. */
typedef struct ucch_poller {
    int (*turn)(struct ucch_poller *poller);
    ucs_status_t (*come)(struct ucch_poller *poller, const ucch_packet *message);
    uint64_t tag;
    struct ucch_poller *next, *same; /* of the wire; of those whose tags lie in one place */
} ucch_poller;

/* Connection with a peer's wire; never freed. */
typedef struct ucch_connection {
    uint64_t key;
    ucp_ep_h ep;
    int failed;
    struct ucch_connection *next;
} ucch_connection;

ucp_context_h ucch_wire_context(int wire);
ucp_worker_h ucch_wire_worker(int wire);
int ucch_wire_slower(int wire);
ucs_status_ptr_t ucch_wire_send(int wire, ucp_ep_h ep, const void *header, size_t header_bytes, const void *data,
                                size_t bytes, ucp_request_param_t *params);
ucch_connection *ucch_wire_connection(int wire, uint64_t key);
void ucch_wire_serve(int wire, ucch_poller *poller);
void ucch_wire_dismiss(int wire, ucch_poller *poller);
void ucch_wire_lock(int wire);
void ucch_wire_unlock(int wire);
void ucch_wire_wake(int wire);
void ucch_wire_mark(int wire);
void ucch_wires_wake(int wire, int most);

#endif
