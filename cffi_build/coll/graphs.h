/* Watch over the replays of graphs. */
#ifndef UCCH_GRAPHS_H
#define UCCH_GRAPHS_H

#include "shm/ring.h"

int ucch_graphs_follow(ucch_graphs *graphs, void *stream);
void ucch_graphs_watch_locked(ucch_graphs *graphs, ucch_board *board, uint64_t number, double timeout);

#endif
