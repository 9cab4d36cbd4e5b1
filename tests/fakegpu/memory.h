/* The memory of the fake devices. Included by fakegpu.c. */
typedef struct region {
    char *base, *seen; /* the device's address of host memory */
    size_t bytes;
    int kind, device, freed, file, fine;
    int owner, name; /* of memory opened from another process: its process id, and the file's number there */
    struct region *next, *freed_after;
} region;

/* Limit of freed memory that holds poison. Pages freed earlier are returned to the system, as ranks that run hundreds
 * of tests would fill the machine: they are zeros then, and still known to be freed. */
#define POISONED ((size_t)64 << 20)

static region *regions;
static region *oldest, **latest = &oldest; /* freed regions that hold poison */
static size_t poisoned;
static int fine_grained; /* whether such memory exists */

static int is_in(const void *address, const char *base, size_t bytes) {
    return base && (const char *)address >= base && (const char *)address < base + bytes;
}

static region *find_locked(const void *address) {
    for (region *r = regions; r; r = r->next)
        if (is_in(address, r->base, r->bytes) || is_in(address, r->seen, r->bytes)) return r;
    return NULL;
}

/* Regions are never freed. */
static region *find(const void *address) {
    enter();
    region *r = find_locked(address);
    pthread_mutex_unlock(&lock);
    return r;
}

/* True if allocated memory begins at this address. */
static int begins(const region *r, const void *address) { return r && r->base == (const char *)address && !r->freed; }

static void look_up(const void *address, int *kind, int *device) {
    const region *r = find(address);
    *kind = r && !r->freed ? r->kind : -1;
    *device = r ? r->device : 0;
}

/* -1 for memory that the runtime does not know. */
static int kind_of(const void *address) {
    int kind, device;
    look_up(address, &kind, &device);
    return kind;
}

static int note(region *r, void **address) {
    enter();
    r->next = regions;
    regions = r;
    pthread_mutex_unlock(&lock);
    *address = r->base;
    return OK;
}

/* Long device memory is a file, which other processes can map; it takes no room before it is used. */
static void *map_file(region *r, size_t room) {
    r->file = memfd_create("fakegpu", MFD_CLOEXEC);
    if (r->file < 0 || ftruncate(r->file, (off_t)room)) return MAP_FAILED;
    return mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, r->file, 0);
}

static int refused(void);

static int allocate_as(void **address, size_t bytes, int kind, int fine) {
    if (refused()) return refused();
    region *r = calloc(1, sizeof(*r));
    size_t room = (bytes + 4095) / 4096 * 4096;
    if (bytes == 0 || !r || bytes > (size_t)1 << 32) {
        free(r);
        return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    r->file = -1;
    if (kind == DEVICE_MEMORY && bytes >= SHAREABLE)
        r->base = map_file(r, room);
    else if (posix_memalign((void **)&r->base, 4096, room))
        r->base = MAP_FAILED;
    if (r->base == MAP_FAILED) {
        free(r);
        return OUT_OF_MEMORY;
    }
    if (room < SPARSE) memset(r->base, FRESH, room);
    r->bytes = bytes;
    r->kind = kind;
    r->fine = fine;
    r->device = current < 0 ? 0 : current;
    return note(r, address);
}

static size_t pinned; /* bytes of registered host memory; nothing unpins it */

static int can_pin(size_t bytes) { return (pinned + bytes) >> 20 <= (size_t)setting("FAKEGPU_PINNED_MB", 1 << 20); }

static int allocate(void **address, size_t bytes, int kind) {
    if (kind == PINNED_MEMORY && !can_pin(bytes)) return OUT_OF_MEMORY;
    return allocate_as(address, bytes, kind, !HIP);
}

/* True if threads that pin host memory block, and the number that are blocked now. */
static int pins_stand, pins_waiting;

#define ALREADY_REGISTERED 712

/* Map host memory for the device: with HIP at another address, if it can be mapped twice. */
static int see_host(void *where, size_t bytes) {
    __atomic_fetch_add(&pins_waiting, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pins_stand, __ATOMIC_SEQ_CST))
        usleep(100);
    __atomic_fetch_sub(&pins_waiting, 1, __ATOMIC_SEQ_CST);
    if (refused()) return refused();
    if (!can_pin(bytes)) return OUT_OF_MEMORY;
    enter();
    region *r = find_locked(where);
    int is_seen = r && r->kind == PINNED_MEMORY && !r->freed;
    pthread_mutex_unlock(&lock);
    if (is_seen) return ALREADY_REGISTERED;
    pinned += bytes;
    r = calloc(1, sizeof(*r));
    void *seen = HIP ? mremap(where, 0, bytes, MREMAP_MAYMOVE) : MAP_FAILED, *unused;
    if (!r) return OUT_OF_MEMORY;
    *r = (region){.base = where, .bytes = bytes, .kind = PINNED_MEMORY, .file = -1};
    r->seen = seen == MAP_FAILED ? NULL : seen;
    return note(r, &unused);
}

/* Unmap it; later look-ups do not find it. */
static int unsee_host(void *where) {
    region *r = find(where);
    if (!begins(r, where) || r->kind != PINNED_MEMORY) return INVALID_VALUE;
    r->bytes = 0;
    return OK;
}

static int seen_at(void **seen, void *memory) {
    const region *r = find(memory);
    *seen = r && r->seen ? r->seen + ((char *)memory - r->base) : memory;
    return r && r->kind != DEVICE_MEMORY ? OK : INVALID_VALUE;
}

/* Handle by which another process opens memory: its owner, file and length. */
typedef struct share {
    int pid, file;
    size_t bytes;
    int device, board, fine; /* the device's number in its owner */
    char more[32];
} share;

static int share_memory(share *out, void *address) {
    const region *r = find(address);
    if (!begins(r, address) || r->file < 0) return INVALID_VALUE;
    *out = (share){getpid(), r->file, r->bytes, r->device, board_of(r->device), r->fine, ""};
    return OK;
}

/* True if HIP opens the memory as the peer's: HIP 7 uses this process's device of that number. */
static int takes_for_peer(const share *from) {
    int mine = board_of(from->device);
    return hip_version() < 7 || mine == from->board || mine == board_of(current < 0 ? 0 : current);
}

/* CUDA opens memory once in a process. */
static int is_open(const share *from) {
    int found = 0;
    enter();
    for (region *r = regions; r; r = r->next)
        found |= r->owner == from->pid && r->name == from->file && !r->freed;
    pthread_mutex_unlock(&lock);
    return found;
}

static int open_memory(void **address, const share *from) {
    char path[64];
    if (from->pid == getpid()) return INVALID_CONTEXT;
    if (!HIP && is_open(from)) return ALREADY_MAPPED;
    if (HIP && hip_version() >= 7 && from->device >= device_count()) return INVALID_VALUE;
    region *r = calloc(1, sizeof(*r));
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", from->pid, from->file);
    r->file = setting("FAKEGPU_NO_PEERS", 0) ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (r->file >= 0)
        r->base = mmap(NULL, from->bytes, PROT_READ | PROT_WRITE,
                       from->fine && takes_for_peer(from) ? MAP_SHARED : MAP_PRIVATE, r->file, 0);
    if (r->file < 0 || r->base == MAP_FAILED) {
        free(r);
        return NOT_SUPPORTED;
    }
    if (!from->fine || !takes_for_peer(from)) /* a second read returns the first one's data */
        for (size_t at = 0; at < from->bytes; at += 4096)
            r->base[at] ^= 1;
    r->bytes = from->bytes;
    r->kind = DEVICE_MEMORY;
    r->owner = from->pid;
    r->name = from->file;
    return note(r, address);
}

static void wait_for_device(int device);

static void poison_locked(region *r) {
    r->freed = 1;
    memset(r->base, FREED, r->bytes);
    *latest = r;
    latest = &r->freed_after;
    for (poisoned += r->bytes; poisoned > POISONED && oldest != r; oldest = oldest->freed_after) {
        size_t room = (oldest->bytes + 4095) / 4096 * 4096;
        if (oldest->file < 0)
            madvise(oldest->base, room, MADV_DONTNEED);
        else
            fallocate(oldest->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)room);
        poisoned -= oldest->bytes;
    }
}

/* Memory is overwritten at once, even if in use, and never reused, so that every later access reads the poison. */
static int release(void *address, int kind) {
    region *r = find(address);
    if (refused()) return refused();
    if (!begins(r, address) || r->kind != kind) return INVALID_VALUE;
    if (HIP) wait_for_device(r->device);
    enter();
    poison_locked(r);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Close another process's memory: no work may use it. */
static int close_memory(void *address) {
    region *r = find(address);
    if (!begins(r, address) || !r->owner) return INVALID_VALUE;
    __atomic_add_fetch(&closing, 1, __ATOMIC_RELAXED);
    wait_for_device(current < 0 ? 0 : current);
    __atomic_sub_fetch(&closing, 1, __ATOMIC_RELAXED);
    r->freed = 1;
    return OK;
}
