"""Diagnosis of a job that hangs or has failed, from its ranks' flight records. Pure functions.

Ranks number the calls of a communicator alike. They diverged at the first number for which they called different
things, or which a rank has not reached. Messages are matched by their order, as in MPI.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import counted
from ...native.libraries import lib
from ...planner.topology import ranges
from ...trace.flight_files import CAUSES, Comm, Dump
from .findings import CODES, Finding, finding, ok

#: Maximum number of stack frames, and of operations under way, that are shown.
_FRAMES, _UNDER_WAY = 8, 3
_STATUS = {
    lib.UCCH_FAIL_TIMEOUT: "not complete in time",
    lib.UCCH_FAIL_MISMATCH: "another rank called something else",
    lib.UCCH_FAIL_PEER: "a rank is gone",
    lib.UCCH_FAIL_REVOKED: "the communicator was revoked",
    lib.UCCH_FAIL_REFUSED: "another rank refused its part",
    lib.UCCH_FAIL_BROKEN: "another call had failed",
    lib.UCCH_FAIL_TRUNCATED: "the message was longer than the buffer",
}
#: Codes of findings, in the order in which one causes another.
_ORDER = tuple(code for code in CODES if code.startswith("hang-"))
#: Duration of a transfer, in ns, that is not suspicious.
_SHORT_NS = 10**9
#: Kinds of transfers, and the prepositions before the peer.
_TRANSFERS = ("put", "get", "flush", "question for a region")
_WAYS = ("to", "from", "to", "to")
_REFUSED = lib.UCCH_RECORD_REFUSED

Key = tuple[int, int, tuple[int, ...]]
Calls = Mapping[int, Any]


class _Found(NamedTuple):
    """A finding; since when a rank waits because of it, in ns of the common clock; and the rank that causes it (-1:
    none)."""

    when: int
    finding: Finding
    by: int = -1

    def order(self, waits: Mapping[int, set[int]]) -> tuple[bool, int, int]:
        """Sort key, causes first: a rank that waits itself causes nothing; of two that wait, the one in a message comes
        first."""
        place = _ORDER.index(self.finding.code)
        follows = place >= _ORDER.index("hang-stuck") or self.by in waits
        return follows, place if follows or self.finding.code == "hang-dead" else 1, self.when


def _found(dump: Dump, record: Any, code: str, text: str, by: int = -1) -> _Found:
    """A finding about a rank that waits in the operation of this record."""
    return _Found(_wall(dump, record["called"]), finding(code, text), by)


class _Group:
    """A communicator: its world ranks, and the operations of those whose records exist."""

    def __init__(self, key: Key, several: bool) -> None:
        self.ranks = key[2]
        self.name = f" of communicator {key[0]}.{key[1]} ({_who(self.ranks)})" if several else ""
        self.dumps: dict[int, Dump] = {}
        self.calls: dict[int, Calls] = {}
        self.messages: dict[int, list[Any]] = {}

    def add(self, dump: Dump, number: int, comm: Comm) -> None:
        mine = dump.records[dump.records["comm"] == number]
        sends = mine["kind"] >= lib.UCCH_RECORD_SEND
        self.dumps[comm.mine] = dump
        self.calls[comm.mine] = {int(r["seq"]): r for r in mine[~sends]}
        self.messages[comm.mine] = list(mine[sends])

    def who(self, members: Sequence[int]) -> str:
        return _who([self.ranks[m] for m in members])


def job_of(dumps: Sequence[Dump]) -> tuple[list[Dump], str]:
    """(dumps of the latest job, one per process; text about dumps that were left out)."""
    latest: dict[tuple[str, str, int], Dump] = {}
    for dump in sorted(dumps, key=lambda d: d.wall):
        latest[dump.job, dump.about["host"], dump.about["pid"]] = dump
    job = max(latest.values(), key=lambda d: d.wall).job
    kept = sorted((d for d in latest.values() if d.job == job), key=lambda d: d.rank)
    others = len({d.job for d in latest.values()}) - 1
    return kept, f"{others} earlier job(s) left out" if others else ""


def diagnose(dumps: Sequence[Dump]) -> list[Finding]:
    """Find what blocks a job, causes first. ``dumps`` are of one job."""
    groups: dict[Key, _Group] = {}
    keys = {comm.key for dump in dumps for comm in dump.comms.values()}
    for dump in dumps:
        for number, comm in dump.comms.items():
            groups.setdefault(comm.key, _Group(comm.key, len(keys) > 1)).add(dump, number, comm)
    found: list[_Found] = []
    waits: dict[int, set[int]] = defaultdict(set)
    for group in groups.values():
        found += _calls(group, waits)
        found += _messages(group, waits)
    found += _transfers(dumps, waits)
    found += _dead(list(groups.values()))
    found += _circles(dumps, waits)
    found += [each for dump in dumps for each in _failed(dump)]
    said = [each.finding for each in sorted(found, key=lambda each: each.order(waits))]
    if not any(each.level == "error" for each in said):
        said.append(ok("hang", "no rank waits for another one in these records"))
    return [_about(dumps), *said]


def _about(dumps: Sequence[Dump]) -> Finding:
    hosts = sorted({dump.about["host"] for dump in dumps})
    how = Counter(CAUSES[dump.cause] for dump in dumps if dump.cause)
    ways = "; ".join(f"{n} {cause}" for cause, n in how.items())
    where = ", ".join(hosts[:4]) + ("" if len(hosts) < 5 else " …")
    text = f"{len(dumps)} rank(s) on {where}: {dumps[0].about['command']}"
    return ok("records", f"{text} ({ways})" if ways else text)


# --- calls ------------------------------------------------------------------------------------------------------------


def _calls(group: _Group, waits: dict[int, set[int]]) -> Iterator[_Found]:
    """Where a communicator's ranks diverged: a rank called something else, or has not made the call."""
    for seq in sorted(set().union(*group.calls.values())):
        here = {m: calls[seq] for m, calls in group.calls.items() if seq in calls}
        alike: dict[int, list[int]] = defaultdict(list)
        for m, record in here.items():
            if record["kind"] != _REFUSED:
                alike[int(record["signature"])].append(m)
        if len(alike) > 1:
            yield from _differ(group, seq, sorted(alike.values(), key=lambda ms: (-len(ms), ms)))
            return
        waiting = [m for m, record in here.items() if _waits(record)]
        late = [m for m, calls in group.calls.items() if max(calls, default=0) < seq]
        if waiting and late:
            for m in waiting:
                waits[group.ranks[m]] |= {group.ranks[other] for other in late}
            yield from _missing(group, seq, here, waiting, late)
            return
        if waiting and len(here) == len(group.ranks) == len(waiting):
            yield _stuck(group, seq, here)
            return


def _differ(group: _Group, seq: int, alike: list[list[int]]) -> Iterator[_Found]:
    usual = group.calls[alike[0][0]][seq]
    for odd in alike[1:]:
        record = group.calls[odd[0]][seq]
        here = f"{group.who(odd)} called {_label(record)} as call {seq}{group.name}"
        hint = _shifted(group, seq, odd[0], alike[0][0])
        text = f"{here}, where {group.who(alike[0])} called {_label(usual)}{hint}"
        yield _found(group.dumps[odd[0]], record, "hang-differs", text, group.ranks[odd[0]])


def _shifted(group: _Group, seq: int, odd: int, usual: int) -> str:
    """Text if a rank skipped a call, or made an extra one, as the following calls show."""
    one, two = group.calls[odd], group.calls[usual]
    same = [seq + 1 in calls and calls[seq + 1]["signature"] for calls in (one, two)]
    if same[1] and same[1] == one[seq]["signature"]:
        return f"; it is what the others called next: it has left call {seq} out, or is one call ahead"
    if same[0] and same[0] == two[seq]["signature"]:
        return "; what the others called comes next: it has made one call more, or is one behind"
    return ""


def _missing(
    group: _Group, seq: int, here: Mapping[int, Any], waiting: Sequence[int], late: Sequence[int]
) -> Iterator[_Found]:
    first = min(waiting, key=lambda m: _wall(group.dumps[m], here[m]["called"]))
    waited = _ago(group.dumps[first], here[first]["called"])
    have = "has" if len(waiting) == 1 else "have"
    for m in late:
        dump = group.dumps[m]
        gone = "" if group.calls[m] or not dump.lost else f" within its last {counted(len(dump.records), 'operation')}"
        text = (
            f"{group.who([m])} has not called {_label(here[first])}, call {seq}{group.name}{gone}, in which "
            f"{group.who(waiting)} {have} waited for {waited}: {_doing(dump)}"
        )
        yield _found(group.dumps[first], here[first], "hang-missing", text, group.ranks[m])


def _stuck(group: _Group, seq: int, here: Mapping[int, Any]) -> _Found:
    last = max(here, key=lambda m: _wall(group.dumps[m], here[m]["called"]))
    waited = _ago(group.dumps[last], here[last]["called"])
    call = f"{_label(here[last])}, call {seq}{group.name}"
    text = f"all ranks are in {call}, the last for {waited}, and none has its data"
    return _found(group.dumps[last], here[last], "hang-stuck", text)


# --- messages ---------------------------------------------------------------------------------------------------------


def _messages(group: _Group, waits: dict[int, set[int]]) -> Iterator[_Found]:
    """Messages that one side waits for and the other has not started."""
    sent, received = _counts(group, lib.UCCH_RECORD_SEND), _counts(group, lib.UCCH_RECORD_RECEIVE)
    for m, records in group.messages.items():
        done: Counter[tuple[int, int, bool]] = Counter()
        for record in records:
            receives = record["kind"] == lib.UCCH_RECORD_RECEIVE
            peer, tag, own = int(record["peer"]), int(record["tag"]), bool(record["own"])
            if not _waits(record):
                continue
            if peer < 0 or peer >= len(group.ranks):
                yield _waiting(group.dumps[m], record, "hang-message")
                continue
            theirs, ours = (sent, received) if receives else (received, sent)
            done[peer, tag, own] += 1
            if group.dumps[m].lost or (peer in group.dumps and group.dumps[peer].lost):
                short = not theirs[peer, m, tag, own]  # earlier messages are not in the records
            else:
                finished = ours[m, peer, tag, own] - _pending(records, record)
                short = theirs[peer, m, tag, own] + theirs[peer, m, -1, own] < finished + done[peer, tag, own]
            if peer in group.dumps and not short:
                continue
            waits[group.ranks[m]].add(group.ranks[peer])
            between = (r for r in group.messages.get(peer, ()) if (r["peer"], r["own"]) == (m, own))
            tags = {int(r["tag"]) for r in between} - {tag, -1}
            others = sorted(t for t in tags if theirs[peer, m, t, own] > ours[m, peer, t, own])
            yield _unmatched(group, m, peer, record, others)


def _counts(group: _Group, kind: int) -> Counter[tuple[int, int, int, bool]]:
    """(rank, peer, tag, own) -> number of messages of a kind that the rank has started."""
    of_kind = ((m, r) for m, records in group.messages.items() for r in records if r["kind"] == kind)
    return Counter((m, int(r["peer"]), int(r["tag"]), bool(r["own"])) for m, r in of_kind)


def _pending(records: Sequence[Any], like: Any) -> int:
    alike = ("kind", "peer", "tag", "own")
    return sum(_waits(r) and all(r[name] == like[name] for name in alike) for r in records)


def _unmatched(group: _Group, m: int, peer: int, record: Any, others: Sequence[int]) -> _Found:
    """``others``: other tags under which the peer has begun more messages than this rank."""
    receives = record["kind"] == lib.UCCH_RECORD_RECEIVE
    who = group.who([peer])
    if peer not in group.dumps:
        text = f"; {who} has left no records that would show its side"
    else:
        text = f", which {who} has not sent" if receives else f", which {who} does not receive"
        if others:
            does = "has sent" if receives else "waits for"
            text += f"; it {does} a message with tag {', '.join(map(str, others))} instead"
        text += f": {_doing(group.dumps[peer])}"
    return _waiting(group.dumps[m], record, "hang-message", text, group.ranks[peer])


def _waiting(dump: Dump, record: Any, code: str, text: str = "", by: int = -1) -> _Found:
    """A finding about a rank that waits for a message or transfer; ``text``: details."""
    text = f"rank {dump.rank} has waited {_ago(dump, record['called'])} for {_what(dump, record)}{text}"
    return _found(dump, record, code, text, by)


# --- transfers --------------------------------------------------------------------------------------------------------


def _transfers(dumps: Sequence[Dump], waits: dict[int, set[int]]) -> Iterator[_Found]:
    """The first slow transfer of each rank with each peer; most transfers complete at once."""
    for dump in dumps:
        seen: set[tuple[int, bool]] = set()
        for record in dump.records[dump.records["kind"] >= lib.UCCH_RECORD_TRANSFER]:
            other = _process(dump, record, dumps)
            at = int(record["peer"]), bool(record["own"])
            short = not record["ended"] and dump.now - int(record["called"]) < _SHORT_NS
            if short or not _waits(record) or at in seen:
                continue
            seen.add(at)
            if other is None:
                yield _waiting(dump, record, "hang-transfer")
            else:
                waits[dump.rank].add(other.rank)
                text = f", which is rank {other.rank}: {_doing(other)}"
                yield _waiting(dump, record, "hang-transfer", text, other.rank)


def _process(dump: Dump, record: Any, dumps: Sequence[Dump]) -> Dump | None:
    """The records of the process at the other end of a transfer; None if unknown."""
    near = bool(record["own"])
    found = [
        d for d in dumps
        if d.about["pid"] == record["peer"] and (d.about["host"] == dump.about["host"]) == near
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


# --- ranks ------------------------------------------------------------------------------------------------------------


def _dead(groups: Sequence[_Group]) -> Iterator[_Found]:
    """Ranks without records."""
    known = {group.ranks[m] for group in groups for m in group.dumps}
    gone = sorted({rank for group in groups for rank in group.ranks} - known)
    if gone:
        text = f"{_who(gone)} left no records: ended, killed before it could, or on a host whose files are not here"
        yield _Found(0, finding("hang-dead", text))


def _circles(dumps: Sequence[Dump], waits: Mapping[int, set[int]]) -> Iterator[_Found]:
    """Ranks that wait for each other in a cycle."""
    seen: set[int] = set()
    for start in sorted(waits):
        path: list[int] = []
        at = start
        while at in waits and at not in seen:
            seen.add(at)
            path.append(at)
            at = min(waits[at])
        if at in path:
            circle = [*path[path.index(at) :], at]
            if len(circle) > 2:
                when = max((dump.wall for dump in dumps), default=0)
                text = f"ranks wait for each other: {' for '.join(map(str, circle))}"
                yield _Found(when, finding("hang-circle", text))


def _failed(dump: Dump) -> Iterator[_Found]:
    """The first operation of a rank that failed; later failures follow from it."""
    for record in dump.records:
        if record["status"] < 0 and record["status"] != lib.UCCH_FAIL_CANCELLED and record["kind"] != _REFUSED:
            why = _STATUS.get(int(record["status"]), f"status {int(record['status'])}")
            after = _span(int(record["ended"]) - int(record["called"]))  # Python's ints: damaged files hold any bytes
            text = f"rank {dump.rank}: {_what(dump, record)} failed after {after}: {why}"
            yield _Found(_wall(dump, record["ended"]), finding("hang-failed", text))
            return


def _doing(dump: Dump) -> str:
    """What a rank is doing, followed by its Python stack."""
    records = dump.records
    under_way = [r for r in records if not r["ended"]]
    if under_way:
        first = under_way[-_UNDER_WAY:]
        words = "it is in " + "; ".join(f"{_what(dump, r)}, for {_ago(dump, r['called'])}" for r in first)
    elif len(records):
        last = max(records, key=lambda r: int(r["ended"]))
        words = f"it has been in user code for {_ago(dump, last['ended'])}, after {_what(dump, last)}"
    else:
        words = "it has called nothing yet"
    if state := dump.about.get("state"):
        words = f"its process is {state}; {words}"
    return "\n".join([words, *_stack(dump.stack)])


def _stack(text: str) -> list[str]:
    """The innermost frames of the main thread, which comes last. Concurrent dumps may lack its title."""
    block = text.strip("\n").split("\n\n")[-1]
    frames = [line for line in block.splitlines() if line.startswith("  ")]
    more = [f"  … {len(frames) - _FRAMES} more"] if len(frames) > _FRAMES else []
    return [*frames[:_FRAMES], *more]


# --- words ------------------------------------------------------------------------------------------------------------


def _waits(record: Any) -> bool:
    """True if an operation is under way, or was given up because other ranks did not come."""
    return bool(not record["ended"] or record["status"] == lib.UCCH_FAIL_TIMEOUT)


def _label(record: Any) -> str:
    return bytes(record["label"]).decode(errors="replace")


def _what(dump: Dump, record: Any) -> str:
    comm = dump.comms.get(int(record["comm"]))
    of = f" of communicator {comm.number}.{comm.time}" if comm and len(dump.comms) > 1 else ""
    if record["kind"] < lib.UCCH_RECORD_SEND:
        place = " left to streams" if record["kind"] == lib.UCCH_RECORD_STREAM else ""
        return f"{_label(record)} (call {record['seq']}{of}{place})"
    if record["kind"] >= lib.UCCH_RECORD_TRANSFER:
        what = int(record["kind"]) - lib.UCCH_RECORD_TRANSFER
        size = f" of {record['bytes']} bytes" if record["bytes"] else ""
        where = "on this host" if record["own"] else "of another host"
        behind = " with a notification" if record["tag"] else ""
        return f"a {_TRANSFERS[what]}{size}{behind} {_WAYS[what]} process {record['peer']} {where}"
    way = "send" if record["kind"] == lib.UCCH_RECORD_SEND else "receive"
    peer = int(record["peer"])
    rank = comm.ranks[peer] if comm and 0 <= peer < len(comm.ranks) else peer
    other = "any rank" if rank < 0 else f"rank {rank}"
    tag = "any tag" if record["tag"] < 0 else f"tag {record['tag']}{' of our own' if record['own'] else ''}"
    return f"a {way} of {record['bytes']} bytes {'to' if way == 'send' else 'from'} {other}, {tag}{of}"


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(sorted(ranks))}"


def _wall(dump: Dump, ns: Any) -> int:
    return dump.wall - (dump.now - int(ns))


def _ago(dump: Dump, ns: Any) -> str:
    return _span(dump.now - int(ns))


def _span(ns: Any) -> str:
    seconds = max(int(ns), 0) / 1e9
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
