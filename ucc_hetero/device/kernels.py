"""Arithmetic on devices: element-wise kernels, made by the vendor's own run-time compiler when a plan first needs them.

NVRTC and hipRTC take the same source. Where neither is there, or it cannot compile for the device, the engine computes
on the host, through pinned memory: right, but slower.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI

from ucc_hetero import env, log
from ucc_hetero.device.rank import bound
from ucc_hetero.device.vendors import runtime_of
from ucc_hetero.native import ffi, lib, mapped, package_dirs
from ucc_hetero.types import DTYPES, OPS

__all__ = ["ready", "source"]

#: Seconds to wait for calls under way before a kernel is loaded.
_PATIENCE = 1.0

#: Prefix of the compiler's functions by vendor; hipRTC has NVRTC's interface under names of its own.
_PREFIX = {"nvidia": "nvrtc", "amd": "hiprtc"}
#: What the compiled code is called in them: machine code, of which NVRTC has two kinds.
_CODE = {"nvidia": "CUBIN", "amd": "Code"}

_HEADER = """
int {p}CreateProgram(void **program, const char *source, const char *name, int n, const char **headers,
                     const char **as);
int {p}CompileProgram(void *program, int n, const char **options);
int {p}Get{code}Size(void *program, size_t *bytes);
int {p}Get{code}(void *program, char *code);
int {p}GetProgramLogSize(void *program, size_t *bytes);
int {p}GetProgramLog(void *program, char *text);
int {p}DestroyProgram(void **program);
"""

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

#: Half precisions are combined in float and rounded to nearest even once, as on the host (``cffi_build/local.c``).
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

#: Words in memory that other devices write, or read; they only grow, and wrap around (``cffi_build/channel.c``).
_WORDS = """
#ifdef __AMDGCN__
#define GET(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define PUT(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define NAP() __builtin_amdgcn_s_sleep(4)
#else
#define GET(p) (*(volatile unsigned *)(p))
#define PUT(p, v) (*(volatile unsigned *)(p) = (v))
#define NAP() __nanosleep(40)
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

#: All of a short call: ``ucch_moves`` of ``cffi_build/whole.h``, one after the other. Every block does the same slice
#: of each, and the last to have done so tells other ranks. Loads and stores are volatile as others write what is read,
#: and several are under way at a time.
_WHOLE = """
struct move { const void *src; void *dst; unsigned *wait, *tell, least, value, kind, n; };
struct moves { unsigned long long n; unsigned *arrived; move each[40]; };

template <class T> __device__ void copy(void *dst, const void *src, unsigned bytes) {
    const unsigned n = bytes / sizeof(T), some = 8, far = some * blockDim.x;
    unsigned i = threadIdx.x;
    for (; i + far - blockDim.x < n; i += far) {
        T held[some];
        for (unsigned k = 0; k < some; k++)
            held[k] = ((const volatile T *)src)[i + k * blockDim.x];
        for (unsigned k = 0; k < some; k++)
            ((volatile T *)dst)[i + k * blockDim.x] = held[k];
    }
    for (; i < n; i += blockDim.x)
        ((volatile T *)dst)[i] = ((const volatile T *)src)[i];
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
__device__ void combine(TO *dst, const FROM *src, unsigned n, double by) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        BODY
}
__device__ unsigned edge(unsigned bytes, unsigned block) {
    unsigned long long at = (unsigned long long)((bytes + 63) / 64) * block / gridDim.x * 64;
    return at < bytes ? (unsigned)at : bytes;
}
extern "C" __global__ void ucch(moves all) {
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


def ready(kind: int, op: int, dtype: int, to: int, *, insist: bool = False) -> bool:
    """Whether the device of this process does such steps itself; compiles and loads what does them at first use.

    Numbers as the native engine's: ``UCCH_COMBINE`` with UCC's operation, ``UCCH_CAST``, ``UCCH_SCALE``; UCC's
    datatypes. ``UCCH_AWAIT`` and ``UCCH_POST`` have neither, ``UCCH_WHOLE`` those of its arithmetic. ``insist``: the
    answer must be that of the other ranks, however long streams are held.
    """
    key = kind, op if kind in (lib.UCCH_COMBINE, lib.UCCH_WHOLE) else 0, dtype, to if kind == lib.UCCH_CAST else 0
    if key not in _known:
        if not _nothing_held() and not insist:
            return False  # for this time
        _known[key] = _make(*key)
    return _known[key]


#: What has been made, or found impossible.
_known: dict[tuple[int, int, int, int], bool] = {}


def _nothing_held() -> bool:
    """Wait until no stream waits for a call: loading a kernel may wait for the device, and so for that stream."""
    until = time.monotonic() + _PATIENCE
    while lib.ucch_gates_held():
        if time.monotonic() > until:
            return False
        lib.ucch_progress_once()
        time.sleep(0)
    return True


def _make(kind: int, op: int, dtype: int, to: int) -> bool:
    place = bound()
    text = source(kind, op, dtype, to)
    compiler = _compiler(place.vendor) if place and text else None
    if compiler is None or text is None or place is None:
        return False
    try:
        image = compiler.compile(text, place.device)
    except RuntimeError as error:
        log.log("device").info("no kernel on this device, so that the host computes: %s", error)
        return False
    if lib.ucch_kernel_add(kind, op, dtype, to, ffi.from_buffer(image)) < 0:
        reason = ffi.string(lib.ucch_device_error()).decode(errors="replace")
        log.log("device").info("no kernel on this device, so that the host computes: %s", reason)
        return False
    return True


def source(kind: int, op: int, dtype: int, to: int) -> str | None:
    """The kernel's text; None for what there is none for."""
    words = {lib.UCCH_AWAIT: "AWAIT", lib.UCCH_POST: "POST"}
    if kind in words:
        return _WORDS + _WORD.replace("BODY", words[kind])
    names = {t.code: name for name, t in DTYPES.items() if name in _TYPES}
    if dtype not in names or (kind == lib.UCCH_CAST and to not in names):
        return None
    one = names[dtype]
    other = names[to] if kind == lib.UCCH_CAST else one
    body = _body(kind, op, one, _TYPES[one], _TYPES[other])
    if body is None:
        return None
    text = _SOURCE + (_WORDS + _WHOLE if kind == lib.UCCH_WHOLE else _EACH)
    return text.replace("FROM", _TYPES[one]).replace("TO", _TYPES[other]).replace("BODY", body)


def _body(kind: int, op: int, name: str, one: str, other: str) -> str | None:
    """What is done with element ``i``."""
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


class _Compiler:
    """A loaded run-time compiler of one vendor."""

    def __init__(self, vendor: str, path: str) -> None:
        self._vendor, self._prefix = vendor, _PREFIX[vendor]
        self._ffi = FFI()
        self._ffi.cdef(_HEADER.format(p=self._prefix, code=_CODE[vendor]))
        self._lib: Any = self._ffi.dlopen(path)
        getattr(self._lib, f"{self._prefix}CreateProgram")  # or it is another library

    def _call(self, name: str, *args: Any) -> int:
        return int(getattr(self._lib, self._prefix + name)(*args))

    def _read(self, what: str, program: Any) -> bytes:
        size = self._ffi.new("size_t *")
        self._call(f"Get{what}Size", program, size)
        room = self._ffi.new("char[]", max(int(size[0]), 1))
        self._call(f"Get{what}", program, room)
        return bytes(self._ffi.buffer(room, int(size[0])))

    def compile(self, text: str, device: int) -> bytes:
        """Machine code for the device; ``RuntimeError`` with what the compiler says."""
        target = ffi.new("char[]", 64)
        lib.ucch_device_target({"nvidia": lib.UCCH_CUDA, "amd": lib.UCCH_HIP}[self._vendor], device, target, 64)
        words = [b"-std=c++14", *([b"-arch=" + ffi.string(target)] if target[0] != b"\0" else [])]
        options = [self._ffi.new("char[]", word) for word in words]
        program = self._ffi.new("void **")
        none = self._ffi.NULL
        if self._call("CreateProgram", program, text.encode(), b"ucch.cu", 0, none, none):
            raise RuntimeError("the run-time compiler takes no program")
        try:
            if self._call("CompileProgram", program[0], len(options), self._ffi.new("char *[]", options)):
                raise RuntimeError(self._read("ProgramLog", program[0]).decode(errors="replace").strip("\0 \n"))
            return self._read(_CODE[self._vendor], program[0])
        finally:
            self._call("DestroyProgram", program)


@cache
def _compiler(vendor: str) -> _Compiler | None:
    explicit = env.get("RTC_LIB")
    if explicit.lower() == "none":
        return None
    for path in [explicit] if explicit else _candidates(vendor):
        try:
            return _Compiler(vendor, path)
        except (OSError, AttributeError) as error:
            log.log("device").debug("%s: %s", path, error)
    log.log("device").info("no run-time compiler for %s: arithmetic of our own is done on the host", vendor)
    return None


def _candidates(vendor: str) -> list[str]:
    """Where the compiler may be, best first: in this process, in the vendor's wheels, with the toolkit.

    HIP runtimes before 7 are compilers as well.
    """
    name, runtime = f"lib{_PREFIX[vendor]}.so", runtime_of(vendor)
    present = mapped(name)
    out = [*([present] if present else []), *([runtime.path] if runtime else [])]
    if vendor == "nvidia":
        for folder in package_dirs("nvidia"):
            out += [str(p) for p in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")) if "builtins" not in p.name]
        return [*out, *(f"{name}.{major}" for major in (13, 12)), name]
    toolkit = os.path.join(os.environ.get("ROCM_PATH") or "/opt/rocm", "lib")
    return [*out, os.path.join(toolkit, name), *(f"{name}.{major}" for major in (7, 6, 5)), name]
