"""``trace``: how the time of a call is shared out, who was late, and what it says of jobs that ended badly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.trace import Part, groups, shares, text
from ucc_hetero.trace.chrome import HEADER, MAGIC
from ucc_hetero.trace.record import parts_of


def event(rank: int, kind: str, begin: float, end: float, call: int = 1, **args: Any) -> dict[str, Any]:
    about = {"comm": "0.1 of ranks 0-1", "call": call, **({"algorithm": "rail"} if kind == "call" else {"of": "x"})}
    name = "allreduce" if kind == "call" else kind
    return {"ph": "X", "cat": kind, "name": name, "pid": rank, "ts": begin, "dur": end - begin, "args": about | args}


def trace(*events: dict[str, Any], unsure: float = 0.0) -> dict[str, Any]:
    facts = {"format": "ucc_hetero.trace/1", "ranks": [{"events": 2}] * 2, "clock uncertainty us": {"1": unsure}}
    return {"traceEvents": list(events), "otherData": facts}


def test_every_moment_counts_once_and_inside_its_call() -> None:
    part = Part(0.0, 100.0, steps={0: ("island", 10, 50), 1: ("bridge", 40, 70), 2: ("copy", 65, 80)}, waits={0: 20.0})
    found = shares(part)
    # 0-10 nothing, 10-30 waiting, 30-40 island, 40-50 both, 50-70 bridge, 70-80 copy, 80-100 nothing
    assert found == {"island": 10, "bridge": 20, "both": 10, "copy": 10, "wait": 20, "idle": 30}
    assert sum(found.values()) == 100
    found = shares(Part(10.0, 20.0, steps={0: ("island", 5, 12), 1: ("bridge", 18, 40)}))
    assert found == {"island": 2, "bridge": 2, "both": 0, "copy": 0, "wait": 0, "idle": 6}


def test_groups_hold_steps_with_their_calls() -> None:
    (group,) = groups(
        [
            event(0, "call", 0, 10), event(1, "call", 5, 10),
            event(0, "island", 1, 9, step=0), event(0, "wait", 1, 5, step=0), event(0, "wait", 0, 1),
            event(1, "island", 5, 9, call=7, step=0),
            {"ph": "M", "name": "process_name"},
        ]
    )  # fmt: skip
    assert group.calls[1][0].steps == {0: ("island", 1, 9)}
    assert group.calls[1][0].waits == {0: 4}
    assert group.calls[1][1].steps == {}


def test_the_late_rank_is_named() -> None:
    events = []
    for call in range(1, 5):
        at = 1000.0 * call
        events += [event(0, "call", at, at + 100, call), event(0, "island", at, at + 100, call, step=0)]
        events += [event(0, "wait", at, at + 80, call, step=0)]
        events += [event(1, "call", at + 80, at + 100, call), event(1, "island", at + 80, at + 100, call, step=0)]
    shown = text(trace(*events, unsure=3.25), 10)
    assert "allreduce: rail, 4 calls, communicator 0.1 of ranks 0-1" in shown
    assert "first start to last end: median 100.0 us, longest 100.0 us" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("       ")}
    assert rows["0"] == ["0", "100.0", "20.0%", "0.0%", "0.0%", "0.0%", "80.0%", "0.0%", "0", "0.0"]
    assert rows["1"] == ["1", "20.0", "100.0%", "0.0%", "0.0%", "0.0%", "0.0%", "0.0%", "4", "80.0"]
    assert "67 % of the time went into waiting for ranks to come; 100 % of the lateness was rank 1's" in shown
    assert "clocks of different hosts agree to 3.2 us" in shown
    assert "Not finished" not in shown


def test_wires_say_what_they_carried() -> None:
    def message(rank: int, wire: int, begin: float, name: str, **more: Any) -> dict[str, Any]:
        about = {"ph": "X", "cat": "send", "name": name, "pid": rank, "ts": begin, "dur": 500.0}
        return about | {"args": {"bytes": 1_000_000, "peer": 1, "wire": wire, **more}}

    shown = text(trace(message(0, 0, 0, "to rank 1"), message(0, 1, 0, "to rank 1", unfinished=True)), 10)
    assert "  rank 0: send to rank 1: 2.0 MB by 2 wires, 2.00 GB/s each\n" in shown
    assert "  rank 0: wire 1, send to rank 1: not finished\n" in shown


def test_nobody_late() -> None:
    shown = text(trace(event(0, "call", 0, 100), event(1, "call", 1, 100)), 10)
    assert "no rank was late" in shown


def test_the_kinds_that_took_most_come_first() -> None:
    events = [{**event(0, "call", 0, 10 * k), "name": f"kind {k}"} for k in (1, 3, 2)]
    shown = text(trace(*events), 2)
    assert shown.index("kind 3") < shown.index("kind 2")
    assert "kind 1" not in shown
    assert "and 1 more kinds of calls" in shown


def test_what_did_not_end_is_listed() -> None:
    shown = text(trace(event(0, "call", 0, 5, status=-1003), event(0, "bridge", 1, 5, step=0, unfinished=True)), 10)
    assert "rank 0: call 1, call allreduce: failed with status -1003" in shown
    assert "rank 0: call 1, bridge bridge of x, between ranks [0]: not finished" in shown


def test_parts_are_merged_where_there_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    for rank, job in ((0, "new"), (1, "old")):
        ring, meta = parts_of(path, rank)
        ring.write_bytes((MAGIC + (8).to_bytes(8, "little")).ljust(HEADER, b"\0"))
        meta.write_text(json.dumps({"rank": rank, "job": job}) + "\n")
    os.utime(parts_of(path, 1)[1], (1, 1))
    assert main(["trace", str(path)]) == 0
    assert "merged what its ranks left" in capsys.readouterr().out
    assert [r["rank"] for r in json.loads(path.read_text())["otherData"]["ranks"]] == [0]


@pytest.mark.parametrize("content", [None, "nothing", "[]", '{"traceEvents": []}'])
def test_files_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    assert main(["trace", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
