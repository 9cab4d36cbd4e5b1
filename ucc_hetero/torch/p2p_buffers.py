"""Messages on device memory by way of buffers of our own, so that neither the host nor the transfer waits for a stream.

A tensor to be sent is copied where its stream has got to, and is free again at once. What is received arrives in a
buffer that no stream has work for, while the device still computes, and is copied to its place when it is waited for.
Such a copy takes microseconds; without it a pipeline stage would stop for the whole transfer. Buffers are used again,
for messages that look the same: making one, with its events, takes longer than launching the copy, and what a message
needs to begin is known from the one before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .devices import module
from .layout import Finish
from .streams import Ready, current

#: Bytes of buffers that may be under way; messages beyond that wait for their streams. And of those kept for later.
_MOST = 1 << 30
_IDLE = 256 << 20
#: Least that a kept buffer counts for: its events and its request take memory, too, and tags may all be different.
_LEAST = 64 << 10
#: Bytes of the longest message that begins as one before it.
_SHORT = 1 << 20


class P2pBuffer:
    """One of a group's buffers, under way with a message or kept for the next one of its kind."""

    __slots__ = ("_copied", "_in", "_posted", "_ready", "_stream", "counts", "key", "nbytes", "request", "tensor")

    def __init__(self, buffers: P2pBuffers, key: Hashable, tensor: Any, module: Any) -> None:
        self._in, self.key, self.tensor, self.nbytes = buffers, key, tensor, nbytes_of(tensor)
        #: True if it is among those under way.
        self.counts = True
        #: The request of its last message, for one that begins as that did; not of a long one, which is made each time:
        #: it may hold pinned memory as long again.
        self.request: Any = None
        #: When the stream of its message was to be waited for, and when what came was copied out.
        self._posted, self._copied = module.Event(), module.Event()
        #: The stream that copied from it last, and for whom it was there then.
        self._stream: Any = None
        self._ready: Ready | None = None

    def is_free(self) -> bool:
        """True if no stream copies from it any more."""
        if self._ready is not None:
            if not self._copied.query():
                return False
            self._ready.passed()
            self._ready = None
        return True

    def fill(self, tensor: Any) -> None:
        """Copy what is to be sent, in the current stream."""
        self.tensor.copy_(tensor.detach() if tensor.requires_grad else tensor)

    def incoming(self, target: Any, finish: Finish) -> Callable[[], Ready]:
        """Function that delivers a message for ``target`` once it has come, and returns when that is there."""
        device = target.device
        poster = current(device)
        self._posted.record(poster)  # what came before may still use the target

        def deliver() -> Ready:
            here = current(device)
            if here is not poster:
                here.wait_event(self._posted)
            target.detach().copy_(self.tensor)
            if here is not self._stream:  # if the group ends now, the memory is not reused before that is done
                self.tensor.record_stream(here)
                self._stream = here
            if finish is not None:
                finish()
            self._copied.record(here)
            self._ready = Ready(here, event=self._copied)
            self._in.settle(self)
            return self._ready

        return deliver

    def over(self, *, again: bool) -> None:
        """Its message has ended; ``again``: well, so that it serves the next one."""
        self._in.settle(self)
        if again:
            if self.nbytes > _SHORT:
                self.request = None
            self._in.keep(self)


class P2pBuffers:
    """The buffers of one group's messages on one device."""

    def __init__(self, device: Any) -> None:
        #: Nothing ever runs in it: memory allocated for it is not in use.
        self._module = module(device)
        self._quiet = self._module.Stream(device)
        self._lock = threading.Lock()
        #: Buffers by the kind of their messages, the one that was kept first in front, kinds that were used least
        #: recently first; bytes that these count for, and those of messages under way.
        self._kept: dict[Hashable, deque[P2pBuffer]] = {}
        self._idle = self._used = 0

    def again(self, key: Hashable) -> P2pBuffer | None:
        """A buffer that had messages of this kind and that no stream has work for; None if there is none, or no room
        for more."""
        with self._lock:
            kept = self._kept.get(key)
            if not kept or self._used + kept[0].nbytes > _MOST or not kept[0].is_free():
                return None
            buffer = kept.popleft()
            self._idle -= max(buffer.nbytes, _LEAST)
            self._used += buffer.nbytes
            if not kept:
                del self._kept[key]
        buffer.counts = True
        return buffer

    def make(self, key: Hashable, like: Any) -> P2pBuffer | None:
        """A buffer for messages such as this tensor; None if there are too many."""
        nbytes = nbytes_of(like)
        with self._lock:
            if not nbytes or self._used + nbytes > _MOST:
                return None
            self._used += nbytes
        with self._module.stream(self._quiet), torch.inference_mode(False):  # it may be written to in any mode
            tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        return P2pBuffer(self, key, tensor, self._module)

    def settle(self, buffer: P2pBuffer) -> None:
        """Its message has ended, or a stream does the rest."""
        with self._lock:
            if buffer.counts:
                buffer.counts = False
                self._used -= buffer.nbytes

    def keep(self, buffer: P2pBuffer) -> None:
        """Have it for later messages; beyond some bytes the oldest are let go."""
        with self._lock:
            self._kept.setdefault(buffer.key, deque()).append(buffer)
            self._idle += max(buffer.nbytes, _LEAST)
            while self._idle > _IDLE and (kept := next(iter(self._kept.values())))[0].is_free():  # else it is in use
                self._idle -= max(kept.popleft().nbytes, _LEAST)
                if not kept:
                    del self._kept[next(iter(self._kept))]


def nbytes_of(tensor: Any) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
