/* Network threads that carry the slots of rings between hosts (flow.c): one worker and one direction each, as a worker
 * that sends and receives over TCP carries 2 GB/s each way and one with a single direction 5.
 *
 * They see host memory only. Their UCX contexts have no transport of a device's, every request names the kind of its
 * memory, and nothing in this folder can call a driver: so a device's streams may wait for them, under any allocator.
 */
#define _GNU_SOURCE
#include "net/net.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define MOST_WIRES (2 * UCCH_MOST_WIRES)
/* After its last work a thread looks for more this long before it sleeps until it is rung, and with nothing under way
 * looks this often at what libucp may want to do. */
#define BUSY_POLL_S 200e-6
#define IDLE_S 10e-3
/* Lingering and looks where devices hand over data without a word to it: graphs are replayed soon again, or not for
 * long. */
#define WATCH_POLL_S 1.0
#define WATCH_S 1e-3
/* Lingering of the other wires of such a flow, which the first one rings once it has seen a piece: to wake them one by
 * one takes longer than to send it. */
#define RUNG_LATE_POLL_S 5e-3
/* With something under way: the quiet after which it naps between turns, and how long, NAP_SHARE of the quiet at most,
 * so that a wait is prolonged by no more. Where other threads want the core, as a yield that took longer than CROWDED_S
 * or a nap that ended LATE_S late tells, it does so earlier and for longer: a thread that looks every 50 us takes a
 * tenth of a core from those it waits for. */
#define PATIENCE_S 2e-3
#define LONGEST_NAP_S 50e-6
#define CROWDED_PATIENCE_S 50e-6
#define LONGEST_CROWDED_NAP_S 1e-3
#define CROWDED_S 3e-6
#define LATE_S 200e-6
#define CROWDED_TURNS 64
#define NAP_SHARE 0.25
#define SLACK_NS 2000
/* Yields of the thread, so that threads that wait for its lock get it. */
#define LET_OTHERS 100

/* A thread, as those see it that have work for it. */
enum { AWAKE, ASLEEP, WAKING };

/* Number of the active messages of a wire, and what libucp says of them. */
#define MESSAGES 1
#define WHOLE 1
#define SEND_EAGER 2
#define IS_RNDV (1u << 17)
/* Places by which pollers are found, by their tags. */
#define PLACE_BITS 6

/* Message that came before the poller it is for; its data is a copy, unless it is still at the sender. */
typedef struct early {
    ucch_packet message;
    uint64_t tag;
    struct early *next;
    char copy[];
} early;

struct ucch_wire {
    ucp_context_h context;
    ucp_worker_h worker;
    pthread_t thread;
    pthread_mutex_t lock, wake_lock;
    pthread_cond_t wake;
    int wanted, rung, state, stop;
    int eager;  /* sends data at once: libucp has no faster way by its transports */
    int slower; /* than others, as its port is */
    ucch_connection *connections;
    ucch_poller *pollers, *by_tag[1 << PLACE_BITS];
    early *early;
    cpu_set_t cores; /* that it runs on */
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

/* There is work for its thread, which is to be woken by ucch_wires_wake. */
void ucch_wire_mark(int wire) { __atomic_store_n(&wires[wire].rung, 1, __ATOMIC_SEQ_CST); }

/* Wake a thread that sleeps: 1, or 0 where it does not, or another thread wakes it. */
static int wake(ucch_wire *w) {
    int state = ASLEEP;
    if (!__atomic_compare_exchange_n(&w->state, &state, WAKING, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
    pthread_mutex_lock(&w->wake_lock);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->wake_lock);
    return 1;
}

/* Wake up to `most` of the threads that sleep and have work, from that of a wire on. Each of them wakes two more: a
 * caller would take some microseconds for each, and long calls have up to 24. */
void ucch_wires_wake(int wire, int most) {
    int n = UCCH_LOAD(&nwires);
    for (int i = 0; i < n && most; i++) {
        ucch_wire *w = &wires[(wire + i) % n];
        if (__atomic_load_n(&w->rung, __ATOMIC_SEQ_CST)) most -= wake(w);
    }
}

/* There is work for its thread. */
void ucch_wire_wake(int wire) {
    ucch_wire_mark(wire);
    wake(&wires[wire]);
}

ucp_context_h ucch_wire_context(int wire) { return wires[wire].context; }

ucp_worker_h ucch_wire_worker(int wire) { return wires[wire].worker; }

int ucch_wire_slower(int wire) { return wires[wire].slower; }

/* ---- the thread ---- */

/* Sleep until rung, for so long at most. */
static void idle_wait(ucch_wire *w, double seconds) {
    pthread_mutex_lock(&w->wake_lock);
    __atomic_store_n(&w->state, ASLEEP, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&w->rung, __ATOMIC_SEQ_CST) && !__atomic_load_n(&w->stop, __ATOMIC_SEQ_CST))
        ucch_cond_wait(&w->wake, &w->wake_lock, seconds);
    __atomic_store_n(&w->state, AWAKE, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&w->wake_lock);
}

/* Between two turns, `quiet` seconds after something moved: yield, or nap where that keeps others from the core. */
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

static void *serve(void *at) {
    ucch_wire *w = at;
    int number = (int)(w - wires);
    double moved = ucch_now();
    sched_setaffinity(0, sizeof(w->cores), &w->cores); /* launchers bind a rank to one */
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

/* Each wire that sends is followed by one that receives. */
static int is_receiver(const ucch_wire *w) { return (w - wires) % 2 == 1; }

/* Keep a message until there is a poller for it. Where that never comes, as a call has failed here before it made its
 * ring, the message stays until the process ends, and so do the communicator's rings (channels.py): who sends may still
 * send, and what has come is at most what it has on its way. */
static ucs_status_t keep(ucch_wire *w, uint64_t tag, const ucch_packet *m) {
    size_t bytes = m->is_later ? 0 : m->bytes;
    early *l = malloc(sizeof(*l) + m->header_bytes + bytes);
    if (!l) return UCS_ERR_NO_MEMORY;
    *l = (early){.message = *m, .tag = tag};
    l->message.header = memcpy(l->copy, m->header, m->header_bytes);
    if (!m->is_later) l->message.data = l->copy + m->header_bytes;
    if (bytes) memcpy(l->message.data, m->data, bytes);
    l->next = w->early;
    w->early = l;
    return m->is_later ? UCS_INPROGRESS : UCS_OK;
}

/* Called by libucp, in its progress. */
static ucs_status_t come(void *arg, const void *header, size_t header_bytes, void *data, size_t bytes,
                         const ucp_am_recv_param_t *param) {
    ucch_wire *w = arg;
    uint64_t tag;
    ucch_packet m = {header, header_bytes, data, bytes, (param->recv_attr & IS_RNDV) != 0};
    if (header_bytes < sizeof(tag)) return UCS_OK;
    memcpy(&tag, header, sizeof(tag));
    ucch_poller *p = *place_of(w, tag);
    while (p && p->tag != tag)
        p = p->same;
    if (p) return p->come(p, &m);
    /* What comes back to a sender that is not there is for one that has gone. */
    return is_receiver(w) && !(tag & UCCH_WIRE_EXPECTED) ? keep(w, tag, &m) : UCS_OK;
}

/* With the wire's lock: send a message, as libucp's ucp_am_send_nbx does. */
ucs_status_ptr_t ucch_wire_send(int wire, ucp_ep_h ep, const void *header, size_t header_bytes, const void *data,
                                size_t bytes, ucp_request_param_t *params) {
    if (wires[wire].eager) {
        params->op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        params->flags = SEND_EAGER;
    }
    return ucp_am_send_nbx(ep, MESSAGES, header, header_bytes, data, bytes, params);
}

/* ---- making and ending wires ---- */

static int start(ucch_wire *w, ucp_context_h context) {
    ucp_am_handler_param_t messages = {.field_mask = 0xf, .id = MESSAGES, .flags = WHOLE, .cb = come, .arg = w};
    ucp_worker_params_t params = {.field_mask = 0x1, .thread_mode = 1}; /* one thread at a time */
    int status = ucp_worker_create(context, &params, &w->worker);
    w->context = context;
    if (status) return status;
    status = ucp_worker_set_am_recv_handler(w->worker, &messages);
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->wake_lock, NULL);
    ucch_cond_init(&w->wake);
    if (!status && !pthread_create(&w->thread, NULL, serve, w)) return 0;
    ucp_worker_destroy(w->worker);
    return status ?: UCCH_FAIL_MEMORY;
}

/* One more wire, in a UCX context and on cores of its own: its number, or a failure. Those of a parent are not a
 * child's. `eager`: it sends all data at once. `slower`: than others, as its port is. */
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

/* Its address, for peers that connect to it; to be given back to libucp. 0, or a failure. */
int ucch_wire_address(int wire, void **address, size_t *bytes) {
    ucch_wire_lock(wire);
    int status = ucp_worker_get_address(wires[wire].worker, address, bytes);
    ucch_wire_unlock(wire);
    return status;
}

void ucch_wire_forget(int wire, void *address) { ucp_worker_release_address(wires[wire].worker, address); }

/* Stop the thread; the process is about to end. Its worker stays: to close connections that the peers' threads still
 * look at would be an error to them, and libucp would print it. */
void ucch_wire_stop(int wire) {
    if (owner != getpid()) return;
    __atomic_store_n(&wires[wire].stop, 1, __ATOMIC_SEQ_CST);
    ucch_wire_wake(wire);
    pthread_join(wires[wire].thread, NULL);
}

/* ---- peers ---- */

static void lost(void *arg, ucp_ep_h ep, ucs_status_t status) { UCCH_STORE(&((ucch_connection *)arg)->failed, 1); }

/* The connection with a process that has not broken; NULL without one. */
ucch_connection *ucch_wire_connection(int wire, uint64_t key) {
    ucch_connection *c = wires[wire].connections;
    while (c && (c->key != key || UCCH_LOAD(&c->failed)))
        c = c->next;
    return c;
}

/* Connect a wire with one of another process's, which has this address, once: 0, or a failure. */
int ucch_wire_meet(int wire, uint64_t key, const void *address) {
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

/* With the wire's lock: have its thread look after a poller, which gets what has come for it. */
void ucch_wire_serve(int wire, ucch_poller *poller) {
    ucch_wire *w = &wires[wire];
    ucch_poller **place = place_of(w, poller->tag);
    poller->next = w->pollers;
    w->pollers = poller;
    poller->same = *place;
    *place = poller;
    for (early **at = &w->early, *l; (l = *at);) {
        if (l->tag != poller->tag) {
            at = &l->next;
            continue;
        }
        *at = l->next;
        poller->come(poller, &l->message);
        free(l);
    }
}

/* With the wire's lock. */
void ucch_wire_dismiss(int wire, ucch_poller *poller) {
    UCCH_UNLINK(wires[wire].pollers, poller, next);
    UCCH_UNLINK(*place_of(&wires[wire], poller->tag), poller, same);
}
