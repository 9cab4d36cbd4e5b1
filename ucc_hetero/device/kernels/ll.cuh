/* Short messages between devices of one host by NCCL's LL protocol: every store of eight bytes brings four of data and
 * a flag, so that a receiver that finds the flag has the data, and no fence and no counter stand between them. Flags
 * are the piece's number, which its slot has not had before. */
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

template <class T> __device__ void ll_send(const ll_message &m) {
    const ll_word mark = (ll_word)m.flag << 32;
    for (int i = ll_first(m), end = ll_end(m); i < end; i += (int)blockDim.x) {
        ll_word data = i < 0 ? ll_head(m, i) : ll_load<T>(m.data + i * 8, m.to - (unsigned)i * 8);
        ll_put((ll_word *)m.slot + 2 * i, {mark | (unsigned)data, mark | data >> 32});
    }
}

/* Pairs that a thread looks at at a time; and how often it looks before it asks whether the host lets it go. */
#define LL_DEEP 4
#define LL_LOOKS 64
/* Takes words out as they come; a head that is another call's is told at once, as less may come than is waited for. */
template <class T> __device__ void ll_receive(const ll_message &m, ucch_replays *replays) {
    const int step = (int)blockDim.x, end = ll_end(m);
    for (int i = ll_first(m); i < end; i += LL_DEEP * step) {
        ll_word held[LL_DEEP];
        for (unsigned looks = 1, missing = 1; missing; looks++) {
            missing = 0;
            for (int k = 0; k < LL_DEEP; k++) {
                const int at = i + k * step;
                if (at >= end) continue;
                const ll_pair v = ll_fetch((const ll_word *)m.slot + 2 * at);
                const unsigned other = ((unsigned)(v.x >> 32) ^ m.flag) | ((unsigned)(v.y >> 32) ^ m.flag);
                held[k] = (v.x & 0xffffffff) | v.y << 32;
                if (at < 0 && !other && held[k] != ll_head(m, at)) PUT(&replays->wrong.word, REPLAY_DIFFERS);
                missing |= other;
            }
            if (missing && looks % LL_LOOKS == 0 && GET(&replays->stop.word)) return;
        }
        for (int k = 0; k < LL_DEEP; k++) {
            const int at = i + k * step;
            if (at < 0 || at >= end) continue;
            const ll_word own = m.own ? ll_load<T>(m.own + at * 8, m.to - (unsigned)at * 8) : 0;
            if (m.kind == MOVE_LL_SECOND) held[k] = ll_combined(own, held[k]);
            if (m.kind == MOVE_LL_FIRST) held[k] = ll_combined(held[k], own);
            ll_store<T>(m.data + at * 8, held[k], m.to - (unsigned)at * 8);
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
