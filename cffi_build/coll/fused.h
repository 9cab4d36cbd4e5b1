/* All of a short call in one kernel. */
#ifndef UCCH_WHOLE_H
#define UCCH_WHOLE_H

#include "kernels/layout.h"

#include "coll/program.h"

int ucch_whole_add(ucch_moves *w, ucch_move m);
int ucch_whole_fits(const ucch_program *p, uint64_t moved);
int ucch_whole_launch(const ucch_program *p, ucch_moves *w, void *stream);
int ucch_whole_sliced(const ucch_program *p);

#endif
