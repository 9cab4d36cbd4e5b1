/* A call in a stream, from its launch to its end. */
#ifndef UCCH_STREAM_EXECUTOR_H
#define UCCH_STREAM_EXECUTOR_H

#include "coll/schedule.h"

struct ucch_launch {
    ucch_op op; /* first: a launch is an op */
    int released, n;
    int queueing; /* its steps are being put into streams: not to be collected */
    int alone;    /* no other is under way */
    ucch_board *board;
    ucch_record about;       /* as a program's */
    ucch_program *parent;    /* a program whose caller waits for it, not for the launch */
    ucch_channels *channels; /* those it went through: it has ended when `ticket` is there */
    ucch_ticket ticket;
    struct {
        ucc_coll_req_h request;
        ucch_context *context;
        uint64_t event;
    } each[];
};

int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream);

#endif
