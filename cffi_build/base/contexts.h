/* UCC contexts and UCP workers of this process. */
#ifndef UCCH_CONTEXTS_H
#define UCCH_CONTEXTS_H

#include "base/ucch.h"

struct ucch_context {
    ucc_context_h handle;
    int users; /* programs in flight that need it */
    ucch_context *next;
};

int ucch_poll_contexts_locked(void);
int ucch_poll_all_locked(void);
int ucch_poll_workers_locked(void);

#endif
