"""Message methods of a communicator, with mpi4py's names, signatures and defaults."""

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
from ..p2p.probe import Message, mprobe, object_message, probe
from ..p2p.quick import Quick


@forms
class MessageMethods:
    """Sends, receives and probes. By default a receive matches any source and any tag.

    If a message is longer than the buffer, the receiver gets a :class:`~ucc_hetero.errors.TruncationError`. A message
    that does not arrive within ``UCCH_TIMEOUT`` seconds of waiting raises ``CollectiveTimeout``; a peer that is known
    to be dead raises ``PeerError``. The communicator stays usable after each of these.

    With ``stream`` a message starts when the stream gets to it: the buffer is read, or may be written, from then on.
    The host waits for the end of the message as without a stream. Among devices of several vendors later work in the
    stream may overwrite the buffer of a send.
    """

    _mpi: Any
    _runner: Runner
    _attached: Any = None

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self._runner)

    @cached_property
    def _own_messages(self) -> Messages:
        """Messages of this package's own calls, which match none of the user's."""
        return Messages(self._runner, own=True)

    @cached_property
    def _partitions(self) -> Partitions:
        return Partitions(self._own_messages)

    @cached_property
    def _quick(self) -> Quick:
        return Quick(self._messages)

    def _wild(self, source: int | None, tag: int | None) -> tuple[int, int]:
        messages = self._messages
        return messages.any_source if source is None else source, messages.any_tag if tag is None else tag

    # --- blocking -----------------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send a message. Returns when the buffer may be reused.

        Args:
            buf: Array in host or GPU memory, or mpi4py's ``[array, count, datatype]``.
            dest: Rank of the receiver, or ``MPI.PROC_NULL``.
            tag: 0 to 2**31 - 1.
            stream: GPU stream in which the message starts; None: it starts now.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And others; see :class:`Communicator`.
        """
        self._quick.send(buf, dest, tag, stream)

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """:meth:`Send`, with its arguments, but return only when the receive has started."""
        self._messages.run(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """:meth:`Send`, with its arguments, for a receive that is posted already. It is not faster here."""
        self.Send(buf, dest, tag, stream=stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """:meth:`Send`, with its arguments, of a copy of the buffer; returns at once.

        The copy is in this package's memory: no ``MPI.Attach_buffer`` is needed.
        """
        self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True)).Free()

    def Recv(
        self, buf: Any, source: int | None = None, tag: int | None = None, status: Any = None, *, stream: Any = None
    ) -> None:
        """Receive a message; by default from any source and with any tag.

        Args:
            buf: Array with room for the message.
            source: Rank of the sender; any if None.
            tag: Tag of the message; any if None.
            status: ``MPI.Status`` to fill.
            stream: GPU stream in which the message starts; None: it starts now.

        Raises:
            TruncationError, CollectiveTimeout, PeerError: And others; see :class:`Communicator`.
        """
        self._quick.recv(buf, source, tag, status, stream)

    def recv(self, buf: Any = None, source: int | None = None, tag: int | None = None, status: Any = None) -> Any:
        """Receive a Python object of ``send`` and its variants; by default from any source and with any tag.

        Args:
            buf: Memory for the pickle, as in mpi4py.
            source: Rank of the sender; any if None.
            tag: Tag of the message; any if None.
            status: ``MPI.Status`` to fill.

        Returns:
            The object.

        Raises:
            CollectiveTimeout, PeerError: No object came within ``UCCH_TIMEOUT`` seconds, or its sender died.
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
        """Send one message and receive another; neither waits for the other.

        Args:
            sendbuf, dest, sendtag: As in :meth:`Send`.
            recvbuf, source, recvtag, status: As in :meth:`Recv`.
            stream: GPU stream in which both messages start; None: they start now.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And others; see :class:`Communicator`.
        """
        self._quick.sendrecv(recvbuf, source, recvtag, sendbuf, dest, sendtag, status, stream)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int | None = None,
        recvtag: int | None = None,
        status: Any = None,
    ) -> None:
        """Send the content of a buffer, and receive another message into it.

        Args:
            buf: Array in host memory, with room for the received message.
            dest, sendtag: As in :meth:`Send`.
            source, recvtag, status: As in :meth:`Recv`.

        Raises:
            ValueError, CollectiveTimeout, PeerError: And others; see :class:`Communicator`.
        """
        messages = self._messages
        into = messages.incoming(buf, source, recvtag)
        messages.run_all([into, messages.outgoing(buf, dest, sendtag, copy=True)], status)

    # --- non-blocking -------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        """Start :meth:`Send`, with its arguments.

        Returns:
            A request; once it is complete the buffer may be reused.
        """
        return self._quick.isend(buf, dest, tag, stream)

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        return self._messages.start(self._messages.outgoing(buf, dest, tag, sync=True, stream=stream))

    def Irsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Request:
        return self.Isend(buf, dest, tag, stream=stream)

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start :meth:`Bsend`, with its arguments; return its request. The buffer may be reused at once."""
        return self._messages.start(self._messages.outgoing(buf, dest, tag, copy=True))

    def Irecv(self, buf: Any, source: int | None = None, tag: int | None = None, *, stream: Any = None) -> Request:
        """Start :meth:`Recv`, with its arguments.

        Returns:
            A request; once it is complete the message is in the buffer.
        """
        return self._quick.irecv(buf, source, tag, stream)

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
            A request that completes when both messages have; its status is the receive's.
        """
        messages = self._messages
        into = messages.incoming(recvbuf, source, recvtag, stream=stream)
        outof = messages.outgoing(sendbuf, dest, sendtag, stream=stream)
        return MessageGroup(start_all(messages, [into, outof]), has_status=True)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int | None = None, recvtag: int | None = None
    ) -> Request:
        """Start :meth:`Sendrecv_replace`, with its arguments.

        Returns:
            A request that completes when both messages have; its status is the receive's.
        """
        messages = self._messages
        into = messages.incoming(buf, source, recvtag)
        outof = messages.outgoing(buf, dest, sendtag, copy=True)
        return MessageGroup(start_all(messages, [into, outof]), has_status=True)

    # --- persistent ---------------------------------------------------------------------------------------------------

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, sync=True))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        return self.Send_init(buf, dest, tag)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> PersistentRequest:
        """Set up :meth:`Bsend`, with its arguments; return a request that can be started many times.

        Each start copies the current content of the buffer.
        """
        return self._messages.persistent(self._messages.outgoing(buf, dest, tag, copy=True), copy=True)

    def Recv_init(self, buf: Any, source: int | None = None, tag: int | None = None) -> PersistentRequest:
        return self._messages.persistent(self._messages.incoming(buf, source, tag))

    # --- partitioned --------------------------------------------------------------------------------------------------

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> PartitionedRequest:
        """Set up a send of equal partitions; ``Pready`` of the request sends a partition.

        Args:
            buf: Array with all partitions; a count in ``[array, count, datatype]`` is that of one partition.
            partitions: Number of partitions.
            dest, tag: As in :meth:`Send`.
            info: A hint, ignored.

        Returns:
            A request that can be started many times.
        """
        return self._partitions.send(buf, partitions, dest, tag)

    def Precv_init(self, buf: Any, partitions: int, source: int, tag: int, info: Any = None) -> PartitionedRequest:
        """Set up the receive of a :meth:`Psend_init`; ``Parrived`` of the request tests a partition.

        Args:
            buf: Array with room for all partitions; a count in ``[array, count, datatype]`` is that of one partition.
            partitions: Number of partitions. It may differ from the sender's.
            source, tag: As in the send.
            info: A hint, ignored.

        Returns:
            A request that can be started many times.
        """
        return self._partitions.receive(buf, partitions, source, tag)

    # --- buffers for Bsend, which does not need them ------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Keep a buffer until :meth:`Detach_buffer`. It is not used: buffered sends have memory of their own.

        Args:
            buf: Any object.

        Raises:
            ValueError: A buffer is attached already.
        """
        if self._attached is not None:
            raise ValueError(f"rank {self._messages.rank}: a buffer is attached already; Detach_buffer first")
        self._attached = buf

    def Detach_buffer(self) -> Any:
        """Detach and return the attached buffer. No message uses it.

        Returns:
            The buffer, or None.
        """
        buf, self._attached = self._attached, None
        return buf

    def Flush_buffer(self) -> None:
        """Do nothing: no message is in an attached buffer."""
        self._messages.check_usable()

    def Iflush_buffer(self) -> Request:
        """:meth:`Flush_buffer` as a request.

        Returns:
            A request that is complete.
        """
        self._messages.check_usable()
        return finished()

    # --- probes -------------------------------------------------------------------------------------------------------

    def Probe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Wait for a message without receiving it: a buffer of ``Send``, or a Python object of ``send``.

        Args:
            source: Rank; any if None.
            tag: Any if None.
            status: ``MPI.Status`` to be filled with its source, tag and length.

        Returns:
            True.

        Raises:
            CollectiveTimeout, PeerError: No message came within ``UCCH_TIMEOUT`` seconds, or its sender died.
        """
        return self._quick.probe(source, tag, status)

    def Iprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> bool:
        """Do as :meth:`Probe`, with its arguments, without waiting.

        Returns:
            True if a message has arrived.
        """
        return self._quick.iprobe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def Mprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message:
        """Do as :meth:`Probe`, with its arguments, and take the message out.

        Returns:
            The :class:`Message`, which alone can receive it.
        """
        return mprobe(self._messages, source, tag, status)

    def Improbe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Message | None:
        """Do as :meth:`Mprobe`, with its arguments, without waiting.

        Returns:
            The :class:`Message`, which alone can receive it, or None.
        """
        return probe(self._messages, source, tag, status, remove=True)

    def mprobe(self, source: int | None = None, tag: int | None = None, status: Any = None) -> Any:
        """Do as :meth:`Mprobe`, with its arguments, for a Python object.

        Returns:
            An ``mpi4py.MPI.Message``, whose ``recv`` alone can receive it.
        """
        return object_message(self._messages, self._mpi, *self._wild(source, tag), status)
