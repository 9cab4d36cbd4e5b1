/* A whole program into streams at once; stream_executor.c keeps the books. */
#ifndef UCCH_ENQUEUE_H
#define UCCH_ENQUEUE_H

#include "coll/program.h"

typedef struct ucch_launch ucch_launch;

int ucch_lane_of(const ucch_step *s);
size_t ucch_piece_of(const ucch_channels *c, const ucch_step *s);
int ucch_enqueue_ready(ucch_program *p);
int ucch_enqueue_locked(ucch_program *p, ucch_launch *l, void *stream);

#endif
