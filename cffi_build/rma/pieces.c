/* Pieces on their way between a region and a slot: on a device many of them by one kernel, which also gathers them from
 * rows and converts them; elsewhere the host does that. */
#include <string.h>

#include "rma/rma.h"

/* So many at a time are copied by one kernel, and not by a copy each, which takes the host some microseconds; but for
 * those that are so long on average that the device takes longer, as it does byte by byte. */
#define MANY 8
#define LONG ((uint64_t)1 << 20)
#define LONG_BYTE_BY_BYTE ((uint64_t)16 << 10)
/* UCC's number of it. */
#define UINT8 40

/* Bytes as they are. */
static const ucch_rows plain = {.from = UINT8, .to = UINT8, .from_bytes = 1, .to_bytes = 1};

static uint64_t less(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void convert(const ucch_rows *r, const char *src, char *dst, uint64_t n) {
    if (r->from == r->to)
        memcpy(dst, src, n * r->to_bytes);
    else
        ucch_cast(r->from, r->to, src, dst, n);
}

/* One piece by the host, a row or the rest of one at a time. */
static void gather(const ucch_rows *r, const ucch_piece *p) {
    if (!r->row) memcpy(p->dst, p->src + p->first, p->count);
    for (uint64_t done = 0, n; r->row && done < p->count; done += n) {
        uint64_t row = (p->first + done) / r->row, at = (p->first + done) % r->row;
        n = less(r->row - at, p->count - done);
        uint64_t place = row / r->rows * r->groups_apart + row % r->rows * r->apart + at;
        convert(r, p->src + place * r->from_bytes, p->dst + done * r->to_bytes, n);
    }
}

/* Have pieces of bytes begin with their first, and make one of those that follow each other on both sides: how many are
 * left. */
static uint64_t join(ucch_piece *pieces, uint64_t n) {
    uint64_t left = 0;
    for (uint64_t i = 0; i < n; i++) {
        const char *src = pieces[i].src + pieces[i].first;
        ucch_piece *p = left ? &pieces[left - 1] : NULL;
        if (p && src == p->src + p->count && pieces[i].dst == p->dst + p->count)
            p->count += pieces[i].count;
        else
            pieces[left++] = (ucch_piece){src, pieces[i].dst, 0, pieces[i].count};
    }
    return left;
}

/* True if a kernel is the best way to copy them. With slots that network threads carry it is, unless it goes byte by
 * byte: between two H200 puts had 15 GB/s by copies, 23 where the receiver's were by kernels and 24 where both sides'
 * were. */
static int suit_kernels(const ucch_piece *pieces, uint64_t n, int by_wires) {
    uint64_t all = 0, bits = 0;
    for (uint64_t i = 0; i < n; i++) {
        all += pieces[i].count;
        bits |= (uint64_t)(uintptr_t)pieces[i].src | (uint64_t)(uintptr_t)pieces[i].dst | pieces[i].count;
    }
    if (!all || (n < MANY && !by_wires)) return 0;
    return bits % 4 ? all / n < LONG_BYTE_BY_BYTE : by_wires || all / n < LONG;
}

static int copy_each(int way, const ucch_piece *pieces, uint64_t n) {
    int status = 0;
    for (uint64_t i = 0; i < n && !status; i++)
        if (pieces[i].count) status = ucch_way_copy(way, pieces[i].dst, pieces[i].src, pieces[i].count);
    return status;
}

static int by_kernel(int way, const ucch_rows *rows, ucch_piece *pieces, uint64_t n, void *function) {
    ucch_pieces all = {.each = pieces, .n = n, .rows = *rows};
    for (uint64_t i = 0; i < n; i++) {
        if (rows->to_bytes > 1) { /* or thousands of divisions are what takes longest */
            pieces[i].first /= rows->to_bytes;
            pieces[i].count /= rows->to_bytes;
        }
        if (pieces[i].count > all.most) all.most = pieces[i].count;
    }
    uint64_t slice = rows->row ? UCCH_PIECE_SLICE : UCCH_PLAIN_SLICE;
    void *arguments[] = {&all};
    return ucch_kernel_launch(function, n * ((all.most + slice - 1) / slice), arguments, ucch_way_stream(way));
}

static int move_by_host(const ucch_rows *rows, const ucch_piece *pieces, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        ucch_piece p = pieces[i];
        p.first /= rows->to_bytes;
        p.count /= rows->to_bytes;
        gather(rows, &p);
    }
    return 0;
}

/* Move pieces, `first` and `count` of which are bytes of the result; `rows` say how they lie, or NULL: as they are.
 * What a device does is complete when its event is. Every other slot's go `beside` those before, so that one begins
 * while another ends: `way` is then another one. `by_wires`: of a slot that network threads carry. */
int ucch_pieces_move(const ucch_region *region, int *way, int beside, int by_wires, const ucch_rows *rows,
                     ucch_piece *pieces, uint64_t n) {
    if (!rows) n = join(pieces, n);
    const ucch_rows *how = rows ? rows : &plain;
    if (!region->on_device) return move_by_host(how, pieces, n);
    ucch_task task = {.kind = UCCH_PIECES, .dtype = how->from, .to = how->to};
    void *function = rows || suit_kernels(pieces, n, by_wires) ? ucch_kernel_of(&task) : NULL;
    if (beside) *way = UCCH_ACROSS;
    if (function) return by_kernel(*way, how, pieces, n, function);
    return rows ? UCCH_FAIL_DEVICE : copy_each(*way, pieces, n);
}
