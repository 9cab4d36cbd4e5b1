/* A peer whose memory cannot be read any more, as it has died, if loaded first (LD_PRELOAD): the n-th long read that
 * this process makes of another one's memory after `unreadable(n)` fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>

#define LONG 65536

static int reads;

void unreadable(int nth) { __atomic_store_n(&reads, nth, __ATOMIC_RELEASE); }

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                         unsigned long m, unsigned long flags) {
    ssize_t (*next)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long) =
        (ssize_t (*)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                     unsigned long))dlsym(RTLD_NEXT, "process_vm_readv");
    if (n && local->iov_len >= LONG && __atomic_fetch_sub(&reads, 1, __ATOMIC_ACQ_REL) == 1) {
        errno = ESRCH;
        return -1;
    }
    return next(pid, local, n, remote, m, flags);
}
