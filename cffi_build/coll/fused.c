/* Fused calls: one kernel does everything. The host has one call of the driver to make, however many messages and
 * sums there are, and the devices no time to lose between these.
 *
 * Of long ones several blocks do a part each: the same slice of every move, and none waits for another. What all of
 * them have done is told to other ranks by the last. */
#include "coll/fused.h"

/* Bytes that a call moves at most, by one block; UCCH_FUSED_BYTES by several. Measured on 2 + 2 H200s: allreduces of
 * 256 KiB, which move 768, in 92 microseconds instead of the 110 that copies and the vendors' libraries take, and a
 * fifth of the host's time; they were as fast at 1 MiB, where pinned memory was busy all the time. */
#define BY_ONE 65536
#define THREADS 512
/* Of a move, by a block: shorter slices were slower, as all blocks wait for words and have their writes seen. */
#define SLICE ((uint64_t)32 << 10)
/* They wait for each other, and have to be there at a time. */
#define MOST_BLOCKS 32

/* One more thing to do; a wait goes with what follows it, and a word with what comes before. */
int ucch_fused_add(ucch_moves *w, ucch_move m) {
    ucch_move *last = w->n ? &w->each[w->n - 1] : NULL;
    if (last && m.tell && !m.wait && m.kind == MOVE_NOTHING && !last->tell) {
        last->tell = m.tell;
        last->value = m.value;
        return 0;
    }
    if (last && last->kind == MOVE_NOTHING && !last->tell && !m.wait) {
        m.wait = last->wait;
        m.least = last->least;
        *last = m;
        return 0;
    }
    if (w->n == UCCH_MOST_MOVES) return UCCH_FAIL_ARGUMENT;
    w->each[w->n++] = m;
    return 0;
}

/* Whether one kernel can do a call that moves so many bytes: few moves, of its kinds, each message in one piece. */
int ucch_fused_fits(const ucch_program *p, uint64_t moved) {
    int n = 2;
    uint64_t most = p->sliced ? UCCH_FUSED_BYTES : BY_ONE;
    if (!p->fused || moved > most) return 0;
    for (int i = 0; i < p->nsteps; i++) {
        const ucch_step *s = &p->steps[i];
        if (s->kind == STEP_COLL || s->kind == STEP_CAST || s->kind == STEP_SCALE) return 0;
        if ((s->kind == STEP_SEND && s->src.count > ucch_piece_of(p->channels, s)) ||
            (s->kind == STEP_RECV && s->dst.count > ucch_piece_of(p->channels, s)))
            return 0;
        if (s->dst.count > most) return 0;
        n += 1 + (s->kind == STEP_COPY); /* by way of another place, if what it copies overlaps */
    }
    return n <= UCCH_MOST_MOVES;
}

/* Launch what was added. `apart`: no move needs what another one does. */
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int apart, void *stream) {
    ucch_graphs *g = &p->channels->graphs;
    uint64_t longest = 1;
    for (uint64_t i = 0; i < w->n; i++)
        longest = w->each[i].n > longest ? w->each[i].n : longest;
    unsigned blocks = p->sliced || apart ? (unsigned)((longest + SLICE - 1) / SLICE) : 1;
    blocks = blocks > MOST_BLOCKS ? MOST_BLOCKS : blocks;
    w->arrived = p->in_graph ? g->arrived : p->channels->arrived;
    w->replays = p->in_graph ? g->seen : NULL;
    w->counts = g->counts;
    w->hash = p->about.signature;
    void *arguments[] = {w};
    return ucch_device_fail(ucch_bound_ops()->launch(p->fused, blocks, THREADS, arguments, stream), "launch");
}

/* ---- slices ---- */

typedef struct range {
    int base;
    int64_t from, end;
} range;

static range range_of(const ucch_step *s, const ucch_span *span) {
    int moves = s->kind == STEP_SEND || s->kind == STEP_RECV;
    size_t bytes = moves ? span->count : ucch_step_bytes((ucc_datatype_t)s->dtype, span->count);
    return (range){span->base, span->offset, span->offset + (int64_t)bytes};
}

/* Whether they share bytes, and are not the same. */
static int crosses(range one, range other) {
    if (one.base != other.base || one.from >= other.end || other.from >= one.end || one.from == one.end) return 0;
    return one.from != other.from || one.end != other.end;
}

/* Whether blocks that each do their slice of every step do not get in each other's way: what two steps share, and one
 * writes, both have from its beginning to its end. */
int ucch_fused_sliced(const ucch_program *p) {
    if (p->nsteps > UCCH_MOST_MOVES) return 0;
    for (int i = 0; i < p->nsteps; i++)
        for (int j = 0; j <= i; j++) {
            const ucch_step *one = &p->steps[i], *other = &p->steps[j];
            if (one->kind == STEP_COLL || other->kind == STEP_COLL) return 0;
            range src = range_of(one, &one->src), dst = range_of(one, &one->dst);
            range src2 = range_of(other, &other->src), dst2 = range_of(other, &other->dst);
            int writes = one->kind != STEP_SEND, writes2 = other->kind != STEP_SEND;
            int reads = one->kind != STEP_RECV, reads2 = other->kind != STEP_RECV;
            if ((writes && writes2 && crosses(dst, dst2)) || (writes && reads2 && crosses(dst, src2)) ||
                (reads && writes2 && crosses(src, dst2)))
                return 0;
        }
    return 1;
}
