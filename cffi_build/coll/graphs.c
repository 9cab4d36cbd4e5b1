/* Watch over the calls of a communicator in graphs. No host takes part when they are replayed: their kernels count in
 * pinned memory how many have begun and ended, and say what they found wrong, and the progress thread looks at that. */
#include <stdio.h>

#include "coll/stream_executor.h"

static uint32_t word_of(const ucch_line *line) { return __atomic_load_n(&line->word, __ATOMIC_ACQUIRE); }

/* True if a kernel has been under way for too long. */
static int is_late(ucch_graphs *g, double now) {
    uint32_t begun = word_of(&g->words->begun), ended = word_of(&g->words->ended);
    if (begun != g->begun || ended != g->ended) g->since = now;
    g->begun = begun;
    g->ended = ended;
    return begun != ended && g->timeout > 0 && now - g->since > g->timeout;
}

/* The first rank whose data is undefined, as it has let its streams go on; -1: none. */
static int tainted_by(const ucch_channels *c) {
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && __atomic_load_n(c->in[i * UCCH_RINGS].tainted, __ATOMIC_ACQUIRE)) return i;
    return -1;
}

static int check_locked(ucch_op *op, double now) {
    ucch_graphs *g = (ucch_graphs *)op;
    uint32_t wrong = word_of(&g->words->wrong);
    int late = is_late(g, now), rank = -1, under_way = g->begun != g->ended;
    op->error.peer = -1;
    if (wrong) return wrong == REPLAY_OVERLAPS ? UCCH_FAIL_OVERLAP : UCCH_FAIL_MISMATCH;
    int status = ucch_channels_lost(g->channels, op->error.seq, &rank);
    if (!status && (rank = tainted_by(g->channels)) >= 0) status = UCCH_FAIL_PEER;
    if (status) op->error.peer = ucch_board_peer(g->board, rank);
    int other = ucch_board_mismatch(g->board, op->error.seq); /* when it was captured */
    if (other >= 0) {
        op->error.peer = other;
        return UCCH_FAIL_MISMATCH;
    }
    if (!status && under_way && (op->error.peer = ucch_board_gone(g->board, 0)) >= 0) status = UCCH_FAIL_PEER;
    return status ? status : late ? UCCH_FAIL_TIMEOUT : 0;
}

/* There may be no caller left to raise an error, so it is logged here; the communicator's next call raises it, too. */
static void abandon_locked(ucch_op *op, int status) {
    ucch_graphs *g = (ucch_graphs *)op;
    const char *why = status == UCCH_FAIL_TIMEOUT    ? "not complete in time"
                      : status == UCCH_FAIL_OVERLAP  ? "two of them ran at a time"
                      : status == UCCH_FAIL_MISMATCH ? "another rank replayed something else"
                                                     : "another rank has left the job or died";
    int first = !g->channels->failed; /* or that was said */
    op->started = g->since;
    ucch_channels_fail_locked(g->channels, 0);
    ucch_op_end_locked(op, status, -1, op->error.peer);
    ucch_board_blame(g->board, op);
    if (first) fprintf(stderr, "ucc_hetero: calls in graphs: %s; streams go on without their results\n", why);
}

static const ucch_op_kind watching = {UCCH_IN_STREAMS, NULL, check_locked, abandon_locked};

/* A call, the communicator's `number`, is captured; replays may take `timeout` seconds each, 0: any time. */
void ucch_graphs_watch_locked(ucch_graphs *g, ucch_board *board, uint64_t number, double timeout) {
    int begins = !g->watch.kind;
    g->watch.kind = &watching;
    g->watch.error.seq = number;
    g->board = board;
    g->timeout = timeout;
    if (begins) ucch_op_begin_locked(&g->watch, 0);
}

/* Let a stream that is captured wait for the communicator's last call in this capture, whatever stream that is in: one
 * runs at a time. */
int ucch_graphs_follow(ucch_graphs *g, void *stream) {
    uint64_t capture = ucch_stream_captures((uintptr_t)stream);
    int same = g->last && capture == g->capture;
    g->capture = capture;
    return same ? ucch_device_fail(ucch_bound_ops()->stream_wait(stream, g->last), "a stream's wait") : 0;
}
