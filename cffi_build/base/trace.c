/* The timeline: a ring of events in a mapped file, readable after the rank was killed. An event is written when a
 * program or step begins and completed when it ends: an event without an end was under way.
 *
 * Events take their places in the ring by an atomic counter, so network threads need no lock. */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC "UCCHTRC1"

typedef struct header {
    char magic[8];
    uint64_t capacity; /* events, a power of two */
    uint64_t written;  /* events written in all; the ring has the last `capacity` */
    char pad[UCCH_TRACE_HEADER - 24];
} header;

int ucch_trace_on;
static header *head;
static ucch_event *ring;

static size_t bytes_of(uint64_t capacity) { return sizeof(header) + capacity * sizeof(ucch_event); }

/* Start recording at most `capacity` events (rounded up to a power of two) in a file; path NULL: in memory only.
 * Returns 0, or the number of the error if the file or memory is not available; then there is no file. */
int ucch_trace_open(const char *path, uint64_t capacity) {
    uint64_t rounded = 1;
    while (rounded < capacity)
        rounded *= 2;
    int file = path ? open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    if (path && file < 0) return errno;
    /* allocate the blocks: with only the size set, a full disk would kill the job by a signal later */
    int status = file >= 0 ? posix_fallocate(file, 0, (off_t)bytes_of(rounded)) : 0;
    int flags = path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *memory = MAP_FAILED;
    if (!status) memory = mmap(NULL, bytes_of(rounded), PROT_READ | PROT_WRITE, flags | MAP_POPULATE, file, 0);
    if (!status && memory == MAP_FAILED) status = errno;
    if (file >= 0) close(file);
    if (status && file >= 0) unlink(path); /* a part of it may fill the disk */
    if (status) return status;
    UCCH_LOCKED;
    head = memory;
    ring = (ucch_event *)(head + 1);
    memset(ring, 0, rounded * sizeof(ucch_event)); /* touch the pages: no event then waits for a page fault */
    memcpy(head->magic, MAGIC, sizeof(head->magic));
    head->capacity = rounded;
    head->written = 0;
    UCCH_STORE(&ucch_trace_on, 1); /* read by network threads without the lock */
    return 0;
}

/* Stop recording. The memory is kept: another thread may be reading it. */
void ucch_trace_stop(void) { UCCH_STORE(&ucch_trace_on, 0); }

/* The header and ring, with their size in bytes; NULL if the timeline was never opened. */
const void *ucch_trace_memory(uint64_t *bytes) {
    *bytes = head ? bytes_of(head->capacity) : 0;
    return head;
}

static uint64_t begin(ucch_event event) {
    uint64_t number = __atomic_fetch_add(&head->written, 1, __ATOMIC_RELAXED);
    ring[number & (head->capacity - 1)] = event;
    return number + 1;
}

uint64_t ucch_trace_begin(uint32_t program, int step, uint64_t seq) {
    return begin((ucch_event){.begin = ucch_now_ns(), .seq = seq, .program = program, .step = step});
}

/* A wire sends bytes to a process, or has received them from it. */
uint64_t ucch_trace_begin_wire(int wire, uint64_t peer, size_t bytes, uint64_t since) {
    return begin(
        (ucch_event){.begin = since, .seq = peer, .program = UCCH_TRACE_WIRE, .step = wire, .bytes = (uint32_t)bytes});
}

void ucch_trace_end(uint64_t number, int status) {
    /* 0, or overwritten in the ring since it began. */
    if (!number || __atomic_load_n(&head->written, __ATOMIC_RELAXED) - number >= head->capacity) return;
    ucch_event *e = &ring[(number - 1) & (head->capacity - 1)];
    e->status = status;
    e->end = ucch_now_ns();
}
