/* A whole program into streams at once; stream_executor.c keeps the books. */
#ifndef UCCH_SCHEDULE_H
#define UCCH_SCHEDULE_H

#include "coll/program.h"

int ucch_enqueue_scratch(ucch_program *p);
int ucch_enqueue_ready_locked(ucch_program *p);
int ucch_enqueue(ucch_program *p, ucch_launch *l, void *stream);
int ucch_post_steps_locked(ucch_program *p, ucch_launch *l, void *stream);

#endif
