/* The page that the ranks of a host share (board.c): a slot for each of them. */
#pragma once
#include "base/far.h"

#define RING 64
#define LABEL UCCH_LABEL_BYTES

typedef struct arrival {
    uint64_t seq; /* 0 while being written */
    uint64_t signature;
    char label[LABEL];
} arrival;

/* A page is used by one communicator of its ranks after the other. A rank that frees its communicator without a call
 * writes nothing but `given_back` and `pid`, which say of which use they are. */
typedef struct slot {
    int64_t pid;     /* or the last use that this rank has left, less than 0 */
    uint64_t seq;    /* the last call entered or refused */
    uint64_t open;   /* calls entered that have not ended */
    uint64_t behind; /* of the ranks of other hosts that it is connected with: the last one's call, and rank plus one */
    uint64_t signal; /* makes the rank's process write its flight record, where its handler is set */
    uint64_t asked;  /* to do so, because of this call, by any rank */
    uint64_t since;  /* ns of CLOCK_MONOTONIC when that was */
    uint64_t began;  /* and when the last call that the engine runs was entered */
    /* A line that is hardly ever written; slot 0's is all ranks'. */
    uint64_t revoked;  /* a rank of this host has heard that the communicator is revoked */
    uint64_t ending;   /* the first call that a rank refuses and another one makes, as far as is known; 0 for none */
    uint64_t doubtful; /* the last call that was under way on a rank when its process met an endpoint error */
    uint64_t failed;   /* the first call that has failed on the rank; 0 for none */
    uint64_t since_failed; /* ns of CLOCK_MONOTONIC when it first knew of one */
    int64_t file;          /* the process's descriptor of its recorder's memory */
    uint64_t waited_since; /* ns of CLOCK_MONOTONIC: the call of `waits` */
    uint64_t given_back;   /* the last use that this rank has ended by Free, in which it may be still */
    ucch_refusal refused;  /* the last call that this rank refused */
    ucch_refusal end;      /* the first refusal that has ended the communicator, as this rank knows it */
    ucch_refusal waits;    /* a call in which a rank of another host waits, and this one has not come to; no refusal */
    arrival ring[RING];
} slot;
