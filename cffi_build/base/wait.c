/* Waiting: spin, then yield, then nap; or listen, and leave progress to the thread. */
#define _GNU_SOURCE
#include <sys/prctl.h>
#include <time.h>

#include "base/lock.h"
#include "base/progress.h"

/* The longest that a thread spins before its first yield, however little or much a round of progress takes. */
#define SPIN_S 10e-6
/* A wait that is given no more than this does not give the core away, and leaves the lock alone soon enough. */
#define MOMENT_S 50e-6
/* Rounds of a wait that is over at once. */
#define QUICK 64
/* How late the kernel may end a nap, in ns. By default it is longer than the shortest nap. */
#define SLACK_NS 2000

/* Give the core away, or nap where nothing has moved since `quiet`; returns the time after `now`. */
double ucch_rest(double now, double quiet) {
    double nap = ucch_nap(now - quiet);
    if (nap <= 0) return nap < 0 ? now : ucch_yield(now);
    struct timespec t = {.tv_nsec = (long)(1e9 * nap)};
    int slack = prctl(PR_GET_TIMERSLACK); /* of the caller's thread */
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    nanosleep(&t, NULL);
    prctl(PR_SET_TIMERSLACK, slack);
    return ucch_napped(now, nap);
}

/* ---- waiting ---- */

/* 0 while it is under way, 1: it has ended well, 2: it has failed. */
static int outcome(ucch_op *op) {
    int state = UCCH_LOAD(&op->state);
    return state == UCCH_ACTIVE ? 0 : state == UCCH_FAILED ? 2 : 1;
}

static int finished(ucch_op *op) { return outcome(op) != 0; }

/* Or the rest is the caller's. */
static int matched(ucch_op *op) { return UCCH_LOAD(&op->matched) || finished(op); }

/* Conditions to wait for: one that has finished, all of them, or all that have at least been matched. */
enum { ANY, ALL, MATCHED };

static int enough(ucch_op **ops, int n, int what) {
    int done = 0;
    for (int i = 0; i < n; i++)
        done += what == MATCHED ? matched(ops[i]) : finished(ops[i]);
    return done == n || (done && what == ANY);
}

/* Spin for a while, then give the core away between rounds: with more ranks than cores the peer that we wait for is
 * the one that needs it (UCC alone takes milliseconds for 8 bytes there). */
static int wait_many(ucch_op **ops, int n, int what, double slice) {
    int round = 0, done;
    double began = ucch_now(), now = began, quiet = began;
    ucch_wait_begin();
    while (!(done = enough(ops, n, what)) && now - began <= slice) {
        double start = now;
        int batch = ucch_crowded ? 1 : UCCH_BATCH, moved = 0;
        ucch_lock();
        for (int i = 0; i < batch && !(done = enough(ops, n, what)) && (i == 0 || !ucch_lock_wanted()); i++)
            moved += ucch_progress_locked();
        now = ucch_now();
        ucch_ops_check_deadlines_locked(now);
        ucch_unlock();
        if (slice > MOMENT_S) ucch_let_others();
        if (done) break;
        if (ucch_has_moved(moved, now - start)) quiet = now;
        round += UCCH_BATCH;
        if ((round > ucch_spin_rounds || ucch_crowded || now - began > SPIN_S) && slice > MOMENT_S)
            now = ucch_rest(now, quiet);
    }
    ucch_wait_end();
    return done;
}

/* Most small calls end here, under one hold of the lock. */
void ucch_wait_briefly_locked(ucch_op *op) {
    double began = ucch_now();
    for (int i = 0; i < QUICK && i < ucch_spin_rounds && !ucch_crowded && op->state == UCCH_ACTIVE; i++) {
        ucch_progress_locked();
        if (i % UCCH_BATCH == UCCH_BATCH - 1 && ucch_now() - began > SPIN_S) break;
    }
}

/* 1: finished well, 2: failed, 0: still going after `slice` seconds (Python then looks for signals). */
int ucch_wait(ucch_op *op, double slice) {
    if (!finished(op)) {
        UCCH_LOCKED;
        ucch_wait_briefly_locked(op);
    }
    if (!finished(op) && !wait_many(&op, 1, ALL, slice)) return 0;
    return outcome(op);
}

/* Until the rest is the caller's (1) or it has ended (2); 0: still going after `slice` seconds. */
int ucch_wait_matched(ucch_op *op, double slice) {
    if (!matched(op) && !wait_many(&op, 1, MATCHED, slice)) return 0;
    return finished(op) ? 2 : 1;
}

int ucch_wait_any(ucch_op **ops, int n, int all, double slice) { return wait_many(ops, n, all ? ALL : ANY, slice); }

/* As ucch_wait, after one round of progress. */
int ucch_test(ucch_op *op) {
    if (!finished(op)) {
        UCCH_LOCKED;
        ucch_progress_locked();
        if (!finished(op)) ucch_ops_check_deadlines_locked(ucch_now());
    }
    return outcome(op);
}

/* As ucch_test, without progress. */
int ucch_peek(ucch_op *op) { return outcome(op); }
