"""Calls in a stream that a vendor's library does alone: launched, and left to the stream (coll/stream_executor.c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..bootstrap.liveness import Board
from ..engine.lowering import Program
from ..errors import CollectiveError, RefusedError
from ..native.libraries import ffi, lib
from .failure import ANEW, failure_of, not_started, refused
from .request import Request
from .status import fill_empty

_NULL = ffi.NULL
_cast = ffi.cast
_launch = lib.ucch_program_launch
_release = lib.ucch_launch_release
_peek = lib.ucch_peek


class Launched(Request):
    """A call in a stream. It needs no ``Wait``: the stream does not pass it before its end, and the engine collects it.

    The arrays must stay allocated until the stream has passed the call, as for a kernel.
    """

    _call, _keep, _timeout = None, None, 0.0
    in_stream = lasting = True

    def __init__(self, op: Any, about: tuple[Launches, Program, str, float], owner: object) -> None:
        # Not the base class's: who makes many such calls waits for each of these lines.
        self._op, self._about, self._owner, self._done = op, about, owner, False

    def __del__(self, release: Any = _release) -> None:
        """The engine may forget it; what was launched goes on."""
        release(self._op)

    def Wait(self, status: Any = None) -> bool:
        """As that of any request; short where the call has ended well."""
        if self._done or _peek(self._op) != 1:
            return super().Wait(status)
        self._done = True
        if status is not None:
            fill_empty(status)
        return True

    def _drop(self) -> None:
        """Nothing is left to do."""

    def _complete(self, state: int, status: Any) -> None:
        self._done = True
        if state != 1:
            launches, program, label, timeout = self._about
            launches.failed(self._op, program, label, timeout)


class Captured(Request):
    """A call that was captured in a graph, whose replays it knows nothing of: there is nothing to wait for."""

    in_stream = True

    def __init__(self) -> None:
        super().__init__(ffi.NULL)
        self._done = True


class Launches:
    """The launched calls of one communicator. ``fail`` is told of a call that failed."""

    def __init__(self, board: Board, rank: int, fail: Callable[[Exception, object], None]) -> None:
        self._board, self._rank, self._fail = board, rank, fail

    def launch(
        self, program: Program, label: str, outof: Any, into: Any, timeout: float, stream: int, owner: object
    ) -> Request | None:
        """Launch a program; None if it must wait for calls before it, and be started like any other."""
        op = _launch(program.handle, _number(outof), _number(into), timeout, stream)
        if op == _NULL:
            self.refuse(program, label, timeout)
            return None
        return Launched(op, (self, program, label, timeout), owner)

    def capture(self, program: Program, label: str, outof: Any, into: Any, timeout: float, stream: int) -> None:
        """Put a program into the graph for which a stream is captured."""
        status = lib.ucch_program_capture(program.handle, _number(outof), _number(into), timeout, stream)
        if status == lib.UCCH_FAIL_BROKEN:
            self._broken(label)
        if status < 0:
            raise not_started(self._board, self._rank, label, status)

    def failed(self, op: Any, program: Program, label: str, timeout: float) -> None:
        """Raise why a call failed."""
        failure = failure_of(op, self._board, self._rank, label, timeout)
        self._fail(failure, program)
        raise failure

    def refuse(self, program: Program, label: str, timeout: float) -> None:
        """Raise why the calling thread's last launch failed; None where the general way handles it, or refuses it."""
        op = lib.ucch_launch_failed()
        if op != _NULL:
            self.failed(op, program, label, timeout)
        if lib.ucch_launch_status() == lib.UCCH_FAIL_BROKEN:
            self._broken(label)

    def _broken(self, label: str) -> NoReturn:
        """Raise that an earlier call failed, and why."""
        first = lib.ucch_board_first_failure(self._board.native)
        if first == _NULL and (why := refused(self._board, self._board.next)):
            raise RefusedError(f"rank {self._rank}: {label}: {why}; {ANEW}")
        if first == _NULL:
            raise CollectiveError(f"rank {self._rank}: {label} could not be started: an earlier call failed")
        failure = failure_of(first, self._board, self._rank, "a call in a stream", 0.0)
        self._fail(failure, first)
        raise CollectiveError(
            f"rank {self._rank}: {label} could not be started, because an earlier call failed: {failure}"
        ) from failure

    @property
    def active(self) -> int:
        """Launched calls that have not ended."""
        return int(lib.ucch_board_launches(self._board.native))


def _number(address: Any) -> int:
    """An address as the launch takes it, which needs no object for it."""
    return address if type(address) is int else int(_cast("uintptr_t", address))
