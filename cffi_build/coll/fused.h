/* All of a short call in one kernel. */
#ifndef UCCH_WHOLE_H
#define UCCH_WHOLE_H

#include "coll/program.h"

enum { MOVE_NOTHING, MOVE_COPY, MOVE_COMBINE };

/* Entry of a fused kernel (ucc_hetero/device/kernels.py): wait for a word, move data, write a word. */
typedef struct ucch_move {
    const void *src;
    void *dst, *wait, *tell;
    uint32_t least, value, kind, n; /* bytes to copy, elements to combine */
} ucch_move;

typedef struct ucch_moves {
    uint64_t n;
    uint32_t *arrived; /* by move, how many blocks have done their part; 0 between calls */
    ucch_move each[MOST_MOVES];
} ucch_moves;

int ucch_whole_add(ucch_moves *w, ucch_move m);
int ucch_whole_fits(const ucch_program *p, uint64_t moved);
int ucch_whole_launch(const ucch_program *p, ucch_moves *w, void *stream);
int ucch_whole_sliced(const ucch_program *p);

#endif
