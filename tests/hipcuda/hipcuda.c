/* HIP over CUDA: the entry points of the HIP runtime that ucc_hetero uses, forwarded to the CUDA driver, so that ranks
 * on NVIDIA GPUs take the `amd` path with real device memory, real streams and real bandwidth.
 *
 * cc -shared -fPIC hipcuda.c -o libamdhip64-over-cuda.so -ldl; then UCCH_HIP_LIB names it and UCCH_CUDA_LIB=none. As
 * with HIP, whose version HIPCUDA_VERSION says (6), unknown memory has a kind from 6 on, one flag is taken for memory
 * of other processes, streams wait for signal memory only, and freeing waits for all streams of the device. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t address;

static void *driver(void) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library;
}

/* The driver's function of this name, looked up once. */
#define CU(name, params)                                                                                               \
    static int name params;                                                                                            \
    typedef int name##_t params;                                                                                       \
    static name##_t *name##_at(void) {                                                                                 \
        static name##_t *found;                                                                                        \
        if (!found && driver()) found = (name##_t *)dlsym(driver(), #name);                                            \
        return found;                                                                                                  \
    }                                                                                                                  \
    static int name params

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };
#define CALL(name, ...) (name##_at() ? name##_at()(__VA_ARGS__) : (int)NO_DEVICE)

CU(cuInit, (unsigned flags)) { return CALL(cuInit, flags); }
CU(cuGetErrorName, (int code, const char **name)) { return CALL(cuGetErrorName, code, name); }
CU(cuDeviceGetCount, (int *n)) { return CALL(cuDeviceGetCount, n); }
CU(cuDeviceGetPCIBusId, (char *text, int room, int device)) { return CALL(cuDeviceGetPCIBusId, text, room, device); }
CU(cuDevicePrimaryCtxRetain, (void **context, int device)) { return CALL(cuDevicePrimaryCtxRetain, context, device); }
CU(cuCtxSetCurrent, (void *context)) { return CALL(cuCtxSetCurrent, context); }
CU(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active)) {
    return CALL(cuDevicePrimaryCtxGetState, device, flags, active);
}
CU(cuCtxGetDevice, (int *device)) { return CALL(cuCtxGetDevice, device); }

#define MOST_DEVICES 64
static void *contexts[MOST_DEVICES];
/* The calling thread's device while it has no context: as HIP has it, the first until another is chosen. */
static __thread int chosen;

static int work_with(int device) {
    int status = contexts[device] ? 0 : cuDevicePrimaryCtxRetain(&contexts[device], device);
    return status ? status : cuCtxSetCurrent(contexts[device]);
}

/* Make the chosen device's context current. Choosing or asking makes none: each takes half a gigabyte of its device. */
static int ready(void) {
    int device;
    return cuCtxGetDevice(&device) ? work_with(chosen) : 0;
}
#define THERE(name, ...) (ready() ? ready() : CALL(name, ##__VA_ARGS__))

CU(cuPointerGetAttributes, (unsigned n, const int *which, void **into, address where)) {
    return CALL(cuPointerGetAttributes, n, which, into, where);
}
CU(cuIpcGetMemHandle, (void *handle, address where)) { return THERE(cuIpcGetMemHandle, handle, where); }
/* As HIP's and CUDA's handles are, by value. */
typedef struct share {
    char bytes[64];
} share;
CU(cuIpcOpenMemHandle_v2, (address * where, share handle, unsigned flags)) {
    return THERE(cuIpcOpenMemHandle_v2, where, handle, flags);
}
CU(cuIpcCloseMemHandle, (address where)) { return THERE(cuIpcCloseMemHandle, where); }
CU(cuMemAlloc_v2, (address * where, size_t bytes)) { return THERE(cuMemAlloc_v2, where, bytes); }
CU(cuMemFree_v2, (address where)) { return THERE(cuMemFree_v2, where); }
CU(cuMemGetInfo_v2, (size_t *room, size_t *all)) { return THERE(cuMemGetInfo_v2, room, all); }
CU(cuMemHostAlloc, (void **where, size_t bytes, unsigned flags)) { return THERE(cuMemHostAlloc, where, bytes, flags); }
CU(cuMemFreeHost, (void *where)) { return THERE(cuMemFreeHost, where); }
CU(cuMemHostRegister_v2, (void *where, size_t bytes, unsigned flags)) {
    return THERE(cuMemHostRegister_v2, where, bytes, flags);
}
CU(cuMemHostUnregister, (void *where)) { return THERE(cuMemHostUnregister, where); }
CU(cuMemHostGetDevicePointer_v2, (address * seen, void *memory, unsigned flags)) {
    return THERE(cuMemHostGetDevicePointer_v2, seen, memory, flags);
}
CU(cuMemcpyAsync, (address dst, address src, size_t bytes, void *s)) {
    return THERE(cuMemcpyAsync, dst, src, bytes, s);
}
typedef struct side_2d {
    size_t x, y;
    int type;
    const void *host;
    address at;
    void *array;
    size_t pitch;
} side_2d;
typedef struct copy_2d {
    side_2d src, dst;
    size_t bytes, rows;
} copy_2d;
CU(cuMemcpy2DAsync_v2, (const copy_2d *all, void *s)) { return THERE(cuMemcpy2DAsync_v2, all, s); }
CU(cuStreamCreateWithPriority, (void **s, unsigned flags, int priority)) {
    return THERE(cuStreamCreateWithPriority, s, flags, priority);
}
CU(cuStreamDestroy_v2, (void *s)) { return THERE(cuStreamDestroy_v2, s); }
CU(cuStreamWaitEvent, (void *s, void *e, unsigned flags)) { return THERE(cuStreamWaitEvent, s, e, flags); }
CU(cuStreamSynchronize, (void *s)) { return THERE(cuStreamSynchronize, s); }
CU(cuStreamWaitValue32_v2, (void *s, address word, uint32_t value, unsigned flags)) {
    return THERE(cuStreamWaitValue32_v2, s, word, value, flags);
}
CU(cuStreamWriteValue32_v2, (void *s, address word, uint32_t value, unsigned flags)) {
    return THERE(cuStreamWriteValue32_v2, s, word, value, flags);
}
CU(cuStreamGetCaptureInfo_v2, (void *s, int *does, uint64_t *which, void **graph, const void ***nodes, size_t *n)) {
    return THERE(cuStreamGetCaptureInfo_v2, s, does, which, graph, nodes, n);
}
CU(cuThreadExchangeStreamCaptureMode, (int *mode)) { return CALL(cuThreadExchangeStreamCaptureMode, mode); }
CU(cuEventCreate, (void **e, unsigned flags)) { return THERE(cuEventCreate, e, flags); }
CU(cuEventDestroy_v2, (void *e)) { return THERE(cuEventDestroy_v2, e); }
CU(cuEventRecord, (void *e, void *s)) { return THERE(cuEventRecord, e, s); }
CU(cuEventQuery, (void *e)) { return THERE(cuEventQuery, e); }

CU(cuCtxSynchronize, (void)) { return THERE(cuCtxSynchronize); }
CU(cuDeviceGetAttribute, (int *value, int which, int device)) {
    return CALL(cuDeviceGetAttribute, value, which, device);
}
CU(cuModuleLoadData, (void **module, const void *image)) { return THERE(cuModuleLoadData, module, image); }
CU(cuModuleGetFunction, (void **function, void *module, const char *name)) {
    return THERE(cuModuleGetFunction, function, module, name);
}
CU(cuFuncLoad, (void *function)) { return THERE(cuFuncLoad, function); }
CU(cuLaunchKernel, (void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned bytes,
                    void *s, void **arguments, void **more)) {
    return THERE(cuLaunchKernel, f, x, y, z, a, b, c, bytes, s, arguments, more);
}

/* The memory is CUDA's whatever the entry points are called: UCC and UCX are told so. */
int ucch_memory_type(void) { return 1; }

int hipInit(unsigned flags) { return cuInit(flags); }
static int major(void) {
    const char *text = getenv("HIPCUDA_VERSION");
    return text && *text ? atoi(text) : 6;
}
int hipRuntimeGetVersion(int *version) {
    *version = major() * 10000000;
    return 0;
}
const char *hipGetErrorName(int code) {
    const char *name = NULL;
    return cuGetErrorName(code, &name) ? "hipErrorUnknown" : name;
}
/* Multiprocessors, and the threads that one holds. */
int hipDeviceGetAttribute(int *value, int which, int device) {
    return which == 63   ? cuDeviceGetAttribute(value, 16, device)
           : which == 57 ? cuDeviceGetAttribute(value, 39, device)
                         : INVALID_VALUE;
}
int hipGetLastError(void) { return 0; }
int hipGetDeviceCount(int *n) { return cuDeviceGetCount(n); }
int hipDeviceGetPCIBusId(char *text, int room, int device) { return cuDeviceGetPCIBusId(text, room, device); }
int hipSetDevice(int device) {
    unsigned flags;
    int n = 0, active, status = cuDeviceGetCount(&n);
    if (status || device < 0 || device >= n || device >= MOST_DEVICES) return status ? status : INVALID_DEVICE;
    chosen = device;
    active = contexts[device] != NULL;
    if (!active) /* whoever works in this process, too, may have made it */
        cuDevicePrimaryCtxGetState(device, &flags, &active);
    return active ? work_with(device) : cuCtxSetCurrent(NULL);
}
int hipGetDevice(int *device) {
    if (cuCtxGetDevice(device)) *device = chosen;
    return 0;
}
int hipPointerGetAttributes(void *into, const void *where) {
    struct {
        int type, device;
        void *device_pointer, *host_pointer;
        int managed;
        unsigned flags;
    } *out = into;
    static const int which[] = {2, 8, 9};
    unsigned type = 0, managed = 0;
    int device = 0;
    void *values[] = {&type, &managed, &device};
    static const int before_6[] = {-1, 0, 1, 4}, since_6[] = {0, 1, 2, 3};
    int status = cuPointerGetAttributes(3, which, values, (address)(uintptr_t)where);
    if (status || (!type && major() < 6)) return status ? status : INVALID_VALUE;
    memset(out, 0, sizeof(*out));
    out->type = (major() < 6 ? before_6 : since_6)[managed ? 3 : type > 2 ? 2 : type];
    out->device = type ? device : -2;
    out->managed = (int)managed;
    return 0;
}
int hipIpcGetMemHandle(void *handle, void *where) { return cuIpcGetMemHandle(handle, (address)(uintptr_t)where); }
int hipIpcOpenMemHandle(void **where, share handle, unsigned flags) {
    return flags == (major() >= 6) ? cuIpcOpenMemHandle_v2((address *)where, handle, 1) : INVALID_VALUE;
}
int hipIpcCloseMemHandle(void *where) { return cuIpcCloseMemHandle((address)(uintptr_t)where); }
int hipMalloc(void **where, size_t bytes) { return cuMemAlloc_v2((address *)where, bytes); }
int hipMemGetInfo(size_t *room, size_t *all) { return cuMemGetInfo_v2(room, all); }

/* Signal memory is pinned memory of the host here. */
#define MOST_SIGNALS 65536
static void *signals[MOST_SIGNALS];

/* Put one pointer in the place of another: whether that was there. */
static int exchange(void *old, void *new) {
    for (int i = 0; i < MOST_SIGNALS; i++) {
        void *expected = old;
        if (__atomic_compare_exchange_n(&signals[i], &expected, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 1;
    }
    return 0;
}

int hipFree(void *where) {
    static const int which[] = {2};
    unsigned type = 0;
    void *values[] = {&type};
    int status = cuPointerGetAttributes(1, which, values, (address)(uintptr_t)where);
    cuCtxSynchronize();
    exchange(where, NULL);
    return status ? status : type == 1 ? cuMemFreeHost(where) : cuMemFree_v2((address)(uintptr_t)where);
}
int hipExtMallocWithFlags(void **where, size_t bytes, unsigned flags) {
    if (flags == 1) return hipMalloc(where, bytes);
    int status = flags == 2 && bytes == 8 ? cuMemHostAlloc(where, bytes, 3) : INVALID_VALUE;
    return status ? status : exchange(NULL, *where) ? 0 : OUT_OF_MEMORY;
}
int hipHostMalloc(void **where, size_t bytes, unsigned flags) { return cuMemHostAlloc(where, bytes, flags); }
int hipHostFree(void *where) {
    cuCtxSynchronize();
    return cuMemFreeHost(where);
}
int hipHostRegister(void *where, size_t bytes, unsigned flags) { return cuMemHostRegister_v2(where, bytes, flags); }
int hipHostUnregister(void *where) { return cuMemHostUnregister(where); }
int hipHostGetDevicePointer(void **seen, void *memory, unsigned flags) {
    address a = 0;
    int status = cuMemHostGetDevicePointer_v2(&a, memory, flags);
    *seen = (void *)(uintptr_t)a;
    return status;
}
int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *s) {
    return kind == 4 ? cuMemcpyAsync((address)(uintptr_t)dst, (address)(uintptr_t)src, bytes, s) : INVALID_VALUE;
}
int hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                     int kind, void *s) {
    copy_2d all = {.src = {.type = 4, .at = (address)(uintptr_t)src, .pitch = src_pitch},
                   .dst = {.type = 4, .at = (address)(uintptr_t)dst, .pitch = dst_pitch},
                   .bytes = bytes,
                   .rows = rows};
    return kind == 4 ? cuMemcpy2DAsync_v2(&all, s) : INVALID_VALUE;
}
int hipStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    return cuStreamCreateWithPriority(s, flags, priority);
}
int hipStreamDestroy(void *s) { return cuStreamDestroy_v2(s); }
int hipStreamWaitEvent(void *s, void *e, unsigned flags) { return cuStreamWaitEvent(s, e, flags); }
int hipStreamSynchronize(void *s) { return cuStreamSynchronize(s); }
int hipStreamWaitValue32(void *s, void *word, uint32_t value, unsigned flags, uint32_t mask) {
    if (mask != ~(uint32_t)0 || !word || !exchange(word, word)) return INVALID_VALUE;
    return cuStreamWaitValue32_v2(s, (address)(uintptr_t)word, value, flags);
}
int hipStreamWriteValue32(void *s, void *word, uint32_t value, unsigned flags) {
    return cuStreamWriteValue32_v2(s, (address)(uintptr_t)word, value, flags);
}
int hipStreamGetCaptureInfo(void *s, int *does, uint64_t *which) {
    return cuStreamGetCaptureInfo_v2(s, does, which, NULL, NULL, NULL);
}
int hipThreadExchangeStreamCaptureMode(int *mode) { return cuThreadExchangeStreamCaptureMode(mode); }
int hipEventCreateWithFlags(void **e, unsigned flags) { return cuEventCreate(e, flags); }
int hipEventDestroy(void *e) { return cuEventDestroy_v2(e); }
int hipEventRecord(void *e, void *s) { return cuEventRecord(e, s); }
int hipEventQuery(void *e) { return cuEventQuery(e); }
int hipModuleLoadData(void **module, const void *image) { return cuModuleLoadData(module, image); }
/* HIP loads all of a module at once; drivers before 12.4 cannot be told to. */
int hipModuleGetFunction(void **function, void *module, const char *name) {
    int status = cuModuleGetFunction(function, module, name);
    if (!status) cuFuncLoad(*function);
    return status;
}
int hipModuleLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                          unsigned bytes, void *s, void **arguments, void **more) {
    return cuLaunchKernel(f, x, y, z, a, b, c, bytes, s, arguments, more);
}

/* hipRTC over NVRTC, whose file HIPCUDA_NVRTC names, unless the process has it already. It compiles for the device in
 * use by itself. */
static void *nvrtc(const char *name) {
    static void *library;
    const char *path = getenv("HIPCUDA_NVRTC");
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    if (!library && path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < 3 && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

#define RTC(name, nvidias, params, ...)                                                                                \
    int name params {                                                                                                  \
        int(*f) params = (int(*) params)nvrtc(#nvidias);                                                               \
        return f ? f(__VA_ARGS__) : 1;                                                                                 \
    }

RTC(hiprtcCreateProgram, nvrtcCreateProgram,
    (void **program, const char *source, const char *name, int n, const char **headers, const char **as), program,
    source, name, n, headers, as)
RTC(hiprtcGetCodeSize, nvrtcGetCUBINSize, (void *program, size_t *bytes), program, bytes)
RTC(hiprtcGetCode, nvrtcGetCUBIN, (void *program, char *code), program, code)
RTC(hiprtcGetProgramLogSize, nvrtcGetProgramLogSize, (void *program, size_t *bytes), program, bytes)
RTC(hiprtcGetProgramLog, nvrtcGetProgramLog, (void *program, char *text), program, text)
RTC(hiprtcDestroyProgram, nvrtcDestroyProgram, (void **program), program)

int hiprtcCompileProgram(void *program, int n, const char **options) {
    int (*f)(void *, int, const char **) = (int (*)(void *, int, const char **))nvrtc("nvrtcCompileProgram");
    const char *all[17];
    char arch[32];
    int device = 0, major = 0, minor = 0;
    if (!f || n > 16 || hipGetDevice(&device) || cuDeviceGetAttribute(&major, 75, device) ||
        cuDeviceGetAttribute(&minor, 76, device))
        return 1;
    snprintf(arch, sizeof(arch), "-arch=sm_%d%d", major, minor);
    for (int i = 0; i < n; i++)
        all[i] = strcmp(options[i], "-ffp-contract=off") ? options[i] : "-fmad=false";
    all[n] = arch;
    return f(program, n + 1, all);
}
