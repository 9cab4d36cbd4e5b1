/* The exchange between ranks of a communicator that spans hosts, over the links of link.c: which calls each rank makes,
 * and which ranks are gone.
 *
 * Each rank has a link to at least one rank of each neighbouring host, and to some of its own host. Ten times a second
 * it sends hashes of its calls over each link and compares those that arrive with its own. A rank that finds a call
 * that differs, or learns that a rank is gone, sends an event to all linked ranks, which forward it: all ranks know
 * within a moment. A rank that waits long in a call tells only its linked ranks of other hosts, which do not forward
 * that: their own hosts may wait for it in another communicator. Once it has waited for UCCH_HEARTBEAT five times, it
 * has all ranks probe their links to its host. */
#include <stdlib.h>
#include <string.h>

#include "net/net.h"

#define SEEN UCCH_CALLS_SEEN
/* Most hashes in one message, and messages with hashes per turn and link. */
#define HASHES_PER_MESSAGE 2048
#define MESSAGES_PER_TURN 4
/* Most differing reports of calls that are kept. */
#define MOST_REPORTS 8
/* Seconds in a call after which a rank tells its peers that it waits, and between two probes of links meanwhile. */
#define LONG_WAIT_S 1.0

/* Seconds between two requests for probes of the links to a host, and for which a request is valid. */
#define ASK_S 2.0
#define ASKED_S 5.0

enum { CALLS = 2, REPORT, GONE, WAITS, CUT, PROBE };

typedef struct calls {
    uint64_t first, count;
    uint32_t hashes[HASHES_PER_MESSAGE];
} calls;
_Static_assert(sizeof(calls) <= UCCH_LINK_BYTES, "a message has room for hashes");

/* A call as a rank made it. */
typedef struct report {
    uint64_t call;
    int32_t rank;
    uint32_t hash;
    char text[UCCH_REFUSAL_BYTES]; /* the call's label, or why it was refused */
} report;

typedef struct gone {
    uint64_t last, failed; /* last: the last call that the rank made; failed: the first call that failed there, or 0 */
    int32_t rank, fate;
} gone;

/* A cut link between the hosts of two ranks; if `link` is empty, a connection between the two ranks that libucp has
 * given up. */
typedef struct cut {
    int32_t from, to;
    char link[UCCH_PATH_BYTES];
} cut;

/* The call that a rank has been in for a while. Call 0: it waits no longer. */
typedef struct waits {
    uint64_t call;
    double seconds;
    char label[UCCH_LABEL_BYTES];
} waits;

/* A rank that has waited long for other hosts, which are to probe their links to its host. */
typedef struct probe {
    int32_t rank;
} probe;

/* Lengths of messages whose kind has a fixed one. */
static const size_t message_bytes[] = {[REPORT] = sizeof(report),
                                       [GONE] = sizeof(gone),
                                       [WAITS] = sizeof(waits),
                                       [CUT] = sizeof(cut),
                                       [PROBE] = sizeof(probe)};

/* An event that every rank forwards once; kept in order of arrival. */
typedef struct event {
    int kind;
    union {
        report report;
        gone gone;
        cut cut;
    };
} event;

/* A rank with which this rank has a link. */
typedef struct peer {
    int link, rank, forwarded;        /* forwarded: events sent to it */
    uint64_t sent, reached, compared; /* calls: whose hashes were sent to it, received from it, and compared */
    uint32_t hashes[SEEN];            /* of its calls */
    uint64_t wait_sent;               /* call of ours that it was told we wait in, or 0 */
    waits waits;                      /* the call that it waits in */
    double wait_began;                /* when its wait began, by our clock */
} peer;

/* Another host: its addresses, and the rank that stands for it. */
typedef struct remote_host {
    int rank;
    size_t bytes;
    double timeout;
    struct remote_host *next;
    char addresses[];
} remote_host;

struct ucch_host_exchange {
    uint64_t key;
    ucch_board *board;
    ucch_far *far;
    int rank, size, npeers, nevents, capacity, nreports;
    int has_announced_end; /* the event about this rank's own end was made */
    uint64_t current_call; /* the last call if it has not ended, else 0 */
    double call_since;     /* when that call was first seen under way */
    double probed_at;      /* when links were last probed */
    remote_host *remote_hosts;
    event *events;
    ucch_host_exchange *next;
    double *asked; /* by host: when a rank of it last asked for probes; stored behind the peers, as is: */
    int *hosts;    /* by rank; from 0 on, without gaps */
    peer peers[];
};

static ucch_host_exchange *exchanges;

/* Where an early message came from. */
typedef struct origin {
    int link;
    uint32_t kind;
} origin;

/* Most early messages that are kept. */
#define MOST_EARLY 4096

static ucch_early *early; /* by the keys of exchanges that this rank is about to make */
static uint64_t newest;   /* the highest key of an exchange of this process */

static ucch_host_exchange *exchange_of(uint64_t key) {
    ucch_host_exchange *c = exchanges;
    while (c && c->key != key)
        c = c->next;
    return c;
}

/* ---- events ---- */

static void forward_events(ucch_host_exchange *c) {
    for (int i = 0; i < c->npeers; i++) {
        peer *p = &c->peers[i];
        for (int status = 0; p->forwarded < c->nevents && !status; p->forwarded += !status) {
            const event *e = &c->events[p->forwarded];
            status = ucch_link_send(p->link, (uint32_t)e->kind, c->key, &e->report, message_bytes[e->kind]);
        }
    }
}

static void add_event(ucch_host_exchange *c, const event *e) {
    if (c->nevents == c->capacity) {
        event *more = realloc(c->events, (size_t)(2 * c->capacity + 8) * sizeof(*more));
        if (!more) return;
        c->events = more;
        c->capacity = 2 * c->capacity + 8;
    }
    c->events[c->nevents++] = *e;
}

static void note_gone(ucch_host_exchange *c, const gone *g) {
    if (g->rank == c->rank && g->fate == UCCH_LEFT) return; /* that is this rank */
    if (!ucch_far_note_gone(c->far, g->rank, g->fate, g->last, g->failed)) return;
    add_event(c, &(event){.kind = GONE, .gone = *g});
    if (g->fate >= UCCH_DIED) ucch_board_dump_if_idle(c->board);
}

/* Keep a report unless it is known. */
static void note_report(ucch_host_exchange *c, const report *o) {
    for (int i = 0; i < c->nevents; i++) {
        const event *e = &c->events[i];
        if (e->kind == REPORT && e->report.call == o->call && e->report.hash == o->hash) return;
    }
    if (c->nreports++ < MOST_REPORTS) add_event(c, &(event){.kind = REPORT, .report = *o});
}

/* Report what this rank called. */
static void report_own(ucch_host_exchange *c, uint64_t call, uint32_t hash) {
    report own = {.call = call, .rank = c->rank, .hash = hash, .text = "another call"};
    ucch_board_own_text(c->board, call, own.text);
    note_report(c, &own);
}

/* Announce once that this rank has left or that a call failed on it, and first why, as other ranks would take it for
 * dead: that a call was refused, or what this rank called if ranks of its host made different calls. */
static void announce_end(ucch_host_exchange *c) {
    ucch_refusal end;
    uint64_t failed = ucch_board_has_failed(c->board), last = failed ? failed : ucch_far_called(c->far);
    uint32_t hash = ucch_far_hash(c->far, last);
    if (c->has_announced_end) return;
    c->has_announced_end = 1;
    if (ucch_board_refusal(c->board, &end) && end.rank >= 0) {
        report refused = {.call = end.call, .rank = end.rank, .hash = UCCH_REFUSED_CALL};
        memcpy(refused.text, end.text, sizeof(refused.text));
        note_report(c, &refused);
    } else if (hash && ucch_board_mismatch(c->board, last) >= 0) {
        report_own(c, last, hash);
    }
    gone left = {ucch_far_called(c->far), failed, c->rank, UCCH_LEFT};
    add_event(c, &(event){.kind = GONE, .gone = left});
}

/* Compare reports with what this rank called, once it has made the call. There are reports of calls that ranks made
 * differently, and of calls that one rank refused and another makes. */
static void compare_reports(ucch_host_exchange *c) {
    for (int i = 0; i < c->nevents; i++) {
        report o = c->events[i].report; /* a copy, as report_own may move the list */
        if (c->events[i].kind != REPORT) continue;
        uint32_t own = ucch_far_hash(c->far, o.call);
        if (own && ucch_calls_differ(own, o.hash)) report_own(c, o.call, own);
        if (o.hash == UCCH_REFUSED_CALL)
            ucch_board_end(c->board, o.call, o.rank, o.text);
        else if (own && ucch_calls_differ(own, o.hash) && own != UCCH_REFUSED_CALL)
            ucch_far_note_differs(c->far, o.call, o.rank, o.text);
    }
}

/* True if this cut keeps data of rank `from` from reaching rank `to`. */
static int is_cut_between(const ucch_host_exchange *c, const cut *l, int from, int to) {
    if (!l->link[0]) return l->from == from && l->to == to;
    int hosts[] = {c->hosts[l->from], c->hosts[l->to]}, there = c->hosts[from], here = c->hosts[to];
    return (hosts[0] == there && hosts[1] == here) || (hosts[0] == here && hosts[1] == there);
}

/* Record a cut on this rank if it waits for ranks behind it, and forward it once. */
static void note_cut(ucch_host_exchange *c, const cut *l) {
    for (int i = 0; i < c->nevents; i++) {
        const event *e = &c->events[i];
        if (e->kind == CUT && !e->cut.link[0] == !l->link[0] && is_cut_between(c, l, e->cut.from, e->cut.to)) return;
    }
    add_event(c, &(event){.kind = CUT, .cut = *l});
    ucch_count_cut();
    for (int r = 0; r < c->size; r++)
        if (is_cut_between(c, l, r, c->rank)) ucch_far_note_cut(c->far, r, l->link);
}

/* ---- calls ---- */

static void compare_calls(ucch_host_exchange *c, peer *p) {
    uint64_t called = ucch_far_called(c->far), until = called < p->reached ? called : p->reached;
    uint64_t most = called > p->reached ? called : p->reached;
    if (p->compared + SEEN / 2 < most) p->compared = most - SEEN / 2;
    for (; p->compared < until; p->compared++) {
        uint64_t call = p->compared + 1;
        uint32_t own = ucch_far_hash(c->far, call), other = p->hashes[call % SEEN];
        if (own && other && ucch_calls_differ(own, other)) report_own(c, call, own);
    }
}

/* Send a peer the hashes of this rank's calls since the last time. */
static void send_calls(ucch_host_exchange *c, peer *p) {
    static calls message;
    for (int k = 0; k < MESSAGES_PER_TURN; k++) {
        uint64_t called = ucch_far_called(c->far);
        if (p->sent + SEEN / 2 < called) p->sent = called - SEEN / 2;
        uint64_t count = called - p->sent < HASHES_PER_MESSAGE ? called - p->sent : HASHES_PER_MESSAGE;
        if (!count) return;
        message.first = p->sent + 1;
        message.count = count;
        for (uint64_t i = 0; i < count; i++)
            message.hashes[i] = ucch_far_hash(c->far, message.first + i);
        size_t bytes = offsetof(calls, hashes) + count * sizeof(uint32_t);
        if (ucch_link_send(p->link, CALLS, c->key, &message, bytes)) return;
        p->sent += count;
    }
}

static void on_calls(ucch_host_exchange *c, peer *p, const calls *message) {
    if (message->first + SEEN / 2 < p->reached) return; /* no correct peer sends calls this old */
    uint64_t skipped = message->first > p->reached ? message->first - p->reached - 1 : 0;
    for (uint64_t i = 0; i < skipped && i < SEEN; i++)
        p->hashes[(message->first - 1 - i) % SEEN] = 0;
    for (uint64_t i = 0; i < message->count; i++)
        p->hashes[(message->first + i) % SEEN] = message->hashes[i];
    uint64_t last = message->first + message->count - 1;
    if (last > p->reached) p->reached = last;
    if (p->compared >= message->first) p->compared = message->first - 1; /* sent again, as the calls changed */
    compare_calls(c, p);
}

static int is_remote(const ucch_host_exchange *c, const peer *p) { return c->hosts[p->rank] != c->hosts[c->rank]; }

/* The rank that a timeout error names: the linked rank of another host that has made the fewest calls. */
static void note_last(ucch_host_exchange *c) {
    const peer *last = NULL;
    for (int i = 0; i < c->npeers; i++)
        if (is_remote(c, &c->peers[i]) && (!last || c->peers[i].reached < last->reached)) last = &c->peers[i];
    if (last) ucch_board_behind_by(c->board, last->rank, last->reached);
}

/* A linked rank that waits in a call that this rank has not made yet. */
static void note_waiter(ucch_host_exchange *c) {
    const peer *first = NULL;
    for (int i = 0; i < c->npeers && !first; i++)
        if (c->peers[i].waits.call > ucch_far_called(c->far)) first = &c->peers[i];
    if (first)
        ucch_board_waited_by(c->board, first->rank, first->waits.call, first->waits.label, first->wait_began);
    else
        ucch_board_waited_by(c->board, -1, 0, "", 0);
}

static int has_ended(const ucch_host_exchange *c) {
    return ucch_board_has_left(c->board) || ucch_board_has_failed(c->board);
}

/* Tell peers of other hosts which call this rank waits in, or that it no longer waits. After a failure the last message
 * stands: other ranks whose calls time out with it need it. */
static void send_waits(ucch_host_exchange *c) {
    double now = ucch_now();
    uint64_t call = ucch_board_under_way(c->board);
    if (has_ended(c)) return; /* checked after the call was read, as it may end in between */
    if (call != c->current_call) c->call_since = now;
    c->current_call = call;
    waits message = {.label = "a call"};
    if (call && now - c->call_since >= LONG_WAIT_S) {
        message.call = call;
        message.seconds = now - c->call_since;
        ucch_board_own_label(c->board, call, message.label);
    }
    for (int i = 0; i < c->npeers; i++) {
        peer *p = &c->peers[i];
        if (is_remote(c, p) && p->wait_sent != message.call &&
            !ucch_link_send(p->link, WAITS, c->key, &message, sizeof(message)))
            p->wait_sent = message.call;
    }
}

static void on_waits(peer *p, const waits *message) {
    p->waits = *message;
    p->waits.label[UCCH_LABEL_BYTES - 1] = 0;
    p->wait_began = ucch_now() - message->seconds;
    if (p->wait_began < 0) p->wait_began = 0; /* this host was not up then */
}

/* A rank asks for probes of the links to its host: note it, and tell all ranks. Only the rank that sends over a link
 * sees that it is cut, and it may have sent long ago and wait for nothing. */
static void note_probe(ucch_host_exchange *c, int rank) {
    double now = ucch_now(), *asked = &c->asked[c->hosts[rank]];
    if (*asked > 0 && now - *asked < ASK_S) return;
    *asked = now;
    probe message = {rank};
    for (int i = 0; i < c->npeers; i++) /* one that is not sent now is sent the next time */
        ucch_link_send(c->peers[i].link, PROBE, c->key, &message, sizeof(message));
}

/* ---- the listener ---- */

static int is_valid(uint32_t kind, const void *data, size_t bytes) {
    uint64_t head[2]; /* the first call, from 1, and how many */
    if (kind > CALLS && kind <= PROBE) return bytes == message_bytes[kind];
    if (kind != CALLS || bytes < offsetof(calls, hashes)) return 0;
    memcpy(head, data, sizeof(head));
    return head[0] && head[0] + head[1] > head[0] && head[1] <= HASHES_PER_MESSAGE &&
           bytes == offsetof(calls, hashes) + head[1] * sizeof(uint32_t);
}

static int on_message(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes) {
    ucch_host_exchange *c = exchange_of(key);
    static union {
        calls calls;
        report report;
        gone gone;
        waits waits;
        cut cut;
        probe probe;
    } message;
    if (!is_valid(kind, data, bytes)) return -1;
    if (!c && key > newest) { /* others are for exchanges that were freed */
        ucch_packet m = {
            .header = &(origin){link, kind}, .header_bytes = sizeof(origin), .data = (void *)data, .bytes = bytes};
        ucch_early_keep(&early, key, &m, MOST_EARLY);
    }
    if (!c) return 0;
    memcpy(&message, data, bytes);
    if (kind == REPORT) {
        message.report.text[UCCH_REFUSAL_BYTES - 1] = 0;
        if (message.report.rank < 0 || message.report.rank >= c->size) return -1;
        note_report(c, &message.report);
    } else if (kind == GONE) {
        if (message.gone.fate < UCCH_LEFT || message.gone.fate > UCCH_UNREACHABLE) return -1;
        note_gone(c, &message.gone);
    } else if (kind == CUT) {
        if (message.cut.from < 0 || message.cut.from >= c->size || message.cut.to < 0 || message.cut.to >= c->size)
            return -1;
        message.cut.link[UCCH_PATH_BYTES - 1] = 0;
        note_cut(c, &message.cut);
    } else if (kind == PROBE) {
        if (message.probe.rank < 0 || message.probe.rank >= c->size) return -1;
        note_probe(c, message.probe.rank);
    } else if (kind == WAITS && !(message.waits.seconds >= 0 && message.waits.seconds < 1e9)) {
        return -1;
    }
    for (int i = 0; i < c->npeers; i++) {
        if (c->peers[i].link != link) continue;
        if (kind == CALLS) on_calls(c, &c->peers[i], &message.calls);
        if (kind == WAITS) on_waits(&c->peers[i], &message.waits);
    }
    compare_reports(c);
    forward_events(c);
    return 0;
}

/* Take the early messages of a new exchange, and drop those of older ones that this rank does not make. */
static void take_early(uint64_t key) {
    newest = key > newest ? key : newest;
    ucch_early_drop(&early, key);
    for (ucch_packet *m; (m = ucch_early_take(&early, key)); free(m)) {
        const origin *from = m->header;
        on_message(from->link, from->kind, key, m->data, m->bytes);
    }
}

/* True if a rank of a host has asked for probes lately. */
static int is_asked(const ucch_host_exchange *c, const remote_host *host, double now) {
    double asked = c->asked[c->hosts[host->rank]];
    return asked > 0 && now - asked < ASKED_S;
}

/* While a rank waits, find links that are cut although the peer process lives. */
static void probe_links(ucch_host_exchange *c) {
    double now = ucch_now();
    int all = ucch_far_wants_probe(c->far), is_due = now - c->probed_at >= LONG_WAIT_S;
    if (all) note_probe(c, c->rank);
    for (const remote_host *host = is_due ? c->remote_hosts : NULL; host; host = host->next) {
        cut found = {c->rank, host->rank, ""};
        if (!all && !is_asked(c, host, now)) continue;
        c->probed_at = now;
        if (ucch_path_find_cut(host->addresses, host->bytes, host->timeout, found.link)) note_cut(c, &found);
    }
}

/* Tell each peer with which libucp has given up a connection: it may wait for data that cannot arrive. */
static void report_broken(ucch_host_exchange *c) {
    for (int r = 0; r < c->size; r++)
        if (ucch_far_has_lost_connection(c->far, r, LONG_WAIT_S)) note_cut(c, &(cut){c->rank, r, ""});
}

static void run_turn(ucch_host_exchange *c) {
    if (has_ended(c)) announce_end(c);
    report_broken(c);
    send_waits(c);
    uint64_t changed_from = ucch_far_changed(c->far); /* first call whose hash has changed since it was sent, or 0 */
    for (int i = 0; i < c->npeers; i++) {
        peer *p = &c->peers[i];
        if (changed_from && p->sent >= changed_from) p->sent = changed_from - 1;
        if (changed_from && p->compared >= changed_from) p->compared = changed_from - 1;
        send_calls(c, p);
        compare_calls(c, p);
    }
    compare_reports(c);
    forward_events(c);
    note_last(c);
    note_waiter(c);
    probe_links(c);
}

static void on_turn(void) {
    for (ucch_host_exchange *c = exchanges; c; c = c->next)
        run_turn(c);
}

/* The process at a link's other end is gone, or its whole host. */
static void on_lost(int link, int fate) {
    for (ucch_host_exchange *c = exchanges; c; c = c->next)
        for (int i = 0; i < c->npeers; i++) {
            if (c->peers[i].link != link) continue;
            for (int r = 0; r < c->size; r++) {
                int same_host = fate == UCCH_UNREACHABLE && c->hosts[r] == c->hosts[c->peers[i].rank];
                if (same_host || r == c->peers[i].rank) note_gone(c, &(gone){.rank = r, .fate = fate});
            }
            forward_events(c);
        }
}

/* ---- calls from Python ---- */

/* Start the exchange for a communicator that spans hosts. `key` is its number: the same on all its ranks, and higher
 * than those of earlier ones of this process. hosts[r] is rank r's host, and links[i] leads to ranks[i] (i < n).
 * Returns NULL if there is no memory. */
ucch_host_exchange *ucch_host_exchange_new(ucch_board *board, uint64_t key, int rank, int size, const int *hosts, int n,
                                           const int *links, const int *ranks) {
    static const ucch_listener listener = {on_message, on_turn, on_lost};
    ucch_far *far = ucch_board_far(board);
    size_t bytes = (size_t)n * sizeof(peer) + (size_t)size * (sizeof(double) + sizeof(int));
    ucch_host_exchange *c = far ? calloc(1, sizeof(*c) + bytes) : NULL;
    if (!c) return NULL;
    *c = (ucch_host_exchange){.key = key, .board = board, .far = far, .rank = rank, .size = size, .npeers = n};
    c->asked = (double *)(c->peers + n);
    c->hosts = (int *)(c->asked + size);
    memcpy(c->hosts, hosts, (size_t)size * sizeof(int));
    ucch_links_lock();
    ucch_links_listen(&listener);
    for (int i = 0; i < n; i++) {
        c->peers[i].link = links[i];
        c->peers[i].rank = ranks[i];
    }
    c->next = exchanges;
    exchanges = c;
    for (int i = 0; i < n; i++) /* a peer may have died since its link was made */
        if (ucch_link_fate_locked(links[i]) > UCCH_LEFT)
            note_gone(c, &(gone){.rank = ranks[i], .fate = ucch_link_fate_locked(links[i])});
    take_early(key);
    ucch_links_unlock();
    return c;
}

/* Set the addresses of the host of `rank`, in network order. A call that waits longer than `timeout` seconds fails if
 * one of them does not answer. Returns 0, or UCCH_FAIL_MEMORY. */
int ucch_host_exchange_add_host(ucch_host_exchange *c, int rank, const void *addresses, size_t bytes, double timeout) {
    remote_host *host = calloc(1, sizeof(*host) + bytes);
    if (!host) return UCCH_FAIL_MEMORY;
    *host = (remote_host){.rank = rank, .bytes = bytes, .timeout = timeout};
    memcpy(host->addresses, addresses, bytes);
    ucch_links_lock();
    host->next = c->remote_hosts;
    c->remote_hosts = host;
    ucch_far_set_timeout(c->far, timeout);
    ucch_links_unlock();
    return 0;
}

/* Note that a rank has died, as another source has told. */
void ucch_host_exchange_note_death(ucch_host_exchange *c, int rank) {
    if (!c) return; /* freed */
    ucch_links_lock();
    note_gone(c, &(gone){.rank = rank, .fate = UCCH_DIED});
    ucch_links_unlock();
}

/* End the exchange. If a call has failed, the peers are told first: they may wait for this rank, whatever it does
 * next. */
void ucch_host_exchange_free(ucch_host_exchange *c) {
    ucch_links_lock();
    if (has_ended(c)) run_turn(c);
    UCCH_UNLINK(exchanges, c, next);
    ucch_links_unlock();
    for (remote_host *host = c->remote_hosts, *next; host; host = next) {
        next = host->next;
        free(host);
    }
    free(c->events);
    free(c);
}
