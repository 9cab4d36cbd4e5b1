/* The entry points of the two runtimes that ucc_hetero uses. Included by fakegpu.c. */
#ifdef FAKE_CUDA
#define ENTRY(cuda, hip, params, does)                                                                                 \
    int cuda params { return fails(#cuda) ? LAUNCH_FAILED : (does); }
#else
#define ENTRY(cuda, hip, params, does)                                                                                 \
    int hip params { return fails(#cuda) ? LAUNCH_FAILED : (does); }
#endif
/* Calls that need a current device. */
#define READY(does) (usable() ? usable() : (does))

static int pinned_memory(void **where, size_t bytes) { return READY(allocate(where, bytes, PINNED_MEMORY)); }

static int new_event(void **e, unsigned flags) {
    *e = flags & ~2u ? NULL : calloc(1, sizeof(event)); /* without or with timing */
    return *e ? OK : flags & ~2u ? INVALID_VALUE : OUT_OF_MEMORY;
}

static int copy_or_fail(void *dst, const void *src, size_t bytes, void *s) {
    return fails("cuMemcpyAsync") ? LAUNCH_FAILED : copy_async(dst, src, bytes, s);
}

/* HIP does not copy the image. */
static int load_module(void **module, const void *image) {
    *module = HIP ? (void *)image : strdup(image);
    return READY(refused());
}

static int is_line(unsigned x, unsigned y, unsigned z) { return x && y == 1 && z == 1; }

/* ---- both runtimes: CUDA's name, HIP's name, parameters, and the result ---- */

ENTRY(cuInit, hipInit, (unsigned flags), begin())
ENTRY(cuDeviceGetCount, hipGetDeviceCount, (int *n), (*n = device_count(), OK))
ENTRY(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId, (char *text, int room, int device), bus(device, text, room))
ENTRY(cuMemAlloc_v2, hipMalloc, (void **where, size_t bytes), READY(allocate(where, bytes, DEVICE_MEMORY)))
ENTRY(cuMemFree_v2, hipFree, (void *where),
      release(where, kind_of(where) == SIGNAL_MEMORY ? SIGNAL_MEMORY : DEVICE_MEMORY))
ENTRY(cuMemGetInfo_v2, hipMemGetInfo, (size_t *room, size_t *all), READY(memory_left(room, all)))
/* Pinned memory is portable and mapped, always. */
ENTRY(cuMemHostAlloc, hipHostMalloc, (void **where, size_t bytes, unsigned flags),
      flags == 3 ? pinned_memory(where, bytes) : INVALID_VALUE)
ENTRY(cuMemHostRegister_v2, hipHostRegister, (void *where, size_t bytes, unsigned flags),
      where && bytes && flags == 3 ? READY(see_host(where, bytes)) : INVALID_VALUE)
ENTRY(cuMemHostUnregister, hipHostUnregister, (void *where), READY(unsee_host(where)))
ENTRY(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer, (void **seen, void *memory, unsigned flags),
      flags ? INVALID_VALUE : seen_at(seen, memory))
ENTRY(cuMemFreeHost, hipHostFree, (void *where), release(where, PINNED_MEMORY))
ENTRY(cuIpcGetMemHandle, hipIpcGetMemHandle, (share * out, void *where), share_memory(out, where))
ENTRY(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle, (void **where, share from, unsigned flags),
      flags == (!HIP || hip_version() >= 6) ? READY(open_memory(where, &from)) : INVALID_VALUE)
ENTRY(cuIpcCloseMemHandle, hipIpcCloseMemHandle, (void *where), close_memory(where))
ENTRY(cuStreamCreateWithPriority, hipStreamCreateWithPriority, (void **s, unsigned flags, int priority),
      flags > 1 ? INVALID_VALUE : READY(make_stream((stream **)s)))
ENTRY(cuStreamDestroy_v2, hipStreamDestroy, (void *s), end_stream(s))
ENTRY(cuStreamWaitEvent, hipStreamWaitEvent, (void *s, void *e, unsigned flags),
      flags ? INVALID_VALUE : wait_event(s, e))
ENTRY(cuStreamSynchronize, hipStreamSynchronize, (void *s), synchronize(s))
ENTRY(cuStreamWriteValue32_v2, hipStreamWriteValue32, (void *s, void *word, uint32_t value, unsigned flags),
      flag_work(s, word, value, WRITE))
ENTRY(cuEventCreate, hipEventCreateWithFlags, (void **e, unsigned flags), new_event(e, flags))
ENTRY(cuEventDestroy_v2, hipEventDestroy, (void *e), OK) /* kept: work in its stream may still refer to it */
ENTRY(cuEventRecord, hipEventRecord, (void *e, void *s), record(e, s))
ENTRY(cuEventQuery, hipEventQuery, (void *e), query(e))
ENTRY(cuStreamBeginCapture_v2, hipStreamBeginCapture, (void *s, int mode), begin_capture(s))
ENTRY(cuStreamEndCapture, hipStreamEndCapture, (void *s, void **graph), end_capture(s, graph))
ENTRY(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode, (int *mode), exchange_mode(mode))
ENTRY(cuGraphLaunch, hipGraphLaunch, (void *exec, void *s), launch_graph(exec, s))
ENTRY(cuGraphExecDestroy, hipGraphExecDestroy, (void *exec), drop_graph(exec))
ENTRY(cuGraphDestroy, hipGraphDestroy, (void *graph), drop_graph(graph))
ENTRY(cuModuleLoadData, hipModuleLoadData, (void **module, const void *image), load_module(module, image))
ENTRY(cuModuleGetFunction, hipModuleGetFunction, (void **function, void *module, const char *name),
      find_kernel(function, module, name))
ENTRY(cuLaunchKernel, hipModuleLaunchKernel,
      (void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned bytes, void *s,
       void **arguments, void **more),
      is_line(x, y, z) && is_line(a, b, c) ? launch_kernel(f, x, a, arguments, s) : INVALID_VALUE)

ENTRY(nvrtcCreateProgram, hiprtcCreateProgram,
      (void **program, const char *source, const char *name, int n, const char **headers, const char **as),
      (*program = strdup(source), n))
ENTRY(nvrtcCompileProgram, hiprtcCompileProgram, (void *program, int n, const char **options),
      made_of(program) ? OK : INVALID_VALUE)
ENTRY(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, (void *program, size_t *bytes), (*bytes = 10, OK))
ENTRY(nvrtcGetProgramLog, hiprtcGetProgramLog, (void *program, char *text), (memcpy(text, "too hard!", 10), OK))
ENTRY(nvrtcGetCUBINSize, hiprtcGetCodeSize, (void *program, size_t *bytes),
      (*bytes = strlen(made_of(program)->name) + 1, OK))
ENTRY(nvrtcGetCUBIN, hiprtcGetCode, (void *program, char *code), (strcpy(code, made_of(program)->name), OK))
ENTRY(nvrtcDestroyProgram, hiprtcDestroyProgram, (void **program), (free(*program), OK))

#ifdef FAKE_CUDA

static char contexts[MOST_DEVICES];

int cuDriverGetVersion(int *version) { return *version = 12080, OK; }
int cuGetErrorName(int code, const char **name) { return *name = error_name(code), OK; }
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
int cuCtxGetCurrent(void **context) { return *context = current < 0 ? NULL : &contexts[current], OK; }
int cuCtxGetDevice(int *device) { return *device = current, current < 0 ? INVALID_CONTEXT : OK; }
int cuPointerGetAttributes(unsigned n, const int *which, void **into, const void *where) {
    int kind, device;
    look_up(where, &kind, &device);
    for (unsigned i = 0; i < n; i++)
        *(int *)into[i] = which[i] == 2   ? (kind == DEVICE_MEMORY ? 2 : kind == PINNED_MEMORY)
                          : which[i] == 9 ? device
                                          : 0;
    return OK;
}
int cuMemGetAddressRange_v2(void **base, size_t *bytes, const void *where) {
    const region *r = find(where);
    *base = r ? r->base : NULL;
    *bytes = r ? r->bytes : 0;
    return r && !r->freed ? OK : INVALID_VALUE;
}
int cuMemcpyAsync(void *dst, const void *src, size_t bytes, void *s) { return copy_or_fail(dst, src, bytes, s); }
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
int cuStreamWaitValue32_v2(void *s, void *word, uint32_t value, unsigned flags) {
    return flag_work(s, word, value, HOLD);
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
int cuStreamGetCaptureInfo_v2(void *s, int *does, uint64_t *which, void **graph, const void ***nodes, size_t *n) {
    return graph || nodes || n ? INVALID_VALUE : captures(s, does, which);
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { return instantiate(exec, graph); }
int cuModuleGetLoadingMode(int *mode) { return *mode = setting("FAKEGPU_LAZY", 0) ? 2 : 1, OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? 9 : 0;
    return device < device_count() ? OK : INVALID_DEVICE;
}
int cuFuncLoad(void *f) { return first_launch(&((function *)f)->loaded), OK; }

#else

int hipRuntimeGetVersion(int *version) { return *version = hip_version() * 10000000, OK; }
const char *hipGetErrorName(int code) { return error_name(code); }
int hipGetLastError(void) { return OK; }
int hipGetDevice(int *device) { return *device = current < 0 ? 0 : current, OK; }
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
int hipExtMallocWithFlags(void **where, size_t bytes, unsigned flags) {
    if (flags == 1) /* and silently has no effect without fine-grained memory */
        return allocate_as(where, bytes, DEVICE_MEMORY, fine_grained);
    return flags == 2 && bytes == 8 ? allocate(where, bytes, SIGNAL_MEMORY) : INVALID_VALUE;
}
int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *s) {
    return kind == 4 ? copy_or_fail(dst, src, bytes, s) : INVALID_VALUE;
}
int hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                     int kind, void *s) {
    if (kind != 4 || dst_pitch < bytes || src_pitch < bytes) return INVALID_VALUE;
    return copy_rows_async(dst, dst_pitch, src, src_pitch, bytes, rows, s);
}
int hipStreamWaitValue32(void *s, void *word, uint32_t value, unsigned flags, uint32_t mask) {
    return flags == 0 && mask == ~(uint32_t)0 ? flag_work(s, word, value, HOLD)
                                              : INVALID_VALUE; /* the rest is unused */
}
int hipStreamGetCaptureInfo(void *s, int *does, uint64_t *which) { return captures(s, does, which); }
int hipGraphInstantiate(void **exec, void *graph, void **node, char *log, size_t room) {
    return instantiate(exec, graph);
}
#endif
