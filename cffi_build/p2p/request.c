/* Messages as libucp's requests: the result of a request. */
#include "p2p/p2p.h"

void ucch_message_end_locked(ucch_message *m, int status) {
    if (m->op.state != UCCH_ACTIVE) return;
    if (status == UCS_ERR_MESSAGE_TRUNCATED)
        status = UCCH_FAIL_TRUNCATED;
    else if (status == UCS_ERR_CANCELED)
        status = m->left ? UCCH_FAIL_PEER : UCCH_FAIL_CANCELLED;
    uint64_t from = m->info.sender_tag;
    if (!status && m->op.record && (m->about.peer < 0 || m->about.tag < 0))
        ucch_flight_from(m->op.record, (int)((from & (OWN_TAG - 1)) >> UCCH_SOURCE_BIT), (int)(from & USER_TAG));
    ucch_op_end_locked(&m->op, status, -1, -1);
}

/* libucp has accepted a message or completed it at once. Returns 0 or the failure that has ended it. */
int ucch_message_begun_locked(ucch_message *m, void *p) {
    if (p == NULL || IS_STATUS(p))
        ucch_message_end_locked(m, STATUS_OF(p));
    else if (m->op.state == UCCH_ACTIVE)
        m->request = p;
    return m->op.state == UCCH_FAILED ? m->op.error.status : 0;
}
