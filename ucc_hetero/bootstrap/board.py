"""Arrivals at calls, and ranks that left or died: the Python side of the arrival board (base/board.c).

The ranks of a communicator that share a host's memory share a page. libucc neither notices a dead peer nor reliably
reports a mismatched call; with the board a waiting rank finds both within milliseconds and says which rank it was.
"""

from __future__ import annotations

import math
import os
import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.topology import numbered

#: The largest prime of ten bits: names of collectives, datatypes and operations all differ by it.
_SALTS = 1021


#: The boards of all communicators of this process.
_boards: weakref.WeakSet[Board] = weakref.WeakSet()


class Page(NamedTuple):
    """A page for a board, as its process offers it to the other processes of its host; ``file`` is negative for
    none."""

    pid: int
    file: int


#: The file that this process offers, as long as no communicator has taken it, and its bytes.
_offered: list[tuple[int, int]] = []


def offer(size: int) -> Page:
    """The page that this process offers its next communicator, of up to ``size`` ranks."""
    wanted = int(lib.ucch_board_bytes(size)) if size > 1 else 0
    if _offered and _offered[0][1] < wanted:
        take_back()
    if wanted and not _offered and (file := _anonymous(wanted)) >= 0:
        _offered.append((file, wanted))
    return Page(os.getpid(), _offered[0][0] if wanted and _offered else -1)


def take_back() -> None:
    """Offer the page no more: a communicator has it."""
    while _offered:
        os.close(_offered.pop()[0])


class Board:
    """One communicator's board, of this ``rank``; ``groups[r]`` is equal for ranks that share memory.

    ``pages``: what each rank offers; the ranks of a host take that of their first one, or the ``spare`` one that an
    earlier communicator of theirs has left. It can be used once all ranks have told each other whether they have it
    (:meth:`join`).
    """

    def __init__(self, rank: int, groups: Sequence[Hashable], pages: Sequence[Page], spare: Any = None) -> None:
        self._rank, self._groups = rank, groups
        #: Communicator ranks with a slot on this host's page, ascending.
        self.ranks = [r for r, group in enumerate(groups) if group == groups[rank]]
        self._pointer: Any = spare or ffi.NULL
        #: True if the ranks of this host see each other here.
        self.shared = False
        self._pages, page = pages, pages[self.ranks[0]]
        #: True if this process has offered it.
        self._mine = not spare and page.pid == os.getpid()
        if not spare and page.file >= 0 and len(self.ranks) > 1:
            size = int(lib.ucch_board_bytes(len(self.ranks)))
            self._pointer = _mapped(f"/proc/{page.pid}/fd/{page.file}".encode(), size)
        #: True if this rank has the page; not if it is alone on its host.
        self.mapped = bool(self._pointer != ffi.NULL)
        #: The engine's side of it.
        self.native: Any = None
        #: The communicator's number in what is recorded, and in messages; the names of its ranks' processes.
        self.number = self.id = 0
        self.processes: list[str] = []

    def join(self, mapped: Sequence[bool]) -> None:
        """Begin to use it, where all ranks of the host have it: one without would look as if it never arrived."""
        rank, groups = self._rank, self._groups
        apart = {group for group, well in zip(groups, mapped, strict=True) if not well}
        #: The host of each rank, from 0 on: those who share a page are on one.
        self.hosts = list(numbered((group, r if group in apart else -1) for r, group in enumerate(groups)))
        if not all(mapped[r] for r in self.ranks):
            self._pointer = ffi.NULL
        self.shared = self._pointer != ffi.NULL
        if self.shared and self._mine:
            take_back()
        far = max(self.hosts) > 0
        if far and not self.shared:  # what it calls is compared all the same
            self.ranks, self._pointer = [rank], _mapped(ffi.NULL, int(lib.ucch_board_bytes(1)))
        mine = self.ranks.index(rank)
        self.native = lib.ucch_board_new(self._pointer, len(self.ranks), mine, ffi.new("int[]", self.ranks))
        _boards.add(self)
        if self.native == ffi.NULL or (far and lib.ucch_board_reach(self.native, len(groups))):
            raise MemoryError("no memory for the arrival board")
        if self.shared:
            lib.ucch_board_expect(self.native, [self._pages[r].pid for r in self.ranks])

    def rank_of(self, slot: int) -> int:
        """The communicator rank of an error's ``peer``: a slot, or -2 less the rank of one elsewhere; -1 for none."""
        if slot < -1:
            return -2 - slot
        return self.ranks[slot] if 0 <= slot < len(self.ranks) else -1

    def label(self, rank: int, seq: int) -> str:
        """Label of ``rank``'s ``seq``-th call, as far as it is known here."""
        if rank not in self.ranks:
            return self.difference(seq)[2]
        text = ffi.new("char[]", int(lib.UCCH_LABEL_BYTES))
        if lib.ucch_board_label(self.native, self.ranks.index(rank), seq, text):
            return ""
        return str(ffi.string(text).decode(errors="replace"))

    def difference(self, seq: int) -> tuple[int, int, str]:
        """The first call up to ``seq`` that a rank of another host made differently, the rank, and what it called; or
        0."""
        rank, text = ffi.new("int *"), ffi.new("char[]", int(lib.UCCH_LABEL_BYTES))
        first = int(lib.ucch_board_differs(self.native, rank, text))
        return (first, rank[0], ffi.string(text).decode(errors="replace")) if first <= seq else (0, -1, "")

    def parted(self, seq: int) -> tuple[int, int]:
        """The first call before ``seq`` that a rank of this host made differently, and the rank; or 0.

        Of the last 64, which the page has (base/board.c).
        """
        for earlier in range(max(1, seq - 63), seq):
            if (slot := int(lib.ucch_board_mismatch(self.native, earlier))) >= 0:
                return earlier, self.ranks[slot]
        return 0, -1

    def missing(self, seq: int) -> list[int]:
        """Ranks that are known not to have entered call ``seq``: those of this host, and some of other hosts."""
        if self._pointer == ffi.NULL:
            return []
        slots = range(len(self.ranks))
        here = [self.ranks[i] for i in slots if lib.ucch_board_seq(self.native, i) < seq]
        return sorted({*here, *(int(lib.ucch_board_behind(self.native, i, seq)) for i in slots)} - {-1})

    def elsewhere(self, rank: int) -> str:
        """A call of another communicator in which a rank is known to be, and this one is not; empty for none."""
        name, found = self.processes[rank] if self.processes else "", []
        for other in list(_boards):
            if other is self or not other.native or name not in other.processes:
                continue
            at = other.processes.index(name)
            if other.fate(at) != lib.UCCH_THERE:  # it has given that communicator up
                continue
            seq, label, waits = other._under_way(at)
            if seq >= other.next:
                found.append((math.inf if waits < 0 else waits, other.id, seq, label))
        if not found:
            return ""
        waits, number, seq, label = min(found)  # the latest: one that failed may lie there for long
        since = f" since {waits:.3g} s" if waits < math.inf else ""
        return f"rank {rank} is in call {seq} of communicator {number} ({label}){since}"

    def _under_way(self, rank: int) -> tuple[int, str, float]:
        """The last call of a rank of this host, or the one in which another host's waits for long; 0 where that is not
        known. What it is, and since how many seconds (-1: not known)."""
        if self.shared and rank in self.ranks:
            slot = self.ranks.index(rank)
            seq = int(lib.ucch_board_seq(self.native, slot))
            return seq, self.label(rank, seq), float(lib.ucch_board_waits(self.native, slot))
        text, seconds = ffi.new("char[]", int(lib.UCCH_LABEL_BYTES)), ffi.new("double *", -1.0)
        seq = int(lib.ucch_board_waiter(self.native, rank, text, seconds))
        return seq, str(ffi.string(text).decode(errors="replace")), float(seconds[0])

    def fate(self, rank: int) -> int:
        """How a rank is: ``UCCH_THERE``, ``UCCH_LEFT``, or in which way it is gone."""
        peer = self.ranks.index(rank) if rank in self.ranks else -2 - rank
        here = int(lib.ucch_board_fate(self.native, peer)) if self.native else 0
        return here or (int(lib.ucch_board_fate(self.native, -2 - rank)) if self.native else 0)

    def dead_ranks(self) -> list[int]:
        """Ranks that are known to be gone without having left: dead, stopped, or on a host that is out of reach."""
        return [rank for rank in range(len(self.hosts)) if self.fate(rank) >= lib.UCCH_DIED]

    def publish(self, label: str) -> tuple[int, int]:
        """Enter a call that the native engine does not run; returns its number and that of its record."""
        seq = self._write(lib.ucch_board_publish, label)
        text = label.encode()
        number = lib.ucch_board_signature(text)
        return seq, int(lib.ucch_board_record(self.native, lib.UCCH_RECORD_MPI, seq, number, text))

    def announce(self, label: str, *, as_any: bool = False) -> int:
        """Say what the next call will be while it is being prepared; returns the number it will have. ``as_any``: it
        is set up, to be made later, and the next one may be any but for a refused one."""
        return self._write(lib.ucch_board_announce, label, int(lib.UCCH_ANY_CALL) if as_any else 0)

    def _write(self, how: Any, label: str, number: int = 0) -> int:
        number = number or lib.ucch_board_signature(label.encode())
        text = label.encode()[: int(lib.UCCH_LABEL_BYTES) - 1].ljust(int(lib.UCCH_LABEL_BYTES), b"\0")
        lib.ucch_lock()
        seq = int(how(self.native, number, text))
        lib.ucch_unlock()
        return seq

    def refuse(self, why: str) -> None:
        """Say that this rank cannot make its next call. Where another rank makes it, that ends the communicator."""
        lib.ucch_board_refuse(self.native, why.encode()[: int(lib.UCCH_REFUSAL_BYTES) - 1])

    def refusal(self) -> tuple[int, int, str] | None:
        """The refused call that has ended the communicator, the rank that refused it, and why; None while there is
        none."""
        found = ffi.new("ucch_refusal *")
        if self.native is None or not lib.ucch_board_refusal(self.native, found):
            return None
        return int(found.call), int(found.rank), ffi.string(found.text).decode(errors="replace")

    @property
    def next(self) -> int:
        """The number of the call to come."""
        return int(lib.ucch_board_next(self.native))

    def given_up(self, rank: int) -> int:
        """The first call that is known to have failed on a rank; 0 for none."""
        return int(lib.ucch_board_given_up(self.native, self.ranks.index(rank) if rank in self.ranks else -2 - rank))

    def verdict(self, seq: int) -> tuple[int, int]:
        """Why call ``seq`` comes to nothing, as far as can be seen: a status or 0, and an error's ``peer``."""
        peer = ffi.new("int *")
        return int(lib.ucch_board_verdict(self.native, seq, peer)), int(peer[0])

    def dead(self) -> int:
        """A rank that is gone although it had not left, -1 for none."""
        return next(iter(self.dead_ranks()), -1)

    def leave(self) -> None:
        """Tell the other ranks that this one makes no more calls."""
        lib.ucch_board_leave(self.native)

    def close(self, *, clear: bool = False) -> Any:
        """Release the board, which no program may use any more.

        Args:
            clear: All ranks have left it, and its page is to be used again.

        Returns:
            The page, where it is shared and this rank has cleared its part; else None.
        """
        native, self.native, page = self.native, None, self._pointer if clear and self.shared else None
        if native:
            if page is not None:
                lib.ucch_board_clear(native)
            lib.ucch_board_free(native)
        self._pointer = ffi.NULL
        return page


def meet(everyone: Sequence[Facts], rank: int) -> None:
    """Know the processes on the host of ``rank``, all alive: the number of one that dies may be another one's then."""
    for r in _near(everyone, rank):
        lib.ucch_process_meet(everyone[r].pid)


def ended(everyone: Sequence[Facts], rank: int) -> list[int]:
    """Ranks on the host of ``rank`` whose processes have ended, with a board or without one."""
    return [r for r in _near(everyone, rank) if lib.ucch_process_ended(everyone[r].pid)]


def _near(everyone: Sequence[Facts], rank: int) -> list[int]:
    here = everyone[rank].host.memory
    return [r for r, facts in enumerate(everyone) if facts.pid and facts.host.memory == here]


def _mapped(path: Any, size: int) -> Any:
    """The page of a path, or without one of this process alone, and no descriptor for it; NULL where there is none."""
    page = lib.ucch_board_map(path, size)
    return page if page == ffi.NULL else ffi.gc(page, lambda page: lib.ucch_board_unmap(page, size))


def _anonymous(size: int) -> int:
    """A new file without a name, which needs no room in ``/dev/shm`` and goes with its last user; -1 for none."""
    try:
        file = os.memfd_create("ucc_hetero")
        os.truncate(file, size)
    except OSError:
        return -1
    return file


def salt(label: str) -> int:
    """A number below 1,021 by which tags between hosts differ where calls do.

    Always where they differ in one thing: collective, datatype, operation, root, or a count (unless by a multiple of
    1,021); by chance, 1,020 times in 1,021, where they differ in several.
    """
    value = 0
    for word in label.replace("[", " ").split():
        number = word.rpartition("=")[2].rstrip("]")
        value = (value * 31 + (int(number) if number.isdigit() else zlib.crc32(word.encode()))) % _SALTS
    return value
