/* Data between processes of one host through shared pinned memory; message.c says when. */
#ifndef UCCH_WINDOW_H
#define UCCH_WINDOW_H

#include "device.h"

/* What a sender tells the receiver: whose window, and which of its controls. */
typedef struct ucch_token {
    uint64_t bytes, piece;
    int32_t pid;
    uint32_t control;
} ucch_token;

typedef struct ucch_transfer ucch_transfer;

/* Either side's part in one message, for use again and again. */
ucch_transfer *ucch_transfer_new(void);
void ucch_transfer_free(ucch_transfer *t);
int ucch_transfer_offer_locked(ucch_transfer *t, const void *buffer, size_t bytes, int on_device, ucch_token *token);
int ucch_transfer_accept_locked(ucch_transfer *t, void *buffer, size_t room, int on_device, const ucch_token *token);
int ucch_transfer_pump_locked(ucch_transfer *t);
void ucch_transfer_abort_locked(ucch_transfer *t);
int ucch_transfer_busy_locked(ucch_transfer *t);
void ucch_token_decline_locked(const ucch_token *token);

#endif
