/* The lock, and turns at it among threads that make progress (lock.c); ucch_lock and ucch_unlock are in api.h. */
#ifndef UCCH_LOCK_H
#define UCCH_LOCK_H

#include <pthread.h>
#include <time.h>

#include "base/ucch.h"

extern int ucch_spin_rounds;
/* More than 0 while others want this core: then spinning only delays whoever is waited for. */
extern _Atomic int ucch_crowded;

/* For pthread_cond_timedwait. */
struct timespec ucch_time_after(double seconds);
int ucch_trylock(void);
void ucch_let_others(void);
int ucch_lock_wanted(void);
void ucch_sleep_locked(pthread_cond_t *wake, double seconds);
void ucch_lock_after_fork(void);

int ucch_has_moved(int moved, double seconds);
double ucch_yield(double now);
double ucch_nap(double quiet);
double ucch_napped(double now, double asked);

#endif
