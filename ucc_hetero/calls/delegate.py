"""Calls that the MPI library runs: reductions by the user's own operations, MINLOC and MAXLOC.

A kept library beats code of our own where nothing is gained by islands: these work on host memory, through callbacks
into Python. They enter the arrival board like every other call and have the same deadline, so a rank that calls
something else, is missing or dies ends in an error here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..bindings import quarantine
from ..buffers import is_in_place
from ..buffers.exporters import memory_of
from ..errors import CollectiveError, NotSupported
from ..native.libraries import lib
from ..types import op_of
from .arguments import CallSpec, root_of
from .persistent import PersistentRequest, idle
from .request import fill_empty
from .state import State, Watch

#: The numbers that a signature may be.
_ALL = (1 << 64) - 1


class _Compared:
    """A call that MPI runs between hosts, whose ranks do not see each other's boards: it has ended when MPI's request
    has, and all ranks made the same call. Where they did not, it never ends, and the board says who called what."""

    def __init__(self, mpi: Any, request: Any, label: str) -> None:
        from mpi4py import MPI

        mine = int(lib.ucch_board_signature(label.encode()))
        self._request = request
        self._mine = np.array([mine, ~mine & _ALL], np.uint64)
        self._most = self._mine.copy()
        self._told = mpi.Iallreduce(MPI.IN_PLACE, self._most, MPI.MAX)

    def Test(self) -> bool:
        """True if the call has ended, and was the same on all ranks."""
        return bool(self._told.Test() and (self._most == self._mine).all() and self._request.Test())


class _Run(NamedTuple):
    """A call that MPI runs: its request and buffers, and what counts the requests in flight."""

    watch: Watch
    request: Any
    buffers: object
    counted: Callable[[int], None]

    def ended(self, *, wait: bool = False) -> bool:
        """True if it has ended, which it has also where this raises why it failed."""
        try:
            if wait:
                self.watch.wait(self.request)
            elif not self.watch.poll(self.request):
                self.watch.look()
                return False
            self.watch.finish(0)
        except CollectiveError as error:
            self.watch.give_up()
            self.watch.state.broke(error, self)
            self.counted(-1)
            raise
        self.counted(-1)
        return True

    def dropped(self) -> bool:
        """As :meth:`ended`, of a call whose request was dropped: a failure is the communicator's."""
        try:
            return self.ended()
        except CollectiveError:
            return True


class _Delegated(PersistentRequest):
    """A call that MPI runs: non-blocking, or to be started anew with the same arguments."""

    def __init__(self, begin: Callable[[], _Run], refuse: Callable[[Exception], None] | None) -> None:
        super().__init__(*idle(), self._launch, refuse=refuse)
        self._make = begin

    def _launch(self) -> int:
        self._run = self._make()
        return 0

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished, then return True."""
        if not self._done:
            self._take(wait=True)
        fill_empty(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return True if the call has finished."""
        fill_empty(status)
        return self._done or self._take()

    def _take(self, *, wait: bool = False) -> bool:
        try:
            self._done = self._run.ended(wait=wait)
        except CollectiveError:
            self._done = True
            raise
        return self._done

    def _ended(self) -> int:
        # MPI's request is null once it was seen to have finished, and testing it again says the same.
        return int(self._run.watch.poll(self._run.request))

    def _drop(self) -> None:
        """MPI goes on with the call, and :meth:`Delegate.settle` sees to its end."""
        quarantine.keep(self._run, self._run.dropped, self._run.watch.board)


class Delegate:
    """The delegated calls of one communicator."""

    def __init__(self, state: State) -> None:
        self._state = state
        #: Requests in flight.
        self.active = 0

    def settle(self) -> int:
        """See to dropped calls of this communicator; how many are under way."""
        return quarantine.release(self._state.board)

    def start(self, call: CallSpec) -> PersistentRequest:
        """Begin a reduction."""
        request = self.request(call)
        request.Start()
        return request

    def request(self, call: CallSpec, refuse: Callable[[Exception], None] | None = None) -> PersistentRequest:
        """A reduction as a request that is not started yet; ``refuse`` is told of a start that cannot be made."""
        name, send, recv, op, _, counts = call
        state = self._state
        root = root_of(call, state.size, state.rank)
        for argument, spec in (("sendbuf", send), ("recvbuf", recv)):
            self._host_memory(name, argument, spec)
        self.settle()
        from mpi4py import MPI

        found = op_of(op)
        shown = found.name if found else "an operation of the user's"
        label = f"{name} {shown}" + (f" root={root}" if root >= 0 else "")
        theirs = getattr(MPI, found.name) if found else op
        method = getattr(state.mpi, f"I{name}")
        args = [MPI.IN_PLACE if send is None else send, recv]
        args += [counts, theirs] if name == "reduce_scatter" else [theirs]
        args += [root] if root >= 0 else []

        def begin() -> _Run:
            try:
                request = method(*args)
            except MPI.Exception as error:  # an argument that MPI refuses: nothing was sent, nothing is published
                raise NotSupported(f"{label} on rank {state.rank}: {error}") from error
            self._count(1)
            if max(state.board.hosts):
                request = _Compared(state.mpi, request, label)
            return _Run(Watch(state, label), request, args, self._count)

        return _Delegated(begin, refuse)

    def _count(self, change: int) -> None:
        lib.ucch_lock()
        lib.ucch_board_open(self._state.board.native, change)
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
                f"{name} on rank {self._state.rank}: {argument} is in {memory.vendor} memory; the user's own "
                "operations, MINLOC and MAXLOC work on host memory only: copy it to the host first"
            )
