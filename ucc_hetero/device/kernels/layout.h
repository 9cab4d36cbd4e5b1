/* Numbers and structs shared by the engine (C) and its kernels (C++ for devices). Each compiler checks their sizes. */
#pragma once
#ifndef __cplusplus
#include <assert.h>
#endif

/* Maximum number of moves of a fused kernel. */
#define UCCH_MOST_MOVES 40
/* Number of slots of a ring between two ranks. */
#define UCCH_RING_SLOTS 8
/* Words of eight bytes before the data of a slot with flags (ll.cuh): hash of the call, length, unused. */
#define UCCH_LL_HEAD 4
/* Maximum number of messages of a kernel between hosts. */
#define UCCH_MOST_COPIES 48

/* Tag of a receive that matches any tag, in a lane. */
#define UCCH_ANY_TAG 4294967295

/* Elements of a piece that a block processes at a time; bytes of a piece that is copied unchanged. */
#define UCCH_PIECE_SLICE 1024
#define UCCH_PLAIN_SLICE 16384

/* A word in a cache line of its own. */
typedef struct ucch_line {
    unsigned word, more[15];
} ucch_line;

/* Header before the data of a slot that network threads carry or devices count: the call, its hash, and the bytes that
 * its rank has written; the slot's number since the start; and, plus one, the first call whose data is invalid and the
 * first for which ranks made different calls. */
typedef struct ucch_slot_header {
    unsigned long long call, hash, bytes, number, tainted, differs, more[2];
} ucch_slot_header;

/* End of a message in a lane: its number, how it ended (LANE_*), its tag and length. In the first line of a lane `done`
 * is set when the lane has ended. */
typedef struct ucch_lane_line {
    unsigned done, status;
    unsigned long long tag, bytes, more[5];
} ucch_lane_line;

/* Arguments of the kernel for one side of a message: its slot in the short ring, and its first in the long ring; the
 * words of both; the stop word; counters of arrived blocks by slot; the message, or for a receive the memory and the
 * tag. `base`: number of earlier long pieces; `limit`: bytes of a short message. */
typedef struct ucch_lane_copy {
    char *shorts, *longs, *data;
    unsigned *short_published, *short_consumed, *published, *consumed, *stop, *arrived;
    ucch_lane_line *line;
    unsigned long long bytes, tag;
    unsigned number, base, limit, slot, stride, from, to, status, flags, more;
} ucch_lane_copy;

/* A message that a kernel moves through a ring whose words the host counts (cffi_build/coll/schedule.c): this rank's
 * data; the first slot; the word to wait for, which must be within `room` of the piece's number, and the word to write.
 * `before`: number of earlier pieces in the ring. There is a piece of the message in rounds `begins` to `ends`. */
typedef struct ucch_ring_copy {
    char *data, *ring;
    unsigned *wait, *tell;
    unsigned long long bytes;
    unsigned piece, stride, before, begins, ends, room;
} ucch_ring_copy;

/* Arguments of that kernel: counters of arrived blocks by message and slot; `n` messages, of which the first `out` are
 * sent. Each direction has `width` blocks. */
typedef struct ucch_ring_copies {
    unsigned *arrived;
    unsigned n, out, width, more;
    ucch_ring_copy each[UCCH_MOST_COPIES];
} ucch_ring_copies;

/* Words of a communicator's calls in graphs, whose replays no host sees. `begun` and `ended` count kernels, which tells
 * the host if one is running; the host sets `stop` to end all waits; kernels set `wrong` to REPLAY_DIFFERS or
 * REPLAY_OVERLAPS. */
typedef struct ucch_replays {
    ucch_line begun, ended, stop, wrong;
} ucch_replays;

/* The device's count of replays: kernels that have ended, and whether one is running. */
typedef struct ucch_replayed {
    unsigned ended, running, blocks[2];
} ucch_replayed;

/* The device's counts of a channel for graphs, at the start of a kernel: pieces so far, and sent pieces that the
 * receiver is known to have consumed. */
typedef struct ucch_steps {
    unsigned pieces, taken;
} ucch_steps;

/* A move of a fused kernel: wait for a word, move data, write a word. In a graph `steps`, on the device, has the
 * channel's count of pieces at the start of the kernel, and this move is piece `value` after that; it waits for `least`
 * from there, and its slot is one of those at src or dst (`slot`), `stride` apart. `tag`: of the message, equal on both
 * sides. */
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

/* What blocks of a fused kernel tell each other, by move: how many have done their part, 0 between kernels; and the
 * last kernel whose first block has waited. */
typedef struct ucch_by_move {
    unsigned arrived[UCCH_MOST_MOVES], passed[UCCH_MOST_MOVES];
} ucch_by_move;

/* Arguments of a fused kernel. Every move is done by `width` blocks: all, or of twice as many one half sends and the
 * other half receives. `number`: of the kernel, outside of graphs. */
typedef struct ucch_moves {
    unsigned n, width, number, more;
    ucch_by_move *by_move;
    ucch_replays *replays; /* of a call in a graph, as are the next two; NULL: it is none */
    ucch_replayed *counts;
    unsigned long long hash;
    ucch_move each[UCCH_MOST_MOVES];
} ucch_moves;

/* A piece that is copied and converted: `count` elements from element `first` on, to contiguous memory at `dst`. */
typedef struct ucch_piece {
    const char *src;
    char *dst;
    unsigned long long first, count;
} ucch_piece;

/* Layout of the elements of pieces at their source: rows of `row` elements, `apart`, in groups of `rows` rows,
 * `groups_apart` (all in elements); and their types. Row 0: contiguous bytes. */
typedef struct ucch_rows {
    unsigned long long row, rows, apart, groups_apart;
    int from, to;
    unsigned from_bytes, to_bytes;
} ucch_rows;

/* Arguments of that kernel for `n` pieces, the longest of which has `most` elements. */
typedef struct ucch_pieces {
    const ucch_piece *each;
    unsigned long long n, most;
    ucch_rows rows;
} ucch_pieces;

/* Parts of a lane's kernel: receive, read the header first, report the end, do not wait for the pieces of a refused
 * message. */
enum { LANE_RECEIVES = 1, LANE_HEAD = 2, LANE_LAST = 4, LANE_LOSES = 8 };
enum { LANE_WELL, LANE_STOPPED, LANE_TOO_LONG, LANE_OTHER_TAG };
/* From LL_SEND on, moves that write data to a slot and read it by NCCL's LL protocol (ll.cuh). The last two combine
 * received data with local data, as the second or the first operand. */
enum { MOVE_NOTHING, MOVE_COPY, MOVE_COMBINE, MOVE_LL_SEND, MOVE_LL_RECEIVE, MOVE_LL_SECOND, MOVE_LL_FIRST };
enum { SLOT_NONE, SLOT_SRC, SLOT_DST };
enum { REPLAY_DIFFERS = 1, REPLAY_OVERLAPS };

static_assert(sizeof(ucch_lane_line) == 64, "lines of messages lie in lines");
static_assert(sizeof(ucch_lane_copy) == 136, "one layout for C and kernels");
static_assert(sizeof(ucch_slot_header) == 64, "headers lie in lines");
static_assert(sizeof(ucch_replays) == 256, "words of replays lie in lines");
static_assert(sizeof(ucch_move) == 80, "one layout for C and kernels");
static_assert(sizeof(ucch_moves) == 48 + UCCH_MOST_MOVES * 80, "one layout for C and kernels");
static_assert(sizeof(ucch_ring_copy) == 64, "one layout for C and kernels");
static_assert(sizeof(ucch_ring_copies) == 24 + UCCH_MOST_COPIES * 64, "one layout for C and kernels");
static_assert(sizeof(ucch_piece) == 32, "one layout for C and kernels");
static_assert(sizeof(ucch_pieces) == 72, "one layout for C and kernels");
