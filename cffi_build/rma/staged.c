/* Data of devices on its way through pinned memory: the sender's device copies pieces into a slot, and the receiver's
 * device copies them to their places. On one host both see the slot (share.c); else libucp carries it to a slot of the
 * receiver's. There are eight each way, so that all are under way at a time. In front of the data of a slot lies the
 * table of its places. */
#include <stdlib.h>
#include <string.h>

#include "p2p/message.h"
#include "rma/rma.h"

#define ATTR_FLAGS 0x10
#define RNDV 0x4
#define UCS_INPROGRESS 1

static void free_memory(ucch_slot *s) {
    if (s->held && s->is_pinned)
        ucch_pool_give(s->held);
    else
        free(s->held);
    s->held = s->memory = NULL;
}

/* Memory of a free slot, pinned since there is a device, and from `at` in what is shared. */
static int has_memory(ucch_slot *s, const ucch_share *share, size_t at) {
    int pinned = ucch_bound() >= 0, shared = share && share->memory;
    if (s->held && s->is_pinned == pinned && s->is_shared == shared) return 1;
    free_memory(s);
    size_t front = shared ? 0 : UCCH_RMA_SLOT, bytes = front + UCCH_RMA_PIECES * sizeof(ucch_piece);
    s->held = pinned ? ucch_pool_take(1, bytes, NULL, 1) : malloc(bytes);
    if (!s->held) return 0;
    s->is_pinned = pinned;
    s->is_shared = shared;
    s->memory = shared ? share->memory + at : s->held;
    s->seen = shared ? share->seen + at : s->held;
    s->pieces = (ucch_piece *)(s->held + front);
    return 1;
}

/* Memory of a slot outward: shared once there is a peer on this host. */
static int has_room(ucch_peer *peer, ucch_slot *s) {
    ucch_rma *at = peer->at;
    if (peer->pid && !peer->is_apart && !at->alone) at->alone = ucch_share_make(&at->own) != 0;
    if (at->own.memory && !at->alone) at->alone = ucch_share_pin(&at->own) != 0;
    return has_memory(s, at->alone ? NULL : &at->own, (size_t)(s - at->out) * UCCH_RMA_SLOT);
}

void ucch_slots_free_locked(ucch_rma *at) {
    for (int i = 0; i < 2 * UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = i < UCCH_RMA_SLOTS ? &at->out[i] : &at->in[i - UCCH_RMA_SLOTS];
        if (s->event) ucch_bound_ops()->event_free(s->event);
        free_memory(s);
    }
    ucch_share_free(&at->own);
    for (ucch_arrival *a = at->arrivals; a; a = at->arrivals) {
        at->arrivals = a->next;
        free(a);
    }
}

static int mark(ucch_slot *s, const ucch_region *region, int way) {
    s->again = 0;
    s->on_device = region->on_device;
    return s->on_device ? ucch_work_mark(way, &s->event) : 0;
}

/* 1 when the copies are done, 0 when not yet, or a failure. */
static int copied(ucch_slot *s) {
    int done = 1, status = s->on_device ? ucch_event_ask(s->event, &done, &s->again) : 0;
    return status ? status : done;
}

/* ---- outward ---- */

static void sent(void *request, ucs_status_t status, void *data) {
    ucch_slot *s = data;
    (void)status;
    if (s->request == request) s->request = NULL; /* or it has new memory by now */
    ucp_request_free(request);
}

static int carry_locked(ucch_slot *s) {
    s->header.what = UCCH_CARRY;
    ucp_request_param_t p = {
        .op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA | ATTR_FLAGS | ATTR_DATATYPE | ATTR_MEMORY_TYPE, .flags = RNDV};
    p.cb = sent;
    p.user_data = s;
    p.datatype = BYTES;
    void *request = ucp_am_send_nbx(s->peer->ep, UCCH_AM_ID, &s->header, sizeof(s->header), s->memory, s->bytes, &p);
    if (IS_STATUS(request)) return (int)(intptr_t)request;
    s->request = request;
    s->state = UCCH_SENT;
    return 0;
}

static int send_locked(ucch_slot *s) {
    if (!s->is_shared || !s->peer->pid || s->peer->is_apart) return carry_locked(s);
    s->header.what = UCCH_HERE;
    ucch_here here = {s->peer->at->own.file, (uint32_t)s->bytes};
    int status = ucch_tell_locked(s->peer, s->header, &here, sizeof(here));
    if (!status) s->state = UCCH_SENT;
    return status;
}

/* Entries of the next chunk: as many as find room together with their data. */
static uint32_t entries_of(const ucch_transfer *t, size_t *table) {
    size_t room = UCCH_RMA_SLOT, i = t->next;
    uint64_t done = t->done;
    uint32_t count = 0;
    for (; i < t->n && count < UCCH_RMA_PIECES && room > 2 * sizeof(ucch_place); i++, done = 0, count++) {
        uint64_t left = t->lengths[i] - done;
        room -= sizeof(ucch_place);
        room -= left < room ? left : room;
    }
    *table = count * sizeof(ucch_place);
    return count;
}

static int fill_locked(ucch_transfer *t, ucch_slot *s) {
    size_t at;
    uint32_t count = entries_of(t, &at);
    ucch_place *table = (ucch_place *)s->memory;
    ucch_piece *pieces = s->pieces;
    char *memory = t->local->on_device ? s->seen : s->memory;
    for (uint32_t k = 0; k < count; k++) {
        uint64_t left = t->lengths[t->next] - t->done, room = UCCH_RMA_SLOT - at;
        uint64_t bytes = left < room ? left : room;
        table[k] = (ucch_place){t->theirs[t->next] + t->done, bytes};
        pieces[k] = (ucch_piece){t->local->base + t->mine[t->next], memory + at, t->done, bytes};
        at += bytes;
        t->bytes += bytes;
        t->done += bytes;
        if (t->done < t->lengths[t->next]) break; /* the last: the slot is full */
        t->done = 0;
        t->next++;
    }
    s->bytes = at;
    s->serial = t->serial;
    s->peer = t->peer;
    s->header = (ucch_header){.version = UCCH_RMA_VERSION,
                              .from = t->peer->at->uid,
                              .serial = t->serial,
                              .region = t->there,
                              .other = (uint64_t)(t->counter + 1),
                              .count = count,
                              .slot = (uint32_t)(s - t->peer->at->out)};
    int status = ucch_pieces_move(t->local, UCCH_TO_HOST, t->rows.row ? &t->rows : NULL, pieces, count);
    return status ? status : mark(s, t->local, UCCH_TO_HOST);
}

/* Have a slot back whose peer has gone, and with it the answer, or whose transfer has ended before it was sent. Memory
 * that libucp still uses is left to it. */
static void reclaim_locked(ucch_slot *s) {
    int done = 1;
    if (s->state == UCCH_COPYING && !s->serial && s->on_device) ucch_event_ask(s->event, &done, &s->again);
    int is_lost = (s->state == UCCH_SENT || s->state == UCCH_LANDING) && (!s->peer || s->peer->status);
    if (!is_lost && (s->state != UCCH_COPYING || s->serial || !done)) return;
    if (s->request && !s->is_shared) s->held = NULL;
    s->request = NULL;
    s->state = UCCH_FREE;
}

/* A transfer has ended before its slots have. */
void ucch_staged_leave_locked(ucch_transfer *t) {
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = &t->peer->at->out[i];
        if (s->state == UCCH_FREE || s->serial != t->serial) continue;
        s->serial = 0;
        t->in_flight--;
    }
}

/* Move a transfer on: how many chunks have. */
int ucch_staged_move_locked(ucch_transfer *t) {
    int moved = 0;
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = &t->peer->at->out[i];
        reclaim_locked(s);
        if (s->state == UCCH_FREE && !s->request && t->next < t->n && !t->status && has_room(t->peer, s)) {
            t->in_flight++;
            s->state = UCCH_COPYING;
            t->status = fill_locked(t, s);
            moved++;
        }
        if (s->state != UCCH_COPYING || s->serial != t->serial) continue;
        int done = t->status < 0 ? t->status : copied(s);
        if (done == 1) done = send_locked(s) ? UCCH_FAIL_PEER : 1;
        moved += done == 1;
        if (done >= 0) continue;
        s->state = UCCH_FREE;
        t->in_flight--;
        if (!t->status) t->status = done;
    }
    return moved;
}

/* The peer has a chunk, or does not want it: the transfer that waits for that, if one does. */
ucch_transfer *ucch_chunk_taken_locked(ucch_rma *at, const ucch_header *h) {
    ucch_slot *s = h->slot < UCCH_RMA_SLOTS ? &at->out[h->slot] : NULL;
    if (!s || s->state != UCCH_SENT || s->header.serial != h->serial || s->peer->uid != h->from) return NULL;
    if (h->other && s->header.what == UCCH_HERE && s->peer->ep) { /* it does not see ours */
        s->peer->is_apart = 1;
        if (!carry_locked(s)) return NULL;
    }
    s->state = UCCH_FREE;
    return s->serial ? ucch_transfer_of(at, s->serial) : NULL;
}

/* ---- inward ---- */

static void take_locked(ucch_rma *at, ucch_slot *s, const ucch_header *h, void *data, size_t bytes);

/* Answer, and let the next one in. */
static void taken_locked(ucch_slot *s, int status) {
    ucch_rma *at = s->at;
    ucch_header h = {.what = UCCH_TAKEN, .serial = s->header.serial, .slot = s->header.slot, .status = status};
    ucch_peer *peer = s->peer;
    if (s->region) s->region->users--;
    s->region = NULL;
    s->state = UCCH_FREE;
    if (peer) ucch_tell_locked(peer, h, NULL, 0);
    ucch_arrival *a = at->arrivals;
    if (!a || !has_memory(s, NULL, 0)) return;
    at->arrivals = a->next;
    take_locked(at, s, &a->header, a->data, a->bytes);
    free(a);
}

/* Whether a chunk's table and data are as long as it says, and all places inside of its region. */
static int is_sound(const ucch_region *region, const char *memory, size_t bytes, uint32_t count) {
    size_t table = (size_t)count * sizeof(ucch_place);
    if (table > bytes || count > UCCH_RMA_PIECES) return 0;
    size_t left = bytes - table;
    for (uint32_t k = 0; k < count; k++) {
        ucch_place p = ((const ucch_place *)memory)[k];
        if (p.bytes > left || p.bytes > region->bytes || p.offset > region->bytes - p.bytes) return 0;
        left -= p.bytes;
    }
    return left == 0;
}

/* Let the data of a slot go to its places, unless its sender counts as dead, or who waited for it does not any more:
 * either may have given the places to others. */
static int scatter_locked(ucch_slot *s) {
    ucch_region *region = ucch_region_of(s->at, s->header.region);
    if (!s->peer || s->peer->status) return UCCH_FAIL_PEER;
    if (s->header.other && !ucch_rma_counter_of(s->at, s->header.other - 1)) return UCCH_FAIL_CANCELLED;
    if (!region) return UCCH_FAIL_STALE;
    if (!is_sound(region, s->memory, s->bytes, s->header.count)) return UCCH_FAIL_RANGE;
    const ucch_place *table = (const ucch_place *)s->memory;
    const char *from = (region->on_device ? s->data_seen : s->data) + s->header.count * sizeof(*table);
    ucch_piece *pieces = s->pieces;
    s->region = region;
    region->users++;
    for (uint32_t k = 0; k < s->header.count; k++) {
        pieces[k] = (ucch_piece){from, region->base + table[k].offset, 0, table[k].bytes};
        from += table[k].bytes;
    }
    int status = ucch_pieces_move(region, UCCH_TO_DEVICE, NULL, pieces, s->header.count);
    if (status) return status;
    s->state = UCCH_COPYING;
    return mark(s, region, UCCH_TO_DEVICE);
}

static void landed_locked(ucch_slot *s, int status) {
    s->request = NULL;
    if (!status) status = scatter_locked(s);
    if (status) taken_locked(s, status);
}

static void landed(void *request, ucs_status_t status, size_t bytes, void *data) {
    ucch_slot *s = data;
    int is_ours = s->request == request;
    (void)bytes;
    ucp_request_free(request);
    if (!is_ours) return;
    ucch_attend_locked(s->at);
    int before = ucch_device_enter();
    landed_locked(s, status);
    ucch_device_leave(before);
}

/* Find the data of a slot of its sender's; the table is read once, as others may write there. */
static int find_locked(ucch_slot *s) {
    if (!s->peer || !s->peer->share.memory) return UCCH_FAIL_PEER;
    if (s->header.count > UCCH_RMA_PIECES) return UCCH_FAIL_RANGE;
    size_t at = s->header.slot * UCCH_RMA_SLOT;
    s->data = s->peer->share.memory + at;
    s->data_seen = s->peer->share.seen + at;
    memcpy(s->memory, s->data, s->header.count * sizeof(ucch_place));
    return 0;
}

static void take_locked(ucch_rma *at, ucch_slot *s, const ucch_header *h, void *data, size_t bytes) {
    s->at = at;
    s->peer = ucch_peer_of(at, h->from);
    s->serial = h->serial;
    s->header = *h;
    s->bytes = bytes;
    s->region = NULL;
    s->state = UCCH_LANDING;
    s->data = s->data_seen = s->memory;
    if (h->what == UCCH_HERE) {
        landed_locked(s, find_locked(s));
        return;
    }
    ucp_request_param_t p = {.op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA | ATTR_DATATYPE | ATTR_MEMORY_TYPE,
                             .cb = landed,
                             .user_data = s};
    p.datatype = BYTES;
    void *request = ucp_am_recv_data_nbx(at->worker, data, s->memory, bytes, &p);
    if (request && !IS_STATUS(request))
        s->request = request;
    else
        landed_locked(s, (int)(intptr_t)request);
}

/* A chunk comes in. */
ucs_status_t ucch_chunk_come_locked(ucch_rma *at, const ucch_header *h, void *data, size_t bytes) {
    for (int i = 0; i < UCCH_RMA_SLOTS; i++)
        if (at->in[i].state == UCCH_FREE && has_memory(&at->in[i], NULL, 0)) {
            take_locked(at, &at->in[i], h, data, bytes);
            return UCS_INPROGRESS;
        }
    ucch_arrival *a = malloc(sizeof(*a)), **last = &at->arrivals;
    if (!a) return UCCH_UCC_ABSENT;
    while (*last)
        last = &(*last)->next;
    *a = (ucch_arrival){*h, data, bytes, NULL};
    *last = a;
    return UCS_INPROGRESS;
}

/* Data is in a slot of a peer's, if we see that. */
void ucch_chunk_here_locked(ucch_peer *peer, const ucch_header *h, const ucch_here *here) {
    int sees = here->bytes <= UCCH_RMA_SLOT && h->slot < UCCH_RMA_SLOTS;
    sees = sees && !ucch_share_open(&peer->share, peer->pid, here->file) && !ucch_share_pin(&peer->share);
    if (sees) {
        int before = ucch_device_enter();
        sees = ucch_chunk_come_locked(peer->at, h, NULL, here->bytes) == UCS_INPROGRESS;
        ucch_device_leave(before);
    }
    if (sees) return;
    ucch_header no = {.what = UCCH_TAKEN, .serial = h->serial, .slot = h->slot, .status = UCCH_FAIL_MEMORY, .other = 1};
    ucch_tell_locked(peer, no, NULL, 0);
}

/* Whether a device of ours reads in slots of a peer's. */
int ucch_staged_reads(const ucch_peer *peer) {
    int reads = 0;
    ucch_lock();
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        const ucch_slot *s = &peer->at->in[i];
        reads |= s->peer == peer && s->state == UCCH_COPYING && s->header.what == UCCH_HERE;
    }
    ucch_unlock();
    return reads;
}

/* How many slots are still on their way to places that somebody waits for by a counter. */
int ucch_rma_landing(ucch_rma *at, int number) {
    int found = 0;
    ucch_lock();
    for (int i = 0; i < UCCH_RMA_SLOTS; i++)
        found += at->in[i].state == UCCH_COPYING && at->in[i].header.other == (uint64_t)number + 1;
    ucch_unlock();
    return found;
}

/* Look after what is on its way to its places: 2 if some is there, 1 if some is under way. */
int ucch_staged_poll_locked(ucch_rma *at) {
    int found = 0;
    for (int i = 0; i < UCCH_RMA_SLOTS; i++) {
        ucch_slot *s = &at->in[i];
        reclaim_locked(s);
        if (s->state != UCCH_FREE && !found) found = 1;
        if (s->state != UCCH_COPYING) continue;
        int done = copied(s);
        if (!done) continue;
        taken_locked(s, done < 0 ? done : 0);
        found = 2;
    }
    return found;
}
