"""Collectives and messages for MPI jobs whose ranks sit on different vendors' GPUs, over UCC and UCX.

    import ucc_hetero
    from mpi4py import MPI

    comm = ucc_hetero.Communicator(MPI.COMM_WORLD)
    comm.Allreduce(send, recv, op=MPI.SUM)

Import this before ``mpi4py.MPI``: it loads libucp before MPI brings a UCX of its own, and a process uses the first one.
From the import on, a rank that fails ends its MPI job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import installed as installed  # first: raises if this is the source folder and not the installed package
from ._version import __version__
from .api.comm import Communicator
from .bootstrap.exit import register as _end_with_the_job
from .calls.persistent import PersistentRequest
from .calls.request import Request
from .errors import (
    AgreementError,
    CollectiveError,
    CollectiveTimeout,
    DataError,
    DeviceError,
    LibraryError,
    LibraryNotFound,
    MismatchError,
    NotSupported,
    PeerError,
    RefusedError,
    RevokedError,
    TruncationError,
    UCCHError,
)
from .native.libraries import load_before_mpi as _load_before_mpi
from .p2p.probe import Message
from .trace import flight
from .types import OPS as _OPS

if TYPE_CHECKING:
    from .bootstrap.store import Store, StoreServer

SUM, PROD, MAX, MIN, AVG = (_OPS[_n] for _n in ("SUM", "PROD", "MAX", "MIN", "AVG"))
LAND, LOR, LXOR, BAND, BOR, BXOR = (_OPS[_n] for _n in ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"))

#: Send buffer of in-place calls, as the data is in the receive buffer; the same as ``MPI.IN_PLACE``.
IN_PLACE = None

__all__ = [
    "AVG", "BAND", "BOR", "BXOR", "IN_PLACE", "LAND", "LOR", "LXOR", "MAX", "MIN", "PROD", "SUM", "AgreementError",
    "CollectiveError", "CollectiveTimeout", "Communicator", "DataError", "DeviceError", "LibraryError",
    "LibraryNotFound", "Message", "MismatchError", "NotSupported", "PeerError", "PersistentRequest", "RefusedError",
    "Request", "RevokedError", "Store", "StoreServer", "TruncationError", "UCCHError", "__version__", "flight",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A store for ranks that come later, which few jobs need: its modules take a fifth of the import's time."""
    if name not in ("Store", "StoreServer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .bootstrap import store

    return getattr(store, name)


_load_before_mpi()
_end_with_the_job()
