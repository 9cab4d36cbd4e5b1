/* HIP over CUDA: the entry points of the HIP runtime that ucc_hetero uses, forwarded to the CUDA driver, so that ranks
 * on NVIDIA GPUs run the `amd` code with real device memory, streams and bandwidth.
 *
 * cc -shared -fPIC hipcuda.c -o libamdhip64-over-cuda.so -ldl; then set UCCH_HIP_LIB to it and UCCH_CUDA_LIB=none. As
 * in HIP (version HIPCUDA_VERSION, 6), unknown memory has a kind from 6 on, one flag is accepted for memory of other
 * processes, streams wait for signal memory only, and freeing waits for all streams of the device. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *driver(void) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library;
}

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };
/* Forward to a driver function of another name, which is looked up once, unless `before` gives an error. */
#define FORWARD(linkage, name, of, params, args, before)                                                               \
    linkage int name params {                                                                                          \
        typedef int theirs params;                                                                                     \
        static theirs *found;                                                                                          \
        int status = before;                                                                                           \
        if (!found && driver()) found = (theirs *)dlsym(driver(), #of);                                                \
        return status ? status : found ? found args : (int)NO_DEVICE;                                                  \
    }
#define CU(name, params, args) FORWARD(static, name, name, params, args, 0)
#define HIP(name, of, params, args) FORWARD(, name, of, params, args, 0)

CU(cuGetErrorName, (int code, const char **name), (code, name))
CU(cuDevicePrimaryCtxRetain, (void **context, int device), (context, device))
CU(cuCtxSetCurrent, (void *context), (context))
CU(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), (device, flags, active))
CU(cuCtxGetDevice, (int *device), (device))
HIP(hipInit, cuInit, (unsigned flags), (flags))
HIP(hipGetDeviceCount, cuDeviceGetCount, (int *n), (n))
HIP(hipDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char *text, int room, int device), (text, room, device))
HIP(hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode), (mode))

#define MOST_DEVICES 64
static void *contexts[MOST_DEVICES];
/* The calling thread's device while it has no context: as in HIP the first one until another is selected. */
static __thread int chosen;

static int work_with(int device) {
    int status = contexts[device] ? 0 : cuDevicePrimaryCtxRetain(&contexts[device], device);
    return status ? status : cuCtxSetCurrent(contexts[device]);
}

/* Make the selected device's context current. Selecting or querying creates none, as a context takes half a gigabyte of
 * device memory. */
static int ready(void) {
    int device;
    return cuCtxGetDevice(&device) ? work_with(chosen) : 0;
}
#define CU_READY(name, params, args) FORWARD(static, name, name, params, args, ready())
#define HIP_READY(name, of, params, args) FORWARD(, name, of, params, args, ready())

/* Passed by value, like HIP's and CUDA's handles. */
typedef struct share {
    char bytes[64];
} share;
typedef struct side_2d {
    size_t x, y;
    int type;
    const void *host, *at;
    void *array;
    size_t pitch;
} side_2d;
typedef struct copy_2d {
    side_2d src, dst;
    size_t bytes, rows;
} copy_2d;
CU(cuPointerGetAttributes, (unsigned n, const int *which, void **into, const void *where), (n, which, into, where))
CU(cuDeviceGetAttribute, (int *value, int which, int device), (value, which, device))
CU_READY(cuIpcOpenMemHandle_v2, (void **where, share handle, unsigned flags), (where, handle, flags))
CU_READY(cuMemFree_v2, (void *where), (where))
CU_READY(cuMemFreeHost, (void *where), (where))
CU_READY(cuMemcpyAsync, (void *dst, const void *src, size_t bytes, void *s), (dst, src, bytes, s))
CU_READY(cuMemcpy2DAsync_v2, (const copy_2d *all, void *s), (all, s))
CU_READY(cuStreamWaitValue32_v2, (void *s, void *word, uint32_t value, unsigned flags), (s, word, value, flags))
CU_READY(cuStreamGetCaptureInfo_v2, (void *s, int *does, uint64_t *which, void **graph, const void ***nodes, size_t *n),
         (s, does, which, graph, nodes, n))
CU_READY(cuCtxSynchronize, (void), ())
CU_READY(cuModuleGetFunction, (void **function, void *module, const char *name), (function, module, name))
CU_READY(cuFuncLoad, (void *function), (function))
HIP_READY(hipIpcGetMemHandle, cuIpcGetMemHandle, (void *handle, void *where), (handle, where))
HIP_READY(hipIpcCloseMemHandle, cuIpcCloseMemHandle, (void *where), (where))
HIP_READY(hipMalloc, cuMemAlloc_v2, (void **where, size_t bytes), (where, bytes))
HIP_READY(hipMemGetInfo, cuMemGetInfo_v2, (size_t *room, size_t *all), (room, all))
HIP_READY(hipHostMalloc, cuMemHostAlloc, (void **where, size_t bytes, unsigned flags), (where, bytes, flags))
HIP_READY(hipHostRegister, cuMemHostRegister_v2, (void *where, size_t bytes, unsigned flags), (where, bytes, flags))
HIP_READY(hipHostUnregister, cuMemHostUnregister, (void *where), (where))
HIP_READY(hipHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (void **seen, void *memory, unsigned flags),
          (seen, memory, flags))
HIP_READY(hipStreamCreateWithPriority, cuStreamCreateWithPriority, (void **s, unsigned flags, int priority),
          (s, flags, priority))
HIP_READY(hipStreamDestroy, cuStreamDestroy_v2, (void *s), (s))
HIP_READY(hipStreamWaitEvent, cuStreamWaitEvent, (void *s, void *e, unsigned flags), (s, e, flags))
HIP_READY(hipStreamSynchronize, cuStreamSynchronize, (void *s), (s))
HIP_READY(hipStreamWriteValue32, cuStreamWriteValue32_v2, (void *s, void *word, uint32_t value, unsigned flags),
          (s, word, value, flags))
HIP_READY(hipEventCreateWithFlags, cuEventCreate, (void **e, unsigned flags), (e, flags))
HIP_READY(hipEventDestroy, cuEventDestroy_v2, (void *e), (e))
HIP_READY(hipEventRecord, cuEventRecord, (void *e, void *s), (e, s))
HIP_READY(hipEventQuery, cuEventQuery, (void *e), (e))
HIP_READY(hipModuleLoadData, cuModuleLoadData, (void **module, const void *image), (module, image))
HIP_READY(hipModuleLaunchKernel, cuLaunchKernel,
          (void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned bytes, void *s,
           void **arguments, void **more),
          (f, x, y, z, a, b, c, bytes, s, arguments, more))

/* The memory is CUDA's: UCC and UCX must treat it so. */
int ucch_memory_type(void) { return 1; }

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
/* Multiprocessors, and threads per multiprocessor. */
int hipDeviceGetAttribute(int *value, int which, int device) {
    return which == 63   ? cuDeviceGetAttribute(value, 16, device)
           : which == 57 ? cuDeviceGetAttribute(value, 39, device)
                         : INVALID_VALUE;
}
int hipGetLastError(void) { return 0; }
int hipSetDevice(int device) {
    unsigned flags;
    int n = 0, active, status = hipGetDeviceCount(&n);
    if (status || device < 0 || device >= n || device >= MOST_DEVICES) return status ? status : INVALID_DEVICE;
    chosen = device;
    active = contexts[device] != NULL;
    if (!active) /* other code in this process may have created it */
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
    int status = cuPointerGetAttributes(3, which, values, where);
    if (status || (!type && major() < 6)) return status ? status : INVALID_VALUE;
    memset(out, 0, sizeof(*out));
    out->type = (major() < 6 ? before_6 : since_6)[managed ? 3 : type > 2 ? 2 : type];
    out->device = type ? device : -2;
    out->managed = (int)managed;
    return 0;
}
int hipIpcOpenMemHandle(void **where, share handle, unsigned flags) {
    return flags == (major() >= 6) ? cuIpcOpenMemHandle_v2(where, handle, 1) : INVALID_VALUE;
}

/* Signal memory is pinned memory of the host here. */
#define MOST_SIGNALS 65536
static void *signals[MOST_SIGNALS];

/* Replace one pointer by another; return whether it was there. */
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
    int status = cuPointerGetAttributes(1, which, values, where);
    cuCtxSynchronize();
    exchange(where, NULL);
    return status ? status : type == 1 ? cuMemFreeHost(where) : cuMemFree_v2(where);
}
int hipExtMallocWithFlags(void **where, size_t bytes, unsigned flags) {
    if (flags == 1) return hipMalloc(where, bytes);
    int status = flags == 2 && bytes == 8 ? hipHostMalloc(where, bytes, 3) : INVALID_VALUE;
    return status ? status : exchange(NULL, *where) ? 0 : OUT_OF_MEMORY;
}
int hipHostFree(void *where) {
    cuCtxSynchronize();
    return cuMemFreeHost(where);
}
int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *s) {
    return kind == 4 ? cuMemcpyAsync(dst, src, bytes, s) : INVALID_VALUE;
}
int hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                     int kind, void *s) {
    copy_2d all = {.src = {.type = 4, .at = src, .pitch = src_pitch},
                   .dst = {.type = 4, .at = dst, .pitch = dst_pitch},
                   .bytes = bytes,
                   .rows = rows};
    return kind == 4 ? cuMemcpy2DAsync_v2(&all, s) : INVALID_VALUE;
}
int hipStreamWaitValue32(void *s, void *word, uint32_t value, unsigned flags, uint32_t mask) {
    if (mask != ~(uint32_t)0 || !word || !exchange(word, word)) return INVALID_VALUE;
    return cuStreamWaitValue32_v2(s, word, value, flags);
}
int hipStreamGetCaptureInfo(void *s, int *does, uint64_t *which) {
    return cuStreamGetCaptureInfo_v2(s, does, which, NULL, NULL, NULL);
}
/* HIP loads a whole module at once; drivers before 12.4 have no option for this. */
int hipModuleGetFunction(void **function, void *module, const char *name) {
    int status = cuModuleGetFunction(function, module, name);
    if (!status) cuFuncLoad(*function);
    return status;
}

/* hipRTC over NVRTC, whose file HIPCUDA_NVRTC names, unless the process has it already. It compiles for the current
 * device by default. */
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
