/* Wires: network threads, each with a UCX worker of its own that only sends or only receives (wire.c). */
#pragma once
#include "base/base.h"
#include "kernels/layout.h"

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

/* Flows: one direction of a ring between two hosts, carried by wires (flow.c). */

/* Bytes before the data of each slot, in which the sender's thread says what it is. */
#define UCCH_FLOW_HEADER sizeof(ucch_slot_header)
/* Lowest bit of a flow's own tag, and where it differs between those of a rank. */
#define UCCH_FLOW_TAG_BIT 11
#define UCCH_FLOW_SPREAD_BIT 15

/* A ring on this host: `depth` slots, `stride` bytes apart, each with a header before its data; the words that count
 * what was put in and taken out; and where a rank says from which call on its data is garbage, here and, as it has told
 * us, there. `tells`, of one ring between two ranks: the sender's failure is told by it. `by_device`: no host knows of
 * pieces before they are published, as kernels that are replayed say themselves, in its header, what is in a slot, and
 * compare. */
typedef struct ucch_slots {
    char *slots;
    size_t stride;
    int depth;
    uint32_t *published, *consumed;
    uint64_t *tainted_here, *tainted_there;
    int tells, by_device;
} ucch_slots;

typedef struct ucch_flow ucch_flow;

ucch_flow *ucch_flow_new(const ucch_slots *ring, int sends, int nwires, uint64_t key, uint64_t tag);
int ucch_flow_due(ucch_flow *flow, size_t bytes, size_t piece, uint64_t number, uint64_t hash);
int ucch_flow_failed(const ucch_flow *flow, uint64_t number);
void ucch_flow_differs(ucch_flow *flow, uint64_t call);
void ucch_flow_wake(ucch_flow *flow);
int ucch_flow_quiet(const ucch_flow *flow);
int ucch_flow_free(ucch_flow *flow);

/* Connections with processes of other hosts, beside the data (link.c), all under their lock; and whether a host answers
 * at its addresses, as our kernel knows it. */

/* The most bytes of a message's data. */
#define UCCH_LINK_BYTES 8224

typedef struct ucch_link_header {
    uint32_t bytes, kind; /* of what follows; kinds from 2 on are the listener's */
    uint64_t key;
} ucch_link_header;

/* Callbacks of one user of the connections: all are called by the thread, and with the lock. */
typedef struct ucch_listener {
    /* A message has come: 0, or not 0 where no peer of ours would send it. */
    int (*on_message)(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
    void (*on_turn)(void);              /* ten times a second */
    void (*on_lost)(int link, int how); /* UCCH_DIED or what else has become of the process */
} ucch_listener;

void ucch_links_listen(const ucch_listener *listener);
void ucch_links_lock(void);
void ucch_links_unlock(void);
int ucch_link_send(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
int ucch_link_fate(int link);

void ucch_count_cut(void);
int ucch_path_find_cut(const void *addresses, size_t bytes, double patience, char *text);
