"""Messages captured in graphs: at each replay kernels of both ranks move the data, without the hosts.

All messages of a capture are added to the stream together, when the first of them is waited for. A graph executes
them in the order in which they were added: if each message were added when it is posted, two ranks that both post the
receive first would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..buffers import Buffer
from ..calls.persistent import idle
from ..calls.request import Request, set_status
from ..calls.runner import Runner
from ..device import kernels
from ..engine.lowering import Recipe
from ..errors import CollectiveError, NotSupported
from ..native.libraries import lib
from ..types import DTYPES, OPS

#: The kernel that moves the data.
_KERNEL = lib.UCCH_FUSED, OPS["SUM"].code, DTYPES["uint8"].code, 0


class CapturedMessage(Request):
    """A message that becomes part of a graph when it is waited for."""

    in_stream = True

    def __init__(
        self, owner: CapturedMessages, buffer: Buffer, peer: int, tag: int, stream: int, *, incoming: bool
    ) -> None:
        """``incoming``: True for a receive."""
        super().__init__(*idle())
        self.buffer, self.peer, self.tag, self.incoming = buffer, peer, tag, incoming
        self._messages, self.stream = owner, stream
        #: The stream whose capture has the message; None before.
        self.given: int | None = None

    def follow(self, stream: int) -> None:
        self._messages.give(self, stream)

    def _complete(self, state: int, status: Any) -> None:
        self.follow(self.stream)
        self._done = True
        set_status(status, self.peer, self.tag, self.buffer.nbytes)

    def _drop(self) -> None:
        """Add a request that was dropped without a wait to the graph, if the capture is still under way."""
        self._messages.give(self, self.stream, late=False)


class CapturedMessages:
    def __init__(self, state: Runner, limit: Callable[[], float]) -> None:
        """``limit`` returns the timeout in seconds for replays of messages captured now; 0 for none."""
        self._state, self._members, self._limit = state, state.members, limit
        #: Number of the current capture, and its messages that no stream has yet.
        self._capture = 0
        self.waiting: list[CapturedMessage] = []

    @staticmethod
    def load() -> None:
        """Load the kernel. Not possible during a capture, as loading may wait for the device."""
        kernels.ready(*_KERNEL)

    def post(self, what: str, buffer: Buffer, peer: int, tag: int, stream: int) -> CapturedMessage:
        """Post a message in a stream that is being captured; the caller has checked the arguments."""
        self.check()
        self._capture = lib.ucch_stream_captures(stream)
        message = CapturedMessage(self, buffer, peer, tag, stream, incoming=what == "receive")
        if buffer.nbytes:
            self.waiting.append(message)
        else:
            message.given = stream
        return message

    def check(self) -> None:
        """Raise if messages of an ended capture were not waited for: they are in no graph."""
        if self.waiting and not self._captures(self.waiting[0].stream):
            left = self.waiting[:]
            self.waiting.clear()  # the same list: C looks at it, too
            raise CollectiveError(
                f"rank {self._state.rank}: {len(left)} messages posted in a graph capture were not waited for in it, "
                "and are in no graph: call Wait before the capture ends"
            )

    def _captures(self, stream: int) -> bool:
        return bool(lib.ucch_stream_captures(stream) == self._capture)

    def give(self, message: CapturedMessage, stream: int, *, late: bool = True) -> None:
        """Add all pending messages to ``stream``, and make it wait for this one. ``late``: raise if the capture has
        ended."""
        if message.given is not None:
            self._follow(message.given, stream)
        elif self._captures(message.stream):
            some = self.waiting[:]
            self.waiting.clear()
            for other in {each.stream for each in some}:
                self._follow(other, stream)
            self._put(some, stream)
            for each in some:
                each.given = stream
        elif late:
            self.check()

    def _follow(self, ahead: int, stream: int) -> None:
        if ahead != stream:
            runtime = self._members.runtime
            assert runtime is not None, "streams are a runtime's"
            event = runtime.event()
            event.record(ahead)
            runtime.wait_event(stream, event)

    def _put(self, some: Sequence[CapturedMessage], stream: int) -> None:
        state, channels = self._state, self._members.graph_channels
        if channels is None:
            raise NotSupported(
                f"rank {state.rank}: messages cannot be captured in a graph: "
                f"{self._members.lacks or 'capture a collective of this communicator on all its ranks first'}"
            )
        with kernels.beside_a_capture(make=self._members.topology.flat):
            kernels.ready(*_KERNEL)
        outof, into = (next((each.buffer.ptr for each in some if each.incoming is side), 0) for side in (False, True))
        parts = []
        for each in some:
            part: dict[str, Any] = {"tag": each.tag, "peer": each.peer}
            at, nbytes = each.buffer.ptr, each.buffer.nbytes
            if each.incoming:
                part |= {"kind": lib.UCCH_STEP_RECV, "dst": (lib.UCCH_RECV, at - into, nbytes)}
            else:
                part |= {"kind": lib.UCCH_STEP_SEND, "src": (lib.UCCH_SEND, at - outof, nbytes)}
            parts.append(part)
        spec = {"on_device": True, "memory_type": self._members.device.memory, "channels": channels.handle}
        spec |= {"in_graph": True, "op": _KERNEL[1], "dtype": _KERNEL[2]}
        program = Recipe("messages", spec, parts).program(state.board)
        status = lib.ucch_program_capture(program, False, outof, into, self._limit(), stream)
        if status < 0:
            raise state.not_started(f"{len(some)} messages in a graph", status)
