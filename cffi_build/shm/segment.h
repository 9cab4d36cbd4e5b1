/* Memory that processes of one host share: segment.c, room.c, mailbox.c. */
#ifndef UCCH_SEGMENT_H
#define UCCH_SEGMENT_H

#include "gpu/device.h"
#include "kernels/layout.h"

#define UCCH_CHUNK ((size_t)UCCH_CHUNK_BYTES)

/* Messages that a process has offered and that nobody has finished receiving, and the room for what is said of them. */
#define CONTROLS 8192
#define UCCH_OFFERS_BYTES ((size_t)CONTROLS * 128)

/* Messages that streams of a process wait for without knowing yet where they are (mailbox.c). */
#define SLIPS 63

/* File of a process that is mapped here. */
typedef struct ucch_mapping {
    uint64_t key; /* of the process whose it is */
    int file;     /* there */
    int used;
    size_t bytes;
    char *memory, *seen; /* as the device knows it; NULL: not pinned */
    struct ucch_mapping *next;
} ucch_mapping;

/* Behind a process's slips: credits for early messages, as other processes see them (room.c), and how many slips wait,
 * as a sender need not look where none does (mailbox.c). */
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
    ucch_slip *slips, *slips_seen;
    ucch_credits *credits;
    ucch_run *fronts, *fronts_seen;
    char *arena;
    size_t near;
    int blocks;
} ucch_window;

ucch_mapping *ucch_mapping_new(size_t bytes);
ucch_mapping *ucch_mapping_open(uint64_t key, int pid, int file, size_t bytes);
int ucch_mapping_pin(ucch_mapping *m);
void ucch_mapping_give(ucch_mapping *m);

ucch_window *ucch_window_of(uint64_t key);
int ucch_window_make_locked(uint64_t key, size_t chunks);
int ucch_windows_pin_locked(int with_chunks);
int ucch_arena_make_locked(size_t bytes, ucch_share *handle);
int ucch_chunk_take_locked(uint16_t *chunk);
void ucch_chunk_give_locked(uint16_t chunk);
void ucch_room_publish_locked(void);
int ucch_run_take_locked(int many, int is_near);
int ucch_run_keep_locked(int is_near);
void ucch_run_give_locked(int first, int many);
int ucch_promise_begin(uint64_t key, size_t bytes, int is_near);
void ucch_promise_end(uint64_t key);
void ucch_hosts_note(int more);

ucch_slip *ucch_slip_open_locked(uint64_t sender, uint64_t tag, uint32_t number, int blocks, int promised);
int ucch_slip_withdraw(ucch_slip *slip);
int ucch_slips_keep(uint64_t receiver, uint64_t tag, uint32_t number);
void ucch_slip_close_locked(ucch_slip *slip);
uint32_t ucch_slip_settle(ucch_slip *slip, uint32_t where);
void ucch_slip_stop(ucch_slip *slip);
int ucch_slip_gone(const ucch_slip *slip);
int ucch_slip_hold(ucch_slip *slip, void *await, void *stream);
ucch_slip *ucch_slip_seen(const ucch_slip *slip);
void ucch_slips_tell(uint64_t receiver, uint64_t tag, uint32_t number, uint32_t where);

/* Either side's kernel has so many blocks, with a slice each: as many as a bus keeps busy, or at most UCCH_MOST_BLOCKS
 * between devices of one vendor. */
#define UCCH_BLOCKS 8

ucch_run *ucch_run_at(uint64_t key, int first);

void ucch_bells_reserve(void);
int ucch_bell_hold(int slip, const uint32_t *bell, uint32_t rings, void *stream);

#endif
