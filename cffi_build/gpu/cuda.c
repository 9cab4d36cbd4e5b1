/* Adapter for CUDA, by entry points of the driver API that drivers of CUDA 11.7, 12 and 13 export under the same names:
 * it needs neither the toolkit nor libcudart. It works in the primary contexts, as libcudart, torch and CuPy do. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gpu/adapter.h"

/* CUdeviceptr, a 64-bit number, is declared as a pointer here: the calling convention is the same. */
typedef struct lent { /* CUipcMemHandle */
    char name[UCCH_LENT_BYTES];
} lent;

/* CUDA_MEMCPY2D; of each side only the unified address and the pitch are set. */
typedef struct side_2d {
    size_t x, y;
    int type;
    const void *host;
    const void *at;
    void *array;
    size_t pitch;
} side_2d;
typedef struct copy_2d {
    side_2d src, dst;
    size_t bytes, rows;
} copy_2d;

/* CUstreamBatchMemOpParams of a wait or a write. */
typedef struct word_op {
    unsigned operation;
    void *word;
    uint64_t value;
    unsigned flags;
    void *alias;
    uint64_t more;
} word_op;

#define SYMBOLS(X)                                                                                                     \
    X(cuInit, "cuInit", (unsigned), 1)                                                                                 \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *), 1)                                                            \
    X(cuGetErrorName, "cuGetErrorName", (int, const char **), 1)                                                       \
    X(device_count, "cuDeviceGetCount", (int *), 1)                                                                    \
    X(bus_id, "cuDeviceGetPCIBusId", (char *, int, int), 1)                                                            \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **, int), 1)                                         \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (void *), 1)                                                                 \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (void **), 1)                                                                \
    X(cuCtxGetDevice, "cuCtxGetDevice", (int *), 1)                                                                    \
    X(cuPointerGetAttributes, "cuPointerGetAttributes", (unsigned, const int *, void **, const void *), 1)             \
    X(mem_alloc, "cuMemAlloc_v2", (void **, size_t), 1)                                                                \
    X(mem_free, "cuMemFree_v2", (void *), 1)                                                                           \
    X(mem_info, "cuMemGetInfo_v2", (size_t *, size_t *), 1)                                                            \
    X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned), 1)                                                    \
    X(host_free, "cuMemFreeHost", (void *), 1)                                                                         \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned), 1)                                            \
    X(host_unregister, "cuMemHostUnregister", (void *), 1)                                                             \
    X(device_pointer, "cuMemHostGetDevicePointer_v2", (void **, void *, unsigned), 1)                                  \
    X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", (void **, size_t *, const void *), 1)                           \
    X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (void *, void *), 1)                                                     \
    X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (void **, lent, unsigned), 1)                                       \
    X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (void *), 1)                                                         \
    X(cuMemcpyAsync, "cuMemcpyAsync", (void *, const void *, size_t, void *), 1)                                       \
    X(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", (const copy_2d *, void *), 1)                                             \
    X(stream_create, "cuStreamCreateWithPriority", (void **, unsigned, int), 1)                                        \
    X(stream_destroy, "cuStreamDestroy_v2", (void *), 1)                                                               \
    X(stream_wait_event, "cuStreamWaitEvent", (void *, void *, unsigned), 1)                                           \
    X(stream_synchronize, "cuStreamSynchronize", (void *), 1)                                                          \
    X(cuStreamWaitValue32, "cuStreamWaitValue32_v2", (void *, void *, uint32_t, unsigned), 1)                          \
    X(cuStreamWriteValue32, "cuStreamWriteValue32_v2", (void *, void *, uint32_t, unsigned), 1)                        \
    X(cuStreamBatchMemOp, "cuStreamBatchMemOp_v2", (void *, unsigned, const word_op *, unsigned), 1)                   \
    X(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                                                             \
      (void *, int *, uint64_t *, void **, const void ***, size_t *), 1)                                               \
    X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *), 1)                              \
    X(event_create, "cuEventCreate", (void **, unsigned), 1)                                                           \
    X(event_destroy, "cuEventDestroy_v2", (void *), 1)                                                                 \
    X(event_record, "cuEventRecord", (void *, void *), 1)                                                              \
    X(event_query, "cuEventQuery", (void *), 1)                                                                        \
    X(cuModuleGetLoadingMode, "cuModuleGetLoadingMode", (int *), 1)                                                    \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int), 1)                                              \
    X(cuModuleLoadData, "cuModuleLoadData", (void **, const void *), 1)                                                \
    X(cuModuleGetFunction, "cuModuleGetFunction", (void **, void *, const char *), 1)                                  \
    X(cuFuncLoad, "cuFuncLoad", (void *), 0)                                                                           \
    X(launch_kernel, "cuLaunchKernel",                                                                                 \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), 1)

#include "gpu/plain.h"

enum { OP_WAIT_32 = 1, OP_WRITE_32 = 2 };
enum { LOADING_EAGER = 1, ENABLE_PEER_ACCESS = 1 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, ATTRIBUTE_DEVICE = 9 };
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_UNIFIED = 4 };
#define MOST_DEVICES 64
#define FLAG_PAGE ((size_t)65536)
#define FLAG_STRIDE 64

static void *primary[MOST_DEVICES];

/* clang-format off */
PLAIN(version, (int *version), cuDriverGetVersion(version))
PLAIN(copy, (void *dst, const void *src, size_t bytes, void *stream), cuMemcpyAsync(dst, src, bytes, stream))
PLAIN(error_name, (int code, const char **name), cuGetErrorName(code, name))
PLAIN(stream_captures, (void *stream, int *does, uint64_t *which), cuStreamGetCaptureInfo(stream, does, which, NULL, NULL, NULL))
PLAIN(capture_mode, (int *mode), cuThreadExchangeStreamCaptureMode(mode))
PLAIN(give_back, (void *where), cuIpcCloseMemHandle(where))
PLAIN(stream_hold, (void *stream, void *word, uint32_t least), cuStreamWaitValue32(stream, word, least, WAIT_AT_LEAST))
PLAIN(stream_write, (void *stream, void *word, uint32_t value), cuStreamWriteValue32(stream, word, value, 0))
/* clang-format on */

static int start(void) {
    memset(primary, 0, sizeof(primary));
    return api.cuInit(0);
}

static int op_current(int *device) {
    void *context = NULL;
    int status = api.cuCtxGetCurrent(&context);
    *device = -1;
    if (status || !context) return status;
    return api.cuCtxGetDevice(device);
}

static int op_use(int device) {
    if (device < 0) return api.cuCtxSetCurrent(NULL);
    if (device >= MOST_DEVICES) return INVALID_DEVICE;
    /* Retained once and never released: libcudart, torch and CuPy use the same context. */
    int status = primary[device] ? 0 : api.cuDevicePrimaryCtxRetain(&primary[device], device);
    return status ?: api.cuCtxSetCurrent(primary[device]);
}

static int op_pointer(const void *where, int *kind, int *device) {
    static const int wanted[] = {ATTRIBUTE_MEMORY_TYPE, ATTRIBUTE_IS_MANAGED, ATTRIBUTE_DEVICE};
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    void *into[] = {&type, &managed, &ordinal};
    int status = api.cuPointerGetAttributes(3, wanted, into, where);
    *kind = managed                 ? UCCH_MEMORY_MANAGED
            : type == MEMORY_DEVICE ? UCCH_MEMORY_DEVICE
            : type == MEMORY_HOST   ? UCCH_MEMORY_PINNED
                                    : UCCH_MEMORY_UNKNOWN;
    *device = ordinal < 0 ? 0 : ordinal;
    return status;
}

static int op_stream_turn(void *stream, void *told, uint32_t value, void *word, uint32_t least) {
    word_op both[] = {{.operation = OP_WRITE_32, .word = told, .value = value},
                      {.operation = OP_WAIT_32, .word = word, .value = least}};
    return api.cuStreamBatchMemOp(stream, 2, both, 0);
}

static int op_copy_rows(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows,
                        void *stream) {
    copy_2d all = {.src = {.type = MEMORY_UNIFIED, .at = src, .pitch = src_pitch},
                   .dst = {.type = MEMORY_UNIFIED, .at = dst, .pitch = dst_pitch},
                   .bytes = bytes,
                   .rows = rows};
    return api.cuMemcpy2DAsync(&all, stream);
}

/* The driver refuses memory of pools and of virtual memory management, such as torch's expandable segments. */
static int op_lend(const void *where, void *name, uint64_t *offset) {
    void *base = NULL;
    size_t bytes;
    int status = api.cuMemGetAddressRange(&base, &bytes, where);
    *offset = (uint64_t)((const char *)where - (char *)base);
    return status ?: api.cuIpcGetMemHandle(name, base);
}

static int op_borrow(const void *name, void **where) {
    lent from;
    memcpy(&from, name, sizeof(from));
    return api.cuIpcOpenMemHandle(where, from, ENABLE_PEER_ACCESS);
}

/* Flags are 32-bit words of pinned pages, one to a cache line, and are never freed. Thread-safe. */
static int op_flag(void **word) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char *page;
    static size_t used = FLAG_PAGE;
    int status = 0;
    pthread_mutex_lock(&lock);
    if (used == FLAG_PAGE && !(status = op_pinned((void **)&page, FLAG_PAGE))) {
        memset(page, 0, FLAG_PAGE);
        used = 0;
    }
    if (!status) {
        *word = page + used;
        used += FLAG_STRIDE;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static int op_traits(int *bits) {
    int mode = LOADING_EAGER, status = api.cuModuleGetLoadingMode(&mode);
    *bits = UCCH_WAITS_ANYWHERE | UCCH_OWN_QUEUES | UCCH_TELLS_CURRENT;
    *bits |= mode == LOADING_EAGER ? UCCH_EAGER : 0;
    return status;
}

static int op_target(int device, char *text, int room) {
    int major = 0, minor = 0, status = api.cuDeviceGetAttribute(&major, CAPABILITY_MAJOR, device);
    if (!status) status = api.cuDeviceGetAttribute(&minor, CAPABILITY_MINOR, device);
    snprintf(text, (size_t)room, status ? "" : "sm_%d%d", major, minor);
    return 0;
}

/* Modules stay loaded, as unloading one waits for the device. Loading a function also waits, so it is not left to the
 * first launch, which may come behind a stream that waits for other ranks. Drivers before 12.4 lack cuFuncLoad. */
static int op_kernel(const void *image, void **function) {
    void *module = NULL;
    int status = api.cuModuleLoadData(&module, image) ?: api.cuModuleGetFunction(function, module, "ucch");
    return status || !api.cuFuncLoad ? status : api.cuFuncLoad(*function);
}

const device_adapter ucch_cuda = {
    .bytes = sizeof(device_adapter),
    .name = "cuda",
    .memory_type = 1,
    .engine_type = 0,
    .symbols = symbols,
    .start = start,
#define DEVICE(name, params) .ops.name = op_##name,
#include "gpu/ops.h"
};
