/* The timeline (trace.c): what every program, every step of it and every wire did, and when. */
#ifndef UCCH_TRACE_H
#define UCCH_TRACE_H

#include <stddef.h>
#include <stdint.h>

extern int ucch_trace_on;

/* Off, as nearly always, the timeline costs this one branch. */
#define UCCH_TRACING __builtin_expect(__atomic_load_n(&ucch_trace_on, __ATOMIC_ACQUIRE), 0)

/* Number in the place of the program in an event of a wire. */
#define UCCH_TRACE_WIRE 0xffffffffu

/* By any thread. The number that begin returns, never 0, is what end takes. */
uint64_t ucch_trace_begin(uint32_t program, int step, uint64_t seq);
uint64_t ucch_trace_begin_wire(int wire, uint64_t peer, size_t bytes, uint64_t since);
void ucch_trace_end(uint64_t number, int status);

#endif
