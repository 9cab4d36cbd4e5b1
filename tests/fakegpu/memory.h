/* The memory of the fake devices. Included by fakegpu.c. */
typedef struct region {
    char *base;
    size_t bytes;
    int kind, device, freed;
    struct region *next;
} region;

static region *regions;

static region *find_locked(const void *address) {
    for (region *r = regions; r; r = r->next)
        if ((const char *)address >= r->base && (const char *)address < r->base + r->bytes)
            return r;
    return NULL;
}

static int allocate(void **address, size_t bytes, int kind) {
    region *r = calloc(1, sizeof(*r));
    size_t room = (bytes + 4095) / 4096 * 4096;
    if (bytes == 0 || !r || bytes > (size_t)1 << 32 || posix_memalign((void **)&r->base, 4096, room)) {
        free(r);
        return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    memset(r->base, FRESH, room);
    r->bytes = bytes;
    r->kind = kind;
    r->device = current < 0 ? 0 : current;
    pthread_mutex_lock(&lock);
    r->next = regions;
    regions = r;
    pthread_mutex_unlock(&lock);
    *address = r->base;
    return OK;
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
