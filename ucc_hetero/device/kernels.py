"""Arithmetic on devices: element-wise kernels, made by the vendor's own run-time compiler when a plan first needs them.

NVRTC and hipRTC take the same source. Where neither is there, or it cannot compile for the device, the engine computes
on the host, through pinned memory: right, but slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI

from ucc_hetero import env, log
from ucc_hetero.device import hip
from ucc_hetero.device.rank import bound
from ucc_hetero.device.registry import runtime_of
from ucc_hetero.device.runtime import DeviceRuntime
from ucc_hetero.device.sources import source
from ucc_hetero.machine import vendors
from ucc_hetero.native.libraries import ffi, lib, mapped, package_dirs

__all__ = ["all_ready", "candidates", "image", "ready", "target"]

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


def ready(kind: int, op: int, dtype: int, to: int, *, insist: bool = False) -> bool:
    """Whether the device of this process does such steps itself; compiles and loads what does them at first use.

    Numbers as the native engine's: ``UCCH_COMBINE`` with UCC's operation, ``UCCH_CAST``, ``UCCH_SCALE``; UCC's
    datatypes. ``UCCH_AWAIT``, ``UCCH_POST`` and ``UCCH_CARRY`` have neither, ``UCCH_WHOLE`` those of its arithmetic.
    ``insist``: the answer must be that of the other ranks, however long streams are held.
    """
    key = kind, op if kind in (lib.UCCH_COMBINE, lib.UCCH_WHOLE) else 0, dtype, to if kind == lib.UCCH_CAST else 0
    if key not in _known:
        if not _nothing_held() and not insist:
            return False  # for this time
        _known[key] = _make(*key)
    return _known[key]


def all_ready(wanted: Iterable[tuple[int, int, int, int]]) -> bool:
    """Whether all of these kernels are there; all are made, as whoever needs one is not to find out too late."""
    return min((ready(*each, insist=True) for each in wanted), default=True)


#: What has been made, or found impossible.
_known: dict[tuple[int, int, int, int], bool] = {}
#: HIP reads a kernel where its image is, and does not copy that.
_images: list[bytes] = []


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
    _images.append(image)
    if lib.ucch_kernel_add(kind, op, dtype, to, ffi.from_buffer(image)) < 0:
        reason = ffi.string(lib.ucch_device_error()).decode(errors="replace")
        log.log("device").info("no kernel on this device, so that the host computes: %s", reason)
        return False
    return True


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
        words = ["-std=c++14", *target(self._vendor, device)]
        options = [self._ffi.new("char[]", word.encode()) for word in words]
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


def image(vendor: str, text: str, device: int) -> bytes:
    """Machine code of a kernel's text; ``RuntimeError`` with what the compiler says, or that there is none."""
    compiler = _compiler(vendor)
    if compiler is None:
        raise RuntimeError(f"no run-time compiler is found for {vendor}: tried {', '.join(candidates(vendor))}")
    return compiler.compile(text, device)


def target(vendor: str, device: int) -> list[str]:
    """The compiler's option for what it compiles for; none where it has to find that out itself."""
    if vendor == "amd":
        # hipRTC would load "libamdhip64.so" to find out: a name that may be missing, or another HIP's.
        found = _arch(runtime_of(vendor), device)
        return [f"--offload-arch={found}"] if found else []
    target = ffi.new("char[]", 64)
    lib.ucch_cuda_target(device, target, 64)
    found = ffi.string(target).decode()
    return [f"-arch={found}"] if found else []


def _arch(runtime: DeviceRuntime | None, device: int) -> str:
    """The device's target as the kernel has it, unless the runtime was told to take it for another one."""
    if runtime is None or any(name.startswith("HSA_OVERRIDE_GFX_VERSION") for name in os.environ):
        return ""
    bus = runtime.bus(device).partition(".")[0]  # of any partition
    return next((each.arch for each in vendors.devices() if each.pci.partition(".")[0] == bus), "")


@cache
def _compiler(vendor: str) -> _Compiler | None:
    explicit = env.get("RTC_LIB")
    if explicit.lower() == "none":
        return None
    for path in [explicit] if explicit else candidates(vendor):
        try:
            return _Compiler(vendor, path)
        except (OSError, AttributeError) as error:
            log.log("device").debug("%s: %s", path, error)
    log.log("device").info("no run-time compiler for %s: arithmetic of our own is done on the host", vendor)
    return None


def candidates(vendor: str) -> list[str]:
    """Where the compiler may be, best first: in this process, in the vendor's wheels, with the toolkit.

    HIP runtimes before 7 are compilers as well; hipRTC of another release than the runtime's may make code that the
    runtime cannot read, so that the one beside it comes first.
    """
    name, runtime = f"lib{_PREFIX[vendor]}.so", runtime_of(vendor)
    present = mapped(name)
    out = [*([present] if present else []), *([runtime.path] if runtime else [])]
    if vendor == "nvidia":
        for folder in package_dirs("nvidia"):
            out += [str(p) for p in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")) if "builtins" not in p.name]
        return [*out, *(f"{name}.{major}" for major in (13, 12)), name]
    beside = [str(path) for folder in hip.folders() for path in sorted(folder.glob(f"{name}*"))]
    return [*out, *beside, *(f"{name}.{major}" for major in (7, 6, 5)), name]
