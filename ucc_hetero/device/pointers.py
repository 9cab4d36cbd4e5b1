"""Vendors and devices of addresses."""

from __future__ import annotations

from ..machine.vendors import VENDORS
from .registry import available, report


def pointer_vendor(address: int) -> tuple[str, int]:
    """Vendor and device number of a pointer that claims to be on a device; pinned host memory is ``host``.

    ``BufferError`` when no runtime is here to ask, or when none knows the address: freed, or never a device's.
    """
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
