"""Methods that make communicators from a communicator or compare two, with mpi4py's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, partial
from operator import index
from typing import Any, TypeVar

import numpy as np

from ..bootstrap.meeting import Bids, Seat, SplitMeeting, Turn, all_ready
from ..bootstrap.timely import Timely, timely
from ..calls.arguments import CallSpec
from ..calls.runner import Runner
from ..docstrings import described, forms
from ..native.libraries import ffi

_Self = TypeVar("_Self", bound="GroupMethods")

#: One more than the largest C int.
_MOST = 1 << 31

#: Methods whose arguments MPI accepts on every rank.
_SURE = ("Dup", "Split")


def _call(mpi: Any, what: str, *args: Any, **more: Any) -> Any:
    """Call a method of an MPI communicator."""
    if what != "Create_dist_graph_adjacent" or not mpi.is_topo:
        return getattr(mpi, what)(*args, **more)
    # Open MPI takes such a graph for a grid if the ranks are those of a grid: give it ranks without a topology.
    bare = mpi.Split(key=mpi.rank)
    try:
        return bare.Create_dist_graph_adjacent(*args, **more)
    finally:
        bare.Free()


def _ranks_in(made: Any, mpi: Any) -> list[int]:
    """Ranks in ``mpi`` of the members of an MPI communicator."""
    theirs = made.Get_group()
    ranks = _ranks_of(theirs, mpi)
    theirs.Free()
    return ranks


def _ranks_of(group: Any, mpi: Any) -> list[int]:
    """Ranks in ``mpi`` of the members of an MPI group."""
    ours = mpi.Get_group()
    ranks = type(ours).Translate_ranks(group, list(range(type(ours).Get_size(group))), ours)
    ours.Free()
    return list(ranks)


@forms
@described(raises="MismatchError, CollectiveTimeout, PeerError: A rank made a different call, came too late, or died.")
class GroupMethods(ABC):
    """Duplicates, subsets and topologies of a communicator.

    Every method is collective like its namesake in mpi4py. It returns a communicator of this package, or
    ``MPI.COMM_NULL`` on a rank that is not a member; free each one. Except for ``Create_group``, the new communicator
    uses the facts that the ranks exchanged for this one: to use settings that have changed since, make
    ``Communicator(comm.mpi)``.
    """

    _mpi: Any
    _runner: Runner

    @classmethod
    @abstractmethod
    def _adopt(cls: type[_Self], mpi: Any, seat: Seat | None = None) -> _Self:
        """Make a communicator of this class over MPI's, whose ranks know each other's facts."""

    def _made(self: _Self, what: str, *args: Any, **more: Any) -> _Self | Any:
        """Call MPI's method ``what`` once all ranks have come, and make a communicator of the result."""
        # Taken here: at the end of the program a daemon thread goes on that is creating.
        runner, meeting, own = self._runner, self._split_meeting, self._mpi
        make, mpi, sure = partial(_call, own, what, *args, **more), timely(own, runner.timeout, what), what in _SURE
        if not isinstance(mpi, Timely):
            runner.run_labelled(what, CallSpec("barrier", None, None))
            return self._adopt(make())
        meeting.call = (what, *args) if what == "Split" else (what, 0, 0)
        with runner.members.creation(), meeting.turn:
            go_on = meeting.bids.agree(mpi.allgather)
            made = mpi.at_once(make, met=runner.members.meets_on_board) if sure else mpi.apart(make)
            if not made or not go_on:
                return made and self._adopt(made)
            ranks = None if sure else _ranks_in(made, own)
            return self._adopt(made, meeting.bids.seat(runner.members.known, ranks, mpi.seconds))

    @cached_property
    def _split_meeting(self) -> SplitMeeting:
        """The exchange that precedes the creation of a communicator: one allgather with buffers of its own."""

        def exchange(what: str, bids: Bids) -> None:
            runner.run_labelled(what, call, bids.mine, bids.all)

        runner, meeting = self._runner, SplitMeeting(self._runner.members.known, exchange)
        mine, all = (np.frombuffer(ffi.buffer(each), np.int64) for each in (meeting.bids.mine, meeting.bids.all))
        call = CallSpec("allgather", mine, all)
        return meeting

    def Dup(self: _Self, info: Any = None) -> _Self:
        """Make a communicator of the same ranks, with calls and messages separate from this one's.

        Args:
            info: ``MPI.Info`` with hints for the MPI library, or None.

        Returns:
            The communicator.
        """
        return self._made("Dup") if info is None else self.Dup_with_info(info)

    Clone = Dup

    def Dup_with_info(self: _Self, info: Any) -> _Self:
        """:meth:`Dup`, with hints for the MPI library that must be given.

        Args:
            info: ``MPI.Info``.

        Returns:
            The communicator.
        """
        return self._made("Dup_with_info", info)

    def Split(self: _Self, color: int = 0, key: int = 0) -> _Self | Any:
        """Make one communicator for each color.

        Args:
            color: 0 or more, or ``MPI.UNDEFINED`` to be in no communicator.
            key: Ranks are ordered by key, and by their rank here if keys are equal.

        Returns:
            The communicator; ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``.
        """
        from mpi4py import MPI

        with self._runner.refusing:  # MPI would raise on this rank only
            if not (0 <= index(color) < _MOST or color == MPI.UNDEFINED):
                raise ValueError(f"Split on rank {self._runner.rank}: color {color} must be from 0 to 2**31 - 1")
            if not -_MOST <= index(key) < _MOST:
                raise ValueError(f"Split on rank {self._runner.rank}: key {key} does not fit into a C int")
        return self._made("Split", color, key)

    def Split_type(self: _Self, split_type: int, key: int = 0, info: Any = None) -> _Self | Any:
        """Make one communicator for each group of ranks that share a resource.

        Args:
            split_type: ``MPI.COMM_TYPE_SHARED`` (memory of a host), or another type of MPI's.
            key: Ranks are ordered by key, and by their rank here if keys are equal.
            info: ``MPI.Info`` with details of the type, or None.

        Returns:
            The communicator; ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``.
        """
        more = () if info is None else (info,)
        return self._made("Split_type", split_type, key, *more)

    def Create(self: _Self, group: Any) -> _Self | Any:
        """Make a communicator of a group's ranks. All ranks of this communicator call it.

        Args:
            group: ``MPI.Group``, a subset of ``Get_group()``.

        Returns:
            The communicator; ``MPI.COMM_NULL`` on ranks outside the group.
        """
        return self._made("Create", group)

    def Create_group(self: _Self, group: Any, tag: int = 0) -> _Self | Any:
        """Make a communicator of a group's ranks. Only these call it.

        Args:
            group: ``MPI.Group``, a subset of ``Get_group()``.
            tag: Distinguishes concurrent calls of several threads.

        Returns:
            The communicator; ``MPI.COMM_NULL`` on ranks outside the group.
        """
        from mpi4py import MPI

        members, make = self._runner.members, partial(self._mpi.Create_group, group, tag)
        mpi, ranks = timely(self._mpi, self._runner.timeout, "Create_group"), _ranks_of(group, self._mpi)
        if members.rank not in ranks:
            return MPI.COMM_NULL
        if MPI.UNDEFINED in ranks:
            raise ValueError(f"Create_group on rank {members.rank}: the group is not a subset of this communicator")
        turn = Turn(partial(all_ready, members.known, members.id, ranks, tag, mpi))
        with members.creation(ranks, tag), turn:
            return self._adopt(mpi.apart(make))

    def Create_cart(self: _Self, dims: Any, periods: Any = None, reorder: bool = False) -> _Self | Any:
        """Make a communicator with a grid topology, with the methods of mpi4py's ``Cartcomm`` such as ``Shift``.

        Args:
            dims: Length of each dimension of the grid.
            periods: True for each dimension that is periodic; all False if None.
            reorder: True if MPI may renumber the ranks.

        Returns:
            The communicator; ``MPI.COMM_NULL`` on ranks outside the grid.
        """
        more = () if periods is None else (periods,)
        return self._made("Create_cart", dims, *more, reorder=reorder)

    def Create_graph(self: _Self, index: Any, edges: Any, reorder: bool = False) -> _Self | Any:
        """Make a communicator with a graph topology. Every rank gives the whole graph.

        Args:
            index: Cumulative number of neighbours, node by node.
            edges: The neighbours of all nodes, node by node.
            reorder: True if MPI may renumber the ranks.

        Returns:
            The communicator; ``MPI.COMM_NULL`` on ranks outside the graph.
        """
        return self._made("Create_graph", index, edges, reorder)

    def Create_dist_graph(self: _Self, sources: Any, degrees: Any, destinations: Any, *args: Any, **more: Any) -> _Self:
        """Make a communicator with a graph topology. Each rank gives some of the edges.

        Args:
            sources: Ranks whose edges this rank gives.
            degrees: Number of edges of each of them.
            destinations: Ends of these edges, source by source.
            args, more: ``weights``, ``info`` and ``reorder``, as in mpi4py.

        Returns:
            The communicator.
        """
        return self._made("Create_dist_graph", sources, degrees, destinations, *args, **more)

    def Create_dist_graph_adjacent(self: _Self, sources: Any, destinations: Any, *args: Any, **more: Any) -> _Self:
        """Make a communicator with a graph topology. Each rank gives its own edges.

        Args:
            sources: Ranks with an edge to this rank.
            destinations: Ranks with an edge from this rank.
            args, more: ``sourceweights``, ``destweights``, ``info`` and ``reorder``, as in mpi4py.

        Returns:
            The communicator.
        """
        return self._made("Create_dist_graph_adjacent", sources, destinations, *args, **more)

    def Sub(self: _Self, remain_dims: Any) -> _Self | Any:
        """Make a communicator of this rank's part of a grid (:meth:`Create_cart`).

        Args:
            remain_dims: True for each dimension to keep.

        Returns:
            The communicator.
        """
        return self._made("Sub", remain_dims)

    @classmethod
    def Compare(cls, comm1: Any, comm2: Any) -> int:
        """Compare two communicators.

        A communicator is congruent to the one it was made from.

        Args:
            comm1, comm2: Communicators of this package or of mpi4py.

        Returns:
            ``MPI.IDENT`` (the same communicator), ``CONGRUENT``, ``SIMILAR`` or ``UNEQUAL``.
        """
        from mpi4py import MPI

        first, second = (getattr(comm, "mpi", comm) for comm in (comm1, comm2))
        return int(MPI.Comm.Compare(first, second))
