/* Flows: one direction of a ring between two hosts, carried by wires (flow.c). */
#ifndef UCCH_FLOW_H
#define UCCH_FLOW_H

#include "kernels/layout.h"

#include "net/wire.h"

/* Bytes before the data of each slot, in which the sender's thread says what it is. */
#define UCCH_FLOW_HEADER sizeof(ucch_slot_header)
/* Lowest bit of a flow's own tag, and where it differs between those of a rank. */
#define UCCH_FLOW_TAG_BIT 11
#define UCCH_FLOW_SPREAD_BIT 15

/* A ring on this host: `depth` slots, `stride` bytes apart, each with a header before its data; the words that count
 * what was put in and taken out; and where a rank says from which call on its data is garbage, here and, as it has told
 * us, there. `tells`, of one ring between two ranks: the sender's failure is told by it. `by_device`: no host knows of
 * pieces before they are published, as kernels that are replayed say themselves, in its header, what is in a slot, and
 * compare. */
typedef struct ucch_slots {
    char *slots;
    size_t stride;
    int depth;
    uint32_t *published, *consumed;
    uint64_t *tainted_here, *tainted_there;
    int tells, by_device;
} ucch_slots;

typedef struct ucch_flow ucch_flow;

ucch_flow *ucch_flow_new(const ucch_slots *ring, int sends, int nwires, uint64_t key, uint64_t tag);
int ucch_flow_due(ucch_flow *flow, size_t bytes, size_t piece, uint64_t number, uint64_t hash);
int ucch_flow_failed(const ucch_flow *flow, uint64_t number);
void ucch_flow_differs(ucch_flow *flow, uint64_t call);
void ucch_flow_wake(ucch_flow *flow);
int ucch_flow_quiet(const ucch_flow *flow);
int ucch_flow_free(ucch_flow *flow);

#endif
