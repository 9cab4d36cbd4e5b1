/* The receiver's side of messages that a stream takes (stream_copy.c): before they come, or once they have. */
#include "p2p/pipe.h"

/* Nobody asks any more whether a stream is done with it. */
void ucch_slip_drop(ucch_transfer *t) {
    if (t->slip)
        ucch_slip_close_locked(t->slip);
    t->slip = NULL;
}

/* The data is there without the stream's help: it may go on. */
void ucch_slip_release(ucch_transfer *t) {
    if (t->slip)
        ucch_slip_settle(t->slip, UCCH_NOWHERE);
    ucch_slip_drop(t);
}

/* Receive a message that was queued: from now on it waits for a stream that takes it. */
void ucch_transfer_await_locked(ucch_transfer *t, void *buffer, int on_device, const ucch_token *token) {
    ucch_transfer_begin(t, AWAITED, token, buffer, on_device);
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
}

/* Let a stream take a message, one that has come or one that has not: 0, or a failure, which leaves it as it was. */
int ucch_transfer_expect_locked(ucch_transfer *t, const ucch_expected *e, void *stream) {
    int early = t->phase != AWAITED;
    ucch_slip_drop(t);
    if (early && !ucch_may_hold())
        return UCCH_FAIL_MEMORY;
    int status = ucch_take_ready_locked(t, e, stream, early);
    if (status)
        return status;
    if (t->phase == AWAITED) {
        t->phase = TAKING;
        ucch_slip_settle(t->slip, t->where);
        return 0;
    }
    t->phase = EXPECTED;
    t->buffer = e->buffer;
    t->run = NULL;
    t->on_device = 1;
    t->asked = t->done = 0;
    t->left = ENDED;
    return 0;
}

/* The token of a message that a stream waits for has come: 0, or a failure. */
int ucch_transfer_met_locked(ucch_transfer *t, size_t room, const ucch_token *token) {
    if (!token->key || !ucch_window_offers(token->key))
        return UCCH_FAIL_PEER;
    if (token->bytes > room) {
        ucch_token_decline_locked(token);
        return UCCH_FAIL_TRUNCATED;
    }
    ucch_transfer_begin(t, token->run ? TAKING : RECEIVING, token, t->buffer, 1);
    __atomic_store_n(&t->at->ready, 1, __ATOMIC_RELEASE);
    if (token->run && ucch_slip_settle(t->slip, token->run) != token->run)
        return UCCH_FAIL_MISMATCH; /* another message of the tag was taken for it */
    return 0;
}

/* Likewise, as plain data, which the host has put at `landing`. */
int ucch_transfer_landed_locked(ucch_transfer *t, const void *landing, size_t bytes) {
    t->phase = LANDED;
    t->asked = 1;
    int status = ucch_work_copy(UCCH_TO_DEVICE, t->buffer, landing, bytes);
    return status ? status : ucch_work_mark(UCCH_TO_DEVICE, &t->event[0]);
}

/* No stream of the caller's takes it: one of ours does, behind which others wait, once its data comes. */
static int take_ourselves(ucch_transfer *t) {
    ucch_expected e = {t->sender, 0, 0, t->buffer, t->bytes};
    if (!ucch_run_begun(t->run) || ucch_transfer_expect_locked(t, &e, UCCH_OURS))
        return 0;
    return ucch_take(t, &e, UCCH_OURS);
}

/* While a stream does the receiver's part: as below. */
int ucch_take_on(ucch_transfer *t) {
    if (t->phase == AWAITED && t->ours)
        return take_ourselves(t);
    if (t->phase != TAKING || !ucch_slip_gone(t->slip))
        return 0;
    ucch_slip_drop(t);
    t->phase = ENDED;
    return ucch_run_spoilt(t->run) ? UCCH_FAIL_PEER : 1;
}

int ucch_land_on(ucch_transfer *t) {
    int status = ucch_transfer_collect(t);
    if (status || t->done < t->asked)
        return status;
    ucch_slip_release(t);
    t->phase = ENDED;
    return 1;
}

/* No stream of the caller's takes it after all. */
void ucch_transfer_by_host_locked(ucch_transfer *t) {
    t->ours = t->phase == AWAITED;
}
