/* Shared memory of processes of one host (segment.c), and channels in it (channels.c). */
#pragma once
#include "gpu/gpu.h"
#include "net/net.h"

/* Pinned range of a mapped file, with its device address. */
typedef struct ucch_range {
    size_t at, bytes;
    char *seen;
    struct ucch_range *next;
} ucch_range;

/* Memory file of a process, mapped here. Only what has been pinned takes memory. */
typedef struct ucch_mapping {
    uint64_t key; /* of the process that owns it */
    int file;     /* descriptor in that process */
    uint64_t inode;
    int ours, used;
    size_t bytes, pinned;
    char *memory, *seen; /* device address of its beginning; NULL: not pinned */
    ucch_range *ranges;
    struct ucch_mapping *next;
} ucch_mapping;

/* The first word of a communicator's part: how many peers use it. They free the communicator at different times, and
 * until then read its counters, discard messages, and after a failure release their streams: the owner's next
 * communicator, which may be one without them, must not have the part before. A peer that dies uses it for ever. */
static inline uint32_t *ucch_mapping_peers(const ucch_mapping *m) { return (uint32_t *)m->memory; }

ucch_mapping *ucch_mapping_new(uint64_t key, size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen);
void ucch_mapping_give(ucch_mapping *m);
void ucch_mapping_drop(ucch_mapping *m);

/* Channels: how streams of a communicator's ranks pass data to each other without their hosts. Used by schedule.c. */

/* Streams of a communicator, which run concurrently: the vendor's collectives, copies to rings, copies from rings,
 * kernels that do both for short messages over wires, and everything else. */
enum { STREAM_NATIVE, STREAM_OUT, STREAM_IN, STREAM_WIRES, STREAM_LOCAL, STREAMS };

/* Rings by message size (UCCH_RINGS of them). Graph rings are for calls that are replayed without their hosts, so
 * devices count their pieces (ucch_moves); lane rings are also counted by devices (p2p/lane.c). */
enum {
    SHORT_RING,
    MIDDLE_RING,
    LONG_RING,
    LONGEST_RING,
    SHORT_GRAPH_RING,
    LONG_GRAPH_RING,
    SHORT_LANE_RING,
    LONG_LANE_RING,
    MATCHED_LANE_RING
};
#define UCCH_BY_DEVICE(ring) ((ring) >= SHORT_GRAPH_RING)
#define UCCH_OF_LANE(ring) ((ring) >= SHORT_LANE_RING)
/* Most messages of a lane under way, and lanes with one rank: two in each direction. */
#define UCCH_LANE_DEPTH 64
#define UCCH_LANES 4
/* Most calls of a communicator under way. */
#define MOST_CALLS 256
/* How often scratch can grow: it doubles each time. */
#define MOST_OUTGROWN 128

/* One direction between this rank and another: `published` counts pieces put in, `consumed` pieces taken out. */
typedef struct ucch_channel {
    ucch_counter published, consumed;
    char *ring, *seen;   /* address on the host, and on the device once it is pinned */
    size_t slot, stride; /* bytes of a slot's data, and from one slot to the next */
    int by_flags;        /* data comes by a flag in each word instead of a counter */
    ucch_flow *flow;     /* carries it between hosts; NULL: both ranks share the memory, or it is unused so far */
    uint64_t pieces;     /* of all calls so far, on this side; other threads read it */
    uint64_t round;
    int stream;        /* that moved its last pieces; 0: none */
    uint64_t *tainted; /* first call with undefined data, written by the sending rank */
    ucch_steps *steps; /* on the device, for calls in graphs; `pieces` are then of one kernel */
} ucch_channel;

/* Calls in graphs: words in host memory by their host and device addresses, counts on the device, and what the host has
 * seen of them. */
typedef struct ucch_graphs {
    ucch_op watch; /* first; active as long as graphs may exist */
    ucch_channels *channels;
    ucch_board *board;
    ucch_replays *words, *seen;
    ucch_replayed *counts;
    ucch_by_move *by_move;
    void *last; /* event behind the last call of capture number `capture` */
    uint64_t capture;
    double timeout, since;
    uint32_t begun, ended;
} ucch_graphs;

/* Banks of scratch: two that calls use alternately, and one for graphs. */
enum { GRAPH_BANK = 2, BANKS };

struct ucch_channels {
    ucch_op drain;        /* first; active after a failure until all streams have been released */
    int rank, size, room; /* room: ranks that a part has space for */
    size_t slot;          /* data bytes of the longest slot between hosts */
    int nwires;
    uint64_t number;       /* of the communicator; those that exist at a time differ modulo MOST_COMMS (meeting.py) */
    ucch_by_move *by_move; /* counters on the device for the blocks of one kernel (fused.cuh) */
    uint32_t kernels;      /* fused ones so far */
    /* By rank: its host; its process if on another host, else the file with its counters and rings. */
    struct {
        int host;
        uint64_t key;
        ucch_mapping *part;
    } *peers;
    ucch_channel *out, *in; /* by rank and ring; `in` lies behind `out` */
    ucch_counter
        done[MOST_CALLS]; /* ends of calls: one counter for calls of equal number modulo MOST_CALLS (ucch_generation) */
    unsigned *meetings;   /* device counters for blocks of lanes' kernels */
    unsigned *joined; /* device counters for blocks of the kernel that moves messages over wires, by message and slot */
    /* The last call in streams, from 1; the last call up to which all have ended. */
    uint64_t calls, landed, round;
    void *await;  /* kernel for streams that cannot wait for and write any memory; else NULL */
    void *copies; /* kernel that moves short messages over wires; NULL: kernels must not wait here */
    void *streams[STREAMS], *tail[STREAMS];
    int ahead[STREAMS]; /* has work that a call in one stream must wait for */
    void *began, *scratch[BANKS], *outgrown[MOST_OUTGROWN];
    int noutgrown;
    uint64_t alone, user[2]; /* the last call in one stream, and the last with each bank; 0: none */
    size_t scratch_bytes[BANKS];
    uint64_t banked;
    ucch_graphs graphs;
    int failed, is_left; /* is_left: no stream gets any work */
    /* The first call whose result is undefined, because it failed here or was under way at a failure; 0: none. */
    uint64_t *tainted;
};

static inline uint32_t ucch_channel_pieces(const ucch_channel *channel) {
    return (uint32_t)UCCH_LOAD(&channel->pieces);
}

/* Count `pieces` more. Returns how many there were before. */
static inline uint32_t ucch_channel_take(ucch_channel *channel, uint64_t pieces) {
    return (uint32_t)__atomic_fetch_add(&channel->pieces, pieces, __ATOMIC_RELEASE);
}

/* Value of a call's end counter once it has ended; 0 for call 0. */
static inline uint32_t ucch_generation(uint64_t call) { return (uint32_t)((call + MOST_CALLS - 1) / MOST_CALLS); }

int ucch_channels_by_wire(const ucch_channels *c, int peer);
void ucch_channels_end(ucch_channels *c, uint64_t call);
int ucch_channels_room(ucch_channels *c);
int ucch_channels_done(const ucch_channels *c, uint64_t call);
int ucch_channels_first(ucch_channels *c, uint64_t call);
int ucch_ring_for(const ucch_channels *c, int peer, size_t bytes, int in_graph);
size_t ucch_channel_piece(const ucch_channel *channel, size_t bytes);
uint32_t ucch_channel_chunk(uint32_t number, uint64_t nth, uint64_t left, uint64_t most);
int ucch_channel_copy(const ucch_channel *channel, int is_recv, uint32_t number, uint32_t n, char *data, size_t bytes,
                      void *stream);
ucch_channel *ucch_channels_at(const ucch_channels *c, int peer, int is_recv, int ring);
ucch_counter ucch_channels_lines(const ucch_channels *c, int peer, int which, unsigned **arrived);
int ucch_channels_ring(ucch_channels *c, int peer, int is_recv, int ring);
int ucch_channels_scratch(ucch_channels *c, int bank, size_t bytes);
void ucch_channels_fail_locked(ucch_channels *c, uint64_t differs);
int ucch_channels_waiting(const ucch_channels *c);
int ucch_channels_lost(const ucch_channels *c, uint64_t number, int *rank);
int ucch_channels_tainted_by(const ucch_channels *c, uint64_t call);
