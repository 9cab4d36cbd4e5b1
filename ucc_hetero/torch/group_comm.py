"""One communicator of a process group, on which collectives are posted one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..api.comm import Communicator, messages_of, runner_of
from ..calls.arguments import CallSpec, Completion
from ..calls.request import Request, run_poll_hooks, wait_op
from ..calls.runner import RepeatableCall, Runner
from .monitored_barrier import NO_LIMIT


class GroupComm:
    """One communicator with the locks that order what is posted on it.

    ``check_aborted`` raises when the group has been aborted; blocking calls ask it now and then.
    """

    def __init__(self, comm: Communicator, check_aborted: Callable[[], None]) -> None:
        self.communicator, self.runner = comm, runner_of(comm)
        self.messages = messages_of(comm)
        #: Streams that asynchronous calls on a device go into in turn: those queued whole keep their order themselves.
        self.streams = 1 if self.runner.members.channels is None else 2
        self._check_aborted = check_aborted
        self._lock = threading.RLock()
        #: The time limit that the runner has: -1 before the first call.
        self._seconds = -1.0
        #: Messages have one of their own: a peer may come to a collective only after a message of ours.
        self._message_lock = threading.RLock()
        self.runner.wait = partial(wait_op, look=self._look)
        self.runner.exchanges = False

    def _look(self) -> None:
        self._check_aborted()
        run_poll_hooks()

    def call(self, call: CallSpec, seconds: float) -> None:
        """Run a collective on host memory to its end in this thread."""
        with self._lock:
            self._limited(seconds).blocking(*call)

    def start(self, call: CallSpec, seconds: float, stream: int | None = None) -> Request:
        """Start a collective, with ``stream`` when that gets there.

        Where the stream cannot wait for its end the host has to, and can do so later. None is held for it: torch
        allocates whenever it likes. The progress thread is to be woken if a call without a stream does not end at once.
        Where devices of several vendors need all counts of an ``alltoallv``, these are exchanged first; streams do the
        rest.
        """
        with self._lock:
            agrees = stream is not None and call.name == "alltoallv" and not self.runner.members.topology.flat
            return self._limited(seconds).begin(call, stream, Completion.HOST if agrees else Completion.ON_WAIT)

    def repeat(
        self, repeatable: RepeatableCall, both: tuple[int, int], seconds: float, stream: int | None, keep: Any
    ) -> bool:
        with self._lock:
            if seconds != self._seconds:
                self._limited(seconds)
            return self.runner.repeat(repeatable, *both, stream, keep)

    def repeat_in_stream(
        self, repeatable: RepeatableCall, both: tuple[int, int], seconds: float, stream: int
    ) -> Request | None:
        with self._lock:
            if seconds != self._seconds:
                self._limited(seconds)
            return self.runner.repeat_in_stream(repeatable, *both, stream)

    def refuse(self, mistake: Exception) -> None:
        with self._lock:
            self.runner.refuse(mistake)

    def _limited(self, seconds: float) -> Runner:
        """The runner, with the time limit of the call to come; making teams for it is limited likewise."""
        runner = self.runner
        if self._seconds != seconds:
            self._seconds = runner.timeout = seconds
            runner.members.teams.timeout = seconds or NO_LIMIT
        return runner

    def send(self, tensor: Any, dest: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a send; of what is there when ``stream`` gets there."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            return messages.start(messages.outgoing(tensor, dest, tag, stream=stream))

    def goes_by_lane(self, peer: int) -> bool:
        """As :meth:`.Messages.goes_by_lane`; ``peer`` -1 is any."""
        return self.messages.goes_by_lane(self.messages.any_source if peer < 0 else peer)

    def check_lane(self, tensor: Any, peer: int, tag: int, outgoing: bool) -> None:
        """Refuse a peer, a tag or memory that cannot be, of a message that :meth:`goes_by_lane` is true for."""
        messages, arrays = self.messages, self.messages.arrays
        any_source = not outgoing and peer < 0
        messages.check("dest" if outgoing else "source", messages.any_source if any_source else peer, tag)
        arrays.on_device(arrays.bind(tensor, peer, writable=not outgoing))
        messages.captured.load()

    def receive(self, tensor: Any, source: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a receive, which may write once ``stream`` gets there; ``source`` -1 is any."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            origin = messages.any_source if source < 0 else source
            return messages.start(messages.incoming(tensor, origin, tag, stream=stream))
