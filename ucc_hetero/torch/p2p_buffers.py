"""Messages on device memory by way of buffers of our own, so that neither the host nor the transfer waits for a stream.

A tensor to be sent is copied where its stream has got to, and is free again at once. What is received arrives in a
buffer that no stream has work for, while the device still computes, and is copied to its place when it is waited for.
Such a copy takes microseconds; without it a pipeline stage would stop for the whole transfer. Buffers are used again:
making one, with its events, takes longer than launching the copy.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .devices import module
from .layout import Finish
from .streams import current, kept_for_current

__all__ = ["P2pBuffers"]

#: Bytes of buffers that may be under way; messages beyond that wait for their streams. And of those kept for later.
_MOST = 1 << 30
_IDLE = 256 << 20


class _Buffer:
    """A buffer, when the stream of its message was to be waited for, and when it was copied out."""

    __slots__ = ("copied", "nbytes", "posted", "tensor")

    def __init__(self, tensor: Any, module: Any) -> None:
        self.tensor, self.nbytes = tensor, tensor.numel() * tensor.element_size()
        self.posted, self.copied = module.Event(), module.Event()


class P2pBuffers:
    """The buffers of one group's messages on one device."""

    def __init__(self, device: Any) -> None:
        #: Nothing ever runs in it: memory allocated for it is in nobody's use.
        self._module = module(device)
        self._quiet = self._module.Stream(device)
        self._lock = threading.Lock()
        #: Buffers by (dtype, shape), the one that was given back first in front; bytes of these, and of those in use.
        self._kept: dict[tuple[Any, Any], list[_Buffer]] = {}
        self._idle = self._used = 0

    def _take(self, like: Any) -> _Buffer | None:
        """A buffer for a tensor like this that no stream has work for; None if there are too many."""
        nbytes = like.numel() * like.element_size()
        with self._lock:
            if not nbytes or self._used + nbytes > _MOST:
                return None
            self._used += nbytes
            kept = self._kept.get((like.dtype, like.shape))
            if kept and kept[0].copied.query():
                self._idle -= nbytes
                return kept.pop(0)
        with self._module.stream(self._quiet):
            return _Buffer(torch.empty_like(like, memory_format=torch.contiguous_format), self._module)

    def _give(self, buffer: _Buffer) -> None:
        """It was copied out, or will have been when its event says so."""
        with self._lock:
            self._used -= buffer.nbytes
            self._kept.setdefault((buffer.tensor.dtype, buffer.tensor.shape), []).append(buffer)
            self._idle += buffer.nbytes
            for key in list(self._kept) if self._idle > _IDLE else ():
                kept = self._kept[key]
                while kept and self._idle > _IDLE and kept[0].copied.query():  # else its memory is still in use
                    self._idle -= kept.pop(0).nbytes
                if not kept:
                    del self._kept[key]

    def outgoing(self, tensor: Any) -> tuple[Any, Finish] | None:
        """A copy of what is to be sent, made in the current stream, and what to do when it was sent; None if full."""
        buffer = self._take(tensor)
        if buffer is None:
            return None
        buffer.tensor.copy_(tensor.detach())
        return buffer.tensor, lambda: self._give(buffer)

    def incoming(self, target: Any, finish: Finish) -> tuple[Any, Finish] | None:
        """Where to receive for ``target``, from now on, and what to do when it has come; None if full."""
        buffer = self._take(target)
        if buffer is None:
            return None
        poster = current(target.device)
        buffer.posted.record(poster)  # what came before may still use the target

        def deliver() -> None:
            here = current(target.device)
            if here is not poster:
                here.wait_event(buffer.posted)
            target.detach().copy_(buffer.tensor)
            kept_for_current([buffer.tensor])  # if the group ends now, nobody is given this memory before that is done
            buffer.copied.record(here)
            self._give(buffer)
            if finish is not None:
                finish()

        return buffer.tensor, deliver
