/* UCC contexts and UCP workers of this process: what progress is made in. */
#include <stdlib.h>

#include "base/contexts.h"

typedef struct worker {
    ucp_worker_h handle;
    struct worker *next;
} worker;

static ucch_context *contexts;
static worker *workers;

ucch_context *ucch_context_new(ucc_context_h handle) {
    ucch_context *context = calloc(1, sizeof(*context));
    if (!context) return NULL;
    context->handle = handle;
    ucch_lock();
    context->next = contexts;
    contexts = context;
    ucch_unlock();
    return context;
}

void ucch_context_free(ucch_context *context) {
    ucch_lock();
    for (ucch_context **at = &contexts; *at; at = &(*at)->next)
        if (*at == context) {
            *at = context->next;
            break;
        }
    ucch_unlock();
    free(context);
}

/* A worker is known from its creation (on = 1) to its end (on = -1). */
void ucch_worker_use(ucp_worker_h handle, int on) {
    worker *w = on > 0 ? calloc(1, sizeof(*w)) : NULL;
    ucch_lock();
    if (w) {
        w->handle = handle;
        w->next = workers;
        workers = w;
    }
    for (worker **at = &workers; on < 0 && *at; at = &(*at)->next)
        if ((*at)->handle == handle) {
            w = *at;
            *at = w->next;
            free(w);
            break;
        }
    ucch_unlock();
}

int ucch_poll_contexts_locked(void) {
    int moved = 0;
    for (ucch_context *c = contexts; c; c = c->next)
        if (c->users) moved += ucc_context_progress(c->handle) > 0;
    return moved;
}

/* With nothing under way: what has ended here may have left something to send, for which other hosts wait. */
int ucch_poll_all_locked(void) {
    int moved = ucch_poll_workers_locked();
    for (ucch_context *c = contexts; c; c = c->next)
        moved += ucc_context_progress(c->handle) > 0;
    return moved;
}

int ucch_poll_workers_locked(void) {
    int moved = 0;
    for (worker *w = workers; w; w = w->next)
        moved += (int)ucp_worker_progress(w->handle);
    return moved;
}
