/* Messages that start when a stream has got somewhere: what is sent is there by then, and what is received may be
 * written. Neither the host nor the stream waits, and no Python runs: the progress thread looks (stream_flag.c).
 *
 * Messages of a communicator do not overtake each other: behind one that still waits other sends to its receiver wait
 * for their turn, and behind a receive all others. */
#include "gpu/device.h"
#include "p2p/message.h"

/* The bits of a tag above a rank and a user's tag: whose communicator it is. */
#define COMMUNICATOR(tag) ((tag) >> (UCCH_TOKEN_BIT + 1))

static ucch_message *first, **last = &first;

static int same_queue(const ucch_message *one, const ucch_message *other) {
    int receives = one->start.what == START_RECV;
    if (receives != (other->start.what == START_RECV))
        return 0;
    if (COMMUNICATOR(one->start.tag) != COMMUNICATOR(other->start.tag))
        return 0;
    return receives ? one->worker == other->worker : one->start.ep == other->start.ep;
}

/* Whether one that waits in the same queue came before. */
static int has_elders(const ucch_message *m) {
    for (const ucch_message *each = first; each && each != m; each = each->behind)
        if (same_queue(each, m))
            return 1;
    return 0;
}

/* The message that is begun next starts when `stream` gets here: 0, or a failure. */
int ucch_message_after(ucch_message *m, void *stream) {
    if (ucch_bound() < 0)
        return UCCH_FAIL_DEVICE;
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucch_lock();
    int before = ucch_device_enter(), status = ucch_gate_enter(&m->gate, stream);
    ucch_device_leave(before);
    ucch_unlock();
    return status;
}

/* Begin a message: now, or when its turn has come. 0, or a failure. */
int ucch_later_begin(ucch_message *m, const ucch_start *start, double timeout) {
    if (m->op.state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucch_lock();
    m->start = *start;
    m->request = NULL;
    m->left = 0;
    m->moved = 0;
    ucch_op_begin_locked(&m->op, timeout);
    m->waits = m->gate.closed || has_elders(m);
    int status = 0;
    if (m->waits) {
        m->behind = NULL;
        *last = m;
        last = &m->behind;
    } else
        status = ucch_message_issue_locked(m);
    ucch_unlock();
    return status;
}

/* It no longer waits: its turn has come, or nobody wants it any more. */
void ucch_later_forget_locked(ucch_message *m) {
    if (!m->waits)
        return;
    for (ucch_message **at = &first; *at; at = &(*at)->behind)
        if (*at == m) {
            *at = m->behind;
            break;
        }
    last = &first;
    while (*last)
        last = &(*last)->behind;
    m->waits = 0;
    ucch_gate_leave_locked(&m->gate);
}

/* Start it if its turn has come: whether something has moved. */
int ucch_later_try_locked(ucch_message *m) {
    int status = has_elders(m) ? 0 : ucch_gate_open_locked(&m->gate);
    if (!status)
        return 0;
    ucch_later_forget_locked(m);
    if (status < 0)
        ucch_message_end_locked(m, status);
    else
        ucch_message_issue_locked(m);
    return 1;
}
