"""Merging the ranks' records: the ring, the clocks, wait times between ranks, Chrome's format, and the command."""

import json
import os

import numpy as np
import pytest

from ucc_hetero.__main__ import main
from ucc_hetero.trace.chrome import EVENT, HEADER, MAGIC, clock_offsets, document, parse_part, used
from ucc_hetero.trace.timeline import parts_of, write

STEPS = [["native", "reduce_scatter", 0, 0, [0, 1], 64, 0], ["bridge", "allreduce", 0, 1, [0, 2], 32, 1]]


def ring(events, capacity):
    """Trace file of the native engine after recording these events one by one."""
    slots = np.zeros(capacity, EVENT)
    for i, event in enumerate(events):
        slots[i % capacity] = (*event, 0)[:7]
    head = MAGIC + capacity.to_bytes(8, "little") + len(events).to_bytes(8, "little")
    return head.ljust(HEADER, b"\0") + slots.tobytes()


def part(rank, events, steps=STEPS, clock=0):
    lines = [
        {"rank": rank, "job": "j", "vendor": "nvidia", "host": "h"}, {"clock": [0, clock, 7]},
        {"places": {"a": 0, "1b": 1}}, {"comm": 1, "number": 3, "time": 1, "ranks": [0, 1, 2]},
        {"program": 1, "of": 1, "label": "allreduce", "algorithm": "rail", "fragments": 1, "steps": steps},
    ]  # fmt: skip
    return parse_part([json.dumps(line) + "\n" for line in lines], used(ring(events, 16)))


def of_kind(trace, kind):
    return [event for event in trace["traceEvents"] if event.get("cat") == kind]


def spans(trace, kind):
    return [(e["pid"], e["ts"], e["dur"]) for e in of_kind(trace, kind) if e["ph"] == "X"]


@pytest.mark.parametrize("count", [0, 3, 8, 9, 21])
def test_the_last_events_of_a_ring_in_order(count):
    events = [(i + 1, i + 2, i, 1, -1, 0) for i in range(count)]
    found = np.frombuffer(used(ring(events, 8)), EVENT)
    assert found["seq"].tolist() == list(range(count))[-8:]


def test_what_was_cut_off_is_left_out():
    found = parse_part(['{"rank": 3, "job": "j"}\n', '{"clock": [1, 2, 3]}\n', '{"comm": 1, "num'], b"")
    assert (found.rank, found.clock, found.comms) == (3, [(1, 2, 3)], {})
    with pytest.raises(ValueError, match="names the rank of these events"):
        parse_part([], b"")
    with pytest.raises(ValueError, match="ring"):
        used(b"something else" * 1000)


def test_phases_in_microseconds_on_lanes():
    events = [(1000, 9000, 5, 1, -1, 0), (2000, 4000, 5, 1, 0, 0), (4000, 8000, 5, 1, 1, 0)]
    trace = document([part(0, events)])
    assert spans(trace, "call") == [(0, 0.0, 8.0)]
    assert spans(trace, "island") == [(0, 1.0, 2.0)]
    assert spans(trace, "bridge") == [(0, 3.0, 4.0)]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"call", "island", "bridge"}
    (bridge,) = of_kind(trace, "bridge")
    assert bridge["name"] == "allreduce 0.1"
    assert bridge["args"] == {
        "comm": "3.1 of ranks 0-2", "call": 5, "fragment": 0, "stage": 1, "step": 1, "bytes": 32, "of": "allreduce",
        "with": [0, 2],
    }  # fmt: skip
    json.dumps(trace)


def test_overlapping_calls_get_lanes_of_their_own():
    events = [(1000, 9000, 1, 1, -1, 0), (2000, 8000, 2, 1, -1, 0), (9000, 9500, 3, 1, -1, 0)]
    calls = of_kind(document([part(0, events)]), "call")
    assert [(e["args"]["call"], e["tid"]) for e in calls] == [(1, 0), (2, 1), (3, 0)]


def test_waiting_for_the_rank_that_came_last():
    early = [(1000, 9000, 5, 1, -1, 0), (1000, 9000, 5, 1, 0, 0)]
    late = [(6000, 9000, 5, 1, -1, 0), (6000, 9000, 5, 1, 0, 0)]
    trace = document([part(0, early), part(1, late)])
    (wait,) = of_kind(trace, "wait")
    assert (wait["pid"], wait["ts"], wait["dur"], wait["name"]) == (0, 0.0, 5.0, "for rank 1")


def test_clocks_are_drawn_together():
    # Rank 1's clock is 1 ms ahead; by a common clock both arrived at the same time.
    shift = 1_000_000
    one = [(1000, 3000, 1, 1, 0, 0)]
    two = [(1000 + shift, 3000 + shift, 1, 1, 0, 0)]
    trace = document([part(0, one), part(1, two, clock=shift)])
    assert spans(trace, "island") == [(0, 0.0, 2.0), (1, 0.0, 2.0)]
    assert spans(trace, "wait") == []
    assert trace["otherData"]["clock uncertainty us"] == {"0": 0.007, "1": 0.007}


def test_drift_is_interpolated():
    found = part(0, [])
    found.clock = [(10_000, 0, 0), (20_000, 100, 0)]
    local = np.array([10_000, 15_000, 20_000], np.uint64)
    assert found.reference(local).tolist() == [10_000, 14_950, 19_900]


def test_a_wire_has_a_row_each_way():
    wire = 0xFFFFFFFF  # wire 2 sends, wire 3 receives
    sent = [(1000, 4000, 27, wire, 2, 0, 80), (1000, 6000, 27, wire, 2, 0, 16), (7000, 0, 27, wire, 2, 0, 16)]
    other = [(2000, 9000, 27, wire, 3, 0, 64), (3000, 5000, 99, wire, 0, -1, 8)]
    trace = document([part(0, sent + other)])
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    shown = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in shown] == [
        # Messages of a wire follow each other; one that has not ended lasts to the end.
        ("send 2", "to rank 1", 0.0, 3.0), ("receive 2", "from rank 1", 1.0, 7.0),
        ("send", "to rank -1 (failed)", 2.0, 2.0), ("send 2", "to rank 1", 3.0, 2.0),
        ("send 2", "to rank 1 (not finished)", 6.0, 2.0),
    ]  # fmt: skip
    assert shown[0]["args"] == {"bytes": 80, "peer": 1, "wire": 1}
    assert (shown[2]["args"]["status"], shown[4]["args"]["unfinished"]) == (-1, True)


def test_ranks_of_one_host_share_its_clock():
    sent = [[10], [12], [1012], [1015]]
    done = [[30], [31], [1033], [1029]]
    found = clock_offsets(sent, done, [0, 0, 1, 1])
    assert found[0] == (0, 0)
    # 1015 - 30 <= offset <= 1029 - 12: the tightest of all pairs.
    assert found[1] == ((985 + 1017) // 2, 16)


def test_parts_are_merged_where_there_is_no_trace(tmp_path, capsys):
    path = tmp_path / "t.json"
    for rank, job in ((0, "new"), (1, "old")):
        file, meta = parts_of(path, rank)
        file.write_bytes(ring([(1000, 0, 5, 1, -1, 0)], 8))
        meta.write_text(json.dumps({"rank": rank, "job": job}) + "\n")
    os.utime(parts_of(path, 1)[1], (1, 1))
    for rank, events, line in ((2, b"", '{"rank": 2, "job": "new"}\n'), (3, ring([], 8), '{"ra'), (4, ring([], 8), "")):
        file, meta = parts_of(path, rank)  # of ranks that were killed as they began
        file.write_bytes(events)
        meta.write_text(line)
    assert main(["trace", str(path)]) == 0
    assert [r["rank"] for r in json.loads(path.read_text())["otherData"]["ranks"]] == [0]
    assert main(["trace", str(tmp_path / "other.json")]) == 1
    assert "neither a trace nor files that ranks left (other.json.0.ring" in capsys.readouterr().err


def test_where_a_trace_cannot_be_written_nothing_is_left(tmp_path):
    (tmp_path / "t.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "t.json", {})
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]
