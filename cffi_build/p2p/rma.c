/* One-sided transfers over UCP. What was put and got is complete, here and there, when a flush of its endpoint is. */
#include "base/ucch.h"

#define ATTR_DATATYPE 0x8
#define ATTR_MEMORY_TYPE 0x40
#define BYTES 8 /* ucp_dt_make_contig(1) */

/* A request that is freed at once is released by libucp when it is complete. */
static int forget_locked(void *request) {
    if (IS_STATUS(request))
        return (int)(intptr_t)request;
    if (request)
        ucp_request_free(request);
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
    if (ucch_message_op(m)->state == UCCH_ACTIVE)
        return UCCH_FAIL_BUSY;
    ucch_lock();
    int status = ucch_message_flush_locked(m, ep, timeout);
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
