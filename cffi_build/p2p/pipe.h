/* Either half of a pipe: a message through a window. */
#ifndef UCCH_PIPE_H
#define UCCH_PIPE_H

#include "shm/segment.h"

/* Rendezvous header, from sender to receiver: whose window, and which of its controls. */
typedef struct ucch_rts {
    uint64_t bytes, piece, key;
    uint32_t control, more;
} ucch_rts;

/* Kind of a sender's data, on the device or not; for a probe, the message's tag and its receiver's rank. */
typedef struct ucch_offer {
    const void *data;
    size_t bytes;
    int on_device, dest;
    uint64_t tag;
} ucch_offer;

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

enum { ENDED, OFFERED, SENDING, RECEIVING };

struct ucch_pipe {
    int phase, on_device, slots;
    char *buffer, *base; /* the window's first chunk */
    control *at;
    uint32_t index; /* of the control, on the sender's side */
    size_t bytes, piece;
    uint64_t pieces, asked, done;
    void *event[SLOTS];
    double again; /* when to look next */
};

/* Either side's part in one message, for use again and again. */
ucch_pipe *ucch_pipe_new(void);
void ucch_pipe_free(ucch_pipe *p);
int ucch_pipe_offer_locked(ucch_pipe *p, const ucch_offer *offer, ucch_rts *rts);
int ucch_pipe_accept_locked(ucch_pipe *p, void *buffer, size_t room, int on_device, const ucch_rts *rts);
int ucch_pipe_pump_locked(ucch_pipe *p);
void ucch_pipe_abort_locked(ucch_pipe *p);
void ucch_pipe_offered_locked(ucch_pipe *p);
int ucch_pipe_busy_locked(ucch_pipe *p);
void ucch_rts_decline_locked(const ucch_rts *rts);
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take);

static inline size_t ucch_piece_length(const ucch_pipe *p, uint64_t piece) {
    return piece + 1 < p->pieces ? p->piece : p->bytes - piece * p->piece;
}

#endif
