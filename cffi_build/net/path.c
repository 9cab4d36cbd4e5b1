/* The way to another host, as our kernel knows it.
 *
 * What a process says itself does not tell a link that is cut from one that is slow, nor from a process that waits for
 * a core. Acknowledgements do: the other kernel sends them for whatever comes, also while its process is stopped. All
 * TCP connections of ours that end at one of a peer's addresses are looked at, whoever has made them: libucp does not
 * tell which are its own. */
#define _GNU_SOURCE
#include "net/net.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

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

/* What connections with some host tell: nothing, that it has not acknowledged for long what they have sent, or that it
 * answers. */
enum { UNKNOWN, SILENT, ANSWERS };

/* That of one, if it ends at an address that libucp was told; with a name of the way. */
static int ask(int fd, const void *address, size_t bytes, double patience, char *text) {
    struct sockaddr_storage there;
    struct tcp_info info;
    socklen_t length = sizeof(there), room = sizeof(info);
    size_t n;
    if (getpeername(fd, (struct sockaddr *)&there, &length)) return UNKNOWN;
    const void *at = bytes_of(&there, &n);
    if (!n || !memmem(address, bytes, at, n) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &room)) return UNKNOWN;
    say(fd, &there, text);
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

/* True if a host has acknowledged nothing for so long of what was sent to one of its addresses, whatever the others do,
 * and the way there: our address and the other one. The addresses lie, as they are on the network, somewhere in
 * `addresses`. */
int ucch_path_find_cut(const void *addresses, size_t bytes, double patience, char *text) {
    DIR *files = opendir("/proc/self/fd");
    int found = 0;
    for (struct dirent *file; files && !found && (file = readdir(files));) {
        struct sockaddr_storage there;
        socklen_t length = sizeof(there);
        size_t n;
        int fd = atoi(file->d_name);
        if (ask(fd, addresses, bytes, patience, text) != SILENT) continue;
        if (getpeername(fd, (struct sockaddr *)&there, &length)) continue;
        const void *one = bytes_of(&there, &n);
        found = is_silent(one, n, patience, text);
    }
    if (files) closedir(files);
    return found;
}
