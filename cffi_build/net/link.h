/* Connections with processes of other hosts, beside the data (link.c), all under their lock; and whether a host answers
 * at its addresses, as our kernel knows it (path.c). */
#ifndef UCCH_LINK_H
#define UCCH_LINK_H

#include "base/ucch.h"

/* The most bytes of a message's data. */
#define UCCH_LINK_BYTES 8224

typedef struct ucch_link_header {
    uint32_t bytes, kind; /* of what follows; kinds from 2 on are the listener's */
    uint64_t key;
} ucch_link_header;

/* Callbacks of one user of the connections: all are called by the thread, and with the lock. */
typedef struct ucch_listener {
    /* A message has come: 0, or not 0 where no peer of ours would send it. */
    int (*on_message)(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
    void (*on_turn)(void);              /* ten times a second */
    void (*on_lost)(int link, int how); /* UCCH_DIED or what else has become of the process */
} ucch_listener;

void ucch_links_listen(const ucch_listener *listener);
void ucch_links_lock(void);
void ucch_links_unlock(void);
int ucch_link_send(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
int ucch_link_fate(int link);

int ucch_path_find_cut(const void *addresses, size_t bytes, double patience, char *text);

#endif
