"""Messages of numpy arrays in host memory: one call into C (cffi_build/python/messages.c) from arguments to end.

If anything is unusual, and for other memory, they go the general way of :class:`.Messages`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..calls.posted import PostedRequest
from ..calls.request import Request, dropped_calls, forget, kept_by, set_status
from ..native.libraries import ffi, messenger
from .messages import Messages, held
from .probe import awaited, object_arrived, probe


class Quick:
    """Sends and receives of one communicator, with arguments by position."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        general = self._send, self._recv, self._isend, self._irecv, self._sendrecv, self._probe, self._iprobe
        self.send, self.recv, self.isend, self.irecv, self.sendrecv, self.probe, self.iprobe = general
        self._poll = self._iprobe
        self._made: Any = None
        if messenger is None or messages.lanes != ffi.NULL:  # a lane may bring what a receive waits for
            return
        ends = set_status, self._go_on, self._give_up, self._adopt
        queues = held, dropped_calls, messages.captured.waiting
        functions = *general, partial(object_arrived, messages), *ends
        self._made = made = messages.make_messenger(functions, queues)
        self.send, self.recv, self.sendrecv = made.send, made.recv, made.sendrecv
        self.isend, self.irecv, self.probe, self.iprobe = made.isend, made.irecv, made.probe, made.iprobe
        self._poll = made.poll

    # --- the general way ----------------------------------------------------------------------------------------------

    def _send(self, buf: Any, dest: Any, tag: Any, stream: Any) -> None:
        messages = self._messages
        messages.run(messages.outgoing(buf, dest, tag, stream=stream))
        self._learn(buf, dest)

    def _recv(self, buf: Any, source: Any, tag: Any, status: Any, stream: Any) -> None:
        messages = self._messages
        messages.run(messages.incoming(buf, source, tag, stream=stream), status)
        self._learn(buf)

    def _isend(self, buf: Any, dest: Any, tag: Any, stream: Any) -> Request:
        messages = self._messages
        request = messages.start(messages.outgoing(buf, dest, tag, stream=stream))
        self._learn(buf, dest)
        return request

    def _irecv(self, buf: Any, source: Any, tag: Any, stream: Any) -> Request:
        messages = self._messages
        request = messages.start(messages.incoming(buf, source, tag, stream=stream))
        self._learn(buf)
        return request

    def _sendrecv(
        self, recvbuf: Any, source: Any, recvtag: Any, sendbuf: Any, dest: Any, sendtag: Any, status: Any, stream: Any
    ) -> None:
        messages = self._messages
        into = messages.incoming(recvbuf, source, recvtag, stream=stream)
        messages.run_all([into, messages.outgoing(sendbuf, dest, sendtag, stream=stream)], status)
        self._learn(recvbuf)
        self._learn(sendbuf, dest)

    def _probe(self, source: Any, tag: Any, status: Any) -> bool:
        return awaited(self._messages, source, tag, lambda: self._poll(source, tag, status) or None)

    def _iprobe(self, source: Any, tag: Any, status: Any) -> bool:
        found = probe(self._messages, source, tag, status, remove=False)
        return found is not None or object_arrived(self._messages, source, tag, status)

    def _learn(self, buf: Any, dest: Any = None) -> None:
        """Let C do it next time."""
        if self._made is None or type(buf) is not np.ndarray or not (dest is None or type(dest) is int):
            return
        self._made.plain(buf.dtype, buf.itemsize)
        if dest is not None and 0 <= dest < self._messages.size:
            self._made.endpoint(dest, int(ffi.cast("uintptr_t", self._messages.endpoint(dest))))

    # --- the ends of messages that were begun in C --------------------------------------------------------------------

    def _adopt(self, request: PostedRequest, *message: Any) -> None:
        transfer, about = self._messages.adopt(*message)
        request.become_ordinary(transfer.op, transfer, **about)

    @staticmethod
    def _go_on(requests: Sequence[Request], status: Any) -> None:
        for request in requests:
            request.Wait(status if request is requests[0] else None)

    def _give_up(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.finished:
                self._messages.withdraw(kept_by(request))
                forget(request)
