"""Whatever a library calls a stream -> the runtime's handle."""

from __future__ import annotations

from typing import Any

__all__ = ["stream_handle"]

#: torch, CuPy, numba and cuda.core, in this order.
_ATTRIBUTES = ("cuda_stream", "ptr", "handle")


def stream_handle(stream: Any) -> int:
    """The handle of a stream: an integer (0 is the default stream), or an object that has or gives one.

    Takes torch's and CuPy's streams, ours, and everything with ``__cuda_stream__`` (a pair of version and handle): the
    libraries of both vendors use this name. ``TypeError`` for anything else.
    """
    if isinstance(stream, int):
        return stream
    handle = getattr(stream, "cuda_stream", None)  # torch's, whose protocol takes many times as long
    if type(handle) is int:
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in _ATTRIBUTES:
        value = getattr(stream, name, None)
        if value is not None and not callable(value):
            return int(getattr(value, "value", value) or 0)
    raise TypeError(f"stream {stream!r} is neither a stream of torch, CuPy or numba nor an integer handle")
