/* A connection that breaks, if loaded first (LD_PRELOAD): the n-th long read of a TCP socket that this process begins
 * after `broken_receive(n)` fails, and the connection ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define LONG 65536

static int reads;

void broken_receive(int nth) { __atomic_store_n(&reads, nth, __ATOMIC_RELEASE); }

ssize_t recv(int fd, void *into, size_t bytes, int flags) {
    ssize_t (*next)(int, void *, size_t, int) = (ssize_t (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
    struct sockaddr_in peer;
    socklen_t room = sizeof(peer);
    if (bytes >= LONG && __atomic_load_n(&reads, __ATOMIC_ACQUIRE) > 0 &&
        !getpeername(fd, (struct sockaddr *)&peer, &room) && peer.sin_family == AF_INET) {
        if (__atomic_sub_fetch(&reads, 1, __ATOMIC_ACQ_REL) == 0) {
            shutdown(fd, SHUT_RDWR);
            errno = ECONNRESET;
            return -1;
        }
    }
    return next(fd, into, bytes, flags);
}
