/* Internals shared by the C files of the native engine.
 *
 * One process-wide lock (progress.c) guards every call into libucc and libucp: UCX builds without multi-threading
 * assert otherwise, and with it nothing is gained by more than one thread inside. Functions named *_locked expect it.
 */
#ifndef UCCH_H
#define UCCH_H

#include "abi/calls.h"
#include "api/constants.h"

#include "api/api.h"

enum { UCCH_IDLE, UCCH_ACTIVE, UCCH_DONE, UCCH_FAILED };
enum { UCCH_IS_PROGRAM, UCCH_IS_MESSAGE, UCCH_IS_LAUNCH };

struct ucch_op {
    int kind;
    volatile int state;
    ucch_error error;
    double started;
    double deadline; /* 0 = none */
    int heard;       /* somebody listens for its end (wait.c) */
    int come;        /* a message of which the caller does the rest (rendezvous.c) */
    ucch_op *next, *prev;
};

struct ucch_context {
    ucc_context_h handle;
    int users; /* programs in flight that need it */
    ucch_context *next;
};

typedef struct ucch_step ucch_step;
typedef struct ucch_engine ucch_engine;

/* Collectives of one team are posted in the order in which programs were started on it, on every rank alike:
 * the queue holds the steps not yet posted. */
struct ucch_team {
    ucc_team_h handle;
    ucch_context *context;
    ucch_step *head, *tail;
    ucch_engine *engines; /* streams that calls on this team were launched into */
    int nengines;
};

double ucch_now(void);
int ucch_poll_contexts_locked(void);
int ucch_poll_all_locked(void);
int ucch_poll_workers_locked(void);
void ucch_op_begin_locked(ucch_op *op, double timeout);
void ucch_op_end_locked(ucch_op *op, int status, int step, int peer);
int ucch_program_advance_locked(ucch_program *program);
void ucch_program_abandon_locked(ucch_program *program);
void ucch_message_abandon_locked(ucch_message *message);
int ucch_message_check_locked(ucch_message *message, double now);
int ucch_message_send_locked(ucch_message *m, ucp_ep_h ep, const void *buffer, size_t bytes, uint64_t tag,
                             int mem_type);
int ucch_message_flush_locked(ucch_message *m, ucp_ep_h ep, double timeout);
int ucch_message_recv_locked(ucch_message *m, ucp_worker_h worker, void *buffer, size_t bytes, uint64_t tag,
                             int mem_type);
int ucch_message_expect_locked(ucch_message *m, ucp_worker_h worker, void *data, size_t bytes, uint64_t tag,
                               int on_device);
int ucch_message_pump_locked(ucch_message *m);
void ucch_board_own_label(ucch_board *board, uint64_t seq, char *label);
void ucch_board_blame(ucch_board *board, ucch_op *op);
int ucch_launches(void);
int ucch_launches_poll_locked(void);
void ucch_launches_police_locked(double now, double suspicion);
void ucch_engines_free(ucch_team *team);
int ucch_program_check_locked(ucch_program *program);

#endif
