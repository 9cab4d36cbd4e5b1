"""Element-wise kernels, compiled at run time by the vendor's own compiler when a plan first needs them.

NVRTC and hipRTC take the same source. If neither is installed, or it cannot compile for the device, the engine computes
on the host through pinned memory: correct, but slower.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from cffi import FFI

from ... import env, log
from ...errors import NotSupported
from ...machine.vendors import VENDORS, Compiler
from ...native import libraries
from ...native.libraries import c_text, ffi, lib, mapped
from ...native.waiting import progress_until
from ..rank import bound
from ..registry import runtime_of
from .sources import source

__all__ = ["all_ready", "beside_a_capture", "candidates", "image", "ready"]

#: Seconds to wait for calls under way before a kernel is loaded.
_PATIENCE = 1.0

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


def ready(kind: int, op: int, dtype: int, to: int, *, insist: bool = False) -> bool:
    """True if this process's device executes such steps. Compiles and loads the kernel at first use.

    Numbers are the native engine's: kind ``UCCH_COMBINE`` with UCC's operation, ``UCCH_CAST``, ``UCCH_SCALE``; types of
    UCC, ``UCCH_E4M3FN`` and ``UCCH_E4M3FNUZ``. ``UCCH_AWAIT``, ``UCCH_LANE_COPY`` and ``UCCH_RING_COPY`` have neither
    operation nor type, ``UCCH_FUSED`` has both, ``UCCH_PIECES`` has both types. ``insist``: the answer must equal the
    other ranks', so wait however long streams are held.
    """
    key = kind, op if kind in (lib.UCCH_COMBINE, lib.UCCH_FUSED) else 0, dtype, to if kind in _TWO_TYPES else 0
    if key not in _known:
        if _here.makes_none:
            raise NotSupported(
                "a call in a graph capture needs a kernel that is not loaded yet: make such a call once before the "
                "capture"
            )
        # Not while a stream waits for a call: loading a kernel may wait for the device, and so for that stream.
        if not progress_until(lambda: not lib.ucch_gates_held(), _PATIENCE, step=0.0) and not insist:
            return False  # the host computes this time
        _known[key] = _make(*key)
    return _known[key]


def all_ready(wanted: Iterable[tuple[int, int, int, int]]) -> bool:
    """True if all these kernels are available. Compiles and loads those that are not."""
    return min((ready(*each, insist=True) for each in wanted), default=True)


_TWO_TYPES = (lib.UCCH_CAST, lib.UCCH_PIECES)


class _Here(threading.local):
    makes_none = False


_here = _Here()


@contextmanager
def beside_a_capture(*, make: bool) -> Iterator[None]:
    """Context for a thread that captures a graph: kernels are loaded outside of the capture; error if not ``make``."""
    _here.makes_none, mode = not make, lib.ucch_capture_mode(lib.UCCH_RELAXED)
    try:
        yield
    finally:
        _here.makes_none = False
        lib.ucch_capture_mode(mode)


#: Kernel -> True if it is loaded, False if it cannot be made.
_known: dict[tuple[int, int, int, int], bool] = {}
#: Images of loaded kernels: HIP does not copy them, so they must stay alive.
_images: list[bytes] = []


def _make(kind: int, op: int, dtype: int, to: int) -> bool:
    place = bound()
    text = source(kind, op, dtype, to)
    compiler = _compiler(place.vendor) if place and text else None
    if compiler is None or text is None or place is None:
        return False
    try:
        image = compiler.compile(text, place.device)
        _images.append(image)
        if lib.ucch_kernel_add(kind, op, dtype, to, ffi.from_buffer(image)) < 0:
            raise RuntimeError(c_text(lib.ucch_device_error()))
    except RuntimeError as error:
        log.log("device").info("no kernel on this device, so that the host computes: %s", error)
        return False
    return True


class _Compiler:
    def __init__(self, vendor: str, row: Compiler, path: str) -> None:
        self._vendor, self._row, self._prefix = vendor, row, row.prefix
        self._ffi = FFI()
        self._ffi.cdef(_HEADER.format(p=row.prefix, code=row.code))
        self._lib: Any = self._ffi.dlopen(path)
        getattr(self._lib, f"{self._prefix}CreateProgram")  # AttributeError if it is another library

    def _call(self, name: str, *args: Any) -> int:
        return int(getattr(self._lib, self._prefix + name)(*args))

    def _read(self, what: str, program: Any) -> bytes:
        size = self._ffi.new("size_t *")
        self._call(f"Get{what}Size", program, size)
        room = self._ffi.new("char[]", max(int(size[0]), 1))
        self._call(f"Get{what}", program, room)
        return bytes(self._ffi.buffer(room, int(size[0])))

    def compile(self, text: str, device: int) -> bytes:
        """Compile for the device. ``RuntimeError`` with the compiler's messages."""
        # Without a target hipRTC loads "libamdhip64.so" to find one: that file may be missing, or be another HIP.
        runtime = runtime_of(self._vendor)
        target = runtime.target(device) if runtime is not None else ""
        words = ["-std=c++14", self._row.unfused, *([self._row.option + target] if target else [])]
        options = [self._ffi.new("char[]", word.encode()) for word in words]
        program = self._ffi.new("void **")
        none = self._ffi.NULL
        if self._call("CreateProgram", program, text.encode(), b"ucch.cu", 0, none, none):
            raise RuntimeError("the run-time compiler takes no program")
        try:
            if self._call("CompileProgram", program[0], len(options), self._ffi.new("char *[]", options)):
                raise RuntimeError(self._read("ProgramLog", program[0]).decode(errors="replace").strip("\0 \n"))
            return self._read(self._row.code, program[0])
        finally:
            self._call("DestroyProgram", program)


def image(vendor: str, text: str, device: int) -> bytes:
    """Machine code of a kernel's source. ``RuntimeError`` with the compiler's messages, or if there is no compiler."""
    compiler = _compiler(vendor)
    if compiler is None:
        raise RuntimeError(f"no run-time compiler is found for {vendor}: tried {', '.join(candidates(vendor))}")
    return compiler.compile(text, device)


@cache
def _compiler(vendor: str) -> _Compiler | None:
    explicit, row = env.get("RTC_LIB"), VENDORS[vendor].compiler
    if explicit.lower() == "none" or row is None:
        return None
    for path in [explicit] if explicit else candidates(vendor):
        try:
            return _Compiler(vendor, row, path)
        except (OSError, AttributeError) as error:
            log.log("device").debug("%s: %s", path, error)
    log.log("device").info("no run-time compiler for %s: arithmetic of our own is done on the host", vendor)
    return None


def candidates(vendor: str) -> list[str]:
    """Files that may be the compiler, best first: loaded in this process, inside the runtime, in the library's folders.

    HIP runtimes before 7 contain the compiler. A hipRTC of another release may generate code that the runtime cannot
    load, so the one beside the runtime comes first.
    """
    row, runtime = VENDORS[vendor].compiler, runtime_of(vendor)
    if row is None:
        return []
    first = [mapped(row.library.name), runtime.path if runtime is not None else None]
    return list(dict.fromkeys([*filter(None, first), *libraries.candidates(row.library), row.library.name]))
