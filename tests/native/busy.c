/* A thread that calls a function all the time. */
#include <pthread.h>
#include <stddef.h>

static void (*function)(void *);

static void *run(void *unused) {
    for (;;)
        function(NULL);
    return NULL;
}

int begin(void (*which)(void *)) {
    pthread_t thread;
    function = which;
    return pthread_create(&thread, NULL, run, NULL);
}
