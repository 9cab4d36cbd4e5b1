/* Progress: a round of it, and the thread that makes it while no caller waits; and waits of callers: they spin, then
 * yield, then nap, or listen and leave progress to the thread. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "base/base.h"

/* Rounds between looks at the workers when no message is in flight. */
#define WORKER_EVERY 32
/* The thread looks for abandoned work this soon while there was some lately, and then ever later; a thread that leaves
 * it work wakes it from a tick that is longer. It sleeps for good after the longest. */
#define TICK_S 0.25e-3
#define LONG_TICK_S 8e-3
/* While all that is under way is in streams: each look delays threads that launch more for a moment. */
#define LAUNCH_TICK_S 1e-3
/* With peers on other hosts it goes on looking, this often: the end of a finished send may still be in our buffers, or
 * in libucc's. */
#define IDLE_TICK_S 10e-3
/* How late the kernel may end a sleep of the thread, in ns. By default it is as much as the shortest sleep. */
#define SLACK_NS 5000
/* The longest that a thread spins before its first yield, however little or much a round of progress takes. */
#define SPIN_S 10e-6
/* A wait that is given no more than this does not give the core away, and leaves the lock alone soon enough. */
#define MOMENT_S 50e-6
/* Rounds of a wait that is over at once. */
#define QUICK 64
/* How late the kernel may end a caller's nap, in ns. By default it is longer than the shortest nap. */
#define NAP_SLACK_NS 2000
/* The thread sleeps with a mutex of its own. With the lock, it would wait for that at the end of a sleep without being
 * counted (lock.c): callers that make progress would not let it have the lock, and wake it in vain whenever they let
 * go. */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake;
static _Atomic int sleeps;
static int woken; /* with that mutex */
static int (*enter)(void);
static void (*leave)(int);
static void (*begin)(void);
static _Atomic int waiters; /* threads that make progress themselves */
static pthread_t thread;
static _Atomic int thread_on, thread_asleep, thread_dozes; /* dozes: wakes soon enough for what is in streams */
static int thread_over;                                    /* for good; with the lock */
static int idle_progress;
/* Work is about to come. */
static _Atomic int called;

/* ---- what progress is made in ---- */

static ucch_context *contexts;

/* Make progress in a context, or in a worker, from now on: NULL where there is no memory. */
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

/* Of contexts all, or those that programs in flight need; and whether of workers, too. */
static int poll_locked(int all, int workers) {
    int moved = 0;
    for (ucch_context *c = contexts; c; c = c->next) {
        if (c->handle && (all || c->users)) moved += ucc_context_progress(c->handle) > 0;
        if (c->worker && workers) moved += (int)ucp_worker_progress(c->worker);
    }
    return moved;
}

/* ---- a round of it ---- */

static int busy(void) { return ucch_ops_under_way(UCCH_BY_CONTEXTS) || ucch_ops_under_way(UCCH_BY_WORKERS); }

/* Set the functions around each round of progress: a device that is made the thread's own before, and not after; and
 * one that the progress thread calls first. */
void ucch_progress_inside(int (*before)(void), void (*after)(int), void (*first)(void)) {
    UCCH_LOCKED;
    enter = before;
    leave = after;
    begin = first;
}

int ucch_progress_locked(void) {
    static unsigned rounds;
    /* With no message of ours in flight the workers are looked at now and then only, for what peers send: a look costs
     * as much as a small collective. */
    int workers = ucch_ops_under_way(UCCH_BY_WORKERS) || ++rounds % WORKER_EVERY == 0;
    int before = enter ? enter() : 0, moved = poll_locked(0, workers);
    moved += ucch_ops_advance_locked();
    if (enter) leave(before);
    return moved;
}

int ucch_progress_once(void) {
    /* A thread that has the lock makes progress, or waits in a library for peers: this one would stand, too. */
    if (!ucch_trylock()) return 0;
    int moved = ucch_progress_locked();
    ucch_unlock();
    return moved;
}

/* ---- the progress thread ---- */

/* Sleep until woken, `seconds` at most (0: for ever): 1 if it was woken. */
static int sleep_until_woken(double seconds) {
    while (!woken && !ucch_cond_wait(&wake, &sleep_lock, seconds))
        ;
    return woken;
}

/* Sleep without the lock until woken, `seconds` at most (0: for ever), and, while callers make progress, on and on in
 * turns of `then`. */
static void sleep_locked(double seconds, double then) {
    thread_asleep = seconds == 0 || seconds > TICK_S;
    thread_dozes = seconds > 0 && seconds <= LAUNCH_TICK_S;
    pthread_mutex_lock(&sleep_lock);
    woken = 0;
    sleeps = 1;
    ucch_unlock();
    for (int up = sleep_until_woken(seconds); !up && waiters;) {
        thread_dozes = then <= LAUNCH_TICK_S;
        thread_asleep = 1; /* before `waiters` is read: a caller that stops waiting sees this, or is seen */
        if (waiters) up = sleep_until_woken(then);
    }
    pthread_mutex_unlock(&sleep_lock);
    ucch_lock();
    sleeps = thread_asleep = thread_dozes = 0;
}

/* Work has come for which no thread waits in the library: the progress thread is to look at once. */
void ucch_wake_locked(void) {
    if (!sleeps) return;
    pthread_mutex_lock(&sleep_lock);
    woken = 1;
    pthread_cond_signal(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

/* A caller is polling; the progress thread stands down. */
static void begin_wait(void) { waiters++; }

/* The last one that waited may leave something under way. */
static void end_wait(void) {
    if (--waiters || !busy()) return;
    UCCH_LOCKED; /* the thread may be about to sleep, because a caller waits */
    if (busy() && thread_asleep) ucch_wake_locked();
}

/* No thread waits for calls in streams: they are polled now and then, for their ends and for failures. */
static void collect_locked(void) {
    sleep_locked(LAUNCH_TICK_S, LAUNCH_TICK_S);
    /* All that have ended by now: of several requests libucc looks at one in a round of progress. */
    for (int moved = 1; moved && thread_on && !waiters;) {
        moved = ucch_progress_locked();
        ucch_ops_check_deadlines_locked(ucch_now());
        if (!ucch_lock_wanted()) continue;
        ucch_unlock();
        ucch_let_others();
        ucch_lock();
    }
}

/* Nothing to do for the thread: waiting callers make progress, and it steps in when there are none. */
static double idle_locked(double tick) {
    thread_asleep = 1; /* first: a caller either sees this or is seen */
    if (atomic_exchange(&called, 0)) tick = TICK_S;
    int forever = !busy() && tick > LONG_TICK_S;
    sleep_locked(!forever ? tick : idle_progress ? IDLE_TICK_S : 0, LONG_TICK_S);
    if (forever && idle_progress && !waiters) {
        int before = enter ? enter() : 0;
        poll_locked(1, 1); /* what has ended here may have left something to send, for which other hosts wait */
        if (enter) leave(before);
    }
    return tick > LONG_TICK_S ? tick : 2 * tick;
}

/* One turn of work; `quiet`: since when nothing has moved. Returns that as of now. */
static double work_locked(double quiet) {
    double began = ucch_now();
    int moved = 0;
    for (int i = 0; i < UCCH_BATCH && busy() && (i == 0 || !ucch_lock_wanted());
         i++) /* one: threads that meet here must move on */
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

/* Make progress now and then even when nothing is in flight, once the thread runs. */
void ucch_progress_idle(void) {
    UCCH_LOCKED;
    idle_progress = 1;
    ucch_wake_locked();
    ucch_progress_thread(1);
}

/* No other thread is in this process, which may have to release memory that it has inherited. */
static void after_fork(void) {
    thread_on = thread_asleep = thread_over = sleeps = 0;
    ucch_lock_after_fork();
    sleep_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    ucch_cond_init(&wake);
}

__attribute__((constructor)) static void make_condition(void) { ucch_cond_init(&wake); }

/* There is more in streams: waking a thread takes as long as some launches. */
void ucch_progress_streams(void) {
    if (!thread_dozes) ucch_progress_thread(1);
}

/* Stop and join it, before MPI_Finalize: a thread inside libucc at exit ends a good run badly. Daemons of Python's may
 * go on with calls, and there is none any more. */
static void end_thread(void) {
    ucch_lock();
    int runs = thread_on;
    thread_on = 0;
    thread_over = 1;
    ucch_wake_locked();
    ucch_unlock();
    if (runs) pthread_join(thread, NULL);
}

/* on = 1: start it, or wake it if it sleeps for good; 0: end it, and start none from now on. Returns 0, or -1 if no
 * thread could be made. */
int ucch_progress_thread(int on) {
    static int registered;
    if (!on) {
        end_thread();
        return 0;
    }
    if (thread_on) {
        called = 1;
        if (thread_asleep) {
            UCCH_LOCKED;
            ucch_wake_locked();
        }
        return 0;
    }
    UCCH_LOCKED; /* another thread may start it, too */
    if (!registered && pthread_atfork(NULL, NULL, after_fork) == 0) registered = 1;
    if (!thread_on && !thread_over) thread_on = pthread_create(&thread, NULL, thread_main, NULL) == 0;
    return thread_on || thread_over ? 0 : -1;
}

/* ---- waits of callers ---- */

/* Give the core away, or nap where nothing has moved since `quiet`; returns the time after `now`. */
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
    begin_wait();
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
