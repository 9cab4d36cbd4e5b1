"""Calls in a stream that a vendor's library does alone: launched, and left to the stream (cffi_build/launch.c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .buffers.glance import glance
from .engine import Program
from .errors import CollectiveError
from .failure import failure_of
from .liveness import Board
from .native import ffi, lib
from .ops import op_of
from .prepare import KINDS, Prepared
from .request import Request
from .types import Op

__all__ = ["Launched", "Launches", "key_of"]

_NULL = ffi.NULL
_cast = ffi.cast
_launch = lib.ucch_program_launch
_release = lib.ucch_launch_release

#: What is known of a call by its arguments: (key, address of sendbuf or NULL, address of recvbuf or NULL).
Known = tuple[tuple[Any, ...], Any, Any]


def key_of(name: str, send: Any, recv: Any, op: Any, root: int) -> Known | None:
    """What tells calls with arrays of torch or CuPy apart, and their addresses; None for anything else."""
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
        return (name, None, into[0], op, root), _NULL, _cast("void *", into[1])
    if into is None:
        return (name, outof[0], None, op, root), _cast("void *", outof[1]), _NULL
    return (name, outof[0], into[0], op, root), _cast("void *", outof[1]), _cast("void *", into[1])


class Launched(Request):
    """A call in a stream. It needs no ``Wait``: the stream does not pass it before its end, and the engine collects it.

    The arrays must stay allocated until the stream has passed the call, as for a kernel.
    """

    def __init__(self, op: Any, finish: Callable[[int, Any], None], owner: object) -> None:
        super().__init__(ffi.gc(op, _release), None, finish, owner=owner)

    def __del__(self) -> None:
        """Nothing: what was launched goes on."""

    def _drop(self) -> None:
        """As ``__del__``."""


class Launches:
    """The launched calls of one communicator. ``fail`` is told of a call that failed."""

    def __init__(self, board: Board, rank: int, fail: Callable[[Exception, object], None]) -> None:
        self._board, self._rank, self._fail = board, rank, fail
        #: (program, label) of calls by what tells them apart; the programs are kept from any other use.
        self._known: dict[tuple[Any, ...], tuple[Program, str]] = {}

    def again(self, known: Known, timeout: float, stream: int, owner: object) -> Request | None:
        """Launch a call that looks like one that was launched before; None if there is none, or it must wait."""
        found = self._known.get(known[0])
        return None if found is None else self._launch(*found, known[1], known[2], timeout, stream, owner)

    def first(
        self, known: Known | None, prepared: Prepared, timeout: float, stream: int, owner: object
    ) -> Request | None:
        """Launch a prepared call; None if it must wait for calls before it, and be started like any other."""
        program, label = prepared.program, prepared.label
        request = self._launch(program, label, prepared.send, prepared.recv, timeout, stream, owner)
        if request is None:
            return None
        if known is None or not prepared.repeatable:
            prepared.give_back()
            return request
        if len(self._known) >= KINDS:
            self._known.clear()
        self._known[known[0]] = program, label
        return request

    def _launch(
        self, program: Program, label: str, send: Any, recv: Any, timeout: float, stream: int, owner: object
    ) -> Request | None:
        op = _launch(program.handle, send, recv, timeout, _cast("void *", stream))
        if op == _NULL:
            self._refuse(label, lib.ucch_launch_status())
            return None
        lib.ucch_progress_thread(1)

        def finish(state: int, status: Any) -> None:
            if state != 1:
                failure = failure_of(op, self._board, self._rank, label, timeout)
                self._fail(failure, program)
                raise failure

        request = Launched(op, finish, owner)
        if lib.ucch_launch_status() < 0:
            finish(2, None)
        return request

    def _refuse(self, label: str, status: int) -> None:
        if status != lib.UCCH_FAIL_BROKEN:
            return  # such as one buffer for both sides: the general way handles or refuses it
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
        return int(lib.ucch_launches_of(self._board.native))
