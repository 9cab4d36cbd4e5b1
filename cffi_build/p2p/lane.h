/* Lanes as lane.c, lanes.c and offer.c know them. */
#ifndef UCCH_LANE_H
#define UCCH_LANE_H

#include <pthread.h>

#include "base/op.h"
#include "gpu/device.h"
#include "shm/channels.h"

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

#endif
