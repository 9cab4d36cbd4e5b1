"""The message methods of a communicator, with mpi4py's names, signatures and defaults."""

from __future__ import annotations

from typing import Any

from ..calls.exchange import Exchange
from ..calls.p2p import Messages
from ..calls.persistent import PersistentRequest
from ..calls.probe import Message, mprobe, probe
from ..calls.request import Request

__all__ = ["MessageMethods"]


class MessageMethods:
    """Sends, receives and probes. ``source`` and ``tag`` of a receive are wild unless given.

    A message longer than the buffer raises :class:`~ucc_hetero.errors.TruncationError` at the receiver; a message
    that does not come within ``UCCH_TIMEOUT`` seconds of waiting raises ``CollectiveTimeout``, and ``PeerError`` when
    its peer is known to be dead. The communicator stays usable after each of them.

    With ``stream`` a message starts when that stream gets there: it takes what is in the buffer by then, or writes to
    it from then on. Neither the host nor the stream waits for that; the host waits for the message's end, as without.
    """

    _messages: Messages

    def _wild(self, source: int | None, tag: int | None) -> tuple[int, int]:
        messages = self._messages
        return messages.any_source if source is None else source, messages.any_tag if tag is None else tag

    # --- blocking -----------------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send a message; returns when the buffer may be reused."""
        self._messages.run(self._messages.outgoing(buf, dest, tag, stream=stream))

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send a message; returns when the receiver has begun to receive it."""
        self._messages.run(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send a message whose receive has been posted; nothing is gained by it here, it is ``Send``."""
        self.Send(buf, dest, tag, stream=stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of the message and return at once. The memory is our own: no ``MPI.Attach_buffer`` is needed."""
        self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True)).Free()

    def Recv(
        self, buf: Any, source: int | None = None, tag: int | None = None, status: Any = None, *, stream: Any = None
    ) -> None:
        """Receive a message; from any source and with any tag by default."""
        self._messages.run(self._messages.incoming(buf, *self._wild(source, tag), stream=stream), status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int | None = None,
        recvtag: int | None = None,
        status: Any = None,
        *,
        stream: Any = None,
    ) -> None:
        """Send one message and receive another, whatever the order on the other side."""
        messages = self._messages
        into = messages.incoming(recvbuf, *self._wild(source, recvtag), stream=stream)
        self._exchange(messages.outgoing(sendbuf, dest, sendtag, stream=stream), into, status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int | None = None,
        recvtag: int | None = None,
        status: Any = None,
    ) -> None:
        """Send what the buffer holds and receive another message into it."""
        messages = self._messages
        into = messages.incoming(buf, *self._wild(source, recvtag))
        self._exchange(messages.outgoing(buf, dest, sendtag, copy=True), into, status)

    def _exchange(self, outgoing: Any, incoming: Any, status: Any) -> None:
        messages = self._messages
        try:
            messages.begin(incoming, messages.timeout)
            messages.begin(outgoing, messages.timeout)
            messages.wait(incoming, status)
        except BaseException:
            messages.withdraw(incoming)
            messages.withdraw(outgoing)
            raise
        messages.wait(outgoing)

    # --- non-blocking -------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start a send."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, stream=stream))

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start a send that finishes when the receiver has begun to receive it."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Irsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start a send whose receive has been posted; it is ``Isend``."""
        return self.Isend(buf, dest, tag, stream=stream)

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a copy of the message; the buffer may be reused at once."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True))

    def Irecv(self, buf: Any, source: int | None = None, tag: int | None = None, *, stream: Any = None) -> Request:
        """Start a receive."""
        return self._messages.start(self._messages.incoming(buf, *self._wild(source, tag), stream=stream))

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int | None = None,
        recvtag: int | None = None,
        *,
        stream: Any = None,
    ) -> Request:
        """Start a send and a receive; the request finishes when both have, and its status is the receive's."""
        messages = self._messages
        into = messages.incoming(recvbuf, *self._wild(source, recvtag), stream=stream)
        return self._both(into, messages.outgoing(sendbuf, dest, sendtag, stream=stream))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int | None = None, recvtag: int | None = None
    ) -> Request:
        """Start to send what the buffer holds and to receive another message into it; host memory."""
        messages = self._messages
        into = messages.incoming(buf, *self._wild(source, recvtag))
        return self._both(into, messages.outgoing(buf, dest, sendtag, copy=True))

    def _both(self, incoming: Any, outgoing: Any) -> Request:
        messages = self._messages
        receive = messages.start(incoming)
        try:
            return Exchange(receive, messages.start(outgoing))
        except BaseException:
            receive.Cancel()
            receive.Free()
            raise

    # --- persistent ---------------------------------------------------------------------------------------------------

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up a ``Send`` that can be started many times."""
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up an ``Ssend`` that can be started many times."""
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, sync=True))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up an ``Rsend`` that can be started many times."""
        return self.Send_init(buf, dest, tag)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up a ``Bsend`` that can be started many times; each start copies what the buffer then holds."""
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, copy=True), copy=True)

    def Recv_init(self, buf: Any, source: int | None = None, tag: int | None = None) -> PersistentRequest:
        """Set up a ``Recv`` that can be started many times."""
        return self._messages.persistent(self._messages.incoming(buf, *self._wild(source, tag)))

    # --- probes -------------------------------------------------------------------------------------------------------

    def Probe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Wait for a message without receiving it, then return True."""
        mprobe(self._messages, *self._wild(source, tag), status, remove=False)
        return True

    def Iprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Whether a message has arrived."""
        return probe(self._messages, *self._wild(source, tag), status, remove=False) is not None

    def Mprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message:
        """Wait for a message and take it out: only the :class:`Message` that is returned receives it."""
        return mprobe(self._messages, *self._wild(source, tag), status, remove=True)

    def Improbe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message | None:
        """Take out a message that has arrived, or return None."""
        return probe(self._messages, *self._wild(source, tag), status, remove=True)
