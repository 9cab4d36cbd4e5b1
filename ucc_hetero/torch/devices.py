"""torch's modules of devices, such as ``torch.cuda``, by the types that the vendors' rows name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from ..machine.vendors import TORCH


def module(device: Any) -> Any:
    """The module of a device's type: streams, events, which device and stream are current."""
    return getattr(torch, device.type)


def raw_stream(device: Any) -> int | None:
    """The handle of the calling thread's stream on a device; None where torch does not tell that by itself."""
    tell = _raw_stream_of(device.type)
    return None if tell is None else int(tell(device.index))


def raw_stream_query(device: Any) -> Callable[[], int] | None:
    """:func:`raw_stream` as a function of one device; None where torch has no such function."""
    tell = _raw_stream_of(device.type)
    return None if tell is None else partial(tell, device.index)


@cache
def _raw_stream_of(kind: str) -> Any:
    return getattr(torch._C, f"_{kind}_getCurrentRawStream", None)


def capture_query(device: Any) -> Callable[[], bool]:
    """A function that returns True if the calling thread's stream is being captured, as quickly as torch can."""
    short: Callable[[], bool] | None = getattr(torch._C, f"_{device.type}_isCurrentStreamCapturing", None)
    long: Callable[[], bool] = module(device).is_current_stream_capturing
    return long if short is None else short


def start_with(local_rank: int) -> None:
    """Let torch begin with the device of this rank where several are in sight; scripts may still choose another one."""
    for kind in TORCH:
        found: Any = getattr(torch, kind, None)
        if hasattr(found, "_lazy_call") and not found.is_initialized():
            found._lazy_call(partial(_choose, found, local_rank))


def _choose(found: Any, local_rank: int) -> None:
    count = found.device_count()
    if count > 1:
        found.set_device(local_rank % count)


def started() -> Iterator[tuple[str, Any]]:
    """The types of devices that this process uses already, and their modules."""
    for kind in TORCH:
        found = getattr(torch, kind, None)
        if found is not None and found.is_initialized():
            yield kind, found
