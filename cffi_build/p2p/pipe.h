/* A message through a window as pipe.c and stream_copy.c know it. */
#ifndef UCCH_TRANSFER_H
#define UCCH_TRANSFER_H

#include "shm/segment.h"

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

/* AWAITED: it has come, and a stream is to take it. EXPECTED: a stream waits for it, and its token has not come.
 * LANDED: it came as plain data. */
enum { ENDED, OFFERED, SENDING, RECEIVING, AWAITED, EXPECTED, TAKING, LANDED };

typedef struct ucch_beside ucch_beside;

struct ucch_transfer {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t index; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
    double again, since; /* when to look next, and when it began */
    /* Of one that is queued: its words and data, where that is, the sender's chunks, whether it was given up meanwhile,
     * and what takes part on our side. */
    char *run;
    uint64_t sender;
    uint32_t where;
    int first, many, left, ours; /* ours: the host asked for it, and a stream of ours takes it */
    int by_hosts;                /* no stream may wait for it early */
    int eager, fetching;         /* over for us once it is there; plus one: the slice whose step a device copies */
    ucch_beside *beside;
    void *kernel, *await;
    ucch_slip *slip;
};

void ucch_transfer_begin(ucch_transfer *t, int phase, const ucch_token *token, void *buffer, int on_device);
int ucch_transfer_collect(ucch_transfer *t);
void ucch_slip_drop(ucch_transfer *t);
void ucch_slip_release(ucch_transfer *t);
int ucch_take_on(ucch_transfer *t);
int ucch_land_on(ucch_transfer *t);
int ucch_run_over(const control *c, char *run);
int ucch_run_full(char *run);
int ucch_run_begun(char *run);
void ucch_run_stop(char *run);
int ucch_run_spoilt(char *run);
int ucch_run_receive(ucch_transfer *t);
int ucch_run_fetching(ucch_transfer *t);
int ucch_run_offer_locked(ucch_transfer *t, ucch_token *token, const ucch_offer *offer);
int ucch_take_ready_locked(ucch_transfer *t, const ucch_expected *e, void *stream, int early);

static inline size_t ucch_piece_length(const ucch_transfer *t, uint64_t piece) {
    return piece + 1 < t->pieces ? t->piece : t->bytes - piece * t->piece;
}

#endif
