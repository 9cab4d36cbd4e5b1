/* Either half of a pipe: a message through a window, as pipe.c and stream_copy.c know it. */
#ifndef UCCH_PIPE_H
#define UCCH_PIPE_H

#include "shm/segment.h"

/* Rendezvous header, from sender to receiver: whose window, which of its controls, and where the data lies if streams
 * copy it: the first chunk of its extent, plus one. */
typedef struct ucch_rts {
    uint64_t bytes, piece, key;
    uint32_t control, extent;
} ucch_rts;

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

typedef struct ucch_pipe ucch_pipe;

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

/* AWAITED: it has come, and a stream is to take it. EXPECTED: a stream waits for it, and its header has not come.
 * LANDED: it came as plain data. */
enum { ENDED, OFFERED, SENDING, RECEIVING, AWAITED, EXPECTED, TAKING, LANDED };

typedef struct ucch_beside ucch_beside;

struct ucch_pipe {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t index; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
    double again, since; /* when to look next, and when it began */
    /* Of one that streams copy: its extent, whose and where that is, the sender's chunks, whether it was given up
     * meanwhile, and what takes part on our side. */
    ucch_extent *extent;
    uint64_t sender;
    uint32_t where;
    int first, many, left, ours; /* ours: the host asked for it, and a stream of ours takes it */
    int by_hosts;                /* no stream may wait for it early */
    int eager, fetching;         /* over for us once it is there; plus one: the slice whose step a device copies */
    ucch_beside *beside;
    void *kernel, *await;
    ucch_posted *posted;
};

/* Either side's part in one message, for use again and again. */
ucch_pipe *ucch_pipe_new(void);
void ucch_pipe_free(ucch_pipe *p);
int ucch_pipe_offer_locked(ucch_pipe *p, const ucch_offer *offer, ucch_rts *rts);
int ucch_pipe_accept_locked(ucch_pipe *p, void *buffer, size_t room, int on_device, const ucch_rts *rts);
int ucch_pipe_pump_locked(ucch_pipe *p);
void ucch_pipe_abort_locked(ucch_pipe *p);
void ucch_pipe_offered_locked(ucch_pipe *p);
void ucch_pipe_over_locked(ucch_pipe *p);
int ucch_pipe_queued(const ucch_pipe *p);
void ucch_pipe_by_host_locked(ucch_pipe *p);
void ucch_pipe_await_locked(ucch_pipe *p, void *buffer, int on_device, const ucch_rts *rts);
int ucch_pipe_expect_locked(ucch_pipe *p, const ucch_expected *e, void *stream);
int ucch_pipe_matched_locked(ucch_pipe *p, size_t room, const ucch_rts *rts);
int ucch_pipe_landed_locked(ucch_pipe *p, const void *landing, size_t bytes);
int ucch_extent_put(ucch_pipe *p, uint64_t receiver, void *stream);
int ucch_pipe_take(ucch_pipe *p, const ucch_expected *e, void *stream);
int ucch_pipe_busy_locked(ucch_pipe *p);
void ucch_rts_decline_locked(const ucch_rts *rts);
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take);

void ucch_posted_drop(ucch_pipe *p);
int ucch_extent_over(const control *c, ucch_extent *extent);
int ucch_extent_full(ucch_extent *extent);
int ucch_extent_begun(ucch_extent *extent);
void ucch_extent_stop(ucch_extent *extent);
int ucch_extent_tainted(ucch_extent *extent);
int ucch_extent_receive(ucch_pipe *p);
int ucch_extent_fetching(ucch_pipe *p);
int ucch_extent_offer_locked(ucch_pipe *p, ucch_rts *rts, const ucch_offer *offer);
int ucch_pipe_take_ready_locked(ucch_pipe *p, const ucch_expected *e, void *stream, int early);

static inline size_t ucch_piece_length(const ucch_pipe *p, uint64_t piece) {
    return piece + 1 < p->pieces ? p->piece : p->bytes - piece * p->piece;
}

#endif
