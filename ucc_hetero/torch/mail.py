"""Messages on device memory by way of buffers of our own, so that neither the host nor the transfer waits for a stream.

A tensor to be sent is copied where its stream has got to, and is free again at once. What is received arrives in a
buffer that no stream has work for, while the device still computes, and is copied to its place when it is waited for.
Such a copy takes microseconds; without it a pipeline stage would stop for the whole transfer.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .layout import Finish

__all__ = ["Mail"]

#: Bytes of buffers that may be under way; messages beyond that wait for their streams.
_MOST = 1 << 30


class Mail:
    """The buffers of one group's messages on one device."""

    def __init__(self, device: Any) -> None:
        #: Nothing ever runs in it: memory allocated for it is in nobody's use.
        self._idle = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._bytes = 0

    def _take(self, tensor: Any) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        with self._lock:
            if not nbytes or self._bytes + nbytes > _MOST:
                return False
            self._bytes += nbytes
        return True

    def _give(self, buffer: Any) -> None:
        with self._lock:
            self._bytes -= buffer.numel() * buffer.element_size()

    def outgoing(self, tensor: Any) -> tuple[Any, Finish] | None:
        """A copy of what is to be sent, made in the current stream, and what to do when it was sent; None if full."""
        if not self._take(tensor):
            return None
        buffer = tensor.detach().clone()
        return buffer, lambda: self._give(buffer)

    def incoming(self, target: Any, finish: Finish) -> tuple[Any, Finish] | None:
        """Where to receive for ``target``, from now on, and what to do when it has come; None if full."""
        if not self._take(target):
            return None
        with torch.cuda.stream(self._idle):
            buffer = torch.empty_like(target)
        posted = torch.cuda.current_stream(target.device).record_event()  # what came before may still use the target

        def deliver() -> None:
            torch.cuda.current_stream(target.device).wait_event(posted)
            target.detach().copy_(buffer)
            self._give(buffer)
            if finish is not None:
                finish()

        return buffer, deliver
