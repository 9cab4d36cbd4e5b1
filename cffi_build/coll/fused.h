/* All of a short call in one kernel. */
#ifndef UCCH_FUSED_H
#define UCCH_FUSED_H

#include "kernels/layout.h"

#include "coll/program.h"

int ucch_fused_add(ucch_moves *w, ucch_move m);
void ucch_fused_join(const ucch_program *p, ucch_moves *w);
int ucch_fused_fits(const ucch_program *p, uint64_t moved);
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int apart, void *stream);
int ucch_fused_sliced(const ucch_program *p);

#endif
