/* Memory that processes of one host share: segment.c. */
#pragma once
#include "gpu/gpu.h"
#include "net/net.h"

/* Pinned part of a file that is mapped here, as the device knows it. */
typedef struct ucch_range {
    size_t at, bytes;
    char *seen;
    struct ucch_range *next;
} ucch_range;

/* File of a process that is mapped here. It takes memory where it has been pinned. */
typedef struct ucch_mapping {
    uint64_t key; /* of the process whose it is */
    int file;     /* there */
    uint64_t inode;
    int ours, used;
    size_t bytes, pinned;
    char *memory, *seen; /* its beginning, as the device knows it; NULL: not pinned */
    ucch_range *ranges;
    struct ucch_mapping *next;
} ucch_mapping;

ucch_mapping *ucch_mapping_new(uint64_t key, size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen);
void ucch_mapping_give(ucch_mapping *m);
void ucch_mapping_drop(ucch_mapping *m);

/* Channels: how the streams of a communicator's ranks hand data to each other without their hosts; schedule.c uses
 * them.
 */

/* Streams of a communicator, which run beside each other: vendors' collectives, copies to and from rings, kernels that
 * do both for short messages by wires, all else. */
enum { STREAM_NATIVE, STREAM_OUT, STREAM_IN, STREAM_WIRES, STREAM_LOCAL, STREAMS };

/* By the length of messages: UCCH_RINGS. Those of calls in graphs, which are replayed without a word to their hosts,
 * are counted by the devices (ucch_moves), and those of lanes by these (p2p/lane.c). */
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
/* Messages of a lane that are under way at a time, and lanes with a rank: two each way. */
#define UCCH_LANE_DEPTH 64
#define UCCH_LANES 4
/* Calls of a communicator that are under way. */
#define MOST_CALLS 256
/* How often scratch can grow: each time it doubles. */
#define MOST_OUTGROWN 128

/* One direction between this rank and another: `published` counts the pieces put in, `consumed` those taken out. */
typedef struct ucch_channel {
    ucch_counter published, consumed;
    char *ring, *seen;   /* by its address here, and the device's once it has been pinned */
    size_t slot, stride; /* bytes that a slot holds, and from one to the next */
    int by_flags;        /* each word in it has a flag, by which its data comes and no counter */
    ucch_flow *flow;     /* that carries it between hosts; NULL: both ranks see it, or nothing has gone by it yet */
    uint64_t pieces;     /* of all calls so far, on this side; read while more are queued */
    uint64_t round;
    int stream;        /* that has moved its last pieces; 0: none has yet */
    uint64_t *tainted; /* by the rank that it comes from */
    ucch_steps *steps; /* on the device, of calls in graphs; `pieces` are of one kernel there */
} ucch_channel;

/* Words of calls in graphs: of the host, as it sees them and the device does, and of the device; and what the host has
 * seen. */
typedef struct ucch_graphs {
    ucch_op watch; /* first: as long as there may be graphs */
    ucch_channels *channels;
    ucch_board *board;
    ucch_replays *words, *seen;
    ucch_replayed *counts;
    uint32_t *arrived;
    void *last; /* event behind the last call of the capture with this number */
    uint64_t capture;
    double timeout, since;
    uint32_t begun, ended;
} ucch_graphs;

/* Banks of scratch: two that calls take in turn, and that of graphs. */
enum { GRAPH_BANK = 2, BANKS };

struct ucch_channels {
    ucch_op drain;        /* first: once a call has failed, until the streams of all have been let go */
    int rank, size, room; /* room: ranks that a part has places for */
    size_t slot;          /* bytes of the longest between hosts */
    int nwires;
    uint64_t serial;   /* alike on all ranks */
    uint32_t *arrived; /* counters on the device, of one kernel at a time (fused.h) */
    /* By rank: its host; if that is another one, its process; else what it has for its counters and rings. */
    struct {
        int host;
        uint64_t key;
        ucch_mapping *part;
    } *peers;
    ucch_channel *out, *in;        /* by rank and ring; `in` lies behind `out` */
    ucch_counter done[MOST_CALLS]; /* of calls, each of which has one in its turn (ucch_generation) */
    unsigned *meetings;            /* of lanes' blocks, on the device */
    unsigned *joined;              /* of those of the kernel that moves messages by wires, by message and slot */
    /* The last call in streams, from 1 on; the last one up to which all have ended. */
    uint64_t calls, landed, round;
    void *await;  /* kernel, where streams cannot wait for any memory, nor write to it */
    void *copies; /* kernel that moves short messages by wires; NULL: none may wait here */
    void *streams[STREAMS], *tail[STREAMS];
    int ahead[STREAMS];  /* has work that a call in one stream must wait for */
    int behind[STREAMS]; /* has not waited for the last call in one stream */
    void *began, *scratch[BANKS], *outgrown[MOST_OUTGROWN];
    int noutgrown;
    uint64_t alone, user[2]; /* the last call in one stream, and the last with each bank of scratch; 0: none */
    size_t scratch_bytes[BANKS];
    uint64_t banked;
    ucch_graphs graphs;
    int failed;
    /* The first call whose result must not be trusted, because it failed here or was under way when one did; 0 while
     * there is none. */
    uint64_t *tainted;
};

static inline uint32_t ucch_channel_pieces(const ucch_channel *channel) {
    return (uint32_t)UCCH_LOAD(&channel->pieces);
}

/* So many more: how many there were before. */
static inline uint32_t ucch_channel_take(ucch_channel *channel, uint64_t pieces) {
    return (uint32_t)__atomic_fetch_add(&channel->pieces, pieces, __ATOMIC_RELEASE);
}

/* What a call's counter has reached when it has ended; 0 of none. */
static inline uint32_t ucch_generation(uint64_t call) { return (uint32_t)((call + MOST_CALLS - 1) / MOST_CALLS); }

int ucch_channels_by_wire(const ucch_channels *c, int peer);
void ucch_channels_end(ucch_channels *c, uint64_t call);
int ucch_channels_room(ucch_channels *c);
int ucch_channels_done(const ucch_channels *c, uint64_t call);
int ucch_channels_first(ucch_channels *c, uint64_t call);
int ucch_ring_for(const ucch_channels *c, int peer, size_t bytes, int in_graph);
size_t ucch_channel_piece(const ucch_channel *channel, size_t bytes);
uint32_t ucch_channel_chunk(uint32_t number, uint64_t nth, uint64_t left, uint64_t most);
int ucch_channel_copy(const ucch_channel *channel, int comes, uint32_t number, uint32_t n, char *data, size_t bytes,
                      void *stream);
ucch_channel *ucch_channels_at(const ucch_channels *c, int peer, int comes, int ring);
ucch_counter ucch_channels_lines(const ucch_channels *c, int peer, int which, unsigned **arrived);
int ucch_channels_ring(ucch_channels *c, int peer, int comes, int ring);
int ucch_channels_scratch(ucch_channels *c, int bank, size_t bytes);
void ucch_channels_fail_locked(ucch_channels *c, uint64_t differs);
int ucch_channels_waiting(const ucch_channels *c);
int ucch_channels_lost(const ucch_channels *c, uint64_t number, int *rank);
int ucch_channels_tainted_by(const ucch_channels *c, uint64_t call);
