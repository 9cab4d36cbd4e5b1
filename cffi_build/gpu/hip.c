/* The HIP runtime, 5, 6 and 7, by the entry points that all of them have under the same names. */
#include <stdlib.h>
#include <string.h>

#include "gpu/adapter.h"

#define HIP_SYMBOLS(X)                                                                                                 \
    X(hipInit, (unsigned), 1)                                                                                          \
    X(hipRuntimeGetVersion, (int *), 1)                                                                                \
    X(hipGetErrorName, (int), 1)                                                                                       \
    X(hipGetDeviceCount, (int *), 1)                                                                                   \
    X(hipDeviceGetPCIBusId, (char *, int, int), 1)                                                                     \
    X(hipGetDevice, (int *), 1)                                                                                        \
    X(hipSetDevice, (int), 1)                                                                                          \
    X(hipGetLastError, (void), 1)                                                                                      \
    X(hipPointerGetAttributes, (void *, const void *), 1)                                                              \
    X(hipMalloc, (void **, size_t), 1)                                                                                 \
    X(hipFree, (void *), 1)                                                                                            \
    X(hipMemGetInfo, (size_t *, size_t *), 1)                                                                          \
    X(hipHostMalloc, (void **, size_t, unsigned), 1)                                                                   \
    X(hipHostFree, (void *), 1)                                                                                        \
    X(hipHostRegister, (void *, size_t, unsigned), 1)                                                                  \
    X(hipHostUnregister, (void *), 1)                                                                                  \
    X(hipHostGetDevicePointer, (void **, void *, unsigned), 1)                                                         \
    X(hipExtMallocWithFlags, (void **, size_t, unsigned), 0)                                                           \
    X(hipMemcpyAsync, (void *, const void *, size_t, int, void *), 1)                                                  \
    X(hipMemcpy2DAsync, (void *, size_t, const void *, size_t, size_t, size_t, int, void *), 1)                        \
    X(hipStreamCreateWithPriority, (void **, unsigned, int), 1)                                                        \
    X(hipStreamDestroy, (void *), 1)                                                                                   \
    X(hipStreamWaitEvent, (void *, void *, unsigned), 1)                                                               \
    X(hipStreamSynchronize, (void *), 1)                                                                               \
    X(hipStreamWaitValue32, (void *, void *, uint32_t, unsigned, uint32_t), 0)                                         \
    X(hipStreamWriteValue32, (void *, void *, uint32_t, unsigned), 0)                                                  \
    X(hipStreamGetCaptureInfo, (void *, int *, uint64_t *), 0)                                                         \
    X(hipThreadExchangeStreamCaptureMode, (int *), 0)                                                                  \
    X(hipEventCreateWithFlags, (void **, unsigned), 1)                                                                 \
    X(hipEventDestroy, (void *), 1)                                                                                    \
    X(hipEventRecord, (void *, void *), 1)                                                                             \
    X(hipEventQuery, (void *), 1)                                                                                      \
    X(hipModuleLoadData, (void **, const void *), 0)                                                                   \
    X(hipModuleGetFunction, (void **, void *, const char *), 0)                                                        \
    X(hipModuleLaunchKernel,                                                                                           \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), 0)

static struct {
#define MEMBER(name, params, need) int(*name) params;
    HIP_SYMBOLS(MEMBER)
} hip;

static const device_symbol symbols[] = {
#define ROW(name, params, need) {#name, (void **)&hip.name, need},
    HIP_SYMBOLS(ROW){NULL, NULL, 0}};

enum { NOT_SUPPORTED = 801, NOT_READY = 600, INVALID_VALUE = 1, INVALID_DEVICE = 101 };
enum { COPY_DEFAULT = 4, HOST_PORTABLE_MAPPED = 3, STREAM_NON_BLOCKING = 1, EVENT_NO_TIMING = 2 };
enum { MALLOC_SIGNAL_MEMORY = 2, WAIT_AT_LEAST = 0 };
enum { VERSION_6 = 60000000 };

/* hipPointerAttribute_t has kept its layout; what `type` means changed with HIP 6. */
typedef struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
    char room[64];
} attributes;

/* Settings that HIP read when it started, as it cannot be asked for them. */
static int eager, command_waits;
static int numeric; /* HIP_VERSION: major * 10^7 + minor * 10^5 + patch */

/* As HIP and its driver read numbers: of what is none, 0. */
static int told(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) != 0 : otherwise;
}

/* Operations that are one function of HIP, and those that not every release has. */
/* clang-format off */
#define PLAIN(name, params, call) static int hip_##name params { return hip.call; }
#define OPTIONAL(name, params, symbol, args) static int hip_##name params { return hip.symbol ? hip.symbol args : NOT_SUPPORTED; }

PLAIN(count, (int *devices), hipGetDeviceCount(devices))
PLAIN(bus, (int device, char *text, int room), hipDeviceGetPCIBusId(text, room, device))
PLAIN(current, (int *device), hipGetDevice(device))
PLAIN(alloc, (void **where, size_t bytes), hipMalloc(where, bytes))
PLAIN(release, (void *where), hipFree(where))
PLAIN(pinned, (void **where, size_t bytes), hipHostMalloc(where, bytes, HOST_PORTABLE_MAPPED))
PLAIN(unpin, (void *where), hipHostFree(where))
PLAIN(host_register, (void *where, size_t bytes), hipHostRegister(where, bytes, HOST_PORTABLE_MAPPED))
PLAIN(host_unregister, (void *where), hipHostUnregister(where))
PLAIN(mapped, (void *memory, void **seen), hipHostGetDevicePointer(seen, memory, 0))
PLAIN(copy, (void *dst, const void *src, size_t bytes, void *stream), hipMemcpyAsync(dst, src, bytes, COPY_DEFAULT, stream))
PLAIN(copy_rows, (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows, void *stream), hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, bytes, rows, COPY_DEFAULT, stream))
PLAIN(room, (size_t *bytes), hipMemGetInfo(bytes, &(size_t){0}))
PLAIN(stream_new, (void **stream), hipStreamCreateWithPriority(stream, STREAM_NON_BLOCKING, UCCH_STREAM_PRIORITY))
PLAIN(stream_free, (void *stream), hipStreamDestroy(stream))
PLAIN(stream_wait, (void *stream, void *event), hipStreamWaitEvent(stream, event, 0))
PLAIN(stream_sync, (void *stream), hipStreamSynchronize(stream))
PLAIN(event_new, (void **event), hipEventCreateWithFlags(event, EVENT_NO_TIMING))
PLAIN(event_free, (void *event), hipEventDestroy(event))
PLAIN(event_record, (void *event, void *stream), hipEventRecord(event, stream))
PLAIN(launch, (void *function, unsigned blocks, unsigned threads, void **arguments, void *stream), hipModuleLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, NULL))
OPTIONAL(stream_captures, (void *stream, int *does, uint64_t *which), hipStreamGetCaptureInfo, (stream, does, which))
OPTIONAL(capture_mode, (int *mode), hipThreadExchangeStreamCaptureMode, (mode))
OPTIONAL(stream_hold, (void *stream, void *word, uint32_t least), hipStreamWaitValue32, (stream, word, least, WAIT_AT_LEAST, ~(uint32_t)0))
OPTIONAL(stream_write, (void *stream, void *word, uint32_t value), hipStreamWriteValue32, (stream, word, value, 0))
/* clang-format on */

/* What hipMalloc makes is coarse-grained: other processes' devices may read it from their caches, and HIP 7 takes the
 * device of the owner's number here for the owner's. */
static int hip_lend(const void *where, void *name, uint64_t *offset) { return NOT_SUPPORTED; }
static int hip_borrow(const void *name, void **where) { return NOT_SUPPORTED; }
static int hip_give_back(void *where) { return NOT_SUPPORTED; }

/* hipStreamBatchMemOp, since 6.4, takes the words that streams wait for anyhow, and kernels do the others. */
static int hip_stream_turn(void *stream, void *told, uint32_t value, void *word, uint32_t least) {
    return NOT_SUPPORTED;
}

static int start(void) {
    eager = !told("HIP_ENABLE_DEFERRED_LOADING", 1);
    command_waits = told("GPU_STREAMOPS_CP_WAIT", 0);
    int status = hip.hipInit(0);
    return status ? status : hip.hipRuntimeGetVersion(&numeric);
}

static int hip_version(int *version) {
    *version = numeric / 10000000 * 1000 + numeric / 100000 % 100 * 10;
    return 0;
}

static int hip_use(int device) { return device < 0 ? INVALID_DEVICE : hip.hipSetDevice(device); }

static int kind_of(const attributes *a) {
    static const int before_6[] = {UCCH_MEMORY_PINNED, UCCH_MEMORY_DEVICE, UCCH_MEMORY_DEVICE, UCCH_MEMORY_DEVICE,
                                   UCCH_MEMORY_MANAGED};
    static const int since_6[] = {UCCH_MEMORY_UNKNOWN, UCCH_MEMORY_PINNED, UCCH_MEMORY_DEVICE, UCCH_MEMORY_MANAGED};
    if (a->managed) return UCCH_MEMORY_MANAGED;
    if (numeric < VERSION_6) return a->type >= 0 && a->type < 5 ? before_6[a->type] : UCCH_MEMORY_UNKNOWN;
    return a->type >= 0 && a->type < 4 ? since_6[a->type] : UCCH_MEMORY_UNKNOWN;
}

static int hip_pointer(const void *where, int *kind, int *device) {
    attributes a;
    memset(&a, 0, sizeof(a));
    int status = hip.hipPointerGetAttributes(&a, where);
    *device = 0;
    *kind = UCCH_MEMORY_UNKNOWN;
    if (status == INVALID_VALUE) { /* not HIP's memory: ordinary host memory, or freed; so until HIP 5 */
        hip.hipGetLastError();
        return 0;
    }
    if (!status) *kind = kind_of(&a);
    if (*kind != UCCH_MEMORY_UNKNOWN && a.device > 0) /* of unknown memory hipInvalidDeviceId, which is -2, since 6 */
        *device = a.device;
    return status;
}

/* Streams can only wait on signal memory. */
static int hip_flag(void **word) {
    if (!hip.hipExtMallocWithFlags) return NOT_SUPPORTED;
    int status = hip.hipExtMallocWithFlags(word, sizeof(uint64_t), MALLOC_SIGNAL_MEMORY);
    if (!status) memset(*word, 0, sizeof(uint64_t));
    return status;
}

static int hip_event_done(void *event, int *done) {
    int status = hip.hipEventQuery(event);
    *done = status == 0;
    return status == NOT_READY ? 0 : status;
}

/* A wait is a kernel of one work item, which looks at the word all the time, unless the command processor does so. */
static int hip_traits(int *bits) {
    *bits = (eager ? UCCH_EAGER : 0) | (command_waits ? UCCH_PARKS : 0);
    return 0;
}

/* HIP does not say; the kernel's files do. */
static int hip_target(int device, char *text, int room) {
    *text = 0;
    return 0;
}

/* Modules stay loaded: unloading one waits for the device. */
static int hip_kernel(const void *image, void **function) {
    void *module = NULL;
    if (!hip.hipModuleLoadData || !hip.hipModuleGetFunction || !hip.hipModuleLaunchKernel) return NOT_SUPPORTED;
    int status = hip.hipModuleLoadData(&module, image);
    return status ? status : hip.hipModuleGetFunction(function, module, "ucch");
}

static int hip_error_name(int code, const char **name) {
    /* Every HIP has it; hipDrvGetErrorName came with 5.3. */
    const char *(*name_of)(int) = (const char *(*)(int))(void (*)(void))hip.hipGetErrorName;
    *name = name_of(code);
    return 0;
}

const device_adapter ucch_hip = {
    .bytes = sizeof(device_adapter),
    .name = "hip",
    .memory_type = 3,
    .engine_type = 2,
    .symbols = symbols,
    .start = start,
#define DEVICE(name, params) .ops.name = hip_##name,
#include "gpu/ops.h"
};
