/* Connections with processes of other hosts, beside the data, and one thread that serves them: which processes live is
 * known whatever the data does, and whatever Python does. Each end says something every quarter of a second.
 *
 * A connection that breaks without a farewell is that of a process which died. One on which nothing comes for
 * `patience` seconds, in turns that our own thread had in time, and not even an acknowledgement by the kernel, is that
 * of a host that is gone. While its kernel acknowledges what we send, a process may be stopped, or only wait for a
 * core: threads of busy hosts have been seen to wait for 1.4 s. It is given several times as long.
 *
 * The same is asked of all TCP connections of ours that end at a host's addresses, whoever has made them, while calls
 * wait for it: libucp does not tell which are its own. */
#define _GNU_SOURCE
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

/* The kernel's state of a connection that nobody has answered. */
#define SYN_SENT 2

/* Seconds between turns, and of silence after which a beat is due. */
#define TURN_S 0.1
#define BEAT_S 0.25
/* The most that one turn counts of a silence: a thread that was kept from its core has not listened meanwhile. */
#define MOST_OF_A_TURN_S 0.2
/* Times its patience that a process is waited for whose host is there. */
#define BUSY 5
/* How long the last messages may take at the end. */
#define FAREWELL_S 0.2
#define IN_BYTES (2 * (UCCH_LINK_BYTES + sizeof(ucch_link_header)))
#define OUT_BYTES (64 << 10)
/* Connections that are heard in a turn. */
#define AT_ONCE 64

/* Messages of our own. */
enum { BEAT, BYE };

typedef struct link {
    int fd;                       /* -1: closed */
    int how;                      /* UCCH_THERE while it is; UCCH_LEFT after a farewell, or how it was lost */
    double quiet, sent, patience; /* seconds */
    size_t filled, queued;
    char in[IN_BYTES], out[OUT_BYTES];
} link_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static int running, stop, nlinks;
static int awaited = -1, bell = -1; /* epoll of all connections, and what ends its wait */
static link_t **links;
static ucch_listener listener;

void ucch_links_listen(const ucch_listener *l) { listener = *l; }
void ucch_links_lock(void) { ucch_take(&lock, UCCH_AT_LINKS); }
void ucch_links_unlock(void) { ucch_give(&lock, UCCH_AT_LINKS); }

/* Fate of the process at the other end. */
int ucch_link_fate(int link) { return link >= 0 && link < nlinks ? links[link]->how : UCCH_DIED; }

/* ---- sending and receiving ---- */

static void hang_up(link_t *l, int number, int how) {
    if (l->fd >= 0) {
        epoll_ctl(awaited, EPOLL_CTL_DEL, l->fd, NULL);
        close(l->fd);
    }
    l->fd = -1;
    if (l->how) return;
    l->how = how;
    if (how != UCCH_LEFT && listener.on_lost) listener.on_lost(number, how);
}

static void flush(link_t *l, int number) {
    size_t done = 0;
    while (l->fd >= 0 && done < l->queued) {
        ssize_t n = send(l->fd, l->out + done, l->queued - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) hang_up(l, number, UCCH_DIED);
        if (n <= 0) break;
        done += (size_t)n;
    }
    memmove(l->out, l->out + done, l->queued - done);
    l->queued -= done;
}

/* Send a message: 0, or -1 where there is no room for it now. */
int ucch_link_send(int number, uint32_t kind, uint64_t key, const void *data, size_t bytes) {
    if (number >= nlinks) return -1; /* a parent's, or of a process that ends */
    link_t *l = links[number];
    ucch_link_header head = {.bytes = (uint32_t)bytes, .kind = kind, .key = key};
    if (l->fd < 0 || l->queued + sizeof(head) + bytes > OUT_BYTES) return -1;
    memcpy(l->out + l->queued, &head, sizeof(head));
    if (bytes) memcpy(l->out + l->queued + sizeof(head), data, bytes);
    l->queued += sizeof(head) + bytes;
    l->sent = ucch_now();
    flush(l, number);
    return 0;
}

/* A message has come: 0, or not 0 where no peer of ours would send it. */
static int dispatch(link_t *l, int number, const ucch_link_header *head, const char *data) {
    if (head->kind == BYE) hang_up(l, number, UCCH_LEFT);
    if (head->kind <= BYE) return head->bytes != 0;
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
            hang_up(l, number, UCCH_DIED);
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
            hang_up(l, number, UCCH_DIED);
            return;
        }
        l->quiet = 0;
        l->filled += (size_t)n;
        parse(l, number);
    }
}

/* ---- the thread ---- */

/* True if the peer's kernel has not acknowledged anything for so long, although something was sent. */
static int is_unacknowledged(const link_t *l) {
    struct tcp_info info;
    socklen_t bytes = sizeof(info);
    if (getsockopt(l->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes)) return 0;
    return info.tcpi_unacked > 0 && info.tcpi_last_ack_recv >= 1e3 * l->patience;
}

static void beat(link_t *l, int number, double now, double passed) {
    if (l->fd < 0) return;
    if (now - l->sent > BEAT_S) ucch_link_send(number, BEAT, 0, NULL, 0);
    flush(l, number);
    l->quiet += passed < MOST_OF_A_TURN_S ? passed : MOST_OF_A_TURN_S;
    if (l->fd < 0 || l->how || !l->patience || l->quiet < l->patience) return;
    int gone = is_unacknowledged(l);
    if (!gone && l->quiet < BUSY * l->patience) return;
    l->how = gone ? UCCH_UNREACHABLE : UCCH_SILENT; /* it may come back, and hear that it is given up */
    if (listener.on_lost) listener.on_lost(number, l->how);
}

static void turn(void) {
    static double last;
    double now = ucch_now(), passed = now - last;
    if (passed < TURN_S) return;
    last = now;
    if (listener.on_turn) listener.on_turn();
    for (int i = 0; i < nlinks; i++)
        beat(links[i], i, now, passed);
}

static void *serve(void *unused) {
    struct epoll_event come[AT_ONCE];
    prctl(PR_SET_NAME, "ucch-link");
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -10); /* where that is allowed: late beats look like death */
    ucch_links_lock();
    while (!stop) {
        ucch_links_unlock();
        int n = epoll_wait(awaited, come, AT_ONCE, (int)(1e3 * TURN_S));
        ucch_links_lock();
        for (int i = 0; i < n; i++)
            if (come[i].data.fd >= 0) receive(links[come[i].data.fd], come[i].data.fd);
        turn();
    }
    ucch_links_unlock();
    return NULL;
}

/* Wait for a file, too, which is that of a link, or the bell (-1): 0, or not 0. */
static int await(int fd, int number) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = number};
    return epoll_ctl(awaited, EPOLL_CTL_ADD, fd, &event);
}

static void close_all(void) {
    for (int i = 0; i < nlinks; i++)
        if (links[i]->fd >= 0) close(links[i]->fd);
    close(awaited);
    close(bell);
    running = nlinks = 0;
}

/* A child has none of its parent's connections, and must not keep them open. */
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
    awaited = epoll_create1(EPOLL_CLOEXEC);
    bell = eventfd(0, EFD_CLOEXEC);
    running = awaited >= 0 && bell >= 0 && !await(bell, -1) && !pthread_create(&thread, NULL, serve, NULL);
    if (!running) close_all();
    return running ? 0 : UCCH_FAIL_MEMORY;
}

/* ---- from outside ---- */

/* Serve one more connection, which is ours from here on; silence of so many seconds (0: however long) tells that the
 * process at the other end is gone. Its number, or a failure. */
int ucch_link_new(int fd, double silence) {
    int status = UCCH_FAIL_MEMORY;
    ucch_links_lock();
    link_t **more = realloc(links, (size_t)(nlinks + 1) * sizeof(*links));
    link_t *l = calloc(1, sizeof(*l));
    if (more) links = more;
    if (more && l) {
        *l = (link_t){.fd = fd, .patience = silence};
        links[nlinks] = l;
        status = start();
        if (!status) status = await(fd, nlinks) ? UCCH_FAIL_MEMORY : nlinks++;
    }
    if (status < 0) {
        free(l);
        close(fd);
    }
    ucch_links_unlock();
    return status;
}

/* As ucch_link_fate, without the lock. */
int ucch_link_ask(int link) {
    ucch_links_lock();
    int fate = ucch_link_fate(link);
    ucch_links_unlock();
    return fate;
}

/* End the thread; the process is about to end. Say farewell if it ends well: else the peers are to take it for dead,
 * and wait for nothing of it. */
void ucch_links_stop(int well) {
    ucch_links_lock();
    int was = running;
    if (was && listener.on_turn) listener.on_turn();
    for (int i = 0; was && well && i < nlinks; i++)
        ucch_link_send(i, BYE, 0, NULL, 0);
    for (double until = ucch_now() + FAREWELL_S; was && ucch_now() < until;) {
        int left = 0;
        for (int i = 0; i < nlinks; i++) {
            flush(links[i], i);
            left |= links[i]->fd >= 0 && !links[i]->how && links[i]->queued;
        }
        if (!left) break;
        usleep(1000);
    }
    stop = 1;
    ucch_links_unlock();
    if (!was) return;
    eventfd_write(bell, 1);
    pthread_join(thread, NULL);
    ucch_links_lock(); /* others may be about to send */
    close_all();
    ucch_links_unlock();
}

/* ---- links of others ---- */

/* An address of the internet: its bytes, in their order on the network, and how many. */
static const void *bytes_of(const struct sockaddr_storage *at, size_t *bytes) {
    int is_short = at->ss_family == AF_INET;
    *bytes = is_short ? sizeof(struct in_addr) : at->ss_family == AF_INET6 ? sizeof(struct in6_addr) : 0;
    return is_short ? (const void *)&((const struct sockaddr_in *)at)->sin_addr
                    : (const void *)&((const struct sockaddr_in6 *)at)->sin6_addr;
}

static void say(int fd, const struct sockaddr_storage *there, char *text) {
    struct sockaddr_storage here;
    socklen_t length = sizeof(here);
    char ends[2][INET6_ADDRSTRLEN] = {"", ""};
    size_t bytes;
    if (getsockname(fd, (struct sockaddr *)&here, &length)) return;
    inet_ntop(here.ss_family, bytes_of(&here, &bytes), ends[0], sizeof(ends[0]));
    inet_ntop(there->ss_family, bytes_of(there, &bytes), ends[1], sizeof(ends[1]));
    snprintf(text, UCCH_PATH_BYTES, "%s - %s", ends[0], ends[1]);
}

/* The other end; unlike getpeername also while it connects. The kernel refuses to fill more room than it needs. */
static int peer_of(int fd, struct sockaddr_storage *there) {
    socklen_t longer = sizeof(struct sockaddr_in6), shorter = sizeof(struct sockaddr_in);
    return getsockopt(fd, SOL_SOCKET, SO_PEERNAME, there, &longer) &&
           getsockopt(fd, SOL_SOCKET, SO_PEERNAME, there, &shorter);
}

/* Seconds from the first SYN of a connection that is being made to the last one. The kernel sends it again after one
 * interval, some times, and then after intervals that double; `tcpi_backoff` counts these. */
static double connecting(const struct tcp_info *info) {
    double doubled = (double)(1 << info->tcpi_backoff), first = 1e-6 * info->tcpi_rto / doubled;
    return first * (info->tcpi_retransmits - info->tcpi_backoff + doubled - 1);
}

/* What connections with some host tell: nothing, that it has not acknowledged for long what they have sent, or that it
 * answers. */
enum { UNKNOWN, SILENT, ANSWERS };

/* That of one, if it ends at an address that libucp was told; with a name of the way. */
static int ask(int fd, const void *address, size_t bytes, double patience, char *text) {
    struct sockaddr_storage there;
    struct tcp_info info;
    socklen_t room = sizeof(info);
    size_t n;
    if (peer_of(fd, &there)) return UNKNOWN;
    const void *at = bytes_of(&there, &n);
    if (!n || !memmem(address, bytes, at, n) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &room)) return UNKNOWN;
    say(fd, &there, text);
    if (info.tcpi_state == SYN_SENT) return connecting(&info) < patience ? UNKNOWN : SILENT;
    if (info.tcpi_last_ack_recv < 1e3 * patience) return ANSWERS;
    /* What was sent longer ago, and is to be sent again, tells nothing of the link as it is now. */
    return info.tcpi_unacked && info.tcpi_last_data_sent < 1e3 * patience ? SILENT : UNKNOWN;
}

/* True if a host answers by no connection that ends at an address. */
static int is_silent(const void *address, size_t bytes, double patience, char *text) {
    DIR *files = opendir("/proc/self/fd");
    int found = UNKNOWN;
    for (struct dirent *file; files && found != ANSWERS && (file = readdir(files));) {
        int one = ask(atoi(file->d_name), address, bytes, patience, text);
        found = one > found ? one : found;
    }
    if (files) closedir(files);
    return found == SILENT;
}

static _Atomic int cuts;

/* How often a link was found to be cut, or a connection broken: libucp may have given up others in silence. */
int ucch_cuts(void) { return cuts; }

void ucch_count_cut(void) { cuts++; }

/* True if a host has acknowledged nothing for so long of what was sent to one of its addresses, whatever the others do,
 * and the way there: our address and the other one. The addresses lie, as they are on the network, somewhere in
 * `addresses`. */
int ucch_path_find_cut(const void *addresses, size_t bytes, double patience, char *text) {
    DIR *files = opendir("/proc/self/fd");
    int found = 0;
    for (struct dirent *file; files && !found && (file = readdir(files));) {
        struct sockaddr_storage there;
        size_t n;
        int fd = atoi(file->d_name);
        if (ask(fd, addresses, bytes, patience, text) != SILENT) continue;
        if (peer_of(fd, &there)) continue;
        const void *one = bytes_of(&there, &n);
        found = is_silent(one, n, patience, text);
    }
    if (files) closedir(files);
    cuts += found;
    return found;
}
