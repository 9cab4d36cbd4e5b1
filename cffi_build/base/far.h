/* A communicator that is on several hosts: what this rank has called, and what is known of ranks elsewhere (far.c). */
#ifndef UCCH_FAR_H
#define UCCH_FAR_H

#include "base/ucch.h"

/* Calls that are remembered, for ranks of other hosts to compare theirs with. */
#define UCCH_CALLS_SEEN 8192
/* Seconds in which a call that has failed on one rank may still end well on other ranks; and where the ranks are on
 * several hosts, which are told why some time after it has failed, and on busy ones later still. */
#define UCCH_GRACE_S 1.0
#define UCCH_GRACE_FAR_S 5.0

/* True if two ranks have made different calls, by their signatures or by hashes of these. One that is only set up fits
 * any call but a refused one. */
static inline int ucch_calls_differ(uint64_t one, uint64_t other) {
    if (one == UCCH_ANY_CALL) return other == UCCH_REFUSED_CALL;
    if (other == UCCH_ANY_CALL) return one == UCCH_REFUSED_CALL;
    return one != other;
}

typedef struct ucch_far ucch_far;

ucch_far *ucch_far_new(int size);
void ucch_far_call(ucch_far *far, uint64_t seq, uint64_t signature);
int ucch_far_differs(const ucch_far *far, uint64_t seq);
int ucch_far_gone(const ucch_far *far, uint64_t seq);
uint64_t ucch_far_difference(const ucch_far *far, int *rank, char *label);
uint64_t ucch_far_given_up(const ucch_far *far, int rank);
int ucch_far_fate(const ucch_far *far, int rank);
int ucch_far_cut(ucch_far *far, double waited, int rank);
const char *ucch_far_link(const ucch_far *far, int rank);

/* For the thread that hears of other hosts, which alone writes. */
uint64_t ucch_far_changed(ucch_far *far);
uint64_t ucch_far_called(const ucch_far *far);
uint32_t ucch_far_hash(const ucch_far *far, uint64_t seq);
void ucch_far_note_differs(ucch_far *far, uint64_t seq, int rank, const char *label);
int ucch_far_note_gone(ucch_far *far, int rank, int how, uint64_t last, uint64_t failed);

void ucch_far_patience(ucch_far *far, double seconds);
int ucch_far_is_asked(const ucch_far *far);
void ucch_far_note_cut(ucch_far *far, int rank, const char *link);

ucch_far *ucch_board_far(const ucch_board *board);
void ucch_board_end(ucch_board *board, uint64_t call, int rank, const char *text);
void ucch_board_own_text(ucch_board *board, uint64_t seq, char *text);
int ucch_board_has_left(const ucch_board *board);
uint64_t ucch_board_has_failed(const ucch_board *board);
uint64_t ucch_board_under_way(const ucch_board *board);
void ucch_board_behind_by(ucch_board *board, int rank, uint64_t reached);
void ucch_board_waited_by(ucch_board *board, int rank, uint64_t call, const char *label, double since);

#endif
