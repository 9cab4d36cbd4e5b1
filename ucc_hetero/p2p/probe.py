"""Probes, and messages that a matching probe has taken out of the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from ..bootstrap.settings import limit_text
from ..calls.request import Request, set_status
from ..calls.state import unheard_text
from ..docstrings import forms
from ..errors import CollectiveError, CollectiveTimeout, PeerError
from ..native.libraries import lib, owned
from ..native.waiting import callable_mpi, progress_until
from .messages import Messages
from .transfer import Transfer, source_and_tag

_T = TypeVar("_T")

#: How often to look for a message before anything else is checked.
_LOOKS = 50
#: Seconds between two checks that the source is alive.
_CHECK_S = 0.01


@forms
class Message:
    """A message that ``Mprobe`` or ``Improbe`` took out. Only :meth:`Recv` or :meth:`Irecv` can receive it, once.

    If it is dropped without a receive, it goes back: the next receive or probe that matches it finds it. As in mpi4py,
    a message is true until it is received, and then equals ``MPI.MESSAGE_NULL``. The message from ``MPI.PROC_NULL``,
    which has no data, equals ``MPI.MESSAGE_NO_PROC`` until then.
    """

    def __init__(self, messages: Messages, taken: Any, source: int, tag: int) -> None:
        """``taken``: the engine's message that has it; None for MPI.PROC_NULL."""
        self._messages, self._taken, self.source, self.tag = messages, taken, source, tag
        #: True for the message from MPI.PROC_NULL, which has no data.
        self._none = source == messages.null

    def __bool__(self) -> bool:
        """True until the message is received."""
        return self._none or bool(self._taken is not None and lib.ucch_has_taken(self._taken))

    def __eq__(self, other: object) -> bool:
        """True for the same message, or for the MPI constant that it equals (see the class)."""
        module = sys.modules.get("mpi4py.MPI")
        if self is other or module is None or not isinstance(other, module.Message):
            return self is other
        return bool(other == module.MESSAGE_NO_PROC) if self._none else not self and other == module.MESSAGE_NULL

    __hash__ = object.__hash__

    @classmethod
    def Probe(cls, comm: Any, *args: Any, **more: Any) -> Message:
        """Wait for a message and take it out; see :meth:`~ucc_hetero.Communicator.Mprobe`.

        Args:
            comm: The communicator.
            args, more: The arguments of its ``Mprobe``.

        Returns:
            Message: The message, to be received.
        """
        return cast(Message, comm.Mprobe(*args, **more))

    @classmethod
    def Iprobe(cls, comm: Any, *args: Any, **more: Any) -> Message | None:
        """Take out a message if one has arrived; see :meth:`~ucc_hetero.Communicator.Improbe`.

        Args:
            comm: The communicator.
            args, more: The arguments of its ``Improbe``.

        Returns:
            Message | None: The message, to be received; None if none has arrived.
        """
        return cast("Message | None", comm.Improbe(*args, **more))

    @classmethod
    def probe(cls, comm: Any, *args: Any, **more: Any) -> Any:
        """Wait for a pickled object and take it out; see ``comm.mprobe``.

        Args:
            comm: The communicator.
            args, more: The arguments of its ``mprobe``.

        Returns:
            mpi4py.MPI.Message: The message, to be received.
        """
        return comm.mprobe(*args, **more)

    @classmethod
    def iprobe(cls, comm: Any, *args: Any, **more: Any) -> Any:
        """Take out a pickled object if one has arrived; see ``comm.improbe``.

        Args:
            comm: The communicator.
            args, more: The arguments of its ``improbe``.

        Returns:
            mpi4py.MPI.Message | None: The message, to be received; None if none has arrived.
        """
        return comm.improbe(*args, **more)

    def _take(self, buf: Any, timeout: float, then: Callable[[Transfer], _T]) -> _T:
        if not self:
            raise ValueError("this message has been received already")
        transfer = self._messages.incoming(buf, self.source, self.tag)
        assert isinstance(transfer, Transfer), "no stream is named"
        try:
            if self._taken is not None:
                self._messages.begin_taken(transfer, self._taken, timeout)
            self._none = False
            return then(transfer)
        except BaseException:
            self._messages.withdraw(transfer)
            raise

    def Recv(self, buf: Any, status: Any = None) -> None:
        """Receive the message.

        Args:
            buf: The buffer to receive into, in any form that ``Communicator.Recv`` takes.
            status: An ``MPI.Status`` to fill in.

        Raises:
            ValueError: If the message was received already.
            TypeError, BufferError: If ``buf`` cannot be received into.
            TruncationError: If the message is longer than ``buf``.
            PeerError: If the sender has died.
            CollectiveTimeout: If the data does not come in time.
        """
        messages = self._messages
        self._take(buf, messages.timeout, lambda transfer: messages.wait(transfer, status))

    def Irecv(self, buf: Any) -> Request:
        """Start to receive the message. Arguments and errors are those of :meth:`Recv`.

        Returns:
            Request: Its ``Wait`` and ``Test`` tell when the data is there, and raise errors.
        """
        return self._take(buf, 0, self._messages.request)


def probe(messages: Messages, source: int | None, tag: int | None, status: Any, *, remove: bool) -> Message | None:
    """Look once for an arrived message. ``remove``: take it out of the queue."""
    messages.check_usable()
    source, tag = messages.check("source", source, tag)
    if source == messages.null:
        set_status(status, messages.null, messages.any_tag, 0)
        return Message(messages, None, messages.null, messages.any_tag)
    value, mask = messages.pattern(source, tag)
    messages.reach(source)
    # Made first: if a signal's exception comes behind the probe, it is dropped, and its message is matched again.
    probe = owned(lib.ucch_message_new(), lib.ucch_message_free)
    if not lib.ucch_probe(probe, messages.worker, value, mask, remove):
        return None
    where, what = source_and_tag(int(probe.info.sender_tag))
    set_status(status, where, what, int(probe.info.length))
    return Message(messages, probe, where, what)


def mprobe(messages: Messages, source: int | None, tag: int | None, status: Any) -> Message:
    """Wait for a message and take it out. ``CollectiveTimeout`` after the communicator's time limit."""
    for _ in range(_LOOKS):
        if (found := probe(messages, source, tag, status, remove=True)) is not None:
            return found
    return awaited(messages, source, tag, lambda: probe(messages, source, tag, status, remove=True))


def object_arrived(messages: Messages, source: int | None, tag: int | None, status: Any) -> bool:
    """True if a Python object has arrived."""
    module = callable_mpi()
    iprobe = getattr(messages.state.mpi, "iprobe", None)  # ranks that met in a store cannot send objects
    if module is None or iprobe is None:
        return False
    try:
        return bool(iprobe(*messages.check("source", source, tag), status))
    except module.Exception:  # a rank has died: the caller's own check tells which
        return False


def awaited(messages: Messages, source: int | None, tag: int | None, attempt: Callable[[], _T | None]) -> _T:
    """Poll ``attempt`` until it returns a message. ``CollectiveTimeout`` if none arrives in time."""
    source, tag = messages.check("source", source, tag)
    where, began = f"rank {messages.rank}: probe for source {source}", time.monotonic()
    found = poll(messages, source, where, attempt)
    if found is None:
        raise CollectiveTimeout(
            f"{where}, tag {tag}: no message within {time.monotonic() - began:.3g} s ({limit_text(messages.timeout)})"
            f"{unheard_text(messages.state.board)}"
        )
    return found


def object_message(messages: Messages, mpi: Any, source: int, tag: int, status: Any = None) -> Any:
    """Wait for a Python object over ``mpi``, and take its message out. Fills ``status`` as a probe does.

    ``CollectiveTimeout`` if no object came within the communicator's time limit, ``PeerError`` if the source has
    exited."""
    for _ in range(_LOOKS):
        if (found := mpi.improbe(source, tag, status)) is not None:
            return found
    origin = "any rank" if source == messages.any_source else f"rank {source}"
    what = "any tag" if tag == messages.any_tag else f"tag {tag}"
    where = f"rank {messages.rank}: recv of a Python object from {origin}, {what}"
    found = poll(messages, source, where, lambda: mpi.improbe(source, tag, status))
    if found is None:
        buffers = None
        with suppress(CollectiveError):  # a communicator that failed still delivers objects
            buffers = probe(messages, source, tag, None, remove=False)
        raise CollectiveTimeout(
            f"{where}: none came within {messages.timeout:g} s (UCCH_TIMEOUT){unheard_text(messages.state.board)}"
            f"{'; a buffer of Send() waits, which Recv() receives' if buffers is not None else ''}"
        )
    return found


def poll(messages: Messages, source: int, where: str, attempt: Callable[[], _T | None]) -> _T | None:
    """Call ``attempt`` until it returns something. None after the communicator's time limit."""
    found: list[_T] = []
    left, began, board = 0.0, time.monotonic(), messages.state.board

    def come() -> bool:
        message = attempt()
        found.extend([] if message is None else [message])
        return bool(found)

    def raise_if_gone() -> None:
        """Raise once the source has been gone for so long that its last messages would have arrived."""
        nonlocal left
        if messages.is_gone(source):
            left = left or time.monotonic()
            if time.monotonic() - left > 1:
                raise PeerError(f"{where}: {messages.gone_text(source)}")
        if board.cuts_off(-1 if source == messages.any_source else source, time.monotonic() - began):
            raise CollectiveError(f"{where}: nothing can come{unheard_text(board)}")

    progress_until(come, messages.timeout, raise_if_gone, step=1e-6, longest=1e-4, spin=2e-4, apart=_CHECK_S)
    return found[0] if found else None
