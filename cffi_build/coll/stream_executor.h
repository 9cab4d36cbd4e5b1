/* Calls in streams: a launch from its beginning to its end (stream_executor.c), and what puts it into streams. */
#ifndef UCCH_STREAM_EXECUTOR_H
#define UCCH_STREAM_EXECUTOR_H

#include "coll/program.h"

struct ucch_launch {
    ucch_op op; /* first: a launch is an op */
    int released, n;
    int queueing; /* its steps are being put into streams: not to be collected */
    int alone;    /* no other is under way */
    ucch_board *board;
    ucch_record about;       /* as a program's */
    ucch_program *parent;    /* a program whose caller waits for it, not for the launch */
    ucch_channels *channels; /* those it went through */
    uint64_t call;           /* its number there, once it has one; 0: none */
    struct {
        ucc_coll_req_h request;
        ucch_context *context;
        uint64_t event;
    } each[];
};

int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream);

/* schedule.c: a whole program into streams at once */
int ucch_enqueue_scratch(ucch_program *p);
int ucch_enqueue(ucch_program *p, ucch_launch *l, void *stream);
int ucch_post_steps_locked(ucch_program *p, ucch_launch *l, void *stream);

/* fused.c: all of a short call in one kernel */
int ucch_fused_add(ucch_moves *w, ucch_move m);
void ucch_fused_join(const ucch_program *p, ucch_moves *w);
int ucch_fused_fits(const ucch_program *p, uint64_t moved);
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int apart, void *stream);
int ucch_fused_sliced(const ucch_program *p);

#endif
