/* Contexts and endpoints of libucp. */
#include <stdio.h>
#include <stdlib.h>

#include "abi/calls.h"
#include "api/api.h"

/* Messages by tags, one-sided transfers and active messages, by workers that different threads drive, each one at a
 * time; and, asked for, a file that says when there is something to do. */
#define FEATURES 0x43
#define SLEEPS 0x10
#define PARAMS (0x1 | 0x20)

enum { REMOTE_ADDRESS = 0x1, ERR_HANDLING_MODE = 0x2, ERR_HANDLER = 0x4 }; /* ucp_ep_params_field */

/* Make a context with these settings, names and values in turn and NULL at the end: 0, or the failure, with the name of
 * the setting that libucp refused. */
int ucch_ucp_open(int sleeps, const char *const *settings, ucp_context_h *context, const char **refused) {
    ucp_params_t params = {.field_mask = PARAMS, .features = FEATURES | (sleeps ? SLEEPS : 0), .mt_workers_shared = 1};
    ucp_config_t *config;
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    int status = ucp_config_read(NULL, NULL, &config);
    if (status) return status;
    for (; *settings && !status; settings += 2) {
        status = ucp_config_modify(config, settings[0], settings[1]);
        *refused = status ? settings[0] : NULL;
    }
    if (!status) status = ucp_init_version(major, minor, &params, config, context);
    ucp_config_release(config);
    return status;
}

/* Connect a worker with one of this address. `lost` is called with `arg` when the connection breaks; NULL: libucp says
 * nothing then, but has all of its transports (with error handling ROCm IPC and the usual shared memory drop out). */
int ucch_ucp_connect(ucp_worker_h worker, const void *address, void (*lost)(void *, ucp_ep_h, ucs_status_t), void *arg,
                     ucp_ep_h *endpoint) {
    ucp_ep_params_t params = {.field_mask = REMOTE_ADDRESS | (lost ? ERR_HANDLING_MODE | ERR_HANDLER : 0),
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {lost, arg}};
    return ucp_ep_create(worker, &params, endpoint);
}

/* libucp's own description of a context (memory domains, devices, transports); the caller releases it. */
char *ucch_ucp_describe(ucp_context_h context) {
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    if (!stream) return NULL;
    ucp_context_print_info(context, stream);
    fclose(stream);
    return text;
}

void ucch_release(char *text) { free(text); }
