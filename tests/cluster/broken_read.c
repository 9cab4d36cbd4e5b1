/* Simulates a peer that can no longer be read, if loaded first (LD_PRELOAD): after `broken_read(n, 0)` this process's
 * n-th long read of another process's memory fails, as if that process had died; after `broken_read(n, 1)` the n-th
 * read of a TCP socket fails, and its connection ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define LONG 65536

/* Number of reads until one fails, of memory and of sockets. */
static int reads[2];

void broken_read(int nth, int tcp) { __atomic_store_n(&reads[tcp], nth, __ATOMIC_RELEASE); }

static int breaks(int tcp, size_t bytes) {
    return bytes >= LONG && __atomic_load_n(&reads[tcp], __ATOMIC_ACQUIRE) > 0 &&
           __atomic_sub_fetch(&reads[tcp], 1, __ATOMIC_ACQ_REL) == 0;
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                         unsigned long m, unsigned long flags) {
    ssize_t (*next)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long) =
        (ssize_t (*)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                     unsigned long))dlsym(RTLD_NEXT, "process_vm_readv");
    if (!n || !breaks(0, local->iov_len)) return next(pid, local, n, remote, m, flags);
    errno = ESRCH;
    return -1;
}

ssize_t recv(int fd, void *into, size_t bytes, int flags) {
    ssize_t (*next)(int, void *, size_t, int) = (ssize_t (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
    struct sockaddr_in peer;
    socklen_t room = sizeof(peer);
    int by_tcp = !getpeername(fd, (struct sockaddr *)&peer, &room) && peer.sin_family == AF_INET;
    if (!by_tcp || !breaks(1, bytes)) return next(fd, into, bytes, flags);
    shutdown(fd, SHUT_RDWR);
    errno = ECONNRESET;
    return -1;
}
