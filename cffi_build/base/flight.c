/* The flight recorder: a ring of the last operations of this process (collectives and messages), always written, and
 * read only after a failure.
 *
 * The ring is in a memory file, so that other processes of the same user can read it while this one hangs. It is
 * written to disk when an operation fails, on request, and by a signal, with functions that are safe in signal
 * handlers, as the interrupted thread may hold any lock. The file has the ring, then the meaning of its numbers (lines
 * from Python), then the stacks that Python's faulthandler wrote before our handler ran. */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC "UCCHFLT1"
#define PATH 1024
/* Failures within this time are written once: they have one cause. */
#define BURST_S 1.0

typedef struct header {
    char magic[8];
    uint64_t capacity; /* a power of two */
    uint64_t written;  /* records written in all; the ring has the last `capacity` */
    uint64_t record;   /* bytes of a record */
    int64_t pid, rank;
    uint64_t now, wall;    /* ns of CLOCK_MONOTONIC and CLOCK_REALTIME of the last dump */
    uint64_t about, stack; /* bytes behind the ring */
    uint64_t dumps, cause, signal;
    uint64_t over; /* ns of CLOCK_MONOTONIC when the last dump was complete */
    char pad[UCCH_TRACE_HEADER - 112];
} header;

_Static_assert(sizeof(header) == UCCH_TRACE_HEADER && sizeof(ucch_record) == 128, "layouts of the flight recorder");
_Static_assert(sizeof(((ucch_record *)0)->label) == UCCH_LABEL_BYTES, "labels of the flight recorder");

static header *head;
static ucch_record *ring;
static uint64_t mask;
static int ring_file = -1, about_file = -1, stack_file = -1;
static char folder[PATH / 2], default_path[PATH];
static _Atomic int signal_number, handling, missed;
typedef void handler(int number);
static handler *_Atomic python_handler;

static size_t bytes_of(uint64_t capacity) { return sizeof(header) + capacity * sizeof(ucch_record); }

/* Start recording the last `capacity` operations (a power of two). `file`, `about` and `stack` are descriptors of
 * memory files, which stay open. Failures are dumped to `name` in the folder `where`; NULL: nowhere. Returns 0 or
 * -1. */
int ucch_flight_open(int file, int about, int stack, uint64_t capacity, int rank, const char *where, const char *name) {
    if (ftruncate(file, (off_t)bytes_of(capacity))) return -1;
    void *memory = mmap(NULL, bytes_of(capacity), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (memory == MAP_FAILED) return -1;
    snprintf(folder, sizeof(folder), "%s", where ? where : "");
    if (!where || snprintf(default_path, sizeof(default_path), "%s/%s", where, name) >= (int)sizeof(default_path) - 8)
        default_path[0] = 0;
    header *made = memory;
    memcpy(made->magic, MAGIC, sizeof(made->magic));
    made->capacity = capacity;
    made->record = sizeof(ucch_record);
    made->pid = getpid();
    made->rank = rank;
    UCCH_LOCKED;
    ring_file = file;
    about_file = about;
    stack_file = stack;
    mask = capacity - 1;
    ring = (ucch_record *)(made + 1);
    UCCH_STORE(&head, made);
    return 0;
}

/* Stop recording, as in a child after fork: the memory is the parent's. */
void ucch_flight_stop(void) {
    UCCH_STORE(&head, NULL);
    handling = 0; /* the thread that handles a signal is in the parent */
}

/* ---- recording ---- */

uint64_t ucch_flight_begin(const ucch_record *about, uint64_t seq, double now, int has_started) {
    if (!head) return 0;
    uint64_t number = head->written;
    ucch_record *r = &ring[number & mask];
    if (about->kind < UCCH_RECORD_SEND)
        *r = *about;
    else
        memcpy(r, about, offsetof(ucch_record, signature));
    r->called = (uint64_t)(1e9 * now);
    r->started = has_started ? r->called : 0;
    r->seq = seq;
    UCCH_STORE(&head->written, number + 1);
    return number + 1;
}

/* NULL if the record was overwritten. */
static ucch_record *find(uint64_t number) {
    return number && head && head->written - number <= mask ? &ring[(number - 1) & mask] : NULL;
}

void ucch_flight_started(uint64_t number, double now) {
    ucch_record *r = find(number);
    if (r) r->started = (uint64_t)(1e9 * now);
}

/* Note the peer and tag of a receive from any source or with any tag. */
void ucch_flight_from(uint64_t number, int peer, int tag) {
    ucch_record *r = find(number);
    if (!r) return;
    r->peer = peer;
    r->tag = tag;
}

void ucch_flight_end(uint64_t number, int status, double now) {
    ucch_record *r = find(number);
    if (!r) return;
    r->status = status;
    r->ended = (uint64_t)(1e9 * now);
    if (r->ended < r->called) r->ended = r->called; /* another thread may have read the clock a moment earlier */
}

/* ---- dumps ---- */

static int copy(int from, int to, uint64_t bytes) {
    for (off_t at = 0; (uint64_t)at < bytes;) {
        ssize_t n = sendfile(to, from, &at, bytes - (uint64_t)at);
        if (n == 0 || (n < 0 && errno != EINTR)) return -1;
    }
    return 0;
}

/* Bytes that Python has written: to the end of the file of lines, to the file position for stacks. */
static uint64_t length_of(int file, int whence) {
    off_t end = file < 0 ? 0 : lseek(file, 0, whence);
    return end > 0 ? (uint64_t)end : 0;
}

/* Write a temporary file beside `path` and rename it: readers always find a complete file. */
static int write_to(const header *h, int about, const char *path) {
    char beside[PATH + 8];
    size_t n = strlen(path);
    if (!n || n >= PATH) return -1;
    memcpy(beside, path, n);
    memcpy(beside + n, ".part", 6);
    unlink(beside);
    int file = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) return -1;
    int bad =
        copy(ring_file, file, bytes_of(h->capacity)) || copy(about, file, h->about) || copy(stack_file, file, h->stack);
    bad |= close(file) != 0;
    if (!bad) bad = rename(beside, path) != 0;
    if (bad) unlink(beside);
    return bad ? -1 : 0;
}

/* True if the folder is safe: not another user's folder in which all users may replace files. */
static int has_folder(void) {
    struct stat s;
    mkdir(folder, 0700);
    if (stat(folder, &s) || !S_ISDIR(s.st_mode)) return 0;
    return s.st_uid == geteuid() || !(s.st_mode & S_IWOTH) || (s.st_mode & S_ISVTX);
}

/* Dump the records to `path`; NULL: to the file for failures. Safe in signal handlers. Returns -1 if that is impossible
 * or another dump is under way. */
int ucch_flight_dump(int cause, const char *path) {
    static _Atomic int busy;
    header *h = UCCH_LOAD(&head);
    if (!h || atomic_exchange(&busy, 1)) return -1;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    h->now = ucch_now_ns();
    h->wall = (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec;
    int about = dup(about_file); /* Python may replace the file meanwhile */
    h->about = length_of(about, SEEK_END);
    h->cause = (uint64_t)cause;
    h->stack = length_of(stack_file, SEEK_CUR);
    if (stack_file >= 0) lseek(stack_file, 0, SEEK_SET); /* the next stack overwrites it */
    const char *where = path ? path : default_path[0] && has_folder() ? default_path : "";
    int status = write_to(h, about, where);
    if (about >= 0) close(about);
    __atomic_store_n(&h->over, ucch_now_ns(), __ATOMIC_RELAXED);
    __atomic_add_fetch(&h->dumps, 1, __ATOMIC_RELEASE);
    busy = 0;
    return status;
}

/* True for failures of a library or of another rank; our other statuses mostly go to the caller. */
static int is_grave(int status) {
    /* also UCCH_FAIL_TIMEOUT and UCCH_FAIL_MISMATCH */
    return status >= UCCH_FAIL_PEER || status == UCCH_FAIL_OVERLAP || status == UCCH_FAIL_CONNECTION;
}

/* An operation has failed: dump the records if that ends its communicator. */
void ucch_flight_failed_locked(int status, double now) {
    static double last;
    if (!is_grave(status) || (last > 0 && now - last < BURST_S)) return;
    last = now;
    ucch_flight_dump(UCCH_DUMP_FAILURE, NULL);
}

/* End the record of a call that ran without an operation (ucch_board_record). */
void ucch_record_end(uint64_t record, int status) {
    UCCH_LOCKED;
    double now = ucch_now();
    ucch_flight_end(record, status, now);
    if (status < 0) ucch_flight_failed_locked(status, now);
}

/* ---- the signal ---- */

/* Python's handler walks the frames of running threads, which may change meanwhile: a fault in the walk must end the
 * walk and not the process. Python then believes that the walk goes on, and writes no more stacks. */
static sigjmp_buf walk_end;
static _Atomic pid_t walker;
static const int faults[] = {SIGSEGV, SIGBUS};
static struct sigaction old_actions[2];

static pid_t own_thread(void) { return (pid_t)syscall(SYS_gettid); } /* glibc 2.28 has no gettid */

static void on_fault(int number) {
    if (walker == own_thread()) siglongjmp(walk_end, 1);
    sigaction(number, &old_actions[number == SIGBUS],
              NULL); /* a fault of another thread: it recurs with the usual handler */
}

static void walk(handler *python, int number) {
    struct sigaction ours = {.sa_handler = on_fault, .sa_flags = SA_NODEFER | SA_ONSTACK};
    for (int i = 0; i < 2; i++)
        sigaction(faults[i], &ours, &old_actions[i]);
    walker = own_thread();
    if (!sigsetjmp(walk_end, 1)) python(number);
    walker = 0;
    for (int i = 0; i < 2; i++)
        sigaction(faults[i], &old_actions[i], NULL);
}

/* One signal at a time: a signal during a dump asks for what is being written. Python's handler is called from here and
 * not chained to ours: its chaining lets signals nest, on a stack of 16 KiB with the heap beneath. */
static void on_signal(int number) {
    int saved = errno;
    if (head && !atomic_exchange(&handling, 1)) {
        handler *python = python_handler;
        if (python) walk(python, number);
        ucch_flight_dump(UCCH_DUMP_SIGNAL, NULL);
        handling = 0;
    } else
        missed = 1;
    errno = saved;
}

/* Dump the records whenever this signal comes. Returns 1, or 0 if the signal has another handler. To be called again
 * after Python has registered its handler: that is then called before each dump, until ucch_flight_without_python. */
int ucch_flight_catch(int number) {
    struct sigaction before, ours = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    if (!head || sigaction(number, NULL, &before)) return 0;
    if (before.sa_handler == on_signal) return 1;
    int is_python = signal_number == number && !(before.sa_flags & SA_SIGINFO) && before.sa_handler != SIG_IGN;
    if (before.sa_handler != SIG_DFL && !is_python) return 0;
    if (sigaction(number, &ours, NULL)) return 0;
    if (before.sa_handler != SIG_DFL) python_handler = before.sa_handler;
    head->signal = (uint64_t)number;
    signal_number = number;
    return 1;
}

/* Block handling of the signal while another thread writes a stack and the records. `has` notes that this is so, as
 * Python may raise KeyboardInterrupt right after the call. */
void ucch_flight_hold(int *has) {
    while (atomic_exchange(&handling, 1))
        sched_yield();
    missed = 0;
    *has = 1;
}

/* Allow it again, if it is blocked. Returns whether a signal has come meanwhile. */
int ucch_flight_let_go(int *has) {
    if (!*has) return 0;
    *has = 0;
    handling = 0;
    return atomic_exchange(&missed, 0);
}

/* The interpreter is being finalized: its handler is not called any more. */
void ucch_flight_without_python(void) {
    int has;
    ucch_flight_hold(&has);
    python_handler = NULL;
    ucch_flight_let_go(&has);
}

/* The signal that makes this process dump its records; 0: none. `file`: descriptor of its recorder's memory file. */
int ucch_flight_signal(int *file) {
    *file = ring_file;
    return head ? signal_number : 0;
}

/* ---- records of other processes ---- */

/* Processes of this host that a failure has asked for a dump, as many as a host has ranks: their memory files, and
 * when. */
static struct {
    int64_t pid, file;
    uint64_t since;
} awaited[512];
static int nawaited;

/* Have ucch_flight_await wait for this process's dump. */
void ucch_flight_awaits_locked(int64_t pid, int64_t file, uint64_t since) {
    int at = 0;
    while (at < nawaited && awaited[at].pid != pid)
        at++;
    if (at == (int)(sizeof(awaited) / sizeof(*awaited))) return;
    awaited[at].pid = pid;
    awaited[at].file = file;
    awaited[at].since = since;
    if (at == nawaited) nawaited++;
}

/* True if the process has dumped its records since it was asked, or is gone. */
static int has_written(int at) {
    char path[64];
    uint64_t over = UINT64_MAX;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)awaited[at].pid, (int)awaited[at].file);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 1;
    if (pread(file, &over, sizeof(over), offsetof(header, over)) != sizeof(over)) over = UINT64_MAX;
    close(file);
    return over >= awaited[at].since;
}

/* Wait until all processes that were asked have dumped their records, at most `seconds`: this process is about to end
 * the job, and its signal would otherwise kill them before they get a core. */
void ucch_flight_await(double seconds) {
    double until = ucch_now() + seconds;
    for (int at = 0; at < nawaited; at++)
        while (!has_written(at) && ucch_now() < until)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}
