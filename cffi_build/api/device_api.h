/* The GPU part of the engine's interface for Python; read by the C compiler and by cffi, like api.h. */

/* ---- runtime.c: GPU runtimes. Functions return 0 (`load`: the runtime's number), or UCCH_FAIL_DEVICE with the reason
 * in ucch_device_error() ---- */
int ucch_device_load(const char *adapter, const char *path);
const char *ucch_device_error(void);
const char *ucch_device_last_error(void);
int ucch_device_memory_type(int runtime);
const struct device_ops *ucch_device_ops(int runtime);
int ucch_device_check(int runtime, int code, const char *what);
int ucch_device_pointer(int runtime, uintptr_t address);
uint64_t ucch_stream_captures(uintptr_t stream);
int ucch_capture_mode(int mode);
int ucch_device_enter(void);
void ucch_device_leave(int before);
int ucch_device_move(void *dst, const void *src, size_t bytes, void *stream, int waits);
int ucch_device_bind(int runtime, int device, int queues);
void *ucch_pool_take(int pinned, size_t bytes, const void *owner, int may_add);
void ucch_pool_give(void *memory);
int ucch_gates_held(void);

/* ---- work.c: streams and kernels ---- */
int ucch_device_reserve(void);
int ucch_kernel_add(int kind, int op, int dtype, int to, const void *image);

/* ---- channels.c: rings in pinned memory (segment.c) for data between streams ---- */
ucch_channels *ucch_channels_new(uint64_t key, int rank, int size, const int *hosts, size_t slot);
int ucch_channels_file(const ucch_channels *channels);
int ucch_channels_map(ucch_channels *channels, int peer, uint64_t key, int pid, int file);
int ucch_channels_connect(ucch_channels *channels, int peer, uint64_t key, int nwires, uint64_t number);
int ucch_channels_open(ucch_channels *channels);
int ucch_channels_quiet(ucch_channels *channels);
int ucch_channels_passed(ucch_channels *channels);
int ucch_channels_let_go(ucch_channels *channels);
void ucch_channels_free(ucch_channels *channels);
size_t ucch_channels_slot(const ucch_channels *channels, int peer, int ring);
size_t ucch_channels_held(const ucch_channels *channels);
size_t ucch_channels_pinned(void);

/* ---- lane.c, lanes.c: messages between streams ---- */
ucch_lanes *ucch_lanes_new(ucch_channels *channels, ucch_board *board);
void ucch_lanes_reach(ucch_lanes *lanes, int peer, int slot, ucp_ep_h ep);
int ucch_lanes_ready(ucch_lanes *lanes, int peer);
void ucch_lanes_discard(ucch_lanes *lanes);
void ucch_lanes_stop(ucch_lanes *lanes);
int ucch_lanes_idle(ucch_lanes *lanes);
void ucch_lanes_close(ucch_lanes *lanes);
void ucch_lanes_free(ucch_lanes *lanes);
ucch_lane_message *ucch_lane_message_new(void);
void ucch_lane_message_free(ucch_lane_message *message);
ucch_op *ucch_lane_message_op(ucch_lane_message *message);
int ucch_lane_message_post(ucch_lanes *lanes, ucch_lane_message *message, int peer, int slot, int how, uintptr_t data,
                           size_t bytes, uint64_t tag, uintptr_t stream, double timeout);
int ucch_lane_message_follow(ucch_lane_message *message, uintptr_t stream, double timeout);
int ucch_lane_message_held(const ucch_lane_message *message);

/* ---- gate.c, and program.c on device memory ---- */
int ucch_program_start_on(ucch_program *program, void *send, void *recv, double timeout, void *stream, int ordered);

/* ---- stream_executor.c: calls launched into or queued in streams ---- */
ucch_op *ucch_program_launch(ucch_program *program, uintptr_t send, uintptr_t recv, double timeout, uintptr_t stream);
int ucch_program_leave(ucch_program *program, uintptr_t send, uintptr_t recv, double timeout, uintptr_t stream);
int ucch_launch_status(void);
int ucch_program_capture(ucch_program *program, int is_call, uintptr_t send, uintptr_t recv, double timeout,
                         uintptr_t stream);
ucch_op *ucch_launch_failed(void);
void ucch_launch_release(ucch_op *op);
