"""The collectives of Python objects, with mpi4py's names and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, reduce
from typing import Any

from ..calls.objects import Objects
from ..docstrings import described
from ..types import OPS, op_of
from .comm_neighbours import NeighbourMethods

SUM = OPS["SUM"]


@described(
    raises="ValueError, CollectiveError: And the others that :class:`Communicator` names.",
    op="``SUM`` and the like, one's name as text, or one of MPI's: also one of the user's own, which gets two objects.",
    root="Rank that has the object, or gets what comes.",
    sendobj="An object that can be pickled.",
)
class ObjectMethods(NeighbourMethods):
    """Collectives of Python objects that can be pickled: they move as the data of any call does."""

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self._runner)

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Give all ranks the root's object.

        Args:
            obj: The object, at the root.

        Returns:
            A copy of it.
        """
        return self._objects.exchange("bcast", "bcast", [obj], root)[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Collect an object of each rank at the root.

        Returns:
            The objects at the root, None elsewhere.
        """
        return self._objects.exchange("gather", "allgather", [sendobj], root) or None

    def scatter(self, sendobj: Iterable[Any] | None = None, root: int = 0) -> Any:
        """Give each rank an object of the root's.

        Args:
            sendobj: An object for each rank, at the root.

        Returns:
            This rank's.
        """
        return self._objects.exchange("scatter", "scatter", () if sendobj is None else sendobj, root)[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect an object of each rank at every rank.

        Returns:
            The objects, in the order of the ranks.
        """
        return self._objects.exchange("allgather", "allgather", [sendobj])

    def alltoall(self, sendobj: Iterable[Any]) -> list[Any]:
        """Send an object from every rank to every rank.

        Args:
            sendobj: An object for each rank.

        Returns:
            An object of each rank.
        """
        return self._objects.exchange("alltoall", "alltoall", sendobj)

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Reduce an object of each rank to one at the root.

        Returns:
            The result at the root, None elsewhere.
        """
        return self._reduced("reduce", sendobj, op, slice(None), root)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Reduce an object of each rank to one, for every rank.

        Returns:
            The result.
        """
        return self._reduced("allreduce", sendobj, op, slice(None))

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Reduce the objects of the ranks up to this one.

        Returns:
            The result.
        """
        return self._reduced("scan", sendobj, op, slice(self._runner.rank + 1))

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Reduce the objects of the ranks before this one.

        Returns:
            The result; None on rank 0.
        """
        return self._reduced("exscan", sendobj, op, slice(self._runner.rank))

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to all neighbours.

        Returns:
            An object of each neighbour.
        """
        sources = self._neighbourhood.sources
        found = self._objects.exchange("neighbor_allgather", "allgather", [sendobj])
        return [found[source] if source >= 0 else None for source, _ in sources]

    def neighbor_alltoall(self, sendobj: Iterable[Any]) -> list[Any]:
        """Send an object to each neighbour.

        Args:
            sendobj: An object for each.

        Returns:
            An object of each.
        """
        name, destinations = "neighbor_alltoall", self._neighbourhood.destinations
        sent: list[dict[int, list[Any]]] = [{} for _ in range(self._runner.size)]
        with self._runner.refusing:
            things = list(sendobj)
            if len(things) != len(destinations):
                raise ValueError(
                    f"{name} on rank {self._runner.rank}: {len(things)} objects for {len(destinations)} neighbours"
                )
        for (dest, tag), thing in zip(destinations, things, strict=True):
            if dest >= 0:
                sent[dest].setdefault(tag, []).append(thing)
        found = self._objects.exchange(name, "alltoall", sent)
        return [found[source][tag].pop(0) if source >= 0 else None for source, tag in self._neighbourhood.sources]

    def _reduced(self, name: str, sendobj: Any, op: Any, among: slice, root: Any = -1) -> Any:
        with self._runner.refusing:
            operation = self._operation(name, op)
        found = self._objects.exchange(name, "allgather", [sendobj], root)
        return reduce(operation, found[among]) if found[among] else None

    def _operation(self, name: str, op: Any) -> Any:
        """The operation of MPI's on two objects."""
        from mpi4py import MPI

        if isinstance(op, MPI.Op):
            return op
        try:
            ours = str(op_of(op))
        except (TypeError, ValueError) as mistake:
            raise type(mistake)(f"{name} on rank {self._runner.rank}: {mistake}") from None
        if not hasattr(MPI, ours):
            raise ValueError(f"{name} on rank {self._runner.rank}: op {ours} is for arrays: {name.capitalize()}")
        return getattr(MPI, ours)
