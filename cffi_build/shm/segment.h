/* Memory that processes of one host share: segment.c. */
#ifndef UCCH_SEGMENT_H
#define UCCH_SEGMENT_H

#include "gpu/device.h"
#include "kernels/layout.h"

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
    uint64_t inode;
    int ours, used;
    size_t bytes, pinned;
    char *memory, *seen; /* its beginning, as the device knows it; NULL: not pinned */
    ucch_range *ranges;
    struct ucch_mapping *next;
} ucch_mapping;

int ucch_shared_pin(void *memory, size_t bytes, char **seen);
ucch_mapping *ucch_mapping_new(uint64_t key, size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen);
void ucch_mapping_give(ucch_mapping *m);
void ucch_mapping_drop(ucch_mapping *m);
#endif
