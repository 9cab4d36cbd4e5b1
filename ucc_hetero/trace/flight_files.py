"""Parsing of flight record files. Pure functions."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAGIC, HEADER = b"UCCHFLT1", 4096
#: Layout of the native records (``cffi_build/api/api.h``), and of the header before them (``base/flight.c``).
RECORD = np.dtype(
    [
        *((name, "<u8") for name in ("called", "started", "ended", "seq", "bytes")),
        *(("comm", "<u4"), ("peer", "<i4"), ("tag", "<i4"), ("status", "<i4"), ("kind", "u1"), ("own", "u1")),
        *(("pad", "<u2"), ("more", "<u4"), ("signature", "<u8"), ("label", "S48"), ("spare", "<u8")),
    ]
)
_FIELDS = struct.Struct("<8s3Q2q7Q")
_MOST_RECORDS = 1 << 20
#: Reason why a file was written, by number.
CAUSES = ("", "on request", "by a signal", "because a call failed")
_KINDS = 11


class Comm(NamedTuple):
    """A communicator: its number in tags, how often these have wrapped around (``time``), its ``ranks`` as world ranks,
    and this rank's index among them."""

    number: int
    time: int
    ranks: tuple[int, ...]
    mine: int

    @property
    def key(self) -> tuple[int, int, tuple[int, ...]]:
        """A key that is equal on all ranks of the communicator."""
        return self[:3]


@dataclass(frozen=True, slots=True)
class Dump:
    """The recording of one rank. ``lost``: operations that were overwritten; ``now``, ``wall``: ns at the time of
    writing, on the rank's own clock and as time of day."""

    rank: int
    job: str
    about: dict[str, Any]
    comms: dict[int, Comm]
    records: np.ndarray[Any, np.dtype[Any]]
    lost: int
    now: int
    wall: int
    cause: int
    stack: str


class _Header(NamedTuple):
    magic: bytes
    capacity: int
    written: int
    record: int
    pid: int
    rank: int
    now: int
    wall: int
    about: int
    stack: int
    dumps: int
    cause: int
    signal: int

    @classmethod
    def of(cls, data: bytes) -> _Header:
        if len(data) < HEADER:
            raise ValueError(f"it has {len(data)} bytes, fewer than the header of a flight record")
        header = cls(*_FIELDS.unpack_from(data))
        if header.magic != MAGIC:
            raise ValueError("it is not a flight record of this version")
        n = header.capacity
        if not 0 < n <= _MOST_RECORDS or n & (n - 1) or header.record != RECORD.itemsize:
            raise ValueError(f"it says that it has {n} records of {header.record} bytes, which cannot be")
        return header


def header_of(ring: bytes) -> tuple[int, int, int]:
    """(number of times the process has written its ring to a file, signal for that, bytes of its stack at that
    time)."""
    header = _Header.of(ring)
    return header.dumps, header.signal, header.stack


def assemble(ring: bytes, about: bytes, stack: bytes, state: str) -> bytes:
    """The file that a process of this host would write now, from its memory. ``state``: what it is blocked by."""
    if state:
        about += json.dumps({"state": state}).encode() + b"\n"
    header = _Header.of(ring)._replace(about=len(about), stack=len(stack), cause=1)
    header = header._replace(now=time.monotonic_ns(), wall=time.time_ns())
    return _FIELDS.pack(*header) + ring[_FIELDS.size :] + about + stack


def parse(data: bytes) -> Dump:
    """Parse a file. ``ValueError`` says what is wrong if it is truncated, or is no flight record."""
    header = _Header.of(data)
    ring = HEADER + header.capacity * RECORD.itemsize
    due = ring + header.about + header.stack
    if len(data) != due:
        raise ValueError(f"it has {len(data)} bytes of {due}: it was cut off, or changed")
    records, lost = _ordered(np.frombuffer(data[HEADER:ring], RECORD), header.written)
    about, comms = _about(data[ring : ring + header.about])
    if bad := sorted(set(records["kind"].tolist()) - set(range(1, _KINDS + 1))):
        raise ValueError(f"it has records of a kind {bad[0]}, which there is not")
    cause = header.cause if header.cause < len(CAUSES) else 0
    stack = data[ring + header.about :].decode(errors="replace")
    return Dump(about["rank"], about["job"], about, comms, records, lost, header.now, header.wall, cause, stack)


def _ordered(records: np.ndarray[Any, np.dtype[Any]], written: int) -> tuple[np.ndarray[Any, np.dtype[Any]], int]:
    """Records, oldest first. Of a full ring the oldest is dropped, as it may be half overwritten."""
    n = len(records)
    if written < n:
        return records[:written], 0
    at = (written + 1) % n
    return np.concatenate((records[at:], records[: (at or n) - 1])) if n > 1 else records[:0], written - n + 1


def _about(text: bytes) -> tuple[dict[str, Any], dict[int, Comm]]:
    about: dict[str, Any] = {}
    comms: dict[int, Comm] = {}
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):  # the last may be half written
        try:
            data = json.loads(line)
            if "comm" in data:
                comm = Comm(int(data["number"]), int(data["time"]), tuple(map(int, data["ranks"])), int(data["mine"]))
                if not 0 <= comm.mine < len(comm.ranks):
                    raise ValueError
                comms[int(data["comm"])] = comm
            elif "state" in data:
                about["state"] = str(data["state"])
            else:
                about |= {"rank": int(data["rank"]), "job": str(data["job"]), "host": str(data["host"])}
                about |= {"pid": int(data["pid"]), "vendor": str(data["vendor"]), "command": str(data["command"])}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"line {number} of its description cannot be read") from None
    if about.get("rank", -1) < 0:
        raise ValueError("it does not name the rank of these records")
    return about, comms
