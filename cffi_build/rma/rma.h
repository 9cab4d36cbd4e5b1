/* One-sided communication: a worker that others reach, its regions, endpoints, transfers and notifications. */
#pragma once
#include <pthread.h>

#include "shm/shm.h"

#define UCCH_AM_ID 77
/* Of the control messages below: a peer with another one is refused. */
#define UCCH_RMA_VERSION 8
/* Pinned memory by which data of devices travels, each way: slots, bytes of one, and from one to the next. */
#define UCCH_RMA_SLOTS 8
#define UCCH_RMA_SLOT ((size_t)2 << 20)
#define UCCH_RMA_STRIDE (UCCH_RMA_SLOT + UCCH_FLOW_HEADER)
/* How old may be what is known of a peer's process, in seconds. */
#define UCCH_RMA_FRESH_S 1e-3
/* Pieces in a slot at most. */
#define UCCH_RMA_PIECES 4096

/* Control messages. OPEN asks whether a region is there, REVOKE says that it is going; HERE says in which slot there is
 * data for places of a region, PULL asks the owner to send such, MEET has the addresses of wires that are to carry
 * slots; NOTIFY comes after data, and LEAVE last. The others answer. */
enum {
    UCCH_OPEN,
    UCCH_REVOKE,
    UCCH_HERE,
    UCCH_PULL,
    UCCH_MEET,
    UCCH_NOTIFY,
    UCCH_LEAVE,
    UCCH_OPENED,
    UCCH_REVOKED,
    UCCH_TAKEN,
    UCCH_MET,
    UCCH_PULLED
};

typedef struct ucch_header {
    uint16_t version, what;
    int32_t status;
    uint64_t from;          /* the sender's uid */
    uint64_t serial;        /* of the transfer, where it was begun */
    uint64_t region, other; /* the receiver's; PULL: where its sender wants the data, NOTIFY, HERE: the counter and 1 */
    uint32_t count, slot;   /* MEET, MET: wires, and the sender's number of what they are to carry */
} ucch_header;

/* What HERE has: the file of its sender's slots, which of those that had its number, and the bytes in one. */
typedef struct ucch_here {
    int32_t file;
    uint32_t bytes;
    uint64_t inode;
} ucch_here;

typedef struct ucch_carrier ucch_carrier;
typedef struct ucch_allocation ucch_allocation;

/* Entry of a chunk's table: the data of all follow behind it, from the next whole line on. */
typedef struct ucch_place {
    uint64_t offset, bytes;
} ucch_place;

/* Pinned memory that data passes, outward or inward. `held` is allocated, and has the list of pieces and a copy of the
 * table of what comes in, which lies in a slot of its sender's, or in the `piece`th one that wires carry. */
typedef struct ucch_slot {
    enum { UCCH_FREE, UCCH_COPYING, UCCH_SENT, UCCH_ARRIVING } state;
    char *held;
    ucch_piece *pieces;
    ucch_place *table;
    void *event;
    double again;
    int on_device, is_pinned, is_passed; /* the device copies past it */
    size_t bytes;
    uint64_t serial; /* of the transfer that waits for it, or 0 */
    uint64_t piece;
    ucch_peer *peer;
    ucch_region *region;
    ucch_header header;
} ucch_slot;

/* An answer of a peer that a region which is closed waits for. */
typedef struct owed {
    ucch_peer *by;
    struct owed *next;
} owed;

struct ucch_region {
    ucch_rma *at;
    uint64_t id;
    char *base;
    size_t bytes;
    int on_device, closing;
    int users;  /* what of ours is under way in it */
    owed *owed; /* by peers that have not let go of it */
    ucp_mem_h memh;
    ucch_region *next;
};

/* A peer. It has failed when `status` is not 0. */
struct ucch_peer {
    ucch_rma *at;
    ucp_ep_h ep;
    uint64_t uid;
    int status, by_errors; /* whether libucp tells of its death; or its process does */
    int pid;               /* its number, where it is on this host; else 0 */
    double looked;         /* when that was asked last whether it is there */
    int by_kernel;         /* which copies between us, as far as is known */
    /* On another host: after how much waiting the link to its address is looked at, and when, and which is cut. */
    double patience, followed;
    int is_cut;
    char link[UCCH_PATH_BYTES];
    /* Slots outward and inward, of this peer alone: one that is stopped holds up no other. How many of them copies are
     * under way in that nothing but the thread looks after. */
    ucch_mapping *ours, *theirs;
    ucch_slot outward[UCCH_RMA_SLOTS], inward[UCCH_RMA_SLOTS];
    int looked_after;
    /* On another host: wires that carry them there, and from there; the number under which we have asked for the
     * former, and why there are none. */
    ucch_carrier *out, *in;
    uint32_t number;
    int lack;
    void *closing; /* libucp's request */
    uint64_t counts[UCCH_RMA_COUNTS];
    ucch_target *targets;
    ucch_peer *next;
    size_t bytes;
    char address[];
};

/* Memory of a peer's that our device reaches. */
typedef struct ucch_opened {
    ucch_allocation *in; /* NULL: it is this process's own */
    ucch_peer *peer;
    uint64_t region;
    int is_owed; /* its owner waits for us to give it back */
    struct ucch_opened *next;
} ucch_opened;

/* A peer's region. */
struct ucch_target {
    ucch_peer *peer;
    uint64_t id, base;
    size_t bytes;
    int on_device, is_stale, users;
    ucp_rkey_h rkey;
    char *seen; /* where our device reaches it, if it does, and by what */
    ucch_opened *opened;
    ucch_target *next;
};

struct ucch_transfer {
    ucch_op op;
    ucch_rma *at;
    ucch_peer *peer; /* NULL: a wait for anyone */
    ucch_order is;
    int phase, status;
    uint64_t there; /* id of the target's region */
    size_t next;    /* the entry of the lists that is at hand, with bytes of it that are behind us */
    uint64_t done, bytes;
    ucch_rows rows;         /* of what is gathered from rows, and converted; row 0: nothing is */
    int has_left;           /* the list, and what it used */
    int in_flight;          /* what libucp, or the peer, has still to finish */
    uint64_t serial, asked; /* here, and at the peer that asked for it */
    void *lists;            /* it is ours, and is freed at its end */
    uint64_t piece[3];      /* the entries of lists of one */
    char *link;             /* why it has failed, where that is a link which is cut; or NULL */
    ucch_gate gate, held;
    ucch_transfer *following, **place; /* the next one, and what points here */
};

/* Wires that carry slots one way. The words count those handed over by the sender, and taken out by the receiver. */
struct ucch_carrier {
    ucch_flow *flow;
    int wires;
    size_t room; /* for a chunk */
    uint32_t published, consumed;
    uint64_t tainted, tainted_there; /* stay 0: a flow is for calls, too */
    uint64_t next;                   /* slots that have been filled, or that the peer has told of */
    uint32_t taken;                  /* by slot, those that are out behind one that is not */
};

typedef struct ucch_notice {
    uint64_t from;
    size_t bytes;
    struct ucch_notice *next;
    char data[];
} ucch_notice;

struct ucch_rma {
    ucp_worker_h worker;
    uint64_t uid, serials;
    int requests;    /* that libucp has */
    int by_hardware; /* between hosts, puts are not done by the receiver's libucp */
    int by_kernel;   /* on one host, the kernel copies */
    int wires;       /* that peers may reach, and their addresses */
    char *reach;
    size_t reach_bytes;
    ucch_region *regions;
    ucch_peer *peers;
    ucch_transfer *transfers, **last_transfer; /* in the order in which they began */
    ucch_opened *leaving;                      /* what the thread is to give back */
    ucch_notice *notices, **last;
    uint64_t counters[UCCH_RMA_COUNTERS], uses[UCCH_RMA_COUNTERS];
    /* Attention: an operation that is under way while something has come lately, and its thread, which sleeps. */
    ucch_op attention;
    double heard;
    int events, calls[2], has_thread;
    pthread_t thread;
    pthread_cond_t calm;
};

/* control.c */
uint64_t *ucch_rma_counter_of(ucch_rma *at, uint64_t number);
const char *ucch_peer_cut_locked(ucch_peer *peer, double waited, double now);
ucch_peer *ucch_peer_of(ucch_rma *at, uint64_t uid);
ucch_region *ucch_region_of(ucch_rma *at, uint64_t id);
ucch_transfer *ucch_transfer_of(ucch_rma *at, uint64_t serial);
int ucch_tell_locked(ucch_peer *peer, ucch_header header, const void *data, size_t bytes);
void ucch_attend_locked(ucch_rma *at);
void ucch_rma_call_locked(ucch_rma *at);

/* region.c */
int ucch_peer_leaving(const ucch_peer *peer);
void ucch_target_return_locked(ucch_target *target);
void ucch_transfer_leave_locked(ucch_transfer *t);
void ucch_give_back(ucch_rma *at);
void ucch_open_asked_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);
void ucch_revoke_asked_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);
void ucch_revoked_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);

/* transfer.c */
uintptr_t ucch_transfer_piece(ucch_peer *peer, int what, ucch_region *local, ucch_target *target, uint64_t mine,
                              uint64_t theirs, uint64_t bytes, double timeout);
int ucch_transfer_is_short(const ucch_region *local, const ucch_target *target, uint64_t bytes);
void ucch_transfer_answered_locked(ucch_transfer *t, int status);
void ucch_transfers_end_locked(ucch_rma *at, const ucch_peer *peer, int status, int passing);
void ucch_pull_asked_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);

/* staged.c */
int ucch_transfer_passes(const ucch_transfer *t);
void ucch_staged_leave_locked(ucch_transfer *t);
int ucch_staged_move_locked(ucch_transfer *t);
int ucch_staged_poll_locked(ucch_rma *at);
void ucch_chunk_here_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);
ucch_transfer *ucch_chunk_taken_locked(ucch_peer *peer, const ucch_header *header);
int ucch_staged_busy(ucch_peer *peer);

/* slots.c */
size_t ucch_slot_place(uint64_t slot);
int ucch_slots_open_locked(ucch_peer *peer, const ucch_here *here);
int ucch_slots_pin_locked(ucch_mapping *memory);
int ucch_slot_list_locked(ucch_slot *s);
void ucch_slots_free(ucch_peer *peer);
int ucch_carries_locked(ucch_peer *peer);
void ucch_meet_asked_locked(ucch_peer *peer, const ucch_header *header, const void *said, size_t bytes);
void ucch_met_locked(ucch_peer *peer, const ucch_header *header, const void *said, size_t bytes);
int ucch_carrier_room_locked(const ucch_carrier *c, uint32_t slot);
int ucch_carrier_send_locked(ucch_carrier *c, uint32_t slot, size_t bytes);
int ucch_carrier_expect_locked(ucch_carrier *c, uint32_t slot, size_t bytes, uint64_t *piece);
int ucch_carrier_come_locked(const ucch_carrier *c, uint64_t piece);
void ucch_carrier_taken_locked(ucch_carrier *c, uint64_t piece);
