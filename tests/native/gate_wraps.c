/* A gate whose program has run 2^32 - 2 times, over a runtime whose streams compare words without wrapping. */
#include "gpu/gate.c"

#include <assert.h>
#include <stdio.h>

static uint32_t memory[64], waited_for, *waited_at;
static int used;

static int flag(void **word) {
    *word = &memory[used++];
    return 0;
}

static int stream_hold(void *stream, void *word, uint32_t least) {
    waited_at = word;
    waited_for = least;
    return 0;
}

static const device_ops ops = {.flag = flag, .stream_hold = stream_hold};

const device_ops *ucch_bound_ops(void) { return &ops; }
int ucch_bound(void) { return 0; }
int ucch_device_fail(int code, const char *what) { return code; }
int ucch_event_ask(void *event, int *done, double *again) { return 0; }
int ucch_event_record(void **event, void *stream) { return 0; }
void ucch_hold_locked(int more) {}

int main(void) {
    ucch_gate gate = {0};
    assert(ucch_gate_hold(&gate, NULL));
    ucch_gate_leave_locked(&gate);
    gate.out.ticket = UINT32_MAX - 2;
    *gate.out.at = UINT32_MAX - 2;
    for (int call = 0; call < 4; call++) {
        assert(ucch_gate_hold(&gate, NULL));
        if (*waited_at >= waited_for) {
            printf("call %d: the stream would go on at once: %u >= %u\n", call, *waited_at, waited_for);
            return 1;
        }
        ucch_gate_leave_locked(&gate);
        assert(*waited_at >= waited_for);
    }
    gate.out.ticket = UINT32_MAX;
    ucch_gate_free(&gate); /* no gate gets that word again */
    ucch_gate other = {0};
    assert(ucch_gate_hold(&other, NULL) && *waited_at < waited_for);
    return 0;
}
