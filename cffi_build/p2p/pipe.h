/* A message through a window as pipe.c and stream_copy.c know it. */
#ifndef UCCH_TRANSFER_H
#define UCCH_TRANSFER_H

#include "shm/segment.h"

/* Rendezvous header, from sender to receiver: whose window, which of its controls, and where the data lies if it was
 * queued: the first chunk of it, plus one. */
typedef struct ucch_token {
    uint64_t bytes, piece, key;
    uint32_t control, run;
} ucch_token;

/* Kind of a sender's data, on the device or not; for a probe, the message's tag and its receiver's rank. */
typedef struct ucch_offer {
    const void *data;
    size_t bytes;
    int on_device, dest;
    uint64_t tag;
    int queued, eager; /* in streams, if there is room; over for us once our device has put it there */
    void *stream;
    uint64_t receiver; /* its process, where known, and which of our messages under the tag it is to it (0: unknown) */
    uint32_t number;
} ucch_offer;

/* Receive in a stream: message `number` under a tag from process `sender`, 0 where it has come, to the device. */
typedef struct ucch_expected {
    uint64_t sender, tag;
    uint32_t number;
    char *buffer;
    size_t room;
} ucch_expected;

/* Stands for a stream of the caller's where there is none. */
#define UCCH_OURS ((void *)&ucch_ours)
extern char ucch_ours;

typedef struct ucch_transfer ucch_transfer;

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
    ucch_run *run;
    uint64_t sender;
    uint32_t where;
    int first, many, left, ours; /* ours: the host asked for it, and a stream of ours takes it */
    int by_hosts;                /* no stream may wait for it early */
    int eager, fetching;         /* over for us once it is there; plus one: the slice whose step a device copies */
    ucch_beside *beside;
    void *kernel, *await;
    ucch_slip *slip;
};

/* Either side's part in one message, for use again and again. */
ucch_transfer *ucch_transfer_new(void);
void ucch_transfer_free(ucch_transfer *t);
int ucch_transfer_offer_locked(ucch_transfer *t, const ucch_offer *offer, ucch_token *token);
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token);
int ucch_transfer_pump_locked(ucch_transfer *t);
void ucch_transfer_abort_locked(ucch_transfer *t);
void ucch_transfer_offered_locked(ucch_transfer *t);
void ucch_transfer_over_locked(ucch_transfer *t);
int ucch_transfer_queued(const ucch_transfer *t);
void ucch_transfer_by_host_locked(ucch_transfer *t);
void ucch_transfer_await_locked(ucch_transfer *t, void *buffer, int on_device, const ucch_token *token);
int ucch_transfer_expect_locked(ucch_transfer *t, const ucch_expected *e, void *stream);
int ucch_transfer_met_locked(ucch_transfer *t, size_t room, const ucch_token *token);
int ucch_transfer_landed_locked(ucch_transfer *t, const void *landing, size_t bytes);
int ucch_run_put(ucch_transfer *t, uint64_t receiver, void *stream);
int ucch_take(ucch_transfer *t, const ucch_expected *e, void *stream);
int ucch_transfer_busy_locked(ucch_transfer *t);
void ucch_token_decline_locked(const ucch_token *token);
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take);

void ucch_slip_drop(ucch_transfer *t);
int ucch_run_over(const control *c, ucch_run *run);
int ucch_run_full(ucch_run *run);
int ucch_run_begun(ucch_run *run);
void ucch_run_stop(ucch_run *run);
int ucch_run_spoilt(ucch_run *run);
int ucch_run_receive(ucch_transfer *t);
int ucch_run_fetching(ucch_transfer *t);
int ucch_run_offer_locked(ucch_transfer *t, ucch_token *token, const ucch_offer *offer);
int ucch_take_ready_locked(ucch_transfer *t, const ucch_expected *e, void *stream, int early);

static inline size_t ucch_piece_length(const ucch_transfer *t, uint64_t piece) {
    return piece + 1 < t->pieces ? t->piece : t->bytes - piece * t->piece;
}

#endif
