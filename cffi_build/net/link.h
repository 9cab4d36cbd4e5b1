/* Connections with processes of other hosts, beside the data (link.c). All under their lock. */
#ifndef UCCH_LINK_H
#define UCCH_LINK_H

#include "base/ucch.h"

/* The most bytes of a word's data. */
#define UCCH_WORD_BYTES 8224

typedef struct ucch_word {
    uint32_t bytes, kind; /* of what follows; kinds from 2 on are those of circle.c */
    uint64_t key;
} ucch_word_t;

/* circle.c, by the thread: a word has come (0, or not 0: nonsense), a turn, and what has become of a process. */
int ucch_circles_hear(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
void ucch_circles_turn(void);
void ucch_circles_lose(int link, int how);

void ucch_links_lock(void);
void ucch_links_unlock(void);
int ucch_link_say(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes);
int ucch_link_fate(int link);

#endif
