/* Contexts of libucp. */
#include <stdio.h>
#include <stdlib.h>

#include "abi/calls.h"
#include "api/api.h"

/* Messages and one-sided transfers, by workers that different threads drive, each one at a time; and, asked for, active
 * messages and a file that says when there is something to do. */
#define FEATURES 0x3
#define ACTIVE 0x50
#define PARAMS (0x1 | 0x20)

/* Make a context with these settings, names and values in turn and NULL at the end: 0, or the failure, with the name of
 * the setting that libucp refused. */
int ucch_ucp_open(int active, const char *const *settings, ucp_context_h *context, const char **refused) {
    ucp_params_t params = {.field_mask = PARAMS, .features = FEATURES | (active ? ACTIVE : 0), .mt_workers_shared = 1};
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

/* libucp's own description of a context (memory domains, devices, transports); the caller releases it. */
char *ucch_ucp_describe(ucp_context_h context) {
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    if (!stream) return NULL;
    if (ucch_sym.ucp_context_print_info) ucp_context_print_info(context, stream);
    fclose(stream);
    return text;
}

void ucch_release(char *text) { free(text); }
