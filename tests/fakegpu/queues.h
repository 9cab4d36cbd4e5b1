/* Streams, the queues that they share, and copy engines. Included by fakegpu.c. */
static queue *new_queue(void);

/* Give a kernel to the stream's own queue, and events behind it, once the stream's earlier kernel has ended: until then
 * all that is behind in this queue waits. Returns 0 for work that runs here. */
static int runs_beside_locked(const queue *q, work *w) {
    stream *s = w->of;
    if (!goes_on || !s || q == s->beside || (w->kind == RECORD && !s->running)) return 0;
    while (w->kind != RECORD && s->running) {
        pthread_mutex_unlock(&lock);
        usleep(LOOK_US);
        enter();
    }
    if (w->kind != KERNEL && w->kind != RECORD) return 0;
    if (!s->beside && !(s->beside = new_queue())) return 0;
    s->running++;
    w->next = NULL;
    *s->beside->tail = w;
    s->beside->tail = &w->next;
    pthread_cond_signal(&s->beside->given);
    return 1;
}

static void *worker(void *data) {
    queue *q = data;
    enter();
    for (;;) {
        while (!q->head)
            pthread_cond_wait(&q->given, &lock);
        work *w = q->head;
        q->head = w->next;
        if (!q->head) q->tail = &q->head;
        if (runs_beside_locked(q, w)) continue;
        pthread_mutex_unlock(&lock);
        run(q, w);
        enter();
        if (w->of) w->of->unfinished--;
        if (w->of && q == w->of->beside) w->of->running--;
        free(w);
    }
    return NULL;
}

/* Queues and their threads are never destroyed. */
static queue *new_queue(void) {
    static unsigned made;
    queue *q = calloc(1, sizeof(*q));
    if (!q) return NULL;
    q->tail = &q->head;
    pthread_cond_init(&q->given, NULL);
    q->seed = ++made * 2654435761u;
    if (!pthread_create(&q->thread, NULL, worker, q)) {
        pthread_detach(q->thread);
        return q;
    }
    free(q);
    return NULL;
}

/* An unused queue, a new one, or, at the limit, the one with the fewest users. */
static queue *queue_for_locked(void) {
    static queue *all[4096];
    static int many;
    queue *best = NULL;
    int room = most_queues > 0 && most_queues < 4096 ? most_queues : 4096;
    for (int i = 0; i < many && i < room; i++)
        if (!best || all[i]->users < best->users) best = all[i];
    if ((!best || best->users) && many < room && (all[many] = new_queue())) best = all[many++];
    if (best) best->users++;
    return best;
}

/* Room for more streams is made only when no kernel runs, as in CUDA. */
static void make_room_locked(void) {
    static int room = 34;
    while (goes_on && open_streams >= room) {
        int runs = 0;
        for (const stream *s = streams; s; s = s->next)
            runs |= s->running;
        room += runs ? 0 : 43;
        pthread_mutex_unlock(&lock);
        usleep(runs ? LOOK_US : 0);
        enter();
    }
}

static int make_stream(stream **out) {
    stream *s = calloc(1, sizeof(*s));
    enter();
    make_room_locked();
    if (s) s->queue = queue_for_locked();
    if (s && s->queue) {
        s->device = current < 0 ? 0 : current;
        s->next = streams;
        streams = s;
        open_streams++;
    }
    pthread_mutex_unlock(&lock);
    *out = s;
    return s && s->queue ? OK : OUT_OF_MEMORY;
}

/* Destroy a stream after its remaining work; the handle is kept, as work may refer to it. */
static int end_stream(void *handle) {
    stream *s = handle;
    enter();
    open_streams--;
    s->queue->users--;
    s->ended = 1;
    pthread_mutex_unlock(&lock);
    return OK;
}

static stream *stream_of(void *handle) {
    if (handle) return handle;
    enter();
    stream *s = default_stream;
    pthread_mutex_unlock(&lock);
    if (!s && make_stream(&s) == OK) default_stream = s;
    return s;
}

static int give_locked(queue *q, stream *of, work w) {
    work *copy = malloc(sizeof(*copy));
    if (!q || !copy) {
        free(copy);
        return OUT_OF_MEMORY;
    }
    *copy = w;
    copy->of = of;
    copy->next = NULL;
    if (of) of->unfinished++;
    *q->tail = copy;
    q->tail = &copy->next;
    pthread_cond_signal(&q->given);
    return OK;
}

/* A thread that holds it blocks the driver for all threads, for long if it is `kept`. */
static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER;
static int kept;

static void pass_driver(void) {
    pthread_mutex_lock(&driver);
    pthread_mutex_unlock(&driver);
}

/* The longest queue of a device's streams, or of this stream; -1: of any device. */
static int most_work(const stream *one, int device) {
    int most = 0;
    enter();
    for (const stream *s = one ? one : streams; s; s = one ? NULL : s->next)
        if ((device < 0 || s->device == device) && s->unfinished > most) most = s->unfinished;
    pthread_mutex_unlock(&lock);
    return most;
}

/* Wait for all streams of a device, as HIP does before it frees anything there. */
static void wait_for_device(int device) {
    while (most_work(NULL, device))
        usleep(LOOK_US);
}

/* Block the driver until streams have less work than this. */
static void keep_driver(const stream *s, int least) {
    for (int busy = 1; busy; usleep(busy ? LOOK_US : 0)) {
        busy = most_work(s, -1) >= least;
        __atomic_store_n(&kept, busy, __ATOMIC_RELEASE);
    }
}

/* Load a kernel if necessary, once the device is idle. */
static void load_kernel(int *loaded) {
    pthread_mutex_lock(&driver);
    if (!*loaded) keep_driver(NULL, 1);
    *loaded = 1;
    pthread_mutex_unlock(&driver);
}

/* A full stream blocks the driver for all threads, as CUDA seems to do beyond some 1,000 kernels. */
static void wait_for_room(const stream *s) {
    pthread_mutex_lock(&driver);
    if (most_ahead > 0) keep_driver(s, most_ahead);
    pthread_mutex_unlock(&driver);
}

static int submit(void *handle, work w) {
    stream *s = stream_of(handle);
    if (!s) return OUT_OF_MEMORY;
    int status;
    __atomic_add_fetch(&given, 1, __ATOMIC_RELAXED);
    enter();
    int taken = captured_locked(s, w, &status);
    pthread_mutex_unlock(&lock);
    if (taken) return status;
    wait_for_room(s);
    enter();
    status = give_locked(s->queue, s, w);
    pthread_mutex_unlock(&lock);
    return status;
}

/* The next works come from one driver call. */
static void given_at_once(int works) { __atomic_sub_fetch(&given, works - 1, __ATOMIC_RELAXED); }

/* Queue a copy in an engine, where it waits for earlier work of its stream. */
static int submit_to_engine(queue **engine, stream *s, work w) {
    recording *before = calloc(1, sizeof(*before)), *after = calloc(1, sizeof(*after)); /* never freed, as others */
    if (!s || !before || !after) return OUT_OF_MEMORY;
    enter();
    if (!*engine) *engine = new_queue();
    int status = give_locked(s->queue, s, (work){.kind = RECORD, .recording = before});
    if (!status) status = give_locked(*engine, NULL, (work){.kind = WAIT, .recording = before});
    if (!status) status = give_locked(*engine, NULL, w);
    if (!status) status = give_locked(*engine, NULL, (work){.kind = RECORD, .recording = after});
    if (!status) status = give_locked(s->queue, s, (work){.kind = WAIT, .recording = after});
    pthread_mutex_unlock(&lock);
    return status;
}

static int copy_rows_async(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                           void *handle) {
    work w = {.kind = COPY, .dst = dst, .src = src, .bytes = bytes, .rows = rows};
    w.dst_pitch = dst_pitch;
    w.src_pitch = src_pitch;
    int to_device = kind_of(dst) == DEVICE_MEMORY, from_device = kind_of(src) == DEVICE_MEMORY;
    if (usable()) return usable();
    pass_driver();
    enter();
    int in_graph = branch_of(handle) >= 0;
    pthread_mutex_unlock(&lock);
    if (!HIP || in_graph || to_device == from_device || !setting("HSA_ENABLE_SDMA", 1)) return submit(handle, w);
    return submit_to_engine(&engines[from_device], stream_of(handle), w);
}

static int copy_async(void *dst, const void *src, size_t bytes, void *handle) {
    return copy_rows_async(dst, 0, src, 0, bytes, 1, handle);
}

static int synchronize(void *handle) {
    if (refused()) return refused();
    const stream *s = stream_of(handle);
    while (most_work(s, -1))
        usleep(LOOK_US);
    return OK;
}

static int record(event *e, void *handle) {
    if (usable()) return usable();
    recording *r = calloc(1, sizeof(*r)); /* never freed: work may still wait for it */
    if (!r) return OUT_OF_MEMORY;
    enter();
    e->last = r;
    r->of = branch_of(handle) < 0 ? NULL : capture;
    pthread_mutex_unlock(&lock);
    return submit(handle, (work){.kind = RECORD, .recording = r});
}

static int wait_event(void *handle, event *e) {
    enter();
    recording *r = e->last;
    int status = r ? join_locked(handle, r) : OK;
    pthread_mutex_unlock(&lock);
    return status ? status : r ? submit(handle, (work){.kind = WAIT, .recording = r}) : OK;
}
