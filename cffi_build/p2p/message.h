/* A message as message.c, offer.c and request.c know it. */
#ifndef UCCH_MESSAGE_H
#define UCCH_MESSAGE_H

#include "base/op.h"
#include "gpu/device.h"

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
void ucch_message_sent(void *request, ucs_status_t status, void *data);
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

#endif
