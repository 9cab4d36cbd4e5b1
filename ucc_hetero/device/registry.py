"""Vendor -> its runtime, found and loaded once; why one is absent."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from ucc_hetero import env
from ucc_hetero.device import cuda, hip
from ucc_hetero.device.runtime import DeviceRuntime
from ucc_hetero.native.libraries import ffi, lib

__all__ = ["MEMORY_NAMES", "available", "collective_library", "forget", "memory_vendor", "report", "runtime_of"]

_VENDORS: tuple[ModuleType, ...] = (cuda, hip)
_OVERRIDES = {"nvidia": "CUDA_LIB", "amd": "HIP_LIB"}

#: ``ucc_memory_type_t`` -> its name, as UCX spells it.
MEMORY_NAMES = ("host", "cuda", "cuda-managed", "rocm", "rocm-managed")

#: ``ucc_memory_type_t`` -> the component of libucc that hands collectives on it to the vendor's library, and that one.
_LIBRARIES = {lib.UCCH_TYPE_CUDA: ("libucc_tl_nccl", "libnccl"), lib.UCCH_TYPE_ROCM: ("libucc_tl_rccl", "librccl")}

_BY_MEMORY = {lib.UCCH_TYPE_CUDA: "nvidia", lib.UCCH_TYPE_ROCM: "amd"}

_loaded: dict[str, DeviceRuntime | None] = {}
_tried: dict[str, list[str]] = {}


def runtime_of(vendor: str) -> DeviceRuntime | None:
    """The runtime of ``nvidia`` or ``amd``; None for ``host``, and where it is absent or sees no device."""
    if vendor not in _OVERRIDES:
        return None
    if vendor not in _loaded:
        _loaded[vendor] = _load(next(module for module in _VENDORS if vendor == module.VENDOR))
    return _loaded[vendor]


def _load(module: ModuleType) -> DeviceRuntime | None:
    vendor: str = module.VENDOR
    tried = _tried[vendor] = []
    explicit = env.get(_OVERRIDES[vendor])
    if explicit.lower() == "none":
        tried.append(f"UCCH_{_OVERRIDES[vendor]}=none")
        return None
    module.prepare()
    for path in [explicit] if explicit else module.candidates():
        if lib.ucch_device_load(module.CODE, path.encode()) == 0:
            runtime = DeviceRuntime(vendor, module.CODE, path)
            if runtime.count() > 0:
                return runtime
            tried.append(f"{path}: it sees no device")
            return None
        tried.append(f"{path}: {ffi.string(lib.ucch_device_error()).decode(errors='replace')}")
    return None


def available() -> list[DeviceRuntime]:
    """The runtimes that are here and see a device."""
    return [runtime for module in _VENDORS if (runtime := runtime_of(module.VENDOR)) is not None]


def report(vendor: str) -> str:
    """One line: what was loaded for ``vendor``, or why nothing was."""
    runtime = runtime_of(vendor)
    if runtime is not None:
        return f"{runtime.path}, version {runtime.version()}, {runtime.count()} device(s)"
    return "; ".join(_tried.get(vendor, [])) or f"no runtime is known for {vendor!r}"


def memory_vendor(memory: int) -> str:
    """Whose devices have memory of this type (``ucc_memory_type_t``); ``host`` for none's."""
    return _BY_MEMORY.get(memory, "host")


@cache
def collective_library(memory: int) -> bool:
    """Whether libucc has loaded the vendor's own collective library for this memory; asked after a context exists."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return False
    return all(f"/{name}" in maps for name in _LIBRARIES.get(memory, ("?",)))


def forget() -> None:
    """Look for the libraries anew at the next call (for tests, after a change of the environment)."""
    _loaded.clear()
    _tried.clear()
