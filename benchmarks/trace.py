"""``python -m ucc_hetero.bench trace FILE``: where the time of each collective went, and which rank was late.

FILE is what ``UCCH_TRACE=FILE`` left. Where the job did not end well it is made here from what the ranks left beside
it; what they had under way is listed. Open FILE itself at ui.perfetto.dev or chrome://tracing to see every phase.

Every moment of a call counts once: as ``both`` where an island and a bridge phase work at the same time, as ``wait``
where all that a rank has under way waits for another rank to come, as ``idle`` where it has nothing under way (set-up,
the turn of another call, a stream, or the host took the core away).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .options import BadUsage

#: How a moment of a call is counted, in the order of the columns.
KINDS = ("island", "bridge", "both", "copy", "wait", "idle")


@dataclass(slots=True)
class Part:
    """One rank's part in one call: µs from ``begin`` to ``end``, steps by kind, and their waiting."""

    begin: float
    end: float
    failed: bool = False
    steps: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """All calls of one kind on one communicator: call number -> rank -> part."""

    label: str
    comm: str
    algorithm: str
    calls: dict[int, dict[int, Part]] = field(default_factory=dict)


def load(path: Path) -> tuple[dict[str, Any], bool]:
    """(trace, whether it had to be merged from what the ranks left). ``BadUsage`` where there is nothing to read."""
    if path.exists():
        data = path.read_bytes()
        try:
            found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        except ValueError as why:
            raise BadUsage(f"trace: {path} is not a trace: {why}") from None
        if not isinstance(found, dict) or found.get("otherData", {}).get("format") != "ucc_hetero.trace/1":
            raise BadUsage(f"trace: {path} was not written by UCCH_TRACE")
        return found, False
    from ucc_hetero.trace.record import merge

    try:
        return merge(path.absolute()), True
    except ValueError as why:
        raise BadUsage(f"trace: {why}") from None


def groups(events: Iterable[dict[str, Any]]) -> list[Group]:
    """The calls in a trace by kind and communicator, in order of appearance."""
    found: dict[tuple[str, str], Group] = {}
    parts: dict[tuple[str, int, int], Part] = {}
    later = []
    for event in events:
        if event.get("ph") != "X":
            continue
        args = event["args"]
        if event["cat"] != "call":
            later.append(event)
            continue
        group = found.setdefault((event["name"], args["comm"]), Group(event["name"], args["comm"], args["algorithm"]))
        part = Part(event["ts"], event["ts"] + event["dur"], "status" in args or "unfinished" in args)
        group.calls.setdefault(args["call"], {})[event["pid"]] = parts[args["comm"], args["call"], event["pid"]] = part
    for event in later:
        args = event["args"]
        of = parts.get((args.get("comm"), args.get("call"), event["pid"]))
        if of is None or args.get("step") is None:
            continue
        if event["cat"] == "wait":
            of.waits[args["step"]] = event["dur"]
        else:
            of.steps[args["step"]] = event["cat"], event["ts"], event["ts"] + event["dur"]
    return list(found.values())


def shares(part: Part) -> dict[str, float]:
    """µs of a rank's part by :data:`KINDS`; they add up to the whole."""
    edges: list[tuple[float, int, str]] = []
    for step, (kind, begin, end) in part.steps.items():
        begin, end = max(begin, part.begin), min(end, part.end)
        free = min(begin + part.waits.get(step, 0.0), end)
        for one, a, b in (("wait", begin, free), (kind, free, end)):
            if b > a:
                edges += [(a, 1, one), (b, -1, one)]
    out = dict.fromkeys(KINDS, 0.0)
    active: Counter[str] = Counter()
    at = part.begin
    for when, change, kind in [*sorted(edges), (part.end, 0, "")]:
        out[_counted(active)] += when - at
        active[kind] += change
        at = when
    return out


def _counted(active: Counter[str]) -> str:
    if active["island"] > 0 and active["bridge"] > 0:
        return "both"
    return next((kind for kind in ("island", "bridge", "copy", "wait") if active[kind] > 0), "idle")


def _rank_lines(group: Group) -> list[str]:
    """A line per rank: time of a call, its shares, how often it came last and how late it came."""
    spent: dict[int, list[float]] = defaultdict(list)
    kinds: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    last: Counter[int] = Counter()
    late: dict[int, list[float]] = defaultdict(list)
    for parts in group.calls.values():
        first = min(part.begin for part in parts.values())
        last[max(parts, key=lambda rank: parts[rank].begin)] += 1
        for rank, part in parts.items():
            spent[rank].append(part.end - part.begin)
            late[rank].append(part.begin - first)
            for kind, value in shares(part).items():
                kinds[rank][kind] += value
    lines = []
    for rank in sorted(spent):
        whole = sum(spent[rank]) or 1.0
        columns = "".join(f"{100 * kinds[rank][kind] / whole:7.1f}%" for kind in KINDS)
        lines.append(f"  {rank:>6}{fmean(spent[rank]):12.1f}{columns}{last[rank]:>8}{fmean(late[rank]):14.1f}")
    return lines


def _verdict(group: Group) -> str:
    """One sentence: was a rank late, and how much of the calls' time was that."""
    lateness: dict[int, float] = defaultdict(float)
    waited = whole = 0.0
    for parts in group.calls.values():
        begins = sorted(part.begin for part in parts.values())
        worst = max(parts, key=lambda rank: parts[rank].begin)
        # Against the middle of the others: with two ranks, against the other one.
        lateness[worst] += begins[-1] - median(begins[:-1]) if len(begins) > 1 else 0.0
        for part in parts.values():
            waited += shares(part)["wait"]
            whole += part.end - part.begin
    if not whole or waited < 0.05 * whole:
        return "no rank was late: less than 5 % of the time went into waiting for one"
    rank, total = max(lateness.items(), key=lambda item: item[1])
    share = total / (sum(lateness.values()) or 1.0)
    return (
        f"{100 * waited / whole:.0f} % of the time went into waiting for ranks to come; "
        f"{100 * share:.0f} % of the lateness was rank {rank}'s"
    )


def text(trace: dict[str, Any], longest: int) -> str:
    """The analysis of a trace, the kinds of calls that took most time first; at most ``longest`` of them."""
    events = trace["traceEvents"]
    found = sorted(groups(events), key=lambda g: -_total(g))
    facts = trace["otherData"]
    lines = [f"# {len(facts['ranks'])} ranks, {sum(r['events'] for r in facts['ranks'])} events recorded"]
    worst = max(facts["clock uncertainty us"].values(), default=0.0)
    if worst:
        lines.append(
            f"# clocks of different hosts agree to {worst:.1f} us; shorter lateness between them means nothing"
        )
    for group in found[:longest]:
        calls = [parts.values() for parts in group.calls.values()]
        durations = [max(part.end for part in each) - min(part.begin for part in each) for each in calls]
        lines += ["", f"{group.label}: {group.algorithm}, {len(group.calls)} calls, communicator {group.comm}"]
        lines.append(f"  first start to last end: median {median(durations):.1f} us, longest {max(durations):.1f} us")
        columns = "".join(f"{kind:>8}" for kind in KINDS)
        lines.append(f"  {'rank':>6}{'us a call':>12}{columns}{'last':>8}{'us late':>14}")
        lines += [*_rank_lines(group), f"  {_verdict(group)}"]
    if len(found) > longest:
        lines += ["", f"# and {len(found) - longest} more kinds of calls; --all shows them"]
    return "\n".join([*lines, *_wire_lines(events), *_open_lines(events)]) + "\n"


def _total(group: Group) -> float:
    return sum(part.end - part.begin for parts in group.calls.values() for part in parts.values())


def _wire_lines(events: Sequence[dict[str, Any]]) -> list[str]:
    """Data of each rank's wires by peer, and the rate of a wire while it was at it."""
    found: dict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "wire" in event["args"]:
            found[event["pid"], event["cat"], event["name"]].append(event)
    lines = []
    for (rank, way, peer), row in sorted(found.items()):
        size, wires = sum(event["args"]["bytes"] for event in row), len({event["args"]["wire"] for event in row})
        rate = size / 1e3 / max(sum(event["dur"] for event in row), 1e-3)
        lines.append(f"  rank {rank}: {way} {peer}: {size / 1e6:.1f} MB by {wires} wires, {rate:.2f} GB/s each")
    return ["", "Between hosts, by wires:", *lines] if lines else []


def _open_lines(events: Sequence[dict[str, Any]]) -> list[str]:
    """Calls that failed, or had not ended when the recording did."""
    lines = []
    for event in events:
        args = event.get("args", {})
        if event.get("ph") != "X" or not ({"unfinished", "status"} & set(args)):
            continue
        what = "not finished" if "unfinished" in args else f"failed with status {args['status']}"
        if "wire" in args:
            lines.append(f"  rank {event['pid']}: wire {args['wire']}, {event['cat']} {event['name']}: {what}")
            continue
        of = "" if event["cat"] == "call" else f" of {args['of']}, between ranks {args.get('with', [event['pid']])}"
        lines.append(f"  rank {event['pid']}: call {args['call']}, {event['cat']} {event['name']}{of}: {what}")
    return ["", "Not finished or failed:", *lines] if lines else []


def run(words: Sequence[str], command: list[str]) -> int:
    """Print the analysis; returns the exit status."""
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m ucc_hetero.bench trace", description=about, epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="the file that UCCH_TRACE named")
    parser.add_argument("--all", action="store_true", help="every kind of call, not only the ten that took most time")
    arguments = parser.parse_args(list(words))
    trace, merged = load(arguments.file)
    if merged:
        from ucc_hetero.trace.record import write

        write(arguments.file, trace)
        left = f"{arguments.file.name}.*.ring and .meta"
        print(
            f"# the job did not end well; merged what its ranks left ({left}, no longer needed) into {arguments.file}"
        )
    print(text(trace, 10**9 if arguments.all else 10), end="")
    return 0
