/* Numbers and structs that the engine and its kernels share, in C and in C++ for devices; each compiler checks sizes.
 */
#pragma once
#ifndef __cplusplus
#include <assert.h>
#endif

/* Bytes that a window is shared out in. */
#define UCCH_CHUNK_BYTES 2097152
/* Bytes of a slice that a block of the sender's copies before it says so. */
#define UCCH_CARRY_STEP 262144
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

/* Front of a message's first chunk, in its sender's window: by slice, steps that have been put there and taken; lengths
 * of the message and of a slice. `whose`: the bell to ring, as use and number of a slip; 0: nobody's. `rung`: that has
 * been seen to. `room`: for a slice, whose bytes lie there in turn. `stop`: the sender is to wait no more. `near`: the
 * data lies in its arena. */
typedef struct ucch_run {
    ucch_line put[UCCH_MOST_BLOCKS], taken[UCCH_MOST_BLOCKS];
    unsigned long long bytes, slice, whose, rung, room, stop, near;
    unsigned long long more[505];
} ucch_run;

/* Message that a stream waits for, in its receiver's window. */
typedef struct ucch_slip {
    /* In its lower half where the message is (the first chunk in the sender's window, plus one), or UCCH_NOWHERE; in
     * the upper half how often the slip was in use: what is filled in late must not be taken for the next message's. */
    unsigned long long word;
    unsigned stop; /* wait for no more of its data */
    unsigned more[13];
    ucch_line bell;                   /* rung with the number of the use */
    ucch_line gone[UCCH_MOST_BLOCKS]; /* by block of the receiver's kernel: it has ended */
    unsigned state, number, blocks;
    unsigned long long sender, tag;
    ucch_run *run; /* the message's, for its owner's host alone */
    char rest[1880];
} ucch_slip;

/* Arguments of the kernel that does one side of a message. The sender's: `run` is the one that it fills, `data` the
 * chunks of that, `slips` are the receiver's. The receiver's: `run`, `data` and `arena` are the sender's first ones,
 * and `slip` says which run is to be emptied. `bytes` are the message's, or the room for it. */
typedef struct ucch_carry {
    ucch_run *run;
    char *data, *arena, *buffer;
    ucch_slip *slip, *slips;
    unsigned long long bytes, slice, room;
} ucch_carry;

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

static_assert(sizeof(ucch_run) == 8192, "fronts lie in pages of their own");
static_assert(sizeof(ucch_slip) == 4096, "slips lie in pages of their own");
static_assert(sizeof(ucch_carry) == 72, "one layout for C and kernels");
static_assert(sizeof(ucch_move) == 48, "one layout for C and kernels");
static_assert(sizeof(ucch_moves) == 16 + UCCH_MOST_MOVES * 48, "one layout for C and kernels");
