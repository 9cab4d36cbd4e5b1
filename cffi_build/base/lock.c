/* The clock, the one lock, and how threads that take it again and again share it and their cores: spin, yield, nap. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"

/* Looks at the lock before sleeping for it, longer than a round of progress takes; and yields until waiting threads
 * have had it, if they get there at all. */
#define LOCK_SPINS 2000
#define LET_OTHERS 1000
/* A yield that took longer than this gave the core away; after so many quick ones it counts as free again. */
#define CROWDED_S 1e-6
#define CROWDED_YIELDS 64
/* A turn in which nothing ends, but that takes longer than this, has moved data. */
#define BUSY_S 5e-6
/* Where other threads want the core, a waiter sleeps once nothing has moved for it for this long: a thread that only
 * yields is chosen again and again, at the expense of those it waits for. A nap lasts NAP_SHARE of the quiet time, so
 * that a wait is prolonged by that much at most. */
#define PATIENCE_S 1e-3
#define NAP_SHARE 0.25
#define SHORTEST_NAP_S 100e-6
#define LONGEST_NAP_S 500e-6
/* A yield that took longer than this gave the core to a thread that computes, for a slice of its. The kernel soon gives
 * it back to a thread that has slept, and not to one that has yielded: after a second such yield soon after the first
 * (one alone may be a virtual machine's host's), a thread naps so often in the place of yields. Beside two endless
 * loops on two cores an allreduce of 8 bytes between two ranks took 4.3 ms by yields and 2 us by naps, which also leave
 * it time to spin in. */
#define LONG_YIELD_S 300e-6
#define SOON_S 50e-3
#define NAPS_AFTER 256
/* A nap that ends in time has found the core free, more or less; it counts as so many quick yields. */
#define LATE_S 100e-6
#define NAP_YIELDS 4

/* Recursive: Python holds it in places (bindings/handle.py), and may collect objects there whose ends need it. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static _Atomic int wanted;
static pthread_t last; /* thread of Python's at its end */
static int has_last;
static _Atomic int lost; /* one has it that does not end */
_Atomic int ucch_spin_rounds = 1000;
_Atomic int ucch_crowded;
/* A thread's naps in the place of its next yields, and when it last had a long yield. */
static _Thread_local int naps;
static _Thread_local double long_yield;

double ucch_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* As ucch_now, in ns. A signal handler may call it. */
uint64_t ucch_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Make a condition for ucch_cond_wait. */
void ucch_cond_init(pthread_cond_t *wake) {
    pthread_condattr_t by;
    pthread_condattr_init(&by);
    pthread_condattr_setclock(&by, CLOCK_MONOTONIC);
    pthread_cond_init(wake, &by);
    pthread_condattr_destroy(&by);
}

/* Wait for a condition, `seconds` at most (0: for ever): 0, or an error number, such as ETIMEDOUT. */
int ucch_cond_wait(pthread_cond_t *wake, pthread_mutex_t *with, double seconds) {
    if (seconds == 0) return pthread_cond_wait(wake, with);
    uint64_t until = ucch_now_ns() + (uint64_t)(1e9 * seconds);
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    return pthread_cond_timedwait(wake, with, &t); /* glibc 2.28 has no pthread_cond_clockwait */
}

/* ---- order ---- */

#ifdef UCCH_CHECK_LOCKS
static _Thread_local int held[UCCH_LOCK_ORDER];

static void note_taken(int at) {
    for (int later = at + 1; later < UCCH_LOCK_ORDER; later++) {
        if (!held[later]) continue;
        fprintf(stderr, "ucc_hetero: a thread that has lock %d takes lock %d (base/base.h)\n", later, at);
        abort();
    }
    held[at]++;
}

static void note_given(int at) { held[at]--; }
#else
static void note_taken(int at) {}
static void note_given(int at) {}
#endif

/* Take a lock that stands in the order at a place. */
void ucch_take(pthread_mutex_t *lock, int at) {
    note_taken(at);
    pthread_mutex_lock(lock);
}

void ucch_give(pthread_mutex_t *lock, int at) {
    pthread_mutex_unlock(lock);
    note_given(at);
}

/* ---- the lock ---- */

/* Rounds a waiter spins before it yields the core in every round; 0 where ranks outnumber cores. */
void ucch_set_spin(int iterations) { ucch_spin_rounds = iterations; }

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for_lock(void) {
    if (lost && pthread_equal(last, pthread_self())) ucch_leave();
    pthread_mutex_lock(&lock);
}

/* A thread that makes progress takes the lock again and again, and a mutex is not fair: a waiting thread may be woken
 * only to find it taken, for milliseconds. So threads count themselves while they wait, and progress lets them have the
 * lock. */
void ucch_lock(void) {
    note_taken(UCCH_AT_ENGINE);
    if (pthread_mutex_trylock(&lock) == 0) return;
    wanted++;
    int had = 0, keeps_core = ucch_spin_rounds == 0 || ucch_crowded; /* from the thread that it waits for */
    for (int i = keeps_core ? 0 : LOCK_SPINS; i && !had; i--) {
        relax();
        had = pthread_mutex_trylock(&lock) == 0;
    }
    if (!had) wait_for_lock();
    wanted--;
}

/* True if the lock was free and is now taken. */
int ucch_trylock(void) {
    int had = pthread_mutex_trylock(&lock) == 0;
    if (had) note_taken(UCCH_AT_ENGINE);
    return had;
}

void ucch_unlock(void) { ucch_give(&lock, UCCH_AT_ENGINE); }

/* For Python, where Ctrl-C may be heard of right after a call: the lock, and a note that it is had; and its end, if it
 * is. At the end of Python another thread than the last one's sleeps for ever. */
void ucch_lock_noted(int *has) {
    ucch_lock();
    while (has_last && !pthread_equal(last, pthread_self())) {
        ucch_unlock();
        pause();
        ucch_lock();
    }
    *has = 1;
}

void ucch_unlock_noted(int *has) {
    if (*has) ucch_unlock();
    *has = 0;
}

/* Python ends, in this thread. Others end as they come back to Python, and would have the lock for good there. */
void ucch_lock_ends(void) {
    UCCH_LOCKED;
    last = pthread_self();
    has_last = 1;
}

/* True if the lock is not to be had within `seconds`, as a thread has it that waits in a library for a peer out of
 * reach. This thread, in which Python ends, then ends the process where it would need the lock. */
int ucch_lock_is_lost(double seconds) {
    for (double until = ucch_now() + seconds; !lost && !ucch_trylock(); usleep(1000))
        if (ucch_now() > until) {
            last = pthread_self();
            lost = 1;
        }
    if (!lost) ucch_unlock();
    return lost;
}

/* Without the lock: let threads that wait for it have it. */
void ucch_let_others(void) {
    for (int i = 0; i < LET_OTHERS && wanted; i++)
        sched_yield();
}

/* With the lock: true if a thread waits for it. */
int ucch_lock_wanted(void) { return wanted; }

/* Let go of the lock and sleep until woken, `seconds` at most (0: for ever). */
void ucch_sleep_locked(pthread_cond_t *wake, double seconds) { ucch_cond_wait(wake, &lock, seconds); }

/* In a child of this process: a thread of the parent's may have had it. */
void ucch_lock_after_fork(void) {
    wanted = has_last = lost = 0;
    lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
}

/* ---- giving the core away ---- */

/* True if a turn of progress had anything to do. */
int ucch_has_moved(int moved, double seconds) { return moved || seconds > BUSY_S; }

/* This thread has yielded from one time to another. */
void ucch_note_yield(double from, double to) {
    if (to - from < LONG_YIELD_S) return;
    if (to - long_yield < SOON_S) naps = NAPS_AFTER;
    long_yield = to;
}

/* True if this thread is to nap now, and not to yield. */
int ucch_naps_instead(void) { return naps > 0 && naps--; }

/* Give the core away, and learn from the time whether another thread took it; returns the time after `now`. */
double ucch_yield(double now) {
    sched_yield();
    double end = ucch_now();
    ucch_note_yield(now, end);
    if (end - now > CROWDED_S)
        ucch_crowded = CROWDED_YIELDS;
    else if (ucch_crowded > 0)
        ucch_crowded--;
    return end;
}

/* How long to sleep after nothing has moved for `quiet` seconds; 0: yield. Less: go on, as this thread moves data and
 * would not have the core back soon. */
double ucch_nap(double quiet) {
    if (naps > 0 && quiet <= 0) return -1;
    int instead = ucch_naps_instead();
    if (!instead && (!ucch_crowded || quiet < PATIENCE_S)) return 0;
    double nap = NAP_SHARE * quiet, shortest = instead ? UCCH_QUICK_NAP_S : SHORTEST_NAP_S;
    return nap < shortest ? shortest : nap > LONGEST_NAP_S ? LONGEST_NAP_S : nap;
}

/* After a nap that began at `now` and was to last so long; returns the time. */
double ucch_napped(double now, double asked) {
    double end = ucch_now();
    if (end - now - asked < LATE_S) ucch_crowded = ucch_crowded > NAP_YIELDS ? ucch_crowded - NAP_YIELDS : 0;
    return end;
}
