/* Data between processes of one host through shared pinned memory: segment.c, and the messages of pipe.c. */
#ifndef UCCH_WINDOW_H
#define UCCH_WINDOW_H

#include "shm/ring.h"

#define UCCH_CHUNK ((size_t)UCCH_CHUNK_BYTES)

/* Messages that a process has offered and that nobody has finished receiving, and the room for what is said of them. */
#define CONTROLS 8192
#define UCCH_OFFERS_BYTES ((size_t)CONTROLS * 128)

/* Messages that streams of a process wait for without knowing yet where they are (mailbox.c); behind them what it has
 * promised of those that it sends (room.c). */
#define SLIPS 63
#define UCCH_SLIPS_BYTES ((size_t)(SLIPS + 1) * UCCH_SLIP)

void *ucch_window_memory(uint64_t key, size_t *bytes);
void *ucch_window_seen(uint64_t key);
char *ucch_window_fronts(uint64_t key);
char *ucch_window_fronts_seen(uint64_t key);
void *ucch_window_offers(uint64_t key);
void *ucch_window_slips(uint64_t key);
void *ucch_window_slips_seen(uint64_t key);
uint64_t ucch_window_key(void);
int ucch_chunk_take_locked(uint16_t *chunk);
void ucch_chunk_give_locked(uint16_t chunk);
void ucch_offers_begin_locked(void);
void ucch_offers_reclaim_locked(void);
int ucch_room_begin_locked(size_t many);
void ucch_room_publish_locked(void);
int ucch_run_take_locked(int many, int is_near);
int ucch_run_keep_locked(int is_near);
void ucch_run_give_locked(int first, int many);
int ucch_promise_begin(uint64_t key, size_t bytes, int is_near);
void ucch_promise_end(uint64_t key);
void ucch_hosts_note(int more);
void ucch_beside_reserve(void);

/* Device memory that processes of one vendor have opened (arena.c). */
char *ucch_arena_seen(uint64_t key);
size_t ucch_arena_chunks(void);
int ucch_arena_blocks(void);

/* Where a stream of this process's waits for a message. */
typedef struct ucch_slip ucch_slip;

ucch_slip *ucch_slip_open_locked(uint64_t sender, uint64_t tag, uint32_t number, int blocks, int promised);
int ucch_slip_withdraw(ucch_slip *slip);
int ucch_slips_keep(uint64_t receiver, uint64_t tag, uint32_t number);
void ucch_slip_close_locked(ucch_slip *slip);
uint32_t ucch_slip_settle(ucch_slip *slip, uint32_t where);
void ucch_slip_stop(ucch_slip *slip);
int ucch_slip_gone(const ucch_slip *slip);
int ucch_slip_hold(ucch_slip *slip, void *await, void *stream);
void *ucch_slip_seen(ucch_slip *slip);
void ucch_slips_tell(uint64_t receiver, uint64_t tag, uint32_t number, uint32_t where);

/* Where a queued message lies in its sender's window, and what is said of it there: its length and that of a slice,
 * whose bell to ring and whether that has been seen to, the room for a slice, whether the sender's kernel is to wait no
 * more, and whether the data lies in the sender's arena. Either side's kernel has so many blocks, with a slice each: as
 * many as a bus keeps busy, or at most so many between devices of one vendor. */
enum { RUN_BYTES, RUN_SLICE, RUN_WHOSE, RUN_RUNG, RUN_ROOM, RUN_STOP, RUN_NEAR };
#define UCCH_BLOCKS 8
#define UCCH_MOST_BLOCKS 32

char *ucch_run_at(uint64_t key, int first);

static inline uint64_t *ucch_run_about(char *run) {
    return (uint64_t *)(run + UCCH_RUN_ABOUT);
}

void ucch_bells_reserve(void);
int ucch_bell_hold(int slip, const uint32_t *bell, uint32_t rings, void *stream);

/* What a sender tells the receiver: whose window, which of its controls, and where the data lies if it was queued: the
 * first chunk of it, plus one. */
typedef struct ucch_token {
    uint64_t bytes, piece, key;
    uint32_t control, run;
} ucch_token;

/* What a sender's data is: on the device or not; and what a probe goes by, the message's tag and its receiver's rank.
 */
typedef struct ucch_offer {
    const void *data;
    size_t bytes;
    int on_device, dest;
    uint64_t tag;
    int queued, eager; /* in streams, if there is room; over for us once our device has put it there */
    void *stream;
    uint64_t receiver; /* its process, where known, and which of our messages under the tag it is to it (0: unknown) */
    uint32_t number;
} ucch_offer;

int ucch_message_offer_locked(ucch_message *m, ucp_ep_h ep, const ucch_offer *offer, double timeout);

/* What a stream is to take: message `number` under a tag from process `sender`, 0 where it has come, to the device. */
typedef struct ucch_expected {
    uint64_t sender, tag;
    uint32_t number;
    char *buffer;
    size_t room;
} ucch_expected;

/* Stands for a stream of the caller's where there is none. */
#define UCCH_OURS ((void *)&ucch_ours)
extern char ucch_ours;

typedef struct ucch_transfer ucch_transfer;

/* Either side's part in one message, for use again and again. */
ucch_transfer *ucch_transfer_new(void);
void ucch_transfer_free(ucch_transfer *t);
int ucch_transfer_offer_locked(ucch_transfer *t, const ucch_offer *offer, ucch_token *token);
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token);
int ucch_transfer_pump_locked(ucch_transfer *t);
void ucch_transfer_abort_locked(ucch_transfer *t);
void ucch_transfer_offered_locked(ucch_transfer *t);
void ucch_transfer_over_locked(ucch_transfer *t);
int ucch_transfer_queued(const ucch_transfer *t);
void ucch_transfer_by_host_locked(ucch_transfer *t);
void ucch_transfer_await_locked(ucch_transfer *t, void *buffer, int on_device, const ucch_token *token);
int ucch_transfer_expect_locked(ucch_transfer *t, const ucch_expected *e, void *stream);
int ucch_transfer_met_locked(ucch_transfer *t, size_t room, const ucch_token *token);
int ucch_transfer_landed_locked(ucch_transfer *t, const void *landing, size_t bytes);
int ucch_run_put(ucch_transfer *t, uint64_t receiver, void *stream);
int ucch_take(ucch_transfer *t, const ucch_expected *e, void *stream);
int ucch_transfer_busy_locked(ucch_transfer *t);
void ucch_token_decline_locked(const ucch_token *token);
uint64_t ucch_window_waiting_locked(uint64_t key, uint64_t tag, int dest, int take);

#endif
