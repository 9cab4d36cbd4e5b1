"""Arrivals at calls, and ranks that left or died: the Python side of the arrival board (base/board.c).

The ranks of a communicator that share a host's memory share a page. libucc neither notices a dead peer nor reliably
reports a mismatched call; with the board a waiting rank finds both within milliseconds and says which rank it was.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from ..native.libraries import ffi, lib

__all__ = ["Board", "signature"]

_FOLDER = "/dev/shm"


class Board:
    """One communicator's board. Collective to create over ``comm`` (mpi4py); ``groups`` says who shares memory."""

    def __init__(self, comm: Any, groups: list[object]) -> None:
        rank = comm.Get_rank()
        #: Communicator ranks with a slot on this host's page, ascending.
        self.ranks = [r for r, group in enumerate(groups) if group == groups[rank]]
        self._memory: mmap.mmap | None = None
        first = self.ranks[0]
        size = int(lib.ucch_board_bytes(len(self.ranks)))
        name = ""
        if rank == first and len(self.ranks) > 1:
            name = self._create(size)
        # Everyone takes part in both exchanges, also ranks that are alone on their host.
        names = comm.allgather(name)
        if len(self.ranks) > 1 and names[first]:
            self._map(names[first], size)
        mapped = comm.allgather(self._memory is not None)
        if rank == first and name:
            os.unlink(name)
        # One rank without the page would look as if it never arrived: then nobody of this host uses it.
        if not all(mapped[r] for r in self.ranks):
            self._memory = None
        self._pointer = ffi.from_buffer(self._memory) if self._memory is not None else ffi.NULL
        mine = self.ranks.index(rank)
        self.native = lib.ucch_board_new(self._pointer, len(self.ranks), mine, ffi.new("int[]", self.ranks))
        if self.native == ffi.NULL:
            raise MemoryError("no memory for the arrival board")

    @staticmethod
    def _create(size: int) -> str:
        path = f"{_FOLDER}/ucch-{os.getpid()}-{os.urandom(6).hex()}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError:
            return ""
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.unlink(path)
            return ""
        finally:
            os.close(descriptor)
        return path

    def _map(self, path: str, size: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return
        try:
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    @property
    def shared(self) -> bool:
        """Whether the ranks of this host see each other here."""
        return self._memory is not None

    def rank_of(self, slot: int) -> int:
        """The communicator rank of an error's ``peer``: a slot, or -2 less the rank of one elsewhere; -1 for none."""
        if slot < -1:
            return -2 - slot
        return self.ranks[slot] if 0 <= slot < len(self.ranks) else -1

    def label(self, rank: int, seq: int) -> str:
        """Label of ``rank``'s ``seq``-th call, as far as this host's page remembers."""
        if rank not in self.ranks:
            return ""
        text = ffi.new("char[]", int(lib.UCCH_LABEL_BYTES))
        if lib.ucch_board_label(self.native, self.ranks.index(rank), seq, text):
            return ""
        return str(ffi.string(text).decode(errors="replace"))

    def missing(self, seq: int) -> list[int]:
        """Ranks of this host that have not entered call ``seq``."""
        if self._memory is None:
            return []
        return [r for i, r in enumerate(self.ranks) if lib.ucch_board_seq(self.native, i) < seq]

    def publish(self, label: str) -> int:
        """Enter a call that the native engine does not run; returns its number."""
        return self._write(lib.ucch_board_publish, label)

    def announce(self, label: str) -> int:
        """Say what the next call will be while it is being prepared; returns the number it will have."""
        return self._write(lib.ucch_board_announce, label)

    def _write(self, how: Any, label: str) -> int:
        text = label.encode()[: int(lib.UCCH_LABEL_BYTES) - 1].ljust(int(lib.UCCH_LABEL_BYTES), b"\0")
        number = signature(label)
        lib.ucch_lock()
        seq = int(how(self.native, number, text))
        lib.ucch_unlock()
        return seq

    def refusal(self, seq: int) -> Any:
        """The ``ucch_refusal`` because of which call ``seq`` comes to nothing; None if none is remembered."""
        found = ffi.new("ucch_refusal *")
        return found if lib.ucch_board_refused(self.native, 0, seq, found) else None

    def dead(self) -> int:
        """A rank of this host whose process is gone although it had not left, -1 for none."""
        for slot, rank in enumerate(self.ranks if self.native and self.shared else ()):
            if lib.ucch_board_fate(self.native, slot) == lib.UCCH_DIED:
                return rank
        return -1

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls."""
        lib.ucch_board_leave(self.native)

    def close(self) -> None:
        """Release the page. No program may use the board any more."""
        if self.native:
            native, self.native = self.native, None
            lib.ucch_board_free(native)
            self._pointer = ffi.NULL
            self._memory = None


def signature(label: str) -> int:
    """FNV-1a: equal on every rank for equal calls, where Python's own string hash is salted per process."""
    value = 0xCBF29CE484222325
    for byte in label.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
