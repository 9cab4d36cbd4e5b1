/* Lanes of a communicator: creation at first use, and their end (lane.c moves their messages).
 *
 * A lane needs pinned memory, a stream and events, which may block in the driver, so it is made without the engine's
 * lock. The lane for a message that libucp has just matched, whose sender is known only then, is made by a thread. */
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

/* Give a lane a stream, and make its events. Returns 0 or a failure. Where streams wait for messages none is made, and
 * no memory is allocated: both could wait for streams that wait for messages of this lane. */
static int make_streams(ucch_lane *l) {
    const device_ops *ops = ucch_bound_ops();
    ucch_counter lines = ucch_channels_lines(l->channels, l->peer, 2 * l->is_matched + l->is_recv, &l->arrived);
    l->lines = (ucch_lane_line *)lines.at;
    l->lines_seen = lines.seen;
    l->kernel = ucch_kernel_of(&(ucch_task){.kind = UCCH_LANE_COPY});
    if (!l->kernel) return UCCH_FAIL_DEVICE;
    l->shares = ucch_may_hold() && !ucch_stream_spare(&l->stream) && (l->stream = ucch_stream_common());
    int status = l->stream ? 0 : ucch_stream_new(&l->stream);
    l->moved_by = l->stream;
    for (int i = 0; i < UCCH_LANE_DEPTH && !status; i++) {
        status = ucch_device_fail(ops->event_new(&l->entered[i]), "event");
        if (!status) status = ucch_device_fail(ops->event_new(&l->done[i]), "event");
    }
    return status;
}

/* Drop a reference: of a message, or the lane's own. */
void ucch_lane_unref(ucch_lane *l) {
    if (__atomic_sub_fetch(&l->refs, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&l->turn);
    free(l);
}

static void drop(ucch_lane *l) {
    const device_ops *ops = ucch_bound_ops();
    if (!l->shares) ucch_stream_free(l->stream);
    for (int i = 0; i < UCCH_LANE_DEPTH; i++) {
        if (l->entered[i]) ops->event_free(l->entered[i]);
        if (l->done[i]) ops->event_free(l->done[i]);
    }
    l->closed = 1;
    ucch_lane_unref(l);
}

/* Returns NULL with the reason in `status`. */
static ucch_lane *make(ucch_lanes *all, int peer, int is_recv, int is_matched, int *status) {
    int ring = is_matched ? MATCHED_LANE_RING : SHORT_LANE_RING;
    *status = ucch_channels_ring(all->channels, peer, is_recv, ring);
    ucch_lane *l = *status ? NULL : calloc(1, sizeof(*l));
    if (!l) {
        *status = *status ? *status : UCCH_FAIL_MEMORY;
        return NULL;
    }
    pthread_mutex_init(&l->turn, NULL);
    l->channels = all->channels;
    l->peer = peer;
    l->is_recv = is_recv;
    l->is_matched = is_matched;
    l->last = &l->waiting;
    l->refs = 1;
    l->longs = ucch_channels_at(l->channels, peer, is_recv, is_matched ? MATCHED_LANE_RING : LONG_LANE_RING);
    /* matched messages have no header, and another thread may be making the other ring */
    l->shorts = is_matched ? l->longs : ucch_channels_at(l->channels, peer, is_recv, SHORT_LANE_RING);
    *status = make_streams(l);
    if (!*status) return l;
    drop(l);
    return NULL;
}

static ucch_lane **place_of(ucch_lanes *all, int peer, int is_recv, int is_matched) {
    return &all->each[UCCH_LANES * peer + 2 * is_matched + is_recv];
}

/* The lane to or from a rank, made at its first use; NULL with the reason in `status`. Without the engine's lock, as
 * the driver may block. */
ucch_lane *ucch_lane_with(ucch_lanes *all, int peer, int is_recv, int is_matched, int *status) {
    ucch_lane **at = place_of(all, peer, is_recv, is_matched), *l = UCCH_LOAD(at);
    if (l) return l;
    ucch_take(&all->making, UCCH_AT_MAKING);
    l = *at ? *at : make(all, peer, is_recv, is_matched, status);
    UCCH_STORE(at, l);
    ucch_give(&all->making, UCCH_AT_MAKING);
    return l;
}

/* The lane fails: it carries nothing any more. */
void ucch_lane_fail(ucch_lane *l, int status) {
    if (!l->failed) l->failed = status;
    UCCH_STORE(&l->lines->done, 1);
}

/* ---- lanes of messages matched by libucp ---- */

/* Set the endpoint for answers to a rank, and its slot on the board. */
void ucch_lanes_reach(ucch_lanes *all, int peer, int slot, ucp_ep_h ep) {
    UCCH_LOCKED;
    all->peers[peer].slot = slot;
    all->peers[peer].ep = ep;
}

/* Make the lane for such messages to a rank. Returns 0 or a failure. */
int ucch_lanes_ready(ucch_lanes *all, int peer) {
    int status = 0;
    UCCH_ON_DEVICE;
    ucch_lane_with(all, peer, 0, 1, &status);
    return status;
}

static void *maker_main(void *data) {
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

/* Have a thread make the lane from a rank whose message has been matched. Returns UCCH_LATER or a failure. */
static int start_maker_locked(ucch_lanes *all, ucch_lane_peer *peer) {
    pthread_t maker;
    int known = peer->making;
    if (known != UCCH_LATER) peer->making = 0; /* the next message tries again */
    if (known) return known;
    peer->of = all;
    if (pthread_create(&maker, NULL, maker_main, peer)) return UCCH_FAIL_MEMORY;
    pthread_detach(maker);
    peer->making = UCCH_LATER;
    __atomic_add_fetch(&all->refs, 1, __ATOMIC_ACQ_REL);
    return UCCH_LATER;
}

/* The lane of matched messages, with the engine's lock held. NULL with UCCH_LATER in `status` while it is being made,
 * or with a failure. */
ucch_lane *ucch_lane_matched_locked(ucch_lanes *all, int peer, int is_recv, int *status) {
    *status = UCCH_FAIL_BROKEN;
    if (!all->each || all->is_stopped) return NULL;
    ucch_lane *l = UCCH_LOAD(place_of(all, peer, is_recv, 1));
    if (l && l->failed) return NULL;
    *status = l ? 0 : start_maker_locked(all, &all->peers[peer]);
    return l;
}

/* ---- the end of lanes ---- */

/* True if the lane's kernels have ended: its stream has passed the last one. */
static int idle(const ucch_lane *l) {
    int passed = 1;
    if (l->begun) ucch_bound_ops()->event_done(l->done[l->begun % UCCH_LANE_DEPTH], &passed);
    return passed;
}

/* Discard messages that have arrived and will not be received, before the communicator ends: their senders must not
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

/* Release streams that wait for messages that will not come, before the communicator ends. */
void ucch_lanes_stop(ucch_lanes *all) {
    UCCH_LOCKED;
    all->is_stopped = 1;
    for (int i = 0; i < UCCH_LANES * all->size; i++)
        if (all->each[i]) ucch_lane_fail(all->each[i], UCCH_FAIL_BROKEN);
}

/* True if nothing of the lanes is under way. */
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

/* Free the lanes' streams and events; nothing is under way. */
void ucch_lanes_close(ucch_lanes *all) {
    UCCH_ON_DEVICE;
    for (int i = 0; i < UCCH_LANES * all->size; i++)
        if (all->each[i]) drop(all->each[i]);
    all->each = NULL;
}

/* Freed when no message refers to it and no thread makes a lane. */
void ucch_lanes_free(ucch_lanes *all) {
    if (!all || __atomic_sub_fetch(&all->refs, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&all->making);
    free(all);
}
