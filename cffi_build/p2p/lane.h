/* Lanes for messages that libucp has matched: lane.c, offer.c. */
#ifndef UCCH_LANE_H
#define UCCH_LANE_H

#include "base/op.h"

ucp_ep_h ucch_lanes_endpoint(const ucch_lanes *all, int peer);
int ucch_lanes_rank(const ucch_lanes *all);
int ucch_letter_move_locked(ucch_lanes *all, ucch_letter *m, int peer, int how, char *data, uint64_t bytes,
                            uint32_t *number);
void ucch_letter_abandon_locked(ucch_letter *m, int status);

#endif
