"""Conversion of the ranks' recorded events into one Chrome trace. Pure functions.

A *part* is the recording of one rank: lines that describe its numbers, and the ring of events. Parts are merged on the
clock of the first rank. This adds what no rank can see alone: the time for which it waited for another rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planner.topology import ranges

#: Layout of the native ring (``cffi_build/base/trace.c``): a header, then events, oldest overwritten first.
MAGIC, HEADER = b"UCCHTRC1", 4096
EVENT = np.dtype(
    [
        *(("begin", "<u8"), ("end", "<u8"), ("seq", "<u8")),
        *(("program", "<u4"), ("step", "<i4"), ("status", "<i4"), ("bytes", "<u4")),
    ]
)
#: First Chrome thread number for each kind of event; each has a hundred lanes.
_LANES = {"call": 0, "island": 100, "bridge": 200, "copy": 300, "wait": 400, "send": 500, "receive": 600}
#: Program number of events of wires; the lowest bit of their number is the kind.
_WIRE = 0xFFFFFFFF
_WAYS = (("send", "to"), ("receive", "from"))
_PHASES = {"native": "island", "bridge": "bridge", "local": "copy"}

Events = np.ndarray[Any, np.dtype[Any]]


def used(ring: bytes) -> bytes:
    """The events of a ring, in order. ``ValueError`` if the bytes are not a ring."""
    if ring[:8] != MAGIC or len(ring) < HEADER:
        raise ValueError("not a ring of events")
    capacity, written = (int.from_bytes(ring[at : at + 8], "little") for at in (8, 16))
    body = ring[HEADER : HEADER + capacity * EVENT.itemsize]
    if written <= capacity:
        return body[: written * EVENT.itemsize]
    start = written % capacity * EVENT.itemsize
    return body[start:] + body[:start]


@dataclass(slots=True)
class Recording:
    """The recording of one rank. ``clock`` has (local ns, local minus reference ns, uncertainty in ns).

    ``places``: key of a process -> its rank.
    """

    rank: int
    job: str
    about: dict[str, Any]
    clock: list[tuple[int, int, int]]
    comms: dict[int, dict[str, Any]]
    programs: dict[int, dict[str, Any]]
    places: dict[int, int]
    events: Events

    def reference(self, local: Events) -> Events:
        """Convert to ns on the reference's clock; the offset is interpolated between its measurements."""
        if not self.clock:
            return local.astype(np.float64)
        at = [point[0] for point in self.clock]
        base = at[0]
        offsets = np.interp((local.astype(np.int64) - base).astype(np.float64), [t - base for t in at], [
            float(point[1]) for point in self.clock
        ])  # fmt: skip
        moved: Events = (local.astype(np.int64) - base).astype(np.float64) - offsets
        return moved + base


def parse_part(lines: Iterable[str], events: bytes) -> Recording:
    """Parse a rank's JSON lines, and its events as returned by :func:`used`. ``ValueError`` if they are incomplete."""
    part = Recording(-1, "", {}, [], {}, {}, {}, np.frombuffer(events, EVENT))
    for line in lines:
        if not line.endswith("\n"):
            break  # the rank was killed while it wrote this line
        data = json.loads(line)
        if "rank" in data:
            part.rank, part.job, part.about = data["rank"], data["job"], data
        elif "clock" in data:
            part.clock.append(tuple(data["clock"]))
        elif "comm" in data:
            part.comms[data["comm"]] = data
        elif "places" in data:
            part.places |= {int(process, 16): rank for process, rank in data["places"].items()}
        elif "program" in data:
            part.programs[data["program"]] = data
    if part.rank < 0:
        raise ValueError("no line names the rank of these events")
    return part


def clock_offsets(
    sent: Sequence[Sequence[int]], done: Sequence[Sequence[int]], clocks: Sequence[int]
) -> list[tuple[int, int]]:
    """(offset to clock 0, uncertainty) in ns of each clock, from rounds in which all ranks exchanged their times.

    ``sent[r][k]``: when rank r sent its time in round k; ``done[r][k]``: when it had all ranks' times. Both are on rank
    r's clock, number ``clocks[r]``. No rank can receive a time before it was sent, so each round bounds every clock's
    offset from both sides; the tightest bounds of all rounds are used (Duda et al., Estimating Global Time in
    Distributed Systems, 1987).
    """
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    first = [r for r, clock in enumerate(clocks) if clock == 0]
    for r, clock in enumerate(clocks):
        for zero in first:
            least = max(s - d for s, d in zip(sent[r], done[zero], strict=True))
            most = min(d - s for d, s in zip(done[r], sent[zero], strict=True))
            low[clock] = max(low.get(clock, least), least)
            high[clock] = min(high.get(clock, most), most)
    found = []
    for clock in range(max(clocks) + 1):
        if clock == 0:
            found.append((0, 0))
        else:
            found.append(((low[clock] + high[clock]) // 2, abs(high[clock] - low[clock]) // 2))
    return found


@dataclass(slots=True)
class _Event:
    """An event on the reference clock, in µs."""

    rank: int
    kind: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    #: Name of a step, equal on all its ranks; None if only one rank does it.
    key: tuple[Any, ...] | None = None
    #: Lane among those of its kind; None for the first free lane.
    lane: int | None = None


def _events(part: Recording, last: float) -> Iterator[_Event]:
    """A rank's events. Events without an end last until ``last``."""
    begins, ends = part.reference(part.events["begin"]) / 1e3, part.reference(part.events["end"]) / 1e3
    seen: dict[tuple[Any, ...], int] = {}
    busy: dict[int, float] = {}
    for event, begin, end in zip(part.events, begins, ends, strict=True):
        program = part.programs.get(int(event["program"]))
        if program is None:
            if event["program"] == _WIRE:
                yield _of_wire(part, event, float(begin), float(end) if event["end"] else last, busy)
            continue
        comm = part.comms[program["of"]]
        seq, step, status = int(event["seq"]), int(event["step"]), int(event["status"])
        members = tuple(comm["ranks"])
        whose = (comm["number"], comm["time"], members, seq)
        name = f"{comm['number']}.{comm['time']} of ranks {ranges(members)}"
        args: dict[str, Any] = {"comm": name, "call": seq}
        if not event["end"]:
            args["unfinished"], end = True, last
        if status < 0:
            args["status"] = status
        if step < 0:
            args |= {name: program[name] for name in ("algorithm", "fragments")}
            yield _Event(part.rank, "call", program["label"], float(begin), float(end), args, whose)
            continue
        link, kind, fragment, stage, ranks, nbytes, _ = program["steps"][step]
        args |= {"fragment": fragment, "stage": stage, "step": step, "bytes": nbytes, "of": program["label"]}
        key: tuple[Any, ...] | None = None
        if len(ranks) > 1:
            key = (*whose, fragment, stage, kind, tuple(ranks))
            seen[key] = seen.get(key, -1) + 1
            key = (*key, seen[key])
            args["with"] = [members[r] for r in ranks]
        name = kind if fragment < 0 else f"{kind} {fragment}.{stage}"
        yield _Event(part.rank, _PHASES[link], name, float(begin), float(end), args, key)


def _of_wire(part: Recording, event: Any, begin: float, end: float, busy: dict[int, float]) -> _Event:
    """A message of a wire. It starts when the previous one has ended; ``busy`` has the last end for each wire."""
    wire, way = divmod(int(event["step"]), 2)
    kind, towards = _WAYS[way]
    peer = part.places.get(int(event["seq"]), -1)
    args: dict[str, Any] = {"bytes": int(event["bytes"]), "peer": peer, "wire": wire}
    begin = min(max(begin, busy.get(event["step"], 0.0)), end)
    if event["end"]:
        busy[event["step"]] = max(end, begin)
    else:
        args["unfinished"] = True
    if event["status"] < 0:
        args["status"] = int(event["status"])
    return _Event(part.rank, kind, f"{towards} rank {peer}", begin, end, args, lane=wire)


def _late(events: Sequence[_Event]) -> Iterator[_Event]:
    """The times that ranks spent in a step before the last member had arrived."""
    groups: dict[tuple[Any, ...], list[_Event]] = {}
    for event in events:
        if event.key is not None and event.kind != "call":
            groups.setdefault(event.key, []).append(event)
    for group in groups.values():
        if len(group) < 2:
            continue
        last = max(group, key=lambda e: e.begin)
        for event in group:
            end = min(last.begin, event.end)
            if event.rank != last.rank and end > event.begin:
                args = {name: event.args[name] for name in ("comm", "call", "fragment", "stage", "step", "of")}
                args["for"] = last.rank
                yield _Event(event.rank, "wait", f"for rank {last.rank}", event.begin, end, args)


def events_of(parts: Sequence[Recording]) -> list[_Event]:
    last = 0.0
    for part in parts:
        for column in ("begin", "end"):
            times = part.events[column]
            last = max(last, float(part.reference(times)[times > 0].max(initial=0)) / 1e3)
    found = [event for part in parts for event in _events(part, last)]
    found += list(_late(found))
    return sorted(found, key=lambda e: e.begin)


def _title(event: _Event) -> str:
    """The name of an event, with a note if it failed or was unfinished."""
    if "unfinished" in event.args:
        return f"{event.name} (not finished)"
    return f"{event.name} (failed)" if "status" in event.args else event.name


def _lanes(events: Iterable[_Event]) -> Iterator[tuple[_Event, int]]:
    """(event, thread number): events of a lane must not overlap in Chrome traces."""
    busy: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event.lane is not None:
            yield event, _LANES[event.kind] + event.lane
            continue
        ends = busy.setdefault((event.rank, event.kind), [])
        lane = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = event.end
        yield event, _LANES[event.kind] + lane


def document(parts: Sequence[Recording]) -> dict[str, Any]:
    """The Chrome trace of a job: a process per rank; lanes for calls, their phases, waits, and wires."""
    parts = sorted(parts, key=lambda part: part.rank)
    events = events_of(parts)
    start = events[0].begin if events else 0.0
    shown: list[dict[str, Any]] = []
    names: set[tuple[int, int, str]] = set()
    for event, lane in _lanes(events):
        names.add((event.rank, lane, event.kind))
        shown.append(
            {
                "name": _title(event), "cat": event.kind, "ph": "X", "pid": event.rank, "tid": lane,
                "ts": round(event.begin - start, 3), "dur": round(max(event.end - event.begin, 0.0), 3),
                "args": event.args,
            }
        )  # fmt: skip
    about: list[dict[str, Any]] = []
    for part in parts:
        what = f"rank {part.rank}: {part.about.get('vendor', '')} on {part.about.get('host', '')}"
        about.append({"name": "process_name", "ph": "M", "pid": part.rank, "args": {"name": what}})
        about.append({"name": "process_sort_index", "ph": "M", "pid": part.rank, "args": {"sort_index": part.rank}})
    for rank, lane, kind in sorted(names):
        base = _LANES[kind]
        name = kind if lane == base else f"{kind} {lane - base + 1}"
        about.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}})
        about.append({"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": lane, "args": {"sort_index": lane}})
    return {"traceEvents": [*about, *shown], "displayTimeUnit": "ns", "otherData": _facts(parts)}


def _facts(parts: Sequence[Recording]) -> dict[str, Any]:
    return {
        "format": "ucc_hetero.trace/1",
        "ranks": [part.about | {"events": int(part.events.size)} for part in parts],
        "clock offset us": {str(part.rank): part.clock[-1][1] / 1e3 for part in parts if part.clock},
        "clock uncertainty us": {str(part.rank): max((p[2] for p in part.clock), default=0) / 1e3 for part in parts},
    }
