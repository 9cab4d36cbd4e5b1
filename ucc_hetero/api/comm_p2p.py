"""The message methods of a communicator, with mpi4py's names, signatures and defaults."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..calls.persistent import PersistentRequest
from ..calls.request import Request, finished
from ..calls.runner import Runner
from ..docstrings import forms
from ..p2p.composite import MessageGroup, start_all
from ..p2p.messages import Messages
from ..p2p.partitioned import PartitionedRequest, Partitions
from ..p2p.probe import Message, mprobe, object_message, probe, wait_for_any, waits


@forms
class MessageMethods:
    """Sends, receives and probes. A receive takes any ``source`` and ``tag`` unless they are given.

    A message longer than the buffer raises :class:`~ucc_hetero.errors.TruncationError` at the receiver; a message
    that does not come within ``UCCH_TIMEOUT`` seconds of waiting raises ``CollectiveTimeout``, and ``PeerError`` when
    its peer is known to be dead. The communicator stays usable after each of them.

    With ``stream`` a message starts when that stream gets there: it takes what is in the buffer by then, or writes to
    it from then on. The host does not wait for that; it waits for the message's end, as without. Among devices of
    several vendors the stream may fill a buffer anew behind its send, which goes on with what was there.
    """

    _mpi: Any
    _runner: Runner
    _attached: Any = None

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self._runner)

    @cached_property
    def _own_messages(self) -> Messages:
        """Messages of the package's own calls, which no receive of the caller's matches."""
        return Messages(self._runner, own=True)

    @cached_property
    def _partitions(self) -> Partitions:
        return Partitions(self._own_messages)

    def _wild(self, source: int | None, tag: int | None) -> tuple[int, int]:
        messages = self._messages
        return messages.any_source if source is None else source, messages.any_tag if tag is None else tag

    # --- blocking -----------------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send a message; returns when the buffer may be reused.

        Args:
            buf: Array in host or GPU memory, or mpi4py's ``[array, count, datatype]``.
            dest: Rank, or ``MPI.PROC_NULL``.
            tag: From 0 to 2**31 - 1.
            stream: GPU stream that the message is to start in; None: now.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And the others that :class:`Communicator` names.
        """
        self._messages.run(self._messages.outgoing(buf, dest, tag, stream=stream))

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """:meth:`Send`, with its arguments, that returns when the receiver has begun to receive the message."""
        self._messages.run(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """:meth:`Send`, with its arguments, of a message whose receive has been posted. It gains nothing here."""
        self.Send(buf, dest, tag, stream=stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """:meth:`Send`, with its arguments, of a copy of the message; returns at once.

        The memory is this package's own: no ``MPI.Attach_buffer`` is needed.
        """
        self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True)).Free()

    def Recv(
        self, buf: Any, source: int | None = None, tag: int | None = None, status: Any = None, *, stream: Any = None
    ) -> None:
        """Receive a message; from any source and with any tag by default.

        Args:
            buf: Array that has room for the message.
            source: Rank; any if None.
            tag: Any if None.
            status: ``MPI.Status`` to be filled.
            stream: GPU stream that the message is to start in; None: now.

        Raises:
            TruncationError, CollectiveTimeout, PeerError: And the others that :class:`Communicator` names.
        """
        self._messages.run(self._messages.incoming(buf, *self._wild(source, tag), stream=stream), status)

    def recv(self, buf: Any = None, source: int | None = None, tag: int | None = None, status: Any = None) -> Any:
        """Receive a Python object that ``send`` and its like have sent; from any source and with any tag by default.

        Args:
            buf: Memory for its pickle, as in mpi4py.
            source: Rank; any if None.
            tag: Any if None.
            status: ``MPI.Status`` to be filled.

        Returns:
            The object.

        Raises:
            CollectiveTimeout, PeerError: None came within ``UCCH_TIMEOUT`` seconds, or its sender died.
        """
        place = self._wild(source, tag)
        if buf is not None:
            return self._mpi.recv(buf, *place, status)
        return object_message(self._messages, self._mpi, *place).recv(status)

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
        """Send one message and receive another, whatever the order on the other side.

        Args:
            sendbuf, dest, sendtag: As in :meth:`Send`.
            recvbuf, source, recvtag, status: As in :meth:`Recv`.
            stream: GPU stream that both messages are to start in; None: now.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And the others that :class:`Communicator` names.
        """
        messages = self._messages
        into = messages.incoming(recvbuf, *self._wild(source, recvtag), stream=stream)
        messages.run_all([into, messages.outgoing(sendbuf, dest, sendtag, stream=stream)], status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int | None = None,
        recvtag: int | None = None,
        status: Any = None,
    ) -> None:
        """Send what the buffer holds and receive another message into it.

        Args:
            buf: Array in host memory, with room for what comes.
            dest, sendtag: As in :meth:`Send`.
            source, recvtag, status: As in :meth:`Recv`.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And the others that :class:`Communicator` names.
        """
        messages = self._messages
        into = messages.incoming(buf, *self._wild(source, recvtag))
        messages.run_all([into, messages.outgoing(buf, dest, sendtag, copy=True)], status)

    # --- non-blocking -------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start :meth:`Send`, with its arguments.

        Returns:
            A request; the buffer may be reused when it has finished.
        """
        return self._messages.start(self._messages.outgoing(buf, dest, tag, stream=stream))

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start :meth:`Ssend`, with its arguments; return its request."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Irsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start :meth:`Rsend`, with its arguments; return its request."""
        return self.Isend(buf, dest, tag, stream=stream)

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start :meth:`Bsend`, with its arguments; return its request. The buffer may be reused at once."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True))

    def Irecv(self, buf: Any, source: int | None = None, tag: int | None = None, *, stream: Any = None) -> Request:
        """Start :meth:`Recv`, with its arguments.

        Returns:
            A request; the message is in the buffer when it has finished.
        """
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
        """Start :meth:`Sendrecv`, with its arguments.

        Returns:
            A request that finishes when both messages have; its status is the receive's.
        """
        messages = self._messages
        into = messages.incoming(recvbuf, *self._wild(source, recvtag), stream=stream)
        outof = messages.outgoing(sendbuf, dest, sendtag, stream=stream)
        return MessageGroup(start_all(messages, [into, outof]), has_status=True)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int | None = None, recvtag: int | None = None
    ) -> Request:
        """Start :meth:`Sendrecv_replace`, with its arguments.

        Returns:
            A request that finishes when both messages have; its status is the receive's.
        """
        messages = self._messages
        into = messages.incoming(buf, *self._wild(source, recvtag))
        outof = messages.outgoing(buf, dest, sendtag, copy=True)
        return MessageGroup(start_all(messages, [into, outof]), has_status=True)

    # --- persistent ---------------------------------------------------------------------------------------------------

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up :meth:`Send`, with its arguments; return a request that can be started many times."""
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up :meth:`Ssend`, with its arguments; return a request that can be started many times."""
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, sync=True))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up :meth:`Rsend`, with its arguments; return a request that can be started many times."""
        return self.Send_init(buf, dest, tag)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up :meth:`Bsend`, with its arguments; return a request that can be started many times.

        Each start copies what the buffer then holds.
        """
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, copy=True), copy=True)

    def Recv_init(self, buf: Any, source: int | None = None, tag: int | None = None) -> PersistentRequest:
        """Set up :meth:`Recv`, with its arguments; return a request that can be started many times."""
        return self._messages.persistent(self._messages.incoming(buf, *self._wild(source, tag)))

    # --- partitioned --------------------------------------------------------------------------------------------------

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> PartitionedRequest:
        """Set up a send of equal partitions, each of which goes when ``Pready`` of the request says so.

        Args:
            buf: Array with all partitions; a count in ``[array, count, datatype]`` is that of one.
            partitions: How many.
            dest, tag: As in :meth:`Send`.
            info: Ignored, as in mpi4py a hint.

        Returns:
            A request that can be started many times.
        """
        return self._partitions.send(buf, partitions, dest, tag)

    def Precv_init(self, buf: Any, partitions: int, source: int, tag: int, info: Any = None) -> PartitionedRequest:
        """Set up the receive of a :meth:`Psend_init`; ``Parrived`` of the request asks for a partition.

        Args:
            buf: Array with room for all partitions; a count in ``[array, count, datatype]`` is that of one.
            partitions: How many; the sender may have divided the message differently.
            source, tag: Those of the send.
            info: Ignored, as in mpi4py a hint.

        Returns:
            A request that can be started many times.
        """
        return self._partitions.receive(buf, partitions, source, tag)

    # --- memory for buffered sends, which need none -------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Keep a buffer until :meth:`Detach_buffer` returns it; buffered sends have memory of their own.

        Args:
            buf: Any object.

        Raises:
            ValueError: A buffer is attached already.
        """
        if self._attached is not None:
            raise ValueError(f"rank {self._messages.rank}: a buffer is attached already; Detach_buffer first")
        self._attached = buf

    def Detach_buffer(self) -> Any:
        """Give back the attached buffer. Messages that were sent do not need it.

        Returns:
            The buffer, or None.
        """
        buf, self._attached = self._attached, None
        return buf

    def Flush_buffer(self) -> None:
        """Return at once: no message is in an attached buffer."""
        self._messages.check_usable()

    def Iflush_buffer(self) -> Request:
        """:meth:`Flush_buffer` as a request.

        Returns:
            A request that has finished.
        """
        self._messages.check_usable()
        return finished()

    # --- probes -------------------------------------------------------------------------------------------------------

    def Probe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Wait for a message without receiving it: one of ``Send`` and its like, or a Python object of ``send``.

        Args:
            source: Rank; any if None.
            tag: Any if None.
            status: ``MPI.Status`` to be filled with its source, tag and length.

        Returns:
            True.

        Raises:
            CollectiveTimeout, PeerError: No message came within ``UCCH_TIMEOUT`` seconds, or its sender died.
        """
        wait_for_any(self._messages, self._mpi, *self._wild(source, tag), status)
        return True

    def Iprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Do as :meth:`Probe`, with its arguments, without waiting.

        Returns:
            True if a message has arrived.
        """
        return waits(self._messages, self._mpi, *self._wild(source, tag), status)

    probe, iprobe = Probe, Iprobe

    def Mprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message:
        """Do as :meth:`Probe`, with its arguments, and take the message out.

        Returns:
            The :class:`Message`, which alone can receive it.
        """
        return mprobe(self._messages, *self._wild(source, tag), status)

    def Improbe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message | None:
        """Do as :meth:`Mprobe`, with its arguments, without waiting.

        Returns:
            The :class:`Message`, which alone can receive it, or None.
        """
        return probe(self._messages, *self._wild(source, tag), status, remove=True)

    def mprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Any:
        """Do as :meth:`Mprobe`, with its arguments, for a Python object.

        Returns:
            An ``mpi4py.MPI.Message``, whose ``recv`` alone can receive it.
        """
        return object_message(self._messages, self._mpi, *self._wild(source, tag), status)
