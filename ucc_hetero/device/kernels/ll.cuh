/* Short messages between devices of one host by NCCL's LL protocol: every 8-byte store has four bytes of data and a
 * flag. A receiver that sees the flag has the data, without a fence or a counter. The flag is the piece's number, which
 * the slot has not had before, and is not 0, the value of words that were never written. */
#include "copies.cuh"
#include "layout.h"
#include "words.cuh"

typedef unsigned long long ll_word;

/* Two words, in one access if there is one of that size. */
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

/* Eight bytes of data, or the rest, as elements of T. */
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

/* Combine the elements in eight bytes. */
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

/* A message in a slot. This block has bytes `from` to `to`; the first block also has the head. `kind`: of the move;
 * `own`: operand to combine with, or NULL. */
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

/* Lines that a thread has in flight: a read of host memory takes as long for two lines as for one, and a message of 8
 * KiB has two lines per thread. More would take registers that blocks need (words.cuh). */
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

/* Number of polls between checks whether the host has released the thread. */
#define LL_LOOKS 64
__device__ unsigned ll_lacks(ll_pair v, unsigned flag) {
    return ((unsigned)(v.x >> 32) ^ flag) | ((unsigned)(v.y >> 32) ^ flag);
}
__device__ ll_word ll_data(ll_pair v) { return (v.x & 0xffffffff) | v.y << 32; }
/* Polls the lines from `i` on until all have arrived. True if they have, false if the host released the thread. A poll
 * does not wait for the previous one. There is no line past the end: when threads polled the last line again instead,
 * an allreduce of 8 KiB took 88 us, not 10. A head of another call is reported at once, as less data may arrive than is
 * waited for. */
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
/* Copies words out as they arrive. */
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

/* Uses the longest elements that the data's address and length allow. */
__device__ void ll_move(const ll_message &m, ucch_replays *replays) {
    const unsigned long long all = alignment(m.data, m.own, m.bytes);
    const bool incoming = m.kind != MOVE_LL_SEND;
    if (all % 8 == 0)
        incoming ? ll_receive<unsigned long long>(m, replays) : ll_send<unsigned long long>(m);
    else if (all % 4 == 0)
        incoming ? ll_receive<unsigned>(m, replays) : ll_send<unsigned>(m);
    else
        incoming ? ll_receive<unsigned char>(m, replays) : ll_send<unsigned char>(m);
}
