/* Memory of slots, eight in each direction between two processes (staged.c), and how their data gets across.
 *
 * On one host both processes map and pin the sender's slots: its device copies into them and the receiver's device out
 * of them, without a CPU copy. Between hosts wires carry them (net/flow.c) to slots on the receiver's host; on both
 * hosts they are host memory that the devices can access.
 *
 * A direction between hosts is set up by its first transfer. The sender sends MEET with the addresses of its wires, and
 * the receiver, once its slots exist, answers MET with those of its own. Slots are sent in order; each is announced by
 * HERE, so that the receiver expects it and polls. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "rma/rma.h"

#define BYTES (UCCH_RMA_SLOTS * UCCH_RMA_STRIDE)
/* Bits of a direction's numbers in the tag: the sender's and the receiver's. */
#define NUMBER_BITS 24
#define NUMBERS (((uint32_t)1 << NUMBER_BITS) - 1)

/* The next number of a direction, from 1: 0 means that there is none. */
static uint32_t next_number(void) {
    static uint32_t last;
    return last = last % NUMBERS + 1;
}

/* ---- memory ---- */

/* Offset of a slot's data, behind the header for wires. */
size_t ucch_slot_place(uint64_t slot) { return slot % UCCH_RMA_SLOTS * UCCH_RMA_STRIDE + UCCH_FLOW_HEADER; }

/* Allocate this process's memory for slots. Returns 0 or a failure. */
static int make_memory(ucch_mapping **memory) {
    ucch_mapping *m = *memory ? *memory : ucch_mapping_new(0, BYTES);
    if (m && !*memory && posix_fallocate(m->file, 0, (off_t)BYTES)) {
        ucch_mapping_drop(m);
        m = NULL;
    }
    *memory = m;
    return m ? 0 : UCCH_FAIL_MEMORY;
}

/* Map the slots of a peer on this host (same user and namespaces). Returns 0 or a failure. The inode is compared, as
 * the peer may have closed that file and reused its descriptor. */
int ucch_slots_open_locked(ucch_peer *peer, const ucch_here *here) {
    if (!peer->theirs && peer->pid)
        peer->theirs = ucch_mapping_open((uintptr_t)peer, peer->pid, here->file, BYTES); /* key: this peer alone */
    return peer->theirs && peer->theirs->inode == here->inode ? 0 : UCCH_FAIL_MEMORY;
}

/* Pin slots for the bound device, if there is one. Returns 0 or a failure. Pinning waits for no stream. A thread that
 * blocks the driver delays it, and with it the engine, as it delays the copies of slots. */
int ucch_slots_pin_locked(ucch_mapping *memory) {
    char *seen;
    return ucch_bound() < 0 ? 0 : ucch_mapping_pin(memory, 0, BYTES, &seen);
}

static void free_list(ucch_slot *s) {
    if (s->held && s->is_pinned)
        ucch_pool_give(s->held);
    else
        free(s->held);
    s->held = NULL;
}

/* Allocate the list and table of a free slot; pinned if there is a device, which reads the list. Returns 1, or 0 on
 * failure. */
int ucch_slot_list_locked(ucch_slot *s) {
    int pinned = ucch_bound() >= 0;
    size_t pieces = UCCH_RMA_PIECES * sizeof(*s->pieces), bytes = pieces + UCCH_RMA_PIECES * sizeof(*s->table);
    if (s->held && s->is_pinned == pinned) return 1;
    free_list(s);
    s->held = pinned ? ucch_pool_take(1, bytes, NULL, 1) : malloc(bytes);
    if (!s->held) return 0;
    s->is_pinned = pinned;
    s->pieces = (ucch_piece *)s->held;
    s->table = (ucch_place *)(s->held + pieces);
    return 1;
}

/* The slot's copies read or write the region, which is not freed before they have ended. */
void ucch_slot_use_region(ucch_slot *s, ucch_region *region) {
    s->region = region;
    region->users++;
}

void ucch_slot_leave_region(ucch_slot *s) {
    if (s->region) s->region->users--;
    s->region = NULL;
}

/* ---- between hosts ---- */

/* Offer the first `n` wires to peers: the addresses of the sending and receiving one of each, each preceded by its
 * length. Returns 0 or a failure. */
int ucch_rma_reach(ucch_rma *at, int n, const void *addresses, size_t bytes) {
    char *copy = malloc(bytes + 1);
    if (!copy) return UCCH_FAIL_MEMORY;
    memcpy(copy, addresses, bytes);
    UCCH_LOCKED;
    free(at->reach);
    at->reach = copy;
    at->reach_bytes = bytes;
    at->wires = n;
    return 0;
}

/* Key of a process by the address of its first wire: the workers of two processes share the connections of wires, which
 * are never closed. */
static uint64_t hash_of(const char *address, uint32_t bytes) {
    uint64_t key = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < bytes; i++)
        key = (key ^ (unsigned char)address[i]) * 0x100000001b3u;
    return key;
}

/* Connect with the first `n` wires of a peer, whose addresses these are. Returns 0 or a failure. */
static int connect_wires(ucch_peer *peer, int is_recv, int n, const char *said, size_t bytes) {
    for (int i = 0, status; i < 2 * n; i++) {
        uint32_t length;
        if (bytes < sizeof(length)) return UCCH_FAIL_ARGUMENT;
        memcpy(&length, said, sizeof(length));
        said += sizeof(length);
        bytes -= sizeof(length);
        if (length > bytes) return UCCH_FAIL_ARGUMENT;
        if (!i) peer->wired = hash_of(said, length);
        int is_other_end = i % 2 != is_recv; /* our sending wire connects with its receiving one */
        if (is_other_end && (status = ucch_wire_connect(i / 2 * 2 + is_recv, peer->wired, said))) return status;
        said += length;
        bytes -= length;
    }
    return 0;
}

/* Data bytes of a slot: the same number of ranges for each wire. */
static size_t room_for(int wires) {
    int ranges = UCCH_RMA_SLOT / UCCH_WIRE_RANGE;
    return (size_t)(wires < ranges ? ranges / wires * wires : ranges) * UCCH_WIRE_RANGE;
}

/* Have `wires` wires carry slots to a peer, or from it. Returns 0 or a failure. */
static int slot_flow_new(ucch_peer *peer, int is_recv, int wires, uint32_t sender, uint32_t receiver) {
    ucch_slot_flow *c = calloc(1, sizeof(*c));
    if (!c) return UCCH_FAIL_MEMORY;
    ucch_mapping **memory = is_recv ? &peer->theirs : &peer->ours;
    int status = make_memory(memory);
    ucch_slots slots = {.slots = status ? NULL : (*memory)->memory,
                        .stride = UCCH_RMA_STRIDE,
                        .depth = UCCH_RMA_SLOTS,
                        .published = &c->published,
                        .consumed = &c->consumed,
                        .tainted_here = &c->tainted,
                        .tainted_there = &c->tainted_there};
    uint64_t tag = UCCH_WIRE_EXPECTED | (uint64_t)sender << (UCCH_FLOW_SPREAD_BIT + NUMBER_BITS);
    tag |= (uint64_t)receiver << UCCH_FLOW_SPREAD_BIT;
    if (!status) c->flow = ucch_flow_new(&slots, !is_recv, wires, peer->wired, tag);
    if (!c->flow) {
        free(c);
        return status ?: UCCH_FAIL_PEER;
    }
    c->wires = wires;
    c->room = room_for(wires);
    *(is_recv ? &peer->in : &peer->out) = c;
    return 0;
}

/* Returns 1 if data can be sent to the peer, in shared slots or over wires; 0 while that is being set up; or a
 * failure. */
int ucch_carries_locked(ucch_peer *peer) {
    if (peer->pid || peer->out) {
        if (peer->out && ucch_flow_failed(peer->out->flow, UINT64_MAX)) peer->status = UCCH_FAIL_PEER;
        int status = peer->status ? peer->status : make_memory(&peer->ours);
        return status ?: ucch_slots_pin_locked(peer->ours) ?: 1;
    }
    if (!peer->at->wires || peer->lack) return peer->lack ? peer->lack : UCCH_FAIL_PATH;
    if (peer->number) return 0;
    peer->number = next_number();
    ucch_header h = {.what = UCCH_MEET, .count = (uint32_t)peer->at->wires, .slot = peer->number};
    return peer->lack = ucch_tell_locked(peer, h, peer->at->reach, peer->at->reach_bytes);
}

/* MEET: a peer wants to send over wires. */
void ucch_meet_asked_locked(ucch_peer *peer, const ucch_header *h, const void *said, size_t bytes) {
    int n = h->count < (uint32_t)peer->at->wires ? (int)h->count : peer->at->wires;
    uint32_t number = next_number();
    int status = n && !peer->in && h->slot <= NUMBERS ? connect_wires(peer, 1, n, said, bytes) : UCCH_FAIL_PATH;
    if (!status) status = slot_flow_new(peer, 1, n, h->slot, number);
    if (status == UCCH_FAIL_PEER) peer->status = status;
    ucch_header met = {.what = UCCH_MET, .status = status, .count = (uint32_t)n, .slot = number};
    ucch_tell_locked(peer, met, status ? NULL : peer->at->reach, status ? 0 : peer->at->reach_bytes);
}

/* MET: the answer to that. */
void ucch_met_locked(ucch_peer *peer, const ucch_header *h, const void *said, size_t bytes) {
    if (!peer->number || peer->out || peer->lack) return;
    int n = (int)h->count, status = h->status;
    if (!status) status = n > 0 && n <= peer->at->wires && h->slot <= NUMBERS ? 0 : UCCH_FAIL_ARGUMENT;
    if (!status) status = connect_wires(peer, 0, n, said, bytes);
    if (!status) status = slot_flow_new(peer, 0, n, peer->number, h->slot);
    peer->lack = status;
    if (status == UCCH_FAIL_PEER) peer->status = status; /* the next connection has new wires */
}

/* True if this is the next slot, and the receiver has emptied it. */
int ucch_slot_flow_has_room_locked(const ucch_slot_flow *c, uint32_t slot) {
    uint32_t consumed = UCCH_LOAD(&c->consumed);
    return slot == c->next % UCCH_RMA_SLOTS && (uint32_t)c->next - consumed < UCCH_RMA_SLOTS;
}

/* Send a slot if it is next in order. Returns 1, 0 if not yet, or a failure. */
int ucch_slot_flow_send_locked(ucch_slot_flow *c, uint32_t slot, size_t bytes) {
    if (slot != c->published % UCCH_RMA_SLOTS) return 0;
    int status = ucch_flow_failed(c->flow, UINT64_MAX) ?: ucch_flow_expect(c->flow, bytes, bytes, c->published, 0);
    if (!status) UCCH_STORE(&c->published, c->published + 1);
    return status ?: 1;
}

/* The peer has announced its next slot of `bytes` bytes. Returns 0 or a failure. */
int ucch_slot_flow_expect_locked(ucch_slot_flow *c, uint32_t slot, size_t bytes, uint64_t *piece) {
    if (slot != c->next % UCCH_RMA_SLOTS) return UCCH_FAIL_ARGUMENT;
    *piece = c->next++;
    return ucch_flow_expect(c->flow, bytes, bytes, (uint32_t)*piece, 0);
}

/* Returns 1 if the slot has arrived, 0 if not yet, or a failure. */
int ucch_slot_flow_arrived_locked(const ucch_slot_flow *c, uint64_t piece) {
    return ucch_reached(&c->published, (uint32_t)piece + 1) ? 1 : ucch_flow_failed(c->flow, UINT64_MAX);
}

/* The slot has been emptied: the sender may refill it once all earlier ones are, too. */
void ucch_slot_flow_release_locked(ucch_slot_flow *c, uint64_t piece) {
    uint32_t consumed = c->consumed;
    c->taken |= 1u << piece % UCCH_RMA_SLOTS;
    for (uint32_t bit; c->taken & (bit = 1u << consumed % UCCH_RMA_SLOTS); consumed++)
        c->taken &= ~bit;
    if (consumed == c->consumed) return;
    UCCH_STORE(&c->consumed, consumed);
    ucch_flow_wake(c->flow);
}

/* Returns 0, or not 0 if libucp still uses it; it is then kept. */
static int slot_flow_free(ucch_slot_flow *c) {
    int left = c ? ucch_flow_free(c->flow) : 0;
    if (!left) free(c);
    return left;
}

/* Number of wires to a peer, as far as is known; 0: none. */
int ucch_peer_wires(const ucch_peer *peer) {
    UCCH_LOCKED; /* another thread may close the peer */
    return peer->out ? peer->out->wires : peer->pid || peer->lack ? 0 : peer->at->wires;
}

/* ---- the end ---- */

static void free_all_locked(ucch_slot *slots) {
    for (ucch_slot *s = slots; s < slots + UCCH_RMA_SLOTS; s++) {
        if (s->event) ucch_bound_ops()->event_free(s->event);
        s->event = NULL;
        s->state = UCCH_FREE;
        ucch_slot_leave_region(s);
        free_list(s);
    }
}

/* Free the slots of a closed peer, which no device uses any more; without the lock, as the driver may block. Memory
 * that wires may still use is kept. */
void ucch_slots_free(ucch_peer *peer) {
    UCCH_ON_DEVICE;
    ucch_lock();
    ucch_slot_flow *out = peer->out, *in = peer->in;
    ucch_mapping *each[] = {peer->ours, peer->theirs};
    peer->out = peer->in = NULL;
    peer->ours = peer->theirs = NULL;
    peer->looked_after = 0;
    free_all_locked(peer->outward);
    free_all_locked(peer->inward);
    ucch_unlock();
    int left = slot_flow_free(out) | slot_flow_free(in);
    for (int i = 0; i < 2 && !left; i++)
        if (each[i]) ucch_mapping_drop(each[i]);
}
