/* Short messages of a stage that wires carry, by one kernel. */
#ifndef UCCH_COPIES_H
#define UCCH_COPIES_H

#include "shm/ring.h"

void ucch_copies_add(ucch_ring_copies *all, ucch_channel *channel, char *data, size_t bytes, int comes);
int ucch_copies_launch(const ucch_channels *c, ucch_ring_copies *all, void *stream);

#endif
