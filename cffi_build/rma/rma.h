/* One-sided communication: a worker with its regions, peers, transfers, notifications and counters. */
#pragma once
#include <pthread.h>

#include "shm/shm.h"

#define UCCH_AM_ID 77
/* Version of the control messages; a peer with another one is ignored. */
#define UCCH_RMA_VERSION 9
/* Pinned memory through which device data travels, in each direction: number of slots, bytes of one, and from one to
 * the next. */
#define UCCH_RMA_SLOTS 8
#define UCCH_RMA_SLOT ((size_t)2 << 20)
#define UCCH_RMA_STRIDE (UCCH_RMA_SLOT + UCCH_FLOW_HEADER)
/* Seconds for which a check that a peer's process is alive stays valid. */
#define UCCH_RMA_FRESH_S 1e-3
/* Most pieces in a slot. */
#define UCCH_RMA_PIECES 4096

/* Control messages. OPEN asks whether a region exists, REVOKE announces its end; HERE: a slot has data for a region,
 * PULL: a get, by which the owner is asked to put; MEET: addresses of wires that are to carry slots; NOTIFY follows
 * data; LEAVE is the last message. The others are answers. */
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
    uint64_t from;          /* uid of the sender */
    uint64_t serial;        /* of the transfer, at the worker that began it */
    uint64_t region, other; /* region: the receiver's. other: PULL: the region of its sender that wants the data;
                               NOTIFY, HERE: counter plus 1 */
    uint32_t count, slot;   /* MEET, MET: number of wires, and the sender's number for the direction */
} ucch_header;

/* Contents of HERE: the sender's file of slots, identified by its inode too, and the bytes in the slot. */
typedef struct ucch_here {
    int32_t file;
    uint32_t bytes;
    uint64_t inode;
} ucch_here;

typedef struct ucch_slot_flow ucch_slot_flow;
typedef struct ucch_allocation ucch_allocation;

/* Entry of the table at the beginning of a slot; the data of all entries follows at the next multiple of LINE. */
typedef struct ucch_place {
    uint64_t offset, bytes;
} ucch_place;

/* A slot of pinned memory, outward or inward. `held` holds the list of pieces, and for inward slots a copy of the
 * table, which is in the sender's slot, or in number `piece` of those that wires carry. */
typedef struct ucch_slot {
    enum { UCCH_FREE, UCCH_COPYING, UCCH_SENT, UCCH_ARRIVING } state;
    char *held;
    ucch_piece *pieces;
    ucch_place *table;
    void *event;
    double again;
    int on_device, is_pinned, by_device; /* by_device: the device copies directly between regions, without the slot */
    int way, is_recorded, failed;        /* of its copies: their stream, whether the event is behind them, a failure */
    size_t bytes;
    uint64_t serial; /* of the transfer that waits for it; 0: none */
    uint64_t piece;
    ucch_peer *peer;
    ucch_region *region;
    ucch_header header;
} ucch_slot;

/* An answer that a closed region waits for from a peer. */
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
    int users;  /* operations of this process that use it */
    owed *owed; /* peers that still have it open */
    ucp_mem_h memh;
    ucch_region *next;
};

/* A peer; `status` is not 0 once it has failed. */
struct ucch_peer {
    ucch_rma *at;
    ucp_ep_h ep;
    uint64_t uid;
    _Atomic int status;    /* read by any thread, as `looked` is, without the lock */
    int is_known;          /* what it sends is handled; else kept */
    int by_errors;         /* libucp reports its death; else the end of its process shows it */
    int pid;               /* its process if on this host; else 0 */
    _Atomic double looked; /* when its process was last checked */
    double read;           /* when a transfer that began last read what had come */
    int by_kernel;         /* the kernel copies between both processes (process_vm_writev), as far as is known */
    /* On another host: seconds of waiting after which the link to it is probed, when it was probed last, and the link
     * that is cut. */
    double patience, followed;
    int is_cut;
    char link[UCCH_PATH_BYTES];
    /* Slots in each direction, for this peer alone, so that a stopped peer does not delay others. `looked_after`: slots
     * with copies under way that only attention polls. */
    ucch_mapping *ours, *theirs;
    ucch_slot outward[UCCH_RMA_SLOTS], inward[UCCH_RMA_SLOTS];
    int looked_after;
    /* On another host: the wires of each direction, and the key of their connections; the number with which wires to it
     * were requested, and why there are none. */
    ucch_slot_flow *out, *in;
    uint64_t wired;
    uint32_t number;
    int lack;
    void *closing; /* request of ucp_ep_close_nbx */
    /* Closed regions that it has not released, and since when it has released none of them. */
    int owes;
    double owes_since;
    uint64_t counts[UCCH_RMA_COUNTS];
    ucch_target *targets;
    ucch_peer *next;
    size_t bytes;
    char address[];
};

/* Memory of a peer that our device can access. */
typedef struct ucch_opened {
    ucch_allocation *in; /* NULL: it belongs to this process */
    ucch_peer *peer;
    uint64_t region;
    int is_owed; /* the owner waits for it to be given back */
    struct ucch_opened *next;
} ucch_opened;

/* A region of a peer. */
struct ucch_target {
    ucch_peer *peer;
    uint64_t id, base;
    size_t bytes;
    int on_device, is_stale, users;
    ucp_rkey_h rkey;
    char *seen; /* our device's address, or NULL, and the memory that it is in */
    ucch_opened *opened;
    ucch_target *next;
};

struct ucch_transfer {
    ucch_op op;
    ucch_rma *at;
    ucch_peer *peer; /* NULL: UCCH_RMA_AWAIT */
    ucch_order is;
    int phase, status;
    uint64_t there; /* id of the target's region */
    size_t next;    /* the current piece, and bytes of it that are done */
    uint64_t done, bytes;
    ucch_rows rows;         /* how pieces are gathered and converted; row = 0: not at all */
    int has_left;           /* it has left the list, and released what it used */
    int in_flight;          /* requests that libucp, or the peer, has not finished */
    uint64_t serial, asked; /* here, and at the peer that requested it (PULL) */
    void *lists;            /* not NULL: this process made it for a peer's PULL, and frees it */
    uint64_t piece[3];      /* offsets and length of a transfer of one piece */
    char *link;             /* the link that is cut, if that is why it failed; or NULL */
    ucch_gate gate, held;
    ucch_transfer *following, **place; /* the next one, and the pointer to this one */
};

/* Wires that carry slots in one direction. `published` counts slots sent, `consumed` slots that the receiver has
 * emptied. */
struct ucch_slot_flow {
    ucch_flow *flow;
    int wires;
    size_t room; /* data bytes of a slot */
    uint32_t published, consumed;
    uint64_t tainted, tainted_there; /* always 0: a flow also serves calls */
    uint64_t next;                   /* slots filled, or announced by the peer */
    uint32_t taken;                  /* bitmap of slots emptied before an earlier one */
};

typedef struct ucch_notification {
    uint64_t from;
    size_t bytes;
    struct ucch_notification *next;
    char data[];
} ucch_notification;

struct ucch_rma {
    ucp_worker_h worker;
    uint64_t uid, serials;
    int requests;    /* number of requests that libucp has */
    int by_hardware; /* between hosts puts are done by the hardware, not by the receiver's libucp */
    int by_kernel;   /* on one host the kernel copies (process_vm_writev) */
    int wires;       /* wires offered to peers, and their addresses */
    char *reach;
    size_t reach_bytes;
    ucch_region *regions;
    ucch_peer *peers;
    ucch_transfer *transfers, **last_transfer; /* in the order in which they began */
    ucch_opened *leaving;                      /* memory that the thread is to give back */
    ucch_early *early;                         /* messages of peers with which this process has not connected yet */
    ucch_notification *notifications, **last;
    int lost, losses; /* notifications for which there was no memory; messages that libucp had lost before */
    uint64_t counters[UCCH_RMA_COUNTERS], uses[UCCH_RMA_COUNTERS];
    /* An op that keeps progress going for a while after a message has come; the worker's thread sleeps meanwhile. */
    ucch_op attention;
    double heard;
    int events, called, has_thread; /* descriptors: libucp has an event; the thread is called */
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
void ucch_transfers_end_locked(ucch_rma *at, const ucch_peer *peer, int status, int only_by_device);
void ucch_pull_asked_locked(ucch_peer *peer, const ucch_header *header, const void *data, size_t bytes);

/* staged.c */
int ucch_transfer_by_device(const ucch_transfer *t);
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
void ucch_slot_use_region(ucch_slot *s, ucch_region *region);
void ucch_slot_leave_region(ucch_slot *s);
void ucch_slots_free(ucch_peer *peer);
int ucch_carries_locked(ucch_peer *peer);
void ucch_meet_asked_locked(ucch_peer *peer, const ucch_header *header, const void *said, size_t bytes);
void ucch_met_locked(ucch_peer *peer, const ucch_header *header, const void *said, size_t bytes);
int ucch_slot_flow_has_room_locked(const ucch_slot_flow *c, uint32_t slot);
int ucch_slot_flow_send_locked(ucch_slot_flow *c, uint32_t slot, size_t bytes);
int ucch_slot_flow_expect_locked(ucch_slot_flow *c, uint32_t slot, size_t bytes, uint64_t *piece);
int ucch_slot_flow_arrived_locked(const ucch_slot_flow *c, uint64_t piece);
void ucch_slot_flow_release_locked(ucch_slot_flow *c, uint64_t piece);
