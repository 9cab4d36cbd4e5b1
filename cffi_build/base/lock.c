/* The clock, the engine's lock, and how threads that contend for it and for cores spin, yield and nap. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"

/* Tries for the lock before a thread sleeps for it (longer than a round of progress), and most yields of a thread that
 * lets waiting threads have it. */
#define LOCK_SPINS 2000
#define LET_OTHERS 1000
/* A yield that takes longer than this gave the core to another thread. After so many quick yields the core counts as
 * free. */
#define CROWDED_S 1e-6
#define CROWDED_YIELDS 64
/* A round in which no operation ends, but which takes longer than this, has moved data. */
#define BUSY_S 5e-6
/* Where other threads want the core, a waiter naps after nothing has moved for this long: the scheduler would pick a
 * yielding thread again and again, at the expense of the threads that it waits for. A nap is NAP_SHARE of the quiet
 * time, so it prolongs the wait by at most that share. */
#define PATIENCE_S 1e-3
#define NAP_SHARE 0.25
#define SHORTEST_NAP_S 100e-6
#define LONGEST_NAP_S 500e-6
/* A longer yield gave the core to a computing thread for a whole time slice. The kernel soon returns the core to a
 * thread that has slept, but not to one that has yielded: after two such yields in short order (a single one may be
 * due to the host of a virtual machine) a thread naps instead of its next yields. Beside two endless loops on two
 * cores an allreduce of 8 bytes between two ranks took 4.3 ms with yields and 2 us with naps, which also leave it
 * time to spin. */
#define LONG_YIELD_S 300e-6
#define SOON_S 50e-3
#define NAPS_AFTER 256
/* A nap that ends in time found the core free; it counts as so many quick yields. */
#define LATE_S 100e-6
#define NAP_YIELDS 4

/* Recursive: Python holds it in places (bindings/handle.py) where garbage collection may run finalizers that need
 * it. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static _Atomic int wanted;
static pthread_t last; /* the thread that finalizes Python */
static int has_last;
static _Atomic int lost; /* its owner does not return from a library */
_Atomic int ucch_spin_rounds = 1000;
_Atomic int ucch_crowded;
/* Naps left that replace yields of this thread, and the end of its last long yield. */
static _Thread_local int naps;
static _Thread_local double long_yield;

double ucch_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* As ucch_now, in ns. Safe in signal handlers. */
uint64_t ucch_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Initialize a condition for ucch_cond_wait. */
void ucch_cond_init(pthread_cond_t *wake) {
    pthread_condattr_t by;
    pthread_condattr_init(&by);
    pthread_condattr_setclock(&by, CLOCK_MONOTONIC);
    pthread_cond_init(wake, &by);
    pthread_condattr_destroy(&by);
}

/* Wait for a condition, at most `seconds` (0: no limit). Returns 0 or an error number such as ETIMEDOUT. */
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

/* Take a lock at its place in the order (UCCH_AT_*). */
void ucch_take(pthread_mutex_t *lock, int at) {
    note_taken(at);
    pthread_mutex_lock(lock);
}

void ucch_give(pthread_mutex_t *lock, int at) {
    pthread_mutex_unlock(lock);
    note_given(at);
}

/* ---- the lock ---- */

/* Rounds that a waiter spins before it yields in every round; 0 where ranks outnumber cores. */
void ucch_set_spin(int iterations) { ucch_spin_rounds = iterations; }

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* If the lock is lost, the thread that finalizes Python ends the process here: it would wait for ever. */
static void wait_for_lock(void) {
    if (lost && pthread_equal(last, pthread_self())) ucch_leave();
    pthread_mutex_lock(&lock);
}

/* A thread that makes progress retakes the lock at once, and a mutex is not fair: a thread woken to take it may find it
 * taken for milliseconds. So threads count themselves in `wanted` while they wait, and progress lets them have the lock
 * first. */
void ucch_lock(void) {
    note_taken(UCCH_AT_ENGINE);
    if (pthread_mutex_trylock(&lock) == 0) return;
    wanted++;
    int had = 0, keeps_core = ucch_spin_rounds == 0 ||
                              ucch_crowded; /* spinning would keep the core from the thread that holds the lock */
    for (int i = keeps_core ? 0 : LOCK_SPINS; i && !had; i--) {
        relax();
        had = pthread_mutex_trylock(&lock) == 0;
    }
    if (!had) wait_for_lock();
    wanted--;
}

/* Returns 1 if the lock was free and is now held. */
int ucch_trylock(void) {
    int had = pthread_mutex_trylock(&lock) == 0;
    if (had) note_taken(UCCH_AT_ENGINE);
    return had;
}

void ucch_unlock(void) { ucch_give(&lock, UCCH_AT_ENGINE); }

/* For Python, where KeyboardInterrupt may be raised right after a call: take the lock and note in `has` that it is
 * held. While Python is finalized, every thread but the finalizing one sleeps here for ever. */
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

/* Python is being finalized by this thread. Other threads end when they return to Python, and would never release the
 * lock. */
void ucch_lock_ends(void) {
    UCCH_LOCKED;
    last = pthread_self();
    has_last = 1;
}

/* True if the lock is not free within `seconds`: its owner waits in a library for a peer that cannot be reached. This
 * thread, which finalizes Python, then ends the process where it would need the lock. */
int ucch_lock_is_lost(double seconds) {
    for (double until = ucch_now() + seconds; !lost && !ucch_trylock(); usleep(1000))
        if (ucch_now() > until) {
            last = pthread_self();
            lost = 1;
        }
    if (!lost) ucch_unlock();
    return lost;
}

/* Called without the lock: yield until threads that wait for it have had it. */
void ucch_let_others(void) {
    for (int i = 0; i < LET_OTHERS && wanted; i++)
        sched_yield();
}

/* Called with the lock: true if a thread waits for it. */
int ucch_lock_wanted(void) { return wanted; }

/* Release the lock and sleep until woken, at most `seconds` (0: no limit). */
void ucch_sleep_locked(pthread_cond_t *wake, double seconds) { ucch_cond_wait(wake, &lock, seconds); }

/* In a child after fork: a thread of the parent may have held the lock. */
void ucch_lock_after_fork(void) {
    wanted = has_last = lost = 0;
    lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
}

/* ---- yields and naps ---- */

/* True if a round of progress had anything to do. */
int ucch_has_moved(int moved, double seconds) { return moved || seconds > BUSY_S; }

/* Note a yield of this thread that lasted from `from` to `to`. */
void ucch_note_yield(double from, double to) {
    if (to - from < LONG_YIELD_S) return;
    if (to - long_yield < SOON_S) naps = NAPS_AFTER;
    long_yield = to;
}

/* True if this thread is to nap now instead of yielding. */
int ucch_naps_instead(void) { return naps > 0 && naps--; }

/* Yield, and note from its duration whether another thread took the core. Returns the time afterwards. */
double ucch_yield(double now) {
    sched_yield();
    double end = ucch_now();
    ucch_note_yield(now, end);
    int left = ucch_crowded; /* read once: of two threads that count down at a time neither may go below 0 */
    if (end - now > CROWDED_S)
        ucch_crowded = CROWDED_YIELDS;
    else if (left > 0)
        ucch_crowded = left - 1;
    return end;
}

/* Seconds to nap after nothing has moved for `quiet` seconds; 0: yield instead; -1: go on at once, as this thread moves
 * data and would not get the core back soon. */
double ucch_nap(double quiet) {
    if (naps > 0 && quiet <= 0) return -1;
    int instead = ucch_naps_instead();
    if (!instead && (!ucch_crowded || quiet < PATIENCE_S)) return 0;
    double nap = NAP_SHARE * quiet, shortest = instead ? UCCH_QUICK_NAP_S : SHORTEST_NAP_S;
    return nap < shortest ? shortest : nap > LONGEST_NAP_S ? LONGEST_NAP_S : nap;
}

/* Note a nap that began at `now` and was to last `asked` seconds. Returns the time. */
double ucch_napped(double now, double asked) {
    double end = ucch_now();
    int left = ucch_crowded;
    if (end - now - asked < LATE_S) ucch_crowded = left > NAP_YIELDS ? left - NAP_YIELDS : 0;
    return end;
}
