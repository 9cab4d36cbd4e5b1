/* Links: TCP connections between processes, mostly of different hosts, separate from the data and served by one native
 * thread. A rank learns over them which peer processes are alive, whatever libucp and Python do. Each end sends a
 * heartbeat every quarter of a second.
 *
 * A link that breaks without a goodbye message means that the peer process died. A link on which nothing arrives for
 * `timeout` seconds, not even a TCP acknowledgement, means that the peer's host is gone; a late turn of this thread
 * counts only MAX_TURN_S of that time. While the peer's kernel acknowledges, the process may be stopped or wait for a
 * core (threads of busy hosts have waited 1.4 s), so it gets several times as long.
 *
 * While calls wait for a host, all TCP connections of this process to its addresses are probed in the same way, whoever
 * made them: libucp does not tell which ones are its own. */
#include "net/net.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* TCP_SYN_SENT of the kernel: the peer has not answered the SYN. */
#define SYN_SENT 2

/* Seconds between turns of the thread, and without a send after which a heartbeat is due. */
#define TURN_S 0.1
#define HEARTBEAT_S 0.25
/* Most seconds that one turn adds to a link's silence: a thread that was kept from its core did not receive
 * meanwhile. */
#define MAX_TURN_S 0.2
/* A process whose host acknowledges is declared silent after this many timeouts. */
#define BUSY_FACTOR 5
/* Most seconds that the last messages may take when the process ends. */
#define GOODBYE_S 0.2
#define IN_BYTES (2 * (UCCH_LINK_BYTES + sizeof(ucch_link_header)))
#define OUT_BYTES (64 << 10)
/* Most links that one epoll_wait returns. */
#define EVENTS_PER_WAIT 64

/* Kinds of messages that this file itself sends. */
enum { HEARTBEAT, GOODBYE };

typedef struct link {
    int fd;   /* -1: closed */
    int fate; /* UCCH_THERE while the peer is alive, UCCH_LEFT after its goodbye, else how it was lost */
    double silent_s, sent_at, timeout; /* seconds: since data arrived; time of the last send; timeout (0: none) */
    size_t filled, queued;
    char in[IN_BYTES], out[OUT_BYTES];
} link_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static int running, stop, nlinks;
static int epoll_fd = -1, wake_fd = -1; /* epoll over all links, and an eventfd that ends its wait */
static link_t **links;
static ucch_listener listener;

void ucch_links_listen(const ucch_listener *l) { listener = *l; }
void ucch_links_lock(void) { ucch_take(&lock, UCCH_AT_LINKS); }
void ucch_links_unlock(void) { ucch_give(&lock, UCCH_AT_LINKS); }

/* Fate of the process at the other end. The caller holds the lock. */
int ucch_link_fate_locked(int link) { return link >= 0 && link < nlinks ? links[link]->fate : UCCH_DIED; }

/* ---- sending and receiving ---- */

static void close_link(link_t *l, int number, int fate) {
    if (l->fd >= 0) {
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, l->fd, NULL);
        close(l->fd);
    }
    l->fd = -1;
    if (l->fate) return;
    l->fate = fate;
    if (fate != UCCH_LEFT && listener.on_lost) listener.on_lost(number, fate);
}

static void flush(link_t *l, int number) {
    size_t done = 0;
    while (l->fd >= 0 && done < l->queued) {
        ssize_t n = send(l->fd, l->out + done, l->queued - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) close_link(l, number, UCCH_DIED);
        if (n <= 0) break;
        done += (size_t)n;
    }
    memmove(l->out, l->out + done, l->queued - done);
    l->queued -= done;
}

/* Send a message. Returns 0, or -1 if the output buffer has no room or the link is closed. */
int ucch_link_send(int number, uint32_t kind, uint64_t key, const void *data, size_t bytes) {
    if (number >= nlinks) return -1; /* a parent's, or of a process that ends */
    link_t *l = links[number];
    ucch_link_header head = {.bytes = (uint32_t)bytes, .kind = kind, .key = key};
    if (l->fd < 0 || l->queued + sizeof(head) + bytes > OUT_BYTES) return -1;
    memcpy(l->out + l->queued, &head, sizeof(head));
    if (bytes) memcpy(l->out + l->queued + sizeof(head), data, bytes);
    l->queued += sizeof(head) + bytes;
    l->sent_at = ucch_now();
    flush(l, number);
    return 0;
}

/* Handle a message. Returns 0, or not 0 if no correct peer would send it. */
static int dispatch(link_t *l, int number, const ucch_link_header *head, const char *data) {
    if (head->kind == GOODBYE) close_link(l, number, UCCH_LEFT);
    if (head->kind <= GOODBYE) return head->bytes != 0;
    return listener.on_message ? listener.on_message(number, head->kind, head->key, data, head->bytes) : 0;
}

static void parse(link_t *l, int number) {
    size_t at = 0;
    ucch_link_header head;
    while (l->fd >= 0 && l->filled - at >= sizeof(head)) {
        memcpy(&head, l->in + at, sizeof(head));
        int bad = head.bytes > UCCH_LINK_BYTES;
        if (!bad && l->filled - at < sizeof(head) + head.bytes) break;
        if (bad || dispatch(l, number, &head, l->in + at + sizeof(head))) {
            close_link(l, number, UCCH_DIED);
            return;
        }
        at += sizeof(head) + head.bytes;
    }
    memmove(l->in, l->in + at, l->filled - at);
    l->filled -= at;
}

static void receive(link_t *l, int number) {
    while (l->fd >= 0) {
        ssize_t n = recv(l->fd, l->in + l->filled, IN_BYTES - l->filled, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            close_link(l, number, UCCH_DIED);
            return;
        }
        l->silent_s = 0;
        l->filled += (size_t)n;
        parse(l, number);
    }
}

/* ---- the thread ---- */

/* True if data is in flight and the peer's kernel has not acknowledged anything for the link's timeout. */
static int is_unacknowledged(const link_t *l) {
    struct tcp_info info;
    socklen_t bytes = sizeof(info);
    if (getsockopt(l->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes)) return 0;
    return info.tcpi_unacked > 0 && info.tcpi_last_ack_recv >= 1e3 * l->timeout;
}

static void check_link(link_t *l, int number, double now, double passed) {
    if (l->fd < 0) return;
    if (now - l->sent_at > HEARTBEAT_S) ucch_link_send(number, HEARTBEAT, 0, NULL, 0);
    flush(l, number);
    l->silent_s += passed < MAX_TURN_S ? passed : MAX_TURN_S;
    if (l->fd < 0 || l->fate || !l->timeout || l->silent_s < l->timeout) return;
    int gone = is_unacknowledged(l);
    if (!gone && l->silent_s < BUSY_FACTOR * l->timeout) return;
    l->fate = gone ? UCCH_UNREACHABLE : UCCH_SILENT; /* it may come back, and hear that it is given up */
    if (listener.on_lost) listener.on_lost(number, l->fate);
}

static void turn(void) {
    static double last;
    double now = ucch_now(), passed = now - last;
    if (passed < TURN_S) return;
    last = now;
    if (listener.on_turn) listener.on_turn();
    for (int i = 0; i < nlinks; i++)
        check_link(links[i], i, now, passed);
}

static void *link_thread(void *unused) {
    struct epoll_event ready[EVENTS_PER_WAIT];
    prctl(PR_SET_NAME, "ucch-link");
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -10); /* where that is allowed: late beats look like death */
    ucch_links_lock();
    while (!stop) {
        ucch_links_unlock();
        int n = epoll_wait(epoll_fd, ready, EVENTS_PER_WAIT, (int)(1e3 * TURN_S));
        ucch_links_lock();
        for (int i = 0; i < n; i++)
            if (ready[i].data.fd >= 0) receive(links[ready[i].data.fd], ready[i].data.fd);
        turn();
    }
    ucch_links_unlock();
    return NULL;
}

/* Add a file descriptor to the epoll: that of link `number`, or the eventfd (-1). Returns 0 on success. */
static int watch_fd(int fd, int number) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = number};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void close_all(void) {
    for (int i = 0; i < nlinks; i++)
        if (links[i]->fd >= 0) close(links[i]->fd);
    close(epoll_fd);
    close(wake_fd);
    running = nlinks = 0;
}

/* A forked child must not keep its parent's links open. */
static void after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (running) close_all();
}

static int start(void) {
    static int registered;
    if (running) return 0;
    if (!registered && pthread_atfork(NULL, NULL, after_fork)) return UCCH_FAIL_MEMORY;
    registered = 1;
    stop = 0;
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    wake_fd = eventfd(0, EFD_CLOEXEC);
    running =
        epoll_fd >= 0 && wake_fd >= 0 && !watch_fd(wake_fd, -1) && !pthread_create(&thread, NULL, link_thread, NULL);
    if (!running) close_all();
    return running ? 0 : UCCH_FAIL_MEMORY;
}

/* ---- calls from other files and from Python ---- */

/* Serve one more link; takes ownership of `fd`. After `silence` seconds without data (0: never) the peer counts as
 * gone. Returns the link's number, or a negative status. */
int ucch_link_new(int fd, double silence) {
    int status = UCCH_FAIL_MEMORY;
    ucch_links_lock();
    link_t **more = realloc(links, (size_t)(nlinks + 1) * sizeof(*links));
    link_t *l = calloc(1, sizeof(*l));
    if (more) links = more;
    if (more && l) {
        *l = (link_t){.fd = fd, .timeout = silence};
        links[nlinks] = l;
        status = start();
        if (!status) status = watch_fd(fd, nlinks) ? UCCH_FAIL_MEMORY : nlinks++;
    }
    if (status < 0) {
        free(l);
        close(fd);
    }
    ucch_links_unlock();
    return status;
}

/* ucch_link_fate_locked for callers without the lock. */
int ucch_link_fate(int link) {
    ucch_links_lock();
    int fate = ucch_link_fate_locked(link);
    ucch_links_unlock();
    return fate;
}

/* End the thread; the process is about to exit. `well`: send a goodbye on each link. Without one the peers take this
 * process for dead and stop waiting for it. */
void ucch_links_stop(int well) {
    ucch_links_lock();
    int was = running;
    if (was && listener.on_turn) listener.on_turn();
    for (int i = 0; was && well && i < nlinks; i++)
        ucch_link_send(i, GOODBYE, 0, NULL, 0);
    for (double until = ucch_now() + GOODBYE_S; was && ucch_now() < until;) {
        int left = 0;
        for (int i = 0; i < nlinks; i++) {
            flush(links[i], i);
            left |= links[i]->fd >= 0 && !links[i]->fate && links[i]->queued;
        }
        if (!left) break;
        usleep(1000);
    }
    stop = 1;
    ucch_links_unlock();
    if (!was) return;
    eventfd_write(wake_fd, 1);
    pthread_join(thread, NULL);
    ucch_links_lock(); /* others may be about to send */
    close_all();
    ucch_links_unlock();
}

/* ---- probing TCP connections that others have made ---- */

/* Bytes of an internet address, in network order; `bytes` gets their number (0: not an internet address). */
static const void *address_bytes(const struct sockaddr_storage *at, size_t *bytes) {
    int is_short = at->ss_family == AF_INET;
    *bytes = is_short ? sizeof(struct in_addr) : at->ss_family == AF_INET6 ? sizeof(struct in6_addr) : 0;
    return is_short ? (const void *)&((const struct sockaddr_in *)at)->sin_addr
                    : (const void *)&((const struct sockaddr_in6 *)at)->sin6_addr;
}

static void describe_link(int fd, const struct sockaddr_storage *peer, char *text) {
    struct sockaddr_storage here;
    socklen_t length = sizeof(here);
    char ends[2][INET6_ADDRSTRLEN] = {"", ""};
    size_t bytes;
    if (getsockname(fd, (struct sockaddr *)&here, &length)) return;
    inet_ntop(here.ss_family, address_bytes(&here, &bytes), ends[0], sizeof(ends[0]));
    inet_ntop(peer->ss_family, address_bytes(peer, &bytes), ends[1], sizeof(ends[1]));
    snprintf(text, UCCH_PATH_BYTES, "%s - %s", ends[0], ends[1]);
}

/* Peer address of a socket, also while it connects (getpeername fails then). The kernel refuses a buffer that is longer
 * than the address, so both lengths are tried. Returns 0 on success. */
static int peer_of(int fd, struct sockaddr_storage *peer) {
    socklen_t longer = sizeof(struct sockaddr_in6), shorter = sizeof(struct sockaddr_in);
    return getsockopt(fd, SOL_SOCKET, SO_PEERNAME, peer, &longer) &&
           getsockopt(fd, SOL_SOCKET, SO_PEERNAME, peer, &shorter);
}

/* Seconds from the first SYN of a connection attempt to the last. The kernel retransmits the SYN some times at a fixed
 * interval, then at intervals that double; `tcpi_backoff` counts the doublings. */
static double connecting_s(const struct tcp_info *info) {
    double doubled = (double)(1 << info->tcpi_backoff), first = 1e-6 * info->tcpi_rto / doubled;
    return first * (info->tcpi_retransmits - info->tcpi_backoff + doubled - 1);
}

/* State of a host as its connections show it: nothing known; nothing acknowledged for `timeout` seconds of what was
 * sent to it; or it answers. */
enum { UNKNOWN, SILENT, ANSWERS };

/* State by one connection, if its peer address is among the host's `addresses`. `text` gets both addresses. */
static int probe_connection(int fd, const void *address, size_t bytes, double timeout, char *text) {
    struct sockaddr_storage peer;
    struct tcp_info info;
    socklen_t room = sizeof(info);
    size_t n;
    if (peer_of(fd, &peer)) return UNKNOWN;
    const void *at = address_bytes(&peer, &n);
    if (!n || !memmem(address, bytes, at, n) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &room)) return UNKNOWN;
    describe_link(fd, &peer, text);
    if (info.tcpi_state == SYN_SENT) return connecting_s(&info) < timeout ? UNKNOWN : SILENT;
    if (info.tcpi_last_ack_recv < 1e3 * timeout) return ANSWERS;
    /* Data sent longer ago, which the kernel may retransmit late, says nothing about the link now. */
    return info.tcpi_unacked && info.tcpi_last_data_sent < 1e3 * timeout ? SILENT : UNKNOWN;
}

/* True if connections to this address are silent and none of them answers. */
static int is_address_silent(const void *address, size_t bytes, double timeout, char *text) {
    DIR *files = opendir("/proc/self/fd");
    int found = UNKNOWN;
    for (struct dirent *file; files && found != ANSWERS && (file = readdir(files));) {
        int state = probe_connection(atoi(file->d_name), address, bytes, timeout, text);
        found = state > found ? state : found;
    }
    if (files) closedir(files);
    return found == SILENT;
}

static _Atomic int cuts;

/* How often this process has found a link cut or a connection broken. After that libucp may have given up other
 * connections without saying so. */
int ucch_cuts(void) { return cuts; }

void ucch_count_cut(void) { cuts++; }

/* True if the host has acknowledged nothing for `timeout` seconds of what was sent to one of its addresses, even if its
 * other addresses answer; `text` then gets our address and that one. `addresses` contains the host's addresses in
 * network order. */
int ucch_path_find_cut(const void *addresses, size_t bytes, double timeout, char *text) {
    DIR *files = opendir("/proc/self/fd");
    int found = 0;
    for (struct dirent *file; files && !found && (file = readdir(files));) {
        struct sockaddr_storage peer;
        size_t n;
        int fd = atoi(file->d_name);
        if (probe_connection(fd, addresses, bytes, timeout, text) != SILENT) continue;
        if (peer_of(fd, &peer)) continue;
        const void *address = address_bytes(&peer, &n);
        found = is_address_silent(address, n, timeout, text);
    }
    if (files) closedir(files);
    cuts += found;
    return found;
}
