/* Internals of messages (message.c, offer.c, request.c) and lanes (lane.c, lanes.c). */
#pragma once
#include <pthread.h>

#include "shm/shm.h"

#define USER_TAG (((uint64_t)1 << UCCH_SOURCE_BIT) - 1)
#define OWN_TAG ((uint64_t)1 << UCCH_OWN_BIT)
#define UCCH_OFFER_TAG ((uint64_t)1 << UCCH_OFFER_BIT)

/* A message that has arrived: its tag, its length, and the sender's number of an offer's data, or 0. */
typedef struct ucch_offer {
    uint64_t code, bytes, serial;
} ucch_offer;

/* Arguments of a message. */
typedef struct ucch_start {
    enum { START_SEND, START_SYNC, START_OFFER, START_RECV, START_PROBE } what;
    ucp_ep_h ep; /* endpoint of a send's receiver */
    void *buffer;
    size_t bytes;
    uint64_t tag, mask;
    int mem_type, dest;
    int takes;                 /* a probe removes the message from libucp's queue */
    ucp_tag_message_h matched; /* message that a probe has removed; NULL once its receive has begun */
    ucch_offer found;          /* offer that the probe has found, or the receive has matched */
} ucch_start;

/* A receiver's answer to an offer: status 0 and the data's number in the lane, or why it takes no data. */
typedef struct ucch_answer {
    int32_t status;
    uint32_t number;
} ucch_answer;

struct ucch_message {
    ucch_op op;
    ucp_worker_h worker;
    void *request;
    ucp_tag_recv_info_t info;
    int came;          /* a receive was called back, possibly before libucp's call returned */
    ucch_board *board; /* `peer` is its slot, or UCCH_ALL_PEERS; NULL: the peer is not watched */
    int peer;
    ucch_record about; /* for the flight recorder */
    double left;       /* when the peer was first seen to have ended; 0: not yet */
    /* How to start it; `waits`: for earlier messages, or for a stream at `gate`; `behind`: the next one in the
     * queue. */
    ucch_start start;
    int waits;
    ucch_gate gate;
    ucch_message *behind;
    int is_dropped; /* a probe whose owner has gone: the message that it has taken is matched again */
    /* Data that may go by lanes: its memory and size, and the message of the lane. `matched`: the receiver still has to
     * answer; `moving`: the lane has the data. */
    ucch_lanes *lanes;
    ucch_lane_message *lane_message;
    void *data;
    size_t room;
    ucch_answer answer;
    int by_host, by_lane, matched, moving;
};

/* request.c */
void ucch_message_end_locked(ucch_message *m, int status);
int ucch_message_begun_locked(ucch_message *m, void *request);

/* offer.c */
int ucch_offer_send_locked(ucch_message *m);
int ucch_offer_taken_locked(ucch_message *m);
int ucch_offer_arrived_locked(ucch_message *m);
int ucch_offer_advance_locked(ucch_message *m);
void ucch_offer_abandon_locked(ucch_message *m);
void ucch_discard_locked(ucp_worker_h worker, ucp_tag_message_h matched);
void ucch_claim_locked(ucch_message *m, ucch_message *from);
int ucch_probe_dropped(ucch_message *probe);

/* For callers that hold the lock. */
void ucch_message_abandon_locked(ucch_message *m);
int ucch_message_start_locked(ucch_message *m, ucp_worker_h worker, const ucch_start *start);

/* Lanes. */

typedef struct ucch_lane {
    pthread_mutex_t turn; /* held while its streams are given work; progress only tries it */
    ucch_channels *channels;
    ucch_channel *shorts, *longs;
    int is_recv, peer, is_matched;
    void *stream, *kernel;
    int shares; /* the stream is also that of other lanes: nothing may wait in it */
    void *entered[UCCH_LANE_DEPTH], *done[UCCH_LANE_DEPTH];
    ucch_lane_line *lines, *lines_seen; /* lines[0]: whether to stop; the others: ends of messages */
    unsigned *arrived;              /* counters where a kernel's blocks meet: by slot, at the header and at the end */
    char taken[UCCH_LANE_DEPTH];    /* lines of messages whose end has not been seen yet */
    uint32_t posted, begun, pieces; /* messages posted, and given to the stream; pieces of a sender */
    uint32_t refused;               /* last message that the sender knows was refused */
    uint32_t promised;              /* numbers that the receiver of a matched lane has given out */
    void *from;                     /* stream of the messages since the lane was last empty */
    int mixed;                      /* those messages are from several streams */
    void *moved_by;                 /* stream with the last message */
    struct ucch_lane_message *waiting, **last; /* messages not given to the stream yet */
    int failed, users, closed;
    unsigned refs; /* posted messages, and the lane itself */
} ucch_lane;

/* A message of a lane, used once. */
struct ucch_lane_message {
    ucch_op op; /* first */
    ucch_lane *of;
    ucch_board *board;
    ucch_record about;
    int slot; /* of the peer, on the board */
    uint32_t number;
    char *data;
    void *copy;   /* copy of the data to send, from the pool */
    void *stream; /* moves the data: the lane's stream, or the caller's */
    uint64_t bytes, tag, found_bytes, found_tag;
    int sync, ordered, queued, by_host;
    /* A message that is given to its stream in parts: whether its header has been, pieces done, and its status. */
    int headed, status;
    uint32_t base, done, pieces;
    double left;
    struct ucch_lane_message *behind;
};

/* A rank: its endpoint for answers, and its slot on the board. */
typedef struct ucch_lane_peer {
    ucch_lanes *of; /* set once a lane from it is being made */
    ucp_ep_h ep;
    int slot;
    int making; /* the matched lane from it: UCCH_LATER while it is being made, a failure, or 0 */
} ucch_lane_peer;

struct ucch_lanes {
    ucch_channels *channels;
    ucch_board *board;
    int rank, size;
    ucch_lane **each;       /* behind `peers`: by rank, out and in, each plain and matched; NULL: closed */
    pthread_mutex_t making; /* held while a lane is made */
    int is_stopped;
    unsigned refs; /* the communicator, and threads that make lanes */
    ucch_lane_peer peers[];
};

/* lanes.c */
ucch_lane *ucch_lane_with(ucch_lanes *all, int peer, int is_recv, int is_matched, int *status);
ucch_lane *ucch_lane_matched_locked(ucch_lanes *all, int peer, int is_recv, int *status);
void ucch_lane_fail(ucch_lane *l, int status);
void ucch_lane_unref(ucch_lane *l);

/* lane.c */
int ucch_lane_message_move_locked(ucch_lanes *all, ucch_lane_message *m, int peer, int how, char *data, uint64_t bytes,
                                  uint32_t *number);
void ucch_lane_message_pass_locked(ucch_lane_message *m);
void ucch_lane_message_abandon_locked(ucch_lane_message *m, int status);
