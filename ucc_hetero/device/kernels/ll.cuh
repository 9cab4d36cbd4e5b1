/* Short messages between devices of one host by NCCL's LL protocol: every store of eight bytes brings four of data and
 * a flag, so that a receiver that finds the flag has the data, and no fence and no counter stand between them. Flags
 * are the piece's number, which its slot has not had before, and not 0, which words have that were never written. */
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

typedef unsigned long long ll_word;

/* Two words: one access where there is such a one. */
struct ll_pair {
    ll_word x, y;
};
#if defined(__CUDA_ARCH__)
__device__ ll_pair ll_fetch(const ll_word *p) {
    quad v = fetch((const quad *)p);
    return {v.x, v.y};
}
__device__ void ll_put(ll_word *p, ll_pair v) { put((quad *)p, quad{v.x, v.y}); }
#else
__device__ ll_pair ll_fetch(const ll_word *p) { return {fetch(p), fetch(p + 1)}; }
__device__ void ll_put(ll_word *p, ll_pair v) {
    put(p, v.x);
    put(p + 1, v.y);
}
#endif

/* Eight bytes of data, or as many as are left, as elements of T. */
template <class T> __device__ ll_word ll_load(const char *src, unsigned left) {
    ll_word data = 0;
    for (unsigned k = 0; k < 8 / sizeof(T); k++)
        if (k * sizeof(T) < left) data |= (ll_word)((const T *)src)[k] << 8 * sizeof(T) * k;
    return data;
}
template <class T> __device__ void ll_store(char *dst, ll_word data, unsigned left) {
    for (unsigned k = 0; k < 8 / sizeof(T); k++)
        if (k * sizeof(T) < left) ((T *)dst)[k] = (T)(data >> 8 * sizeof(T) * k);
}

/* Elements of eight bytes, combined. */
__device__ ll_word ll_combined(ll_word one, ll_word other) {
    union {
        ll_word all;
        TO each[sizeof(TO) > 8 ? 1 : 8 / sizeof(TO)];
    } a, b;
    a.all = one;
    b.all = other;
    for (unsigned k = 0; k < 8 / sizeof(TO); k++)
        element(a.each[k], b.each[k], 0);
    return a.all;
}

/* Message in a slot: its bytes `from` to `to` are a block's, and the head is with the first. `kind`: the move's; `own`
 * is what is combined with it, if anything. */
struct ll_message {
    char *data, *slot;
    const char *own;
    unsigned kind, from, to, bytes, flag;
    ll_word hash;
};
__device__ int ll_first(const ll_message &m) {
    return (m.from ? (int)(m.from / 8) : -UCCH_LL_HEAD / 2) + (int)threadIdx.x;
}
__device__ int ll_end(const ll_message &m) { return (int)((m.to + 7) / 8); }
__device__ ll_word ll_head(const ll_message &m, int at) { return at == -1 ? m.bytes : m.hash; }

/* Lines that a thread has under way at a time, as a look at memory of the host takes as long for two as for one: a
 * message of 8 KiB has two for each thread. More would take registers that blocks need (words.cuh). */
#define LL_DEEP 2
template <class T> __device__ void ll_send(const ll_message &m) {
    const ll_word mark = (ll_word)m.flag << 32;
    const int step = (int)blockDim.x, end = ll_end(m);
    for (int i = ll_first(m); i < end; i += LL_DEEP * step) {
        ll_word held[LL_DEEP];
        for (int k = 0; k < LL_DEEP; k++) {
            const int at = i + k * step;
            held[k] = at < 0 ? ll_head(m, at) : at < end ? ll_load<T>(m.data + at * 8, m.to - (unsigned)at * 8) : 0;
        }
        for (int k = 0; k < LL_DEEP; k++)
            if (i + k * step < end)
                ll_put((ll_word *)m.slot + 2 * (i + k * step), {mark | (unsigned)held[k], mark | held[k] >> 32});
    }
}

/* How often a thread looks before it asks whether the host lets it go. */
#define LL_LOOKS 64
__device__ unsigned ll_lacks(ll_pair v, unsigned flag) {
    return ((unsigned)(v.x >> 32) ^ flag) | ((unsigned)(v.y >> 32) ^ flag);
}
__device__ ll_word ll_data(ll_pair v) { return (v.x & 0xffffffff) | v.y << 32; }
/* Looks at the lines from `i` on until all of them have come: true if they have, false if the host lets the thread go.
 * No look waits for the end of another one. There is none past the end: when threads looked at the last line again
 * instead, an allreduce of 8 KiB took 88 us, not 10. A head that is another call's is told at once, as less may come
 * than is waited for. */
__device__ bool ll_await(const ll_message &m, int i, ll_pair *v, ucch_replays *replays) {
    const int step = (int)blockDim.x, end = ll_end(m);
    for (unsigned looks = 1;; looks++) {
        unsigned missing = 0;
        for (int k = 0; k < LL_DEEP; k++)
            if (i + k * step < end) v[k] = ll_fetch((const ll_word *)m.slot + 2 * (i + k * step));
        for (int k = 0; k < LL_DEEP; k++) {
            const int at = i + k * step;
            const unsigned lacks = at < end ? ll_lacks(v[k], m.flag) : 0;
            if (at < 0 && !lacks && ll_data(v[k]) != ll_head(m, at)) PUT(&replays->wrong.word, REPLAY_DIFFERS);
            missing |= lacks;
        }
        if (!missing) return true;
        if (looks % LL_LOOKS == 0 && GET(&replays->stop.word)) return false;
    }
}
/* Takes words out as they come. */
template <class T> __device__ void ll_receive(const ll_message &m, ucch_replays *replays) {
    const int step = (int)blockDim.x, end = ll_end(m);
    const bool first = m.kind == MOVE_LL_FIRST;
    for (int i = ll_first(m); i < end; i += LL_DEEP * step) {
        ll_word own[LL_DEEP];
        ll_pair v[LL_DEEP];
        for (int k = 0; k < LL_DEEP; k++) {
            const int at = i + k * step;
            own[k] = m.own && at >= 0 && at < end ? ll_load<T>(m.own + at * 8, m.to - (unsigned)at * 8) : 0;
        }
        if (!ll_await(m, i, v, replays)) return;
        for (int k = 0; k < LL_DEEP; k++) {
            const int at = i + k * step;
            if (at < 0 || at >= end) continue;
            ll_word data = ll_data(v[k]);
            if (m.own) data = ll_combined(first ? data : own[k], first ? own[k] : data);
            ll_store<T>(m.data + at * 8, data, m.to - (unsigned)at * 8);
        }
    }
}

/* By the longest elements that the data's address and length allow. */
__device__ void ll_move(const ll_message &m, ucch_replays *replays) {
    const unsigned long long all = alignment(m.data, m.own, m.bytes);
    const bool comes = m.kind != MOVE_LL_SEND;
    if (all % 8 == 0)
        comes ? ll_receive<unsigned long long>(m, replays) : ll_send<unsigned long long>(m);
    else if (all % 4 == 0)
        comes ? ll_receive<unsigned>(m, replays) : ll_send<unsigned>(m);
    else
        comes ? ll_receive<unsigned char>(m, replays) : ll_send<unsigned char>(m);
}
