/* Declarations of the native engine for Python, read by the C compiler and by cffi: hence no preprocessor lines but the
 * constants, which build.py also gives to cffi. */

/* ---- loader.c ---- */
int ucch_preload(const char *path);
int ucch_load_ucc(const char *path);
int ucch_load_ucp(const char *path);
const char *ucch_load_error(void);
int ucch_loaded(const char *name, char *path, size_t size);

/* ---- guard.c: error codes that libucc cancels like requests ---- */
int ucch_guard_cancel(void);
int ucch_guard_finalize(void);
int ucch_endpoint_errors(void);

/* ---- op.c: operations in flight ---- */
typedef struct ucch_op ucch_op;
typedef struct ucch_context ucch_context;
typedef struct ucch_team ucch_team;
typedef struct ucch_program ucch_program;
typedef struct ucch_message ucch_message;
typedef struct ucch_board ucch_board;
typedef struct ucch_channels ucch_channels;
typedef struct ucch_lanes ucch_lanes;
typedef struct ucch_lane_message ucch_lane_message;

typedef struct ucch_error {
    int status;     /* UCC status (of a message: UCS status), or UCCH_FAIL_* below -1000 */
    int step;       /* index of the step that failed, or -1 */
    int peer;       /* board slot of the rank involved; -1: none; -2 - rank: on another host */
    uint64_t seq;   /* sequence number of the call on its communicator */
    double elapsed; /* seconds since the start */
} ucch_error;

void ucch_op_deadline(ucch_op *op, double timeout);
uint64_t ucch_failures(void);
void ucch_listen(ucch_op *op);
uint64_t ucch_doorbell_count(void);
void ucch_doorbell_ring(void);
void ucch_doorbell_wait(uint64_t known, double seconds);

/* ---- lock.c ---- */
void ucch_lock(void);
void ucch_unlock(void);
void ucch_lock_noted(int *has);
void ucch_unlock_noted(int *has);
void ucch_lock_ends(void);
int ucch_lock_is_lost(double seconds);
void ucch_set_spin(int iterations);

/* ---- progress.c: progress and who makes it; waits of callers ---- */
int ucch_progress_thread(int on);
int ucch_inherited(void);
int ucch_progress_once(void);
void ucch_progress_idle(void);
ucch_context *ucch_context_new(ucc_context_h handle, ucp_worker_h worker);
void ucch_context_free(ucch_context *context);
int ucch_wait(ucch_op *op, double slice);
int ucch_wait_matched(ucch_op *op, double slice);
int ucch_wait_any(ucch_op **ops, int n, int all, double slice);
int ucch_test(ucch_op *op);
int ucch_peek(ucch_op *op);
double ucch_rest(double now, double quiet);

/* ---- step.c: teams ---- */
ucch_team *ucch_team_new(ucch_context *context, ucc_team_h handle);
void ucch_team_free(ucch_team *team);
int ucch_team_far(ucch_team *team);

/* ---- program.c: a plan lowered for this rank ---- */
typedef struct ucch_span {
    int base;       /* UCCH_SEND, UCCH_RECV, UCCH_TMP */
    int64_t offset; /* bytes from that base */
    uint64_t count; /* elements; bytes for messages and exchanges */
} ucch_span;

/* A step of a program. */
typedef struct ucch_part {
    int kind; /* UCCH_STEP_*; local steps: UCCH_STEP_LOCAL + UCCH_COPY and so on */
    int op, dtype, to;
    ucch_span src, dst;
    double factor; /* for UCCH_SCALE */
    /* A collective: counts and displacements of source and destination if they differ between ranks. */
    ucch_team *team;
    int coll;
    uint64_t flags, root;
    const uint64_t *tables[4];
    /* A message. */
    ucp_ep_h ep;
    ucp_worker_h worker;
    uint64_t tag;
    /* An exchange of parcels: the slot to read from, and `bytes` at offset `at` of each parcel. */
    int writes, from, combines;
    uint64_t at, bytes;
    /* Dependencies; the stage of the plan, which orders posting; and the peer rank of a message. */
    int ndeps, stage, peer;
    const int *deps;
} ucch_part;

/* All of a program but its steps. */
typedef struct ucch_spec {
    const char *label; /* as shown by the board and in records */
    uint64_t signature;
    uint64_t bytes; /* size of the caller's buffers */
    /* Bytes of the send and the receive buffer, which must not overlap unless the receive buffer begins `own` bytes
     * behind the send buffer; 0: they may, or not known. */
    int64_t sent, received, own;
    uint32_t salt;   /* for tags of its messages between hosts */
    uint32_t number; /* in the timeline */
    int on_device;   /* works on memory of the bound device, whose UCC and UCX type is `memory_type` */
    int memory_type;
    size_t tmp_bytes; /* size of scratch */
    /* Queued in streams as a whole: the channels, whether for capture in a graph, and the reduction. */
    ucch_channels *channels;
    int in_graph, op, dtype;
} ucch_spec;

ucch_program *ucch_program_new(ucch_board *board, const ucch_spec *spec, int nsteps, const ucch_part *steps,
                               int *status);
void ucch_program_drop(ucch_program *program);
void ucch_program_free(ucch_program *program);
ucch_op *ucch_program_op(ucch_program *program);
int ucch_program_persist(ucch_program *program, void *send, void *recv, double timeout);
int ucch_program_again(ucch_program *program);
int ucch_program_start(ucch_program *program, void *send, void *recv, double timeout);
int ucch_program_run(ucch_program *program, void *send, void *recv, double timeout, double slice);
int ucch_program_try(ucch_program *program, void *send, void *recv, double timeout, int waits);

/* ---- trace.c: what every program, step and wire did, and when ---- */
typedef struct ucch_event {
    uint64_t begin, end; /* ns of CLOCK_MONOTONIC; end 0: not yet */
    uint64_t seq;        /* number of the call on its communicator; of a wire's message: the peer's key */
    uint32_t program;    /* `number` of its ucch_spec; all ones: a wire */
    int32_t step;        /* -1: the whole program; of a wire: its number, odd if it receives */
    int32_t status;
    uint32_t bytes; /* size of a wire's message */
} ucch_event;

int ucch_trace_open(const char *path, uint64_t capacity);
void ucch_trace_stop(void);
const void *ucch_trace_memory(uint64_t *bytes);

/* ---- flight.c: the last operations of this process ---- */
typedef struct ucch_record {
    /* ns of CLOCK_MONOTONIC; 0: not yet, or unknown. A message ends up to some microseconds after `ended`, the last
     * reading of the clock. */
    uint64_t called, started, ended;
    uint64_t seq;      /* number of the call on its communicator; 0 of a message */
    uint64_t bytes;    /* size of the caller's buffers */
    uint32_t comm;     /* set by ucch_board_name */
    int32_t peer, tag; /* of a message; -1: any. Transfer: process of the peer, and whether it is notified */
    int32_t status;
    uint8_t kind; /* UCCH_RECORD_* */
    uint8_t own;  /* message of the package's own; transfer within the host */
    uint16_t pad;
    uint32_t more;
    uint64_t signature; /* of a call; messages use no field from here on */
    char label[48];
    uint64_t spare;
} ucch_record;

int ucch_flight_open(int ring, int about, int stack, uint64_t capacity, int rank, const char *folder, const char *name);
void ucch_flight_stop(void);
int ucch_flight_catch(int number);
void ucch_flight_without_python(void);
void ucch_flight_hold(int *has);
int ucch_flight_let_go(int *has);
void ucch_flight_await(double seconds);
int ucch_flight_dump(int cause, const char *path);
void ucch_record_end(uint64_t record, int status);

/* ---- arith.c: element-wise work on host memory ---- */
int ucch_combine(int op, int dtype, const void *src, void *dst, uint64_t count);
int ucch_cast(int from, int to, const void *src, void *dst, uint64_t count);
int ucch_scale(int dtype, void *data, uint64_t count, double factor);

/* ---- message.c: tagged messages ---- */
ucch_message *ucch_message_new(void);
void ucch_message_free(ucch_message *message);
ucch_op *ucch_message_op(ucch_message *message);
int ucch_send(ucch_message *message, ucp_worker_h worker, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
              int mem_type, int sync, double timeout);
int ucch_recv(ucch_message *message, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag, uint64_t mask,
              int mem_type, double timeout);
int ucch_recv_taken(ucch_message *message, void *buffer, size_t bytes, ucch_message *taken, int mem_type,
                    double timeout);
int ucch_send_offer(ucch_message *message, ucp_worker_h worker, ucp_ep_h ep, const void *data, size_t bytes,
                    uint64_t tag, int dest, double timeout);
int ucch_flush(ucch_message *message, ucp_ep_h ep, int closes, double timeout);
int ucch_message_again(ucch_message *message);
void ucch_message_cancel(ucch_message *message);
void ucch_message_watch(ucch_message *message, ucch_board *board, int peer, int rank);
int ucch_message_held(ucch_message *message);

/* ---- message.c: messages that start when a stream reaches a point ---- */
int ucch_message_after(ucch_message *message, void *stream);

/* ---- offer.c: messages whose data goes by lanes; probes ---- */
int ucch_message_lanes(ucch_message *message, ucch_lanes *lanes, void *data, size_t bytes, int by_host);
int ucch_probe(ucch_message *probe, ucp_worker_h worker, uint64_t tag, uint64_t mask, int takes);
int ucch_has_taken(ucch_message *probe);
int ucch_discard_all(ucp_worker_h worker, uint64_t tag, uint64_t mask);
int ucch_offers_discard(ucp_worker_h worker, ucch_lanes *lanes, uint64_t tag, uint64_t mask);

/* ---- rma/: one-sided communication, with notifications ---- */
typedef struct ucch_rma ucch_rma;
typedef struct ucch_region ucch_region;
typedef struct ucch_peer ucch_peer;
typedef struct ucch_target ucch_target;
typedef struct ucch_transfer ucch_transfer;
typedef struct ucch_rows ucch_rows;

ucch_rma *ucch_rma_new(ucp_worker_h worker, uint64_t uid, int by_hardware, int by_kernel, int *status);
int ucch_rma_reach(ucch_rma *at, int wires, const void *addresses, size_t bytes);
int ucch_rma_stop(ucch_rma *at);
void ucch_rma_free(ucch_rma *at);
uint64_t ucch_rma_counter(ucch_rma *at, int counter);
int ucch_rma_counter_next(ucch_rma *at, int counter);
int ucch_rma_arriving(ucch_rma *at, int counter);
int64_t ucch_notification_take(ucch_rma *at, uint64_t *from, void *data);

int ucch_peer_wires(const ucch_peer *peer);
ucch_peer *ucch_peer_new(ucch_rma *at, uint64_t uid, const void *address, size_t bytes, int process, double patience,
                         int *status);
void ucch_peer_known(ucch_peer *peer);
int ucch_peer_status(ucch_peer *peer);
void ucch_peer_lose(ucch_peer *peer);
void ucch_peer_leave(ucch_peer *peer, double timeout);
int ucch_peer_left(ucch_peer *peer);
void ucch_peer_free(ucch_peer *peer);
ucch_region *ucch_region_new(ucch_rma *at, uint64_t id, void *base, size_t bytes, int on_device, ucp_mem_h memh);
int ucch_region_lend(const ucch_region *region, void *lent);
void ucch_region_revoke(ucch_region *region);
int ucch_region_users(const ucch_region *region, double patience);
void ucch_region_free(ucch_region *region);
ucch_target *ucch_target_new(ucch_peer *peer, uint64_t id, uint64_t base, size_t bytes, int on_device);
int ucch_target_borrow(ucch_target *target, const void *lent);
int ucch_target_key(ucch_target *target, const void *key);
void ucch_target_close(ucch_target *target);
void ucch_target_free(ucch_target *target);

/* Description of a transfer. */
typedef struct ucch_order {
    int what; /* UCCH_RMA_* */
    /* Between regions: the caller keeps the arrays alive. With `rows` each piece is gathered from rows and converted;
     * `lengths` are those of the result. */
    ucch_region *local;
    ucch_target *target;
    size_t n;
    const uint64_t *mine, *theirs, *lengths;
    const ucch_rows *rows;
    uint64_t region, bytes; /* for UCCH_RMA_OPEN */
    /* Notify the peer afterwards: by a message, if it has any bytes (the caller keeps it alive), and by a counter, if
     * this is its number plus 1 and not 0. */
    int tells;
    int64_t counter;
    const void *notification;
    size_t notification_bytes;
    uint64_t least; /* UCCH_RMA_AWAIT: value that our counter of this number is to reach */
} ucch_order;

ucch_transfer *ucch_transfer_new(ucch_rma *at, ucch_peer *peer, const ucch_order *order);
ucch_op *ucch_transfer_op(ucch_transfer *transfer);
int64_t ucch_pieces_outside(uint64_t room, size_t n, const uint64_t *offsets, const uint64_t *bytes);
int ucch_transfer_begin(ucch_transfer *transfer, double timeout, int has_stream, void *stream);
int ucch_transfer_hold(ucch_transfer *transfer, void *stream);
int ucch_transfer_held(ucch_transfer *transfer);
void ucch_transfer_free(ucch_transfer *transfer);

/* ---- wire.c: network threads: even numbers send, odd ones receive ---- */
int ucch_wire_new(ucp_context_h context, int eager, int slower, const int *cores, int ncores);
int ucch_wire_address(int wire, void **address, size_t *bytes);
void ucch_wire_release_address(int wire, void *address);
int ucch_wire_connect(int wire, uint64_t key, const void *address);
void ucch_wire_stop(int wire);

/* ---- link.c, host_exchange.c: control connections between ranks of several hosts ---- */
typedef struct ucch_host_exchange ucch_host_exchange;

int ucch_link_new(int fd, double silence);
int ucch_link_fate(int link);
void ucch_links_stop(int well);
int ucch_cuts(void);
ucch_host_exchange *ucch_host_exchange_new(ucch_board *board, uint64_t key, int rank, int size, const int *hosts, int n,
                                           const int *links, const int *ranks);
int ucch_host_exchange_add_host(ucch_host_exchange *exchange, int rank, const void *addresses, size_t bytes,
                                double timeout);
void ucch_host_exchange_note_death(ucch_host_exchange *exchange, int rank);
void ucch_host_exchange_free(ucch_host_exchange *exchange);

/* ---- board.c, far.c: ranks on other hosts ---- */
int ucch_board_add_far(ucch_board *board, int size);
uint64_t ucch_board_differs(ucch_board *board, int *rank, char *label);
int ucch_board_behind(ucch_board *board, int slot, uint64_t seq);
uint64_t ucch_board_waiter(const ucch_board *board, int rank, char *label, double *seconds);

/* ---- process.c: processes of this host, shared memory, and the end of this process ---- */
int ucch_process_ended(int pid);
void ucch_process_meet(int pid);
int ucch_shared_open(int pid, int file);
char *ucch_shared_map(int file, size_t at, size_t bytes);
void ucch_shared_unmap(char *memory, size_t bytes);
void ucch_shared_drop(char *memory, size_t bytes, int users);
void ucch_leave_with(int status);
void ucch_leave(void);
void ucch_leave_late(void);

/* ---- bids.c: what ranks exchange to make a new communicator ---- */
typedef struct ucch_bid {
    int64_t ready;             /* UCCH_GOES_ON, UCCH_READY if the rank cannot use their job any more, or 0 */
    int64_t last, next_used;   /* the last number its process has claimed, and the next one that may be in use */
    int64_t color, key;        /* as in MPI's Split */
    int64_t spares, spare[32]; /* at most UCCH_SPARES numbers of spare pages and teams */
} ucch_bid;

int64_t ucch_bids_claim(const ucch_bid *all, int n);
int ucch_bids_ranks(const ucch_bid *all, int n, int mine, int *ranks);
int ucch_bids_spare(const ucch_bid *all, const int *ranks, int n, int64_t *common);

/* ---- board.c: which rank of a host has entered which call ---- */
typedef struct ucch_refusal {
    uint64_t call; /* the call that one rank refused and another makes */
    int64_t rank;  /* the rank that refused it */
    char text[240];
} ucch_refusal;

uint64_t ucch_board_record(ucch_board *board, int kind, uint64_t seq, uint64_t signature, const char *label);
void ucch_board_name(ucch_board *board, uint32_t comm);
uint64_t ucch_board_refuse(ucch_board *board, const char *text);
int ucch_board_refusal(const ucch_board *board, ucch_refusal *found);
int ucch_board_verdict(ucch_board *board, uint64_t seq, int *peer);
void ucch_board_open(ucch_board *board, int more);
uint64_t ucch_board_next(ucch_board *board);
ucch_board *ucch_board_new(void *memory, int nslots, int mine, const int *ranks, uint64_t use);
void ucch_board_give_back(void *page, int mine, uint64_t use, int unused);
int ucch_board_given_back(const ucch_board *board, int i);
void ucch_board_expect(ucch_board *board, const int *pids);
void ucch_board_clear(ucch_board *board);
void ucch_board_free(ucch_board *board);
int ucch_board_doubtful(const ucch_board *board, uint64_t seq);
void ucch_board_add(ucch_board *board, double seconds, uint64_t bytes);
void ucch_board_stats(ucch_board *board, uint64_t *calls, double *seconds, uint64_t *bytes);
size_t ucch_board_bytes(int nslots);
uint64_t ucch_board_signature(const char *label);
uint64_t ucch_board_announce(ucch_board *board, uint64_t signature, const char *label);
uint64_t ucch_board_publish(ucch_board *board, uint64_t signature, const char *label);
int ucch_board_mismatch(ucch_board *board, uint64_t seq);
int ucch_board_gone(ucch_board *board, uint64_t seq);
int ucch_board_cut(ucch_board *board, double waited, int *peer);
int ucch_board_is_cut_off(ucch_board *board, double waited);
const char *ucch_board_link(const ucch_board *board, int rank);
int ucch_board_fate(ucch_board *board, int slot);
void ucch_board_leave(ucch_board *board);
void ucch_board_failed(ucch_board *board, uint64_t seq);
uint64_t ucch_board_given_up(ucch_board *board, int peer);
void ucch_board_break(ucch_board *board);
int ucch_board_launches(ucch_board *board);
ucch_op *ucch_board_first_failure(ucch_board *board);
int ucch_board_broken(ucch_board *board);
void ucch_board_revoke(ucch_board *board);
int ucch_board_revoked(ucch_board *board);
uint64_t ucch_board_seq(ucch_board *board, int slot);
double ucch_board_waits(ucch_board *board, int slot);
int ucch_board_label(ucch_board *board, int slot, uint64_t seq, char *label);
