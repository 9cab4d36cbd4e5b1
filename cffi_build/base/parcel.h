/* Parcels: the data of short calls, on the page of the arrival board (parcel.c). */
#ifndef UCCH_PARCEL_H
#define UCCH_PARCEL_H

#include "base/ucch.h"

/* Parcels of a rank: of so many calls in a row. */
#define UCCH_PARCELS 64

/* Contribution of one rank to one call. */
typedef struct ucch_parcel {
    uint64_t call, signature; /* call: the last one to be written */
    char data[UCCH_PARCEL_BYTES];
} ucch_parcel;

/* The parcels of a rank. Of each the last call after which this rank reads none any more, whose parcel ever. */
typedef struct ucch_parcels {
    uint64_t read[UCCH_PARCELS];
    ucch_parcel of[UCCH_PARCELS];
} ucch_parcels;

/* A rank's part in calls. `from`: whose parcels it reads, a slot, UCCH_ALL_PEERS or UCCH_NOBODY. Of each it takes
 * `bytes` from `at` on, which are combined, or laid one behind the other: `count` elements. */
typedef struct ucch_exchange ucch_exchange;
struct ucch_exchange {
    const ucch_part *is;
    uint64_t count;
    /* Of the call under way: */
    uint64_t call, signature;
    ucch_exchange *next;              /* calls that have the same parcels */
    int queued, begun, written, came; /* came: parcels that are known to be there */
};

/* Parcels of a board: those of all ranks, in the order of their slots. */
typedef struct ucch_parcel_table {
    ucch_parcels *each; /* NULL where ranks do not share the memory */
    int n, mine;
    ucch_exchange *turns[UCCH_PARCELS]; /* our calls under way, in order: the first one has the parcels */
} ucch_parcel_table;

ucch_parcel_table *ucch_board_parcels(ucch_board *board);

void ucch_exchange_begin(ucch_parcel_table *post, ucch_exchange *x, uint64_t call, uint64_t signature);
int ucch_exchange_go_on(ucch_parcel_table *post, ucch_exchange *x, const char *src, uint64_t bytes, char *dst);
void ucch_exchange_end(ucch_parcel_table *post, ucch_exchange *x);

#endif
