"""A lane: one communicator of a group, on which collectives are posted one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..api.comm import Communicator
from ..calls.dispatch import Runner
from ..calls.request import Request, finished, look_around, wait_op

__all__ = ["GroupCommunicator", "Lane"]

#: Seconds that stand for "no limit" where one is needed.
_LONG = 1e7


class GroupCommunicator(Communicator):
    """One of a torch group: whoever waits for a message lets a stream wait."""

    _arenas = True


class Lane:
    """One communicator with the locks that order what is posted on it.

    ``check_aborted`` raises when the group has been aborted; blocking calls ask it now and then.
    """

    def __init__(self, comm: Communicator, check_aborted: Callable[[], None]) -> None:
        self.comm, self.run = comm, comm._run
        self.messages = comm._messages
        self._check_aborted = check_aborted
        self._lock = threading.RLock()
        #: Messages have one of their own: a peer may come to a collective only after a message of ours.
        self._message_lock = threading.RLock()
        self.run.wait = partial(wait_op, look=self._look)

    def _look(self) -> None:
        self._check_aborted()
        look_around()

    def call(self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float) -> None:
        """Run a collective on host memory to its end in this thread.

        Counts that only some ranks know are not exchanged: a rank may make the same call asynchronously, and its peers
        would wait for its part of the exchange.
        """
        with self._lock:
            self._limited(seconds).blocking(name, send, recv, op, root, counts, exchange=False)

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Tell the other ranks of a collective that this one cannot make."""
        try:
            yield
        except Exception as error:
            self.run.refuse_call(name, error)
            raise

    def _limited(self, seconds: float) -> Runner:
        """The runner, with the time limit of the call to come; making teams for it is limited likewise."""
        run = self.run
        if run.timeout != seconds:
            run.timeout = seconds
            run.members.teams.timeout = seconds or _LONG
        return run

    def start(self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float) -> Request:
        """Start a collective; the progress thread is to be woken if it does not end at once."""
        with self._refusing(name), self._lock:
            run = self._limited(seconds)
            run._ready()
            prepared = run._prepared.prepare(name, send, recv, op, root, counts, exchange=False)
            return finished() if prepared is None else run._begin(prepared, watched=False)

    def start_on(
        self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float, stream: int
    ) -> tuple[Request, bool]:
        """Start a collective when ``stream`` gets there; also whether the stream waits for its end.

        Where streams must not wait for a call (docs/gpu.md), the host has to; it can do so later. They are not held for
        one: torch allocates whenever it likes.
        """
        with self._lock:
            run = self._limited(seconds)
            return run.start_on(stream, name, send, recv, op, root, counts, later=True, hold=False)

    def send(self, tensor: Any, dest: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a send; of what is there when ``stream`` gets there."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            return messages.start(messages.outgoing(tensor, dest, tag, stream=stream))

    def check_message(self, outgoing: bool, peer: int, tag: int) -> None:
        """Refuse a peer or a tag that cannot be."""
        messages = self.messages
        wild = not outgoing and peer < 0
        messages.check("dest" if outgoing else "source", messages.any_source if wild else peer, tag)

    def receive(
        self, tensor: Any, source: int, tag: int, seconds: float, stream: int | None = None, *, taken: bool = False
    ) -> Request:
        """Start a receive, which may write once ``stream`` gets there; ``source`` -1 is any, ``taken`` as that of
        :meth:`.p2p.Messages.incoming`."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            origin = messages.any_source if source < 0 else source
            return messages.start(messages.incoming(tensor, origin, tag, stream=stream, taken=taken))
