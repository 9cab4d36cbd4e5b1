/* Declarations of our own for the part of the UCP API (ucp.h, UCX 1.13 to 1.22) that ucc_hetero uses.
 *
 * Read by the C compiler and by cffi, hence no preprocessor lines. ucs_status_t is a one-byte packed enum: declared as
 * int it reads garbage. Every access in libucp is driven by field masks; structures are zeroed and end in reserved
 * bytes, for fields that we leave alone and because newer releases append some. */

typedef signed char ucs_status_t;
typedef void *ucs_status_ptr_t;
typedef uint64_t ucp_tag_t;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef struct ucp_recv_desc *ucp_tag_message_h;

typedef struct ucp_params {
    uint64_t field_mask;
    uint64_t features;
    uint64_t before_mt[4];
    int mt_workers_shared;
    uint64_t reserved[11];
} ucp_params_t;

typedef struct ucp_context_attr {
    uint64_t field_mask;
    size_t request_size;
    int thread_mode;
    uint64_t memory_types;
    uint64_t reserved[12];
} ucp_context_attr_t;

typedef struct ucp_worker_params {
    uint64_t field_mask;
    int thread_mode;
    uint64_t reserved[31];
} ucp_worker_params_t;

typedef struct ucp_err_handler {
    void (*cb)(void *arg, ucp_ep_h ep, ucs_status_t status);
    void *arg;
} ucp_err_handler_t;

typedef struct ucp_ep_params {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    ucp_err_handler_t err_handler;
    uint64_t reserved[18];
} ucp_ep_params_t;

typedef struct ucp_tag_recv_info {
    ucp_tag_t sender_tag;
    size_t length;
} ucp_tag_recv_info_t;

typedef struct ucp_request_param {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    void *cb;
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    ucp_mem_h memh;
    uint64_t reserved[8];
} ucp_request_param_t;

typedef struct ucp_mem_map_params {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    uint64_t reserved[8];
} ucp_mem_map_params_t;

typedef struct ucp_am_recv_param {
    uint64_t recv_attr;
    ucp_ep_h reply_ep;
} ucp_am_recv_param_t;

typedef struct ucp_am_handler_param {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucs_status_t (*cb)(void *arg, const void *header, size_t header_length, void *data, size_t length,
                       const ucp_am_recv_param_t *param);
    void *arg;
    uint64_t reserved[8];
} ucp_am_handler_param_t;
