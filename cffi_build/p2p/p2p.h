/* A message as message.c, offer.c and request.c know it. */
#pragma once
#include <pthread.h>

#include "shm/shm.h"

#define USER_TAG (((uint64_t)1 << UCCH_SOURCE_BIT) - 1)
#define OWN_TAG ((uint64_t)1 << UCCH_OWN_BIT)
#define UCCH_OFFER_TAG ((uint64_t)1 << UCCH_OFFER_BIT)

/* A message as its caller asked for it. */
typedef struct ucch_start {
    enum { START_SEND, START_SYNC, START_OFFER, START_RECV, START_MATCHED } what;
    ucp_ep_h ep; /* of a send's receiver */
    void *buffer;
    size_t bytes;
    uint64_t tag, mask;
    int mem_type, dest;
    ucp_tag_message_h matched; /* what a matching probe has found, and taken out of libucp's queue */
    ucch_offer found;          /* by that, or by a receive: the offer that it has got */
} ucch_start;

/* What a receiver says of an offer: 0 and the number of its data in the lane, or why it does not want it. */
typedef struct ucch_answer {
    int32_t status;
    uint32_t number;
} ucch_answer;

struct ucch_message {
    ucch_op op;
    ucp_worker_h worker;
    void *request;
    ucp_tag_recv_info_t info;
    int came;          /* a receive has been called back, maybe before libucp's call has returned */
    ucch_board *board; /* whose slot `peer` says how the other side is; NULL = not known */
    int peer;
    ucch_record about; /* its peer and tag */
    double left;       /* when the peer was first seen to have ended; 0 = not yet */
    /* Its start, whether that waits for its turn, for a stream too, and the next one in the queue. */
    ucch_start start;
    int waits;
    ucch_gate gate;
    ucch_message *behind;
    /* Data that may go by lanes: where it is, or belongs, and what moves it; whether its receiver has still to answer,
     * and whether it is on its way. */
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

/* For those that have the lock. */
void ucch_message_abandon_locked(ucch_message *m);
int ucch_message_start_locked(ucch_message *m, ucp_worker_h worker, const ucch_start *start);

/* Lanes as lane.c, lanes.c and offer.c know them. */

typedef struct ucch_lane {
    pthread_mutex_t turn; /* held to give its streams work; never waited for with the engine's lock */
    ucch_channels *channels;
    ucch_channel *shorts, *longs;
    int comes, peer, is_matched;
    void *stream, *kernel;
    void *entered[UCCH_LANE_DEPTH], *done[UCCH_LANE_DEPTH];
    ucch_lane_line *lines, *lines_seen;        /* the first says whether to stop; the others are of messages */
    unsigned *arrived;                         /* where a kernel's blocks meet: by slot, at the header and at the end */
    char taken[UCCH_LANE_DEPTH];               /* lines of messages whose ends were not seen yet */
    uint32_t posted, begun, pieces;            /* messages so far, and of them to the stream; a sender's pieces */
    uint32_t refused;                          /* the last message that its sender knows was refused */
    uint32_t promised;                         /* numbers that a matched lane's receiver has given */
    void *from;                                /* stream of the messages since the lane was last empty */
    int mixed;                                 /* these were of several streams */
    void *moved_by;                            /* stream that has the last message */
    struct ucch_lane_message *waiting, **last; /* that have not been given to the stream */
    int failed, users, closed;
    unsigned refs; /* messages that have been posted, and the lane itself */
} ucch_lane;

/* A message of a lane, for use once. */
struct ucch_lane_message {
    ucch_op op; /* first */
    ucch_lane *of;
    ucch_board *board;
    ucch_record about;
    int slot; /* of the peer, on the board */
    uint32_t number;
    char *data;
    void *copy;   /* of what is sent, from the pool */
    void *stream; /* that moves it: the lane's, or the caller's */
    uint64_t bytes, tag, found_bytes, found_tag;
    int sync, ordered, queued, by_host;
    /* Of one that is given to its stream in parts: whether its header has been, pieces so far, and what it is. */
    int headed, status;
    uint32_t base, done, pieces;
    double left;
    struct ucch_lane_message *behind;
};

/* What is known of a rank: how to tell it what a receiver has matched, and where it is on the board. */
typedef struct ucch_lane_peer {
    ucch_lanes *of; /* once a lane from it has been ordered */
    ucp_ep_h ep;
    int slot;
    int making; /* of the lane from it, of matched messages: UCCH_LATER while it is under way, a failure, or 0 */
} ucch_lane_peer;

struct ucch_lanes {
    ucch_channels *channels;
    ucch_board *board;
    int rank, size;
    ucch_lane **each;       /* behind `peers`: by rank, out and in, and the same of matched messages; NULL: closed */
    pthread_mutex_t making; /* never waited for with the engine's lock */
    int is_stopped;
    unsigned refs; /* the communicator's, and those of threads that make lanes */
    ucch_lane_peer peers[];
};

/* lanes.c */
ucch_lane *ucch_lane_with(ucch_lanes *all, int peer, int comes, int is_matched, int *status);
ucch_lane *ucch_lane_matched_locked(ucch_lanes *all, int peer, int comes, int *status);
void ucch_lane_fail(ucch_lane *l, int status);
void ucch_lane_let_go(ucch_lane *l);

/* lane.c */
int ucch_lane_message_move_locked(ucch_lanes *all, ucch_lane_message *m, int peer, int how, char *data, uint64_t bytes,
                                  uint32_t *number);
void ucch_lane_message_pass_locked(ucch_lane_message *m);
void ucch_lane_message_abandon_locked(ucch_lane_message *m, int status);
