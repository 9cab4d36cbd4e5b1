"""Vendor -> its runtime, found and loaded once; why one is absent."""

from __future__ import annotations

import os
import threading
from functools import cache

from .. import env
from ..machine import vendors
from ..machine.vendors import VENDORS, Vendor
from ..native.libraries import candidates, ffi, lib, mapped
from .runtime import DeviceRuntime

_loaded: dict[str, DeviceRuntime | None] = {}
_tried: dict[str, list[str]] = {}
#: One thread at a time loads: the engine gives each adapter the first place that is free.
_loading = threading.Lock()


def register(row: Vendor) -> None:
    """Add a vendor, on every rank before its first communicator; ``ValueError`` where something of it is another's.

    Its library brings the adapter, or the engine has it. ``UCCH_`` and the row's ``setting`` name another library.
    """
    vendors.register(row)
    if row.setting:
        env.TABLE[row.setting] = env.library(row)


def runtime_of(vendor: str) -> DeviceRuntime | None:
    """The runtime of a vendor; None for ``host``, and where it is absent or sees no device."""
    if vendor not in _loaded:
        with _loading:
            if vendor not in _loaded:
                row = VENDORS.get(vendor)
                _loaded[vendor] = _load(row) if row is not None and row.adapter else None
    return _loaded[vendor]


def _load(row: Vendor) -> DeviceRuntime | None:
    tried = _tried[row.name] = []
    explicit = env.get(row.setting) if row.setting else ""
    if explicit.lower() == "none":
        tried.append(f"{env.PREFIX}{row.setting}=none")
        return None
    vendors.prepare(row.name, os.environ, late_settings(row.name))
    for path in [explicit] if explicit else candidates(row.library):
        number = lib.ucch_device_load(row.adapter.encode(), path.encode())
        if number >= 0:
            runtime = DeviceRuntime(row.name, number, path)
            if runtime.count() > 0:
                return runtime
            tried.append(f"{path}: it sees no device")
            return None
        tried.append(f"{path}: {ffi.string(lib.ucch_device_error()).decode(errors='replace')}")
    return None


def late_settings(vendor: str) -> tuple[str, ...]:
    """The settings that a vendor's runtime has read by now, or may have: those for its load, and for its start."""
    name = VENDORS[vendor].library.name
    return ("load", "start") if name and mapped(name) else ()


def available() -> list[DeviceRuntime]:
    """The runtimes that are here and see a device."""
    return [runtime for vendor in VENDORS if (runtime := runtime_of(vendor)) is not None]


def report(vendor: str) -> str:
    """One line: what was loaded for ``vendor``, or why nothing was."""
    runtime = runtime_of(vendor)
    if runtime is not None:
        return f"{runtime.path}, version {runtime.version()}, {runtime.count()} device(s)"
    return "; ".join(_tried.get(vendor, [])) or f"no runtime is known for {vendor!r}"


def no_runtime(rank: int, vendor: str) -> str:
    """What is wrong with ``stream=`` on a rank without a device, and the way out."""
    why = f" ({report(vendor)})" if vendor in VENDORS and VENDORS[vendor].setting else ""
    return f"rank {rank} has no GPU runtime for stream={why}; leave it out for host memory"


@cache
def collective_library(memory: int) -> bool:
    """True if libucc has loaded the vendor's own library of collectives, which it has once a context exists."""
    wanted = vendors.of_memory(memory).collectives
    return bool(wanted) and all(map(mapped, wanted))


def forget() -> None:
    """Look for the libraries anew at the next call (for tests, after a change of the environment)."""
    _loaded.clear()
    _tried.clear()


def pointer_vendor(address: int) -> tuple[str, int]:
    """Vendor and device number of a device pointer, ``host`` for pinned memory; ``BufferError`` where none knows it."""
    runtimes = available()
    if not runtimes:
        tried = "; ".join(f"{row.name}: {report(row.name)}" for row in VENDORS.values() if row.adapter)
        raise BufferError(f"cannot classify pointer {address:#x}: no GPU runtime is loaded ({tried})")
    for runtime in runtimes:
        found = runtime.pointer(address)
        if found.kind == "pinned":
            return "host", 0
        if found.kind != "unknown":
            return runtime.vendor, found.device
    names = " or ".join(runtime.vendor for runtime in runtimes)
    raise BufferError(f"{address:#x} is not memory of {names}: it was freed, or is not a device pointer")


def whose(address: int) -> tuple[str, int] | None:
    """As :func:`pointer_vendor`, with None for what is not device memory or cannot be told."""
    for runtime in available():
        found = runtime.pointer(address)
        if found.kind in ("device", "managed"):
            return runtime.vendor, found.device
    return None
