/* Staged transfers of device data through pinned memory: the sender's device copies pieces into a slot, and the
 * receiver's device copies them to their offsets in the region. On one host both access the slot; between hosts wires
 * carry it (slots.c). Eight slots in each direction let all stages work at the same time. A slot begins with the table
 * of its pieces. On a device many pieces are moved by one kernel, which also gathers rows and converts; on the host a
 * CPU does that. */
#include <stdlib.h>
#include <string.h>

#include "rma/rma.h"

/* Alignment of the data behind a table, at which devices copy best. */
#define LINE ((size_t)256)
/* From this many pieces on, one kernel moves them instead of a copy for each, which costs the host some microseconds.
 * Pieces of longer average size are copied, as the device is then slower with a kernel, above all byte by byte. */
#define MANY 8
#define LONG ((uint64_t)1 << 20)
#define LONG_BYTE_BY_BYTE ((uint64_t)16 << 10)

/* ---- pieces between a region and a slot ---- */

/* UCC's datatype. */
#define UINT8 40

/* Bytes, unchanged. */
static const ucch_rows plain = {.from = UINT8, .to = UINT8, .from_bytes = 1, .to_bytes = 1};

static uint64_t less(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void convert(const ucch_rows *r, const char *src, char *dst, uint64_t n) {
    if (r->from == r->to)
        memcpy(dst, src, n * r->to_bytes);
    else
        ucch_cast(r->from, r->to, src, dst, n);
}

/* Gather one piece on the host, a row or the rest of one at a time. */
static void gather(const ucch_rows *r, const ucch_piece *p) {
    if (!r->row) memcpy(p->dst, p->src + p->first, p->count);
    for (uint64_t done = 0, n; r->row && done < p->count; done += n) {
        uint64_t row = (p->first + done) / r->row, at = (p->first + done) % r->row;
        n = less(r->row - at, p->count - done);
        uint64_t place = row / r->rows * r->groups_apart + row % r->rows * r->apart + at;
        convert(r, p->src + place * r->from_bytes, p->dst + done * r->to_bytes, n);
    }
}

/* Make pieces of bytes begin at their first byte, and merge pieces that are adjacent on both sides. Returns how many
 * are left. */
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

/* True if a kernel moves these pieces fastest. For slots that wires carry it does, unless it has to move bytes: between
 * two H200s puts ran at 15 GB/s with copies, 23 with kernels on the receiver, 24 with kernels on both sides. */
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
        if (rows->to_bytes > 1) { /* the divisions would take longest */
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

/* Move pieces, whose `first` and `count` are bytes of the result; `rows`: how they are gathered and converted, or NULL.
 * Device work is complete when its event is. Every other slot (`beside`) uses another stream, so that one begins while
 * another ends. `by_wires`: the slot goes over wires. */
static int move_pieces(const ucch_region *region, int *way, int beside, int by_wires, const ucch_rows *rows,
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

/* ---- slots ---- */

static size_t table_of(uint32_t count) { return (count * sizeof(ucch_place) + LINE - 1) / LINE * LINE; }

static uint32_t number_of(const ucch_slot *s) { return (uint32_t)(s - s->peer->outward); }

static int has_room(ucch_peer *peer, ucch_slot *s) {
    s->peer = peer;
    return (!peer->out || ucch_slot_flow_has_room_locked(peer->out, number_of(s))) && ucch_slot_list_locked(s);
}

/* Record the slot's event behind its copies. */
static int record(ucch_slot *s) {
    int status = ucch_event_record(&s->event, ucch_way_stream(s->way));
    s->is_recorded = !status;
    return status;
}

/* Start moving the pieces of a slot; every other slot uses another stream. copies_done tells of a failure. */
static void begin(ucch_slot *s, const ucch_region *region, int way, int by_wires, const ucch_rows *rows, uint64_t n) {
    s->way = way;
    s->again = 0;
    s->on_device = region->on_device;
    s->failed = move_pieces(region, &s->way, s->header.slot % 2, by_wires, rows, s->pieces, n);
    int status = s->on_device ? record(s) : 0;
    if (!s->failed) s->failed = status;
}

/* Returns 1 if the copies are complete, 0 if not yet, or a failure: then, too, none is under way, and slot and memory
 * may be used again. A driver call that fails is made a second time: only if it fails again the device counts as
 * dead. No thread waits for the stream, which may be behind others that wait for peers. */
static int copies_done(ucch_slot *s) {
    int done = 1, status = 0;
    if (s->on_device) status = (s->is_recorded ? 0 : record(s)) ?: ucch_event_ask(s->event, &done, &s->again);
    if (status && s->failed) return status;
    if (status) s->failed = status;
    return status || !done ? 0 : s->failed ?: 1;
}

/* ---- outward ---- */

/* Returns 1, 0 if another slot has to go first, or a failure. */
static int send_locked(ucch_slot *s) {
    ucch_peer *peer = s->peer;
    int status = peer->out ? ucch_slot_flow_send_locked(peer->out, number_of(s), s->bytes) : 1;
    if (!status) return 0;
    ucch_here here = {peer->ours->file, (uint32_t)s->bytes, peer->ours->inode};
    s->header.what = UCCH_HERE;
    if (status > 0) status = ucch_tell_locked(peer, s->header, &here, sizeof(here)) ?: 1;
    if (status > 0) s->state = UCCH_SENT;
    if (status < 0 && peer->out) peer->status = UCCH_FAIL_PEER; /* it would wait for this slot for ever */
    return status;
}

/* The transfer ends before the slot has been sent. */
static void leave_slot(ucch_transfer *t, ucch_slot *s) {
    s->serial = 0;
    t->in_flight--;
    if (s->state != UCCH_COPYING) return;
    s->peer->looked_after++;
    ucch_attend_locked(t->at);
}

/* Once the copies of such a slot have ended, free it, or send it empty if slots behind it wait for their turn. Returns
 * 1 if it is done with. */
static int check_left_locked(ucch_slot *s) {
    if (s->state != UCCH_COPYING || s->serial || s->by_device || !copies_done(s)) return 0;
    ucch_slot_leave_region(s);
    s->header.serial = s->header.region = 0;
    s->header.count = 0;
    s->bytes = 0;
    s->on_device = 0;
    int status = s->peer->out && !s->peer->status ? send_locked(s) : UCCH_FAIL_PEER;
    if (status < 0) s->state = UCCH_FREE;
    s->peer->looked_after -= status != 0;
    return status != 0;
}

/* Number of entries in the next slot: as many as fit with their data. */
static uint32_t entries_of(const ucch_transfer *t, size_t room) {
    uint64_t done = t->done, data = 0;
    uint32_t count = 0;
    for (size_t i = t->next; i < t->is.n && count < UCCH_RMA_PIECES; i++, done = 0, count++) {
        if (count && table_of(count + 1) + data >= room) break;
        data += t->is.lengths[i] - done;
    }
    return count;
}

/* True if our device copies directly between the regions. */
int ucch_transfer_by_device(const ucch_transfer *t) {
    return t->is.local && t->is.local->on_device && t->is.target && t->is.target->seen && !t->rows.row;
}

/* Have our device copy the next pieces directly; the slot holds their list. */
static void copy_by_device_locked(ucch_transfer *t, ucch_slot *s) {
    uint64_t n = 0;
    for (; t->next < t->is.n && n < UCCH_RMA_PIECES; t->next++) {
        char *here = t->is.local->base + t->is.mine[t->next], *there = t->is.target->seen + t->is.theirs[t->next];
        int puts = t->is.what == UCCH_RMA_PUT;
        s->pieces[n++] = (ucch_piece){puts ? here : there, puts ? there : here, 0, t->is.lengths[t->next]};
        t->bytes += t->is.lengths[t->next];
    }
    s->serial = t->serial;
    s->by_device = 1;
    t->peer->looked_after++;
    begin(s, t->is.local, UCCH_ACROSS, 0, NULL, n);
}

/* Check these copies. When they have ended the transfer goes on, or is released. */
static int check_by_device_locked(ucch_slot *s) {
    int done = s->state == UCCH_COPYING && s->by_device ? copies_done(s) : 0;
    if (!done) return 0;
    ucch_transfer *t = ucch_transfer_of(s->peer->at, s->serial);
    s->state = UCCH_FREE;
    s->by_device = 0;
    s->peer->looked_after--;
    if (!t) return 1;
    t->in_flight--;
    if (done < 0 && !t->status) t->status = done;
    if (t->op.state != UCCH_ACTIVE && !t->in_flight) ucch_transfer_leave_locked(t);
    return 1;
}

static void fill_locked(ucch_transfer *t, ucch_slot *s) {
    size_t most = t->peer->out ? t->peer->out->room : UCCH_RMA_SLOT;
    uint32_t count = entries_of(t, most);
    size_t at = table_of(count);
    uint32_t slot = number_of(s);
    const ucch_mapping *share = t->peer->ours;
    ucch_place *table = (ucch_place *)(share->memory + ucch_slot_place(slot));
    ucch_piece *pieces = s->pieces;
    char *memory = (t->is.local->on_device ? share->seen : share->memory) + ucch_slot_place(slot);
    for (uint32_t k = 0; k < count; k++) {
        uint64_t left = t->is.lengths[t->next] - t->done, room = most - at;
        uint64_t bytes = left < room ? left : room;
        table[k] = (ucch_place){t->is.theirs[t->next] + t->done, bytes};
        pieces[k] = (ucch_piece){t->is.local->base + t->is.mine[t->next], memory + at, t->done, bytes};
        at += bytes;
        t->bytes += bytes;
        t->done += bytes;
        if (t->done < t->is.lengths[t->next]) break; /* the last piece: the slot is full */
        t->done = 0;
        t->next++;
    }
    s->bytes = at;
    ucch_slot_use_region(s, t->is.local);
    s->serial = t->serial;
    s->header = (ucch_header){
        .serial = t->serial, .region = t->there, .other = (uint64_t)t->is.counter, .count = count, .slot = slot};
    if (t->peer->out) t->peer->out->next++;
    begin(s, t->is.local, UCCH_TO_HOST, t->peer->out != NULL, t->rows.row ? &t->rows : NULL, count);
}

/* A transfer ends before its slots are free. */
void ucch_staged_leave_locked(ucch_transfer *t) {
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = &t->peer->outward[i];
        if (s->state == UCCH_FREE || s->serial != t->serial) continue;
        leave_slot(t, s);
    }
}

static int advance_by_device_locked(ucch_transfer *t) {
    int moved = 0;
    for (ucch_slot *s = t->peer->outward; s < t->peer->outward + UCCH_RMA_SLOTS; s++) {
        if (s->state == UCCH_FREE && t->next < t->is.n && !t->status && ucch_slot_list_locked(s)) {
            t->in_flight++;
            s->peer = t->peer;
            s->state = UCCH_COPYING;
            copy_by_device_locked(t, s);
            moved++;
        }
        moved += check_by_device_locked(s);
    }
    return moved;
}

/* Advance a transfer. Returns how many slots have moved. */
int ucch_staged_move_locked(ucch_transfer *t) {
    int moved = 0;
    if (ucch_transfer_by_device(t)) return advance_by_device_locked(t);
    int way = ucch_carries_locked(t->peer);
    if (way < 0 && !t->status) t->status = way;
    if (!way) return 0;
    uint64_t first = t->peer->out ? t->peer->out->next : 0;
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = &t->peer->outward[(first + (uint64_t)i) % UCCH_RMA_SLOTS];
        check_by_device_locked(s);
        check_left_locked(s);
        if (s->state == UCCH_FREE && t->next < t->is.n && !t->status && has_room(t->peer, s)) {
            t->in_flight++;
            s->state = UCCH_COPYING;
            fill_locked(t, s);
            moved++;
        }
        if (s->state != UCCH_COPYING || s->serial != t->serial) continue;
        int done = copies_done(s);
        if (done) ucch_slot_leave_region(s);
        if (done == 1 && (done = send_locked(s)) < 0) done = UCCH_FAIL_PEER;
        moved += done == 1;
        if (done >= 0) continue;
        leave_slot(t, s);
        if (!t->status) t->status = done;
    }
    return moved;
}

/* The peer has emptied a slot or rejects it. Returns the transfer that waits for that, or NULL. */
ucch_transfer *ucch_chunk_taken_locked(ucch_peer *peer, const ucch_header *h) {
    ucch_slot *s = h->slot < UCCH_RMA_SLOTS ? &peer->outward[h->slot] : NULL;
    if (!s || s->state != UCCH_SENT || s->header.serial != h->serial) return NULL;
    s->state = UCCH_FREE;
    return s->serial ? ucch_transfer_of(peer->at, s->serial) : NULL;
}

/* ---- inward ---- */

/* Tell the peer the result for its slot, which it may refill. */
static void taken_locked(ucch_slot *s, int status) {
    ucch_peer *peer = s->peer;
    ucch_header h = {.what = UCCH_TAKEN, .serial = s->header.serial, .slot = s->header.slot, .status = status};
    ucch_slot_leave_region(s);
    s->state = UCCH_FREE;
    peer->looked_after--;
    if (peer->in) ucch_slot_flow_release_locked(peer->in, s->piece);
    ucch_tell_locked(peer, h, NULL, 0);
}

/* True if table and data have the stated length, and every piece is inside the region. */
static int is_sound(const ucch_region *region, const ucch_place *places, size_t bytes, uint32_t count) {
    size_t table = table_of(count);
    if (table > bytes) return 0;
    size_t left = bytes - table;
    for (uint32_t k = 0; k < count; k++) {
        ucch_place p = places[k];
        if (p.bytes > left || p.bytes > region->bytes || p.offset > region->bytes - p.bytes) return 0;
        left -= p.bytes;
    }
    return left == 0;
}

/* Copy the data of a slot into the region, unless its sender counts as dead or its counter has a new use: the memory
 * may then have one, too. */
static int scatter_locked(ucch_slot *s) {
    ucch_rma *at = s->peer->at;
    ucch_region *region = ucch_region_of(at, s->header.region);
    ucch_mapping *share = s->peer->theirs;
    size_t place = ucch_slot_place(s->header.slot);
    uint32_t count = s->header.count;
    if (s->peer->status || !share) return UCCH_FAIL_PEER;
    if (s->header.other && !ucch_rma_counter_of(at, s->header.other - 1)) return UCCH_FAIL_CANCELLED;
    if (!region) return UCCH_FAIL_STALE;
    if (count > UCCH_RMA_PIECES) return UCCH_FAIL_RANGE;
    if (!ucch_slot_list_locked(s)) return UCCH_FAIL_MEMORY;
    if (ucch_slots_pin_locked(share)) return UCCH_FAIL_PATH;
    memcpy(s->table, share->memory + place, count * sizeof(*s->table)); /* a copy: the sender can write there */
    if (!is_sound(region, s->table, s->bytes, count)) return UCCH_FAIL_RANGE;
    const char *from = (region->on_device ? share->seen : share->memory) + place + table_of(count);
    for (uint32_t k = 0; k < count; k++) {
        s->pieces[k] = (ucch_piece){from, region->base + s->table[k].offset, 0, s->table[k].bytes};
        from += s->table[k].bytes;
    }
    ucch_slot_use_region(s, region);
    s->state = UCCH_COPYING;
    begin(s, region, UCCH_TO_DEVICE, s->peer->in != NULL, NULL, count);
    return 0;
}

/* Copy a slot's data once it has arrived over wires. Returns 0 if it has not. */
static int check_arrival_locked(ucch_slot *s) {
    ucch_peer *peer = s->peer;
    int come = peer->status ? UCCH_FAIL_PEER : peer->in ? ucch_slot_flow_arrived_locked(peer->in, s->piece) : 1;
    int status = come > 0 ? scatter_locked(s) : come;
    if (come < 0) peer->status = UCCH_FAIL_PEER; /* later slots cannot arrive either, and both sides must fail */
    if (status) taken_locked(s, status);
    return come != 0;
}

/* HERE: a slot of the peer has data, in memory that we map or to come over wires. */
void ucch_chunk_here_locked(ucch_peer *peer, const ucch_header *h, const void *data, size_t bytes) {
    ucch_here here;
    if (bytes != sizeof(here)) return;
    memcpy(&here, data, sizeof(here)); /* libucp's data may not be aligned */
    ucch_slot *s = h->slot < UCCH_RMA_SLOTS ? &peer->inward[h->slot] : NULL;
    int status = s && s->state == UCCH_FREE && here.bytes <= UCCH_RMA_SLOT ? 0 : UCCH_FAIL_RANGE;
    if (!status && peer->in) {
        status = ucch_slot_flow_expect_locked(peer->in, h->slot, here.bytes, &s->piece);
        if (status) peer->status = UCCH_FAIL_PEER;
    } else if (!status && ucch_slots_open_locked(peer, &here))
        status = UCCH_FAIL_PATH;
    if (status) {
        ucch_header no = {.what = UCCH_TAKEN, .serial = h->serial, .slot = h->slot, .status = status};
        ucch_tell_locked(peer, no, NULL, 0);
        return;
    }
    s->peer = peer;
    s->header = *h;
    s->bytes = here.bytes;
    s->state = UCCH_ARRIVING;
    peer->looked_after++;
    UCCH_ON_DEVICE;
    check_arrival_locked(s);
}

/* True if a device of ours still uses slots shared with the peer. */
int ucch_staged_busy(ucch_peer *peer) {
    int busy = 0;
    UCCH_LOCKED;
    UCCH_ON_DEVICE;
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *out = &peer->outward[i];
        busy |= out->state == UCCH_COPYING && (out->by_device || !copies_done(out));
        busy |= peer->inward[i].state == UCCH_COPYING;
    }
    return busy;
}

/* Number of slots being copied into regions for this counter. */
int ucch_rma_arriving(ucch_rma *at, int number) {
    int found = 0;
    UCCH_LOCKED;
    for (ucch_peer *p = at->peers; p; p = p->next)
        for (int i = 0; i < UCCH_RMA_SLOTS; i++)
            found += p->inward[i].state == UCCH_COPYING && p->inward[i].header.other == (uint64_t)number + 1;
    return found;
}

/* Check an inward slot. Returns 2 if it is complete, 1 if under way, 0 if free. */
static int poll_locked(ucch_slot *s) {
    if (s->state == UCCH_FREE) return 0;
    if (s->state == UCCH_ARRIVING) return check_arrival_locked(s) ? 2 : 1;
    int done = copies_done(s);
    if (done) taken_locked(s, done < 0 ? done : 0);
    return done ? 2 : 1;
}

/* Check all inward slots and direct copies. Returns 2 if any has completed, 1 if any is under way, else 0. */
int ucch_staged_poll_locked(ucch_rma *at) {
    int found = 0;
    for (ucch_peer *p = at->peers; p; p = p->next)
        for (int i = 0; p->looked_after && i < UCCH_RMA_SLOTS; i++) {
            ucch_slot *out = &p->outward[i];
            int is_watched = out->state == UCCH_COPYING && (out->by_device || !out->serial);
            int gone = is_watched ? 1 + (check_by_device_locked(out) | check_left_locked(out)) : 0;
            int come = poll_locked(&p->inward[i]);
            found = gone > found ? gone : found;
            found = come > found ? come : found;
        }
    return found;
}
