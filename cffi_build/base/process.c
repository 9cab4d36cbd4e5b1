/* Processes of this host, by their numbers: if they have ended, files of theirs that we map, and signals to them; the
 * end of this one. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/base.h"

/* A descriptor of the process, or -1, and then whether there is no such process. */
static int descriptor_of(pid_t pid, int *gone) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    *gone = fd < 0 && (errno == ESRCH || (kill(pid, 0) && errno == ESRCH));
    return fd;
}

static int is_readable(int fd) { return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 0) == 1; }

/* Processes that were met, by their numbers, and descriptors of them: the number of one that has ended is another one's
 * some day. */
#define MOST_MET 512

static struct {
    pid_t pid;
    int fd;
} met[MOST_MET];
static pthread_mutex_t met_lock = PTHREAD_MUTEX_INITIALIZER;

/* Where a process is, or would be; -1 where there is no room. */
static int place_of(pid_t pid) {
    for (int i = 0; i < MOST_MET; i++) {
        int at = (int)(((unsigned)pid + (unsigned)i) % MOST_MET);
        if (!met[at].pid || met[at].pid == pid) return at;
    }
    return -1;
}

/* Know the process that has this number now, in place of one that had it and has ended. */
void ucch_process_meet(int pid) {
    int gone;
    pthread_mutex_lock(&met_lock);
    int at = place_of(pid), known = at >= 0 && met[at].pid == pid;
    int fd = at < 0 || (known && !is_readable(met[at].fd)) ? -1 : descriptor_of(pid, &gone);
    if (fd >= 0 && known) close(met[at].fd);
    if (fd >= 0) {
        met[at].fd = fd;
        met[at].pid = pid;
    }
    pthread_mutex_unlock(&met_lock);
}

/* True if a process has ended, also where its parent has not asked for its status yet, and where another one has its
 * number since it was met. */
int ucch_process_ended(int pid) {
    int gone;
    pthread_mutex_lock(&met_lock);
    int at = place_of(pid), known = at >= 0 && met[at].pid == pid;
    if (known) gone = is_readable(met[at].fd);
    pthread_mutex_unlock(&met_lock);
    if (known) return gone;
    int fd = descriptor_of(pid, &gone);
    if (fd < 0) return gone;
    gone = is_readable(fd);
    close(fd);
    return gone;
}

/* A file of another process, which runs in our namespaces as our user; negative where it cannot be opened. */
int ucch_shared_open(int pid, int file) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Memory of a file of so many bytes; NULL where it cannot be mapped. */
char *ucch_shared_map(int file, size_t bytes) {
    struct stat about;
    if (fstat(file, &about) || (size_t)about.st_size < bytes) return NULL; /* a read beyond its end is fatal */
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void ucch_shared_unmap(char *memory, size_t bytes) { munmap(memory, bytes); }

/* True if a process handles a signal. */
static int handles(pid_t pid, int number) {
    char line[256];
    unsigned long long caught = 0;
    snprintf(line, sizeof(line), "/proc/%d/status", (int)pid);
    FILE *status = fopen(line, "re");
    while (status && fgets(line, sizeof(line), status) && sscanf(line, "SigCgt: %llx", &caught) != 1)
        ;
    if (status) fclose(status);
    return (int)(caught >> (number - 1) & 1);
}

/* Send a process a signal that would end any other one, to which its number may have gone meanwhile. */
void ucch_process_signal(int pid, int number) {
    int gone, fd = descriptor_of(pid, &gone);
    if (fd < 0) return;
    if (!is_readable(fd) && handles(pid, number)) syscall(SYS_pidfd_send_signal, fd, number, NULL, 0);
    close(fd);
}

/* Logical processors of a core. */
#define OF_CORE 2

/* Let the calling thread, one of the engine's, run wherever the host lets this process, if a launcher has bound that to
 * one core: the thread would take turns there with the caller's own, which may spin in MPI meanwhile. */
void ucch_process_unbind_thread(void) {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) || CPU_COUNT(&cores) > OF_CORE) return;
    memset(&cores, 0xff, sizeof(cores));
    sched_setaffinity(0, sizeof(cores), &cores);
}

/* ---- the end of this one ---- */

#define UCCH_LEAVE_S 10

static int last_status;

/* The process has failed if this is not 0. */
void ucch_leave_with(int status) { last_status = status; }

/* End the process here and now, as the interpreter's last act but those that were asked for before (Py_AtExit). A
 * process that has failed ends by a signal: Open MPI 5.0.11 does not report a process that ends by a status, and other
 * ranks wait for it.
 */
void ucch_leave(void) {
    if (last_status) kill(getpid(), SIGKILL);
    _exit(0);
}

static void *leave_late(void *unused) {
    sleep(UCCH_LEAVE_S);
    _exit(0);
}

/* End the process in a while, where what comes behind this (MPI_Finalize) does not end, as a rank has died in it. */
void ucch_leave_late(void) {
    pthread_t late;
    if (pthread_create(&late, NULL, leave_late, NULL) == 0) pthread_detach(late);
}
