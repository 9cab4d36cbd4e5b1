/* UCC contexts and UCP workers of this process. */
#ifndef UCCH_CONTEXTS_H
#define UCCH_CONTEXTS_H

#include "base/ucch.h"

struct ucch_context {
    ucc_context_h handle; /* or */
    ucp_worker_h worker;
    int users; /* programs in flight that need it */
    ucch_context *next;
};

int ucch_poll_locked(int all, int workers);

#endif
