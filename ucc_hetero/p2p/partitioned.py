"""Partitioned messages: each partition of a send is a message of its own, sent once it is marked ready.

The two sides may divide the data differently. A sender therefore sends its receiver a header once, with the number of
its partitions and their tags. The n-th ``Precv_init`` of a source and tag matches that source's n-th ``Psend_init``.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np

from ..buffers import Buffer, as_buffer
from ..calls.persistent import PersistentRequest, idle
from ..calls.request import Request, fill_empty, set_status
from ..device import pointer_vendor
from ..errors import CollectiveTimeout, TruncationError, UCCHError
from ..native.libraries import lib
from ..native.waiting import progress_until
from .composite import CompositeRequest
from .messages import Messages, part_of
from .probe import poll, probe
from .transfer import Transfer

#: Tag of headers, and lowest tag of partitions. Neighbourhood collectives use the tags between them.
_HEADERS, _PARTITIONS = 0, 1 << 30


class _Header(NamedTuple):
    """A sender's header: the user's tag, number of partitions, bytes of each, tag of the first."""

    tag: int
    partitions: int
    nbytes: int
    first: int


class Partitions:
    def __init__(self, messages: Messages) -> None:
        self._messages, self._lock = messages, threading.Lock()
        #: The next free tag for partitions, per receiver.
        self._next: Counter[int] = Counter()
        #: (source, tag, number) -> header without a receive yet; counts of headers arrived and receives made.
        self._headers: dict[tuple[int, int, int], _Header] = {}
        self._come: Counter[tuple[int, int]] = Counter()
        self._asked: Counter[tuple[int, int]] = Counter()

    def send(self, buf: Any, partitions: Any, dest: Any, tag: Any) -> PartitionedRequest:
        messages = self._messages
        dest, tag = messages.check("dest", dest, tag)
        parts = self._divided(buf, partitions, dest, writable=False)
        with self._lock:
            first = _PARTITIONS + self._next[dest] % _PARTITIONS
            if first + len(parts) > 2 * _PARTITIONS:
                first, self._next[dest] = _PARTITIONS, 0
            self._next[dest] += len(parts)
        header = np.array(_Header(tag, len(parts), parts[0].nbytes, first), np.int64)
        messages.start(messages.outgoing(header, dest, _HEADERS, copy=True)).Free()
        return _Send(messages, parts, dest, tag, first)

    def receive(self, buf: Any, partitions: Any, source: Any, tag: Any) -> PartitionedRequest:
        messages = self._messages
        source, tag = messages.check("source", source, tag)
        if source == messages.any_source or tag == messages.any_tag:
            raise ValueError(
                f"Precv_init on rank {messages.rank}: a partitioned receive needs the rank of its source and a tag"
            )
        parts = self._divided(buf, partitions, source, writable=True)
        with self._lock:
            number = self._asked[source, tag]
            self._asked[source, tag] += 1
        return _Receive(self, messages, parts, source, tag, number)

    def _divided(self, buf: Any, partitions: Any, peer: int, *, writable: bool) -> list[Buffer]:
        messages = self._messages
        try:
            count = index(partitions)
        except TypeError:
            raise TypeError(f"partitions {partitions!r} on rank {messages.rank} is not an integer") from None
        if not 0 < count < _PARTITIONS:
            raise ValueError(f"partitions on rank {messages.rank} must be 1 or more, not {count}")
        if peer == messages.null:
            return [messages.arrays.bind(buf, peer, writable=writable)] * count
        whole = as_buffer(
            buf, writable=writable, argument="buf", rank=messages.rank, blocks=count, pointer_vendor=pointer_vendor
        )
        each = whole.count // count
        return [part_of(whole, i * each, each) for i in range(count)]

    def header(self, source: int, tag: int, number: int, *, wait: bool) -> _Header | None:
        """The header of the ``number``-th partitioned message from ``source`` with ``tag``; None if it has not
        arrived."""
        messages = self._messages

        def attempt() -> _Header | None:
            with self._lock:  # another thread may have taken it
                while (source, tag, number) not in self._headers and (found := self._take(source)) is not None:
                    self._headers[source, found.tag, self._come[source, found.tag]] = found
                    self._come[source, found.tag] += 1
                return self._headers.pop((source, tag, number), None)

        if not wait:
            return attempt()
        where = f"rank {messages.rank}: partitioned receive from rank {source}, tag {tag}"
        header = poll(messages, source, where, attempt)
        if header is None:
            raise CollectiveTimeout(
                f"{where}: rank {source} has not called Psend_init within {messages.timeout:g} s (UCCH_TIMEOUT)"
            )
        return header

    def _take(self, source: int) -> _Header | None:
        """The next header of a sender, or None."""
        found = probe(self._messages, source, _HEADERS, None, remove=True)
        if found is None:
            return None
        found.Recv(numbers := np.empty(4, np.int64))
        return _Header(*map(int, numbers))


class PartitionedRequest(CompositeRequest, PersistentRequest):
    """A partitioned message that can be started repeatedly; returned by ``Psend_init`` and ``Precv_init``."""

    #: Words for error texts.
    _direction: str

    def __init__(self, messages: Messages, parts: Sequence[Buffer], peer: int, tag: int) -> None:
        super().__init__(*idle(), None, owner=messages.state)
        self._messages, self._parts, self._peer, self._tag = messages, parts, peer, tag
        self._to_null = peer == messages.null
        #: Held while messages are being started.
        self._marking = threading.Lock()
        #: Number of a partition -> its message, since the last start.
        self._started: dict[int, Request] = {}
        #: Time of the first wait since the last start; 0 before.
        self._waited_since = 0.0

    def _begin(self) -> int:
        self._messages.check_usable()
        self._started, self._waited_since = {}, 0.0
        return 0

    def _described(self) -> str:
        return f"rank {self._messages.rank}: partitioned {self._direction} rank {self._peer}, tag {self._tag}"

    def _numbers(self, partitions: Iterable[Any]) -> list[int]:
        found = []
        for each in partitions:
            try:
                found.append(index(each))
            except TypeError:
                raise TypeError(f"{self._described()}: partition {each!r} is not an integer") from None
            if not 0 <= found[-1] < len(self._parts):
                raise ValueError(f"{self._described()}: there is no partition {found[-1]} among the {len(self._parts)}")
        return found

    def Pready(self, partition: int) -> None:
        """Mark a partition ready: it is sent now. From any thread.

        Args:
            partition: Number of the partition, from 0 on.

        Raises:
            TypeError, ValueError: There is no such partition, it was marked before, or this is a receive.
        """
        self.Pready_list([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Mark a range of partitions ready.

        Args:
            partition_low: Number of the first partition.
            partition_high: Number of the last partition, inclusive.

        Raises:
            TypeError, ValueError: See :meth:`Pready`.
        """
        self.Pready_list(range(index(partition_low), index(partition_high) + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """Mark several partitions ready.

        Args:
            partitions: Numbers of the partitions.

        Raises:
            TypeError, ValueError: See :meth:`Pready`.
        """
        raise ValueError(f"{self._described()}: Pready is for sends")

    def Parrived(self, partition: int) -> bool:
        """Test whether a partition of this receive has arrived.

        Args:
            partition: Number of the partition, from 0 on.

        Returns:
            True if the whole partition has arrived.

        Raises:
            TypeError, ValueError: There is no such partition, or this is a send.
        """
        raise ValueError(f"{self._described()}: Parrived is for receives")

    @abstractmethod
    def _complete_set(self, *, wait: bool) -> bool:
        """True if all messages since the last start have begun. ``wait``: start the missing ones as soon as
        possible."""

    # --- as of any request --------------------------------------------------------------------------------------------

    def Wait(self, status: Any = None) -> bool:
        """Wait until all partitions have been sent or received. Returns True."""
        if not self._done:
            self._complete_set(wait=True)
        return super().Wait(status)

    def _begun(self) -> Sequence[Request]:
        return list(self._started.values())

    def _settle(self, status: Any) -> None:
        failure: UCCHError | None = None
        for request in self._begun():
            try:
                request.Wait()
            except UCCHError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._describe(1, status)

    def _describe(self, state: int, status: Any) -> None:
        fill_empty(status)

    def _ended(self) -> int:
        if not self._complete_set(wait=False):
            # After the timeout it counts as ended: the wait then raises, and names what is missing.
            return int(0 < self._messages.timeout < time.monotonic() - (self._waited_since or time.monotonic()))
        return int(all(r.finished or r._ended() for r in self._begun()))

    def _ops(self) -> list[Any]:
        return super()._ops() if self._complete_set(wait=False) else [self._op]

    def _arm(self) -> None:
        self._waited_since = self._waited_since or time.monotonic()
        super()._arm()


class _Send(PartitionedRequest):
    """The send side. Any thread may mark partitions ready."""

    _direction = "send to"

    def __init__(self, messages: Messages, parts: Sequence[Buffer], peer: int, tag: int, first: int) -> None:
        super().__init__(messages, parts, peer, tag)
        self._first = first

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """Send partitions, whose memory must then stay unchanged until the request completes."""
        if self._done:
            raise ValueError(f"{self._described()}: it has not been started")
        with self._marking:
            for i in self._numbers(partitions):
                if i in self._started:
                    raise ValueError(f"{self._described()}: partition {i} has been marked ready already")
                self._send(i)

    def _send(self, i: int) -> None:
        messages = self._messages
        transfer = messages.outgoing(self._parts[i], self._peer, self._first + i)
        assert isinstance(transfer, Transfer), "no stream is named"
        try:
            self._started[i] = messages.start(transfer)
        except BaseException as error:  # of a signal: what has begun goes on, and must not be sent a second time
            if transfer.begin is not None and not isinstance(error, UCCHError):
                self._started[i] = messages.request(transfer)
            raise

    def _complete_set(self, *, wait: bool) -> bool:
        def complete() -> bool:
            return len(self._started) == len(self._parts)

        if not wait:
            lib.ucch_progress_once()
            return complete()
        if not progress_until(complete, self._messages.timeout):
            missing = [i for i in range(len(self._parts)) if i not in self._started]
            raise CollectiveTimeout(
                f"{self._described()}: partitions {missing} were not marked ready (Pready) within "
                f"{self._messages.timeout:g} s (UCCH_TIMEOUT)"
            )
        return True


class _Receive(PartitionedRequest):
    """The receive side: receives the sender's partitions, and reports which of its own partitions they complete."""

    _direction = "receive from"

    def __init__(
        self, partitions: Partitions, messages: Messages, parts: Sequence[Buffer], peer: int, tag: int, number: int
    ) -> None:
        super().__init__(messages, parts, peer, tag)
        self._partitions, self._number = partitions, number
        self._header: _Header | None = None
        self._pieces: list[Buffer] = []

    def _begin(self) -> int:
        super()._begin()
        self._complete_set(wait=False)
        return 0

    def _describe(self, state: int, status: Any) -> None:
        if state:
            set_status(status, self._peer, self._tag, sum(part.nbytes for part in self._parts))
        else:
            fill_empty(status)

    def Parrived(self, partition: int) -> bool:
        (i,) = self._numbers([partition])
        if self._done or self._to_null:
            return True
        if not self._complete_set(wait=False):
            return False
        header, nbytes = self._header, self._parts[0].nbytes
        assert header is not None
        if not header.nbytes or not nbytes:
            low, high = (0, header.partitions) if header.partitions != len(self._parts) else (i, i + 1)
        else:
            low, high = i * nbytes // header.nbytes, -(-(i + 1) * nbytes // header.nbytes)
        return all(r.finished or bool(r._ended()) for r in list(self._started.values())[low:high])

    def _complete_set(self, *, wait: bool) -> bool:
        if self._to_null or (self._pieces and len(self._started) == len(self._pieces)):
            return True
        if not self._marking.acquire(blocking=wait):  # another thread is starting messages
            return False
        try:
            return self._start_all(wait)
        finally:
            self._marking.release()

    def _start_all(self, wait: bool) -> bool:
        if self._header is None:
            self._header = self._partitions.header(self._peer, self._tag, self._number, wait=wait)
            if self._header is None:
                return False
        self._pieces = self._pieces or self._divided(self._header)
        messages = self._messages
        for i, piece in enumerate(self._pieces):
            if i not in self._started:
                self._started[i] = messages.start(messages.incoming(piece, self._peer, self._header.first + i))
        return True

    def _divided(self, header: _Header) -> list[Buffer]:
        whole, total = self._parts[0], len(self._parts) * self._parts[0].nbytes
        size = whole.dtype.itemsize
        if header.partitions * header.nbytes != total or header.nbytes % size:
            raise TruncationError(
                f"{self._described()}: the sender has {header.partitions} partitions of {header.nbytes} bytes, but the "
                f"buffer has {len(self._parts)} of {whole.nbytes}"
            )
        each = header.nbytes // size
        return [part_of(whole, i * each, each) for i in range(header.partitions)]
