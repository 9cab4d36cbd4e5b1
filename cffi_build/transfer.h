/* A message through a window as transfer.c and queued.c know it. */
#ifndef UCCH_TRANSFER_H
#define UCCH_TRANSFER_H

#include "channel.h"
#include "window.h"

/* Pieces of one message under way at a time. */
#define SLOTS 8

/* One message, in the sender's window: a cache line that the sender writes, and one that the receiver does. */
typedef struct control {
    uint64_t published; /* pieces that lie in their chunks */
    uint64_t number;    /* of the message among this sender's; 0 while there is none */
    uint64_t tag, bytes;
    int32_t dest;
    uint32_t aborted;
    uint16_t chunk[SLOTS];
    uint64_t reserved;
    uint64_t consumed;             /* pieces that have left their chunks */
    uint32_t taken, ready, closed; /* out of libucp's queue by a probe; being received; done with */
    uint32_t more[11];
} control;
_Static_assert(sizeof(control) == UCCH_OFFERS_BYTES / CONTROLS, "room for all controls");

enum { ENDED, OFFERED, SENDING, RECEIVING, AWAITED, TAKING };

struct ucch_transfer {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t index; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
    double again;
    /* Of one that is queued: its words and data, the sender's chunks, and whether it was given up meanwhile. */
    char *run;
    int first, many, left;
};

char *ucch_run_at(uint64_t key, int first);
char *ucch_run_piece(const ucch_transfer *t, uint64_t piece);
int ucch_run_over(const control *c, char *run);
int ucch_run_offer_locked(ucch_transfer *t, ucch_token *token, void *stream);
int ucch_run_put_locked(ucch_transfer *t, void *stream);
int ucch_run_taken(char *run);
int ucch_run_there(char *run);
void ucch_run_let_go(char *run);

static inline size_t ucch_piece_length(const ucch_transfer *t, uint64_t piece) {
    return piece + 1 < t->pieces ? t->piece : t->bytes - piece * t->piece;
}

#endif
