/* Fused calls: one kernel does the whole call. The host makes one driver call however many messages and sums there are,
 * and the device loses no time between them.
 *
 * Long calls are done by several blocks: each block does the same slice of every move and waits for no other block. The
 * last block to finish tells the other ranks. */
#include <string.h>

#include "coll/coll.h"

/* Most bytes that a call may move with one block; UCCH_FUSED_BYTES with several. Measured on 2 + 2 H200s: allreduces of
 * 256 KiB, which move 768 KiB, take 92 microseconds instead of the 110 of copies and the vendors' libraries, and a
 * fifth of the host's time. At 1 MiB both were as fast: pinned memory was busy all the time. */
#define BY_ONE 65536
#define THREADS 512
/* Bytes of a move per block. Shorter slices were slower: every block fences its writes. */
#define SLICE ((uint64_t)32 << 10)
/* Blocks wait for each other, so all must be resident at once. */
#define MOST_BLOCKS 16

/* Add a move. A wait is merged with the move behind it, a signal with the move before it. */
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

/* True if one kernel can run a call that moves `moved` bytes: few moves, only supported ones, each message in one
 * piece. */
int ucch_fused_fits(const ucch_program *p, uint64_t moved) {
    int n = 2;
    uint64_t most = p->sliced ? UCCH_FUSED_BYTES : BY_ONE;
    if (!p->fused || moved > most) return 0;
    for (int i = 0; i < p->nsteps; i++) {
        const ucch_step *s = &p->steps[i];
        int local = s->is.kind - UCCH_STEP_LOCAL;
        if (s->is.kind == UCCH_STEP_COLL || local == UCCH_CAST || local == UCCH_SCALE) return 0;
        if (ucch_step_is_message(s) && ucch_step_span(s)->count > ucch_piece_of(p->channels, s)) return 0;
        if (s->is.dst.count > most) return 0;
        n++;
    }
    return n <= UCCH_MOST_MOVES;
}

/* ---- reductions fused with receives ---- */

typedef struct extent {
    const char *from, *end;
} extent;

static extent extent_of(const void *at, uint64_t n) { return (extent){at, (const char *)at + n}; }

static int overlap(extent a, extent b) { return a.from < b.end && b.from < a.end; }

/* True if blocks may read one extent while they write the other, element by element. */
static int may_share(extent a, extent b) { return a.from == b.from || !overlap(a, b); }

static uint64_t bytes_in(const ucch_program *p, const ucch_move *m) {
    return m->kind == MOVE_COMBINE ? m->n * p->element : m->n;
}

/* True if a move from `first` up to `end` reads or writes this memory. */
static int uses_memory(const ucch_program *p, const ucch_moves *w, uint64_t first, uint64_t end, extent what) {
    for (uint64_t k = first; k < end; k++) {
        const ucch_move *m = &w->each[k];
        uint64_t n = bytes_in(p, m);
        if ((m->slot != SLOT_SRC && overlap(extent_of(m->src, n), what)) ||
            (m->slot != SLOT_DST && overlap(extent_of(m->dst, n), what)) ||
            (m->own && overlap(extent_of(m->own, n), what)))
            return 1;
    }
    return 0;
}

static void drop_move(ucch_moves *w, uint64_t k) {
    memmove(&w->each[k], &w->each[k + 1], (--w->n - k) * sizeof(w->each[0]));
}

static int in_scratch(const ucch_program *p, extent what) {
    const char *tmp = p->base[UCCH_TMP];
    return tmp && what.from >= tmp && what.end <= tmp + p->is.tmp_bytes;
}

/* Fuse the reduction at move `k` with the receive of its operand, if nothing else uses the receive buffer. Returns 1 if
 * it was fused. */
static int join_message(const ucch_program *p, ucch_moves *w, uint64_t k) {
    ucch_move *sum = &w->each[k];
    extent src = extent_of(sum->src, bytes_in(p, sum)), dst = extent_of(sum->dst, bytes_in(p, sum));
    for (uint64_t i = 0; i < k; i++) {
        const ucch_move *m = &w->each[i];
        int second = m->dst == sum->src, fits = m->kind == MOVE_LL_RECEIVE && m->n == bytes_in(p, sum);
        extent place = second ? src : dst, other = second ? dst : src;
        if (!fits || !(second || m->dst == sum->dst) || !in_scratch(p, place) || !may_share(src, dst)) continue;
        if (uses_memory(p, w, i + 1, k, place) || (second && uses_memory(p, w, k + 1, w->n, place))) return 0;
        ucch_move joined = *m;
        joined.kind = second ? MOVE_LL_SECOND : MOVE_LL_FIRST;
        joined.own = other.from;
        joined.dst = sum->dst;
        *sum = joined;
        drop_move(w, i);
        return 1;
    }
    return 0;
}

/* Fuse the reduction with the copy of its operand before it, or with the copy of its result after it. Returns its new
 * index. */
static uint64_t join_copies(const ucch_program *p, ucch_moves *w, uint64_t k) {
    ucch_move *sum = &w->each[k];
    const ucch_move *before = k ? sum - 1 : NULL, *after = k + 1 < w->n ? sum + 1 : NULL;
    extent dst = extent_of(sum->dst, sum->n);
    if (after && after->kind == MOVE_COPY && !after->steps && after->src == sum->dst && after->n == sum->n &&
        in_scratch(p, dst) && !uses_memory(p, w, k + 2, w->n, dst) &&
        may_share(extent_of(sum->own, sum->n), extent_of(after->dst, sum->n))) {
        sum->dst = after->dst;
        drop_move(w, k + 1);
    } else if (before && before->kind == MOVE_COPY && !before->steps && before->dst == sum->own &&
               sum->own == sum->dst && before->n == sum->n && may_share(extent_of(before->src, sum->n), dst)) {
        sum->own = before->src;
        drop_move(w, --k);
    }
    return k;
}

/* Reduce data that other ranks send with flags as it arrives, without a copy in scratch: it passes memory fewer
 * times. */
void ucch_fused_join(const ucch_program *p, ucch_moves *w) {
    for (uint64_t k = 0; k < w->n && p->element <= 8; k++)
        if (w->each[k].kind == MOVE_COMBINE && join_message(p, w, k)) k = join_copies(p, w, k - 1);
}

/* Launch the moves that were added. `independent`: no move depends on another one. */
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int independent, void *stream) {
    ucch_graphs *g = &p->channels->graphs;
    uint64_t longest = 1;
    unsigned received = 0;
    for (unsigned i = 0; i < w->n; i++) {
        longest = w->each[i].n > longest ? w->each[i].n : longest;
        received += w->each[i].slot == SLOT_SRC;
    }
    unsigned halves = independent && received && received < w->n ? 2 : 1;
    w->width = p->sliced || independent ? (unsigned)((longest + SLICE - 1) / SLICE) : 1;
    w->width = w->width > MOST_BLOCKS / halves ? MOST_BLOCKS / halves : w->width;
    w->by_move = p->is.in_graph ? g->by_move : p->channels->by_move;
    w->number = ++p->channels->kernels;
    w->replays = p->is.in_graph ? g->seen : NULL;
    w->counts = g->counts;
    w->hash = p->about.signature;
    void *arguments[] = {w};
    return ucch_device_fail(ucch_bound_ops()->launch(p->fused, halves * w->width, THREADS, arguments, stream),
                            "launch");
}

/* ---- slices ---- */

typedef struct range {
    int base;
    int64_t from, end;
} range;

static range range_of(const ucch_step *s, const ucch_span *span) {
    size_t bytes = ucch_step_is_message(s) ? span->count : ucch_step_bytes((ucc_datatype_t)s->is.dtype, span->count);
    return (range){span->base, span->offset, span->offset + (int64_t)bytes};
}

/* True if the ranges overlap without being equal. */
static int crosses(range one, range other) {
    if (one.base != other.base || one.from >= other.end || other.from >= one.end || one.from == one.end) return 0;
    return one.from != other.from || one.end != other.end;
}

/* True if blocks that each do their slice of every step do not conflict: where two steps share a range and one writes
 * it, the range is the same in both. */
int ucch_fused_sliced(const ucch_program *p) {
    if (p->nsteps > UCCH_MOST_MOVES) return 0;
    for (int i = 0; i < p->nsteps; i++)
        for (int j = 0; j <= i; j++) {
            const ucch_step *one = &p->steps[i], *other = &p->steps[j];
            if (one->is.kind == UCCH_STEP_COLL || other->is.kind == UCCH_STEP_COLL) return 0;
            range src = range_of(one, &one->is.src), dst = range_of(one, &one->is.dst);
            range src2 = range_of(other, &other->is.src), dst2 = range_of(other, &other->is.dst);
            int writes = one->is.kind != UCCH_STEP_SEND, writes2 = other->is.kind != UCCH_STEP_SEND;
            int reads = one->is.kind != UCCH_STEP_RECV, reads2 = other->is.kind != UCCH_STEP_RECV;
            if ((writes && writes2 && crosses(dst, dst2)) || (writes && reads2 && crosses(dst, src2)) ||
                (reads && writes2 && crosses(src, dst2)))
                return 0;
        }
    return 1;
}
