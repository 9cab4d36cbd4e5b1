/* Adapter for the HIP runtime, by entry points that HIP 5, 6 and 7 export under the same names. */
#include <stdlib.h>
#include <string.h>

#include "gpu/adapter.h"

#define SYMBOLS(X)                                                                                                     \
    X(hipInit, "hipInit", (unsigned), 1)                                                                               \
    X(hipRuntimeGetVersion, "hipRuntimeGetVersion", (int *), 1)                                                        \
    X(hipGetErrorName, "hipGetErrorName", (int), 1)                                                                    \
    X(device_count, "hipGetDeviceCount", (int *), 1)                                                                   \
    X(bus_id, "hipDeviceGetPCIBusId", (char *, int, int), 1)                                                           \
    X(hipGetDevice, "hipGetDevice", (int *), 1)                                                                        \
    X(hipSetDevice, "hipSetDevice", (int), 1)                                                                          \
    X(hipGetLastError, "hipGetLastError", (void), 1)                                                                   \
    X(hipPointerGetAttributes, "hipPointerGetAttributes", (void *, const void *), 1)                                   \
    X(mem_alloc, "hipMalloc", (void **, size_t), 1)                                                                    \
    X(mem_free, "hipFree", (void *), 1)                                                                                \
    X(mem_info, "hipMemGetInfo", (size_t *, size_t *), 1)                                                              \
    X(host_alloc, "hipHostMalloc", (void **, size_t, unsigned), 1)                                                     \
    X(host_free, "hipHostFree", (void *), 1)                                                                           \
    X(host_register, "hipHostRegister", (void *, size_t, unsigned), 1)                                                 \
    X(host_unregister, "hipHostUnregister", (void *), 1)                                                               \
    X(device_pointer, "hipHostGetDevicePointer", (void **, void *, unsigned), 1)                                       \
    X(hipExtMallocWithFlags, "hipExtMallocWithFlags", (void **, size_t, unsigned), 1)                                  \
    X(hipMemcpyAsync, "hipMemcpyAsync", (void *, const void *, size_t, int, void *), 1)                                \
    X(hipMemcpy2DAsync, "hipMemcpy2DAsync", (void *, size_t, const void *, size_t, size_t, size_t, int, void *), 1)    \
    X(stream_create, "hipStreamCreateWithPriority", (void **, unsigned, int), 1)                                       \
    X(stream_destroy, "hipStreamDestroy", (void *), 1)                                                                 \
    X(stream_wait_event, "hipStreamWaitEvent", (void *, void *, unsigned), 1)                                          \
    X(stream_synchronize, "hipStreamSynchronize", (void *), 1)                                                         \
    X(hipStreamWaitValue32, "hipStreamWaitValue32", (void *, void *, uint32_t, unsigned, uint32_t), 1)                 \
    X(hipStreamWriteValue32, "hipStreamWriteValue32", (void *, void *, uint32_t, unsigned), 1)                         \
    X(hipStreamGetCaptureInfo, "hipStreamGetCaptureInfo", (void *, int *, uint64_t *), 1)                              \
    X(hipThreadExchangeStreamCaptureMode, "hipThreadExchangeStreamCaptureMode", (int *), 0)                            \
    X(event_create, "hipEventCreateWithFlags", (void **, unsigned), 1)                                                 \
    X(event_destroy, "hipEventDestroy", (void *), 1)                                                                   \
    X(event_record, "hipEventRecord", (void *, void *), 1)                                                             \
    X(event_query, "hipEventQuery", (void *), 1)                                                                       \
    X(hipModuleLoadData, "hipModuleLoadData", (void **, const void *), 1)                                              \
    X(hipModuleGetFunction, "hipModuleGetFunction", (void **, void *, const char *), 1)                                \
    X(launch_kernel, "hipModuleLaunchKernel",                                                                          \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), 1)

#include "gpu/plain.h"

enum { NOT_SUPPORTED = 801, INVALID_VALUE = 1 };
enum { COPY_DEFAULT = 4, MALLOC_SIGNAL_MEMORY = 2, VERSION_6 = 60000000 };

/* hipPointerAttribute_t: all releases have this layout, but HIP 6 changed the values of `type`. */
typedef struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
    char room[64];
} attributes;

static int eager;   /* HIP_ENABLE_DEFERRED_LOADING=0 at the start; HIP has no query for it */
static int numeric; /* HIP_VERSION: major * 10^7 + minor * 10^5 + patch */

/* clang-format off */
PLAIN(current, (int *device), hipGetDevice(device))
PLAIN(copy, (void *dst, const void *src, size_t bytes, void *stream), hipMemcpyAsync(dst, src, bytes, COPY_DEFAULT, stream))
PLAIN(copy_rows, (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows, void *stream), hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, bytes, rows, COPY_DEFAULT, stream))
PLAIN(stream_captures, (void *stream, int *does, uint64_t *which), hipStreamGetCaptureInfo(stream, does, which))
PLAIN(stream_hold, (void *stream, void *word, uint32_t least), hipStreamWaitValue32(stream, word, least, WAIT_AT_LEAST, ~(uint32_t)0))
PLAIN(stream_write, (void *stream, void *word, uint32_t value), hipStreamWriteValue32(stream, word, value, 0))
/* clang-format on */

/* HIP has it since 5.2. */
static int op_capture_mode(int *mode) {
    return api.hipThreadExchangeStreamCaptureMode ? api.hipThreadExchangeStreamCaptureMode(mode) : NOT_SUPPORTED;
}

/* hipMalloc's memory is coarse-grained: devices of other processes may read stale data from their caches. And HIP 7
 * looks the owner's device up by its number in the borrowing process. */
static int op_lend(const void *where, void *name, uint64_t *offset) { return NOT_SUPPORTED; }
static int op_borrow(const void *name, void **where) { return NOT_SUPPORTED; }
static int op_give_back(void *where) { return NOT_SUPPORTED; }

/* hipStreamBatchMemOp (since 6.4) accepts only the words that streams can wait on (signal memory); kernels write the
 * others. */
static int op_stream_turn(void *stream, void *told, uint32_t value, void *word, uint32_t least) {
    return NOT_SUPPORTED;
}

static int start(void) {
    const char *deferred = getenv("HIP_ENABLE_DEFERRED_LOADING");
    eager = deferred && !atoi(deferred);
    return api.hipInit(0) ?: api.hipRuntimeGetVersion(&numeric);
}

static int op_version(int *version) {
    *version = numeric / 10000000 * 1000 + numeric / 100000 % 100 * 10;
    return 0;
}

static int op_use(int device) { return device < 0 ? INVALID_DEVICE : api.hipSetDevice(device); }

static int kind_of(const attributes *a) {
    static const int before_6[] = {UCCH_MEMORY_PINNED, UCCH_MEMORY_DEVICE, UCCH_MEMORY_DEVICE, UCCH_MEMORY_DEVICE,
                                   UCCH_MEMORY_MANAGED};
    static const int since_6[] = {UCCH_MEMORY_UNKNOWN, UCCH_MEMORY_PINNED, UCCH_MEMORY_DEVICE, UCCH_MEMORY_MANAGED};
    if (a->managed) return UCCH_MEMORY_MANAGED;
    if (numeric < VERSION_6) return a->type >= 0 && a->type < 5 ? before_6[a->type] : UCCH_MEMORY_UNKNOWN;
    return a->type >= 0 && a->type < 4 ? since_6[a->type] : UCCH_MEMORY_UNKNOWN;
}

static int op_pointer(const void *where, int *kind, int *device) {
    attributes a;
    memset(&a, 0, sizeof(a));
    int status = api.hipPointerGetAttributes(&a, where);
    *device = 0;
    *kind = UCCH_MEMORY_UNKNOWN;
    if (status == INVALID_VALUE) { /* not HIP's memory, or freed; HIP 5 reports ordinary host memory so */
        api.hipGetLastError();
        return 0;
    }
    if (!status) *kind = kind_of(&a);
    if (*kind != UCCH_MEMORY_UNKNOWN &&
        a.device > 0) /* HIP 6 gives unknown memory the device hipInvalidDeviceId (-2) */
        *device = a.device;
    return status;
}

/* hipStreamWaitValue32 waits only on signal memory. */
static int op_flag(void **word) {
    int status = api.hipExtMallocWithFlags(word, sizeof(uint64_t), MALLOC_SIGNAL_MEMORY);
    if (!status) memset(*word, 0, sizeof(uint64_t));
    return status;
}

static int op_traits(int *bits) {
    *bits = eager ? UCCH_EAGER : 0;
    return 0;
}

/* HIP has no query for it; the kernel's files name their targets. */
static int op_target(int device, char *text, int room) {
    *text = 0;
    return 0;
}

/* Modules stay loaded, as unloading one waits for the device. */
static int op_kernel(const void *image, void **function) {
    void *module = NULL;
    return api.hipModuleLoadData(&module, image) ?: api.hipModuleGetFunction(function, module, "ucch");
}

static int op_error_name(int code, const char **name) {
    /* hipGetErrorName exists in every release; hipDrvGetErrorName came with 5.3. */
    const char *(*name_of)(int) = (const char *(*)(int))(void (*)(void))api.hipGetErrorName;
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
#define DEVICE(name, params) .ops.name = op_##name,
#include "gpu/ops.h"
};
