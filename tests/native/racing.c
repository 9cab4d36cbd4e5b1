/* Threads that allocate words in pinned memory at the same time. */
#include <pthread.h>
#include <stdint.h>

typedef int (*use_function)(int device);
typedef int (*flag_function)(void **word);

#define MOST 16

static struct {
    use_function use;
    flag_function flag;
    int each;
    void **out;
} job;
static pthread_barrier_t start;

static void *run(void *place) {
    void **out = job.out + (intptr_t)place * job.each;
    intptr_t failed = job.use(1);
    pthread_barrier_wait(&start);
    for (int i = 0; i < job.each && !failed; i++)
        failed = job.flag(&out[i]);
    return (void *)failed;
}

/* Allocate `each` words in each thread, stored thread by thread: 0, or an error. */
int race(use_function use, flag_function flag, int threads, int each, void **out) {
    pthread_t made[MOST];
    void *failed, *any = NULL;
    job.use = use;
    job.flag = flag;
    job.each = each;
    job.out = out;
    if (threads > MOST || pthread_barrier_init(&start, NULL, (unsigned)threads)) return -1;
    for (intptr_t i = 0; i < threads; i++)
        pthread_create(&made[i], NULL, run, (void *)i);
    for (int i = 0; i < threads; i++) {
        pthread_join(made[i], &failed);
        any = failed ? failed : any;
    }
    pthread_barrier_destroy(&start);
    return any != NULL;
}
