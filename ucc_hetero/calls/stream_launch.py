"""Calls in a stream that a vendor's library does alone: launched, and left to the stream (coll/stream_executor.c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..bootstrap.liveness import Board
from ..buffers.fast_path import glance
from ..engine.lowering import Program
from ..errors import CollectiveError
from ..native.libraries import ffi, lib
from ..types import Op
from .failure import failure_of
from .ops import op_of
from .prepare import KINDS, Prepared
from .request import Request

__all__ = ["Launched", "Launches", "key_of"]

_NULL = ffi.NULL
_cast = ffi.cast
_launch = lib.ucch_program_launch
_release = lib.ucch_launch_release

#: What is known of a call by its arguments: (key, address of sendbuf or 0, address of recvbuf or 0).
Known = tuple[tuple[Any, ...], int, int]


def key_of(name: str, send: Any, recv: Any, op: Any, root: int) -> Known | None:
    """Key of calls with arrays of torch or CuPy, and their addresses; None for anything else."""
    if op is not None and type(op) is not Op:
        op = op_of(op)
        if op is None:
            return None
    outof = into = None
    if send is not None:
        outof = glance(send)
        if outof is None:
            return None
    if recv is not None:
        into = glance(recv)
        if into is None:
            return None
    if outof is None:
        if into is None:
            return None
        return (name, None, into[0], op, root), 0, into[1]
    if into is None:
        return (name, outof[0], None, op, root), outof[1], 0
    return (name, outof[0], into[0], op, root), outof[1], into[1]


class Launched(Request):
    """A call in a stream. It needs no ``Wait``: the stream does not pass it before its end, and the engine collects it.

    The arrays must stay allocated until the stream has passed the call, as for a kernel.
    """

    _call, _keep, _timeout = None, None, 0.0

    def __init__(self, op: Any, about: tuple[Launches, Program, str, float], owner: object) -> None:
        # Not the base class's: who makes many such calls waits for each of these lines.
        self._op, self._about, self._owner, self._done = op, about, owner, False

    def __del__(self, release: Any = _release) -> None:
        """The engine may forget it; what was launched goes on."""
        release(self._op)

    def _drop(self) -> None:
        """Nothing is left to do."""

    def _complete(self, state: int, status: Any) -> None:
        self._done = True
        if state != 1:
            launches, program, label, timeout = self._about
            launches.failed(self._op, program, label, timeout)


class Launches:
    """The launched calls of one communicator. ``fail`` is told of a call that failed."""

    def __init__(self, board: Board, rank: int, fail: Callable[[Exception, object], None]) -> None:
        self._board, self._rank, self._fail = board, rank, fail
        #: (program, label) of calls by what tells them apart; the programs are kept from any other use.
        self._known: dict[tuple[Any, ...], tuple[Program, str]] = {}

    def again(self, known: Known, timeout: float, stream: int, owner: object) -> Request | None:
        """Launch a call that looks like one that was launched before; None if there is none, or it must wait."""
        found = self._known.get(known[0])
        if found is None:
            return None
        program, label = found
        op = _launch(program.handle, known[1], known[2], timeout, stream)
        if op == _NULL:
            self._refuse(program, label, timeout)
            return None
        return Launched(op, (self, program, label, timeout), owner)

    def first(
        self, known: Known | None, prepared: Prepared, timeout: float, stream: int, owner: object
    ) -> Request | None:
        """Launch a prepared call; None if it must wait for calls before it, and be started like any other."""
        program, label = prepared.program, prepared.label
        send, recv = (int(_cast("uintptr_t", at)) for at in (prepared.send, prepared.recv))
        op = _launch(program.handle, send, recv, timeout, stream)
        if op == _NULL:
            self._refuse(program, label, timeout)
            return None
        if known is None or not prepared.repeatable:
            prepared.give_back()
        else:
            if len(self._known) >= KINDS:
                self._known.clear()
            self._known[known[0]] = program, label
        return Launched(op, (self, program, label, timeout), owner)

    def failed(self, op: Any, program: Program, label: str, timeout: float) -> None:
        """Raise why a call failed."""
        failure = failure_of(op, self._board, self._rank, label, timeout)
        self._fail(failure, program)
        raise failure

    def _refuse(self, program: Program, label: str, timeout: float) -> None:
        """Nothing was launched: None where the general way handles it, or refuses it."""
        op = lib.ucch_launch_failed()
        if op != _NULL:
            self.failed(op, program, label, timeout)
        if lib.ucch_launch_status() != lib.UCCH_FAIL_BROKEN:
            return
        culprit = lib.ucch_board_culprit(self._board.native)
        if culprit == _NULL:
            raise CollectiveError(f"rank {self._rank}: {label} could not be started: an earlier call failed")
        failure = failure_of(culprit, self._board, self._rank, "a call in a stream", 0.0)
        self._fail(failure, culprit)
        raise CollectiveError(
            f"rank {self._rank}: {label} could not be started, because an earlier call failed: {failure}"
        ) from failure

    def clear(self) -> None:
        """Forget what is known: other programs will be chosen."""
        self._known.clear()

    @property
    def active(self) -> int:
        """Launched calls that have not ended."""
        return int(lib.ucch_board_launches(self._board.native))
