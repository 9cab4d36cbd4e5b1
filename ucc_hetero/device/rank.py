"""Vendor and device that this rank works with, and binding the native engine to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import DeviceError
from ..machine.launchers import number
from ..native.libraries import ffi, lib
from .registry import available, runtime_of
from .runtime import DeviceRuntime


class Place(NamedTuple):
    """A rank's vendor and its device number there; ``host`` and 0 for a rank without a GPU."""

    vendor: str
    device: int


def local_rank() -> int:
    """This rank's number on its host, as the launcher says; 0 where none does."""
    return number("LOCAL_RANK", os.environ, 0)


def place_of(emulated: str = "") -> Place:
    """Where this rank's buffers live.

    The first vendor whose runtime sees a device; there the device that the calling thread has chosen, else the local
    rank's turn. ``emulated`` names the vendor where it is decided already (``UCCH_EMULATE``): that vendor's runtime is
    used if it is here, and else the name alone counts. A process that has a device keeps it, whichever the calling
    thread has chosen: threads start with the first.
    """
    if _bound is not None:
        return _bound
    runtimes = [runtime_of(emulated)] if emulated else available()
    for runtime in runtimes:
        if runtime is not None:
            return Place(runtime.vendor, _device(runtime))
    return Place(emulated or "host", 0)


def _device(runtime: DeviceRuntime) -> int:
    # Where "none chosen" cannot be told from "the first", only another than the first was chosen for certain.
    chosen = runtime.current()
    undecided = chosen is None or (chosen == 0 and not runtime.traits & lib.UCCH_TELLS_CURRENT)
    return local_rank() % runtime.count() if undecided or chosen is None else chosen


def bind(place: Place) -> DeviceRuntime | None:
    """Let the engine and this thread work with this device from now on; its runtime, or None. A second one is
    refused."""
    global _bound
    runtime = runtime_of(place.vendor)
    if runtime is None:
        return None
    if _bound is not None and _bound != place:
        raise DeviceError(
            f"this process works with {_bound.vendor} device {_bound.device} already and cannot change to "
            f"{place.vendor} device {place.device}: choose the device before the first Communicator"
        )
    if _bound == place:
        return runtime
    if lib.ucch_device_bind(runtime.code, place.device, runtime.holds) or lib.ucch_device_reserve():
        raise DeviceError(f"{place.vendor} device {place.device}: {ffi.string(lib.ucch_device_error()).decode()}")
    _bound = place
    return runtime


def bound() -> Place | None:
    return _bound


@contextmanager
def own_device() -> Iterator[None]:
    """Work with this rank's device in the calling thread, whichever it has chosen, and restore that."""
    before = lib.ucch_device_enter()
    try:
        yield
    finally:
        lib.ucch_device_leave(before)


def free_memory() -> int:
    """Bytes of memory that this process's device has left; 0 without one."""
    runtime = runtime_of(_bound.vendor) if _bound is not None else None
    if runtime is None:
        return 0
    with own_device():
        return runtime.room()


_bound: Place | None = None
