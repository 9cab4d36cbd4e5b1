/* Short calls of ranks that share memory. Each rank writes its contribution into a parcel of its own and reads those of
 * the other ranks once they are there: one cache line from each. All ranks reduce in rank order.
 *
 * A parcel is reused UCCH_PARCELS calls later, once every rank has said that it no longer reads the old contents: a
 * rank that only sends, as the root of a bcast, may be ahead by that many calls. A rank's calls that use the same
 * parcel run one after the other. */
#include "base/base.h"

#include <string.h>

static ucch_parcel *parcel_at(const ucch_parcel_table *table, int i, uint64_t call) {
    return &table->each[i].of[call % UCCH_PARCELS];
}

static ucch_exchange **queue_of(ucch_parcel_table *table, const ucch_exchange *x) {
    return &table->turns[x->call % UCCH_PARCELS];
}

/* Tell ranks that want to reuse this parcel up to which call this rank no longer reads it. */
static void publish_read(const ucch_parcel_table *table, uint64_t place, uint64_t call) {
    UCCH_STORE(&table->each[table->mine].read[place % UCCH_PARCELS], call);
}

/* Begin this rank's part in call `call`; nothing is read or written yet. */
void ucch_exchange_begin(ucch_parcel_table *table, ucch_exchange *x, uint64_t call, uint64_t signature) {
    x->call = call;
    x->signature = signature;
    x->begun = x->written = x->came = 0;
    x->queued = 1;
    UCCH_APPEND(*queue_of(table, x), x, next);
}

/* True if no rank still reads this rank's previous parcel at that place. */
static int may_write(const ucch_parcel_table *table, uint64_t call) {
    uint64_t before = parcel_at(table, table->mine, call)->call;
    for (int i = 0; i < table->n; i++)
        if (i != table->mine && UCCH_LOAD(&table->each[i].read[call % UCCH_PARCELS]) < before) return 0;
    return 1;
}

static void write_parcel(const ucch_parcel_table *table, const ucch_exchange *x, const char *src, uint64_t bytes) {
    ucch_parcel *p = parcel_at(table, table->mine, x->call);
    p->signature = x->signature;
    if (bytes) memcpy(p->data, src, bytes);
    UCCH_STORE(&p->call, x->call);
}

/* 1 if all parcels to be read have arrived, 0 if not, UCCH_FAIL_MISMATCH if one belongs to a different call. */
static int all_arrived(const ucch_parcel_table *table, ucch_exchange *x) {
    int from = x->is->from, first = from >= 0 ? from : 0;
    int last = from >= 0 ? from + 1 : from == UCCH_NOBODY ? 0 : table->n;
    for (int i = first + x->came; i < last; i++, x->came++) {
        const ucch_parcel *p = parcel_at(table, i, x->call);
        if (UCCH_LOAD(&p->call) != x->call) return 0;
        if (p->signature != x->signature) return UCCH_FAIL_MISMATCH;
    }
    return 1;
}

static int unpack(const ucch_parcel_table *table, const ucch_exchange *x, char *dst) {
    const ucch_part *is = x->is;
    int status = 0;
    for (int i = 0; i < x->came && is->bytes && dst && status >= 0; i++) {
        const char *from = parcel_at(table, is->from >= 0 ? is->from : i, x->call)->data + is->at;
        if (is->combines && i)
            status = ucch_combine(is->op, is->dtype, from, dst, x->count);
        else
            memcpy(is->combines ? dst : dst + (uint64_t)i * is->bytes, from, is->bytes);
    }
    return status;
}

/* Advance. Returns 1 when the call has ended, 0 when not yet, or a failure. */
int ucch_exchange_go_on(ucch_parcel_table *table, ucch_exchange *x, const char *src, uint64_t bytes, char *dst) {
    if (*queue_of(table, x) != x) return 0;
    if (!x->begun) publish_read(table, x->call, x->call - 1); /* calls that were not made read no parcel here */
    x->begun = 1;
    if (x->is->writes && !x->written) {
        if (!may_write(table, x->call)) return 0;
        write_parcel(table, x, src, bytes);
        x->written = 1;
    }
    int state = all_arrived(table, x);
    if (state != 1) return state;
    state = unpack(table, x, dst);
    ucch_exchange_end(table, x);
    return state < 0 ? state : 1;
}

/* End the part: nothing is read any more, because the call has ended or failed. */
void ucch_exchange_end(ucch_parcel_table *table, ucch_exchange *x) {
    if (!x->queued) return;
    UCCH_UNLINK(*queue_of(table, x), x, next);
    x->queued = 0;
    if (x->begun) publish_read(table, x->call, x->call);
}
