/* The entry points of the two runtimes, as far as ucc_hetero uses them. Included by fakegpu.c. */
#ifdef FAKE_CUDA

static char contexts[MOST_DEVICES];

int cuInit(unsigned flags) { return begin(); }
int cuDriverGetVersion(int *version) {
    *version = 12080;
    return OK;
}
int cuGetErrorName(int code, const char **name) {
    *name = error_name(code);
    return OK;
}
int cuDeviceGetCount(int *n) {
    *n = device_count();
    return OK;
}
int cuDeviceGetPCIBusId(char *text, int room, int device) { return bus(device, text, room); }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *context = &contexts[device];
    return OK;
}
int cuCtxSetCurrent(void *context) {
    refuse_network_threads();
    current = context ? (int)((char *)context - contexts) : -1;
    return OK;
}
int cuCtxGetCurrent(void **context) {
    *context = current < 0 ? NULL : &contexts[current];
    return OK;
}
int cuCtxGetDevice(int *device) {
    *device = current;
    return current < 0 ? INVALID_CONTEXT : OK;
}
int cuPointerGetAttributes(unsigned n, const int *which, void **into, const void *where) {
    int kind, device;
    look_up(where, &kind, &device);
    for (unsigned i = 0; i < n; i++)
        *(int *)into[i] = which[i] == 2   ? (kind == DEVICE_MEMORY ? 2 : kind == PINNED_MEMORY)
                          : which[i] == 9 ? device
                                          : 0;
    return OK;
}
int cuMemAlloc_v2(void **where, size_t bytes) { return usable() ? usable() : allocate(where, bytes, DEVICE_MEMORY); }
int cuMemFree_v2(void *where) { return release(where, DEVICE_MEMORY); }
int cuMemGetInfo_v2(size_t *room, size_t *all) { return usable() ? usable() : memory_left(room, all); }
int cuMemHostAlloc(void **where, size_t bytes, unsigned flags) {
    return usable() ? usable() : allocate(where, bytes, PINNED_MEMORY);
}
int cuMemHostRegister_v2(void *where, size_t bytes, unsigned flags) {
    return usable() ? usable() : where && bytes && flags == 3 ? see_host(where, bytes) : INVALID_VALUE;
}
int cuMemHostUnregister(void *where) { return usable() ? usable() : unsee_host(where); }
int cuMemHostGetDevicePointer_v2(void **seen, void *memory, unsigned flags) {
    *seen = memory;
    return flags ? INVALID_VALUE : OK;
}
int cuMemGetAddressRange_v2(void **base, size_t *bytes, const void *where) {
    enter();
    region *r = find_locked(where);
    int status = r && !r->freed ? OK : INVALID_VALUE;
    *base = r ? r->base : NULL;
    *bytes = r ? r->bytes : 0;
    pthread_mutex_unlock(&lock);
    return status;
}
int cuIpcGetMemHandle(share *out, void *where) { return share_memory(out, where); }
int cuIpcOpenMemHandle_v2(void **where, share from, unsigned flags) {
    return usable() ? usable() : flags != 1 ? INVALID_VALUE : open_memory(where, &from);
}
int cuIpcCloseMemHandle(void *where) { return close_memory(where); }
int cuMemFreeHost(void *where) { return release(where, PINNED_MEMORY); }
int cuMemcpyAsync(void *dst, const void *src, size_t bytes, void *s) { return copy_async(dst, src, bytes, s); }
typedef struct side_2d {
    size_t x, y;
    int type;
    const void *host;
    void *at, *array;
    size_t pitch;
} side_2d;
typedef struct copy_2d {
    side_2d src, dst;
    size_t bytes, rows;
} copy_2d;
int cuMemcpy2DAsync_v2(const copy_2d *c, void *s) {
    if (c->src.type != 4 || c->dst.type != 4 || c->src.pitch < c->bytes || c->dst.pitch < c->bytes)
        return INVALID_VALUE;
    return copy_rows_async(c->dst.at, c->dst.pitch, c->src.at, c->src.pitch, c->bytes, c->rows, s);
}
int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    return usable() ? usable() : make_stream((stream **)s);
}
int cuStreamDestroy_v2(void *s) { return end_stream(s); }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) { return wait_event(s, e); }
int cuStreamSynchronize(void *s) { return synchronize(s); }
int cuStreamWaitValue32_v2(void *s, void *word, uint32_t value, unsigned flags) {
    return flag_work(s, word, value, HOLD);
}
int cuStreamWriteValue32_v2(void *s, void *word, uint32_t value, unsigned flags) {
    return flag_work(s, word, value, WRITE);
}
typedef union word_op {
    int operation;
    struct {
        int operation;
        void *word;
        union {
            uint32_t value;
            uint64_t long_value;
        };
        unsigned flags;
        void *alias;
    } each;
    uint64_t room[6];
} word_op;
int cuStreamBatchMemOp_v2(void *s, unsigned n, word_op *all, unsigned flags) {
    int status = flags || !n || n > 256 ? INVALID_VALUE : OK;
    given_at_once((int)n);
    for (unsigned i = 0; i < n && !status; i++) {
        if (all[i].each.flags || (all[i].operation != 1 && all[i].operation != 2)) return INVALID_VALUE;
        status = flag_work(s, all[i].each.word, all[i].each.value, all[i].operation == 1 ? HOLD : WRITE);
    }
    return status;
}
int cuEventCreate(void **e, unsigned flags) {
    *e = calloc(1, sizeof(event));
    return *e ? OK : OUT_OF_MEMORY;
}
int cuEventDestroy_v2(void *e) {
    (void)e; /* kept: work in its stream may still name it */
    return OK;
}
int cuEventRecord(void *e, void *s) { return record(e, s); }
int cuEventQuery(void *e) { return query(e); }
int cuStreamBeginCapture_v2(void *s, int mode) { return begin_capture(s); }
int cuStreamEndCapture(void *s, void **graph) { return end_capture(s, graph); }
int cuStreamGetCaptureInfo_v2(void *s, int *does, uint64_t *which, void **graph, const void ***nodes, size_t *n) {
    return graph || nodes || n ? INVALID_VALUE : captures(s, does, which);
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return exchange_mode(mode); }
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { return instantiate(exec, graph); }
int cuGraphLaunch(void *exec, void *s) { return launch_graph(exec, s); }
int cuGraphExecDestroy(void *exec) { return drop_graph(exec); }
int cuGraphDestroy(void *graph) { return drop_graph(graph); }
int cuModuleGetLoadingMode(int *mode) {
    *mode = setting("FAKEGPU_LAZY", 0) ? 2 : 1;
    return OK;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? 9 : 0;
    return device < device_count() ? OK : INVALID_DEVICE;
}
int cuModuleLoadData(void **module, const void *image) {
    *module = strdup(image);
    return usable() ? usable() : refused();
}
int cuModuleGetFunction(void **function, void *module, const char *name) { return find_kernel(function, module, name); }
int cuFuncLoad(void *f) {
    first_launch(&((function *)f)->loaded);
    return OK;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned bytes,
                   void *s, void **arguments, void **more) {
    return x && y == 1 && z == 1 && a && b == 1 && c == 1 ? launch_kernel(f, x, a, arguments, s) : INVALID_VALUE;
}

#else

int hipInit(unsigned flags) { return begin(); }
int hipRuntimeGetVersion(int *version) {
    *version = hip_version() * 10000000;
    return OK;
}
const char *hipGetErrorName(int code) { return error_name(code); }
int hipGetLastError(void) { return OK; }
int hipGetDeviceCount(int *n) {
    *n = device_count();
    return OK;
}
int hipDeviceGetPCIBusId(char *text, int room, int device) { return bus(device, text, room); }
int hipGetDevice(int *device) {
    *device = current < 0 ? 0 : current;
    return OK;
}
int hipSetDevice(int device) {
    refuse_network_threads();
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    current = device;
    return OK;
}
int hipPointerGetAttributes(void *into, const void *where) {
    struct {
        int type, device;
        void *device_pointer, *host_pointer;
        int managed;
        unsigned flags;
    } *out = into;
    int kind, device, old = hip_version() < 6;
    look_up(where, &kind, &device);
    if (kind < 0 && old) return INVALID_VALUE;
    memset(out, 0, sizeof(*out));
    out->type = old ? kind == DEVICE_MEMORY : kind < 0 ? 0 : kind == DEVICE_MEMORY ? 2 : 1;
    out->device = kind < 0 ? -2 : device;
    return OK;
}
int hipMalloc(void **where, size_t bytes) { return allocate(where, bytes, DEVICE_MEMORY); }
int hipFree(void *where) {
    int kind = kind_of(where);
    return release(where, kind == SIGNAL_MEMORY ? kind : DEVICE_MEMORY);
}
int hipIpcGetMemHandle(share *out, void *where) { return share_memory(out, where); }
int hipIpcOpenMemHandle(void **where, share from, unsigned flags) {
    return flags == (hip_version() >= 6) ? open_memory(where, &from) : INVALID_VALUE;
}
int hipIpcCloseMemHandle(void *where) { return close_memory(where); }
int hipMemGetInfo(size_t *room, size_t *all) { return memory_left(room, all); }
int hipHostMalloc(void **where, size_t bytes, unsigned flags) {
    return flags == 3 ? allocate(where, bytes, PINNED_MEMORY) : INVALID_VALUE; /* portable and mapped, and no others */
}
int hipHostRegister(void *where, size_t bytes, unsigned flags) {
    return where && bytes && flags == 3 ? see_host(where, bytes) : INVALID_VALUE;
}
int hipHostUnregister(void *where) { return unsee_host(where); }
int hipHostGetDevicePointer(void **seen, void *memory, unsigned flags) {
    return flags ? INVALID_VALUE : seen_at(seen, memory);
}
int hipHostFree(void *where) { return release(where, PINNED_MEMORY); }
int hipExtMallocWithFlags(void **where, size_t bytes, unsigned flags) {
    if (flags == 1) /* and says nothing where there is no fine-grained memory */
        return allocate_as(where, bytes, DEVICE_MEMORY, fine_grained);
    return flags == 2 && bytes == 8 ? allocate(where, bytes, SIGNAL_MEMORY) : INVALID_VALUE;
}
int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *s) {
    if (current < 0) current = 0;
    return kind == 4 ? copy_async(dst, src, bytes, s) : INVALID_VALUE;
}
int hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                     int kind, void *s) {
    if (current < 0) current = 0;
    if (kind != 4 || dst_pitch < bytes || src_pitch < bytes) return INVALID_VALUE;
    return copy_rows_async(dst, dst_pitch, src, src_pitch, bytes, rows, s);
}
int hipStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    return flags > 1 ? INVALID_VALUE : make_stream((stream **)s);
}
int hipStreamDestroy(void *s) { return end_stream(s); }
int hipStreamWaitEvent(void *s, void *e, unsigned flags) { return flags ? INVALID_VALUE : wait_event(s, e); }
int hipStreamSynchronize(void *s) { return synchronize(s); }
int hipStreamWaitValue32(void *s, void *word, uint32_t value, unsigned flags, uint32_t mask) {
    return flags == 0 && mask == ~(uint32_t)0 ? flag_work(s, word, value, HOLD)
                                              : INVALID_VALUE; /* the rest is unused */
}
int hipStreamWriteValue32(void *s, void *word, uint32_t value, unsigned flags) {
    return flag_work(s, word, value, WRITE);
}
int hipEventCreateWithFlags(void **e, unsigned flags) {
    *e = flags & ~2u ? NULL : calloc(1, sizeof(event)); /* without times, or with them */
    return *e ? OK : flags & ~2u ? INVALID_VALUE : OUT_OF_MEMORY;
}
int hipEventDestroy(void *e) { return OK; }
int hipEventRecord(void *e, void *s) {
    if (current < 0) current = 0;
    return record(e, s);
}
int hipEventQuery(void *e) { return query(e); }
int hipStreamBeginCapture(void *s, int mode) { return begin_capture(s); }
int hipStreamEndCapture(void *s, void **graph) { return end_capture(s, graph); }
int hipStreamGetCaptureInfo(void *s, int *does, uint64_t *which) { return captures(s, does, which); }
int hipThreadExchangeStreamCaptureMode(int *mode) { return exchange_mode(mode); }
int hipGraphInstantiate(void **exec, void *graph, void **node, char *log, size_t room) {
    return instantiate(exec, graph);
}
int hipGraphLaunch(void *exec, void *s) { return launch_graph(exec, s); }
int hipGraphExecDestroy(void *exec) { return drop_graph(exec); }
int hipGraphDestroy(void *graph) { return drop_graph(graph); }

/* The image is not copied. */
int hipModuleLoadData(void **module, const void *image) {
    if (current < 0) current = 0;
    *module = (void *)image;
    return usable() ? usable() : refused();
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    return find_kernel(function, module, name);
}
int hipModuleLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                          unsigned bytes, void *s, void **arguments, void **more) {
    if (current < 0) current = 0;
    return x && y == 1 && z == 1 && a && b == 1 && c == 1 ? launch_kernel(f, x, a, arguments, s) : INVALID_VALUE;
}
#endif
