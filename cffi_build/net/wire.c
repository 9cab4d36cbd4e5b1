/* Wires: network threads that carry slots of rings between hosts (flow.c), with one UCX worker and one direction each:
 * a worker that sends and receives over TCP carries 2 GB/s each way, one with a single direction 5 GB/s.
 *
 * Wires access host memory only. Their UCX contexts have no device transports, every request states its memory type,
 * and nothing in this folder can call a driver. So a device's streams can wait for wires under any allocator. */
#include "net/net.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define MOST_WIRES (2 * UCCH_MOST_WIRES)
/* After its last work a thread polls this long before it sleeps until it is woken; while asleep it polls libucp this
 * often. */
#define BUSY_POLL_S 200e-6
#define IDLE_S 10e-3
/* The same where kernels hand over data without waking the thread: a graph is replayed again soon, or not for long. */
#define WATCH_POLL_S 1.0
#define WATCH_S 1e-3
/* The same for the other wires of such a flow. The first wire wakes them once it has seen a piece: waking them one by
 * one takes longer than sending it. */
#define RUNG_LATE_POLL_S 5e-3
/* While something is awaited: quiet time after which the thread naps between polls, and the longest nap. A nap is at
 * most NAP_SHARE of the quiet time, so it prolongs the wait by no more. Where other threads want the core (a yield took
 * longer than CROWDED_S, or a nap ended LATE_S late) it naps earlier and longer: a thread that polls every 50 us takes
 * a tenth of a core from the threads it waits for. */
#define PATIENCE_S 2e-3
#define LONGEST_NAP_S 50e-6
#define CROWDED_PATIENCE_S 50e-6
#define LONGEST_CROWDED_NAP_S 1e-3
#define CROWDED_S 3e-6
#define LATE_S 200e-6
#define CROWDED_TURNS 64
#define NAP_SHARE 0.25
#define SLACK_NS 2000
/* Yields of the thread between turns while other threads wait for its lock. */
#define LET_OTHERS 100

/* State of a thread, for threads that may wake it. */
enum { AWAKE, ASLEEP, WAKING };

/* Id of a wire's active messages. */
#define MESSAGES 1
/* Size of the table of pollers by tag, in bits. */
#define PLACE_BITS 6

struct ucch_wire {
    ucp_context_h context;
    ucp_worker_h worker;
    pthread_t thread;
    pthread_mutex_t lock, wake_lock;
    pthread_cond_t wake;
    int wanted, rung, state, stop;
    int eager;  /* send data at once: libucp has no faster protocol for this transport */
    int slower; /* this wire's port is slower than that of others */
    ucch_connection *connections;
    ucch_poller *pollers, *by_tag[1 << PLACE_BITS];
    ucch_early *early; /* messages that came before their pollers, by tag */
    cpu_set_t cores;   /* on which it runs */
};

static ucch_wire wires[MOST_WIRES];
static int nwires;
static pid_t owner;

void ucch_wire_lock(int wire) {
    ucch_wire *w = &wires[wire];
    __atomic_add_fetch(&w->wanted, 1, __ATOMIC_SEQ_CST);
    ucch_take(&w->lock, UCCH_AT_WIRE);
    __atomic_sub_fetch(&w->wanted, 1, __ATOMIC_SEQ_CST);
}

void ucch_wire_unlock(int wire) { ucch_give(&wires[wire].lock, UCCH_AT_WIRE); }

/* Note work for the thread; the caller then wakes it by ucch_wires_wake. */
void ucch_wire_mark(int wire) { __atomic_store_n(&wires[wire].rung, 1, __ATOMIC_SEQ_CST); }

/* Wake a thread. Returns 1, or 0 if it is awake or another thread is waking it. */
static int wake(ucch_wire *w) {
    int state = ASLEEP;
    if (!__atomic_compare_exchange_n(&w->state, &state, WAKING, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
    pthread_mutex_lock(&w->wake_lock);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->wake_lock);
    return 1;
}

/* Wake up to `most` sleeping threads that have work, from that of `wire` on. Each of them wakes two more: the caller
 * would need some microseconds per thread, and long calls use up to 24. */
void ucch_wires_wake(int wire, int most) {
    int n = UCCH_LOAD(&nwires);
    for (int i = 0; i < n && most; i++) {
        ucch_wire *w = &wires[(wire + i) % n];
        if (__atomic_load_n(&w->rung, __ATOMIC_SEQ_CST)) most -= wake(w);
    }
}

/* Note work for the thread, and wake it. */
void ucch_wire_wake(int wire) {
    ucch_wire_mark(wire);
    wake(&wires[wire]);
}

ucp_context_h ucch_wire_context(int wire) { return wires[wire].context; }

ucp_worker_h ucch_wire_worker(int wire) { return wires[wire].worker; }

int ucch_wire_slower(int wire) { return wires[wire].slower; }

/* ---- the thread ---- */

/* Sleep until woken, at most `seconds`. */
static void idle_wait(ucch_wire *w, double seconds) {
    pthread_mutex_lock(&w->wake_lock);
    __atomic_store_n(&w->state, ASLEEP, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&w->rung, __ATOMIC_SEQ_CST) && !__atomic_load_n(&w->stop, __ATOMIC_SEQ_CST))
        ucch_cond_wait(&w->wake, &w->wake_lock, seconds);
    __atomic_store_n(&w->state, AWAKE, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&w->wake_lock);
}

/* Between two turns, `quiet` seconds after the last progress: yield, or nap if that would keep other threads from the
 * core. */
static void rest(double now, double quiet) {
    static _Thread_local int crowded;
    double longest = crowded ? LONGEST_CROWDED_NAP_S : LONGEST_NAP_S, share = NAP_SHARE * quiet, nap = 0;
    if (ucch_naps_instead())
        nap = share < UCCH_QUICK_NAP_S ? UCCH_QUICK_NAP_S : share;
    else if (quiet > (crowded ? CROWDED_PATIENCE_S : PATIENCE_S))
        nap = share;
    nap = nap < longest ? nap : longest;
    if (nap > 0)
        nanosleep(&(struct timespec){0, (long)(1e9 * nap)}, NULL);
    else
        sched_yield();
    double end = ucch_now();
    if (nap == 0) ucch_note_yield(now, end);
    if (end - now - nap > (nap > 0 ? LATE_S : CROWDED_S))
        crowded = CROWDED_TURNS;
    else if (crowded)
        crowded--;
}

static int turn(ucch_wire *w) {
    int found = 0;
    ucch_take(&w->lock, UCCH_AT_WIRE);
    __atomic_store_n(&w->rung, 0, __ATOMIC_SEQ_CST);
    if (ucp_worker_progress(w->worker)) found |= UCCH_MOVED;
    for (ucch_poller *p = w->pollers; p; p = p->next)
        found |= p->turn(p);
    ucch_give(&w->lock, UCCH_AT_WIRE);
    return found;
}

static void *wire_main(void *at) {
    ucch_wire *w = at;
    int number = (int)(w - wires);
    double moved = ucch_now();
    sched_setaffinity(0, sizeof(w->cores), &w->cores); /* launchers bind a rank to one core */
    prctl(PR_SET_NAME, "ucch-wire");
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    while (!__atomic_load_n(&w->stop, __ATOMIC_SEQ_CST)) {
        int found = turn(w);
        for (int i = 0; i < LET_OTHERS && __atomic_load_n(&w->wanted, __ATOMIC_SEQ_CST); i++)
            sched_yield();
        double now = ucch_now(), linger = found & UCCH_WATCHED     ? WATCH_POLL_S
                                          : found & UCCH_RUNG_LATE ? RUNG_LATE_POLL_S
                                                                   : BUSY_POLL_S;
        if (found & UCCH_MOVED)
            moved = now;
        else if (found & UCCH_AWAITED || now - moved < linger)
            rest(now, now - moved);
        else {
            idle_wait(w, found & UCCH_WATCHED ? WATCH_S : IDLE_S);
            int rung = __atomic_load_n(&w->rung, __ATOMIC_SEQ_CST);
            if (rung) ucch_wires_wake(number, 2);
            moved = ucch_now() - (rung ? 0 : linger);
        }
    }
    return NULL;
}

/* ---- messages ---- */

static ucch_poller **place_of(ucch_wire *w, uint64_t tag) {
    return &w->by_tag[tag * 0x9e3779b97f4a7c15u >> (64 - PLACE_BITS)];
}

/* Sending and receiving wires alternate. */
static int is_receiver(const ucch_wire *w) { return (w - wires) % 2 == 1; }

/* Called by libucp in ucp_worker_progress. */
static ucs_status_t on_active_message(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
                                      const ucp_am_recv_param_t *param) {
    ucch_wire *w = arg;
    uint64_t tag;
    ucch_packet m = {header, header_bytes, data, bytes, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0};
    if (header_bytes < sizeof(tag)) return UCS_OK;
    memcpy(&tag, header, sizeof(tag));
    ucch_poller *p = *place_of(w, tag);
    while (p && p->tag != tag)
        p = p->same;
    if (p) return p->on_message(p, &m);
    /* A message to a sender that does not exist is for one that has gone. A receiver may come to exist. If it never
     * does, because a call has failed here before it made its ring, the message is kept until the process ends, like
     * the communicator's rings (channels.py): the peer may still send, at most what it has in flight. */
    if (!is_receiver(w) || tag & UCCH_WIRE_EXPECTED) return UCS_OK;
    if (!ucch_early_keep(&w->early, tag, &m, INT_MAX)) return UCS_ERR_NO_MEMORY;
    return m.is_later ? UCS_INPROGRESS : UCS_OK;
}

/* Send a message like ucp_am_send_nbx; with the wire's lock. */
ucs_status_ptr_t ucch_wire_send(int wire, ucp_ep_h ep, const void *header, size_t header_bytes, const void *data,
                                size_t bytes, ucp_request_param_t *params) {
    if (wires[wire].eager) {
        params->op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        params->flags = UCP_AM_SEND_FLAG_EAGER;
    }
    return ucp_am_send_nbx(ep, MESSAGES, header, header_bytes, data, bytes, params);
}

/* ---- start and end of wires ---- */

static int start(ucch_wire *w, ucp_context_h context) {
    ucp_worker_params_t params = {.field_mask = 0x1, .thread_mode = 1}; /* one thread at a time */
    int status = ucp_worker_create(context, &params, &w->worker);
    w->context = context;
    if (status) return status;
    status = ucch_ucp_listen(w->worker, MESSAGES, (void *)on_active_message, w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->wake_lock, NULL);
    ucch_cond_init(&w->wake);
    if (!status && !pthread_create(&w->thread, NULL, wire_main, w)) return 0;
    ucp_worker_destroy(w->worker);
    return status ?: UCCH_FAIL_MEMORY;
}

/* Start a wire in its own UCX context on these cores. Returns its number or a failure. A child after fork starts again
 * from 0. `eager`: it sends all data at once. `slower`: its port is slower than that of other wires. */
int ucch_wire_new(ucp_context_h context, int eager, int slower, const int *cores, int ncores) {
    if (owner != getpid()) {
        nwires = 0;
        memset(wires, 0, sizeof(wires));
        owner = getpid();
    }
    if (nwires == MOST_WIRES) return UCCH_FAIL_MEMORY;
    wires[nwires].eager = eager;
    wires[nwires].slower = slower;
    CPU_ZERO(&wires[nwires].cores);
    for (int i = 0; i < ncores; i++)
        CPU_SET(cores[i], &wires[nwires].cores);
    return start(&wires[nwires], context) ?: __atomic_fetch_add(&nwires, 1, __ATOMIC_RELEASE);
}

/* The address for peers that connect to this wire, for ucch_wire_release_address. Returns 0 or a failure. */
int ucch_wire_address(int wire, void **address, size_t *bytes) {
    ucch_wire_lock(wire);
    int status = ucp_worker_get_address(wires[wire].worker, address, bytes);
    ucch_wire_unlock(wire);
    return status;
}

void ucch_wire_release_address(int wire, void *address) { ucp_worker_release_address(wires[wire].worker, address); }

/* Stop the thread before the process ends. Its worker is kept: if it were destroyed, the peers' threads would see
 * closed connections as errors, and libucp would print them. */
void ucch_wire_stop(int wire) {
    if (owner != getpid()) return;
    __atomic_store_n(&wires[wire].stop, 1, __ATOMIC_SEQ_CST);
    ucch_wire_wake(wire);
    pthread_join(wires[wire].thread, NULL);
}

/* ---- peers ---- */

static void lost(void *arg, ucp_ep_h ep, ucs_status_t status) { UCCH_STORE(&((ucch_connection *)arg)->failed, 1); }

/* The working connection with a process; NULL if there is none. */
ucch_connection *ucch_wire_connection(int wire, uint64_t key) {
    ucch_connection *c = wires[wire].connections;
    while (c && (c->key != key || UCCH_LOAD(&c->failed)))
        c = c->next;
    return c;
}

/* Connect with a wire of another process at this address, unless connected. Returns 0 or a failure. */
int ucch_wire_connect(int wire, uint64_t key, const void *address) {
    ucch_wire *w = &wires[wire];
    int status = 0;
    ucch_wire_lock(wire);
    if (!ucch_wire_connection(wire, key)) {
        ucch_connection *c = calloc(1, sizeof(*c));
        status = c ? ucch_ucp_connect(w->worker, address, lost, c, &c->ep) : UCCH_FAIL_MEMORY;
        if (status)
            free(c);
        else {
            c->key = key;
            c->next = w->connections;
            w->connections = c;
        }
    }
    ucch_wire_unlock(wire);
    return status;
}

/* ---- pollers ---- */

/* Add a poller, and give it the messages that came before; with the wire's lock. */
void ucch_wire_add_poller(int wire, ucch_poller *poller) {
    ucch_wire *w = &wires[wire];
    ucch_poller **place = place_of(w, poller->tag);
    poller->next = w->pollers;
    w->pollers = poller;
    poller->same = *place;
    *place = poller;
    for (ucch_packet *m; (m = ucch_early_take(&w->early, poller->tag)); free(m))
        poller->on_message(poller, m);
}

/* Remove a poller; with the wire's lock. */
void ucch_wire_remove_poller(int wire, ucch_poller *poller) {
    UCCH_UNLINK(wires[wire].pollers, poller, next);
    UCCH_UNLINK(*place_of(&wires[wire], poller->tag), poller, same);
}
