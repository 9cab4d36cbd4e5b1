/* Data between processes of one host through shared pinned memory: segment.c, room.c, mailbox.c. */
#ifndef UCCH_WINDOW_H
#define UCCH_WINDOW_H

#include "gpu/device.h"
#include "kernels/layout.h"

#define UCCH_CHUNK ((size_t)UCCH_CHUNK_BYTES)

/* Messages that a process has offered and that nobody has finished receiving, and the room for what is said of them. */
#define CONTROLS 8192
#define UCCH_OFFERS_BYTES ((size_t)CONTROLS * 128)

/* Messages that streams of a process wait for without knowing yet where they are (mailbox.c); behind them what it has
 * promised of those that it sends (room.c). */
#define SLIPS 63
#define UCCH_SLIPS_BYTES ((SLIPS + 1) * sizeof(ucch_slip))

/* The window of a process, whose number may be used again: what lies in it one after the other, and where the bound
 * device sees that. NULL without one, or before it is pinned. */
typedef struct ucch_window {
    uint64_t key;
    size_t nchunks;
    char *offers, *chunks, *chunks_seen;
    ucch_slip *slips, *slips_seen;
    ucch_run *fronts, *fronts_seen;
} ucch_window;

const ucch_window *ucch_window_of(uint64_t key);
int ucch_memory_pin(void *memory, size_t bytes, char **seen);
int ucch_file_of(int pid, int file);
uint64_t ucch_window_key(void);
int ucch_window_file(void);
int ucch_window_make_locked(uint64_t key, size_t many);
int ucch_windows_pin_locked(int with_chunks);
int ucch_chunk_take_locked(uint16_t *chunk);
void ucch_chunk_give_locked(uint16_t chunk);
void ucch_room_near_locked(size_t many);
void ucch_room_publish_locked(void);
int ucch_run_take_locked(int many, int is_near);
int ucch_run_keep_locked(int is_near);
void ucch_run_give_locked(int first, int many);
int ucch_promise_begin(uint64_t key, size_t bytes, int is_near);
void ucch_promise_end(uint64_t key);
void ucch_hosts_note(int more);

/* Device memory that processes of one vendor have opened (arena.c). */
char *ucch_arena_seen(uint64_t key);
size_t ucch_arena_chunks(void);
int ucch_arena_blocks(void);

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
