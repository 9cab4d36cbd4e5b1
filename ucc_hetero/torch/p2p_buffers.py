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

__all__ = ["Mail"]

#: Bytes of buffers that may be under way; messages beyond that wait for their streams. And of those kept for later.
_MOST = 1 << 30
_IDLE = 256 << 20


class _Box:
    """A buffer, when the stream of its message was to be waited for, and when it was copied out."""

    __slots__ = ("copied", "nbytes", "posted", "tensor")

    def __init__(self, tensor: Any, module: Any) -> None:
        self.tensor, self.nbytes = tensor, tensor.numel() * tensor.element_size()
        self.posted, self.copied = module.Event(), module.Event()


class Mail:
    """The buffers of one group's messages on one device."""

    def __init__(self, device: Any) -> None:
        #: Nothing ever runs in it: memory allocated for it is in nobody's use.
        self._device = module(device)
        self._quiet = self._device.Stream(device)
        self._lock = threading.Lock()
        #: Buffers by (dtype, shape), the one that was given back first in front; bytes of these, and of those in use.
        self._kept: dict[tuple[Any, Any], list[_Box]] = {}
        self._idle = self._used = 0

    def _take(self, like: Any) -> _Box | None:
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
        with self._device.stream(self._quiet):
            return _Box(torch.empty_like(like, memory_format=torch.contiguous_format), self._device)

    def _give(self, box: _Box) -> None:
        """It was copied out, or will have been when its event says so."""
        with self._lock:
            self._used -= box.nbytes
            self._kept.setdefault((box.tensor.dtype, box.tensor.shape), []).append(box)
            self._idle += box.nbytes
            for key in list(self._kept) if self._idle > _IDLE else ():
                kept = self._kept[key]
                while kept and self._idle > _IDLE and kept[0].copied.query():  # else its memory is still in use
                    self._idle -= kept.pop(0).nbytes
                if not kept:
                    del self._kept[key]

    def outgoing(self, tensor: Any) -> tuple[Any, Finish] | None:
        """A copy of what is to be sent, made in the current stream, and what to do when it was sent; None if full."""
        box = self._take(tensor)
        if box is None:
            return None
        box.tensor.copy_(tensor.detach())
        return box.tensor, lambda: self._give(box)

    def incoming(self, target: Any, finish: Finish) -> tuple[Any, Finish] | None:
        """Where to receive for ``target``, from now on, and what to do when it has come; None if full."""
        box = self._take(target)
        if box is None:
            return None
        poster = current(target.device)
        box.posted.record(poster)  # what came before may still use the target

        def deliver() -> None:
            here = current(target.device)
            if here is not poster:
                here.wait_event(box.posted)
            target.detach().copy_(box.tensor)
            kept_for_current([box.tensor])  # if the group ends now, nobody is given this memory before that is done
            box.copied.record(here)
            self._give(box)
            if finish is not None:
                finish()

        return box.tensor, deliver
