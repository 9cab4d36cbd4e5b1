/* The lock, the list of what is in flight, the wait loop and the progress thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "device.h"

/* Rounds of progress under one hold of the lock, and the rounds after which a waiter looks at the clock. */
#define BATCH 8
/* Nobody spins longer than this before the first yield, however little a round of progress takes or how much. */
#define SPIN_S 10e-6
/* A yield that took longer than this gave the core to somebody; so many quick ones later it counts as free again. */
#define CROWDED_S 1e-6
#define CROWDED_YIELDS 64
#define CLOCK_EVERY 64
#define QUICK 64
/* Rounds between looks at the workers when no message is in flight. */
#define WORKER_EVERY 32
/* The thread looks for abandoned work this often while there was some lately; it sleeps for good after IDLE_TICKS. */
#define TICK_NS 250000L
#define IDLE_TICKS 200
/* While all that is under way is in streams: each look costs a moment of whoever launches more. */
#define LAUNCH_TICK_NS 1000000L
/* With peers on other hosts it goes on looking, this often: the end of a finished send may still be in our buffers. */
#define IDLE_TICK_NS 10000000L
/* Peers are checked for death and for another call than ours after this long, then again at this distance. */
#define SUSPICION_S 0.002

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static ucch_op *active;
static volatile int waiters;
static volatile uint64_t in_flight;
static int messages; /* those of in_flight that are messages */
static int spin_rounds = 1000;
/* More than 0 while others want this core: then spinning only delays whoever is waited for. */
static volatile int crowded;
static pthread_t thread;
static volatile int thread_on, thread_asleep, idle_progress;

double ucch_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void ucch_lock(void) {
    pthread_mutex_lock(&lock);
}

void ucch_unlock(void) {
    pthread_mutex_unlock(&lock);
}

/* Rounds a waiter spins before it yields the core in every round; 0 where ranks outnumber cores. */
void ucch_set_spin(int iterations) {
    spin_rounds = iterations;
}

uint64_t ucch_in_flight(void) {
    return in_flight + (uint64_t)ucch_launches();
}

/* ---- what is progressed ---- */

void ucch_op_begin_locked(ucch_op *op, double timeout) {
    op->error = (ucch_error){.status = 0, .step = -1, .peer = -1, .seq = op->error.seq};
    op->started = ucch_now();
    op->deadline = timeout > 0 ? op->started + timeout : 0;
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
    if (status < 0) {
        op->error.status = status;
        op->error.step = step;
        op->error.peer = peer;
        op->error.elapsed = ucch_now() - op->started;
    }
    /* Last: whoever polls the state without the lock may reuse the operation from here on. */
    __atomic_store_n(&op->state, status < 0 ? UCCH_FAILED : UCCH_DONE, __ATOMIC_RELEASE);
}

/* Ended first: a callback that cancelling sets off then finds nothing left to complete. */
static void abandon_locked(ucch_op *op, int status, int peer) {
    ucch_op_end_locked(op, status, -1, peer);
    if (op->kind == UCCH_IS_PROGRAM)
        ucch_program_abandon_locked((ucch_program *)op);
    else
        ucch_message_abandon_locked((ucch_message *)op);
}

static int progress_locked(void) {
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
    if (ucch_launches())
        moved += ucch_launches_poll_locked();
    ucch_device_leave(before);
    return moved;
}

/* End what is past its deadline, and what waits for a peer that died or called something else. */
static void police_locked(double now) {
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
    int moved = progress_locked();
    ucch_unlock();
    return moved;
}

/* ---- waiting ---- */

static int finished(ucch_op *op) {
    return __atomic_load_n(&op->state, __ATOMIC_ACQUIRE) != UCCH_ACTIVE;
}

static int enough(ucch_op **ops, int n, int all) {
    int done = 0;
    for (int i = 0; i < n; i++) {
        int f = finished(ops[i]);
        if (f && !all)
            return 1;
        done += f;
    }
    return done == n;
}

/* Give the core away, and learn whether anybody took it. */
static void yield(void) {
    double start = ucch_now();
    sched_yield();
    if (ucch_now() - start > CROWDED_S)
        crowded = CROWDED_YIELDS;
    else if (crowded > 0)
        crowded--;
}

/* Spin for a while, then give the core away between rounds: with more ranks than cores the peer that we wait for is
 * the one that needs it (UCC alone takes milliseconds for 8 bytes there). */
static int wait_many(ucch_op **ops, int n, int all, double slice) {
    int round = 0, done;
    double last = 0, until = 0, began = ucch_now();
    __atomic_add_fetch(&waiters, 1, __ATOMIC_SEQ_CST);
    while (!(done = enough(ops, n, all))) {
        ucch_lock();
        int batch = crowded ? 1 : BATCH;
        for (int i = 0; i < batch && !(done = enough(ops, n, all)); i++)
            progress_locked();
        ucch_unlock();
        if (done)
            break;
        if (++round * BATCH > spin_rounds || crowded || ucch_now() - began > SPIN_S)
            yield();
        if (round % CLOCK_EVERY == 0) {
            double now = ucch_now();
            if (until == 0)
                until = now + slice;
            if (now - last > SUSPICION_S) {
                last = now;
                ucch_lock();
                police_locked(now);
                ucch_unlock();
            }
            if (now > until)
                break;
        }
    }
    __atomic_sub_fetch(&waiters, 1, __ATOMIC_SEQ_CST);
    return done;
}

/* 1: finished well, 2: failed, 0: still going after `slice` seconds (Python then looks for signals). */
int ucch_wait(ucch_op *op, double slice) {
    if (!finished(op)) {
        /* Most small calls end here, under one hold of the lock. */
        ucch_lock();
        double began = ucch_now();
        for (int i = 0; i < QUICK && i < spin_rounds && !crowded && op->state == UCCH_ACTIVE; i++) {
            progress_locked();
            if (i % BATCH == BATCH - 1 && ucch_now() - began > SPIN_S)
                break;
        }
        ucch_unlock();
    }
    if (!finished(op) && !wait_many(&op, 1, 1, slice))
        return 0;
    return op->state == UCCH_FAILED ? 2 : 1;
}

int ucch_wait_any(ucch_op **ops, int n, int all, double slice) {
    return wait_many(ops, n, all, slice);
}

/* As ucch_wait, after one round of progress. */
int ucch_test(ucch_op *op) {
    if (!finished(op)) {
        ucch_lock();
        progress_locked();
        if (!finished(op))
            police_locked(ucch_now());
        ucch_unlock();
    }
    return op->state == UCCH_FAILED ? 2 : finished(op);
}

/* As ucch_test, without progress. */
int ucch_peek(ucch_op *op) {
    return finished(op) ? 1 + (op->state == UCCH_FAILED) : 0;
}

/* Count the time limit of what is in flight from now. */
void ucch_op_deadline(ucch_op *op, double timeout) {
    ucch_lock();
    if (op->state == UCCH_ACTIVE)
        op->deadline = timeout > 0 ? ucch_now() + timeout : 0;
    ucch_unlock();
}

void ucch_op_error(ucch_op *op, ucch_error *error) {
    *error = op->error;
}

/* ---- the progress thread ---- */

static void tick_locked(int forever) {
    if (forever && !idle_progress) {
        thread_asleep = 1;
        pthread_cond_wait(&wake, &lock);
        thread_asleep = 0;
        return;
    }
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += forever ? IDLE_TICK_NS : ucch_launches() ? LAUNCH_TICK_NS : TICK_NS;
    if (t.tv_nsec >= 1000000000L) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000L;
    }
    thread_asleep = forever;
    pthread_cond_timedwait(&wake, &lock, &t);
    thread_asleep = 0;
    if (forever && !waiters)
        ucch_poll_workers_locked();
}

/* Work has come that nobody waits for in the library: the thread is to look at once. */
void ucch_wake_locked(void) {
    pthread_cond_signal(&wake);
}

/* Nobody waits for what is in a stream: it is looked at now and then, for its end and for what went wrong. */
static void collect_locked(double *last) {
    tick_locked(0);
    if (waiters)
        return;
    progress_locked();
    double now = ucch_now();
    if (now - *last > SUSPICION_S) {
        *last = now;
        police_locked(now);
    }
}

static void *thread_main(void *unused) {
    (void)unused;
    int idle = 0;
    double last = 0;
    ucch_lock();
    while (thread_on) {
        if (!active && ucch_launches()) {
            idle = 0;
            collect_locked(&last);
            continue;
        }
        /* Whoever waits makes progress; the thread steps in only when nobody does. */
        if (!active || waiters) {
            idle = active ? 0 : idle + 1;
            tick_locked(idle > IDLE_TICKS);
            continue;
        }
        idle = 0;
        for (int i = 0; i < BATCH && active; i++)
            progress_locked();
        double now = ucch_now();
        if (now - last > SUSPICION_S) {
            last = now;
            police_locked(now);
        }
        ucch_unlock();
        sched_yield();
        ucch_lock();
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

static void after_fork(void) {
    thread_on = 0;
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
