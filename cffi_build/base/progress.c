/* Progress: one round of it, the progress thread, which makes progress while no caller waits, and the waits of callers,
 * which spin, then yield, then nap. */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "base/base.h"

/* Rounds between polls of the workers while no message is in flight. */
#define WORKER_EVERY 32
/* Shortest and longest tick of the idle thread. After work it polls this soon, then twice as late each time, and sleeps
 * for good after the longest. A caller that leaves work under way wakes it from a longer tick. */
#define TICK_S 0.25e-3
#define LONG_TICK_S 8e-3
/* Tick while all that is under way is in streams: each poll briefly delays threads that launch more. */
#define LAUNCH_TICK_S 1e-3
/* Tick of the idle thread with peers on other hosts: the end of a finished send may still be in a buffer of UCX or
 * libucc. */
#define IDLE_TICK_S 10e-3
/* Timer slack of the thread in ns. The kernel's default is as long as the shortest sleep. */
#define SLACK_NS 5000
/* Longest spin of a waiter before its first yield. */
#define SPIN_S 10e-6
/* A wait of at most this long never yields: it soon leaves the lock alone. */
#define MOMENT_S 50e-6
/* Rounds in ucch_wait_briefly_locked. */
#define QUICK 64
/* Timer slack of a caller's nap in ns. The kernel's default is longer than the shortest nap. */
#define NAP_SLACK_NS 2000
/* The thread sleeps with a mutex of its own. Sleeping with the engine's lock, it would wait for that lock at the end of
 * each sleep without being counted in `wanted` (lock.c): callers that make progress would never let it have the lock,
 * and would wake it in vain. */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake;
static _Atomic int sleeps;
static int woken; /* guarded by sleep_lock */
static int (*enter)(void);
static void (*leave)(int);
static void (*begin)(void);
static _Atomic int waiters; /* threads that make progress in a wait */
static pthread_t thread;
static _Atomic int thread_on, thread_asleep, thread_wakes_soon; /* wakes soon enough for calls in streams */
static int thread_over;                                         /* ended for good; guarded by the lock */
static int idle_progress;
/* A caller has announced work. */
static _Atomic int work_announced;

/* ---- contexts and workers ---- */

static ucch_context *contexts;
/* They are the parent's: see after_fork. */
static int inherited;

/* Register a context or a worker for progress. NULL if memory is exhausted. */
ucch_context *ucch_context_new(ucc_context_h handle, ucp_worker_h worker) {
    ucch_context *context = calloc(1, sizeof(*context));
    if (!context) return NULL;
    context->handle = handle;
    context->worker = worker;
    UCCH_LOCKED;
    context->next = contexts;
    contexts = context;
    return context;
}

void ucch_context_free(ucch_context *context) {
    UCCH_LOCKED;
    UCCH_UNLINK(contexts, context, next);
    free(context);
}

/* Poll all contexts, or those that programs in flight use; and with `workers` the workers. */
static int poll_locked(int all, int workers) {
    int moved = 0;
    for (ucch_context *c = contexts; c; c = c->next) {
        if (c->handle && (all || c->users)) moved += ucc_context_progress(c->handle) > 0;
        if (c->worker && workers) moved += (int)ucp_worker_progress(c->worker);
    }
    return moved;
}

/* ---- one round ---- */

static int busy(void) { return ucch_ops_under_way(UCCH_BY_CONTEXTS) || ucch_ops_under_way(UCCH_BY_WORKERS); }

/* Set functions to call around each round of progress (they select the device and restore the previous one), and one
 * that the progress thread calls first. */
void ucch_progress_inside(int (*before)(void), void (*after)(int), void (*first)(void)) {
    UCCH_LOCKED;
    enter = before;
    leave = after;
    begin = first;
}

int ucch_progress_locked(void) {
    static unsigned rounds;
    if (inherited) return 0;
    /* With no message in flight, workers are polled only now and then for what peers send: a poll costs as much as a
     * small collective. */
    int workers = ucch_ops_under_way(UCCH_BY_WORKERS) || ++rounds % WORKER_EVERY == 0;
    int before = enter ? enter() : 0, moved = poll_locked(0, workers);
    moved += ucch_ops_advance_locked();
    if (enter) leave(before);
    return moved;
}

int ucch_progress_once(void) {
    /* Another thread that holds the lock makes progress already, or waits inside a library for peers: do not block on
     * it. */
    if (!ucch_trylock()) return 0;
    int moved = ucch_progress_locked();
    ucch_unlock();
    return moved;
}

/* ---- the progress thread ---- */

/* Sleep until woken, at most `seconds` (0: no limit). Returns 1 if woken. */
static int sleep_until_woken(double seconds) {
    while (!woken && !ucch_cond_wait(&wake, &sleep_lock, seconds))
        ;
    return woken;
}

/* Release the lock and sleep until woken, at most `seconds` (0: no limit); while callers make progress, sleep on in
 * periods of `then`. */
static void sleep_locked(double seconds, double then) {
    thread_asleep = seconds == 0 || seconds > TICK_S;
    thread_wakes_soon = seconds > 0 && seconds <= LAUNCH_TICK_S;
    pthread_mutex_lock(&sleep_lock);
    woken = 0;
    sleeps = 1;
    ucch_unlock();
    for (int up = sleep_until_woken(seconds); !up && waiters;) {
        thread_wakes_soon = then <= LAUNCH_TICK_S;
        thread_asleep = 1; /* set before `waiters` is read: a caller that ends its wait then sees it or is seen */
        if (waiters) up = sleep_until_woken(then);
    }
    pthread_mutex_unlock(&sleep_lock);
    ucch_lock();
    sleeps = thread_asleep = thread_wakes_soon = 0;
}

/* Work has come that no waiting thread polls for: wake the progress thread. */
void ucch_wake_locked(void) {
    if (!sleeps) return;
    pthread_mutex_lock(&sleep_lock);
    woken = 1;
    pthread_cond_signal(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

/* A caller is polling; the progress thread stands down. */
static void begin_wait(void) { waiters++; }

/* The last waiter may leave work under way for the thread. */
static void end_wait(void) {
    if (--waiters || !busy()) return;
    UCCH_LOCKED; /* the thread may be about to sleep because a caller waits */
    if (busy() && thread_asleep) ucch_wake_locked();
}

/* Poll calls in streams, for which no thread waits, for their end and for failures. */
static void collect_locked(void) {
    sleep_locked(LAUNCH_TICK_S, LAUNCH_TICK_S);
    /* Collect all that have ended: libucc polls one request in a round of progress. */
    for (int moved = 1; moved && thread_on && !waiters;) {
        moved = ucch_progress_locked();
        ucch_ops_check_deadlines_locked(ucch_now());
        if (!ucch_lock_wanted()) continue;
        ucch_unlock();
        ucch_let_others();
        ucch_lock();
    }
}

/* Sleep while waiting callers make progress or there is no work. Returns the next tick. */
static double idle_locked(double tick) {
    thread_asleep = 1; /* set first: a caller then sees it or is seen */
    if (atomic_exchange(&work_announced, 0)) tick = TICK_S;
    int forever = !busy() && tick > LONG_TICK_S;
    sleep_locked(!forever ? tick : idle_progress ? IDLE_TICK_S : 0, LONG_TICK_S);
    if (forever && idle_progress && !waiters) {
        int before = enter ? enter() : 0;
        poll_locked(1, 1); /* operations that have ended here may have left data to send, for which other hosts wait */
        if (enter) leave(before);
    }
    return tick > LONG_TICK_S ? tick : 2 * tick;
}

/* Make progress for a while. `quiet`: since when nothing has moved. Returns its new value. */
static double work_locked(double quiet) {
    double began = ucch_now();
    int moved = 0;
    for (int i = 0; i < UCCH_BATCH && busy() && (i == 0 || !ucch_lock_wanted());
         i++) /* at least one round: threads that contend here must make progress */
        moved += ucch_progress_locked();
    double now = ucch_now();
    ucch_ops_check_deadlines_locked(now);
    if (ucch_has_moved(moved, now - began)) quiet = now;
    double nap = ucch_nap(now - quiet);
    if (nap > 0) {
        sleep_locked(nap, LONG_TICK_S);
        ucch_napped(now, nap);
    } else {
        ucch_unlock();
        if (nap == 0) ucch_yield(ucch_now());
        ucch_let_others();
        ucch_lock();
    }
    return quiet;
}

static void *thread_main(void *unused) {
    double tick = TICK_S, quiet = 0;
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    ucch_process_unbind_thread();
    UCCH_LOCKED;
    for (int began = 0; thread_on;) {
        if (begin && !began) {
            begin();
            began = 1;
        }
        if (busy() && !waiters) {
            quiet = work_locked(quiet > 0 ? quiet : ucch_now());
            tick = TICK_S;
            continue;
        }
        quiet = 0;
        if (!busy() && ucch_ops_under_way(UCCH_IN_STREAMS)) {
            tick = TICK_S;
            collect_locked();
        } else
            tick = idle_locked(tick);
    }
    return NULL;
}

/* Once the thread runs, make progress now and then also with nothing in flight. */
void ucch_progress_idle(void) {
    UCCH_LOCKED;
    idle_progress = 1;
    ucch_wake_locked();
    ucch_progress_thread(1);
}

/* In a child after fork: it has no other thread, but may have to free memory that it inherited. A poll would take what
 * peers send to its parent. */
static void after_fork(void) {
    inherited = inherited || contexts;
    thread_on = thread_asleep = thread_over = sleeps = 0;
    ucch_lock_after_fork();
    sleep_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    ucch_cond_init(&wake);
}

__attribute__((constructor)) static void begin_with(void) {
    ucch_cond_init(&wake);
    pthread_atfork(NULL, NULL, after_fork);
}

/* True in a child of a process that had contexts or workers. libucp cannot be used in it: its thread, which accepts
 * connections and takes the first message of a peer, is the parent's, and is not started again. */
int ucch_inherited(void) { return inherited; }

/* Wake the thread for work in streams unless it wakes soon: waking takes as long as several launches. */
void ucch_progress_streams(void) {
    if (!thread_wakes_soon) ucch_progress_thread(1);
}

/* Stop and join the thread before MPI_Finalize: a thread inside libucc at exit can crash a job that succeeded. Daemon
 * threads of Python may still make calls, so it is never started again. */
static void end_thread(void) {
    ucch_lock();
    int runs = thread_on;
    thread_on = 0;
    thread_over = 1;
    ucch_wake_locked();
    ucch_unlock();
    if (runs) pthread_join(thread, NULL);
}

/* on = 1: start the thread, or wake it from its long sleep; 0: end it for good. Returns 0, or -1 if no thread could be
 * created. */
int ucch_progress_thread(int on) {
    if (!on) {
        end_thread();
        return 0;
    }
    if (thread_on) {
        work_announced = 1;
        if (thread_asleep) {
            UCCH_LOCKED;
            ucch_wake_locked();
        }
        return 0;
    }
    UCCH_LOCKED; /* another thread may be starting it */
    if (!thread_on && !thread_over) thread_on = pthread_create(&thread, NULL, thread_main, NULL) == 0;
    return thread_on || thread_over ? 0 : -1;
}

/* ---- waits of callers ---- */

/* Yield the core, or nap if nothing has moved since `quiet` for long enough. Returns the time afterwards. */
double ucch_rest(double now, double quiet) {
    double nap = ucch_nap(now - quiet);
    if (nap <= 0) return nap < 0 ? now : ucch_yield(now);
    struct timespec t = {.tv_nsec = (long)(1e9 * nap)};
    int slack = prctl(PR_GET_TIMERSLACK); /* of the caller's thread */
    prctl(PR_SET_TIMERSLACK, NAP_SLACK_NS);
    nanosleep(&t, NULL);
    prctl(PR_SET_TIMERSLACK, slack);
    return ucch_napped(now, nap);
}

/* 0: active, 1: done, 2: failed. */
static int outcome(ucch_op *op) {
    int state = UCCH_LOAD(&op->state);
    return state == UCCH_ACTIVE ? 0 : state == UCCH_FAILED ? 2 : 1;
}

static int finished(ucch_op *op) { return outcome(op) != 0; }

/* True if the caller has to do the rest, or the op has finished. */
static int matched(ucch_op *op) { return UCCH_LOAD(&op->matched) || finished(op); }

/* What to wait for: any op finished, all finished, or all at least matched. */
enum { ANY, ALL, MATCHED };

/* `met`: ops at the beginning that were seen to be; of thousands of receives not each is looked at in every round. */
static int is_met(ucch_op **ops, int n, int what, int *met) {
    while (*met < n && (what == MATCHED ? matched(ops[*met]) : finished(ops[*met])))
        ++*met;
    int done = *met == n || (*met && what == ANY);
    for (int i = *met; what == ANY && i < n && !done; i++)
        done = finished(ops[i]);
    return done;
}

/* Spin for a while, then yield between rounds: with more ranks than cores, the peer that is waited for needs the core
 * (UCC alone takes milliseconds for 8 bytes there). */
static int wait_many(ucch_op **ops, int n, int what, double slice) {
    int round = 0, met = 0, done;
    double began = ucch_now(), now = began, quiet = began;
    begin_wait();
    while (!(done = is_met(ops, n, what, &met)) && now - began <= slice) {
        double start = now;
        int batch = ucch_crowded ? 1 : UCCH_BATCH, moved = 0, i = 0;
        ucch_lock();
        for (; i < batch && !(done = is_met(ops, n, what, &met)) && (i == 0 || !ucch_lock_wanted()); i++)
            moved += ucch_progress_locked();
        now = ucch_now();
        if (!inherited) ucch_ops_check_deadlines_locked(now);
        ucch_unlock();
        if (slice > MOMENT_S) ucch_let_others();
        if (done) break;
        if (ucch_has_moved(moved, (now - start) / i)) quiet = now;
        round += UCCH_BATCH;
        if ((round > ucch_spin_rounds || ucch_crowded || now - began > SPIN_S) && slice > MOMENT_S)
            now = ucch_rest(now, quiet);
    }
    end_wait();
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

/* Returns 1: done, 2: failed, 0: still active after `slice` seconds (Python then checks for signals). */
int ucch_wait(ucch_op *op, double slice) {
    if (!finished(op)) {
        UCCH_LOCKED;
        ucch_wait_briefly_locked(op);
    }
    if (!finished(op) && !wait_many(&op, 1, ALL, slice)) return 0;
    return outcome(op);
}

/* Returns 1: the caller has to do the rest, 2: finished, 0: neither after `slice` seconds. */
int ucch_wait_matched(ucch_op *op, double slice) {
    if (!matched(op) && !wait_many(&op, 1, MATCHED, slice)) return 0;
    return finished(op) ? 2 : 1;
}

int ucch_wait_any(ucch_op **ops, int n, int all, double slice) { return wait_many(ops, n, all ? ALL : ANY, slice); }

/* As ucch_wait, with one round of progress. */
int ucch_test(ucch_op *op) {
    if (!finished(op)) {
        UCCH_LOCKED;
        ucch_progress_locked();
        if (!finished(op) && !inherited) ucch_ops_check_deadlines_locked(ucch_now());
    }
    return outcome(op);
}

/* As ucch_test, without progress. */
int ucch_peek(ucch_op *op) { return outcome(op); }
