"""Texts of the package's kernels, in the language that CUDA and HIP share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ucc_hetero.native.libraries import lib
from ucc_hetero.types import DTYPES, OPS

__all__ = ["source"]

#: Our types in the language of the kernels.
_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long",
    "float16": "half_t", "bfloat16": "bfloat_t", "float32": "float", "float64": "double",
    "complex64": "pair<float>", "complex128": "pair<double>",
}  # fmt: skip

#: ``a`` is the destination's element, which holds the lower contribution; maximum and minimum keep NaN, as numpy does.
_OPS = {
    "SUM": "a + b", "PROD": "a * b", "MAX": "a != a || a > b ? a : b", "MIN": "a != a || a < b ? a : b",
    "LAND": "a && b", "LOR": "a || b", "LXOR": "!a != !b", "BAND": "a & b", "BOR": "a | b", "BXOR": "a ^ b",
}  # fmt: skip
_BITWISE = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")

#: Half precisions are combined in float and rounded to nearest even once, as on the host (``cffi_build/base/arith.c``).
_SOURCE = """
struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };
template <class R> struct pair { R re, im; };
template <class R> __device__ pair<R> operator+(pair<R> a, pair<R> b) { return {a.re + b.re, a.im + b.im}; }
template <class R> __device__ pair<R> operator*(pair<R> a, pair<R> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> struct wide { typedef T type; };
template <> struct wide<half_t> { typedef float type; };
template <> struct wide<bfloat_t> { typedef float type; };

template <class T> __device__ T load(T x) { return x; }
__device__ float load(bfloat_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ float load(half_t x) {
    unsigned sign = (unsigned)(x.bits & 0x8000) << 16, mantissa = x.bits & 0x3ff;
    int exponent = x.bits >> 10 & 31;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent)
        return __uint_as_float(sign | (unsigned)(exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 5.9604644775390625e-8f;
    return sign ? -tiny : tiny;
}

template <class T> struct store { static __device__ T from(T x) { return x; } };
template <> struct store<bfloat_t> {
    static __device__ bfloat_t from(float x) {
        unsigned bits = __float_as_uint(x);
        if ((bits & 0x7fffffff) > 0x7f800000)
            return {(unsigned short)(bits >> 16 | 0x40)};
        return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};
template <> struct store<half_t> {
    static __device__ half_t from(float x) {
        unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
        unsigned short sign = bits >> 16 & 0x8000;
        if (magnitude > 0x7f800000)
            return {(unsigned short)(sign | 0x7e00)};
        if (magnitude >= 0x477ff000)
            return {(unsigned short)(sign | 0x7c00)};
        if (magnitude < 0x38800000)
            return {(unsigned short)(sign | (unsigned short)rintf(__uint_as_float(magnitude) * 16777216.0f))};
        magnitude += 0xfff + (magnitude >> 13 & 1) - (112u << 23);
        return {(unsigned short)(sign | magnitude >> 13)};
    }
};
"""

_EACH = """
extern "C" __global__ void ucch(const FROM *src, TO *dst, unsigned long long n, double by) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        BODY
}
"""

#: Words in memory that other devices write, or read; they only grow, and wrap around (``cffi_build/shm/ring.c``). A
#: fence stands behind each loop that looks at one and before each store, so that the accesses themselves need no order:
#: on AMD an acquiring load would empty caches at every look. RCCL looks by relaxed loads, too, except on GFX12.
#:
#: ``DONE``: the stores of this wave have arrived; called by all threads before a barrier behind which one of them tells
#: others. AMD's barrier does not wait for stores, and its fences only for those of their own wave.
#: ``RESIDENT``: so few registers that as many threads run at a time as the device has room for, which is what the
#: engine counts on where kernels wait for each other. Without it an A100 runs one such block a multiprocessor, not
#: four. Hopper's kernels are as they were measured: two blocks, or 264 on an H200, where ten messages may want 320.
_WORDS = """
#ifdef __AMDGCN__
#if defined(__GFX12__)
#define GET(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#else
#define GET(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#endif
#define PUT(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#define NAP() __builtin_amdgcn_s_sleep(4)
#if defined(__GFX12__)
#define DONE() asm volatile("s_wait_storecnt 0x0" ::: "memory")
#elif defined(__GFX10__) || defined(__GFX11__)
#define DONE() asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory")
#elif defined(__GFX9__)
#define DONE() asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define DONE() __threadfence_system()
#endif
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
#define RESIDENT __attribute__((amdgpu_flat_work_group_size(1, 512), amdgpu_waves_per_eu(16)))
#else
#define RESIDENT __attribute__((amdgpu_flat_work_group_size(1, 512), amdgpu_waves_per_eu(8)))
#endif
#else
#define GET(p) (*(volatile unsigned *)(p))
#define PUT(p, v) (*(volatile unsigned *)(p) = (v))
#define NAP() __nanosleep(40)
#define DONE()
#if __CUDA_ARCH__ == 750
#define RESIDENT __launch_bounds__(512, 2)
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define RESIDENT __launch_bounds__(512, 3)
#elif __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ != 900
#define RESIDENT __launch_bounds__(512, 4)
#else
#define RESIDENT
#endif
#endif
__device__ void AWAIT(unsigned *word, unsigned long long n) {
    while ((int)(GET(word) - (unsigned)n) < 0)
        NAP();
    __threadfence_system();
}
__device__ void POST(unsigned *word, unsigned long long n) {
    __threadfence_system();
    PUT(word, (unsigned)n);
}
"""

_WORD = """
extern "C" __global__ void ucch(const void *, unsigned *dst, unsigned long long n, double) {
    BODY(dst, n);
}
"""

#: Loads and stores pass caches by, as others write what is read, and several are under way at a time. On AMD a volatile
#: access is waited for before the next begins; a relaxed atomic one of system scope is not (LLVM's AMDGPUUsage, memory
#: model).
_COPIES = """
#ifdef __AMDGCN__
#define READ(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define WRITE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#else
#define READ(p) (*(const volatile T *)(p))
#define WRITE(p, v) (*(volatile T *)(p) = (v))
#endif
template <class T> __device__ void copy(void *to, const void *from, unsigned bytes) {
    const unsigned n = bytes / sizeof(T), some = 8, far = some * blockDim.x;
    T *dst = (T *)to;
    const T *src = (const T *)from;
    unsigned i = threadIdx.x;
    for (; i + far - blockDim.x < n; i += far) {
        T held[some];
        for (unsigned k = 0; k < some; k++)
            held[k] = READ(src + i + k * blockDim.x);
        for (unsigned k = 0; k < some; k++)
            WRITE(dst + i + k * blockDim.x, held[k]);
    }
    for (; i < n; i += blockDim.x)
        WRITE(dst + i, READ(src + i));
}
__device__ void copy_bytes(void *dst, const void *src, unsigned bytes) {
    unsigned long long all = (unsigned long long)dst | (unsigned long long)src | bytes;
    if (all % 8 == 0)
        copy<unsigned long long>(dst, src, bytes);
    else if (all % 4 == 0)
        copy<unsigned>(dst, src, bytes);
    else
        copy<unsigned char>(dst, src, bytes);
}
"""

#: One side of a message (``carry`` of p2p/stream_copy.c; the layout of a run is in ``api/constants.h``): every block
#: has slices of it, and the receiver's follow the sender's. A receiver learns from its slip (shm/mailbox.c)
#: where the message is, and the sender rings its bell once data is there.
_NUMBERS = {
    "CHUNK": lib.UCCH_CHUNK_BYTES, "STEP": lib.UCCH_CARRY_STEP, "NOWHERE": lib.UCCH_NOWHERE,
    "FRONT": lib.UCCH_RUN_FRONT, "TAKEN": lib.UCCH_RUN_TAKEN, "ABOUT": lib.UCCH_RUN_ABOUT,
    "BELL": lib.UCCH_SLIP_BELL, "GONE": lib.UCCH_SLIP_GONE, "SLIP": lib.UCCH_SLIP,
}  # fmt: skip
_CARRY = """
struct carry {
    char *front, *data, *arena, *buffer;
    unsigned *slip;
    char *slips;
    unsigned long long bytes, slice, room;
};

/* The posted receive in the mailbox. */
__device__ void look_up(carry &c) {
    const unsigned long long where = GET(c.slip);
    __threadfence_system();
    c.front += (where - 1) * FRONT;
    const volatile unsigned long long *about = (const volatile unsigned long long *)(c.front + ABOUT);
    c.bytes = where == NOWHERE || about[0] > c.bytes ? 0 : about[0];
    c.slice = c.bytes ? about[1] : 1;
    c.room = c.bytes ? about[4] : 1;
    c.data = (c.bytes && about[6] ? c.arena : c.data) + (where - 1) * (unsigned long long)CHUNK;
}
__device__ void wait_for(unsigned *word, unsigned least, unsigned *stop) {
    while ((int)(GET(word) - least) < 0 && !GET(stop))
        NAP();
    __threadfence_system();
}
__device__ void ring(const carry &c, char *run) {
    volatile unsigned long long *about = (volatile unsigned long long *)(run + ABOUT);
    __threadfence_system();
    const unsigned long long whose = about[2];
    if (whose)
        PUT((unsigned *)(c.slips + (whose % 4294967296ull - 1) * SLIP + BELL), (unsigned)(whose >> 32));
    __threadfence_system();
    about[3] = 1;
}
extern "C" __global__ RESIDENT void ucch(carry c) {
    __shared__ carry found;
    if (c.slip && threadIdx.x == 0) { /* alone: all threads of a block together took 50 microseconds for it */
        found = c;
        look_up(found);
    }
    __syncthreads();
    const unsigned long long bytes = c.slip ? found.bytes : c.bytes, slice = c.slip ? found.slice : c.slice;
    const unsigned long long room = c.slip ? found.room : c.room;
    char *run = c.slip ? found.front : c.front, *data = c.slip ? found.data : c.data;
    for (unsigned long long k = blockIdx.x; k * slice < bytes; k += gridDim.x) {
        const unsigned long long from = k * slice, length = bytes - from < slice ? bytes - from : slice;
        unsigned *put = (unsigned *)(run + k * 64), *taken = (unsigned *)(run + TAKEN + k * 64), step = 0;
        for (unsigned long long done = 0; done < length; done += STEP) {
            const unsigned some = length - done < STEP ? (unsigned)(length - done) : STEP;
            char *there = data + k * room + done % room, *here = c.buffer + from + done;
            step++;
            if (c.slip && threadIdx.x == 0)
                wait_for(put, step, c.slip + 2);
            if (!c.slip && done >= room && threadIdx.x == 0)
                wait_for(taken, step - (unsigned)(room / STEP), (unsigned *)(run + ABOUT + 40));
            __syncthreads();
            copy_bytes(c.slip ? here : there, c.slip ? there : here, some);
            DONE();
            __syncthreads();
            if (threadIdx.x == 0)
                POST(c.slip ? taken : put, step);
            if (!c.slip && threadIdx.x == 0 && k == 0 && step == 1)
                ring(c, run);
        }
    }
    if (c.slip && threadIdx.x == 0)
        POST(c.slip + GONE / 4 + 16 * blockIdx.x, 1);
}
"""

#: All of a short call: ``ucch_moves`` of coll/fused.h, one after the other. Every block does the same slice
#: of each, and the last to have done so tells other ranks.
_WHOLE = """
struct move { const void *src; void *dst; unsigned *wait, *tell, least, value, kind, n; };
struct moves { unsigned long long n; unsigned *arrived; move each[40]; };

__device__ void combine(TO *dst, const FROM *src, unsigned n, double by) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        BODY
}
__device__ unsigned edge(unsigned bytes, unsigned block) {
    unsigned long long at = (unsigned long long)((bytes + 63) / 64) * block / gridDim.x * 64;
    return at < bytes ? (unsigned)at : bytes;
}
extern "C" __global__ RESIDENT void ucch(moves all) {
    for (unsigned k = 0; k < all.n; k++) {
        const move m = all.each[k];
        const unsigned bytes = m.kind == 2 ? m.n * (unsigned)sizeof(TO) : m.n;
        const unsigned from = edge(bytes, blockIdx.x), to = edge(bytes, blockIdx.x + 1);
        if (m.wait && threadIdx.x == 0)
            AWAIT(m.wait, m.least);
        __syncthreads();
        char *dst = (char *)m.dst + from;
        const char *src = (const char *)m.src + from;
        if (m.kind == 1)
            copy_bytes(dst, src, to - from);
        else if (m.kind == 2)
            combine((TO *)dst, (const FROM *)src, (to - from) / sizeof(TO), 0);
        DONE();
        __syncthreads();
        if (m.tell && threadIdx.x == 0) {
            __threadfence_system();
            if (gridDim.x == 1 || atomicInc(all.arrived + k, gridDim.x - 1) == gridDim.x - 1) {
                __threadfence_system();
                PUT(m.tell, m.value);
            }
        }
    }
}
"""


def source(kind: int, op: int, dtype: int, to: int) -> str | None:
    """The kernel's text; None for what there is none for."""
    words = {lib.UCCH_AWAIT: "AWAIT", lib.UCCH_POST: "POST"}
    if kind in words:
        return _filled(_WORDS + _WORD, {"BODY": words[kind]})
    if kind == lib.UCCH_CARRY:
        return _filled(_WORDS + _COPIES + _CARRY, {name: str(n) for name, n in _NUMBERS.items()})
    names = {t.code: name for name, t in DTYPES.items() if name in _TYPES}
    if dtype not in names or (kind == lib.UCCH_CAST and to not in names):
        return None
    one = names[dtype]
    other = names[to] if kind == lib.UCCH_CAST else one
    body = _body(kind, op, one, _TYPES[one], _TYPES[other])
    if body is None:
        return None
    text = _SOURCE + (_WORDS + _COPIES + _WHOLE if kind == lib.UCCH_WHOLE else _EACH)
    return _filled(text, {"FROM": _TYPES[one], "TO": _TYPES[other], "BODY": body})


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with values in the place of names: whole words only, as ``TO`` is part of ``__ATOMIC_ACQUIRE``."""
    return re.sub(rf"\b({'|'.join(values)})\b", lambda found: values[found[1]], text)


def _body(kind: int, op: int, name: str, one: str, other: str) -> str | None:
    """Statement for element ``i``."""
    sort, w = DTYPES[name].kind, f"wide<{one}>::type"
    if kind == lib.UCCH_CAST:
        return f"dst[i] = store<{other}>::from(load(src[i]));"
    if kind == lib.UCCH_SCALE:
        if sort == "complex":
            part = one.removeprefix("pair<").removesuffix(">")
            return f"dst[i] = {one}{{dst[i].re / ({part})by, dst[i].im / ({part})by}};"
        by = {"int": "(long long)by", "uint": "(unsigned long long)by", "float": f"({w})by"}[sort]
        return f"dst[i] = store<{one}>::from(({w})(load(dst[i]) / {by}));"
    word = next((word for word, o in OPS.items() if o.code == op and word in _OPS), None)
    if word is None or (word in _BITWISE and sort not in ("int", "uint")):
        return None
    if sort == "complex" and word not in ("SUM", "PROD"):
        return None
    return f"{{ {w} a = load(dst[i]), b = load(src[i]); dst[i] = store<{one}>::from(({w})({_OPS[word]})); }}"
