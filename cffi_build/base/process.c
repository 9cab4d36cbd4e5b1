/* Processes of this host by pid: whether they have ended, mapping of their files, and signals to them; the end of this
 * process. */
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

/* Returns a pidfd, or -1; `gone` is then set if there is no such process. */
static int descriptor_of(pid_t pid, int *gone) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    *gone = fd < 0 && (errno == ESRCH || (kill(pid, 0) && errno == ESRCH));
    return fd;
}

static int is_readable(int fd) { return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 0) == 1; }

/* Known processes and their pidfds, or -1 once they have ended: the pid of an ended process is reused some day. */
#define MOST_MET 512

static struct {
    pid_t pid;
    int fd;
} met[MOST_MET];
static pthread_mutex_t met_lock = PTHREAD_MUTEX_INITIALIZER;

/* Index of a process's entry, or of the entry to use for it; -1: the table is full. */
static int index_of(pid_t pid) {
    for (int i = 0; i < MOST_MET; i++) {
        int at = (int)(((unsigned)pid + (unsigned)i) % MOST_MET);
        if (!met[at].pid || met[at].pid == pid) return at;
    }
    return -1;
}

/* True if the process of an entry has ended; its descriptor is then closed. */
static int has_ended(int at) {
    if (!met[at].pid) return 0;
    if (met[at].fd >= 0 && is_readable(met[at].fd)) {
        close(met[at].fd);
        met[at].fd = -1;
    }
    return met[at].fd < 0;
}

/* Remember the process that has this pid now, in place of an ended one with the same pid or, if the table is full, of
 * any ended one. */
void ucch_process_meet(int pid) {
    int gone;
    pthread_mutex_lock(&met_lock);
    int at = index_of(pid);
    for (int i = 0; i < MOST_MET; i++)
        if (has_ended(i) && at < 0) at = i;
    int fd = at < 0 || (met[at].pid == pid && met[at].fd >= 0) ? -1 : descriptor_of(pid, &gone);
    if (fd >= 0) {
        met[at].fd = fd;
        met[at].pid = pid;
    }
    pthread_mutex_unlock(&met_lock);
}

/* True if the process has ended, even if it is a zombie or its pid has been reused since ucch_process_meet. */
int ucch_process_ended(int pid) {
    int gone;
    pthread_mutex_lock(&met_lock);
    int at = index_of(pid), known = at >= 0 && met[at].pid == pid;
    if (known) gone = has_ended(at);
    pthread_mutex_unlock(&met_lock);
    if (known) return gone;
    int fd = descriptor_of(pid, &gone);
    if (fd < 0) return gone;
    gone = is_readable(fd);
    close(fd);
    return gone;
}

/* Open a file of another process of the same user and namespaces. Negative on failure. */
int ucch_shared_open(int pid, int file) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, file);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Map `bytes` of a file from `at` on; NULL on failure. */
char *ucch_shared_map(int file, size_t at, size_t bytes) {
    struct stat about;
    if (fstat(file, &about) || (size_t)about.st_size < at + bytes) return NULL; /* a read beyond its end is fatal */
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
    return memory == MAP_FAILED ? NULL : memory;
}

void ucch_shared_unmap(char *memory, size_t bytes) { munmap(memory, bytes); }

/* One of `users` processes does not use this shared memory again; the last word counts them. The last process gives the
 * memory back to the system. */
void ucch_shared_drop(char *memory, size_t bytes, int users) {
    uint64_t *dropped = (uint64_t *)(memory + bytes) - 1;
    if (__atomic_add_fetch(dropped, 1, __ATOMIC_ACQ_REL) == (uint64_t)users) madvise(memory, bytes, MADV_REMOVE);
}

/* True if the process has a handler for the signal. */
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

/* Send a signal, if the process handles it: it would kill another process that has got the pid. */
void ucch_process_signal(int pid, int number) {
    int gone, fd = descriptor_of(pid, &gone);
    if (fd < 0) return;
    if (!is_readable(fd) && handles(pid, number)) syscall(SYS_pidfd_send_signal, fd, number, NULL, 0);
    close(fd);
}

/* Logical processors per core. */
#define OF_CORE 2

/* Let the calling thread of the engine run on any processor if a launcher has bound this process to one core: there it
 * would take turns with the caller's thread, which may spin in MPI. */
void ucch_process_unbind_thread(void) {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) || CPU_COUNT(&cores) > OF_CORE) return;
    memset(&cores, 0xff, sizeof(cores));
    sched_setaffinity(0, sizeof(cores), &cores);
}

/* ---- the end of this process ---- */

#define UCCH_LEAVE_S 10

static int last_status;

/* Set the exit status; not 0: the process has failed. */
void ucch_leave_with(int status) { last_status = status; }

/* End the process here, as the interpreter's last Py_AtExit function. A failed process ends by a signal: Open MPI
 * 5.0.11 does not report a process that exits with a status, and other ranks would wait for it. */
void ucch_leave(void) {
    if (last_status) kill(getpid(), SIGKILL);
    _exit(0);
}

static void *leave_late(void *unused) {
    sleep(UCCH_LEAVE_S);
    _exit(0);
}

/* End the process in UCCH_LEAVE_S seconds if the rest of the exit (MPI_Finalize) hangs because a rank has died in
 * it. */
void ucch_leave_late(void) {
    pthread_t late;
    if (pthread_create(&late, NULL, leave_late, NULL) == 0) pthread_detach(late);
}
