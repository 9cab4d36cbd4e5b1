/* Wires: network threads, each with a UCX worker of its own that only sends or only receives (wire.c). */
#pragma once
#include "base/base.h"
#include "kernels/layout.h"

typedef struct ucch_wire ucch_wire;

/* Results of a poller's turn: data moved; data is awaited; data may come without waking the thread (a kernel writes
 * it); or with a wake-up that comes late. */
enum { UCCH_MOVED = 1, UCCH_AWAITED = 2, UCCH_WATCHED = 4, UCCH_RUNG_LATE = 8 };

/* Bit of a tag: the receiver exists before anything is sent, so a message that finds none is for a receiver that has
 * gone. */
#define UCCH_WIRE_EXPECTED ((uint64_t)1 << 63)

/* Work of a wire's thread, called with the wire's lock: `turn` again and again, and `on_message` with messages whose
 * header begins with `tag`. `on_message` returns UCS_INPROGRESS if it has libucp fetch the data. */
typedef struct ucch_poller {
    int (*turn)(struct ucch_poller *poller);
    ucs_status_t (*on_message)(struct ucch_poller *poller, const ucch_packet *message);
    uint64_t tag;
    struct ucch_poller *next, *same; /* next: of the wire; same: with the same hash of the tag */
} ucch_poller;

/* Connection with a wire of a peer process; never freed. */
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
void ucch_wire_add_poller(int wire, ucch_poller *poller);
void ucch_wire_remove_poller(int wire, ucch_poller *poller);
void ucch_wire_lock(int wire);
void ucch_wire_unlock(int wire);
void ucch_wire_wake(int wire);
void ucch_wire_mark(int wire);
void ucch_wires_wake(int wire, int most);

/* Flows: one direction of a ring between two hosts, carried by wires (flow.c). */

/* Size of the header before each slot's data, in which the sender's thread describes the piece. */
#define UCCH_FLOW_HEADER sizeof(ucch_slot_header)
/* Lowest bit of a flow's own tag, and the lowest bit that differs between flows of a rank. */
#define UCCH_FLOW_TAG_BIT 11
#define UCCH_FLOW_SPREAD_BIT 15

/* A ring on this host: `depth` slots, `stride` bytes apart, each with a header before its data; counters of pieces put
 * in and taken out; and the first call whose data is undefined, on this rank and, as the peer has told, there. `tells`:
 * this ring (one between two ranks) carries news of the sender's failure. `by_device`: hosts know nothing of a piece
 * before it is published; replayed kernels write its description into the header themselves, and compare it. */
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
int ucch_flow_expect(ucch_flow *flow, size_t bytes, size_t piece, uint64_t number, uint64_t hash);
int ucch_flow_failed(const ucch_flow *flow, uint64_t number);
void ucch_flow_differs(ucch_flow *flow, uint64_t call);
void ucch_flow_wake(ucch_flow *flow);
int ucch_flow_quiet(const ucch_flow *flow);
int ucch_flow_free(ucch_flow *flow);

/* Control connections with processes of other hosts (link.c), guarded by the lock of links; and whether the
 * kernel reaches a host's addresses. */

/* Most bytes of a message's data. */
#define UCCH_LINK_BYTES 8224

typedef struct ucch_link_header {
    uint32_t bytes, kind; /* bytes: of the data; kinds from 2 on are for the listener */
    uint64_t key;
} ucch_link_header;

/* Callbacks of the one user of the connections, all called by the link thread with the lock held. */
typedef struct ucch_listener {
    /* A message has come. Returns 0, or not 0 if no correct peer would send it. */
    int (*on_message)(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
    void (*on_turn)(void);               /* called ten times a second */
    void (*on_lost)(int link, int fate); /* `fate`: UCCH_DIED, or what else has happened to the process */
} ucch_listener;

void ucch_links_listen(const ucch_listener *listener);
void ucch_links_lock(void);
void ucch_links_unlock(void);
int ucch_link_send(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
int ucch_link_fate_locked(int link);

void ucch_count_cut(void);
int ucch_path_find_cut(const void *addresses, size_t bytes, double timeout, char *text);
