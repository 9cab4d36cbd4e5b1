/* The lock, the list of what is in flight and the progress thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/wait.h"
#include "gpu/device.h"

/* Rounds between looks at the workers when no message is in flight. */
#define WORKER_EVERY 32
/* The thread looks for abandoned work this soon while there was some lately, and then ever later; whoever leaves it
 * work wakes it from a tick that is longer. It sleeps for good after the longest. */
#define TICK_S 0.25e-3
#define LONG_TICK_S 8e-3
/* While all that is under way is in streams: each look costs a moment of whoever launches more. */
#define LAUNCH_TICK_S 1e-3
/* With peers on other hosts it goes on looking, this often: the end of a finished send may still be in our buffers, or
 * in libucc's. */
#define IDLE_TICK_S 10e-3
/* How late the kernel may end a sleep of the thread, in ns. By default it is as much as the shortest sleep. */
#define SLACK_NS 5000
/* Peers are checked for death and for another call than ours after this long, then again at this distance. */
#define SUSPICION_S 0.002

/* Looks at the lock before sleeping for it, longer than a round of progress takes; and yields until those have had it
 * who wait for it, if they get there at all. */
#define LOCK_SPINS 2000
#define LET_OTHERS 1000

/* Recursive: Python holds it in places (ucc_hetero/ucc.py), and may collect objects there whose ends need it. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static volatile int wanted;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static ucch_op *active;
static volatile uint64_t in_flight;
static uint64_t failures;
static int messages; /* those of in_flight that are messages */
static pthread_t thread;
static volatile int thread_on, thread_asleep, idle_progress;
/* Work is about to come. */
static int called;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

double ucch_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Whoever makes progress takes the lock again and again, and a mutex is not fair: one who waits for it may be woken
 * only to find it taken, for milliseconds. So they say that they wait, and the others let them. */
void ucch_lock(void) {
    if (pthread_mutex_trylock(&lock) == 0)
        return;
    __atomic_add_fetch(&wanted, 1, __ATOMIC_SEQ_CST);
    int had = 0;
    for (int i = ucch_may_spin() ? LOCK_SPINS : 0; i && !had; i--) {
        relax();
        had = pthread_mutex_trylock(&lock) == 0;
    }
    if (!had)
        pthread_mutex_lock(&lock);
    __atomic_sub_fetch(&wanted, 1, __ATOMIC_SEQ_CST);
}

/* Without the lock: let those have it who wait for it. */
void ucch_let_others(void) {
    for (int i = 0; i < LET_OTHERS && __atomic_load_n(&wanted, __ATOMIC_SEQ_CST); i++)
        sched_yield();
}

/* With the lock: whether somebody waits for it. */
int ucch_lock_wanted(void) {
    return wanted;
}

void ucch_unlock(void) {
    pthread_mutex_unlock(&lock);
}

uint64_t ucch_in_flight(void) {
    return in_flight + (uint64_t)ucch_launches();
}

/* ---- what is progressed ---- */

void ucch_op_begin_locked(ucch_op *op, double timeout) {
    op->error = (ucch_error){.status = 0, .step = -1, .peer = -1, .seq = op->error.seq};
    op->started = ucch_now();
    op->deadline = timeout > 0 ? op->started + timeout : 0;
    op->heard = op->come = 0;
    op->state = UCCH_ACTIVE;
    op->prev = NULL;
    op->next = active;
    if (active)
        active->prev = op;
    active = op;
    in_flight++;
    messages += op->kind == UCCH_IS_MESSAGE;
}

void ucch_op_end_locked(ucch_op *op, int status, int step, int peer) {
    if (op->prev)
        op->prev->next = op->next;
    else
        active = op->next;
    if (op->next)
        op->next->prev = op->prev;
    in_flight--;
    messages -= op->kind == UCCH_IS_MESSAGE;
    op->come = 0;
    if (status < 0) {
        op->error.status = status;
        op->error.step = step;
        op->error.peer = peer;
        op->error.elapsed = ucch_now() - op->started;
        __atomic_add_fetch(&failures, 1, __ATOMIC_RELEASE);
    }
    int heard = op->heard;
    /* Last: whoever polls the state without the lock may reuse the operation from here on. */
    __atomic_store_n(&op->state, status < 0 ? UCCH_FAILED : UCCH_DONE, __ATOMIC_RELEASE);
    if (heard)
        ucch_ring();
}

/* Count the time limit of what is in flight from now. */
void ucch_op_deadline(ucch_op *op, double timeout) {
    ucch_lock();
    if (op->state == UCCH_ACTIVE)
        op->deadline = timeout > 0 ? ucch_now() + timeout : 0;
    ucch_unlock();
}

/* How many operations have failed so far: whether there is any use in asking them all. */
uint64_t ucch_failures(void) {
    return __atomic_load_n(&failures, __ATOMIC_ACQUIRE);
}

void ucch_op_error(ucch_op *op, ucch_error *error) {
    *error = op->error;
}

/* Ended first: a callback that cancelling sets off then finds nothing left to complete. */
static void abandon_locked(ucch_op *op, int status, int peer) {
    ucch_op_end_locked(op, status, -1, peer);
    if (op->kind == UCCH_IS_PROGRAM)
        ucch_program_abandon_locked((ucch_program *)op);
    else
        ucch_message_abandon_locked((ucch_message *)op);
}

int ucch_progress_locked(void) {
    static unsigned rounds;
    int before = ucch_device_enter(), moved = ucch_poll_contexts_locked();
    /* With no message of ours in flight the workers are looked at now and then only, for what peers send: a look costs
     * as much as a small collective. */
    if (messages || ++rounds % WORKER_EVERY == 0)
        moved += ucch_poll_workers_locked();
    for (ucch_op *op = active, *next; op; op = next) {
        next = op->next;
        if (op->kind == UCCH_IS_PROGRAM)
            moved += ucch_program_advance_locked((ucch_program *)op);
        else if (op->kind == UCCH_IS_MESSAGE)
            moved += ucch_message_pump_locked((ucch_message *)op);
    }
    if (ucch_launches()) {
        int ended = ucch_launches_poll_locked();
        if (ended)
            ucch_launches_ended_locked();
        moved += ended;
    }
    ucch_device_leave(before);
    return moved;
}

/* End what is past its deadline, and what waits for a peer that died or called something else; now and then. */
void ucch_police_locked(double now) {
    static double last;
    if (now - last < SUSPICION_S)
        return;
    last = now;
    for (ucch_op *op = active, *next; op; op = next) {
        next = op->next;
        if (op->kind == UCCH_IS_PROGRAM && now - op->started > SUSPICION_S) {
            int bad = ucch_program_check_locked((ucch_program *)op);
            if (bad < 0) {
                abandon_locked(op, bad, op->error.peer);
                continue;
            }
        }
        if (op->kind == UCCH_IS_MESSAGE && now - op->started > SUSPICION_S) {
            if (ucch_message_check_locked((ucch_message *)op, now) < 0)
                abandon_locked(op, UCCH_FAIL_PEER, -1);
            if (op->state != UCCH_ACTIVE)
                continue;
        }
        if (op->deadline > 0 && now > op->deadline)
            abandon_locked(op, UCCH_FAIL_TIMEOUT, -1);
    }
    if (ucch_launches())
        ucch_launches_police_locked(now, SUSPICION_S);
}

int ucch_progress_once(void) {
    ucch_lock();
    int moved = ucch_progress_locked();
    ucch_unlock();
    return moved;
}

/* ---- the progress thread ---- */

/* Sleep until woken, `seconds` at most (0: for ever). */
static void sleep_locked(double seconds) {
    thread_asleep = seconds == 0 || seconds > TICK_S;
    if (seconds == 0)
        pthread_cond_wait(&wake, &lock);
    else {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        int64_t ns = t.tv_nsec + (int64_t)(1e9 * seconds);
        t.tv_sec += ns / 1000000000;
        t.tv_nsec = ns % 1000000000;
        pthread_cond_timedwait(&wake, &lock, &t);
    }
    thread_asleep = 0;
}

/* Work has come that nobody waits for in the library: the thread is to look at once. */
void ucch_wake_locked(void) {
    pthread_cond_signal(&wake);
}

/* The last one that waited has left, and something is still under way. */
void ucch_left_behind(void) {
    if (!active)
        return;
    ucch_lock(); /* the thread may be about to sleep, because somebody waits */
    if (active && thread_asleep)
        pthread_cond_signal(&wake);
    ucch_unlock();
}

/* Nobody waits for what is in a stream: it is looked at now and then, for its end and for what went wrong. */
static void collect_locked(void) {
    sleep_locked(LAUNCH_TICK_S);
    if (ucch_waiters)
        return;
    ucch_progress_locked();
    ucch_police_locked(ucch_now());
}

/* Nothing to do for the thread: whoever waits makes progress, and it steps in only when nobody does. */
static double idle_locked(double tick) {
    __atomic_store_n(&thread_asleep, 1, __ATOMIC_SEQ_CST); /* first: whoever calls either sees this or is seen */
    if (__atomic_exchange_n(&called, 0, __ATOMIC_SEQ_CST))
        tick = TICK_S;
    int forever = !active && tick > LONG_TICK_S;
    sleep_locked(!forever ? tick : idle_progress ? IDLE_TICK_S : 0);
    if (forever && idle_progress && !ucch_waiters) {
        int before = ucch_device_enter();
        ucch_poll_all_locked();
        ucch_device_leave(before);
    }
    return tick > LONG_TICK_S ? tick : 2 * tick;
}

/* One turn of work; `quiet`: since when nothing has moved. Returns that as of now. */
static double work_locked(double quiet) {
    double began = ucch_now();
    int moved = 0;
    for (int i = 0; i < UCCH_BATCH && active && (i == 0 || !wanted); i++) /* one: threads that meet here must move on */
        moved += ucch_progress_locked();
    double now = ucch_now();
    ucch_police_locked(now);
    if (ucch_has_moved(moved, now - began))
        quiet = now;
    double nap = ucch_nap(now - quiet);
    if (nap > 0) {
        sleep_locked(nap);
        ucch_napped(now, nap);
    } else {
        ucch_unlock();
        ucch_yield(ucch_now());
        ucch_let_others();
        ucch_lock();
    }
    return quiet;
}

static void *thread_main(void *unused) {
    (void)unused;
    double tick = TICK_S, quiet = 0;
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    ucch_lock();
    while (thread_on) {
        if (active && !ucch_waiters) {
            quiet = work_locked(quiet > 0 ? quiet : ucch_now());
            tick = TICK_S;
            continue;
        }
        quiet = 0;
        if (!active && ucch_launches()) {
            tick = TICK_S;
            collect_locked();
        } else
            tick = idle_locked(tick);
    }
    ucch_unlock();
    return NULL;
}

/* Make progress now and then even when nothing is in flight, once the thread runs. */
void ucch_progress_idle(void) {
    ucch_lock();
    idle_progress = 1;
    pthread_cond_broadcast(&wake);
    ucch_unlock();
    ucch_progress_thread(1);
}

/* Nobody else is in this process, which may have to release what it has inherited. */
static void after_fork(void) {
    thread_on = thread_asleep = 0;
    wanted = 0;
    lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; /* of a thread of the parent's, perhaps */
    wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

/* on = 1: start it, or wake it if it sleeps for good; 0: stop and join it (before MPI_Finalize: a thread inside libucc
 * at exit ends a good run badly). Returns 0, or -1 if no thread could be made. */
int ucch_progress_thread(int on) {
    static int registered;
    if (!on) {
        if (!thread_on)
            return 0;
        ucch_lock();
        thread_on = 0;
        pthread_cond_broadcast(&wake);
        ucch_unlock();
        pthread_join(thread, NULL);
        return 0;
    }
    if (thread_on) {
        __atomic_store_n(&called, 1, __ATOMIC_SEQ_CST);
        if (thread_asleep) {
            ucch_lock();
            pthread_cond_broadcast(&wake);
            ucch_unlock();
        }
        return 0;
    }
    if (!registered && pthread_atfork(NULL, NULL, after_fork) == 0)
        registered = 1;
    thread_on = 1;
    if (pthread_create(&thread, NULL, thread_main, NULL)) {
        thread_on = 0;
        return -1;
    }
    return 0;
}
