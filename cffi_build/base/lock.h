/* The lock, and turns at it among threads that make progress (lock.c); ucch_lock and ucch_unlock are in api.h. */
#ifndef UCCH_LOCK_H
#define UCCH_LOCK_H

#include <pthread.h>
#include <time.h>

#include "base/ucch.h"

extern _Atomic int ucch_spin_rounds;
/* More than 0 while other threads want this core: then spinning only delays the thread that is waited for. */
extern _Atomic int ucch_crowded;

/* Locks in the order in which one thread may take several (docs/native.md); others are taken last and for a moment.
 * Builds with sanitizers end a process that takes one while it has a later one. */
enum { UCCH_AT_OPENED, UCCH_AT_QUEUE, UCCH_AT_ENGINE, UCCH_AT_LINKS, UCCH_AT_WIRE, UCCH_AT_FLOW, UCCH_LOCK_ORDER };
void ucch_take(pthread_mutex_t *lock, int at);
void ucch_give(pthread_mutex_t *lock, int at);

void ucch_cond_init(pthread_cond_t *wake);
int ucch_cond_wait(pthread_cond_t *wake, pthread_mutex_t *lock, double seconds);
int ucch_trylock(void);
void ucch_let_others(void);
int ucch_lock_wanted(void);
void ucch_sleep_locked(pthread_cond_t *wake, double seconds);
void ucch_lock_after_fork(void);

/* The shortest nap in the place of a yield. */
#define UCCH_QUICK_NAP_S 20e-6
void ucch_note_yield(double from, double to);
int ucch_naps_instead(void);

int ucch_has_moved(int moved, double seconds);
double ucch_yield(double now);
double ucch_nap(double quiet);
double ucch_napped(double now, double asked);

#endif
