/* Memory that processes of one host share: segment.c, room.c. */
#ifndef UCCH_SEGMENT_H
#define UCCH_SEGMENT_H

#include "gpu/device.h"
#include "kernels/layout.h"

#define UCCH_CHUNK ((size_t)UCCH_CHUNK_BYTES)

/* Messages that a process has offered and that nobody has finished receiving, and the room for what is said of them. */
#define CONTROLS 8192
#define UCCH_OFFERS_BYTES ((size_t)CONTROLS * 128)

/* Pinned part of a file that is mapped here, as the device knows it. */
typedef struct ucch_range {
    size_t at, bytes;
    char *seen;
    struct ucch_range *next;
} ucch_range;

/* File of a process that is mapped here. It takes memory where it has been pinned. */
typedef struct ucch_mapping {
    uint64_t key; /* of the process whose it is */
    int file;     /* there */
    int used;
    size_t bytes, pinned;
    char *memory, *seen; /* its beginning, as the device knows it; NULL: not pinned */
    ucch_range *ranges;
    struct ucch_mapping *next;
} ucch_mapping;

/* The window of a process, whose number may be used again: what lies in it one after the other, and where the bound
 * device sees that. NULL without one, or before it is pinned. */
typedef struct ucch_window {
    uint64_t key;
    int file;
    size_t nchunks;
    char *offers, *chunks, *chunks_seen;
} ucch_window;

char *ucch_shared_map(int file, size_t bytes);
int ucch_shared_open(int pid, int file);
int ucch_shared_pin(void *memory, size_t bytes, char **seen);
ucch_mapping *ucch_mapping_new(size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen);
void ucch_mapping_give(ucch_mapping *m);

ucch_window *ucch_window_of(uint64_t key);
int ucch_window_make_locked(uint64_t key, size_t chunks);
int ucch_chunk_take_locked(uint16_t *chunk);
void ucch_chunk_give_locked(uint16_t chunk);
#endif
