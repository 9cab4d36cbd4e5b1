/* Shared pinned memory of one communicator (mapping.c). */
#ifndef UCCH_MAPPING_H
#define UCCH_MAPPING_H

#include "gpu/device.h"

typedef struct ucch_mapping {
    uint64_t key; /* of the process whose it is */
    int file;     /* there */
    int used;
    size_t bytes;
    char *memory, *seen; /* as the device knows it; NULL: not pinned */
    struct ucch_mapping *next;
} ucch_mapping;

ucch_mapping *ucch_mapping_new(size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m);
void ucch_mapping_give(ucch_mapping *m);

#endif
