/* The flight recorder (flight.c): what the last operations of this process were, and how far they have come. */
#ifndef UCCH_FLIGHT_H
#define UCCH_FLIGHT_H

#include "base/ucch.h"

/* Under the lock. Begin returns the record's number for the other functions; 0: nothing is recorded. */
uint64_t ucch_flight_begin(const ucch_record *about, uint64_t seq, double now, int has_started);
void ucch_flight_started(uint64_t record, double now);

int ucch_flight_signal(int *file);
void ucch_flight_awaits_locked(int64_t pid, int64_t file, uint64_t since);
void ucch_flight_from(uint64_t record, int peer, int tag);
void ucch_flight_end(uint64_t record, int status, double now);
void ucch_flight_failed_locked(int status, double now);

#endif
