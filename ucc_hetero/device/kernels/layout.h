/* Numbers and structs that the engine and its kernels share, in C and in C++ for devices; each compiler checks sizes.
 */
#pragma once
#ifndef __cplusplus
#include <assert.h>
#endif

/* Moves of one fused kernel, at most. */
#define UCCH_MOST_MOVES 40
/* Pieces that lie in a ring between two ranks at a time. */
#define UCCH_RING_SLOTS 8
/* Words of eight bytes before the data of a slot whose words have flags (ll.cuh): hash of the call, length, nothing. */
#define UCCH_LL_HEAD 4
/* Messages of one kernel between hosts, at most. */
#define UCCH_MOST_COPIES 48

/* In the place of the tag that is wanted of a message in a lane: any. */
#define UCCH_ANY_TAG 4294967295

/* Elements of a piece that a block does at a time, and bytes of one that is copied as it is. */
#define UCCH_PIECE_SLICE 1024
#define UCCH_PLAIN_SLICE 16384

/* Word in a cache line of its own. */
typedef struct ucch_line {
    unsigned word, more[15];
} ucch_line;

/* Header before the data of a slot that network threads carry, or devices count: the call, a hash of it and the bytes
 * that its rank has put there; the slot's number among all that have gone this way; and the first calls, plus one,
 * whose data is not to be believed and which the ranks have made in different ways. */
typedef struct ucch_slot_header {
    unsigned long long call, hash, bytes, number, tainted, differs, more[2];
} ucch_slot_header;

/* End of a message in a lane: its number, how it ended (LANE_*), and what it was. Of the first line of a lane `done`
 * says whether it carries nothing any more. */
typedef struct ucch_lane_line {
    unsigned done, status;
    unsigned long long tag, bytes, more[5];
} ucch_lane_line;

/* Arguments of the kernel that does one side of a message: data of its slot in the short ring, and of the first in the
 * long one; the words of both; whether to stop; where blocks meet, by slot; and the message, or the room for it and the
 * tag that is wanted. `base`: how many long pieces came before; `limit`: bytes of a short message. */
typedef struct ucch_lane_copy {
    char *shorts, *longs, *data;
    unsigned *short_published, *short_consumed, *published, *consumed, *stop, *arrived;
    ucch_lane_line *line;
    unsigned long long bytes, tag;
    unsigned number, base, limit, slot, stride, from, to, status, flags, more;
} ucch_lane_copy;

/* Message that a kernel moves through a ring whose words the host counts (cffi_build/coll/schedule.c): this rank's
 * data; the first slot; the word that is waited for, which has to be within `room` of the piece's number, and the one
 * that is written. `before`: pieces that went by the ring so far; from round `begins` up to `ends` there is one of
 * these. */
typedef struct ucch_ring_copy {
    char *data, *ring;
    unsigned *wait, *tell;
    unsigned long long bytes;
    unsigned piece, stride, before, begins, ends, room;
} ucch_ring_copy;

/* Arguments of that kernel: where blocks meet, by message and slot; and `n` messages, of which the first `out` are
 * sent. Each direction has `width` blocks. */
typedef struct ucch_ring_copies {
    unsigned *arrived;
    unsigned n, out, width, more;
    ucch_ring_copy each[UCCH_MOST_COPIES];
} ucch_ring_copies;

/* Words of a communicator's calls in graphs, whose replays no host sees begin. `begun` and `ended` count kernels, from
 * which the host tells whether one is under way; `stop` is the host's: wait for nothing any more; `wrong` says what a
 * kernel has found: REPLAY_DIFFERS or REPLAY_OVERLAPS. */
typedef struct ucch_replays {
    ucch_line begun, ended, stop, wrong;
} ucch_replays;

/* Replays as the device counts them: kernels that have ended, and whether one is running. */
typedef struct ucch_replayed {
    unsigned ended, running, blocks[2];
} ucch_replayed;

/* What a device counts of a channel of calls in graphs: the pieces that have gone by it when a kernel begins, and how
 * many of those that were sent the other end is known to have taken out. */
typedef struct ucch_steps {
    unsigned pieces, taken;
} ucch_steps;

/* Entry of a fused kernel: wait for a word, move data, write a word. In a graph `steps`, on the device, counts the
 * pieces that have gone by a channel when the kernel begins, and this is one more of them, number `value` of its own:
 * what it waits for is `least` from there, and its slot is one of those at src or dst (`slot`), `stride` apart. `tag`:
 * of the message, equal at both ends. */
typedef struct ucch_move {
    const void *src;
    void *dst;
    unsigned *wait, *tell;
    unsigned least, value, kind, n; /* bytes to copy, elements to combine */
    ucch_steps *steps;
    unsigned slot, stride;
    const void *own; /* what is combined with data that comes, to dst */
    unsigned tag, more;
} ucch_move;

/* Arguments of a fused kernel. */
typedef struct ucch_moves {
    unsigned long long n;
    unsigned *arrived;     /* by move, how many blocks have done their part; 0 between calls */
    ucch_replays *replays; /* of a call in a graph, as are the next two; NULL: it is none */
    ucch_replayed *counts;
    unsigned long long hash;
    ucch_move each[UCCH_MOST_MOVES];
} ucch_moves;

/* Piece that is copied and converted: from its element `first` on, `count` of them, to `dst` one behind the other. */
typedef struct ucch_piece {
    const char *src;
    char *dst;
    unsigned long long first, count;
} ucch_piece;

/* How the elements of pieces lie at their source: `row` of them in a row, rows `apart`, and groups of `rows` rows
 * `groups_apart`, in elements; and their types. Row 0: bytes follow each other. */
typedef struct ucch_rows {
    unsigned long long row, rows, apart, groups_apart;
    int from, to;
    unsigned from_bytes, to_bytes;
} ucch_rows;

/* Arguments of the kernel that does so for `n` pieces, the longest of `most` elements. */
typedef struct ucch_pieces {
    const ucch_piece *each;
    unsigned long long n, most;
    ucch_rows rows;
} ucch_pieces;

/* Parts of a kernel of a lane: take in, begin with the header, say how it ended, await no pieces of what it
 * refuses.
 */
enum { LANE_RECEIVES = 1, LANE_HEAD = 2, LANE_LAST = 4, LANE_LOSES = 8 };
enum { LANE_WELL, LANE_STOPPED, LANE_TOO_LONG, LANE_OTHER_TAG };
/* From LL_SEND on they bring data to a slot, and take it out, by NCCL's LL protocol (ll.cuh); the last two combine it
 * with what is here, as its second operand or its first. */
enum { MOVE_NOTHING, MOVE_COPY, MOVE_COMBINE, MOVE_LL_SEND, MOVE_LL_RECEIVE, MOVE_LL_SECOND, MOVE_LL_FIRST };
enum { SLOT_NONE, SLOT_SRC, SLOT_DST };
enum { REPLAY_DIFFERS = 1, REPLAY_OVERLAPS };

static_assert(sizeof(ucch_lane_line) == 64, "lines of messages lie in lines");
static_assert(sizeof(ucch_lane_copy) == 136, "one layout for C and kernels");
static_assert(sizeof(ucch_slot_header) == 64, "headers lie in lines");
static_assert(sizeof(ucch_replays) == 256, "words of replays lie in lines");
static_assert(sizeof(ucch_move) == 80, "one layout for C and kernels");
static_assert(sizeof(ucch_moves) == 40 + UCCH_MOST_MOVES * 80, "one layout for C and kernels");
static_assert(sizeof(ucch_ring_copy) == 64, "one layout for C and kernels");
static_assert(sizeof(ucch_ring_copies) == 24 + UCCH_MOST_COPIES * 64, "one layout for C and kernels");
static_assert(sizeof(ucch_piece) == 32, "one layout for C and kernels");
static_assert(sizeof(ucch_pieces) == 72, "one layout for C and kernels");
