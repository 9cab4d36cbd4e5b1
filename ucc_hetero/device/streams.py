"""Streams of PyTorch, CuPy and others, turned into the runtime's handle."""

from __future__ import annotations

from typing import Any

from ..errors import NotSupported
from ..machine.vendors import STREAMS
from ..native.libraries import lib

#: CuPy's; numba's and cuda.core's.
_ATTRIBUTES = ("ptr", "handle")


def stream_handle(stream: Any) -> int:
    """The handle of a stream: an integer (0 is the default stream), or an object that has or gives one.

    Takes torch's and CuPy's streams, ours, and everything with an attribute that a vendor's row has for them
    (``__cuda_stream__``: a pair of version and handle). ``TypeError`` for anything else.
    """
    if isinstance(stream, int):
        return stream
    for name in STREAMS:
        found = getattr(stream, name, None)
        if type(found) is int:
            return found
        if found is not None and name.startswith("__"):
            return int((found() if callable(found) else found)[1])
    for name in (*STREAMS, *_ATTRIBUTES):
        value = getattr(stream, name, None)
        if value is not None and not callable(value):
            return int(getattr(value, "value", value) or 0)
    raise TypeError(f"stream {stream!r} is neither a stream of torch, CuPy or numba nor an integer handle")


def uncaptured(stream: Any, what: str) -> int:
    """The handle of a stream for something that hosts take part in: ``NotSupported`` while it is being captured."""
    handle = stream_handle(stream)
    if lib.ucch_stream_captures(handle):
        raise NotSupported(f"{what} cannot be captured in a graph, as hosts take part in it; do it outside of graphs")
    return handle
