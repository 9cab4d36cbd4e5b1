"""torch's modules of devices, such as ``torch.cuda``, by the types that the vendors' rows name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..machine.vendors import TORCH


def module(device: Any) -> Any:
    """The module of a device's type: streams, events, which device and stream are current."""
    return getattr(torch, device.type)


def raw_stream(device: Any) -> int | None:
    """The handle of the calling thread's stream on a device; None where torch does not tell that by itself."""
    tell = _tell.get(device.type)
    if tell is None and device.type not in _tell:
        tell = _tell[device.type] = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    return None if tell is None else int(tell(device.index))


_tell: dict[str, Any] = {}


def started() -> Iterator[tuple[str, Any]]:
    """The types of devices that this process uses already, and their modules."""
    for kind in TORCH:
        found = getattr(torch, kind, None)
        if found is not None and found.is_initialized():
            yield kind, found
