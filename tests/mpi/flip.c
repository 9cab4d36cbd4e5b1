/* Flips a bit (fakegpu/flip.h), if loaded first (LD_PRELOAD), in data from sockets, or read from other processes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "../fakegpu/flip.h"

ssize_t recv(int fd, void *data, size_t bytes, int flags) {
    ssize_t (*next)(int, void *, size_t, int) = (ssize_t (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
    ssize_t got = next(fd, data, bytes, flags);
    if (!(flags & (MSG_PEEK | MSG_TRUNC))) flip(data, got);
    return got;
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                         unsigned long m, unsigned long flags) {
    ssize_t (*next)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long) =
        (ssize_t (*)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                     unsigned long))dlsym(RTLD_NEXT, "process_vm_readv");
    ssize_t got = next(pid, local, n, remote, m, flags);
    for (unsigned long i = 0; got > 0 && i < n; i++)
        flip(local[i].iov_base, (ssize_t)local[i].iov_len);
    return got;
}
