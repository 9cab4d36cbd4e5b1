/* Functions of libucc and libucp as static functions of the same names, which call through a table that loader.c
 * fills. */
#ifndef UCCH_CALLS_H
#define UCCH_CALLS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "abi/ucc_api.h"
#include "abi/ucp_api.h"

#define UCCH_UCC_NO_MESSAGE (-6) /* UCC_ERR_NO_MESSAGE */

/* Values of ucs_status_t, ucs_memory_type_t, ucp_err_handling_mode_t and of UCP's field masks, by their names there. */
enum {
    UCS_OK = 0,
    UCS_INPROGRESS = 1,
    UCS_ERR_IO_ERROR = -3,
    UCS_ERR_NO_MEMORY = -4,
    UCS_ERR_UNREACHABLE = -6,
    UCS_ERR_MESSAGE_TRUNCATED = -9,
    UCS_ERR_CANCELED = -16,
    UCS_ERR_TIMED_OUT = -20,
    UCS_ERR_REJECTED = -23,
    UCS_ERR_NOT_CONNECTED = -24,
    UCS_ERR_CONNECTION_RESET = -25,
    UCS_ERR_ENDPOINT_TIMEOUT = -80,
    UCS_MEMORY_TYPE_HOST = 0,
    UCP_ERR_HANDLING_MODE_PEER = 1,
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 0x1,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 0x2,
    UCP_EP_PARAM_FIELD_ERR_HANDLER = 0x4,
    UCP_OP_ATTR_FIELD_CALLBACK = 0x2,
    UCP_OP_ATTR_FIELD_USER_DATA = 0x4,
    UCP_OP_ATTR_FIELD_FLAGS = 0x10,
    UCP_OP_ATTR_FIELD_MEMORY_TYPE = 0x40,
    UCP_OP_ATTR_FIELD_MEMH = 0x100,
    UCP_OP_ATTR_FLAG_NO_IMM_CMPL = 0x10000,
    UCP_AM_FLAG_WHOLE_MSG = 0x1,
    UCP_AM_SEND_FLAG_EAGER = 0x2,
    UCP_AM_RECV_ATTR_FLAG_RNDV = 0x20000
};

/* True if the pointer that libucp returned for a request is an error code. */
#define IS_STATUS(p) ((uintptr_t)(p) >= (uintptr_t)-100)
/* That error code, or 0. */
#define STATUS_OF(p) (IS_STATUS(p) ? (int)(intptr_t)(p) : 0)

/* Parameters of an operation on bytes; `callback` is called with `data` at its end. */
static inline ucp_request_param_t ucch_ucp_params(void *callback, void *data, int memory_type) {
    return (ucp_request_param_t){.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                 .cb = callback,
                                 .user_data = data,
                                 .memory_type = memory_type};
}

typedef struct ucch_symbols {
#define UCC_SYMBOL(ret, name, params, args) ret(*name) params;
#define UCP_SYMBOL(ret, name, params, args) ret(*name) params;
#include "abi/symbols.h"
} ucch_symbols;

/* loader.c */
int ucch_losses(void);
void ucch_endpoint_errors_tell(void (*function)(void));

extern ucch_symbols ucch_sym;

/* They are there once a library is loaded, and Python calls nothing before that. */
#define UCC_SYMBOL(ret, name, params, args)                                                                            \
    static inline ret name params { return ucch_sym.name args; }
#define UCP_SYMBOL UCC_SYMBOL
#include "abi/symbols.h"

/* Connect a worker with one of this address. `lost` is called with `arg` when the connection breaks; NULL: libucp says
 * nothing then, but has all of its transports (with error handling ROCm IPC and the usual shared memory drop out). */
static inline int ucch_ucp_connect(ucp_worker_h worker, const void *address,
                                   void (*lost)(void *, ucp_ep_h, ucs_status_t), void *arg, ucp_ep_h *endpoint) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {lost, arg}};
    if (lost) params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    return ucp_ep_create(worker, &params, endpoint);
}

/* Have libucp call `handler` with `arg` for each whole active message of this id. */
static inline int ucch_ucp_listen(ucp_worker_h worker, unsigned id, void *handler, void *arg) {
    ucp_am_handler_param_t params = {
        .field_mask = 0xf, .id = id, .flags = UCP_AM_FLAG_WHOLE_MSG, .cb = handler, .arg = arg};
    return ucp_worker_set_am_recv_handler(worker, &params);
}

#endif
