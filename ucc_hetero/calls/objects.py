"""Collectives of Python objects: their pickles move by one call of this package if all are short, else by two.

The first call has their lengths, and the pickles themselves if they are short.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..native.libraries import ffi, lib
from .arguments import CallSpec, root_of
from .runner import Runner

#: Bytes of all slots of a rank, one for each rank that gets a pickle; and of the header before a pickle: its length,
#: and a bit that is set if this rank has any pickle that is longer than a slot.
_BYTES, _HEAD = int(lib.UCCH_PARCEL_BYTES), 8
#: The least room for a pickle; and for one that goes to all of more ranks than the arrival board carries data for.
_LEAST, _FEW = 24, 64


class _Slots(NamedTuple):
    """Memory of an exchange: what is sent, what is received, and their addresses."""

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
    def __init__(self, runner: Runner) -> None:
        from mpi4py import MPI

        self._runner, self._pickle = runner, MPI.pickle
        self._slots: dict[tuple[str, int], _Slots] = {}
        self._room = {
            "bcast": _BYTES,
            "allgather": _BYTES if runner.size <= lib.UCCH_PARCEL_RANKS else _FEW,
            **dict.fromkeys(("alltoall", "scatter"), max(_LEAST, _BYTES // runner.size)),
        }

    def exchange(self, what: str, name: str, things: Iterable[Any], root: Any = -1) -> list[Any]:
        """Exchange objects by the collective ``name``, for a call that the ranks know as ``what``.

        ``name`` is ``bcast``, ``allgather``, ``alltoall`` or ``scatter``, and ``things`` are what this rank gives: one
        object, or one for each rank. ``root`` alone gives, or needs what comes; -1 for none. Returns the objects that
        have come, in the order of the ranks; nothing where only the root needs them.
        """
        runner, room = self._runner, self._room[name]
        with runner.refusing:
            root = root_of(CallSpec(what, None, None, None, root), runner.size, runner.rank)
            gives = name == "allgather" or root in (-1, runner.rank)
            given = [self._pickle.dumps(thing) for thing in things] if gives else []
            if gives and name in ("alltoall", "scatter") and len(given) != runner.size:
                raise ValueError(f"{what} on rank {runner.rank}: {len(given)} objects for {runner.size} ranks")
        slots = self._slots.get((name, len(given)))
        if slots is None:
            came = runner.size if name in ("allgather", "alltoall") else 1
            slots = self._slots[name, len(given)] = _Slots.of(room, len(given) if name != "bcast" else 0, came)
        self._fill(slots.send if name != "bcast" else slots.recv, given, room)
        label = what + " of objects" * what.islower() + f" root={root}" * (root >= 0)  # not of Dup and the like
        call = CallSpec(name, slots.send, slots.recv, None, -1 if name == "allgather" else root)
        runner.run_labelled(label, call, slots.send_at, slots.recv_at)
        found = self._taken(slots.recv.tobytes(), room)
        pickles = self._long(name, given, found, root) if isinstance(found, tuple) else found
        return (
            [self._pickle.loads(each) for each in pickles] if name != "allgather" or root in (-1, runner.rank) else []
        )

    def _fill(self, memory: Any, given: list[bytes], room: int) -> None:
        longer = max(map(len, given), default=0) > room - _HEAD
        for i, pickled in enumerate(given):
            at, length = i * room, len(pickled)
            memory[at : at + _HEAD].view(np.int64)[0] = length << 1 | longer
            if not longer:
                memory.data[at + _HEAD : at + _HEAD + length] = pickled

    def _taken(self, data: bytes, room: int) -> list[bytes] | tuple[int, ...]:
        """The pickles that have come; or their lengths, on all ranks, if one rank has a longer one for any rank."""
        heads = [int.from_bytes(data[at : at + _HEAD], "little") for at in range(0, len(data), room)]
        if any(head & 1 for head in heads):
            return tuple([head >> 1 for head in heads])
        starts = range(_HEAD, len(data), room)
        return [data[at : at + (head >> 1)] for at, head in zip(starts, heads, strict=True)]

    def _long(self, name: str, given: list[bytes], lengths: tuple[int, ...], root: int) -> list[memoryview]:
        """The pickles of ``lengths``, one behind the other in one call."""
        runner = self._runner
        with runner.refusing:  # the memory may be missing
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
