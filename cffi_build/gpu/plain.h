/* What CUDA's driver API and HIP have in common, included by cuda.c and hip.c: the table of functions made from
 * SYMBOLS, and operations that call one of them. */

static struct {
#define MEMBER(name, symbol, params, need) int(*name) params;
    SYMBOLS(MEMBER)
} api;

static const device_symbol symbols[] = {
#define ROW(name, symbol, params, need) {symbol, (void **)&api.name, need},
    SYMBOLS(ROW){NULL, NULL, 0}};

enum { NOT_READY = 600, INVALID_DEVICE = 101, WAIT_AT_LEAST = 0 };
enum { HOST_PORTABLE_MAPPED = 3, STREAM_NON_BLOCKING = 1, EVENT_NO_TIMING = 2 };

/* clang-format off */
#define PLAIN(name, params, call) static int op_##name params { return api.call; }

PLAIN(count, (int *devices), device_count(devices))
PLAIN(bus, (int device, char *text, int room), bus_id(text, room, device))
PLAIN(alloc, (void **where, size_t bytes), mem_alloc(where, bytes))
PLAIN(release, (void *where), mem_free(where))
PLAIN(room, (size_t *bytes), mem_info(bytes, &(size_t){0}))
PLAIN(pinned, (void **where, size_t bytes), host_alloc(where, bytes, HOST_PORTABLE_MAPPED))
PLAIN(unpin, (void *where), host_free(where))
PLAIN(host_register, (void *where, size_t bytes), host_register(where, bytes, HOST_PORTABLE_MAPPED))
PLAIN(host_unregister, (void *where), host_unregister(where))
PLAIN(mapped, (void *memory, void **seen), device_pointer(seen, memory, 0))
PLAIN(stream_new, (void **stream), stream_create(stream, STREAM_NON_BLOCKING, UCCH_STREAM_PRIORITY))
PLAIN(stream_free, (void *stream), stream_destroy(stream))
PLAIN(stream_wait, (void *stream, void *event), stream_wait_event(stream, event, 0))
PLAIN(stream_sync, (void *stream), stream_synchronize(stream))
PLAIN(event_new, (void **event), event_create(event, EVENT_NO_TIMING))
PLAIN(event_free, (void *event), event_destroy(event))
PLAIN(event_record, (void *event, void *stream), event_record(event, stream))
PLAIN(launch, (void *function, unsigned blocks, unsigned threads, void **arguments, void *stream), launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, NULL))
/* clang-format on */

static int op_event_done(void *event, int *done) {
    int status = api.event_query(event);
    *done = status == 0;
    return status == NOT_READY ? 0 : status;
}
