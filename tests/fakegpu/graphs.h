/* Streams that are captured, and graphs. Included by fakegpu.c after the definition of streams.
 *
 * A graph is the work of its streams in the order of capture; each launch gives it to streams again. Forbidden calls
 * end a capture, as on real runtimes: allocating, pinning, loading kernels, querying events and waiting for streams, in
 * any thread whose capture mode is not relaxed; events from outside; waits for memory and writes to it. */
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907 };
enum { MOST_BRANCHES = 16, RELAXED = 2 };

typedef struct node {
    int branch;
    work w;
} node;

typedef struct graph {
    node *nodes;
    int n, room, branches, broken, ended;
    stream *captured[MOST_BRANCHES]; /* the first one started the capture */
    stream *own[MOST_BRANCHES];      /* used by launches instead of these */
    recording *last;                 /* launches run one after the other */
} graph;

static graph *capture; /* one at a time */
static _Thread_local int capture_mode;

/* CAPTURE_UNSUPPORTED for a call that a capture forbids in this thread, which also breaks the capture. */
static int refused(void) {
    enter();
    int bad = capture && capture_mode != RELAXED;
    if (bad) capture->broken = 1;
    pthread_mutex_unlock(&lock);
    return bad ? CAPTURE_UNSUPPORTED : OK;
}

static int exchange_mode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}

/* Index of a stream in the capture; -1 if it is not captured. */
static int branch_of(const stream *s) {
    for (int i = 0; capture && i < capture->branches; i++)
        if (capture->captured[i] == s) return i;
    return -1;
}

static int captures(void *handle, int *does, uint64_t *which) {
    enter();
    *does = handle && branch_of(handle) >= 0;
    *which = (uint64_t)(uintptr_t)capture;
    pthread_mutex_unlock(&lock);
    return OK;
}

static int begin_capture(void *handle) {
    graph *g = calloc(1, sizeof(*g));
    enter();
    int bad = !g || !handle || capture;
    if (!bad) {
        g->captured[g->branches++] = handle;
        capture = g;
    }
    pthread_mutex_unlock(&lock);
    return bad ? INVALID_VALUE : OK;
}

static int end_capture(void *handle, void **out) {
    enter();
    graph *g = capture;
    int bad = !g || g->captured[0] != handle, broken = g && g->broken;
    if (!bad) {
        capture = NULL;
        g->ended = 1;
    }
    pthread_mutex_unlock(&lock);
    *out = bad || broken ? NULL : g;
    return bad ? INVALID_VALUE : broken ? CAPTURE_INVALIDATED : OK;
}

/* Record work of a stream that is being captured; returns whether it is. */
static int captured_locked(stream *s, work w, int *status) {
    int branch = branch_of(s);
    if (branch < 0) return 0;
    graph *g = capture;
    *status = OK;
    if (w.kind == HOLD || w.kind == WRITE || (w.kind == KERNEL && runs_once(w.dst))) {
        g->broken = 1;
        *status = CAPTURE_UNSUPPORTED;
        return 1;
    }
    if (g->n == g->room) g->nodes = realloc(g->nodes, (size_t)(g->room = 2 * g->room + 64) * sizeof(*g->nodes));
    g->nodes[g->n++] = (node){branch, w};
    return 1;
}

/* Make a stream wait for an event: 0, or an error; an event of a capture adds the stream to the capture. */
static int join_locked(stream *s, const recording *r) {
    int branch = branch_of(s);
    if (!r->of && branch < 0) return OK;
    if (!r->of || r->of != capture || capture->branches == MOST_BRANCHES) {
        if (capture) capture->broken = 1;
        return CAPTURE_ISOLATION;
    }
    if (branch < 0) capture->captured[capture->branches++] = s;
    return OK;
}

static int make_stream(stream **out);

/* The arguments of a kernel are its own, and events are those of the launch. */
static work copied(const work *from) {
    work w = *from;
    if (w.kind == KERNEL) w.dst = again(w.dst);
    if (w.kind == RECORD) w.recording->now = calloc(1, sizeof(recording));
    if (w.kind == RECORD || w.kind == WAIT) w.recording = w.recording->now;
    return w;
}

static int launch_graph(void *exec, void *handle) {
    graph *g = exec;
    recording *done = calloc(1, sizeof(*done)), *last = g->last;
    int status = last ? submit(handle, (work){.kind = WAIT, .recording = last}) : OK;
    for (int i = 0; i < g->n && status == OK; i++) {
        int branch = g->nodes[i].branch;
        if (branch && !g->own[branch]) status = make_stream(&g->own[branch]);
        if (status == OK) status = submit(branch ? g->own[branch] : handle, copied(&g->nodes[i].w));
    }
    g->last = done;
    return status ? status : submit(handle, (work){.kind = RECORD, .recording = done});
}

static int drop_graph(void *graph) { return graph ? OK : INVALID_VALUE; } /* kept, as launches may be in progress */

static int instantiate(void **exec, void *graph) { return *exec = graph, drop_graph(graph); }
