/* Teams: the order of their collectives, and libucc's engines for streams that collectives are launched into.
 *
 * Collectives of one team are posted in the order in which programs were started on it, on every rank alike: the queue
 * holds the steps not yet posted. */
#include <stdlib.h>

#include "coll/program.h"

#define COMPUTE_COMPLETE 4      /* ucc_event_type_t */
#define OPERATION_INITIALIZED 2 /* ucc_status_t: made, and not begun */

/* Streams known to one team; more than a program uses at a time. */
#define MOST_ENGINES 32

struct ucch_engine {
    void *stream;
    ucc_ee_h handle;
    ucch_engine *next;
};

ucch_team *ucch_team_new(ucch_context *context, ucc_team_h handle) {
    ucch_team *team = calloc(1, sizeof(*team));
    if (!team) return NULL;
    team->handle = handle;
    team->context = context;
    return team;
}

/* The team's ranks are on several hosts; nothing was posted on it. 0, or a failure. */
int ucch_team_far(ucch_team *team) {
    team->tags = calloc((1 << TAG_BITS) / 64, sizeof(uint64_t));
    return team->tags ? 0 : UCCH_FAIL_MEMORY;
}

/* ---- the queue ---- */

void ucch_team_enqueue_locked(ucch_step *s) {
    UCCH_APPEND(s->is.team->head, s, next);
    s->is.team->context->users++;
}

/* A step that will not be posted, or was: its program is over. */
void ucch_team_leave_locked(ucch_step *s) {
    UCCH_UNLINK(s->is.team->head, s, next);
    s->is.team->context->users--;
}

/* libucc numbers a team's collectives when their requests are made, which has to be in one order on every rank: that of
 * the team's queue. On the host they are made when their turn comes, as each takes scratch: that of a fragment that is
 * done serves another, still in the cache. On a device, where it may have to be allocated, and for persistent requests
 * they are made before anything begins; what stands before them in their queues comes first. */
int ucch_team_make_locked(ucch_team *team) {
    int status = 0;
    for (ucch_step *s = team->head; s && status >= 0; s = s->next)
        if (!s->request) status = ucch_step_init_locked(s->program, s);
    return status;
}

/* ---- streams ---- */

static void drop_engines(ucch_team *t) {
    for (ucch_engine *e = t->engines, *next; e; e = next) {
        next = e->next;
        ucc_ee_destroy(e->handle);
        free(e);
    }
    t->engines = NULL;
    t->nengines = 0;
}

/* The engine for a stream's next call, new where there is none; `may_drop` others, where there are too many. */
int ucch_team_engine_locked(ucch_team *t, void *stream, int may_drop, ucc_ee_h *handle) {
    for (ucch_engine *e = t->engines; e; e = e->next)
        if (e->stream == stream) {
            *handle = e->handle;
            return 0;
        }
    if (t->nengines >= MOST_ENGINES && may_drop) drop_engines(t); /* streams come and go */
    ucch_engine *e = calloc(1, sizeof(*e));
    if (!e) return UCCH_FAIL_MEMORY;
    ucc_ee_params_t params = {.ee_type = ucch_bound_engine(), .ee_context = stream, .ee_context_size = sizeof(stream)};
    int status = ucc_ee_create(t->handle, &params, &e->handle);
    if (status < 0) {
        free(e);
        return status;
    }
    e->stream = stream;
    e->next = t->engines;
    t->engines = e;
    t->nengines++;
    *handle = e->handle;
    return 0;
}

/* Post on a stream's engine, and take back the event with which libucc says so. */
int ucch_team_post_locked(ucc_ee_h engine, ucc_coll_req_h request) {
    ucc_ev_t event = {.ev_type = COMPUTE_COMPLETE, .req = request}, *out = NULL;
    int status = ucc_collective_triggered_post(engine, &event);
    if (status < 0) return status;
    while (ucc_ee_get_event(engine, &out) == UCC_OK)
        ucc_ee_ack_event(engine, out);
    return 0;
}

/* ---- requests ---- */

/* Give a request back to libucc, unless it has failed (step.c), or never began on a device: of that libucc concludes
 * that the vendor's library has failed, and gives it no more calls (ucc_tl_nccl_coll_finalize of UCC 1.4). Both are
 * kept for ever. */
void ucch_request_drop_locked(ucc_coll_req_h request, int on_device) {
    int status = request->status;
    if (status == UCC_OK || (status == OPERATION_INITIALIZED && !on_device)) ucc_collective_finalize(request);
}

void ucch_team_free(ucch_team *team) {
    UCCH_LOCKED;
    drop_engines(team);
    free(team->tags);
    free(team);
}
