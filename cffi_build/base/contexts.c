/* UCC contexts and UCP workers of this process: what progress is made in. */
#include <stdlib.h>

#include "base/contexts.h"

static ucch_context *contexts;

/* Make progress in a context, or in a worker, from now on: NULL where there is no memory. */
ucch_context *ucch_context_new(ucc_context_h handle, ucp_worker_h worker) {
    ucch_context *context = calloc(1, sizeof(*context));
    if (!context) return NULL;
    context->handle = handle;
    context->worker = worker;
    UCCH_LOCKED;
    context->next = contexts;
    contexts = context;
    return context;
}

void ucch_context_free(ucch_context *context) {
    ucch_lock();
    UCCH_UNLINK(contexts, context, next);
    ucch_unlock();
    free(context);
}

/* Of contexts all, or those that programs in flight need; and whether of workers, too. */
int ucch_poll_locked(int all, int workers) {
    int moved = 0;
    for (ucch_context *c = contexts; c; c = c->next) {
        if (c->handle && (all || c->users)) moved += ucc_context_progress(c->handle) > 0;
        if (c->worker && workers) moved += (int)ucp_worker_progress(c->worker);
    }
    return moved;
}
