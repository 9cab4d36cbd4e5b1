/* Doorbells (mailbox.c) for streams that cannot wait for any memory: HIP's wait only for words of the runtime's own,
 * and where its command processor does so (GPU_STREAMOPS_CP_WAIT=1) these are worth a thread that passes on to them
 * what rings. It takes no lock that others hold for long and never calls the driver, either of which may wait for the
 * very stream. A kernel that waits would keep a part of the device from those beside it: with one of an H200's 132
 * multiprocessors taken matrix products, which fill all of them, took a quarter longer. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>

#include "shm/segment.h"

/* Between two looks at doorbells that have not rung, in ns. */
#define LOOK_NS 10000
#define SLACK_NS 1000

typedef struct passing {
    const uint32_t *doorbell;
    ucch_flag flag; /* that the stream waits for */
    uint32_t rings;
    int waits;
} passing;

static passing all[MAILBOX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static int running;

/* Pass on what has rung: whether there are others. */
static int look(void) {
    int waiting = 0;
    for (int i = 0; i < MAILBOX; i++) {
        passing *p = &all[i];
        if (!__atomic_load_n(&p->waits, __ATOMIC_ACQUIRE)) continue;
        if (!ucch_reached(p->doorbell, p->rings)) {
            waiting = 1;
            continue;
        }
        __atomic_store_n(&p->waits, 0, __ATOMIC_RELEASE);
        ucch_flag_pass(p->flag); /* last: the doorbell may be in use again at once */
    }
    return waiting;
}

static void *thread_main(void *unused) {
    (void)unused;
    struct timespec t = {.tv_nsec = LOOK_NS};
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    for (;;) {
        while (look())
            nanosleep(&t, NULL);
        pthread_mutex_lock(&lock);
        if (!look()) pthread_cond_wait(&more, &lock);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void after_fork(void) {
    running = 0;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* the thread, which this process has not, may have had it */
    more = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    for (int i = 0; i < MAILBOX; i++)
        all[i].waits = 0;
}

static int start_locked(void) {
    static int registered;
    pthread_t thread;
    if (!registered && pthread_atfork(NULL, NULL, after_fork) == 0) registered = 1;
    if (!running) running = pthread_create(&thread, NULL, thread_main, NULL) == 0 && pthread_detach(thread) == 0;
    return running;
}

/* Have all that streams need to wait for them, before one is held. */
void ucch_doorbells_reserve(void) {
    int traits = 0;
    ucch_bound_ops()->traits(&traits);
    if (all[0].flag.at || !(traits & UCCH_PARKS)) return;
    ucch_flags_reserve(MAILBOX);
    for (int i = 0; i < MAILBOX; i++)
        ucch_flag_next(&all[i].flag);
}

/* Let a stream wait until doorbell `i` has been rung for the `rings`th time: 0, or a failure. */
int ucch_doorbell_hold(int i, const uint32_t *doorbell, uint32_t rings, void *stream) {
    passing *p = &all[i];
    if (!p->flag.at) return UCCH_FAIL_DEVICE;
    pthread_mutex_lock(&lock);
    int status = start_locked() ? ucch_flag_next(&p->flag) : UCCH_FAIL_MEMORY;
    if (!status) {
        p->doorbell = doorbell;
        p->rings = rings;
        __atomic_store_n(&p->waits, 1, __ATOMIC_RELEASE);
        pthread_cond_signal(&more);
    }
    pthread_mutex_unlock(&lock);
    return status ? status : ucch_counter_wait(ucch_counter_of(p->flag), p->flag.ticket, NULL, stream);
}
