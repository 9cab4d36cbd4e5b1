/* Progress, by the thread and by waiting callers. */
#ifndef UCCH_PROGRESS_H
#define UCCH_PROGRESS_H

#include "base/op.h"

/* Rounds of progress under one hold of the lock. */
#define UCCH_BATCH 8

/* A UCC context, or a UCP worker, of this process. */
struct ucch_context {
    ucc_context_h handle;
    ucp_worker_h worker;
    int users; /* programs in flight that need it */
    ucch_context *next;
};

int ucch_progress_locked(void);
void ucch_progress_inside(int (*enter)(void), void (*leave)(int before), void (*first)(void));
void ucch_wake_locked(void);
void ucch_progress_streams(void);
void ucch_wait_briefly_locked(ucch_op *op);
double ucch_rest(double now, double quiet);
void ucch_wait_begin(void);
void ucch_wait_end(void);

#endif
