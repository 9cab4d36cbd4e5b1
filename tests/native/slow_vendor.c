/* The example's device (examples/own_vendor.c) with allocations that wait at a gate. */
#define ucch_adapter plain
#include "own_vendor.c"
#undef ucch_adapter

static _Atomic int closed, waiting;

void gate(int close) { closed = close; }

int at_gate(void) { return waiting; }

static int slow_alloc(void **address, size_t bytes) {
    waiting = 1;
    while (closed)
        usleep(LOOK_US);
    waiting = 0;
    return sim_alloc(address, bytes);
}

device_adapter ucch_adapter;

__attribute__((constructor)) static void fill(void) {
    memcpy(&ucch_adapter, &plain, sizeof(plain));
    ucch_adapter.ops.alloc = slow_alloc;
}
