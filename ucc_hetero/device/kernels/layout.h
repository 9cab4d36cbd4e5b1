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

/* Entry of a fused kernel: wait for a word, move data, write a word. */
typedef struct ucch_move {
    const void *src;
    void *dst;
    unsigned *wait, *tell;
    unsigned least, value, kind, n; /* bytes to copy, elements to combine */
} ucch_move;

/* Arguments of a fused kernel. */
typedef struct ucch_moves {
    unsigned long long n;
    unsigned *arrived; /* by move, how many blocks have done their part; 0 between calls */
    ucch_move each[UCCH_MOST_MOVES];
} ucch_moves;

enum { MOVE_NOTHING, MOVE_COPY, MOVE_COMBINE };

static_assert(sizeof(ucch_extent) == 8192, "headers of extents lie in pages");
static_assert(sizeof(ucch_posted) == 4096, "posted receives lie in pages");
static_assert(sizeof(ucch_stream_copy) == 72, "one layout for C and kernels");
static_assert(sizeof(ucch_move) == 48, "one layout for C and kernels");
static_assert(sizeof(ucch_moves) == 16 + UCCH_MOST_MOVES * 48, "one layout for C and kernels");
