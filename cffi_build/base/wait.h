/* What those who wait for something to end share: progress.c with its thread, wait.c with the callers. */
#ifndef UCCH_WAIT_H
#define UCCH_WAIT_H

#include "base/ucch.h"

/* Rounds of progress under one hold of the lock. */
#define UCCH_BATCH 8

extern volatile int ucch_waiters;

int ucch_progress_locked(void);
void ucch_police_locked(double now);
void ucch_left_behind(void);

void ucch_let_others(void);
int ucch_lock_wanted(void);
int ucch_may_spin(void);

int ucch_has_moved(int moved, double seconds);
double ucch_yield(double now);
double ucch_nap(double quiet);
double ucch_napped(double now, double asked);
void ucch_launches_ended_locked(void);

#endif
