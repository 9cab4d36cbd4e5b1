"""The native rings of operations and events: order, wrapping, records after failures, signals and kills."""

import json
import os
import signal

import numpy as np
import pytest
from processes import python

from ucc_hetero.trace.chrome import EVENT, used
from ucc_hetero.trace.flight_files import parse


def run(case, folder, *args, ends=0):
    """Return the output of a case of flight_cases.py, whose process ends with this status."""
    done = python(f"flight_cases:{case}", str(folder), *args, check=False)
    assert done.returncode == ends, done.stderr
    return done.stdout


def read(path):
    return parse(path.read_bytes())


def written(case, folder, *args):
    run(case, folder, *args)
    assert [path.name for path in folder.iterdir()] == ["x.flight"]
    return read(folder / "x.flight")


@pytest.mark.parametrize("runs", [2, 50])
def test_events_outlive_a_killed_process(tmp_path, runs):
    """The last events of a call and its step, in order."""
    run("killed", tmp_path, runs, ends=-9)
    events = np.frombuffer(used((tmp_path / "ring").read_bytes()), EVENT)
    assert events["step"].tolist() == ([-1, 0] * runs)[-8:]
    assert (events["program"] == 7).all() and (events["status"] == 0).all()
    assert (np.diff(events["begin"].astype(np.int64)) >= 0).all() and (events["end"] >= events["begin"]).all()
    calls, steps = (events[-4:][events[-4:]["step"] == step] for step in (-1, 0))
    assert (steps["begin"] >= calls["begin"]).all() and (steps["end"] <= calls["end"]).all()


@pytest.mark.parametrize("runs", [1, 16, 100])
def test_the_last_operations(tmp_path, runs):
    dump = written("asked", tmp_path, runs)
    records = dump.records
    numbers = list(range(runs)) if runs < 16 else list(range(runs - 15, runs))
    assert [label.decode() for label in records["label"]] == [f"allreduce float32[{i}] SUM" for i in numbers]
    assert records["seq"].tolist() == [i + 1 for i in numbers]
    assert records["signature"].tolist() == records["bytes"].tolist() == [1000 + i for i in numbers]
    assert (records["comm"] == 5).all() and (records["kind"] == 1).all() and (records["status"] == 0).all()
    assert (np.diff(records["called"].astype(np.int64)) >= 0).all()
    assert (records["started"] == records["called"]).all() and (records["ended"] >= records["started"]).all()
    assert (records["ended"] <= dump.now).all() and dump.lost == max(runs - len(numbers), 0)
    assert (dump.rank, dump.cause, dump.stack, dump.about["command"]) == (3, 1, "", "c")


def test_a_call_that_fails_is_written_once(tmp_path):
    dump = written("refused_and_failed", tmp_path)
    assert dump.cause == 3
    assert dump.records["kind"].tolist() == [1, 5, 4, 4]
    assert dump.records["seq"].tolist() == [1, 2, 9, 10]
    assert dump.records["status"].tolist() == [0, 0, -1013, -1001]
    assert dump.records["label"][1] == b"ValueError: count"


def test_a_signal_while_python_is_stuck(tmp_path):
    """In an endless regular expression that holds the interpreter's lock; Python's signal handlers never run."""
    run("signalled_when_stuck", tmp_path, ends=-9)
    dump = read(tmp_path / "x.flight")
    assert dump.cause == 2 and len(dump.records) == 2
    assert "in stuck" in dump.stack and "most recent call first" in dump.stack
    assert dump.stack.count("in stuck") == 1


def test_many_signals_at_once(tmp_path):
    """Nested handlers would overflow the stack that Python gives them, which has Python's memory below it."""
    run("many_signals", tmp_path)
    dump = read(tmp_path / "x")
    assert dump.cause == 2 and dump.stack.count("most recent call first") == 1


FAULT = """
#include <signal.h>
static int *volatile nowhere = (int *)8;
static void at_fault(int number) { *nowhere = number; }
void by_fault(int number) { signal(number, at_fault); }
"""


def test_a_fault_while_stacks_are_written(tmp_path, compiled):
    """Python reads frames while their threads change them; other faults end the process as usual."""
    source, folder = tmp_path / "fault.c", tmp_path / "written"
    source.write_text(FAULT)
    library = compiled(tmp_path / "fault.so", "-shared", "-fPIC", source)
    folder.mkdir()
    assert run("faults", folder, str(library), ends=-signal.SIGSEGV) == "lives\n"


@pytest.mark.parametrize("case", ["signalled_when_writing", "wanted_signal"])
def test_signals(tmp_path, case):
    run(case, tmp_path)


def test_an_interrupted_dump(tmp_path):
    """It leaves the handler of signals to later dumps: they used to wait for ever."""
    assert run("interrupted", tmp_path) == f"{tmp_path}/x.3.flight\n"


def test_a_child_records_nothing(tmp_path):
    assert written("child", tmp_path).records["label"].tolist()[-1] == b"allreduce float32[2] SUM"


def test_places_that_cannot_be_written(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.symlink("/dev/null", foreign / "x.flight.part")  # is removed, not followed
    assert len(written("places", foreign).records) == 3
    run("places", "")


def test_communicators_that_are_freed(tmp_path):
    """Records of freed communicators are limited, also if for a while no descriptor is left; living communicators are
    kept, however old."""
    printed, dump = run("freed_communicators", tmp_path), read(tmp_path / "x.flight")
    assert printed == "[1, 2, 2504]\n" and {1, 2, 2504, 5003} <= set(dump.comms) and len(dump.comms) < 600
    assert dump.comms[2].time == 1 and dump.comms[2504].ranks == (3,)
    assert dump.records["comm"].tolist() == [2] and "in <module>" in dump.stack


def test_communicators_that_threads_make_and_free(tmp_path):
    """Living communicators are kept, also in files written meanwhile."""
    live = json.loads(run("communicators_of_threads", tmp_path))
    dumps = {path.stem: read(path) for path in tmp_path.iterdir()}
    numbers = {*live[0], *live[1]}
    assert len(numbers) == 80 and numbers <= {*dumps["last"].comms} and len(dumps) > 1


def test_transfers(tmp_path):
    """One-sided transfers that are not complete at their start, and may never be."""
    dump = written("transfers", tmp_path)
    kinds = dump.records["kind"] - 8
    assert kinds.tolist() == [3, 0, 1], kinds  # the request for the region comes first
    assert (dump.records["peer"] == dump.about["pid"]).all() and (dump.records["own"] == 1).all()
    assert dump.records["bytes"].tolist() == [0, 1 << 20, 1 << 20] and dump.records["tag"].tolist() == [0, 1, 0]
    assert (dump.records["ended"] >= dump.records["called"]).all() and (dump.records["status"] == 0).all()
