/* One-sided transfers over UCP. What was put and got is complete, here and there, when a flush of its endpoint is. */
#include "p2p/message.h"

/* A request that is freed at once is released by libucp when it is complete. */
static int forget_locked(void *request) {
    if (IS_STATUS(request)) return (int)(intptr_t)request;
    if (request) ucp_request_free(request);
    return 0;
}

int ucch_put(ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t address, ucp_rkey_h rkey, int mem_type) {
    ucp_request_param_t p = {
        .op_attr_mask = ATTR_DATATYPE | ATTR_MEMORY_TYPE, .datatype = BYTES, .memory_type = mem_type};
    ucch_lock();
    int status = forget_locked(ucp_put_nbx(ep, buffer, bytes, address, rkey, &p));
    ucch_unlock();
    return status;
}

int ucch_get(ucp_ep_h ep, void *buffer, size_t bytes, uint64_t address, ucp_rkey_h rkey, int mem_type) {
    ucp_request_param_t p = {
        .op_attr_mask = ATTR_DATATYPE | ATTR_MEMORY_TYPE, .datatype = BYTES, .memory_type = mem_type};
    ucch_lock();
    int status = forget_locked(ucp_get_nbx(ep, buffer, bytes, address, rkey, &p));
    ucch_unlock();
    return status;
}

/* To be waited for like a message. */
int ucch_flush(ucch_message *m, ucp_ep_h ep, double timeout) {
    if (m->op.state == UCCH_ACTIVE) return UCCH_FAIL_BUSY;
    ucp_request_param_t p = ucch_message_params(m, ucch_message_sent, 0);
    p.op_attr_mask = ATTR_CALLBACK | ATTR_USER_DATA;
    m->request = NULL;
    m->left = 0;
    ucch_lock();
    ucch_op_begin_locked(&m->op, timeout);
    int status = ucch_message_begun_locked(m, ucp_ep_flush_nbx(ep, &p));
    ucch_unlock();
    return status;
}

ucp_rkey_h ucch_rkey_new(ucp_ep_h ep, const void *packed, int *status) {
    ucp_rkey_h rkey = NULL;
    ucch_lock();
    *status = ucp_ep_rkey_unpack(ep, packed, &rkey);
    ucch_unlock();
    return rkey;
}

void ucch_rkey_free(ucp_rkey_h rkey) {
    ucch_lock();
    ucp_rkey_destroy(rkey);
    ucch_unlock();
}
