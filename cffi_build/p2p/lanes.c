/* Lanes of a communicator: how they are made, when they are first used, and how they end (lane.c has what they do).
 *
 * A lane needs pinned memory, a stream and events, for which a driver may have a thread wait: they are made without the
 * engine's lock. For a message that libucp has just matched, and whose sender is known only then, a thread does that.
 */
#include "p2p/p2p.h"

#include <stdlib.h>

/* ---- making lanes ---- */

ucch_lanes *ucch_lanes_new(ucch_channels *channels, ucch_board *board) {
    size_t n = (size_t)channels->size;
    ucch_lanes *all = calloc(1, sizeof(*all) + n * (sizeof(all->peers[0]) + UCCH_LANES * sizeof(ucch_lane *)));
    if (!all) return NULL;
    all->each = (ucch_lane **)(all->peers + n);
    pthread_mutex_init(&all->making, NULL);
    all->channels = channels;
    all->board = board;
    all->rank = channels->rank;
    all->size = channels->size;
    all->refs = 1;
    return all;
}

/* Have all that a lane needs of the device: 0, or a failure. Nothing is allocated: that could wait for streams which
 * wait for what this lane is to send. */
static int equip(ucch_lane *l) {
    const device_ops *ops = ucch_bound_ops();
    ucch_counter lines = ucch_channels_lines(l->channels, l->peer, 2 * l->is_matched + l->comes, &l->arrived);
    l->lines = (ucch_lane_line *)lines.at;
    l->lines_seen = lines.seen;
    l->kernel = ucch_kernel_of(&(ucch_task){.kind = UCCH_LANE_COPY});
    if (!l->kernel) return UCCH_FAIL_DEVICE;
    int status = ucch_device_fail(ops->stream_new(&l->stream), "stream");
    l->moved_by = l->stream;
    for (int i = 0; i < UCCH_LANE_DEPTH && !status; i++) {
        status = ucch_device_fail(ops->event_new(&l->entered[i]), "event");
        if (!status) status = ucch_device_fail(ops->event_new(&l->done[i]), "event");
    }
    return status;
}

/* A message has gone, or the lane itself. */
void ucch_lane_let_go(ucch_lane *l) {
    if (__atomic_sub_fetch(&l->refs, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&l->turn);
    free(l);
}

static void drop(ucch_lane *l) {
    const device_ops *ops = ucch_bound_ops();
    if (l->stream) ops->stream_free(l->stream);
    for (int i = 0; i < UCCH_LANE_DEPTH; i++) {
        if (l->entered[i]) ops->event_free(l->entered[i]);
        if (l->done[i]) ops->event_free(l->done[i]);
    }
    l->closed = 1;
    ucch_lane_let_go(l);
}

/* NULL and why not. */
static ucch_lane *make(ucch_lanes *all, int peer, int comes, int is_matched, int *status) {
    int ring = is_matched ? MATCHED_LANE_RING : SHORT_LANE_RING;
    *status = ucch_channels_ring(all->channels, peer, comes, ring);
    ucch_lane *l = *status ? NULL : calloc(1, sizeof(*l));
    if (!l) {
        *status = *status ? *status : UCCH_FAIL_MEMORY;
        return NULL;
    }
    pthread_mutex_init(&l->turn, NULL);
    l->channels = all->channels;
    l->peer = peer;
    l->comes = comes;
    l->is_matched = is_matched;
    l->last = &l->waiting;
    l->refs = 1;
    l->longs = ucch_channels_at(l->channels, peer, comes, is_matched ? MATCHED_LANE_RING : LONG_LANE_RING);
    /* What is matched has no header of ours, and another thread may be making that ring. */
    l->shorts = is_matched ? l->longs : ucch_channels_at(l->channels, peer, comes, SHORT_LANE_RING);
    *status = equip(l);
    if (!*status) return l;
    drop(l);
    return NULL;
}

static ucch_lane **place_of(ucch_lanes *all, int peer, int comes, int is_matched) {
    return &all->each[UCCH_LANES * peer + 2 * is_matched + comes];
}

/* The lane to or from a rank, made at its first use; NULL and why not. Without the engine's lock: to make one waits for
 * the driver. */
ucch_lane *ucch_lane_with(ucch_lanes *all, int peer, int comes, int is_matched, int *status) {
    ucch_lane **at = place_of(all, peer, comes, is_matched), *l = UCCH_LOAD(at);
    if (l) return l;
    pthread_mutex_lock(&all->making);
    l = *at ? *at : make(all, peer, comes, is_matched, status);
    UCCH_STORE(at, l);
    pthread_mutex_unlock(&all->making);
    return l;
}

/* It carries nothing any more. */
void ucch_lane_fail(ucch_lane *l, int status) {
    if (!l->failed) l->failed = status;
    UCCH_STORE(&l->lines->done, 1);
}

/* ---- lanes of messages that libucp has matched ---- */

/* How to tell a rank of this host, or another, what a receiver has matched. */
void ucch_lanes_reach(ucch_lanes *all, int peer, int slot, ucp_ep_h ep) {
    UCCH_LOCKED;
    all->peers[peer].slot = slot;
    all->peers[peer].ep = ep;
}

/* Have the lane for such messages to a rank: 0, or a failure. */
int ucch_lanes_ready(ucch_lanes *all, int peer) {
    int status = 0;
    UCCH_ON_DEVICE;
    ucch_lane_with(all, peer, 0, 1, &status);
    return status;
}

static void *make_ordered(void *data) {
    ucch_lane_peer *peer = data;
    ucch_lanes *all = peer->of;
    int status = 0, before = ucch_device_enter();
    ucch_lane_with(all, (int)(peer - all->peers), 1, 1, &status);
    ucch_device_leave(before);
    ucch_lock();
    peer->making = status;
    ucch_wake_locked();
    ucch_unlock();
    ucch_lanes_free(all);
    return NULL;
}

/* Have a thread make the lane from a rank that is known only now, as a message of its is matched: UCCH_LATER, or a
 * failure. */
static int order_locked(ucch_lanes *all, ucch_lane_peer *peer) {
    pthread_t maker;
    int known = peer->making;
    if (known != UCCH_LATER) peer->making = 0; /* the next message tries again */
    if (known) return known;
    peer->of = all;
    if (pthread_create(&maker, NULL, make_ordered, peer)) return UCCH_FAIL_MEMORY;
    pthread_detach(maker);
    peer->making = UCCH_LATER;
    __atomic_add_fetch(&all->refs, 1, __ATOMIC_ACQ_REL);
    return UCCH_LATER;
}

/* The lane of matched messages, for those that have the engine's lock: NULL, and UCCH_LATER while it is made, or a
 * failure. */
ucch_lane *ucch_lane_matched_locked(ucch_lanes *all, int peer, int comes, int *status) {
    *status = UCCH_FAIL_BROKEN;
    if (!all->each || all->is_stopped) return NULL;
    ucch_lane *l = UCCH_LOAD(place_of(all, peer, comes, 1));
    if (l && l->failed) return NULL;
    *status = l ? 0 : order_locked(all, &all->peers[peer]);
    return l;
}

/* ---- the end of lanes ---- */

/* True if our kernels have ended: the last one that was begun has said so, or been passed by its stream. */
static int idle(const ucch_lane *l) {
    int passed = 1;
    if (l->begun) ucch_bound_ops()->event_done(l->done[l->begun % UCCH_LANE_DEPTH], &passed);
    return passed;
}

/* Pass over messages that have come and will not be received, as the communicator is about to end: its senders must not
 * wait. */
void ucch_lanes_discard(ucch_lanes *all) {
    UCCH_LOCKED;
    for (int i = 0; i < all->size; i++) {
        ucch_lane *l = all->each[UCCH_LANES * i + 1];
        int has = i != all->rank && !(l && l->users);
        for (int ring = SHORT_LANE_RING; has && ring <= LONG_LANE_RING; ring++) {
            const ucch_channel *way = ucch_channels_at(all->channels, i, 1, ring);
            uint32_t there = UCCH_LOAD(way->published.at);
            UCCH_STORE(way->consumed.at, there);
            if (l && ring == SHORT_LANE_RING) l->posted = there;
        }
    }
}

/* Let streams go on that wait for what will not come, as the communicator is about to end. */
void ucch_lanes_stop(ucch_lanes *all) {
    UCCH_LOCKED;
    all->is_stopped = 1;
    for (int i = 0; i < UCCH_LANES * all->size; i++)
        if (all->each[i]) ucch_lane_fail(all->each[i], UCCH_FAIL_BROKEN);
}

/* True if nothing of them is under way any more. */
int ucch_lanes_idle(ucch_lanes *all) {
    UCCH_ON_DEVICE;
    UCCH_LOCKED;
    int quiet = UCCH_LOAD(&all->refs) == 1;
    for (int i = 0; i < UCCH_LANES * all->size; i++) {
        const ucch_lane *l = all->each[i];
        quiet &= !l || (!l->users && idle(l));
    }
    return quiet;
}

/* Nothing goes by them any more, and nothing is under way. */
void ucch_lanes_close(ucch_lanes *all) {
    UCCH_ON_DEVICE;
    for (int i = 0; i < UCCH_LANES * all->size; i++)
        if (all->each[i]) drop(all->each[i]);
    all->each = NULL;
}

/* When no message refers to them any more, nor a thread that makes one. */
void ucch_lanes_free(ucch_lanes *all) {
    if (!all || __atomic_sub_fetch(&all->refs, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&all->making);
    free(all);
}
