"""Rendezvous by ``env://`` under mpirun: MPI provides what mpirun does not put into the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from _ucc_hetero_autoload import with_way_out

from ..bootstrap.process import refuse_foreign_launcher, refuse_without_mpi
from ..errors import CollectiveTimeout
from ..machine import launchers
from ..native.waiting import progress_until

#: Variables that torch's own handler of ``env://`` reads.
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Variables that this module has set and may set again.
_ours: set[str] = set()


def launched_by_mpi() -> bool:
    """True if this process is a rank of an MPI job. False for ranks of torchrun, also where mpirun or srun started
    torchrun, and for child processes of a rank, such as torch starts to save checkpoints: these meet in a store."""
    if dist.is_torchelastic_launched() or launchers.is_child(os.environ):
        return False
    return any(name in os.environ for name in launchers.MPI["RANK"])


def _export(name: str, value: object) -> None:
    if name not in os.environ or name in _ours:
        os.environ[name] = str(value)
        _ours.add(name)


def export_ranks() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the launcher's variables, where they are unset."""
    for name, sources in launchers.MPI.items():
        value = next((os.environ[source] for source in sources if source in os.environ), None)
        if value is not None:
            _export(name, value)


def install() -> None:
    """Make ``env://`` work under mpirun. No effect if torchrun or the user has set the variables."""
    handlers: dict[str, Any] = _rendezvous_handlers
    stock = getattr(handlers["env"], "stock", handlers["env"])  # unwrap what the entry point has installed
    if getattr(stock, "ucch", False):
        return

    def handler(url: str, timeout: timedelta = dist.default_pg_timeout, **more: Any) -> Iterator[Any]:
        given = {name.upper() for name in parse_qs(urlparse(url).query)}
        missing = [n for n in _NEEDED if n not in given and (n not in os.environ or n in _ours)]
        if missing and launched_by_mpi():
            return _over_mpi(timeout)
        return with_way_out(stock(url, timeout=timeout, **more))

    handler.ucch = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def await_all(store: Any, rank: int, ranks: Sequence[int], seconds: float) -> None:
    """Wait until all ranks of a group have chosen this backend: ranks with another backend never would.

    ``ValueError`` if ``rank`` is out of range. ``CollectiveTimeout`` names the missing ranks, and the variable that may
    differ there. ``store`` is the group's part of torch's store, ``ranks`` are the members' torch ranks. 0 ``seconds``
    mean no limit.
    """
    if not 0 <= rank < len(ranks):
        raise ValueError(f"rank {rank} of {len(ranks)} rank(s): RANK has to be from 0 to WORLD_SIZE - 1")
    keys = [f"ucch/chosen/{r}" for r in range(len(ranks))]
    store.set(keys[rank], "y")
    if store.add("ucch/chosen", 1) == len(ranks):
        store.set("ucch/all", "y")  # one key to poll, whatever the number of ranks
    together = progress_until(lambda: store.check(["ucch/all"]), seconds, longest=0.05)
    missing = [] if together else [ranks[r] for r, key in enumerate(keys) if not store.check([key])]
    with suppress(NotImplementedError, RuntimeError):  # some stores cannot delete keys
        if together:  # a later group of these ranks may get the same prefix
            store.delete_key(keys[rank])
        if store.add("ucch/chosen", -1) == 0:
            store.delete_key("ucch/all")
    if not together:
        raise not_come(ranks[rank], missing, seconds)


def not_come(rank: int, missing: Sequence[int], seconds: float) -> CollectiveTimeout:
    """The error of ``rank`` for ranks that did not choose this backend within ``seconds``, with the likely cause."""
    value = os.environ.get("UCCH_TORCH_REPLACE", "")
    cure = f"UCCH_TORCH_REPLACE={value} must be set there, too (mpirun -x UCCH_TORCH_REPLACE, or ucch-run)"
    cure = cure if value else "do they ask for another backend, or have another WORLD_SIZE?"
    return CollectiveTimeout(
        f"rank {rank}: rank(s) {list(missing)} did not come to the backend ucch within {seconds:g} s: {cure}"
    )


def _over_mpi(timeout: timedelta) -> Iterator[Any]:
    """Handler of ``env://``: exchange the address of rank 0's store over MPI."""
    from ..native.libraries import load

    load()  # before MPI is loaded: MPI brings its own UCX, and a process uses the first one
    from mpi4py import MPI

    refuse_without_mpi()
    refuse_foreign_launcher()
    yield store_over(MPI.COMM_WORLD, timeout)
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")


def store_over(world: Any, timeout: timedelta) -> tuple[Any, int, int]:
    """(A store on the host of rank 0 of an MPI communicator, this process's rank, the number of ranks); collective."""
    from mpi4py import MPI

    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = world.Get_rank(), world.Get_size()
    for name, value in ("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", local.Get_size()):
        _export(name, value)
    # The launcher's local rank, by which the script has chosen its device; MPI may count in another order.
    mine = launchers.number("LOCAL_RANK", os.environ, local.Get_rank(), torchrun=False)
    os.environ.setdefault("LOCAL_RANK", str(mine))
    one_host = local.Get_size() == size
    local.Free()
    store = where = None
    if rank == 0:
        host = "127.0.0.1" if one_host else _address()
        port = 0 if "MASTER_PORT" in _ours or "MASTER_PORT" not in os.environ else int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, multi_tenant=True)
            where = (host, store.port)
        except (OSError, RuntimeError) as failure:
            where = (str(failure), 0)
    where = world.bcast(where, root=0)
    if not where[1]:
        raise dist.DistBackendError(f"rank 0 could not make the store of env://: {where[0]}")
    _export("MASTER_ADDR", where[0])
    _export("MASTER_PORT", where[1])
    if store is None:
        store = dist.TCPStore(*where, size, False, timeout, wait_for_workers=False)
    return store, rank, size


def _address() -> str:
    """An address of this host that other hosts reach: MASTER_ADDR, its name, or its address on the default route."""
    given = os.environ.get("MASTER_ADDR")
    if given and "MASTER_ADDR" not in _ours:
        return given
    try:
        address = socket.gethostbyname(socket.gethostname())
    except (OSError, UnicodeError):  # a host name with a label that is too long
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a UDP connect sends nothing; it only selects the interface
            return str(probe.getsockname()[0])
        except OSError:
            return address
