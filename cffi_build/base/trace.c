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
static header *head; /* the ring lies behind it; replaced, never freed, when the timeline is opened again */

static size_t bytes_of(uint64_t capacity) { return sizeof(header) + capacity * sizeof(ucch_event); }

/* Place of an event in a ring, by its number from 0. */
static ucch_event *event_at(header *h, uint64_t number) { return (ucch_event *)(h + 1) + (number & (h->capacity - 1)); }

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
    header *h = memory;
    memset(h, 0, bytes_of(rounded)); /* touch the pages: no event then waits for a page fault */
    memcpy(h->magic, MAGIC, sizeof(h->magic));
    h->capacity = rounded;
    UCCH_STORE(&head, h); /* both are read by network threads without the lock */
    UCCH_STORE(&ucch_trace_on, 1);
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
    header *h = UCCH_LOAD(&head);
    uint64_t number = __atomic_fetch_add(&h->written, 1, __ATOMIC_RELAXED);
    *event_at(h, number) = event;
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
    header *h = UCCH_LOAD(&head);
    /* 0, overwritten since it began, or of an earlier ring */
    if (!number || __atomic_load_n(&h->written, __ATOMIC_RELAXED) - number >= h->capacity) return;
    ucch_event *e = event_at(h, number - 1);
    e->status = status;
    e->end = ucch_now_ns();
}
