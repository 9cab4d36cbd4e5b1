"""Calls that the MPI library runs: reductions by the user's own operations, MINLOC and MAXLOC.

A kept library beats code of our own where nothing is gained by islands: these work on host memory, through callbacks
into Python. They enter the arrival board like every other call and have the same deadline, so a rank that calls
something else, is missing or dies ends in an error here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..bindings import quarantine
from ..bootstrap.liveness import Board
from ..buffers import is_in_place
from ..buffers.exporters import memory_of
from ..errors import CollectiveError, NotSupported
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..types import Op, op_of
from .arguments import CallSpec, root_of
from .failure import explain
from .persistent import PersistentRequest
from .request import look_around
from .status import fill_empty

#: Seconds of polling before a waiter looks at its peers and begins to sleep, and the longest nap.
_PATIENCE = 0.002
_NAP = 0.0005


def is_delegated(op: Any) -> bool:
    """True if MPI computes ``op``: it is the user's own, or works on pairs. Errors are those of ``op_of``."""
    if op is None:
        return False
    ours = op_of(op)
    return ours is None or ours.name in ("MAXLOC", "MINLOC")


class Watch:
    """A call while MPI runs it, or while it is prepared: shown to the peers, timed, compared.

    ``show`` does the first, and returns the call's number and that of its record.
    """

    def __init__(
        self, board: Board, rank: int, label: str, timeout: float, show: Callable[[str], tuple[int, int]] | None = None
    ) -> None:
        self.board, self.rank, self.label, self.timeout = board, rank, label, timeout
        self.began = time.monotonic()
        self.seq, self.record = (show or board.publish)(label)

    def look(self) -> None:
        """Raise what makes the call hopeless: a peer that refused it, called another or is gone; the deadline."""
        look_around()
        elapsed = time.monotonic() - self.began
        status, peer = self.board.verdict(self.seq)
        if not status:
            peer = lib.ucch_board_gone(self.board.native, self.seq)
            status = lib.UCCH_FAIL_PEER if peer != -1 else lib.UCCH_FAIL_TIMEOUT
        if status == lib.UCCH_FAIL_TIMEOUT and not 0 < self.timeout < elapsed:
            return
        lib.ucch_record_end(self.record, status)
        error = ffi.new("ucch_error *", {"status": status, "seq": self.seq, "peer": peer, "elapsed": elapsed})
        raise explain(error, self.board, self.rank, self.label, self.timeout)

    def poll(self, request: Any) -> bool:
        """True if an MPI request has finished; its errors come out as ``CollectiveError``."""
        try:
            return bool(request.Test())
        except RuntimeError as error:  # MPI.Exception
            raise CollectiveError(f"rank {self.rank}: {self.label}: {error}") from error

    def wait(self, request: Any) -> None:
        """Wait for an MPI request."""
        done = partial(self.poll, request)
        progress_until(done, hopeless=self.look, spin=_PATIENCE, step=_NAP, longest=_NAP)

    def give_up(self) -> None:
        """Tell the other ranks that the call has failed here, which breaks the communicator: it may go on there."""
        lib.ucch_board_failed(self.board.native, self.seq)

    def finish(self, nbytes: int) -> None:
        """Count the call, unless a rank has called something else."""
        if self.board.verdict(self.seq)[0]:
            self.look()
        lib.ucch_record_end(self.record, 0)
        lib.ucch_board_add(self.board.native, time.monotonic() - self.began, nbytes)


class _Delegated(PersistentRequest):
    """A call that MPI runs: non-blocking, or to be started anew with the same arguments."""

    def __init__(
        self,
        begin: Callable[[], tuple[Watch, Any]],
        count: Callable[[int], None],
        fail: Callable[[Exception, object], None],
        refuse: Callable[[Exception], None] | None,
    ) -> None:
        # The native engine takes an idle message for an operation that has finished: waiting for many passes it by.
        idle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
        super().__init__(lib.ucch_message_op(idle), idle, self._launch, None, lambda: None, refuse=refuse)
        self._parts = begin, count, fail
        self._watch: Watch | None = None
        self._request: Any = None

    def _launch(self) -> int:
        self._watch, self._request = self._parts[0]()
        return 0

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished, then return True."""
        if not self._done:
            self._settle(Watch.wait)
        fill_empty(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return whether the call has finished."""
        fill_empty(status)
        return self._done or self._settle(Watch.poll)

    def _ended(self) -> int:
        assert self._watch is not None
        # MPI's request is null once it was seen to have finished, and testing it again says the same.
        return int(self._watch.poll(self._request))

    def _settle(self, how: Callable[[Watch, Any], Any]) -> bool:
        watch = self._watch
        assert watch is not None
        try:
            if how(watch, self._request) is False:
                watch.look()
                return False
            watch.finish(0)
        except CollectiveError as error:
            self._close()
            watch.give_up()
            self._parts[2](error, self._request)
            raise
        self._close()
        return True

    def _close(self) -> None:
        self._done = True
        self._parts[1](-1)

    def _drop(self) -> None:
        """MPI goes on with the call, and :meth:`Delegate.settle` sees to its end."""
        assert self._watch is not None
        forsaken = _Forsaken(self._watch, self._request, self._parts)
        quarantine.keep(forsaken, forsaken.ended, self._watch.board)


class _Forsaken(NamedTuple):
    """A call whose request was dropped before its end: MPI still uses its buffers."""

    watch: Watch
    request: Any
    parts: tuple[Any, ...]

    def ended(self) -> bool:
        """True if it has ended or never will. A failure is the communicator's, as the request was dropped."""
        _, count, fail = self.parts
        try:
            if not self.watch.poll(self.request):
                self.watch.look()
                return False
            self.watch.finish(0)
        except CollectiveError as error:
            self.watch.give_up()
            fail(error, self.request)
        count(-1)
        return True


class Delegate:
    """The delegated calls of one communicator. ``failed`` is told of one that failed, and its memory."""

    def __init__(
        self,
        mpi: Any,
        board: Board,
        timeout: float,
        failed: Callable[[Exception, object], None],
    ) -> None:
        self.mpi, self.board, self.timeout = mpi, board, timeout
        self.rank: int = mpi.Get_rank()
        self.size: int = mpi.Get_size()
        self.failed = failed
        #: Requests in flight.
        self.active = 0

    def settle(self) -> int:
        """See to dropped calls of this communicator; how many are under way."""
        return quarantine.release(self.board)

    def start(self, call: CallSpec) -> PersistentRequest:
        """Begin a reduction."""
        request = self.request(call)
        request.Start()
        return request

    def request(self, call: CallSpec, refuse: Callable[[Exception], None] | None = None) -> PersistentRequest:
        """A reduction as a request that is not started yet; ``refuse`` is told of a start that cannot be made."""
        name, send, recv, op, _, counts = call
        root = root_of(call, self.size, self.rank)
        for argument, spec in (("sendbuf", send), ("recvbuf", recv)):
            self._host_memory(name, argument, spec)
        self.settle()
        from mpi4py import MPI

        found = op_of(op)
        shown = found.name if found else "an operation of the user's"
        label = f"{name} {shown}" + (f" root={root}" if root >= 0 else "")
        theirs = getattr(MPI, op.name) if isinstance(op, Op) else op
        method = getattr(self.mpi, f"I{name}")
        args = [MPI.IN_PLACE if send is None else send, recv]
        args += [counts, theirs] if name == "reduce_scatter" else [theirs]
        args += [root] if root >= 0 else []

        def begin() -> tuple[Watch, Any]:
            try:
                request = method(*args)
            except MPI.Exception as error:  # an argument that MPI refuses: nothing was sent, nothing is published
                raise NotSupported(f"{label} on rank {self.rank}: {error}") from error
            self._count(1)
            return Watch(self.board, self.rank, label, self.timeout), request

        return _Delegated(begin, self._count, self.failed, refuse)

    def _count(self, change: int) -> None:
        lib.ucch_lock()
        lib.ucch_board_open(self.board.native, change)
        self.active += change
        lib.ucch_unlock()

    def _host_memory(self, name: str, argument: str, spec: Any) -> None:
        """MPI may know nothing of GPUs: a device pointer would end the job."""
        buffer = spec[0] if isinstance(spec, (list, tuple)) and spec else spec
        if is_in_place(buffer):
            return
        memory = memory_of(buffer, None)
        if memory.vendor != "host":
            raise TypeError(
                f"{name} on rank {self.rank}: {argument} is in {memory.vendor} memory; the user's own operations, "
                "MINLOC and MAXLOC work on host memory only: copy it to the host first"
            )
