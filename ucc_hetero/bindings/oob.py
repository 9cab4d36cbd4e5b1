"""The out-of-band exchange that libucc needs while it creates and destroys contexts: an allgather over MPI.

libucc starts an allgather, tests it, and frees it, inside ``ucc_context_create`` and ``ucc_context_destroy``; the C
callbacks below implement this with requests of an :class:`Exchange`. A callback never raises: libucc ignores some
results, and an exception must not unwind through C. The first failure is stored, and raised by the caller.
"""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from ..errors import CollectiveTimeout
from ..native.libraries import ffi, lib

_OK, _INPROGRESS, _ERROR = 0, 1, -6


class Pending(Protocol):
    """An active exchange."""

    def test(self) -> bool:
        """Return True once every rank's bytes have been written to the destination."""


class Exchange(Protocol):
    """An allgather among the ranks that create a context together."""

    rank: int
    size: int

    def begin(self, src: memoryview, dst: memoryview) -> Pending:
        """Start an allgather; does not block.

        Args:
            src: this rank's bytes.
            dst: memory for every rank's bytes in rank order, ``size`` times as long.

        Returns:
            the exchange, which fills ``dst`` until its ``test()`` is True.
        """


class _MPIPending:
    def __init__(self, request: Any, rank: int, seconds: float) -> None:
        self._request, self._rank, self._seconds, self._until = request, rank, seconds, time.monotonic() + seconds

    def test(self) -> bool:
        come = bool(self._request.Test())
        if not come and time.monotonic() > self._until:
            raise CollectiveTimeout(
                f"rank {self._rank}: a context of libucc: not every rank came within {self._seconds:g} s (UCCH_TIMEOUT)"
            )
        return come


class MPIExchange:
    """An :class:`Exchange` over an mpi4py communicator.

    Args:
        comm: the communicator, used for nothing else.
        seconds: time for each exchange, after which its ``test()`` raises `CollectiveTimeout`.
    """

    def __init__(self, comm: Any, seconds: float = math.inf) -> None:
        self.comm, self._seconds = comm, seconds
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def begin(self, src: memoryview, dst: memoryview) -> Pending:
        """Start an ``MPI_Iallgather``; see `Exchange.begin`."""
        return _MPIPending(self.comm.Iallgather(src, dst), self.rank, self._seconds)


class _Oob:
    """One context's exchange, and its first failure."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.failure: BaseException | None = None


#: Exchanges and their requests by number; libucc passes the numbers as pointers.
_oobs: dict[int, _Oob] = {}
_requests: dict[int, tuple[_Oob, Pending]] = {}
_counter = [0]


def _number() -> int:
    _counter[0] += 1
    return _counter[0]


def oob_of(exchange: Exchange, out: Any) -> tuple[int, _Oob]:
    """Fill a ``ucc_oob_coll_t`` with callbacks that use ``exchange``. Returns (its number, its record)."""
    key = _number()
    record = _Oob(exchange)
    _oobs[key] = record
    out.allgather = lib.ucch_oob_allgather
    out.req_test = lib.ucch_oob_test
    out.req_free = lib.ucch_oob_free
    out.coll_info = ffi.cast("void *", key)
    out.n_oob_eps = exchange.size
    out.oob_ep = exchange.rank
    return key, record


def forget(key: int) -> None:
    """Drop a context's exchange after the context was destroyed."""
    _oobs.pop(key, None)


def _keep(kind: type[BaseException], failure: BaseException, traceback: Any) -> None:
    """Store an exception that no line of a callback can catch: Ctrl-C while it is entered."""
    given = traceback.tb_frame.f_locals
    if "info" in given:
        record = _oobs.get(int(ffi.cast("uintptr_t", given["info"])))
    else:
        record, _ = _requests.get(int(ffi.cast("uintptr_t", given["request"])), (None, None))
    if record is not None:
        record.failure = record.failure or failure


@ffi.def_extern(error=_ERROR, onerror=_keep)
def ucch_oob_allgather(src: Any, dst: Any, size: int, info: Any, request: Any) -> int:
    record = _oobs.get(int(ffi.cast("uintptr_t", info)))
    if record is None:
        return _ERROR
    try:
        pending = record.exchange.begin(
            memoryview(ffi.buffer(src, size)), memoryview(ffi.buffer(dst, size * record.exchange.size))
        )
    except BaseException as failure:  # also one raised by a signal handler
        record.failure = record.failure or failure
        return _ERROR
    number = _number()
    _requests[number] = (record, pending)
    request[0] = ffi.cast("void *", number)
    return _OK


@ffi.def_extern(error=_ERROR, onerror=_keep)
def ucch_oob_test(request: Any) -> int:
    record, pending = _requests[int(ffi.cast("uintptr_t", request))]
    # libucc tests in a loop until all ranks have arrived, holding the engine's lock: release it in between for other
    # threads of this process, for which these ranks may be waiting.
    try:
        lib.ucch_unlock()
        return _OK if pending.test() else _INPROGRESS
    except BaseException as failure:  # also one raised by a signal handler
        record.failure = record.failure or failure
        return _ERROR
    finally:
        lib.ucch_lock()


@ffi.def_extern(error=_ERROR)
def ucch_oob_free(request: Any) -> int:
    _requests.pop(int(ffi.cast("uintptr_t", request)), None)
    return _OK
