/* Wraps Open MPI: delays Python's threads in each round of MPI's progress, so that MPI may be finalized meanwhile. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int opal_progress(void) {
    static int (*its)(void);
    if (!its) {
        void *library = dlopen("libopen-pal.so.80", RTLD_NOLOAD | RTLD_LAZY);
        if (!library) library = dlopen("libopen-pal.so.40", RTLD_NOLOAD | RTLD_LAZY);
        if (!library || !(its = (int (*)(void))dlsym(library, "opal_progress"))) abort();
    }
    if (syscall(SYS_gettid) != getpid()) usleep((useconds_t)atoi(getenv("LATE_US")));
    return its();
}
