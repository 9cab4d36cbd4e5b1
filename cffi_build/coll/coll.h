/* Programs and their steps: built and run in program.c. */
#pragma once
#include "p2p/p2p.h"

#define UCC_OK 0
#define UCC_INPROGRESS 1
#define FLAG_PERSISTENT 0x2
#define MASK_FLAGS 0x1
#define MASK_TAG 0x2
/* Of a call between hosts, by which tags of unlike calls differ; and where a message's has half of them. */
#define SALT_BITS 10
/* Of the tag of a collective between hosts: what libucc has, and what is left of them for a number. */
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
    ucch_step *head;      /* of the queue */
    ucch_engine *engines; /* streams that calls on this team were launched into */
    int nengines;
    /* Of a team on several hosts: a bit for each tag that is in use, and how many were given out. */
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
    uint64_t event;  /* of the timeline */
    int errors;      /* of endpoints, in this process, when it was posted */
    /* Of a program that is queued in streams: in the call being made the step's turn, and pieces left; and the event
     * that other streams wait for, if one does. */
    int turn, marked;
    uint64_t left;
    void *end;
};

static inline int ucch_step_is_message(const ucch_step *s) {
    return s->is.kind == UCCH_STEP_SEND || s->is.kind == UCCH_STEP_RECV;
}

/* What a message sends, or where it is received. */
static inline const ucch_span *ucch_step_span(const ucch_step *s) {
    return s->is.kind == UCCH_STEP_SEND ? &s->is.src : &s->is.dst;
}

struct ucch_program {
    ucch_op op;   /* first: a program is an op */
    ucch_spec is; /* but for its label, which is in `about` */
    int nsteps, first;
    char *base[3];
    int persistent;
    ucch_channels *channels; /* the whole program is queued in streams (schedule.c) */
    ucch_launch *queued;     /* the call under way, if that is */
    void *fused;             /* the kernel that does all of a short call, if there is one */
    int sliced;              /* and by several blocks (fused.c) */
    size_t element;          /* bytes of what it computes with */
    int reserved;            /* its messages have rings */
    double timeout;          /* of a persistent program's starts */
    ucch_gate gate;
    ucch_board *board;
    ucch_record about;           /* the call's label, signature and bytes */
    int deferred, deferred_step; /* between hosts: how a step failed, while it is not known why */
    double deferred_since;
    ucch_step steps[];
};

/* Where steps go that are queued in streams. */
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
int ucch_team_make_locked(ucch_team *team);
int ucch_team_engine_locked(ucch_team *t, void *stream, int may_drop, ucc_ee_h *handle);
int ucch_team_post_locked(ucc_ee_h engine, ucc_coll_req_h request);
void ucch_request_drop_locked(ucc_coll_req_h request, int on_device);

int ucch_program_enter_locked(const ucch_program *p, ucch_op *op, const ucch_record *about, double timeout, int *peer);

/* Calls in streams: a launch from its beginning to its end (stream_executor.c), and what puts it into streams. */

struct ucch_launch {
    ucch_op op; /* first: a launch is an op */
    int released, n;
    int queueing; /* its steps are being put into streams: not to be collected */
    int alone;    /* no other is under way */
    ucch_board *board;
    ucch_record about;       /* as a program's */
    ucch_program *parent;    /* a program whose caller waits for it, not for the launch */
    ucch_channels *channels; /* those it went through */
    uint64_t call;           /* its number there, once it has one; 0: none */
    struct {
        ucc_coll_req_h request;
        ucch_context *context;
        uint64_t event;
    } each[];
};

int ucch_program_queue(ucch_program *p, void *send, void *recv, double timeout, void *stream);

/* schedule.c: a whole program into streams at once */
int ucch_enqueue_scratch(ucch_program *p);
int ucch_enqueue(ucch_program *p, ucch_launch *l, void *stream);
int ucch_post_steps_locked(ucch_program *p, ucch_launch *l, void *stream);

/* fused.c: all of a short call in one kernel */
int ucch_fused_add(ucch_moves *w, ucch_move m);
void ucch_fused_join(const ucch_program *p, ucch_moves *w);
int ucch_fused_fits(const ucch_program *p, uint64_t moved);
int ucch_fused_launch(const ucch_program *p, ucch_moves *w, int apart, void *stream);
int ucch_fused_sliced(const ucch_program *p);
