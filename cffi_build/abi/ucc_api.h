/* Declarations of our own for the part of the UCC API (ucc.h, API 1.0 to 1.10) that ucc_hetero uses.
 *
 * This file is read twice: by the C compiler and by cffi as a cdef, hence no preprocessor lines.
 * Structures only ever grew at their end, and libucc copies its own sizeof() of them: they are allocated zeroed and
 * end in reserved bytes, where fields are that we leave alone, and mask bits of newer releases are never set. */

typedef int ucc_status_t;
typedef uint64_t ucc_datatype_t;
typedef struct ucc_lib_info *ucc_lib_h;
typedef struct ucc_lib_config *ucc_lib_config_h;
typedef struct ucc_context *ucc_context_h;
typedef struct ucc_context_config *ucc_context_config_h;
typedef struct ucc_team *ucc_team_h;
typedef struct ucc_ee *ucc_ee_h;

/* The header's ucc_collective_test() reads this field inline; so do we. */
typedef struct ucc_coll_req {
    ucc_status_t status;
} ucc_coll_req_t;
typedef ucc_coll_req_t *ucc_coll_req_h;

typedef struct ucc_lib_params {
    uint64_t mask;
    int thread_mode;
    uint64_t coll_types;
    uint64_t reserved[10];
} ucc_lib_params_t;
typedef ucc_lib_params_t ucc_lib_attr_t;

typedef struct ucc_oob_coll {
    ucc_status_t (*allgather)(void *src, void *dst, size_t size, void *info, void **request);
    ucc_status_t (*req_test)(void *request);
    ucc_status_t (*req_free)(void *request);
    void *coll_info;
    uint32_t n_oob_eps;
    uint32_t oob_ep;
} ucc_oob_coll_t;

typedef struct ucc_context_params {
    uint64_t mask;
    int type;
    int sync_type;
    ucc_oob_coll_t oob;
    uint64_t reserved[11];
} ucc_context_params_t;

typedef struct ucc_context_attr {
    uint64_t mask;
    int type;
    int sync_type;
    void *ctx_addr;
    size_t ctx_addr_len;
    uint64_t reserved[9];
} ucc_context_attr_t;

typedef struct ucc_ep_map_array {
    void *map;
    size_t elem_size;
} ucc_ep_map_array_t;

typedef struct ucc_ep_map {
    int type;
    uint64_t ep_num;
    ucc_ep_map_array_t array;
} ucc_ep_map_t;

typedef struct ucc_team_params {
    uint64_t mask;
    uint64_t flags;
    uint64_t before_ep[2];
    uint64_t ep;
    uint64_t *ep_list;
    int ep_range;
    uint64_t before_map[14];
    ucc_ep_map_t ep_map;
    uint64_t id;
    uint64_t reserved[8];
} ucc_team_params_t;

typedef struct ucc_coll_buffer_info {
    void *buffer;
    uint64_t count;
    ucc_datatype_t datatype;
    int mem_type;
} ucc_coll_buffer_info_t;

typedef struct ucc_coll_buffer_info_v {
    void *buffer;
    uint64_t *counts;
    uint64_t *displacements;
    ucc_datatype_t datatype;
    int mem_type;
} ucc_coll_buffer_info_v_t;

typedef union ucc_coll_buffer {
    ucc_coll_buffer_info_t info;
    ucc_coll_buffer_info_v_t info_v;
} ucc_coll_buffer_t;

typedef struct ucc_coll_args {
    uint64_t mask;
    int coll_type;
    ucc_coll_buffer_t src;
    ucc_coll_buffer_t dst;
    int op;
    uint64_t flags;
    uint64_t root;
    int error_type;
    uint16_t tag;
    uint64_t reserved[25];
} ucc_coll_args_t;

typedef struct ucc_ev {
    int ev_type;
    void *ev_context;
    size_t ev_context_size;
    ucc_coll_req_h req;
} ucc_ev_t;

typedef struct ucc_ee_params {
    int ee_type;
    void *ee_context;
    size_t ee_context_size;
} ucc_ee_params_t;
