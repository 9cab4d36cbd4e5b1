/* Pieces on their way between a region and a slot: on a device many of them by one kernel, which also gathers them from
 * rows and converts them; elsewhere the host does that. */
#include <string.h>

#include "rma/rma.h"

/* So many in a slot are copied by one kernel, and not by a copy each, which takes the host some microseconds; but for
 * those that are so long on average that the device takes as long for each. */
#define MANY 8
#define LONG ((uint64_t)32 << 10)
/* UCC's number of it. */
#define UINT64 64

static const ucch_rows bytes = {.row = UCCH_RMA_SLOT, .rows = 1, .from_bytes = 1, .to_bytes = 1};

static uint64_t less(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void convert(const ucch_rows *r, const char *src, char *dst, uint64_t n) {
    if (r->from == r->to)
        memcpy(dst, src, n * r->to_bytes);
    else
        ucch_cast(r->from, r->to, src, dst, n);
}

/* One piece by the host, a row or the rest of one at a time. */
static void gather(const ucch_rows *r, const ucch_piece *p) {
    for (uint64_t done = 0, n; done < p->count; done += n) {
        uint64_t row = (p->first + done) / r->row, at = (p->first + done) % r->row;
        n = less(r->row - at, p->count - done);
        uint64_t place = row / r->rows * r->groups_apart + row % r->rows * r->apart + at;
        convert(r, p->src + place * r->from_bytes, p->dst + done * r->to_bytes, n);
    }
}

/* Move pieces as plain bytes in units of eight, if they all are such. */
static ucch_rows plain_units(const ucch_piece *pieces, uint64_t n) {
    uint64_t all = 0;
    for (uint64_t i = 0; i < n; i++)
        all |= (uint64_t)(uintptr_t)pieces[i].src | (uint64_t)(uintptr_t)pieces[i].dst | pieces[i].count;
    return (ucch_rows){all % 8 ? 0 : UCCH_RMA_SLOT, 1, .from = UINT64, .to = UINT64, .from_bytes = 8, .to_bytes = 8};
}

/* Make one of pieces that follow each other on both sides: how many are left, and their bytes. */
static uint64_t join(ucch_piece *pieces, uint64_t n, uint64_t *all) {
    uint64_t last = 0;
    *all = n ? pieces[0].count : 0;
    for (uint64_t i = 1; i < n; i++) {
        ucch_piece *p = &pieces[last];
        *all += pieces[i].count;
        if (pieces[i].src == p->src + p->count && pieces[i].dst == p->dst + p->count)
            p->count += pieces[i].count;
        else
            pieces[++last] = pieces[i];
    }
    return n ? last + 1 : 0;
}

static int copy_each(int way, const ucch_piece *pieces, uint64_t n) {
    int status = 0;
    for (uint64_t i = 0; i < n && !status; i++)
        if (pieces[i].count) status = ucch_work_copy(way, pieces[i].dst, pieces[i].src, pieces[i].count);
    return status;
}

static int by_kernel(int way, const ucch_rows *rows, ucch_piece *pieces, uint64_t n, void *function) {
    ucch_pieces all = {.each = pieces, .n = n, .rows = *rows};
    for (uint64_t i = 0; i < n; i++) {
        pieces[i].first /= rows->to_bytes;
        pieces[i].count /= rows->to_bytes;
        if (pieces[i].count > all.most) all.most = pieces[i].count;
    }
    return ucch_work_pieces(way, function, &all);
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
 * What a device does is complete when its event is. */
int ucch_pieces_move(const ucch_region *region, int way, const ucch_rows *rows, ucch_piece *pieces, uint64_t n) {
    uint64_t all = 0;
    for (uint64_t i = 0; i < n && !rows; i++) {
        pieces[i].src += pieces[i].first;
        pieces[i].first = 0;
    }
    if (!rows) n = join(pieces, n, &all);
    ucch_rows units = rows ? *rows : region->on_device ? plain_units(pieces, n) : bytes;
    if (!region->on_device) return move_by_host(&units, pieces, n);
    ucch_task task = {.kind = UCCH_PIECES, .dtype = units.from, .to = units.to};
    int many = n >= MANY && units.row && all / n < LONG;
    void *function = rows || many ? ucch_kernel_of(&task) : NULL;
    if (function) return by_kernel(way, &units, pieces, n, function);
    return rows ? UCCH_FAIL_DEVICE : copy_each(way, pieces, n);
}
