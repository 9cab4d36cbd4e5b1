/* Numbers and structs that the engine and its kernels share, in C and in C++ for devices; each compiler checks sizes.
 */
#pragma once
#ifndef __cplusplus
#include <assert.h>
#endif

/* Bytes that a window is shared out in. */
#define UCCH_CHUNK_BYTES 2097152
/* Bytes of a slice that a block of the sender's copies before it says so. */
#define UCCH_COPY_STEP 262144
/* Blocks of a kernel that does one side of a message, at most. */
#define UCCH_MOST_BLOCKS 32
/* In the place of a message's first chunk: no message comes. */
#define UCCH_NOWHERE 1073741823
/* Moves of one fused kernel, at most. */
#define UCCH_MOST_MOVES 40
/* Pieces that lie in a ring between two ranks at a time. */
#define UCCH_RING_SLOTS 8

/* Elements of a piece that a block does at a time. */
#define UCCH_PIECE_SLICE 1024

/* Word in a cache line of its own. */
typedef struct ucch_line {
    unsigned word, more[15];
} ucch_line;

/* Header of an extent, the chunks in its sender's window that a message lies in: by slice, steps that have been put
 * there and taken; lengths of the message and of a slice. `doorbell`: which to ring, as use and number of a posted
 * receive; 0: none. `rung`: that has been seen to. `room`: for a slice, whose bytes lie there in turn. `stop`: the
 * sender is to wait no more. `near`: the data lies in its arena. */
typedef struct ucch_extent {
    ucch_line put[UCCH_MOST_BLOCKS], taken[UCCH_MOST_BLOCKS];
    unsigned long long bytes, slice, doorbell, rung, room, stop, near;
    unsigned long long more[505];
} ucch_extent;

/* Posted receive of a stream, in its process's mailbox. */
typedef struct ucch_posted {
    /* In its lower half where the message is (the first chunk in the sender's window, plus one), or UCCH_NOWHERE; in
     * the upper half how often its place was in use: what is filled in late must not be taken for the next message's.
     */
    unsigned long long word;
    unsigned stop; /* wait for no more of its data */
    unsigned more[13];
    ucch_line doorbell;               /* rung with the number of the use */
    ucch_line gone[UCCH_MOST_BLOCKS]; /* by block of the receiver's kernel: it has ended */
    unsigned state, number, blocks;
    unsigned long long sender, tag;
    ucch_extent *extent; /* the message's, for its owner's host alone */
    char rest[1880];
} ucch_posted;

/* Arguments of the kernel that does one side of a message. The sender's: `extent` is the one that it fills, `data` the
 * chunks of that, `mailbox` is the receiver's. The receiver's: `extent`, `data` and `arena` are the sender's first
 * ones, and `posted` says which extent is to be emptied. `bytes` are the message's, or the room for it. */
typedef struct ucch_stream_copy {
    ucch_extent *extent;
    char *data, *arena, *buffer;
    ucch_posted *posted, *mailbox;
    unsigned long long bytes, slice, room;
} ucch_stream_copy;

/* Header before the data of a slot that network threads carry, or devices count: the call, a hash of it and the bytes
 * that its rank has put there; the slot's number among all that have gone this way; and the first calls, plus one,
 * whose data is not to be believed and which the ranks have made in different ways. */
typedef struct ucch_slot_header {
    unsigned long long call, hash, bytes, number, tainted, differs, more[2];
} ucch_slot_header;

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

/* Entry of a fused kernel: wait for a word, move data, write a word. In a graph `steps`, on the device, counts the
 * pieces that have gone by a channel when the kernel begins, and this is one more of them, number `value` of its own:
 * what it waits for is `least` from there, and its slot is one of those at src or dst (`slot`), `stride` apart. */
typedef struct ucch_move {
    const void *src;
    void *dst;
    unsigned *wait, *tell;
    unsigned least, value, kind, n; /* bytes to copy, elements to combine */
    unsigned *steps;
    unsigned slot, stride;
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
 * `groups_apart`, in elements; and their types. */
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

enum { MOVE_NOTHING, MOVE_COPY, MOVE_COMBINE };
enum { SLOT_NONE, SLOT_SRC, SLOT_DST };
enum { REPLAY_DIFFERS = 1, REPLAY_OVERLAPS };

static_assert(sizeof(ucch_extent) == 8192, "headers of extents lie in pages");
static_assert(sizeof(ucch_posted) == 4096, "posted receives lie in pages");
static_assert(sizeof(ucch_stream_copy) == 72, "one layout for C and kernels");
static_assert(sizeof(ucch_slot_header) == 64, "headers lie in lines");
static_assert(sizeof(ucch_replays) == 256, "words of replays lie in lines");
static_assert(sizeof(ucch_move) == 64, "one layout for C and kernels");
static_assert(sizeof(ucch_moves) == 40 + UCCH_MOST_MOVES * 64, "one layout for C and kernels");
static_assert(sizeof(ucch_piece) == 32, "one layout for C and kernels");
static_assert(sizeof(ucch_pieces) == 72, "one layout for C and kernels");
