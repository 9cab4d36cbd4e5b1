"""Calls that ranks have entered, and ranks that left or died: the Python side of the arrival board (base/board.c).

The ranks of a communicator that share a host's memory share a page. libucc neither notices a dead peer nor reliably
reports calls that differ; with the board a waiting rank finds both within milliseconds, and knows which rank it was.
"""

from __future__ import annotations

import math
import threading
import zlib
from typing import Any

from ..bindings.handle import Present, locked
from ..native.libraries import c_text, ffi, lib
from .known import Known
from .pages import Page

#: The largest prime below 1,024: salts of calls that differ in one name or count differ.
_SALTS = 1021

#: The boards of all communicators of this process.
_boards: Present[Board] = Present()


class Board:
    """The arrival board of a communicator, whose ranks are ``known``; ``page``: what those of this host share, if there
    are others. ``use`` increases with each communicator on a page."""

    def __init__(self, known: Known, page: Page | None, use: int) -> None:
        #: Communicator ranks with a slot on this host's page, ascending; the names of all ranks' processes; and the
        #: host of each rank.
        self.ranks, self.processes, self.hosts = known.near, known.processes, known.hosts
        self._page, self._mine, self._use = page, known.near.index(known.rank), use
        #: True if the ranks of this host see each other here; and if there are no other ranks.
        self.shared = page is not None
        self.shows_all = self.shared and not known.far
        #: Held while a call of another communicator, of any thread, looks at this board, and before it is freed.
        self._looked_at = threading.RLock()
        #: The communicator's number in records, and in messages.
        self.number = self.id = 0
        #: The engine's board.
        memory = ffi.NULL if page is None else page.address
        self.native: Any = lib.ucch_board_new(memory, len(self.ranks), self._mine, self.ranks, use)
        _boards.add(self)
        if self.native == ffi.NULL or (known.far and lib.ucch_board_add_far(self.native, known.size)):
            raise MemoryError("no memory for the arrival board")
        if self.shared:
            lib.ucch_board_expect(self.native, known.pids)

    def rank_of(self, slot: int) -> int:
        """The communicator rank of an error's ``peer``: a slot, or -2 - rank for a rank of another host; -1: none."""
        if slot < -1:
            return -2 - slot
        return self.ranks[slot] if 0 <= slot < len(self.ranks) else -1

    def label(self, rank: int, seq: int) -> str:
        """Label of ``rank``'s call ``seq``; empty if it is not known here."""
        if rank not in self.ranks:
            return self.difference(seq)[2]
        text = _room()
        return "" if lib.ucch_board_label(self.native, self.ranks.index(rank), seq, text) else c_text(text)

    def difference(self, seq: int) -> tuple[int, int, str]:
        """(first call up to ``seq`` that a rank of another host made differently, the rank, its label); (0, -1, "") if
        none."""
        rank, text = ffi.new("int *"), _room()
        first = int(lib.ucch_board_differs(self.native, rank, text))
        return (first, rank[0], c_text(text)) if first <= seq else (0, -1, "")

    def parted(self, seq: int) -> tuple[int, int]:
        """(first of the last 64 calls before ``seq`` that a rank of this host made differently, the rank); (0, -1) if
        none."""
        for earlier in range(max(1, seq - 63), seq):
            if (slot := int(lib.ucch_board_mismatch(self.native, earlier))) >= 0:
                return earlier, self.ranks[slot]
        return 0, -1

    def missing(self, seq: int) -> list[int]:
        """Ranks known not to have entered call ``seq``: of this host all, of other hosts some."""
        slots = range(len(self.ranks))
        here = [self.ranks[i] for i in slots if lib.ucch_board_seq(self.native, i) < seq]
        return sorted({*here, *(int(lib.ucch_board_behind(self.native, i, seq)) for i in slots)} - {-1})

    def elsewhere(self, rank: int) -> str:
        """The call of another communicator in which a rank is known to be, and this one is not; empty if none is
        known."""
        name = self.processes[rank] if self.processes else ""
        found = [call for other in _boards.all() if other is not self and (call := other._awaited_by(name))]
        if not found:
            return ""
        waits, number, seq, label = min(found)  # the latest: a failed call may stay there for long
        so_long = f" for {waits:.3g} s" if waits < math.inf else ""
        return f"rank {rank} is in call {seq} of communicator {number} ({label}){so_long}"

    def _awaited_by(self, name: str) -> tuple[float, int, int, str] | None:
        """The call that a process is in, and this one is not: (seconds, communicator, number, label)."""
        with self._looked_at:
            if not self.native or name not in self.processes:
                return None
            at = self.processes.index(name)
            if self.fate(at) != lib.UCCH_THERE:  # it has left this communicator or failed in it
                return None
            seq, label, waits = self._under_way(at)
            return (math.inf if waits < 0 else waits, self.id, seq, label) if seq >= self.next else None

    def _under_way(self, rank: int) -> tuple[int, str, float]:
        """The call that a rank is in: (number or 0, label, seconds or -1); for a rank of another host only if it has
        waited for long."""
        if self.shared and rank in self.ranks:
            slot = self.ranks.index(rank)
            seq = int(lib.ucch_board_seq(self.native, slot))
            return seq, self.label(rank, seq), float(lib.ucch_board_waits(self.native, slot))
        text, seconds = _room(), ffi.new("double *", -1.0)
        seq = int(lib.ucch_board_waiter(self.native, rank, text, seconds))
        return seq, c_text(text), float(seconds[0])

    def fate(self, rank: int) -> int:
        """State of a rank: ``UCCH_THERE``, ``UCCH_LEFT``, or why it is gone."""
        peer = self.ranks.index(rank) if rank in self.ranks else -2 - rank
        here = int(lib.ucch_board_fate(self.native, peer)) if self.native else 0
        return here or (int(lib.ucch_board_fate(self.native, -2 - rank)) if self.native else 0)

    def cut(self, waited: float) -> int:
        """A peer (as in errors) to whose host a link is cut, if a call has ``waited`` long enough to probe links; -1:
        none."""
        peer = ffi.new("int *", -1)
        lib.ucch_board_cut(self.native, waited, peer)
        return int(peer[0])

    def cuts_off(self, rank: int, waited: float) -> bool:
        """True if cut links keep a rank (-1: every rank) from sending, for an operation that has ``waited`` seconds."""
        if rank < 0:
            return bool(lib.ucch_board_is_cut_off(self.native, waited))
        return rank not in self.ranks and bool(lib.ucch_board_cut(self.native, waited, ffi.new("int *", -2 - rank)))

    def is_cut(self, rank: int) -> bool:
        """True if a link to a rank's host is cut, or libucp has given up the connection with it."""
        return self.cuts_off(rank, math.inf)

    def link_to(self, rank: int) -> str:
        """The cut link to a rank's host, as the addresses of its ends; empty if none is cut."""
        return c_text(lib.ucch_board_link(self.native, rank))

    def dead_ranks(self) -> list[int]:
        """Ranks known to be gone without having left: dead, stopped, or on an unreachable host."""
        return [rank for rank in range(len(self.hosts)) if self.fate(rank) >= lib.UCCH_DIED]

    def publish(self, label: str) -> tuple[int, int]:
        """Enter a call that does not run in the engine. Returns its number and that of its record."""
        seq = self._write(lib.ucch_board_publish, label)
        text = label.encode()
        number = lib.ucch_board_signature(text)
        return seq, int(lib.ucch_board_record(self.native, lib.UCCH_RECORD_MPI, seq, number, text))

    def announce(self, label: str, *, as_any: bool = False) -> int:
        """Publish the next call while it is prepared, and return its number; ``as_any``: other calls may come before
        it."""
        return self._write(lib.ucch_board_announce, label, int(lib.UCCH_ANY_CALL) if as_any else 0)

    def _write(self, how: Any, label: str, number: int = 0) -> int:
        number = number or lib.ucch_board_signature(label.encode())
        text = label.encode()[: int(lib.UCCH_LABEL_BYTES) - 1].ljust(int(lib.UCCH_LABEL_BYTES), b"\0")
        return int(locked(how, self.native, number, text))

    def refuse(self, why: str) -> None:
        """Refuse this rank's next call. If another rank makes it, the communicator ends."""
        lib.ucch_board_refuse(self.native, why.encode()[: int(lib.UCCH_REFUSAL_BYTES) - 1])

    def refusal(self) -> tuple[int, int, str] | None:
        """(refused call that has ended the communicator, rank that refused it, why); None if there is none."""
        found = ffi.new("ucch_refusal *")
        if self.native is None or not lib.ucch_board_refusal(self.native, found):
            return None
        return int(found.call), int(found.rank), c_text(found.text)

    @property
    def next(self) -> int:
        return int(lib.ucch_board_next(self.native))

    def given_up(self, rank: int) -> int:
        """The first call known to have failed on a rank; 0: none."""
        return int(lib.ucch_board_given_up(self.native, self.ranks.index(rank) if rank in self.ranks else -2 - rank))

    def verdict(self, seq: int) -> tuple[int, int]:
        """Why call ``seq`` fails, as far as is visible now: (status or 0, an error's ``peer``)."""
        peer = ffi.new("int *")
        return int(lib.ucch_board_verdict(self.native, seq, peer)), int(peer[0])

    def dead(self) -> int:
        """A rank that is gone without having left; -1: none."""
        return next(iter(self.dead_ranks()), -1)

    def give_back(self) -> None:
        """Tell the other ranks that this one frees the communicator; its page shows all of them."""
        assert self._page is not None
        lib.ucch_board_give_back(self._page.address, self._mine, self._use, False)

    def freed_by(self) -> list[int]:
        """Ranks that have freed the communicator, as far as this host's page shows."""
        slots = enumerate(self.ranks) if self.shared else ()
        return [rank for i, rank in slots if lib.ucch_board_given_back(self.native, i)]

    def leave(self) -> None:
        """Tell the other ranks that this one makes no more calls, unless another thread has freed the board."""
        with self._looked_at:
            if self.native:
                lib.ucch_board_leave(self.native)

    def close(self, *, together: bool) -> Page | None:
        """Free the board, which no program may use any more. ``together``: all ranks have left it; then its page, which
        is returned, may be used again."""
        with self._looked_at:
            native, self.native, page, self._page = self.native, None, self._page, None
        if native and together and page is not None:
            lib.ucch_board_clear(native)
        if native:
            lib.ucch_board_free(native)
        return page if together else None


def _room() -> Any:
    return ffi.new("char[]", int(lib.UCCH_LABEL_BYTES))


def salt(label: str) -> int:
    """A number below 1,021 in tags between hosts. It differs for calls that differ in one word of their label; for
    calls that differ in more it is equal only by chance."""
    value = 0
    for word in label.replace("[", " ").split():
        number = word.rpartition("=")[2].rstrip("]")
        value = (value * 31 + (int(number) if number.isdigit() else zlib.crc32(word.encode()))) % _SALTS
    return value
