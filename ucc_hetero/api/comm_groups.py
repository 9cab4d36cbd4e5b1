"""Communicators made from a communicator, and what tells them apart, with mpi4py's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, TypeVar

from ..bootstrap.timely import Timely, timely
from ..calls.dispatch import Runner

_Self = TypeVar("_Self", bound="GroupMethods")


class GroupMethods(ABC):
    """Duplicates, parts and arrangements of a communicator's ranks.

    Every method is collective as its namesake in mpi4py, and returns a communicator of this package, or
    ``MPI.COMM_NULL`` on a rank that is in none. The results are to be freed one by one.
    """

    _mpi: Any
    _run: Runner

    @classmethod
    @abstractmethod
    def _adopt(cls: type[_Self], mpi: Any) -> _Self:
        """A communicator of this class over MPI's."""

    def _made(self: _Self, mpi: Any) -> _Self | Any:
        from mpi4py import MPI

        return mpi if mpi == MPI.COMM_NULL else self._adopt(mpi)

    def _together(self, what: str, *args: Any, **more: Any) -> Any:
        """The result of MPI's collective of this name, which is made once all ranks have come to it."""
        mpi, make = timely(self._mpi, self._run.timeout, what), partial(getattr(self._mpi, what), *args, **more)
        return mpi.together(make) if isinstance(mpi, Timely) else make()

    def Dup(self: _Self, info: Any = None) -> _Self:
        """A communicator of the same ranks, whose calls and messages meet none of this one's."""
        return self._adopt(self._together("Dup") if info is None else self._together("Dup", info))

    Clone = Dup

    def Dup_with_info(self: _Self, info: Any) -> _Self:
        """``Dup``, with hints of its own for the MPI library."""
        return self._adopt(self._together("Dup_with_info", info))

    def Split(self: _Self, color: int = 0, key: int = 0) -> _Self | Any:
        """The ranks of the same ``color``, ordered by ``key``; ``MPI.COMM_NULL`` for color ``MPI.UNDEFINED``."""
        return self._made(self._together("Split", color, key))

    def Split_type(self: _Self, split_type: int, key: int = 0, info: Any = None) -> _Self | Any:
        """The ranks of a kind, such as ``MPI.COMM_TYPE_SHARED``: those that share memory."""
        more = () if info is None else (info,)
        return self._made(self._together("Split_type", split_type, key, *more))

    def Create(self: _Self, group: Any) -> _Self | Any:
        """The ranks of an ``MPI.Group``; collective over all ranks of this communicator."""
        return self._made(self._together("Create", group))

    def Create_group(self: _Self, group: Any, tag: int = 0) -> _Self | Any:
        """The ranks of an ``MPI.Group``; collective over the ranks of the group only."""
        mpi, make = timely(self._mpi, self._run.timeout, "Create_group"), partial(self._mpi.Create_group, group, tag)
        return self._made(mpi.apart(make) if isinstance(mpi, Timely) else make())

    def Create_cart(self: _Self, dims: Any, periods: Any = None, reorder: bool = False) -> _Self | Any:
        """The ranks on a grid; ``Shift``, ``Get_coords`` and the like are those of mpi4py's ``Cartcomm``."""
        more = () if periods is None else (periods,)
        return self._made(self._together("Create_cart", dims, *more, reorder=reorder))

    def Create_graph(self: _Self, index: Any, edges: Any, reorder: bool = False) -> _Self | Any:
        """The ranks as nodes of a graph."""
        return self._made(self._together("Create_graph", index, edges, reorder))

    def Create_dist_graph(self: _Self, sources: Any, degrees: Any, destinations: Any, *args: Any, **more: Any) -> _Self:
        """The ranks as nodes of a graph, whose edges any rank may name."""
        return self._adopt(self._together("Create_dist_graph", sources, degrees, destinations, *args, **more))

    def Create_dist_graph_adjacent(self: _Self, sources: Any, destinations: Any, *args: Any, **more: Any) -> _Self:
        """The ranks as nodes of a graph, each of which names its neighbours."""
        return self._adopt(self._together("Create_dist_graph_adjacent", sources, destinations, *args, **more))

    def Sub(self: _Self, remain_dims: Any) -> _Self | Any:
        """The part of a grid (``Create_cart``) with this rank in it."""
        return self._made(self._together("Sub", remain_dims))

    @classmethod
    def Compare(cls, comm1: Any, comm2: Any) -> int:
        """``MPI.IDENT`` for one communicator, else as MPI: ``CONGRUENT``, ``SIMILAR`` or ``UNEQUAL``.

        Takes communicators of this package and of mpi4py. A communicator is congruent to the one it was made from.
        """
        from mpi4py import MPI

        first, second = (getattr(comm, "mpi", comm) for comm in (comm1, comm2))
        return int(MPI.Comm.Compare(first, second))
