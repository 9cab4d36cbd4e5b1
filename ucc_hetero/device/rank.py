"""Vendor and device of this rank, and binding the native engine to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import DeviceError
from ..machine.launchers import number
from ..native.libraries import c_text, lib
from .registry import available, runtime_of
from .runtime import DeviceRuntime


class Place(NamedTuple):
    """A rank's vendor, and its device number in that vendor's runtime; ``host`` and 0 without a GPU."""

    vendor: str
    device: int


def local_rank() -> int:
    """This rank's number on its host, from the launcher's variables; 0 without a launcher."""
    return number("LOCAL_RANK", os.environ, 0)


def place_of(emulated: str = "") -> Place:
    """Choose this rank's vendor and device.

    That is the first vendor whose runtime sees a device, and of its devices the one that the calling thread has
    selected, else the one for the local rank. ``emulated`` (``UCCH_EMULATE``) fixes the vendor: its runtime is used if
    installed, otherwise only the name counts. A process that has a device keeps it, whichever the calling thread has
    selected: new threads start with device 0.
    """
    if _bound is not None:
        return _bound
    runtimes = [runtime_of(emulated)] if emulated else available()
    for runtime in runtimes:
        if runtime is not None:
            return Place(runtime.vendor, _device(runtime))
    return Place(emulated or "host", 0)


def _device(runtime: DeviceRuntime) -> int:
    # Some runtimes cannot tell "none selected" from "device 0": only another device was selected for certain.
    chosen = runtime.current()
    undecided = chosen is None or (chosen == 0 and not runtime.traits & lib.UCCH_TELLS_CURRENT)
    return local_rank() % runtime.count() if undecided or chosen is None else chosen


def bind(place: Place) -> DeviceRuntime | None:
    """Bind the engine and this thread to a device; returns its runtime or None. A second device raises
    ``DeviceError``."""
    global _bound
    runtime = runtime_of(place.vendor)
    if runtime is None:
        return None
    if _bound is not None and _bound != place:
        raise DeviceError(
            f"this process uses {_bound.vendor} device {_bound.device} already and cannot change to {place.vendor} "
            f"device {place.device}: select the device before the first Communicator"
        )
    if _bound == place:
        return runtime
    if lib.ucch_device_bind(runtime.code, place.device, runtime.queues) or lib.ucch_device_reserve():
        raise DeviceError(f"{place.vendor} device {place.device}: {c_text(lib.ucch_device_error())}")
    _bound = place
    return runtime


def bound() -> Place | None:
    return _bound


@contextmanager
def own_device() -> Iterator[None]:
    """Make this rank's device current in the calling thread; restore the thread's own device afterwards."""
    before = lib.ucch_device_enter()
    try:
        yield
    finally:
        lib.ucch_device_leave(before)


def free_memory() -> int:
    """Free memory of this process's device in bytes; 0 without a device."""
    runtime = runtime_of(_bound.vendor) if _bound is not None else None
    if runtime is None:
        return 0
    with own_device():
        return runtime.room()


_bound: Place | None = None
