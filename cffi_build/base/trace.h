/* The timeline (trace.c): what every program and every step of it did, and when. */
#ifndef UCCH_TRACE_H
#define UCCH_TRACE_H

#include <stdint.h>

extern int ucch_trace_on;

/* Off, as nearly always, the timeline costs this one branch. */
#define UCCH_TRACING __builtin_expect(ucch_trace_on, 0)

/* Both under the lock. The number that begin returns, never 0, is what end takes. */
uint64_t ucch_trace_begin_locked(uint32_t program, int step, uint64_t seq);
void ucch_trace_end_locked(uint64_t number, int status);

#endif
