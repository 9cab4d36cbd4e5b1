"""Memory that a job's ranks of one host share: a page for the arrival board of each communicator (base/board.c)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import log
from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.topology import numbered

#: Bytes of the file, which takes memory only for the pages in use; the alignment of pages; and bytes at the end of a
#: page for the number of ranks that have dropped it.
_FILE, _ALIGNED, _COUNT = 1 << 60, 4096, 8
#: Pages of one rank, and how many of them are mapped together.
_MOST, _WINDOW = 1 << 24, 16


class Page(NamedTuple):
    """Memory of a board, the object that unmaps it together with the pages beside it, its length, and the number of its
    ranks."""

    address: Any
    window: Any
    bytes: int
    ranks: int

    def drop(self) -> None:
        """This rank does not use it again."""
        lib.ucch_shared_drop(self.address, self.bytes, self.ranks)


class Pages:
    """Pages of a job's ranks of one host, of which there are ``here``. They lie in ``file``.

    A page is found by the number of the communicator that has it first, and one of its ranks, as communicators with
    equal numbers have no rank in common.
    """

    def __init__(self, file: int, here: int) -> None:
        self._file = file
        self._stride = -(-(int(lib.ucch_board_bytes(here)) + _COUNT) // _ALIGNED) * _ALIGNED
        #: Number of the window that was used last, and its memory.
        self._last: tuple[int, Any] = -1, None

    def page(self, number: int, rank: int, ranks: int) -> Page:
        """A page, which is zero, for communicator ``number`` with this rank of the job; ``ranks`` of its ranks are
        here."""
        window, place = divmod(rank * _MOST + number % _MOST, _WINDOW)
        which, memory = self._last
        if which != window:
            bytes_ = _WINDOW * self._stride
            memory = lib.ucch_shared_map(self._file, window * bytes_, bytes_)
            if memory == ffi.NULL:
                raise MemoryError("no memory for the arrival board")
            unmap = lib.ucch_shared_unmap  # when Python is finalized module names may vanish before the page
            memory = ffi.gc(memory, lambda memory: unmap(memory, bytes_))
            self._last = window, memory
        return Page(memory + place * self._stride, memory, self._stride, ranks)

    def close(self) -> None:
        """Take no more pages."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._last = -1, (-1, None)


def share(mpi: Any, everyone: Sequence[Facts], rank: int) -> tuple[Pages | None, list[int]]:
    """Share a file among the ranks of each host; collective over ``mpi``.

    Returns (pages, host numbers by rank). There are no pages where a rank is alone. Where one cannot open the file of
    its host no rank uses it, and each counts as alone on a host: a rank that is not seen would look as if it had not
    arrived.
    """
    hosts = [facts.host.memory for facts in everyone]
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    offers, file = mpi.allgather(_anonymous() if rank == here[0] and len(here) > 1 else -1), -1
    if rank == here[0]:
        file = offers[rank]
    elif offers[here[0]] >= 0:
        file = lib.ucch_shared_open(everyone[here[0]].pid, offers[here[0]])
    lacking = {host for host, seen in zip(hosts, mpi.allgather(file >= 0), strict=True) if not seen}
    if file >= 0 and hosts[rank] in lacking:
        os.close(file)
        file = -1
    found = Pages(file, len(here)) if file >= 0 else None
    return found, list(numbered((host, r if host in lacking else -1) for r, host in enumerate(hosts)))


def _anonymous() -> int:
    """A new file without a name, which needs no room in ``/dev/shm`` and is freed with its last user; -1 on failure."""
    try:
        file = os.memfd_create("ucc_hetero")
        os.truncate(file, _FILE)
    except OSError as error:
        log.log("mem").warning(
            "ranks of this host share no memory, so that calls are slower: a sparse file cannot be made (%s). "
            "Cure: ulimit -f unlimited", error,
        )  # fmt: skip
        return -1
    return file
