"""Peers whose calls are timed: objects with mpi4py's methods, so that one runner serves all.

``ours`` is ucc_hetero.Communicator, ``mpi4py`` the installed MPI, ``ucc`` plain UCC without this package's layers,
``nccl`` torch.distributed's backends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .world import NotOffered, Peer, World


def _ours(world: World) -> Peer:
    try:
        api = importlib.import_module("ucc_hetero")
        comm = api.Communicator(world.comm)
    except ImportError as why:  # also LibraryNotFound, which lists the files that were tried
        raise NotOffered(f"peer 'ours': {why}") from why
    return Peer("ours", comm, api.IN_PLACE, api.SUM, comm.Free)


def _mpi4py(world: World) -> Peer:
    from mpi4py import MPI

    # A duplicate, so that its messages cannot match those of the measurement.
    comm = world.comm.Dup()
    return Peer("mpi4py", comm, MPI.IN_PLACE, MPI.SUM, comm.Free)


def _ucc(world: World) -> Peer:
    try:
        comm = importlib.import_module(".ucc_peer", __package__).RawComm(world)
    except ImportError as why:
        raise NotOffered(f"peer 'ucc': {why}") from why
    return Peer("ucc", comm, comm.IN_PLACE, comm.SUM, comm.Free)


def _torch(backend: str) -> Callable[[World], Peer]:
    def build(world: World) -> Peer:
        from .torch_peer import open_torch

        comm = open_torch(backend, world)
        return Peer(backend, comm, comm.IN_PLACE, comm.SUM, comm.Free)

    return build


_OPEN: dict[str, Callable[[World], Peer]] = {
    "ours": _ours, "mpi4py": _mpi4py, "ucc": _ucc, "gloo": _torch("gloo"), "nccl": _torch("nccl"),
}  # fmt: skip


def open_peer(name: str, world: World) -> Peer:
    """Make a peer's communicator over all ranks. Collective; ``NotOffered`` on every rank if one rank cannot."""
    return world.agreed(lambda: _OPEN[name](world), NotOffered)
