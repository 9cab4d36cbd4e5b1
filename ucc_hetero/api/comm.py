"""The communicator: mpi4py's buffer collectives over UCC and UCX, on GPUs of one or several vendors and on CPUs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from operator import attrgetter, methodcaller
from threading import RLock
from types import TracebackType
from typing import Any, cast

from ..bootstrap import creations, exit, process, settings
from ..bootstrap.meeting import Seat
from ..bootstrap.timely import MAKING, Timely
from ..calls.arguments import CallSpec
from ..calls.persistent import PersistentRequest
from ..calls.request import Request, poll_hooks
from ..calls.runner import Runner
from ..calls.state import ANEW
from ..calls.verification import sampled
from ..docstrings import described, forms
from ..engine.lowering import Execution
from ..errors import AgreementError, CollectiveError, LibraryNotFound, NotSupported
from ..native.libraries import FORKED, load
from ..p2p.messages import Messages
from ..planner.topology import Topology
from .comm_faults import FaultMethods, FaultWatch
from .comm_groups import GroupMethods
from .comm_objects import RAISES, SUM, ObjectMethods

#: Methods of mpi4py without buffers that are forwarded to MPI's communicator: by prefix, and by name.
_PASSED_ON_PREFIXES = ("Get_", "Is_", "Set_")
_PASSED_ON = (
    "Abort", "Call_errhandler", "Cart_map", "Create_keyval", "Delete_attr", "Free_keyval", "Graph_map", "Shift",
)  # fmt: skip


_FREED = "this communicator has been freed: make a new one"


#: Replaces the runner after ``Free``.
_freed = process.Unusable(ValueError, _FREED)
#: Replaces the runner at process exit, and at ``MPI.Finalize``.
_ended = process.Ended(SystemExit, "the program has come to its end")
#: Held while a communicator gets its runner in its first call, or is freed without one or late.
_first_call = RLock()
#: Seconds that ``Free`` waits for ranks that have not come and may need this one.
_LATE_S = 1.0
#: Runners and MPI communicators of communicators that this rank has freed and other ranks have not, in that order.
_late: dict[Communicator, tuple[Runner, Any]] = {}


def _attend_late() -> None:
    """Discard messages that ranks still send in communicators that this one has freed."""
    for runner, _ in list(_late.values()):
        runner.attend()


@forms
@described(
    raises=RAISES,
    op="``SUM``, ``PROD``, ``MAX``, ``MIN``, ``AVG``, ``LAND``, ``BAND`` and the like; its name in any case "
    "(``'sum'``); or ``MPI.SUM`` and the like.",
    stream="GPU stream that the call becomes part of: torch's, CuPy's, a handle. None: the data is ready now.",
)
class Communicator(ObjectMethods, GroupMethods, FaultMethods):
    """A communicator over an mpi4py communicator. Construction is collective.

    Methods, defaults and buffer forms are mpi4py's. Methods with a capital letter take buffers: arrays of numpy, torch,
    CuPy, JAX (to send) and others with the buffer protocol, DLPack or ``__cuda_array_interface__``, in host memory or
    on this rank's GPU, or lists as in mpi4py, such as ``[array, count, MPI.FLOAT]``. Methods in lower case take Python
    objects. Other methods of mpi4py (``Get_group``, say) are forwarded to MPI's communicator.

    With ``stream`` (a stream of torch, CuPy or numba, or an integer handle) a collective becomes part of that stream:
    it starts when the stream gets to it, and later work in the stream sees the result. Methods with ``I`` do not block
    the host meanwhile.

    ``with Communicator() as comm:`` frees the communicator at the end; otherwise it is freed before MPI is finalized.

    Args:
        comm: Intracommunicator of mpi4py, or a ``Communicator``; ``MPI.COMM_WORLD`` if None.

    Raises:
        TypeError, ValueError, BufferError: An argument is wrong, and nothing was sent. The communicator stays usable if
            all ranks make the mistake, or if the call was a message.
        NotSupported: The combination of call, type, operation and memory is not available. Otherwise as above.
        RefusedError: Another rank found its arguments wrong, in this call or an earlier one; the message names the
        rank. CollectiveTimeout: A rank did not make the call within ``UCCH_TIMEOUT`` seconds; the message names the
        rank. MismatchError: Ranks made different calls.
        PeerError: A rank died or cannot be reached.
        RevokedError: A rank revoked the communicator.
        CollectiveError: Base class of the last five, and any other failure. Make a new communicator.
        AgreementError, LibraryNotFound: At construction: installations differ, or UCC or UCX is missing.
    """

    def __init__(self, comm: Any = None) -> None:
        # Load libucp before MPI, which brings its own: a process uses the first one. If that fails, the exchange below
        # raises on all ranks: raising here would leave the other ranks waiting.
        with suppress(LibraryNotFound):
            load()
        from mpi4py import MPI

        parent = MPI.COMM_WORLD if comm is None else getattr(comm, "mpi", comm)
        if not isinstance(parent, MPI.Comm):
            raise TypeError(f"comm must be an mpi4py communicator or a Communicator, not {type(comm).__name__}")
        if parent == MPI.COMM_NULL:
            raise ValueError("comm is MPI.COMM_NULL: this rank is not in the communicator")
        process.refuse_without_mpi()
        if parent.Is_inter():
            raise TypeError("comm is an intercommunicator; merge it first: Communicator(comm.Merge())")
        if parent == MPI.COMM_WORLD:
            process.refuse_foreign_launcher()
        with creations.creation(creations.places_of(parent)):
            mistake = self._create(Timely(parent, settings.timeout(), MAKING, caller=True))
        if mistake is not None:
            raise mistake.with_traceback(None) from None  # without twenty internal frames

    def _create(self, exchange: Timely) -> Exception | None:
        """Make the communicator, or return the mistake that all ranks found."""
        mpi = exchange.Dup()
        try:
            self._join(mpi)
        except CollectiveError:
            raise
        except (AgreementError, LibraryNotFound, ValueError) as mistake:
            mpi.Free()
            exchange.forget_roll_call()
            return mistake
        return None

    @classmethod
    def _adopt(cls, mpi: Any, seat: Seat | None = None, *, queues: bool = True) -> Communicator:
        """Make a communicator that owns ``mpi``, without a duplicate."""
        comm = cls.__new__(cls)
        comm._join(mpi, seat, queues)
        return comm

    def _join(self, mpi: Any, seat: Seat | None = None, queues: bool = True) -> None:
        for comm in list(_late):
            comm._free_late()
        self._mpi = mpi
        if seat is not None and seat.ready and not sampled():  # sampled calls need an exchange of all ranks first
            self._seat = seat
            self.rank: int = seat.known.rank
            self.size: int = seat.known.size
        else:
            self._begin(seat, queues)
            self.rank, self.size = self._runner.rank, self._runner.size
        exit.enlist(self, _ways)

    def _begin(self, seat: Seat | None, queues: bool = True) -> None:
        """Make the runner. Collective, unless the seat is ready."""
        self._runner = Runner(self._mpi, seat, queues)
        self._fault_watch = FaultWatch(self._runner)

    def _begin_late(self) -> None:
        """Make the runner, in the first call."""
        with _first_call:
            if "_runner" in vars(self):  # another thread has made it, or has freed the communicator
                return
            try:
                self._begin(self._seat)
            except BaseException as error:
                why = str(error) or f"{type(error).__name__} has ended its first call; {ANEW}"
                self._runner = cast(Runner, process.Unusable(CollectiveError, f"rank {self.rank}: {why}"))
                exit.leak(self)
                raise

    def _orphan(self) -> None:
        """Make the communicator unusable in a forked child: it belongs to the parent."""
        if self in _late:
            _late[self][0].orphan()
            self._is_over()
        elif "_runner" in vars(self):
            self._runner.orphan()
        else:
            self._runner = cast(Runner, process.Unusable(CollectiveError, f"rank {self.rank}: {FORKED}"))
        self._mpi = process.Unusable(NotSupported, FORKED)

    def Free(self) -> None:
        """Free the communicator. Collective.

        Ranks without GPUs may free communicators in different orders, as with MPI: this waits at most a second, and
        what other ranks still need is freed later.

        Raises:
            ValueError: Requests of the communicator are active.
            CollectiveTimeout: A call whose request was dropped does not end, such as a send that no rank receives.
            DataError: UCCH_CHECK=data found wrong data, which no call could report before.
        """
        self._free(_LATE_S)

    def Disconnect(self) -> None:
        """Free the communicator, and wait until all ranks have called this, for at most ``UCCH_TIMEOUT``. Collective.

        Raises:
            ValueError, CollectiveTimeout, DataError: As :meth:`Free`.
        """
        self._free(None)

    def _free(self, seconds: float | None) -> None:
        if "_runner" not in vars(self) and self._free_unused():
            return
        runner = self._runner
        if isinstance(runner, process.Unusable):
            return
        try:
            together, mpi = not runner.orphaned and runner.close(seconds), self._mpi
            if together is None:
                self._end_late(runner, mpi)
            self._forget()
        except BaseException:
            if runner.closes:  # Ctrl-C has come when parts were freed
                self._forget()
                exit.leak(self)
            raise
        if together is not None:
            self._release(runner, mpi, together)

    def _end_late(self, runner: Runner, mpi: Any) -> None:
        """Leave it to later communicators and to the exit to free what other ranks still need."""
        with _first_call:
            if not _late:
                poll_hooks.append(_attend_late)
            _late[self] = runner, mpi
            exit.living[self] = _late_ways  # in its place in the order

    def _is_over(self) -> None:
        """Nothing is left to be freed late."""
        if _late.pop(self, None) and not _late:
            poll_hooks.remove(_attend_late)

    def _free_late(self) -> None:
        """Free what `Free` has left if all other ranks have come meanwhile, or will never come."""
        with _first_call:
            runner, mpi = _late.get(self, (None, None))
            together = None if runner is None else runner.met_late()
            if together is not None:
                self._is_over()
                exit.living.pop(self, None)
        if runner is not None and together is not None:  # without the lock: threads that have their turn come here, too
            self._release(runner, mpi, runner.end(together))

    def _release(self, runner: Runner, mpi: Any, together: bool) -> None:
        """Free what remains after the runner was closed. ``together``: all ranks do so."""
        self._fault_watch.close()
        exit.forget(runner)
        if together:  # otherwise late ranks still need it (calls/runner.py)
            mpi.Free()
        if runner.unfit is not None:
            raise runner.unfit

    def _retire(self) -> Callable[[], None]:
        """At process exit: make calls of daemon threads end the thread, and return a function that frees the
        communicator."""
        runner, mpi = _late.get(self) or (self._runner, self._mpi)
        if isinstance(runner, process.Unusable):  # a daemon thread has freed it
            return lambda: None
        self._is_over()
        self._forget(_ended)
        return lambda: self._release(runner, mpi, bool(runner.close()))

    def _free_unused(self) -> bool:
        """Free a communicator in which this rank has made no call. False if another thread has just made one."""
        with _first_call:
            if "_runner" in vars(self):
                return False
            self._seat.give_back()
            self._mpi.Free()
            self._forget()
            return True

    def _forget(self, instead: process.Unusable = _freed) -> None:
        """Make every later use raise."""
        if self not in _late:
            exit.living.pop(self, None)
        self._runner, self._messages, self._mpi = cast(Runner, instead), cast(Messages, instead), instead
        for name in ("_own_messages", "_quick", "_neighbourhood", "_partitions", "_objects"):
            vars(self).pop(name, None)

    def __bool__(self) -> bool:
        return vars(self).get("_runner") not in (_freed, _ended)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        # After an exception the other ranks may not come: a collective free could wait for ever.
        if kind is None:
            self.Free()

    # --- what it is ---------------------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """Return this process's rank.

        Returns:
            A number from 0 to ``Get_size() - 1``.
        """
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks.

        Returns:
            1 or more.
        """
        return self.size

    @property
    def mpi(self) -> Any:
        """The private MPI communicator of the same ranks. ``ValueError`` after ``Free``."""
        if isinstance(self._mpi, process.Unusable):
            self._mpi.raise_error()
        return self._mpi

    @property
    def name(self) -> str:
        """The communicator's name in MPI; may be set."""
        return str(self._mpi.Get_name())

    @name.setter
    def name(self, name: str) -> None:
        self._mpi.Set_name(name)

    @property
    def topology(self) -> Topology:
        """The communicator's islands."""
        return self._runner.topology

    def plan_summary(self) -> str:
        """Describe the islands, and the plans of the calls so far.

        After each plan stands its source: ``user`` (UCCH_TUNE), ``measured`` (UCCH_TUNE_FILE) or ``default``; then
        ``queued`` if devices execute such calls without the host, or ``by way of the host`` if the data is copied to
        host memory (docs/gpu.md). Further lines tell, where ranks of a vendor are on several hosts, which fabric joins
        them or why none does; and between devices of several islands, which rings this rank has or why it has none.

        Returns:
            One line per island and kind of call.
        """
        ways = {Execution.QUEUED: ", queued", Execution.STAGED: ", by way of the host"}
        members = self._runner.members
        lines = [self._runner.topology.describe(), *(f"fabric: {text}" for text in members.fabric())]
        lines += [f"rings: {text}" for text in members.rings()]
        used = [each.copy().items() for each in (self._runner.used, *self._runner.beside)]  # other threads add to them
        for label, (choice, why, execution) in chain(*used):
            pieces = f", {choice.fragments} fragments" if choice.fragments > 1 else ""
            lines.append(f"{label}: {choice.algorithm}{pieces} ({why}{ways.get(execution, '')})")
        return "\n".join(lines)

    def stats(self) -> dict[str, float]:
        """Return statistics of this rank's collectives.

        Returns:
            ``calls``, ``seconds`` (from start to completion) and ``bytes`` (of the callers' buffers).
        """
        return self._runner.stats()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a communicator can be neither pickled nor copied: its processes make another one together, by Dup() or "
            "Communicator(comm)"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("_runner", "_fault_watch") and "_seat" in vars(self):
            self._begin_late()
            return vars(self).get(name, self._runner)  # of a freed communicator nothing else is left
        # Forward methods for pickled objects and queries. MPI's other buffer methods are not forwarded: they know
        # neither devices nor islands.
        passed_on = not name[:1].isupper() or name.startswith(_PASSED_ON_PREFIXES) or name in _PASSED_ON
        if name.startswith("_") or not passed_on:
            raise AttributeError(self._missing(name))
        try:
            return getattr(self._mpi, name)
        except AttributeError:
            raise AttributeError(self._missing(name)) from None

    def _missing(self, name: str) -> str:
        if not name.startswith("_") and hasattr(self._mpi, name):
            return f"Communicator has no {name}; comm.mpi.{name} is MPI's own, for host memory"
        known = {each.lower(): each for each in dir(type(self)) if each[0].isupper()}
        near = difflib.get_close_matches(name.replace("_", "").lower(), known, 1, 0.85)
        return f"Communicator has no {name}{f'; did you mean {known[near[0]]}?' if near else ''}"

    # --- blocking collectives ----------------------------------------------------------------------------------------

    def Barrier(self, *, stream: Any = None) -> None:
        """Wait until all ranks have called it."""
        self._runner.blocking("barrier", None, None, None, -1, None, stream)

    barrier = Barrier

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Send the root's buffer to all ranks.

        Args:
            buf: n elements on every rank: the data on the root, overwritten on the other ranks.
            root: Rank of the data.
        """
        self._runner.blocking("bcast", None, buf, None, root, None, stream)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0, *, stream: Any = None) -> None:
        """Reduce the ranks' vectors element by element; the root gets the result.

        Args:
            sendbuf: This rank's n elements; ``IN_PLACE`` on the root if they are in ``recvbuf``.
            recvbuf: Room for n elements of the same type on the root; None on other ranks.
            root: Rank that gets the result.
        """
        self._runner.blocking("reduce", sendbuf, recvbuf, op, root, None, stream)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> None:
        """Reduce the ranks' vectors element by element; every rank gets the result.

        Args:
            sendbuf: This rank's n elements, equal n on all ranks; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for n elements of the same type.
        """
        self._runner.blocking("allreduce", sendbuf, recvbuf, op, -1, None, stream)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> None:
        """Reduce the ranks' vectors of ``size`` equal blocks; rank r gets block r of the result.

        Args:
            sendbuf: ``size`` blocks of n elements; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for n elements. With ``IN_PLACE`` it has all blocks, and the result is put into the first.
        """
        self._runner.blocking("reduce_scatter_block", sendbuf, recvbuf, op, -1, None, stream)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM, *, stream: Any = None
    ) -> None:
        """Reduce the ranks' vectors; rank r gets block r of the result, with ``recvcounts[r]`` elements.

        Args:
            sendbuf: ``sum(recvcounts)`` elements; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for this rank's ``recvcounts[rank]`` elements.
            recvcounts: Elements of each rank's block; equal blocks if None.
        """
        self._runner.blocking("reduce_scatter", sendbuf, recvbuf, op, -1, recvcounts, stream)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Collect a block of each rank on the root.

        Args:
            sendbuf: This rank's n elements; ``IN_PLACE`` on the root if its block is in place in ``recvbuf``.
            recvbuf: Room for ``size`` blocks of n elements on the root, in rank order; None on other ranks.
            root: Rank that gets the blocks.
        """
        self._runner.blocking("gather", sendbuf, recvbuf, None, root, None, stream)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Collect a block of any length of each rank on the root.

        Args:
            sendbuf: This rank's block; ``IN_PLACE`` on the root if its block is in place in ``recvbuf``.
            recvbuf: ``[array, counts]`` or ``[array, (counts, displacements)]`` on the root, in elements; None
            elsewhere. root: Rank that gets the blocks.
        """
        self._runner.blocking("gatherv", sendbuf, recvbuf, None, root, None, stream)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Send each rank one of the root's equal blocks.

        Args:
            sendbuf: ``size`` blocks of n elements on the root, in rank order; None on other ranks.
            recvbuf: Room for n elements; ``IN_PLACE`` on the root leaves its block where it is.
            root: Rank of the blocks.
        """
        self._runner.blocking("scatter", sendbuf, recvbuf, None, root, None, stream)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Send each rank one of the root's blocks, of any length.

        Args:
            sendbuf: ``[array, counts]`` or ``[array, (counts, displacements)]`` on the root, in elements; None
            elsewhere. recvbuf: Room for this rank's block; ``IN_PLACE`` on the root leaves its block where it is.
            root: Rank of the blocks.
        """
        self._runner.blocking("scatterv", sendbuf, recvbuf, None, root, None, stream)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Collect a block of each rank on every rank.

        Args:
            sendbuf: This rank's n elements; ``IN_PLACE`` if its block is in place in ``recvbuf``.
            recvbuf: Room for ``size`` blocks of n elements, in rank order.
        """
        self._runner.blocking("allgather", sendbuf, recvbuf, None, -1, None, stream)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Collect a block of any length of each rank on every rank.

        Args:
            sendbuf: This rank's block; ``IN_PLACE`` if its block is in place in ``recvbuf``.
            recvbuf: ``[array, counts]`` or ``[array, (counts, displacements)]``, in elements.
        """
        self._runner.blocking("allgatherv", sendbuf, recvbuf, None, -1, None, stream)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Send a block of every rank to every rank.

        Args:
            sendbuf: ``size`` blocks of n elements, block r for rank r; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for ``size`` blocks of n elements, block r from rank r.
        """
        self._runner.blocking("alltoall", sendbuf, recvbuf, None, -1, None, stream)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Send a block of any length of every rank to every rank.

        Args:
            sendbuf: ``[array, counts]`` or ``[array, (counts, displacements)]`` by receiver, in elements; or
            ``IN_PLACE``. recvbuf: The same by sender.
        """
        self._runner.blocking("alltoallv", sendbuf, recvbuf, None, -1, None, stream)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of any length and datatype of every rank to every rank. Host memory only.

        Args:
            sendbuf: ``[array, (counts, displacements in bytes), datatypes]`` by receiver; or ``IN_PLACE``.
            recvbuf: The same by sender.
        """
        self._runner.blocking("alltoallw", sendbuf, recvbuf, None, -1, None)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> None:
        """Reduce the vectors of ranks 0 to this one, element by element.

        Args:
            sendbuf: This rank's n elements; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for n elements of the same type.
        """
        self._runner.blocking("scan", sendbuf, recvbuf, op, -1, None, stream)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> None:
        """Reduce the vectors of the ranks before this one. Rank 0's ``recvbuf`` stays unchanged.

        Args:
            sendbuf: This rank's n elements; ``IN_PLACE`` if they are in ``recvbuf``.
            recvbuf: Room for n elements of the same type.
        """
        self._runner.blocking("exscan", sendbuf, recvbuf, op, -1, None, stream)

    # --- non-blocking collectives ------------------------------------------------------------------------------------

    def Ibarrier(self, *, stream: Any = None) -> Request:
        return self._runner.posted("barrier", None, None, None, -1, None, stream)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("bcast", None, buf, None, root, None, stream)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("reduce", sendbuf, recvbuf, op, root, None, stream)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> Request:
        return self._runner.posted("allreduce", sendbuf, recvbuf, op, -1, None, stream)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> Request:
        return self._runner.posted("reduce_scatter_block", sendbuf, recvbuf, op, -1, None, stream)

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM, *, stream: Any = None
    ) -> Request:
        return self._runner.posted("reduce_scatter", sendbuf, recvbuf, op, -1, recvcounts, stream)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("gather", sendbuf, recvbuf, None, root, None, stream)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("gatherv", sendbuf, recvbuf, None, root, None, stream)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("scatter", sendbuf, recvbuf, None, root, None, stream)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> Request:
        return self._runner.posted("scatterv", sendbuf, recvbuf, None, root, None, stream)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> Request:
        return self._runner.posted("allgather", sendbuf, recvbuf, None, -1, None, stream)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> Request:
        return self._runner.posted("allgatherv", sendbuf, recvbuf, None, -1, None, stream)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> Request:
        return self._runner.posted("alltoall", sendbuf, recvbuf, None, -1, None, stream)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> Request:
        return self._runner.posted("alltoallv", sendbuf, recvbuf, None, -1, None, stream)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._runner.posted("alltoallw", sendbuf, recvbuf, None, -1, None)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> Request:
        return self._runner.posted("scan", sendbuf, recvbuf, op, -1, None, stream)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, stream: Any = None) -> Request:
        return self._runner.posted("exscan", sendbuf, recvbuf, op, -1, None, stream)

    # --- persistent collectives --------------------------------------------------------------------------------------

    def Barrier_init(self, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("barrier", None, None))

    def Bcast_init(self, buf: Any, root: int = 0, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("bcast", None, buf, None, root))

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0, info: Any = None
    ) -> PersistentRequest:
        return self._runner.persistent(CallSpec("reduce", sendbuf, recvbuf, op, root))

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("allreduce", sendbuf, recvbuf, op))

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None
    ) -> PersistentRequest:
        return self._runner.persistent(CallSpec("reduce_scatter_block", sendbuf, recvbuf, op))

    def Reduce_scatter_init(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM, info: Any = None
    ) -> PersistentRequest:
        return self._runner.persistent(CallSpec("reduce_scatter", sendbuf, recvbuf, op, -1, recvcounts))

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("gather", sendbuf, recvbuf, None, root))

    def Gatherv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("gatherv", sendbuf, recvbuf, None, root))

    def Scatter_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("scatter", sendbuf, recvbuf, None, root))

    def Scatterv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("scatterv", sendbuf, recvbuf, None, root))

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("allgather", sendbuf, recvbuf))

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("allgatherv", sendbuf, recvbuf))

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("alltoall", sendbuf, recvbuf))

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("alltoallv", sendbuf, recvbuf))

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("alltoallw", sendbuf, recvbuf))

    def Scan_init(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("scan", sendbuf, recvbuf, op))

    def Exscan_init(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None) -> PersistentRequest:
        return self._runner.persistent(CallSpec("exscan", sendbuf, recvbuf, op))


#: What process exit does with communicators that were not freed.
_ways = exit.Living(attrgetter("_runner"), methodcaller("_retire"), methodcaller("_orphan"))
_late_ways = exit.Living(lambda comm: _late.get(comm, (_freed,))[0], methodcaller("_retire"), methodcaller("_orphan"))


# --- for the layers above in this package -----------------------------------------------------------------------------


def adopted(mpi: Any, *, queues: bool = True) -> Communicator:
    """Make a communicator that owns ``mpi`` (an MPI communicator or a substitute), without a duplicate. ``queues``:
    make channels for calls that are queued in streams."""
    return Communicator._adopt(mpi, queues=queues)


def runner_of(comm: Communicator) -> Runner:
    """The runner of a communicator's collectives."""
    return comm._runner


def messages_of(comm: Communicator) -> Messages:
    """The messages of a communicator."""
    return comm._messages
