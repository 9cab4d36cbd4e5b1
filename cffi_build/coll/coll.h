/* Programs and their steps: built and run in program.c. */
#pragma once
#include "p2p/p2p.h"

#define UCC_OK 0
#define UCC_INPROGRESS 1
#define FLAG_PERSISTENT 0x2
#define MASK_FLAGS 0x1
#define MASK_TAG 0x2
/* Bits of a tag that hold a hash of the call (its salt), so that unlike calls on two hosts have different tags; in the
 * tag of a message half of these bits are at SALT_BIT. */
#define SALT_BITS 10
/* Tag of a collective between hosts: the bits that libucc offers, and those left beside the salt for the collective's
 * number. */
#define TAG_BITS 15
#define NUMBER_BITS (TAG_BITS - SALT_BITS)
#define SALT_BIT 45

enum { WAITING, POSTED, FINISHED };

typedef struct ucch_step ucch_step;
typedef struct ucch_launch ucch_launch;
typedef struct ucch_engine ucch_engine;

struct ucch_team {
    ucc_team_h handle;
    ucch_context *context;
    ucch_step *head;      /* steps that wait for their turn to be posted */
    ucch_engine *engines; /* one per stream that calls on this team were launched into */
    int nengines;
    /* Team on several hosts: a bitmap of the tags in use, and the number of tags given out. */
    uint64_t *tags;
    uint16_t number;
};

struct ucch_step {
    ucch_part is;
    int state;
    ucch_program *program;
    ucch_step *next; /* in the team's queue */
    ucc_coll_args_t args;
    ucc_coll_req_h request;
    ucch_message *message;
    ucch_exchange exchange;
    ucch_work *work; /* a local step of a program on device memory */
    uint64_t event;  /* in the timeline */
    int errors;      /* endpoint errors of this process when the step was posted */
    /* Program queued in streams, in the call being made: the step's position, pieces of its message left to queue, and
     * the event that other streams wait for, if any. */
    int turn, marked;
    uint64_t left;
    void *end;
};

static inline int ucch_step_is_message(const ucch_step *s) {
    return s->is.kind == UCCH_STEP_SEND || s->is.kind == UCCH_STEP_RECV;
}

/* Buffer that a message sends from or receives into. */
static inline const ucch_span *ucch_step_span(const ucch_step *s) {
    return s->is.kind == UCCH_STEP_SEND ? &s->is.src : &s->is.dst;
}

struct ucch_program {
    ucch_op op;   /* first, so that a program can be cast to an op */
    ucch_spec is; /* all but the label, which is in `about` */
    int nsteps, first;
    char *base[3];
    int persistent;
    ucch_channels *channels; /* set where the whole program is queued in streams (schedule.c) */
    ucch_launch *queued;     /* the call in streams that is under way, if any */
    void *fused;             /* kernel that runs a whole short call, if there is one */
    int sliced;              /* several blocks can share that kernel's work (fused.c) */
    size_t element;          /* bytes of an element of the reduction */
    int reserved;            /* rings for its messages are reserved */
    double timeout;          /* for each start of a persistent program */
    ucch_gate gate;
    ucch_board *board;
    ucch_record about;           /* the call's label, signature and bytes */
    int deferred, deferred_step; /* between hosts: status and step of a failure whose cause is not known yet */
    double deferred_since;
    ucch_step steps[];
};

/* Streams and channels that the steps of a queued program use. */
int ucch_stream_of(const ucch_step *s);
int ucch_step_goes_first(const ucch_step *s);
ucch_channel *ucch_step_channel(const ucch_channels *c, const ucch_step *s);
size_t ucch_piece_of(const ucch_channels *c, const ucch_step *s);
int ucch_step_reserve(ucch_channels *c, const ucch_step *s);

char *ucch_step_address(const ucch_program *p, const ucch_span *span);
size_t ucch_step_bytes(ucc_datatype_t dtype, uint64_t count);
void ucch_step_task(const ucch_program *p, const ucch_step *s, ucch_task *task);
int ucch_step_init_locked(ucch_program *p, ucch_step *s);
int ucch_step_post_locked(ucch_program *p, ucch_step *s);
int ucch_step_poll_locked(ucch_program *p, ucch_step *s);

void ucch_team_enqueue_locked(ucch_step *s);
void ucch_team_leave_locked(ucch_step *s);
int ucch_tag_is_free_locked(const ucch_step *s);
int ucch_team_init_requests_locked(ucch_team *team);
int ucch_team_engine_locked(ucch_team *t, void *stream, int may_drop, ucc_ee_h *handle);
int ucch_team_post_locked(ucc_ee_h engine, ucc_coll_req_h request);
void ucch_request_drop_locked(ucc_coll_req_h request, int on_device);

int ucch_program_aliased(const ucch_program *p, uintptr_t send, uintptr_t recv);
int ucch_program_enter_locked(const ucch_program *p, ucch_op *op, const ucch_record *about, double timeout, int *peer);

/* Calls in streams: a launch from begin to end (stream_executor.c), and the code that queues its work (schedule.c). */

struct ucch_launch {
    ucch_op op; /* first, so that a launch can be cast to an op */
    int released, n;
    int queueing; /* its steps are being queued: the progress thread must not collect it yet */
    int alone;    /* no other launch was under way when it began */
    ucch_board *board;
    ucch_record about;       /* like a program's */
    ucch_program *parent;    /* program whose caller waits for it in place of this launch, or NULL */
    ucch_channels *channels; /* channels that it is queued through, or NULL */
    uint64_t call;           /* its number in `channels`; 0: none yet */
    struct {
        ucc_coll_req_h request;
        ucch_context *context;
        uint64_t event;
    } each[];
};

int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream);

/* schedule.c: queues a whole program in streams */
int ucch_enqueue_scratch(ucch_program *p);
int ucch_enqueue(ucch_program *p, ucch_launch *l, void *stream);
int ucch_post_steps_locked(ucch_program *p, ucch_launch *l, void *stream);

/* fused.c: runs a whole short call in one kernel */
int ucch_fused_add(ucch_moves *w, ucch_move m);
void ucch_fused_join(const ucch_program *p, ucch_moves *w);
int ucch_fused_fits(const ucch_program *p, uint64_t moved);
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int independent, void *stream);
int ucch_fused_sliced(const ucch_program *p);
