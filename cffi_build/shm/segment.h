/* Memory that processes of one host share: segment.c, room.c, mailbox.c. */
#ifndef UCCH_SEGMENT_H
#define UCCH_SEGMENT_H

#include "gpu/device.h"
#include "kernels/layout.h"

#define UCCH_CHUNK ((size_t)UCCH_CHUNK_BYTES)

/* Messages that a process has offered and that nobody has finished receiving, and the room for what is said of them. */
#define CONTROLS 8192
#define UCCH_OFFERS_BYTES ((size_t)CONTROLS * 128)

/* Receives that a process can post at a time for its streams (mailbox.c). */
#define MAILBOX 63

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

/* Behind a process's mailbox: credits for early messages, as other processes see them (room.c), and how many posted
 * receives wait, as a sender need not look where none does (mailbox.c). */
typedef struct ucch_credits {
    uint32_t most, most_near; /* at a time; of chunks that have a place in the arena */
    uint32_t given;
    uint32_t by_hosts; /* our messages that are left to hosts, until they are over */
    uint32_t holds;    /* our streams may wait for the receiver's: one chunk will do for a message of any length */
    uint32_t more[11];
    uint32_t waiting;
} ucch_credits;

/* The window of a process, whose number may be used again: what lies in it one after the other, and where the bound
 * device sees that. NULL without one, or before it is pinned. Beside it the process's arena, as our device sees it:
 * with places for so many chunks, and copied by kernels of so many blocks, where it is our own. */
typedef struct ucch_window {
    uint64_t key;
    int file;
    size_t nchunks;
    char *offers, *chunks, *chunks_seen;
    ucch_posted *mailbox, *mailbox_seen;
    ucch_credits *credits;
    ucch_extent *extents, *extents_seen;
    char *arena;
    size_t near;
    int blocks;
} ucch_window;

ucch_mapping *ucch_mapping_new(size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m, size_t at, size_t bytes, char **seen);
void ucch_mapping_give(ucch_mapping *m);

ucch_window *ucch_window_of(uint64_t key);
int ucch_window_make_locked(uint64_t key, size_t chunks);
int ucch_windows_pin_locked(int with_chunks);
int ucch_arena_make_locked(size_t bytes, ucch_share *handle);
int ucch_chunk_take_locked(uint16_t *chunk);
void ucch_chunk_give_locked(uint16_t chunk);
void ucch_room_publish_locked(void);
int ucch_extent_take_locked(int many, int is_near);
int ucch_extent_keep_locked(int is_near);
void ucch_extent_give_locked(int first, int many);
int ucch_credit_take(uint64_t key, size_t bytes, int is_near);
void ucch_credit_return(uint64_t key);
void ucch_hosts_note(int more);

ucch_posted *ucch_posted_open_locked(uint64_t sender, uint64_t tag, uint32_t number, int blocks, int credited);
int ucch_posted_withdraw(ucch_posted *posted);
int ucch_mailbox_keep(uint64_t receiver, uint64_t tag, uint32_t number);
void ucch_posted_close_locked(ucch_posted *posted);
uint32_t ucch_posted_settle(ucch_posted *posted, uint32_t where);
void ucch_posted_stop(ucch_posted *posted);
int ucch_posted_gone(const ucch_posted *posted);
int ucch_posted_hold(ucch_posted *posted, void *await, void *stream);
ucch_posted *ucch_posted_seen(const ucch_posted *posted);
void ucch_mailbox_deliver(uint64_t receiver, uint64_t tag, uint32_t number, uint32_t where);

/* Either side's kernel has so many blocks, with a slice each: as many as a bus keeps busy, or at most UCCH_MOST_BLOCKS
 * between devices of one vendor. */
#define UCCH_BLOCKS 8

ucch_extent *ucch_extent_at(uint64_t key, int first);

void ucch_doorbells_reserve(void);
int ucch_doorbell_hold(int i, const uint32_t *doorbell, uint32_t rings, void *stream);

#endif
