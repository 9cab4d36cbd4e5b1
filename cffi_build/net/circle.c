/* Words of the ranks of a communicator on several hosts, beside the data: what they call, and which ranks are gone.
 *
 * Each rank has a connection (link.c) with one rank or more of each neighbouring host, over which it sends hashes of
 * its calls, ten times a second, and compares those that come with its own. A rank that finds a call that differs, or
 * hears of a rank that is gone, tells all ranks that it is connected with, and these pass it on: all ranks know within
 * a moment. A rank that waits in a call for long says that to those of other hosts it is connected with, and no
 * further: their hosts may wait for it, in another communicator. */
#include <stdlib.h>
#include <string.h>

#include "base/far.h"
#include "net/link.h"

#define SEEN UCCH_CALLS_SEEN
/* Hashes in one word, and words of them in one turn. */
#define AT_ONCE 2048
#define WORDS 4
/* The most different opinions of what was called that are kept. */
#define OPINIONS 8
/* Seconds after which a rank says that it waits. */
#define LONG_S 1.0

enum { CALLS = 2, OPINION, GONE, WAITS };

typedef struct calls {
    uint64_t first, count;
    uint32_t hashes[AT_ONCE];
} calls;
_Static_assert(sizeof(calls) <= UCCH_WORD_BYTES, "a word has room for hashes");

/* A call as a rank made it. */
typedef struct opinion {
    uint64_t call;
    int32_t rank;
    uint32_t hash;
    char text[UCCH_REFUSAL_BYTES]; /* a label, or why it was refused */
} opinion;

typedef struct gone {
    uint64_t last, failed; /* calls: the last it made, and the first that has failed there, or 0 */
    int32_t rank, how;
} gone;

/* The last call of a rank, which has been under way for a while; call 0: none any more. */
typedef struct waits {
    uint64_t call;
    double seconds;
    char label[UCCH_LABEL_BYTES];
} waits;

/* News, in the order in which they came. */
typedef struct news {
    int kind;
    union {
        opinion opinion;
        gone gone;
    };
} news;

/* A connection with a rank of another host. */
typedef struct spoke {
    int link, rank, told;             /* so much of the news */
    uint64_t sent, reached, compared; /* calls of ours, of theirs, and of both */
    uint32_t hashes[SEEN];            /* theirs */
    uint64_t waiting;                 /* the call in which we have said to wait, or 0 */
    waits waits;                      /* theirs */
    double since;                     /* when that began, by our clock */
} spoke;

struct ucch_circle {
    uint64_t key;
    ucch_board *board;
    ucch_far *far;
    int rank, size, nspokes, nnews, room, nopinions;
    int ended;          /* whether that was said of this rank */
    uint64_t under_way; /* the last call, where it has not ended, or 0 */
    double since;       /* when it was seen first */
    int *hosts;
    news *news;
    spoke *spokes;
    ucch_circle *next;
};

static ucch_circle *circles;

static ucch_circle *circle_of(uint64_t key) {
    ucch_circle *c = circles;
    while (c && c->key != key)
        c = c->next;
    return c;
}

static int unlike(uint32_t one, uint32_t other) {
    if (one == UCCH_ANY_HASH) return other == UCCH_REFUSED_HASH;
    if (other == UCCH_ANY_HASH) return one == UCCH_REFUSED_HASH;
    return one != other;
}

/* ---- news ---- */

static void tell(ucch_circle *c) {
    for (int i = 0; i < c->nspokes; i++) {
        spoke *s = &c->spokes[i];
        for (int said = 0; s->told < c->nnews && !said; s->told += !said) {
            const news *n = &c->news[s->told];
            size_t bytes = n->kind == OPINION ? sizeof(n->opinion) : sizeof(n->gone);
            said = ucch_link_say(s->link, (uint32_t)n->kind, c->key, &n->opinion, bytes);
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
    if (g->how >= UCCH_DIED) ucch_board_speak(c->board);
}

/* Keep an opinion, if it is new. */
static void note_opinion(ucch_circle *c, const opinion *o) {
    for (int i = 0; i < c->nnews; i++) {
        const news *n = &c->news[i];
        if (n->kind == OPINION && n->opinion.call == o->call && n->opinion.hash == o->hash) return;
    }
    if (c->nopinions++ < OPINIONS) add(c, &(news){.kind = OPINION, .opinion = *o});
}

/* Say what this rank called. */
static void give_opinion(ucch_circle *c, uint64_t call, uint32_t hash) {
    opinion mine = {.call = call, .rank = c->rank, .hash = hash, .text = "another call"};
    ucch_board_own_text(c->board, call, mine.text);
    note_opinion(c, &mine);
}

/* This rank has left, or a call has failed with it. A rank that has left over a refused call says that first: other
 * ranks would take it for dead. */
static void say_left(ucch_circle *c) {
    ucch_refusal end;
    if (c->ended) return;
    c->ended = 1;
    if (ucch_board_refusal(c->board, &end) && end.rank >= 0) {
        opinion refused = {.call = end.call, .rank = end.rank, .hash = UCCH_REFUSED_HASH};
        memcpy(refused.text, end.text, sizeof(refused.text));
        note_opinion(c, &refused);
    }
    gone left = {ucch_far_called(c->far), ucch_board_has_failed(c->board), c->rank, UCCH_LEFT};
    add(c, &(news){.kind = GONE, .gone = left});
}

/* Compare what was said with what this rank called, as soon as it has. Opinions are of calls that differ: of a refused
 * one, another rank makes it. */
static void weigh_opinions(ucch_circle *c) {
    for (int i = 0; i < c->nnews; i++) {
        opinion o = c->news[i].opinion; /* the list may move */
        if (c->news[i].kind != OPINION) continue;
        uint32_t mine = ucch_far_hash(c->far, o.call);
        if (mine && unlike(mine, o.hash)) give_opinion(c, o.call, mine);
        if (o.hash == UCCH_REFUSED_HASH)
            ucch_board_end(c->board, o.call, o.rank, o.text);
        else if (mine && unlike(mine, o.hash) && mine != UCCH_REFUSED_HASH)
            ucch_far_note_differs(c->far, o.call, o.rank, o.text);
    }
}

/* ---- calls ---- */

static void compare(ucch_circle *c, spoke *s) {
    uint64_t called = ucch_far_called(c->far), until = called < s->reached ? called : s->reached;
    uint64_t most = called > s->reached ? called : s->reached;
    if (s->compared + SEEN / 2 < most) s->compared = most - SEEN / 2;
    for (; s->compared < until; s->compared++) {
        uint64_t call = s->compared + 1;
        uint32_t mine = ucch_far_hash(c->far, call), theirs = s->hashes[call % SEEN];
        if (mine && theirs && unlike(mine, theirs)) give_opinion(c, call, mine);
    }
}

/* From call `first` on, unless that is 0, what this rank has called is not what it has said. */
static void tell_anew(spoke *s, uint64_t first) {
    if (first && s->sent >= first) s->sent = first - 1;
    if (first && s->compared >= first) s->compared = first - 1;
}

/* Tell a rank what this one has called since the last time. */
static void send_calls(ucch_circle *c, spoke *s) {
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
        if (ucch_link_say(s->link, CALLS, c->key, &word, bytes)) return;
        s->sent += count;
    }
}

static void hear_calls(ucch_circle *c, spoke *s, const calls *word) {
    if (word->first + SEEN / 2 < s->reached) return; /* no rank of ours says so */
    uint64_t skipped = word->first > s->reached ? word->first - s->reached - 1 : 0;
    for (uint64_t i = 0; i < skipped && i < SEEN; i++)
        s->hashes[(word->first - 1 - i) % SEEN] = 0;
    for (uint64_t i = 0; i < word->count; i++)
        s->hashes[(word->first + i) % SEEN] = word->hashes[i];
    uint64_t last = word->first + word->count - 1;
    if (last > s->reached) s->reached = last;
    if (s->compared >= word->first) s->compared = word->first - 1; /* told anew */
    compare(c, s);
}

static int is_far(const ucch_circle *c, const spoke *s) { return c->hosts[s->rank] != c->hosts[c->rank]; }

/* Whom of the ranks of other hosts that this one hears of it would name first, at a deadline. */
static void note_last(ucch_circle *c) {
    const spoke *last = NULL;
    for (int i = 0; i < c->nspokes; i++)
        if (is_far(c, &c->spokes[i]) && (!last || c->spokes[i].reached < last->reached)) last = &c->spokes[i];
    if (last) ucch_board_behind_by(c->board, last->rank, last->reached);
}

/* And which of them waits in a call that this rank has not come to. */
static void note_waiter(ucch_circle *c) {
    const spoke *first = NULL;
    for (int i = 0; i < c->nspokes && !first; i++)
        if (c->spokes[i].waits.call > ucch_far_called(c->far)) first = &c->spokes[i];
    if (first)
        ucch_board_waited_by(c->board, first->rank, first->waits.call, first->waits.label, first->since);
    else
        ucch_board_waited_by(c->board, -1, 0, "", 0);
}

static int has_ended(const ucch_circle *c) { return ucch_board_has_left(c->board) || ucch_board_has_failed(c->board); }

/* Say in which call this rank waits, or that it does so no more. A call that has failed stays said: other ranks that
 * time out with it are to know. */
static void say_waits(ucch_circle *c) {
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
    for (int i = 0; i < c->nspokes; i++) {
        spoke *s = &c->spokes[i];
        if (is_far(c, s) && s->waiting != word.call && !ucch_link_say(s->link, WAITS, c->key, &word, sizeof(word)))
            s->waiting = word.call;
    }
}

static void hear_waits(spoke *s, const waits *word) {
    s->waits = *word;
    s->waits.label[UCCH_LABEL_BYTES - 1] = 0;
    s->since = ucch_now() - word->seconds;
    if (s->since < 0) s->since = 0; /* this host was not up */
}

/* ---- the listener ---- */

static int fits(uint32_t kind, const void *data, size_t bytes) {
    uint64_t count;
    if (kind == OPINION) return bytes == sizeof(opinion);
    if (kind == GONE) return bytes == sizeof(gone);
    if (kind == WAITS) return bytes == sizeof(waits);
    if (kind != CALLS || bytes < offsetof(calls, hashes)) return 0;
    memcpy(&count, (const char *)data + offsetof(calls, count), sizeof(count));
    return count && count <= AT_ONCE && bytes == offsetof(calls, hashes) + count * sizeof(uint32_t);
}

static int heard(int link, uint32_t kind, uint64_t key, const void *data, size_t bytes) {
    ucch_circle *c = circle_of(key);
    static union {
        calls calls;
        opinion opinion;
        gone gone;
        waits waits;
    } word;
    if (!fits(kind, data, bytes)) return -1;
    if (!c) return 0; /* given back, or not made yet */
    memcpy(&word, data, bytes);
    if (kind == OPINION) {
        word.opinion.text[UCCH_REFUSAL_BYTES - 1] = 0;
        if (word.opinion.rank < 0 || word.opinion.rank >= c->size) return -1;
        note_opinion(c, &word.opinion);
    } else if (kind == GONE) {
        if (word.gone.how < UCCH_LEFT || word.gone.how > UCCH_UNREACHABLE) return -1;
        note_gone(c, &word.gone);
    } else if (kind == WAITS && !(word.waits.seconds >= 0 && word.waits.seconds < 1e9)) {
        return -1;
    }
    for (int i = 0; i < c->nspokes; i++) {
        if (c->spokes[i].link != link) continue;
        if (kind == CALLS) hear_calls(c, &c->spokes[i], &word.calls);
        if (kind == WAITS) hear_waits(&c->spokes[i], &word.waits);
    }
    weigh_opinions(c);
    tell(c);
    return 0;
}

static void take_turn_of(ucch_circle *c) {
    if (has_ended(c)) say_left(c);
    say_waits(c);
    uint64_t anew = ucch_far_changed(c->far);
    for (int i = 0; i < c->nspokes; i++) {
        tell_anew(&c->spokes[i], anew);
        send_calls(c, &c->spokes[i]);
        compare(c, &c->spokes[i]);
    }
    weigh_opinions(c);
    tell(c);
    note_last(c);
    note_waiter(c);
}

static void take_turn(void) {
    for (ucch_circle *c = circles; c; c = c->next)
        take_turn_of(c);
}

/* The process at a link's other end is gone, or all of its host. */
static void lost(int link, int how) {
    for (ucch_circle *c = circles; c; c = c->next)
        for (int i = 0; i < c->nspokes; i++) {
            if (c->spokes[i].link != link) continue;
            for (int r = 0; r < c->size; r++) {
                int with = how == UCCH_UNREACHABLE && c->hosts[r] == c->hosts[c->spokes[i].rank];
                if (with || r == c->spokes[i].rank) note_gone(c, &(gone){.rank = r, .how = how});
            }
            tell(c);
        }
}

/* ---- from outside ---- */

static void release(ucch_circle *c) {
    free(c->hosts);
    free(c->news);
    free(c->spokes);
    free(c);
}

/* Have the ranks of a communicator on several hosts tell each other what they call and which ranks are gone; `key` is
 * the same on all of them, `hosts` says where each rank is, and there is a link with each of the `n` ranks. NULL: no
 * memory. */
ucch_circle *ucch_circle_new(ucch_board *board, uint64_t key, int rank, int size, const int *hosts, int n,
                             const int *links, const int *ranks) {
    static const ucch_listener listener = {heard, take_turn, lost};
    ucch_circle *c = calloc(1, sizeof(*c));
    if (c) {
        *c = (ucch_circle){.key = key, .board = board, .far = ucch_board_far(board), .rank = rank, .size = size};
        c->hosts = calloc((size_t)size, sizeof(int));
        c->spokes = calloc((size_t)n + 1, sizeof(spoke));
        c->nspokes = n;
    }
    if (!c || !c->hosts || !c->spokes || !c->far) {
        if (c) release(c);
        return NULL;
    }
    memcpy(c->hosts, hosts, (size_t)size * sizeof(int));
    ucch_links_lock();
    ucch_links_listen(&listener);
    for (int i = 0; i < n; i++) {
        c->spokes[i].link = links[i];
        c->spokes[i].rank = ranks[i];
    }
    c->next = circles;
    circles = c;
    for (int i = 0; i < n; i++) /* it may have died since it was connected */
        if (ucch_link_fate(links[i]) > UCCH_LEFT)
            note_gone(c, &(gone){.rank = ranks[i], .how = ucch_link_fate(links[i])});
    ucch_links_unlock();
    return c;
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
    if (has_ended(c)) take_turn_of(c);
    UCCH_UNLINK(circles, c, next);
    ucch_links_unlock();
    release(c);
}
