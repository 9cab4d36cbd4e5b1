"""Vendor -> its runtime, loaded once, or the reason why it is absent."""

from __future__ import annotations

import os
import threading
from functools import cache

from .. import env
from ..machine import vendors
from ..machine.vendors import VENDORS, Vendor
from ..native.libraries import c_text, candidates, lib, mapped
from .runtime import DeviceRuntime

_loaded: dict[str, DeviceRuntime | None] = {}
_tried: dict[str, list[str]] = {}
#: Held while loading: the engine gives each adapter the first free slot.
_loading = threading.Lock()


def register(row: Vendor) -> None:
    """Add a vendor, on every rank before its first communicator. ``ValueError`` if a name or number is in use.

    The adapter is in the row's library, or in the engine. ``UCCH_<setting>`` of the row names another library.
    """
    vendors.register(row)
    if row.setting:
        env.TABLE[row.setting] = env.library(row)


def runtime_of(vendor: str) -> DeviceRuntime | None:
    """The runtime of a vendor. None for ``host``, and if it is absent or sees no device."""
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
        tried.append(f"{path}: {c_text(lib.ucch_device_error())}")
    return None


def late_settings(vendor: str) -> tuple[str, ...]:
    """The kinds of settings ("load", "start") that a vendor's runtime has read already, or may have read."""
    name = VENDORS[vendor].library.name
    return ("load", "start") if name and mapped(name) else ()


def available() -> list[DeviceRuntime]:
    """The runtimes that are loaded and see a device."""
    return [runtime for vendor in VENDORS if (runtime := runtime_of(vendor)) is not None]


def report(vendor: str) -> str:
    """One line: the library that was loaded for ``vendor``, or why none was."""
    runtime = runtime_of(vendor)
    if runtime is not None:
        return f"{runtime.path}, version {runtime.version()}, {runtime.count()} device(s)"
    return "; ".join(_tried.get(vendor, [])) or f"no runtime is known for {vendor!r}"


def no_runtime(rank: int, vendor: str) -> str:
    """Error text for ``stream=`` on a rank without a device."""
    why = f" ({report(vendor)})" if vendor in VENDORS and VENDORS[vendor].setting else ""
    return f"rank {rank} has no GPU runtime for stream={why}; leave it out for host memory"


@cache
def collective_library(memory: int) -> bool:
    """True if libucc has loaded the vendor's collective library, which it does in a context."""
    wanted = vendors.of_memory(memory).collectives
    return bool(wanted) and all(map(mapped, wanted))


def forget() -> None:
    """Search for the libraries again at the next call (for tests, after a change of the environment)."""
    _loaded.clear()
    _tried.clear()


def pointer_vendor(address: int) -> tuple[str, int]:
    """Vendor and device number of a device pointer; ``host`` for pinned memory. ``BufferError`` if unknown."""
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
    """As :func:`pointer_vendor`, but None for memory that is not a device's, or is unknown."""
    for runtime in available():
        found = runtime.pointer(address)
        if found.kind in ("device", "managed"):
            return runtime.vendor, found.device
    return None
