"""The collectives of Python objects, with mpi4py's names and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..calls.arguments import CallSpec, root_of
from ..calls.runner import Runner
from ..docstrings import described
from ..native.libraries import ffi, lib
from ..types import OPS, op_of
from .comm_neighbours import NeighbourMethods

#: Bytes of all slots of a rank, one slot per receiver; bytes of the header before a pickle, which has the pickle's
#: length and a bit that is set if any pickle of this rank is longer than a slot.
_BYTES, _HEAD = int(lib.UCCH_PARCEL_BYTES), 8
#: Minimum bytes of a slot; bytes of a slot of an allgather with more ranks than the arrival board carries data for.
_LEAST, _FEW = 24, 64


class _Slots(NamedTuple):
    """Buffers of an exchange and their addresses."""

    send: Any
    recv: Any
    send_at: Any
    recv_at: Any

    @classmethod
    def of(cls, size: int, sent: int, came: int) -> _Slots:
        send, recv = (np.zeros(count * size, np.uint8) if count else None for count in (sent, came))
        at = (ffi.NULL if each is None else ffi.from_buffer(each, require_writable=True) for each in (send, recv))
        return cls(send, recv, *at)


class Objects:
    """Exchanges of Python objects: one call if all pickles fit into slots, else a second one with the known lengths."""

    def __init__(self, runner: Runner) -> None:
        from mpi4py import MPI

        self._runner, self._pickle = runner, MPI.pickle
        #: By method, root and number of objects: the call's name in errors and records, the call, and its buffers.
        self._known: dict[tuple[str, int, int], tuple[str, CallSpec, _Slots]] = {}
        #: Methods with roots that were found valid.
        self._rooted: set[tuple[str, int]] = set()
        self._room = {
            "bcast": _BYTES,
            "allgather": _BYTES if runner.size <= lib.UCCH_PARCEL_RANKS else _FEW,
            **dict.fromkeys(("alltoall", "scatter"), max(_LEAST, _BYTES // runner.size)),
        }

    def exchange(self, what: str, name: str, things: Iterable[Any], root: Any = -1) -> list[Any]:
        """Exchange objects by the collective ``name``; ``what`` is the call's name in errors and records.

        ``name`` is ``bcast``, ``allgather``, ``alltoall`` or ``scatter``. ``things``: this rank's object, or one for
        each rank. ``root``: the rank that alone sends, or alone needs the result; -1 for none. Returns the received
        objects in rank order, or nothing if only the root needs them.
        """
        runner, room = self._runner, self._room[name]
        try:
            if type(root) is not int or (what, root) not in self._rooted:
                root = root_of(CallSpec(what, None, None, None, root), runner.size, runner.rank)
                self._rooted.add((what, root))
            gives = name == "allgather" or root in (-1, runner.rank)
            given = list(map(self._pickle.dumps, things)) if gives else []
            if gives and name in ("alltoall", "scatter") and len(given) != runner.size:
                raise ValueError(f"{what} on rank {runner.rank}: {len(given)} objects for {runner.size} ranks")
        except Exception as error:
            runner.refuse(error)
            raise
        key = what, root, len(given)
        label, call, slots = self._known.get(key) or self._known.setdefault(key, self._call(name, *key))
        self._fill(slots.send if name != "bcast" else slots.recv, given, room)
        runner.run_labelled(label, call, slots.send_at, slots.recv_at)
        found = self._taken(slots.recv.tobytes(), room)
        pickles = self._long(name, given, found, root) if isinstance(found, tuple) else found
        return list(map(self._pickle.loads, pickles)) if name != "allgather" or root in (-1, runner.rank) else []

    def _call(self, name: str, what: str, root: int, gives: int) -> tuple[str, CallSpec, _Slots]:
        came = self._runner.size if name in ("allgather", "alltoall") else 1
        slots = _Slots.of(self._room[name], gives if name != "bcast" else 0, came)
        label = what + " of objects" * what.islower() + f" root={root}" * (root >= 0)  # not of Dup and the like
        return label, CallSpec(name, slots.send, slots.recv, None, -1 if name == "allgather" else root), slots

    def _fill(self, memory: Any, given: list[bytes], room: int) -> None:
        longer = bool(given) and max(map(len, given)) > room - _HEAD
        for i, pickled in enumerate(given):
            head = (len(pickled) << 1 | longer).to_bytes(_HEAD, "little")
            packed = head if longer else head + pickled
            memory.data[i * room : i * room + len(packed)] = packed

    def _taken(self, data: bytes, room: int) -> list[bytes] | tuple[int, ...]:
        """The received pickles; or, on all ranks, their lengths if any rank has a pickle longer than a slot."""
        lengths, found, longer = [], [], 0
        for at in range(0, len(data), room):
            head = int.from_bytes(data[at : at + _HEAD], "little")
            longer |= head & 1
            lengths.append(head >> 1)
            found.append(data[at + _HEAD : at + _HEAD + (head >> 1)])
        return tuple(lengths) if longer else found

    def _long(self, name: str, given: list[bytes], lengths: tuple[int, ...], root: int) -> list[memoryview]:
        """Exchange pickles of known lengths in one call."""
        runner = self._runner
        with runner.refusing:  # allocation may fail on one rank
            send = np.frombuffer(b"".join(given), np.uint8)
            needs = name != "allgather" or root in (-1, runner.rank)
            recv = np.empty(sum(lengths) if needs else 0, np.uint8)
        sent, came = [send, [len(each) for each in given]], [recv, list(lengths)]
        if name == "bcast":
            recv = recv if root != runner.rank else send.copy()
            runner.blocking("bcast", None, recv, None, root)
        elif name == "allgather" and root < 0:
            runner.blocking("allgatherv", send, came)
        elif name == "allgather":
            runner.blocking("gatherv", send, came if needs else None, None, root)
        elif name == "scatter":
            runner.blocking("scatterv", sent if given else None, recv, None, root)
        else:
            runner.blocking("alltoallv", sent, came)
        ends = list(accumulate(lengths))
        return [recv.data[end - length : end] for end, length in zip(ends, lengths, strict=True)] if needs else []


SUM = OPS["SUM"]
#: What all collectives raise.
RAISES = (
    "TypeError, ValueError, BufferError, NotSupported: This rank's arguments are wrong. Nothing was sent.\n"
    "    CollectiveError: The call failed on this rank or another; :class:`Communicator` lists the subclasses."
)


@described(
    raises=RAISES,
    op="``SUM`` and the like, its name, ``MPI.SUM`` and the like, or a function of two objects.",
    root="Rank that has the object, or gets the result.",
    sendobj="A picklable object.",
)
class ObjectMethods(NeighbourMethods):
    """Collectives of picklable Python objects, sent as the data of buffer collectives."""

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self._runner)

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Send the root's object to all ranks.

        Args:
            obj: The object on the root; ignored elsewhere.

        Returns:
            A copy of the root's object.
        """
        return self._objects.exchange("bcast", "bcast", [obj], root)[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Collect an object of each rank on the root.

        Returns:
            The objects in rank order on the root; None elsewhere.
        """
        return self._objects.exchange("gather", "allgather", [sendobj], root) or None

    def scatter(self, sendobj: Iterable[Any] | None = None, root: int = 0) -> Any:
        """Send each rank one of the root's objects.

        Args:
            sendobj: One object per rank on the root; ignored elsewhere.

        Returns:
            This rank's object.
        """
        return self._objects.exchange("scatter", "scatter", () if sendobj is None else sendobj, root)[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect an object of each rank on every rank.

        Returns:
            The objects in rank order.
        """
        return self._objects.exchange("allgather", "allgather", [sendobj])

    def alltoall(self, sendobj: Iterable[Any]) -> list[Any]:
        """Send an object of every rank to every rank.

        Args:
            sendobj: One object per receiver.

        Returns:
            One object per sender.
        """
        return self._objects.exchange("alltoall", "alltoall", sendobj)

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Reduce the ranks' objects; the root gets the result.

        Returns:
            The result on the root; None elsewhere.
        """
        return self._reduced("reduce", sendobj, op, slice(None), root)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Reduce the ranks' objects; every rank gets the result.

        Returns:
            The result.
        """
        return self._reduced("allreduce", sendobj, op, slice(None))

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Reduce the objects of ranks 0 to this one.

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
        """Send an object to all neighbours, and receive one from each.

        Returns:
            One object per neighbour.
        """
        sources = self._neighbourhood.sources
        found = self._objects.exchange("neighbor_allgather", "allgather", [sendobj])
        return [found[source] if source >= 0 else None for source, _ in sources]

    def neighbor_alltoall(self, sendobj: Iterable[Any]) -> list[Any]:
        """Send an object to each neighbour, and receive one from each.

        Args:
            sendobj: One object per neighbour.

        Returns:
            One object per neighbour.
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
        """The function of two objects for ``op``."""
        from mpi4py import MPI

        if callable(op):  # MPI's operations, too
            return op
        try:
            ours = str(op_of(op))
        except (TypeError, ValueError) as mistake:
            raise type(mistake)(f"{name} on rank {self._runner.rank}: {mistake}") from None
        if not hasattr(MPI, ours):
            raise ValueError(f"{name} on rank {self._runner.rank}: op {ours} is for arrays: {name.capitalize()}")
        return getattr(MPI, ours)
