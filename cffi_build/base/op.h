/* Operations: programs, messages, and calls in streams. What base does for them is in a table of theirs (op.c). */
#ifndef UCCH_OP_H
#define UCCH_OP_H

#include "base/ucch.h"

enum { UCCH_IDLE, UCCH_ACTIVE, UCCH_DONE, UCCH_FAILED };

/* Way an operation makes progress: rounds of progress, those of the workers too, or streams, which need none. */
enum { UCCH_BY_CONTEXTS, UCCH_BY_WORKERS, UCCH_IN_STREAMS, UCCH_WAYS };

/* Operations table of one kind, all under the lock and NULL where there is nothing to do. */
typedef struct ucch_op_kind {
    int way;
    int (*advance_locked)(ucch_op *op);              /* move on: whether anything has moved */
    int (*check_locked)(ucch_op *op, double now);    /* whether it will never end: 0, or why, with error.peer */
    void (*abandon_locked)(ucch_op *op, int status); /* end it as failed, and leave what is under way alone */
} ucch_op_kind;

struct ucch_op {
    const ucch_op_kind *kind; /* set before it begins */
    volatile int state;
    ucch_error error;
    double started;
    double deadline;  /* 0 = none */
    int has_listener; /* a thread sleeps until the doorbell rings at its end */
    int matched;      /* a message of which the caller does the rest (p2p/lane.c) */
    /* How the flight recorder is to have it, NULL: not at all; whether it begins later, when a stream gets there, say;
     * and when it has ended, where that is known already. */
    const ucch_record *about;
    int late;
    double ended;
    uint64_t record, event; /* its numbers there, and in the timeline */
    ucch_op *next, *prev;
};

int ucch_ops_under_way(int way);
void ucch_op_begin_locked(ucch_op *op, double timeout);
void ucch_op_started_locked(ucch_op *op);
void ucch_op_end_locked(ucch_op *op, int status, int step, int peer);
int ucch_ops_advance_locked(void);
void ucch_ops_check_deadlines_locked(double now);

#endif
