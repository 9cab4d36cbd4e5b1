/* How to wait: spin, then yield, then nap; or listen, and leave progress to the thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "base/wait.h"

/* Nobody spins longer than this before the first yield, however little a round of progress takes or how much. */
#define SPIN_S 10e-6
/* Who is given no more than this does not give the core away for it. */
#define MOMENT_S 50e-6
/* Rounds of a wait that is over at once. */
#define QUICK 64
/* A yield that took longer than this gave the core to somebody; so many quick ones later it counts as free again. */
#define CROWDED_S 1e-6
#define CROWDED_YIELDS 64
/* A turn in which nothing ends, but that takes longer than this, has moved data. */
#define BUSY_S 5e-6
/* Where others want the core, a waiter for whom nothing has moved for this long sleeps: a thread that only yields is
 * chosen again and again, at the expense of those it waits for, or is put behind a whole slice of theirs: beside a
 * computing thread Linux 6.18 took 4 ms for a yield, and 0.17 ms for a sleep of 0.1 ms. A nap lasts NAP_SHARE of the
 * quiet time, so that a wait is prolonged by that much at most. */
#define PATIENCE_S 1e-3
#define NAP_SHARE 0.25
#define SHORTEST_NAP_S 100e-6
#define LONGEST_NAP_S 500e-6
/* A nap that ends in time has found the core free, more or less; it counts as so many quick yields. */
#define LATE_S 100e-6
#define NAP_YIELDS 4

volatile int ucch_waiters;
static int spin_rounds = 1000;
/* More than 0 while others want this core: then spinning only delays whoever is waited for. */
static volatile int crowded;

/* Rounds a waiter spins before it yields the core in every round; 0 where ranks outnumber cores. */
void ucch_set_spin(int iterations) {
    spin_rounds = iterations;
}

/* Whether whoever spins keeps nobody from what it waits for. */
int ucch_may_spin(void) {
    return spin_rounds > 0 && !crowded;
}

/* ---- giving the core away ---- */

/* Whether a turn of progress had anything to do. */
int ucch_has_moved(int moved, double seconds) {
    return moved || seconds > BUSY_S;
}

/* Give the core away, and learn whether anybody took it; returns the time after `now`. */
double ucch_yield(double now) {
    sched_yield();
    double end = ucch_now();
    if (end - now > CROWDED_S)
        crowded = CROWDED_YIELDS;
    else if (crowded > 0)
        crowded--;
    return end;
}

/* How long to sleep after nothing has moved for `quiet` seconds; 0: yield. */
double ucch_nap(double quiet) {
    if (!crowded || quiet < PATIENCE_S)
        return 0;
    double nap = NAP_SHARE * quiet;
    return nap < SHORTEST_NAP_S ? SHORTEST_NAP_S : nap > LONGEST_NAP_S ? LONGEST_NAP_S : nap;
}

/* After a nap that began at `now` and was to last so long; returns the time. */
double ucch_napped(double now, double asked) {
    double end = ucch_now();
    if (end - now - asked < LATE_S)
        crowded = crowded > NAP_YIELDS ? crowded - NAP_YIELDS : 0;
    return end;
}

static double rest(double now, double quiet) {
    double nap = ucch_nap(now - quiet);
    if (nap == 0)
        return ucch_yield(now);
    struct timespec t = {.tv_nsec = (long)(1e9 * nap)};
    nanosleep(&t, NULL);
    return ucch_napped(now, nap);
}

/* ---- waiting ---- */

static int finished(ucch_op *op) {
    return __atomic_load_n(&op->state, __ATOMIC_ACQUIRE) != UCCH_ACTIVE;
}

/* Or the rest is the caller's. */
static int come(ucch_op *op) {
    return __atomic_load_n(&op->come, __ATOMIC_ACQUIRE) || finished(op);
}

/* What is waited for: one that has finished, all of them, or all that have at least come. */
enum { ANY, ALL, COME };

static int enough(ucch_op **ops, int n, int what) {
    int done = 0;
    for (int i = 0; i < n; i++) {
        int f = what == COME ? come(ops[i]) : finished(ops[i]);
        if (f && what == ANY)
            return 1;
        done += f;
    }
    return done == n;
}

/* Spin for a while, then give the core away between rounds: with more ranks than cores the peer that we wait for is
 * the one that needs it (UCC alone takes milliseconds for 8 bytes there). */
static int wait_many(ucch_op **ops, int n, int what, double slice) {
    int round = 0, done;
    double began = ucch_now(), now = began, quiet = began;
    __atomic_add_fetch(&ucch_waiters, 1, __ATOMIC_SEQ_CST);
    while (!(done = enough(ops, n, what)) && now - began <= slice) {
        double start = now;
        int batch = crowded ? 1 : UCCH_BATCH, moved = 0;
        ucch_lock();
        for (int i = 0; i < batch && !(done = enough(ops, n, what)) && (i == 0 || !ucch_lock_wanted()); i++)
            moved += ucch_progress_locked();
        now = ucch_now();
        ucch_police_locked(now);
        ucch_unlock();
        ucch_let_others();
        if (done)
            break;
        if (ucch_has_moved(moved, now - start))
            quiet = now;
        round += UCCH_BATCH;
        if ((round > spin_rounds || crowded || now - began > SPIN_S) && slice > MOMENT_S)
            now = rest(now, quiet);
    }
    if (__atomic_sub_fetch(&ucch_waiters, 1, __ATOMIC_SEQ_CST) == 0)
        ucch_left_behind();
    return done;
}

/* 1: finished well, 2: failed, 0: still going after `slice` seconds (Python then looks for signals). */
int ucch_wait(ucch_op *op, double slice) {
    if (!finished(op)) {
        /* Most small calls end here, under one hold of the lock. */
        ucch_lock();
        double began = ucch_now();
        for (int i = 0; i < QUICK && i < spin_rounds && !crowded && op->state == UCCH_ACTIVE; i++) {
            ucch_progress_locked();
            if (i % UCCH_BATCH == UCCH_BATCH - 1 && ucch_now() - began > SPIN_S)
                break;
        }
        ucch_unlock();
    }
    if (!finished(op) && !wait_many(&op, 1, ALL, slice))
        return 0;
    return op->state == UCCH_FAILED ? 2 : 1;
}

/* Until the rest is the caller's (1) or it has ended (2); 0: still going after `slice` seconds. */
int ucch_wait_come(ucch_op *op, double slice) {
    if (!come(op) && !wait_many(&op, 1, COME, slice))
        return 0;
    return finished(op) ? 2 : 1;
}

int ucch_wait_any(ucch_op **ops, int n, int all, double slice) {
    return wait_many(ops, n, all ? ALL : ANY, slice);
}

/* As ucch_wait, after one round of progress. */
int ucch_test(ucch_op *op) {
    if (!finished(op)) {
        ucch_lock();
        ucch_progress_locked();
        if (!finished(op))
            ucch_police_locked(ucch_now());
        ucch_unlock();
    }
    return op->state == UCCH_FAILED ? 2 : finished(op);
}

/* As ucch_test, without progress. */
int ucch_peek(ucch_op *op) {
    return finished(op) ? 1 + (op->state == UCCH_FAILED) : 0;
}

/* ---- listening ---- */

static pthread_mutex_t bell = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rung = PTHREAD_COND_INITIALIZER;
static uint64_t rings;
static int launch_heard; /* somebody listens for the end of a call in a stream */

/* Let those who listen look again. */
void ucch_ring(void) {
    pthread_mutex_lock(&bell);
    __atomic_add_fetch(&rings, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&rung);
    pthread_mutex_unlock(&bell);
}

/* How often the bell has rung. To be asked for before one looks at what is to be ended. */
uint64_t ucch_rings(void) {
    return __atomic_load_n(&rings, __ATOMIC_SEQ_CST);
}

/* The bell rings when the operation ends, if it has not ended by now. */
void ucch_listen(ucch_op *op) {
    ucch_lock();
    op->heard = op->state == UCCH_ACTIVE;
    if (op->kind == UCCH_IS_LAUNCH && op->heard)
        launch_heard = 1;
    ucch_unlock();
}

/* Calls in streams have ended; which ones does not matter. */
void ucch_launches_ended_locked(void) {
    if (launch_heard)
        ucch_ring();
    launch_heard = 0;
}

/* Sleep until the bell has rung more than `known` times, `seconds` at most. Makes no progress: the thread does. */
void ucch_await_ring(uint64_t known, double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    int64_t ns = t.tv_nsec + (int64_t)(1e9 * seconds);
    t.tv_sec += ns / 1000000000;
    t.tv_nsec = ns % 1000000000;
    pthread_mutex_lock(&bell);
    while (rings == known && pthread_cond_timedwait(&rung, &bell, &t) == 0)
        ;
    pthread_mutex_unlock(&bell);
}
