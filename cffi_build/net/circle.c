/* What the ranks of a communicator on several hosts tell each other beside the data: what they call, and which ranks
 * are gone.
 *
 * Each rank has a connection (link.c) with one rank or more of each neighbouring host, over which it sends hashes of
 * its calls, ten times a second, and compares those that come with its own. A rank that finds a call that differs, or
 * hears of a rank that is gone, tells all ranks that it is connected with, and these pass it on: all ranks know within
 * a moment. A rank that waits in a call for long says that to those of other hosts it is connected with, and no
 * further: their hosts may wait for it, in another communicator. */
#include <stdlib.h>
#include <string.h>

#include "net/net.h"

#define SEEN UCCH_CALLS_SEEN
/* Hashes in one message, and messages of them in one turn. */
#define AT_ONCE 2048
#define WORDS 4
/* Different reports of what was called that are kept at most. */
#define MOST_REPORTS 8
/* Seconds after which a rank says that it waits, and between looks at links while it does. */
#define LONG_S 1.0

enum { CALLS = 2, REPORT, GONE, WAITS, CUT };

typedef struct calls {
    uint64_t first, count;
    uint32_t hashes[AT_ONCE];
} calls;
_Static_assert(sizeof(calls) <= UCCH_LINK_BYTES, "a message has room for hashes");

/* A call as a rank made it. */
typedef struct report {
    uint64_t call;
    int32_t rank;
    uint32_t hash;
    char text[UCCH_REFUSAL_BYTES]; /* a label, or why it was refused */
} report;

typedef struct gone {
    uint64_t last, failed; /* calls: the last it made, and the first that has failed there, or 0 */
    int32_t rank, how;
} gone;

/* A link between the hosts of two ranks; or, where it is empty, a connection between the two that libucp has given up.
 */
typedef struct cut {
    int32_t from, to;
    char link[UCCH_PATH_BYTES];
} cut;

/* The last call of a rank, which has been under way for a while; call 0: none any more. */
typedef struct waits {
    uint64_t call;
    double seconds;
    char label[UCCH_LABEL_BYTES];
} waits;

/* Of kinds that have one length. */
static const size_t bytes_of[] = {
    [REPORT] = sizeof(report), [GONE] = sizeof(gone), [WAITS] = sizeof(waits), [CUT] = sizeof(cut)};

/* News, in the order in which they came. */
typedef struct news {
    int kind;
    union {
        report report;
        gone gone;
        cut cut;
    };
} news;

/* A connection with a rank of another host. */
typedef struct contact {
    int link, rank, told;             /* so much of the news */
    uint64_t sent, reached, compared; /* calls of ours, of theirs, and of both */
    uint32_t hashes[SEEN];            /* theirs */
    uint64_t waiting;                 /* the call in which we have said to wait, or 0 */
    waits waits;                      /* theirs */
    double since;                     /* when that began, by our clock */
} contact;

/* Another host: one of its ranks, and its addresses. */
typedef struct place {
    int rank;
    size_t bytes;
    double patience;
    struct place *next;
    char addresses[];
} place;

struct ucch_circle {
    uint64_t key;
    ucch_board *board;
    ucch_far *far;
    int rank, size, ncontacts, nnews, room, nreports;
    int ended;          /* whether that was said of this rank */
    uint64_t under_way; /* the last call, where it has not ended, or 0 */
    double since;       /* when it was seen first */
    double looked;      /* at links */
    place *places;
    news *news;
    ucch_circle *next;
    int *hosts; /* by rank, behind the contacts */
    contact contacts[];
};

static ucch_circle *circles;

static ucch_circle *circle_of(uint64_t key) {
    ucch_circle *c = circles;
    while (c && c->key != key)
        c = c->next;
    return c;
}

/* ---- news ---- */

static void forward_news(ucch_circle *c) {
    for (int i = 0; i < c->ncontacts; i++) {
        contact *s = &c->contacts[i];
        for (int said = 0; s->told < c->nnews && !said; s->told += !said) {
            const news *n = &c->news[s->told];
            said = ucch_link_send(s->link, (uint32_t)n->kind, c->key, &n->report, bytes_of[n->kind]);
        }
    }
}

static void add(ucch_circle *c, const news *n) {
    if (c->nnews == c->room) {
        news *more = realloc(c->news, (size_t)(2 * c->room + 8) * sizeof(*more));
        if (!more) return;
        c->news = more;
        c->room = 2 * c->room + 8;
    }
    c->news[c->nnews++] = *n;
}

static void note_gone(ucch_circle *c, const gone *g) {
    if (g->rank == c->rank && g->how == UCCH_LEFT) return; /* we know */
    if (!ucch_far_note_gone(c->far, g->rank, g->how, g->last, g->failed)) return;
    add(c, &(news){.kind = GONE, .gone = *g});
    if (g->how >= UCCH_DIED) ucch_board_dump_if_idle(c->board);
}

/* Keep a report, if it is new. */
static void note_report(ucch_circle *c, const report *o) {
    for (int i = 0; i < c->nnews; i++) {
        const news *n = &c->news[i];
        if (n->kind == REPORT && n->report.call == o->call && n->report.hash == o->hash) return;
    }
    if (c->nreports++ < MOST_REPORTS) add(c, &(news){.kind = REPORT, .report = *o});
}

/* Report what this rank called. */
static void report_own(ucch_circle *c, uint64_t call, uint32_t hash) {
    report mine = {.call = call, .rank = c->rank, .hash = hash, .text = "another call"};
    ucch_board_own_text(c->board, call, mine.text);
    note_report(c, &mine);
}

/* This rank has left, or a call has failed with it. A rank that has left over a refused call says that first: other
 * ranks would take it for dead. */
static void report_left(ucch_circle *c) {
    ucch_refusal end;
    if (c->ended) return;
    c->ended = 1;
    if (ucch_board_refusal(c->board, &end) && end.rank >= 0) {
        report refused = {.call = end.call, .rank = end.rank, .hash = UCCH_REFUSED_CALL};
        memcpy(refused.text, end.text, sizeof(refused.text));
        note_report(c, &refused);
    }
    gone left = {ucch_far_called(c->far), ucch_board_has_failed(c->board), c->rank, UCCH_LEFT};
    add(c, &(news){.kind = GONE, .gone = left});
}

/* Compare reports with what this rank called, as soon as it has. Reports are of calls that ranks made in different
 * ways, or that one refused and another makes. */
static void compare_reports(ucch_circle *c) {
    for (int i = 0; i < c->nnews; i++) {
        report o = c->news[i].report; /* the list may move */
        if (c->news[i].kind != REPORT) continue;
        uint32_t mine = ucch_far_hash(c->far, o.call);
        if (mine && ucch_calls_differ(mine, o.hash)) report_own(c, o.call, mine);
        if (o.hash == UCCH_REFUSED_CALL)
            ucch_board_end(c->board, o.call, o.rank, o.text);
        else if (mine && ucch_calls_differ(mine, o.hash) && mine != UCCH_REFUSED_CALL)
            ucch_far_note_differs(c->far, o.call, o.rank, o.text);
    }
}

/* True if what one rank sends does not come to another. */
static int is_between(const ucch_circle *c, const cut *l, int from, int to) {
    if (!l->link[0]) return l->from == from && l->to == to;
    int hosts[] = {c->hosts[l->from], c->hosts[l->to]}, there = c->hosts[from], here = c->hosts[to];
    return (hosts[0] == there && hosts[1] == here) || (hosts[0] == here && hosts[1] == there);
}

/* The ranks that wait for others behind it note it; all pass it on, once. */
static void note_cut(ucch_circle *c, const cut *l) {
    for (int i = 0; i < c->nnews; i++) {
        const news *n = &c->news[i];
        if (n->kind == CUT && !n->cut.link[0] == !l->link[0] && is_between(c, l, n->cut.from, n->cut.to)) return;
    }
    add(c, &(news){.kind = CUT, .cut = *l});
    ucch_count_cut();
    for (int r = 0; r < c->size; r++)
        if (is_between(c, l, r, c->rank)) ucch_far_note_cut(c->far, r, l->link);
}

/* ---- calls ---- */

static void compare(ucch_circle *c, contact *s) {
    uint64_t called = ucch_far_called(c->far), until = called < s->reached ? called : s->reached;
    uint64_t most = called > s->reached ? called : s->reached;
    if (s->compared + SEEN / 2 < most) s->compared = most - SEEN / 2;
    for (; s->compared < until; s->compared++) {
        uint64_t call = s->compared + 1;
        uint32_t mine = ucch_far_hash(c->far, call), theirs = s->hashes[call % SEEN];
        if (mine && theirs && ucch_calls_differ(mine, theirs)) report_own(c, call, mine);
    }
}

/* Send a rank hashes of what this one has called since the last time. */
static void send_calls(ucch_circle *c, contact *s) {
    static calls word;
    for (int k = 0; k < WORDS; k++) {
        uint64_t called = ucch_far_called(c->far);
        if (s->sent + SEEN / 2 < called) s->sent = called - SEEN / 2;
        uint64_t count = called - s->sent < AT_ONCE ? called - s->sent : AT_ONCE;
        if (!count) return;
        word.first = s->sent + 1;
        word.count = count;
        for (uint64_t i = 0; i < count; i++)
            word.hashes[i] = ucch_far_hash(c->far, word.first + i);
        size_t bytes = offsetof(calls, hashes) + count * sizeof(uint32_t);
        if (ucch_link_send(s->link, CALLS, c->key, &word, bytes)) return;
        s->sent += count;
    }
}

static void on_calls(ucch_circle *c, contact *s, const calls *word) {
    if (word->first + SEEN / 2 < s->reached) return; /* no rank of ours says so */
    uint64_t skipped = word->first > s->reached ? word->first - s->reached - 1 : 0;
    for (uint64_t i = 0; i < skipped && i < SEEN; i++)
        s->hashes[(word->first - 1 - i) % SEEN] = 0;
    for (uint64_t i = 0; i < word->count; i++)
        s->hashes[(word->first + i) % SEEN] = word->hashes[i];
    uint64_t last = word->first + word->count - 1;
    if (last > s->reached) s->reached = last;
    if (s->compared >= word->first) s->compared = word->first - 1; /* sent again */
    compare(c, s);
}

static int is_far(const ucch_circle *c, const contact *s) { return c->hosts[s->rank] != c->hosts[c->rank]; }

/* The rank that an error names at a deadline: of the ranks of other hosts that this one is connected with, the last. */
static void note_last(ucch_circle *c) {
    const contact *last = NULL;
    for (int i = 0; i < c->ncontacts; i++)
        if (is_far(c, &c->contacts[i]) && (!last || c->contacts[i].reached < last->reached)) last = &c->contacts[i];
    if (last) ucch_board_behind_by(c->board, last->rank, last->reached);
}

/* And which of them waits in a call that this rank has not come to. */
static void note_waiter(ucch_circle *c) {
    const contact *first = NULL;
    for (int i = 0; i < c->ncontacts && !first; i++)
        if (c->contacts[i].waits.call > ucch_far_called(c->far)) first = &c->contacts[i];
    if (first)
        ucch_board_waited_by(c->board, first->rank, first->waits.call, first->waits.label, first->since);
    else
        ucch_board_waited_by(c->board, -1, 0, "", 0);
}

static int has_ended(const ucch_circle *c) { return ucch_board_has_left(c->board) || ucch_board_has_failed(c->board); }

/* Say in which call this rank waits, or that it does so no more. A call that has failed stays said: other ranks that
 * time out with it are to know. */
static void send_waits(ucch_circle *c) {
    double now = ucch_now();
    uint64_t call = ucch_board_under_way(c->board);
    if (has_ended(c)) return; /* looked at behind the call */
    if (call != c->under_way) c->since = now;
    c->under_way = call;
    waits word = {.label = "a call"};
    if (call && now - c->since >= LONG_S) {
        word.call = call;
        word.seconds = now - c->since;
        ucch_board_own_label(c->board, call, word.label);
    }
    for (int i = 0; i < c->ncontacts; i++) {
        contact *s = &c->contacts[i];
        if (is_far(c, s) && s->waiting != word.call && !ucch_link_send(s->link, WAITS, c->key, &word, sizeof(word)))
            s->waiting = word.call;
    }
}

static void on_waits(contact *s, const waits *word) {
    s->waits = *word;
    s->waits.label[UCCH_LABEL_BYTES - 1] = 0;
    s->since = ucch_now() - word->seconds;
    if (s->since < 0) s->since = 0; /* this host was not up */
}

/* ---- the listener ---- */

static int fits(uint32_t kind, const void *data, size_t bytes) {
    uint64_t count;
    if (kind > CALLS && kind <= CUT) return bytes == bytes_of[kind];
    if (kind != CALLS || bytes < offsetof(calls, hashes)) return 0;
    memcpy(&count, (const char *)data + offsetof(calls, count), sizeof(count));
    return count && count <= AT_ONCE && bytes == offsetof(calls, hashes) + count * sizeof(uint32_t);
}

static int on_message(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes) {
    ucch_circle *c = circle_of(key);
    static union {
        calls calls;
        report report;
        gone gone;
        waits waits;
        cut cut;
    } word;
    if (!fits(kind, data, bytes)) return -1;
    if (!c) return 0; /* given back, or not made yet */
    memcpy(&word, data, bytes);
    if (kind == REPORT) {
        word.report.text[UCCH_REFUSAL_BYTES - 1] = 0;
        if (word.report.rank < 0 || word.report.rank >= c->size) return -1;
        note_report(c, &word.report);
    } else if (kind == GONE) {
        if (word.gone.how < UCCH_LEFT || word.gone.how > UCCH_UNREACHABLE) return -1;
        note_gone(c, &word.gone);
    } else if (kind == CUT) {
        if (word.cut.from < 0 || word.cut.from >= c->size || word.cut.to < 0 || word.cut.to >= c->size) return -1;
        word.cut.link[UCCH_PATH_BYTES - 1] = 0;
        note_cut(c, &word.cut);
    } else if (kind == WAITS && !(word.waits.seconds >= 0 && word.waits.seconds < 1e9)) {
        return -1;
    }
    for (int i = 0; i < c->ncontacts; i++) {
        if (c->contacts[i].link != link) continue;
        if (kind == CALLS) on_calls(c, &c->contacts[i], &word.calls);
        if (kind == WAITS) on_waits(&c->contacts[i], &word.waits);
    }
    compare_reports(c);
    forward_news(c);
    return 0;
}

/* True if a rank waits for long in a call that this one may have ended. */
static int is_awaited(const ucch_circle *c, double now) {
    for (int i = 0; i < c->ncontacts; i++)
        if (c->contacts[i].waits.call && c->places && now - c->contacts[i].since > c->places->patience) return 1;
    return 0;
}

/* While a call waits, find links that are cut although the process at the other end is there. Who sends nothing by
 * them does not see that. */
static void look_at_links(ucch_circle *c) {
    double now = ucch_now();
    if (now - c->looked < LONG_S || (!ucch_far_is_asked(c->far) && !is_awaited(c, now))) return;
    c->looked = now;
    for (const place *p = c->places; p; p = p->next) {
        cut found = {c->rank, p->rank, ""};
        if (ucch_path_find_cut(p->addresses, p->bytes, p->patience, found.link)) note_cut(c, &found);
    }
}

/* A rank with which libucp has given up a connection is told, if it is there: it may wait for what cannot come. */
static void report_broken(ucch_circle *c) {
    for (int r = 0; r < c->size; r++)
        if (ucch_far_is_broken(c->far, r, LONG_S)) note_cut(c, &(cut){c->rank, r, ""});
}

static void turn_of(ucch_circle *c) {
    if (has_ended(c)) report_left(c);
    report_broken(c);
    send_waits(c);
    uint64_t anew =
        ucch_far_changed(c->far); /* from which call on this rank has called something else than it has sent */
    for (int i = 0; i < c->ncontacts; i++) {
        contact *s = &c->contacts[i];
        if (anew && s->sent >= anew) s->sent = anew - 1;
        if (anew && s->compared >= anew) s->compared = anew - 1;
        send_calls(c, s);
        compare(c, s);
    }
    compare_reports(c);
    forward_news(c);
    note_last(c);
    note_waiter(c);
    look_at_links(c);
}

static void on_turn(void) {
    for (ucch_circle *c = circles; c; c = c->next)
        turn_of(c);
}

/* The process at a link's other end is gone, or all of its host. */
static void on_lost(int link, int how) {
    for (ucch_circle *c = circles; c; c = c->next)
        for (int i = 0; i < c->ncontacts; i++) {
            if (c->contacts[i].link != link) continue;
            for (int r = 0; r < c->size; r++) {
                int with = how == UCCH_UNREACHABLE && c->hosts[r] == c->hosts[c->contacts[i].rank];
                if (with || r == c->contacts[i].rank) note_gone(c, &(gone){.rank = r, .how = how});
            }
            forward_news(c);
        }
}

/* ---- from outside ---- */

/* Have the ranks of a communicator on several hosts tell each other what they call and which ranks are gone; `key` is
 * the same on all of them, `hosts` says where each rank is, and there is a link with each of the `n` ranks. NULL: no
 * memory. */
ucch_circle *ucch_circle_new(ucch_board *board, uint64_t key, int rank, int size, const int *hosts, int n,
                             const int *links, const int *ranks) {
    static const ucch_listener listener = {on_message, on_turn, on_lost};
    ucch_far *far = ucch_board_far(board);
    ucch_circle *c = far ? calloc(1, sizeof(*c) + (size_t)n * sizeof(contact) + (size_t)size * sizeof(int)) : NULL;
    if (!c) return NULL;
    *c = (ucch_circle){.key = key, .board = board, .far = far, .rank = rank, .size = size, .ncontacts = n};
    c->hosts = (int *)(c->contacts + n);
    memcpy(c->hosts, hosts, (size_t)size * sizeof(int));
    ucch_links_lock();
    ucch_links_listen(&listener);
    for (int i = 0; i < n; i++) {
        c->contacts[i].link = links[i];
        c->contacts[i].rank = ranks[i];
    }
    c->next = circles;
    circles = c;
    for (int i = 0; i < n; i++) /* it may have died since it was connected */
        if (ucch_link_fate(links[i]) > UCCH_LEFT)
            note_gone(c, &(gone){.rank = ranks[i], .how = ucch_link_fate(links[i])});
    ucch_links_unlock();
    return c;
}

/* The addresses of a rank's host, as they are on the network. What waits for longer than `patience` fails where one of
 * them does not answer. 0, or not 0: no memory. */
int ucch_circle_reach(ucch_circle *c, int rank, const void *addresses, size_t bytes, double patience) {
    place *p = calloc(1, sizeof(*p) + bytes);
    if (!p) return UCCH_FAIL_MEMORY;
    *p = (place){.rank = rank, .bytes = bytes, .patience = patience};
    memcpy(p->addresses, addresses, bytes);
    ucch_links_lock();
    p->next = c->places;
    c->places = p;
    ucch_far_patience(c->far, patience);
    ucch_links_unlock();
    return 0;
}

/* A rank has died, as is known from elsewhere. */
void ucch_circle_lost(ucch_circle *c, int rank) {
    if (!c) return; /* given back */
    ucch_links_lock();
    note_gone(c, &(gone){.rank = rank, .how = UCCH_DIED});
    ucch_links_unlock();
}

/* The communicator makes no more calls. Where it has failed other ranks hear of that, whatever this rank does
 * next: they may wait for it. */
void ucch_circle_free(ucch_circle *c) {
    ucch_links_lock();
    if (has_ended(c)) turn_of(c);
    UCCH_UNLINK(circles, c, next);
    ucch_links_unlock();
    for (place *p = c->places, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    free(c->news);
    free(c);
}
