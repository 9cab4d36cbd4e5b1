/* The memory of the fake devices. Included by fakegpu.c. */
typedef struct region {
    char *base;
    size_t bytes;
    int kind, device, freed, file;
    struct region *next;
} region;

static region *regions;

static region *find_locked(const void *address) {
    for (region *r = regions; r; r = r->next)
        if ((const char *)address >= r->base && (const char *)address < r->base + r->bytes)
            return r;
    return NULL;
}

static int note(region *r, void **address) {
    pthread_mutex_lock(&lock);
    r->next = regions;
    regions = r;
    pthread_mutex_unlock(&lock);
    *address = r->base;
    return OK;
}

/* Long device memory is a file, which other processes can map; it takes no room before it is used. */
static void *map_file(region *r, size_t room) {
    r->file = memfd_create("fakegpu", MFD_CLOEXEC);
    if (r->file < 0 || ftruncate(r->file, (off_t)room))
        return MAP_FAILED;
    return mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, r->file, 0);
}

static int allocate(void **address, size_t bytes, int kind) {
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
    if (room < SPARSE)
        memset(r->base, FRESH, room);
    r->bytes = bytes;
    r->kind = kind;
    r->device = current < 0 ? 0 : current;
    return note(r, address);
}

/* What another process opens memory by: whose it is, as which file, and how long. */
typedef struct share {
    int pid, file;
    size_t bytes;
    char more[48];
} share;

static int share_memory(share *out, void *address) {
    pthread_mutex_lock(&lock);
    region *r = find_locked(address);
    int there = r && !r->freed && r->file >= 0 && r->base == (char *)address;
    if (there)
        *out = (share){.pid = getpid(), .file = r->file, .bytes = r->bytes};
    pthread_mutex_unlock(&lock);
    return there ? OK : INVALID_VALUE;
}

static int open_memory(void **address, const share *from) {
    char path[64];
    region *r = calloc(1, sizeof(*r));
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", from->pid, from->file);
    r->file = setting("FAKEGPU_NO_PEERS", 0) ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (r->file >= 0)
        r->base = mmap(NULL, from->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r->file, 0);
    if (r->file < 0 || r->base == MAP_FAILED) {
        free(r);
        return NOT_SUPPORTED;
    }
    r->bytes = from->bytes;
    r->kind = DEVICE_MEMORY;
    return note(r, address);
}

/* Overwritten at once, whatever still uses it, and kept for ever, so that every later use meets the poison. */
static int release(void *address, int kind) {
    pthread_mutex_lock(&lock);
    region *r = find_locked(address);
    int status = r && r->base == (char *)address && !r->freed && r->kind == kind ? OK : INVALID_VALUE;
    if (status == OK) {
        r->freed = 1;
        memset(r->base, FREED, r->bytes);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static void look_up(const void *address, int *kind, int *device) {
    pthread_mutex_lock(&lock);
    region *r = find_locked(address);
    *kind = r && !r->freed ? r->kind : -1;
    *device = r ? r->device : 0;
    pthread_mutex_unlock(&lock);
}
