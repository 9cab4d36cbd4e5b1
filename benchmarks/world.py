"""World of all benchmarks: MPI as the measuring itself uses it, and a peer, whose calls are timed.

Barriers and sums of the measuring always go over MPI (``World``), so that they are the same whatever is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class NotOffered(Exception):
    """A peer cannot run this benchmark, or is not installed; the message says what would be needed."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Peer:
    """One library: ``comm`` has mpi4py's methods, ``in_place`` and ``sum`` are its own constants."""

    name: str
    comm: Any
    in_place: Any
    sum: Any
    close: Callable[[], None] = field(default=_nothing)

    def method(self, name: str) -> Callable[..., Any]:
        """A communicator method. Raises NotOffered where the peer has none of that name."""
        found = getattr(self.comm, name, None)
        if found is None:
            raise NotOffered(f"peer {self.name!r} has no {name}; choose another with --backend")
        return found  # type: ignore[no-any-return]

    @staticmethod
    def waitall(requests: Sequence[Any]) -> None:
        """Wait for all requests in one call."""
        type(requests[0]).Waitall(requests)


class World:
    """The job's ranks over MPI, for everything but what is measured."""

    def __init__(self, comm: MPI.Comm, close: Callable[[], None] = _nothing) -> None:
        self.comm = comm
        #: Ends what this module itself initialised; mpi4py does the rest at exit.
        self.close = close
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.barrier = comm.Barrier

    def spread(self, value: float) -> tuple[float, float, float]:
        """(mean, least, most) of every rank's value, on every rank."""
        everything = self.gather([value])[:, 0]
        return float(everything.mean()), float(everything.min()), float(everything.max())

    def gather(self, values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Every rank's values, one row per rank, on every rank. All ranks give equally many."""
        mine = np.ascontiguousarray(values, dtype=np.float64)
        table = np.empty((self.size, mine.size))
        self.comm.Allgather(mine, table)
        return table

    def total(self, value: int) -> int:
        """The sum over ranks."""
        return int(self.comm.allreduce(value))

    def local_rank(self) -> int:
        """This rank's number on its node."""
        from mpi4py import MPI

        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        local = node.rank
        node.Free()
        return local

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, end="", flush=True)

    def nodes(self) -> int:
        """Nodes that the ranks are on. Collective."""
        from mpi4py import MPI

        return len(set(self.comm.allgather(MPI.Get_processor_name())))

    def agreed(self, make: Callable[[], T], refusal: type[Exception]) -> T:
        """``make()``; where it raises ``refusal`` on some rank, the lowest such rank's on all. Collective."""
        made, message = None, None
        try:
            made = make()
        except refusal as why:
            message = str(why)
        if (first := self.first_error(message)) is not None:
            raise refusal(first)
        return cast(T, made)

    def first_error(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one; None if none has. Collective, so that all ranks agree."""
        return next((text for text in self.comm.allgather(message) if text), None)


def prepare(names: Iterable[str]) -> None:
    """Load our UCX before MPI brings another one under the same name; to be called before ``open_world``.

    A library that is not there is reported by ``open_peer``.
    """
    if {"ours", "ucc"} & set(names):
        with suppress(ImportError):
            importlib.import_module("ucc_hetero.native.libraries").preload_ucx()


def open_world() -> World:
    """Initialise MPI: MPI_Init at import of mpi4py.MPI."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        return World(MPI.COMM_WORLD)
    MPI.Init()  # mpi4py's automatic start was switched off, and with it the automatic end
    return World(MPI.COMM_WORLD, MPI.Finalize)
