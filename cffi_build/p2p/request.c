/* Messages as libucp's requests: parameters, callbacks and what a request has come to; and endpoints. */
#include <sched.h>

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

void ucch_message_sent(void *request, ucs_status_t status, void *data) {
    ucp_request_free(request);
    ucch_message *m = data;
    m->request = NULL;
    ucch_message_end_locked(m, status);
}

/* libucp has taken a message, or ended it at once: 0, or the failure that has. */
int ucch_message_begun_locked(ucch_message *m, void *p) {
    if (p == NULL || IS_STATUS(p))
        ucch_message_end_locked(m, STATUS_OF(p));
    else if (m->op.state == UCCH_ACTIVE)
        m->request = p;
    return m->op.state == UCCH_FAILED ? m->op.error.status : 0;
}

/* ---- endpoints ---- */

ucp_ep_h ucch_ep_new(ucp_worker_h worker, const void *address, int *status) {
    ucp_ep_h ep = NULL;
    UCCH_LOCKED;
    *status = ucch_ucp_connect(worker, address, NULL, NULL, &ep);
    return *status ? NULL : ep;
}

int ucch_ep_close(ucp_worker_h worker, ucp_ep_h ep, double timeout) {
    ucp_request_param_t p = {0};
    double until = ucch_now() + timeout;
    ucch_lock();
    void *request = ucp_ep_close_nbx(ep, &p);
    int status = STATUS_OF(request);
    if (request && !status) {
        while ((status = ucp_request_check_status(request)) == 1 && ucch_now() < until) {
            ucp_worker_progress(worker);
            ucch_unlock();
            sched_yield();
            ucch_lock();
        }
        ucp_request_free(request);
    }
    ucch_unlock();
    return status;
}
