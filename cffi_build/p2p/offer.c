/* Offers: long messages on device memory, matched by libucp like all others, whose data goes by lanes (lane.c).
 *
 * The sender sends a note with the length and a serial number, then an offer: a message without data under the user's
 * tag with UCCH_OFFER_BIT. The receiver that matches the offer takes the note, which came first, and answers under the
 * serial number: with the data's number in the lane, the order in which both ranks move messages, or with the reason
 * why it takes no data. A probe takes the note, and keeps it for the receive. */
#include <stdlib.h>
#include <string.h>

#include "p2p/p2p.h"

/* Bits of a tag that distinguish notes and answers from messages of users. */
#define NOTE_TAG ((uint64_t)3 << UCCH_OFFER_BIT)
#define ANSWER_TAG (NOTE_TAG | OWN_TAG >> 1)
#define USER_BITS (OWN_TAG - 1)

/* Notes of offers that a probe has found. */
typedef struct note {
    ucch_offer offer;
    struct note *next;
} note;
static note *notes;

static int source_of(uint64_t code) { return (int)((code & USER_BITS) >> UCCH_SOURCE_BIT); }

static uint64_t answer_tag(uint64_t code, int from, uint64_t serial) {
    return ((code & ~USER_BITS) | ANSWER_TAG | (uint64_t)from << UCCH_SOURCE_BIT) + serial;
}

/* ---- notes and answers ---- */

static void note_sent(void *request, ucs_status_t status, void *data) {
    (void)status;
    ucp_request_free(request);
    free(data);
}

/* Send a copy of a few bytes. Returns 0 or a failure. */
static int send_bytes_locked(ucp_ep_h ep, const void *what, size_t bytes, uint64_t tag) {
    char *copy = malloc(bytes + 1);
    if (!copy) return UCCH_FAIL_MEMORY;
    if (bytes) memcpy(copy, what, bytes);
    ucp_request_param_t p = ucch_ucp_params(note_sent, copy, UCS_MEMORY_TYPE_HOST);
    void *request = ucp_tag_send_nbx(ep, copy, bytes, tag, &p);
    if (!request || IS_STATUS(request)) free(copy);
    return STATUS_OF(request);
}

static int answer_locked(ucch_lanes *lanes, const ucch_offer *offer, ucch_answer answer) {
    ucp_ep_h ep = lanes->peers[source_of(offer->code)].ep;
    uint64_t tag = answer_tag(offer->code, lanes->rank, offer->serial);
    return ep ? send_bytes_locked(ep, &answer, sizeof(answer), tag) : UCCH_FAIL_PEER;
}

/* Tell a sender that its data will not be received. */
static void refuse_locked(ucch_lanes *lanes, const ucch_offer *offer) {
    answer_locked(lanes, offer, (ucch_answer){UCCH_FAIL_CANCELLED, 0});
}

/* Find the note of the oldest offer with this tag; `take` removes it. Returns whether there is one. */
static int note_of_locked(ucp_worker_h worker, uint64_t code, int take, ucch_offer *found) {
    note **at = &notes;
    while (*at && (*at)->offer.code != code)
        at = &(*at)->next;
    if (!*at) {
        ucp_tag_recv_info_t info;
        ucp_tag_message_h matched = ucp_tag_probe_nb(worker, code | NOTE_TAG, ~(uint64_t)0, 1, &info);
        note *n = matched ? calloc(1, sizeof(*n)) : NULL;
        if (!n) return 0;
        /* the note has arrived whole; if not, its memory is leaked, as libucp still writes to it */
        ucp_request_param_t p = {0};
        if (ucp_tag_msg_recv_nbx(worker, &n->offer, sizeof(n->offer), matched, &p)) return 0;
        *at = n;
    }
    note *n = *at;
    *found = n->offer;
    if (!take) return 1;
    *at = n->next;
    free(n);
    return 1;
}

static int is_offer(const ucp_tag_recv_info_t *info) {
    return (info->sender_tag & NOTE_TAG) == UCCH_OFFER_TAG && !info->length;
}

/* ---- data ---- */

/* Set the memory of a message whose data may go by lanes. Returns 0 or a failure. */
int ucch_message_lanes(ucch_message *m, ucch_lanes *lanes, void *data, size_t bytes, int by_host) {
    if (!m->lane_message) m->lane_message = ucch_lane_message_new();
    if (!m->lane_message) return UCCH_FAIL_MEMORY;
    m->lanes = lanes;
    m->data = data;
    m->room = bytes;
    m->by_host = by_host;
    return 0;
}

/* Status of a send whose data is not taken: success if the receive was cancelled or too short, which is an error for
 * the receiver only. */
static int failure_of(int answer) {
    if (!answer || answer == UCCH_FAIL_TRUNCATED || answer == UCCH_FAIL_CANCELLED) return 0;
    return answer == UCCH_FAIL_BROKEN ? answer : UCCH_FAIL_REFUSED;
}

/* The receiver has answered. The data is sent even if the sender's timeout has passed: its message has been
 * received. */
static void answered(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    ucch_message *m = data;
    (void)info;
    ucp_request_free(request);
    m->request = NULL;
    int failure = status ? status : failure_of(m->answer.status);
    uint32_t number = m->answer.number;
    if (!status && !m->answer.status)
        failure = ucch_lane_message_move_locked(m->lanes, m->lane_message, m->start.dest, 0, m->data, m->start.bytes,
                                                &number);
    m->moving = !status && !m->answer.status && !failure;
    ucch_op_called_back_locked(&m->op, !m->moving);
    if (!m->moving) ucch_message_end_locked(m, failure);
}

/* Send the offer of an active message. Returns 0, or a failure that has ended it. */
int ucch_offer_send_locked(ucch_message *m) {
    static uint64_t serials;
    const ucch_start *s = &m->start;
    ucch_offer offer = {s->tag | UCCH_OFFER_TAG, s->bytes, serials = serials % USER_TAG + 1};
    ucp_request_param_t p = ucch_ucp_params(answered, m, UCS_MEMORY_TYPE_HOST);
    p.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    int status =
        ucch_message_begun_locked(m, ucp_tag_recv_nbx(m->worker, &m->answer, sizeof(m->answer),
                                                      answer_tag(offer.code, s->dest, offer.serial), ~(uint64_t)0, &p));
    if (!status) status = send_bytes_locked(s->ep, &offer, sizeof(offer), offer.code | NOTE_TAG);
    if (!status) status = send_bytes_locked(s->ep, NULL, 0, offer.code);
    if (!status) return 0;
    ucch_message_end_locked(m, status);
    if (m->request) ucp_request_cancel(m->worker, m->request);
    return status;
}

/* Answer an offer once its lane exists. Returns 1 if its data will come, 0 if there is no lane yet, or a failure. */
static int accept_locked(ucch_message *m) {
    const ucch_offer *offer = &m->start.found;
    int source = source_of(offer->code), how = UCCH_LANE_MESSAGE_RECV | (m->by_host ? UCCH_LANE_MESSAGE_BY_HOST : 0);
    ucch_answer answer = {0, 0};
    if (offer->bytes > m->room)
        answer.status = UCCH_FAIL_TRUNCATED;
    else
        answer.status = ucch_lane_message_move_locked(m->lanes, m->lane_message, source, how, m->data, offer->bytes,
                                                      &answer.number);
    m->matched = answer.status == UCCH_LATER;
    if (m->matched) return 0;
    m->moving = !answer.status;
    int status = answer_locked(m->lanes, offer, answer);
    if (status && m->moving) ucch_lane_message_abandon_locked(m->lane_message, status);
    return answer.status ? answer.status : status ? status : 1;
}

/* A receive has matched an offer. Returns as accept_locked. */
int ucch_offer_taken_locked(ucch_message *m) {
    m->info = (ucp_tag_recv_info_t){m->start.found.code & ~UCCH_OFFER_TAG, m->start.found.bytes};
    m->by_lane = 1;
    ucch_op_called_back_locked(&m->op, 0);
    return accept_locked(m);
}

/* The same for a receive that libucp has completed. UCCH_LATER: it was no offer. */
int ucch_offer_arrived_locked(ucch_message *m) {
    if (!m->lanes || !is_offer(&m->info)) return UCCH_LATER;
    if (!note_of_locked(m->worker, m->info.sender_tag, 1, &m->start.found)) return UCCH_FAIL_LOST;
    return ucch_offer_taken_locked(m);
}

/* Advance the data of a message. Returns whether anything moved. */
int ucch_offer_advance_locked(ucch_message *m) {
    int status = m->matched ? accept_locked(m) : 0;
    if (status < 0) ucch_message_end_locked(m, status);
    const ucch_op *op = ucch_lane_message_op(m->lane_message);
    if (status || !m->moving || op->state == UCCH_ACTIVE) return status != 0;
    m->moving = 0;
    ucch_message_end_locked(m, op->state == UCCH_FAILED ? op->error.status : 0);
    return 1;
}

/* Give up a receive: its data is discarded if it is coming already; its sender is told if it has no answer yet. */
void ucch_offer_abandon_locked(ucch_message *m) {
    if (m->moving) ucch_lane_message_pass_locked(m->lane_message);
    if (m->matched) refuse_locked(m->lanes, &m->start.found);
    m->moving = m->matched = 0;
}

/* ---- probing ---- */

/* Probes that have taken a message out which was not received, in that order. libucp cannot take a message back: if the
 * owner of the probe drops it, the next receive or probe that matches the message has it. */
static ucch_message *taken;

/* Where the list has the first dropped one of these, or ends. */
static ucch_message **find_dropped_locked(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    ucch_message **at = &taken;
    while (*at && !((*at)->is_dropped && (*at)->worker == worker && ((*at)->start.found.code & mask) == tag))
        at = &(*at)->behind;
    return at;
}

/* Take a message over from a probe, or if that is NULL from a dropped one that matches. */
void ucch_claim_locked(ucch_message *m, ucch_message *from) {
    if (!taken || (!from && !(from = *find_dropped_locked(m->worker, m->start.tag, m->start.mask)))) return;
    UCCH_UNLINK(taken, from, behind);
    m->start.found = from->start.found;
    m->start.matched = from->start.matched;
    from->start.matched = NULL;
    if (from->is_dropped) free(from);
}

/* Its owner frees a probe. Returns 1 if it lives on, as it has a message. */
int ucch_probe_dropped(ucch_message *probe) {
    UCCH_LOCKED;
    probe->is_dropped = 1;
    return probe->start.matched != NULL;
}

/* True until the message that a probe has taken out is received or discarded. */
int ucch_has_taken(ucch_message *probe) { return UCCH_LOAD(&probe->start.matched) != NULL; }

/* Look once for a message; `takes`: take it out. Returns whether there is one. */
int ucch_probe(ucch_message *m, ucp_worker_h worker, uint64_t tag, uint64_t mask, int takes) {
    ucch_start *s = &m->start;
    UCCH_LOCKED;
    m->worker = worker;
    *s = (ucch_start){.what = START_PROBE, .tag = tag, .mask = mask, .takes = takes};
    ucch_progress_locked(); /* for everything: the sender may wait for another message of this rank */
    ucp_worker_progress(worker);
    ucch_message **at = find_dropped_locked(m->worker, s->tag, s->mask), *dropped = *at;
    ucp_tag_recv_info_t info = {0, 0};
    if (dropped) {
        s->found = dropped->start.found;
        if (s->takes) {
            s->matched = dropped->start.matched;
            m->behind = dropped->behind;
            *at = m; /* in its place: messages stay in order */
            dropped->start.matched = NULL;
            free(dropped);
        }
    } else {
        ucp_tag_message_h found = ucp_tag_probe_nb(m->worker, s->tag, s->mask, s->takes, &info);
        if (!found) return 0;
        s->found = (ucch_offer){info.sender_tag, info.length, 0};
        if (is_offer(&info)) note_of_locked(m->worker, info.sender_tag, s->takes, &s->found);
        if (s->takes) {
            s->matched = found;
            UCCH_APPEND(taken, m, behind);
        }
    }
    m->info = (ucp_tag_recv_info_t){s->found.code, s->found.bytes};
    return 1;
}

/* Receive a message and discard it, so that its sender does not wait for ever. */
void ucch_discard_locked(ucp_worker_h worker, ucp_tag_message_h matched) {
    ucp_request_param_t p = {0};
    void *request = ucp_tag_msg_recv_nbx(worker, NULL, 0, matched, &p);
    if (request && !IS_STATUS(request)) ucp_request_free(request);
}

/* Discard messages that probes have taken out; with `lanes` offers, whose senders are told. */
static void discard_taken_locked(ucp_worker_h worker, ucch_lanes *lanes, uint64_t tag, uint64_t mask) {
    for (ucch_message **at = &taken, *each; (each = *at) != NULL;) {
        const ucch_offer *found = &each->start.found;
        if (each->worker != worker || (found->code & ~UCCH_OFFER_TAG & mask) != tag || (lanes && !found->serial)) {
            at = &each->behind;
            continue;
        }
        *at = each->behind;
        ucch_discard_locked(worker, each->start.matched);
        if (lanes) refuse_locked(lanes, found);
        each->start.matched = NULL;
        if (each->is_dropped) free(each);
    }
}

/* Discard messages that have arrived with such tags and were never received. Returns their number. */
int ucch_discard_all(ucp_worker_h worker, uint64_t tag, uint64_t mask) {
    ucp_tag_recv_info_t info;
    ucp_tag_message_h matched;
    int n = 0;
    UCCH_LOCKED;
    discard_taken_locked(worker, NULL, tag, mask);
    ucp_worker_progress(worker);
    for (; (matched = ucp_tag_probe_nb(worker, tag, mask, 1, &info)) != NULL; n++)
        ucch_discard_locked(worker, matched);
    ucp_worker_progress(worker); /* lets the senders' requests complete */
    return n;
}

/* The same for offers. Returns -1, or a rank whose endpoint is missing (ucch_lanes_reach). */
int ucch_offers_discard(ucp_worker_h worker, ucch_lanes *lanes, uint64_t tag, uint64_t mask) {
    ucp_tag_recv_info_t info;
    ucp_tag_message_h matched;
    ucch_offer offer;
    UCCH_LOCKED;
    discard_taken_locked(worker, lanes, tag, mask);
    ucp_worker_progress(worker);
    while (ucp_tag_probe_nb(worker, tag | UCCH_OFFER_TAG, mask | NOTE_TAG, 0, &info)) {
        int source = source_of(info.sender_tag);
        if (!lanes->peers[source].ep) return source;
        matched = ucp_tag_probe_nb(worker, info.sender_tag, ~(uint64_t)0, 1, &info);
        ucch_discard_locked(worker, matched);
        if (note_of_locked(worker, info.sender_tag, 1, &offer)) refuse_locked(lanes, &offer);
    }
    return -1;
}
