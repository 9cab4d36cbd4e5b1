"""The native rings of operations and events: order, wrapping, records after failures, signals and kills."""

import json
import os
import signal

import numpy as np
import pytest
from processes import python

from ucc_hetero.trace.chrome import EVENT, used
from ucc_hetero.trace.flight_files import parse

#: Records programs of one copy each; argv: capacity, folder, number of runs.
HEAD = """
import faulthandler, json, os, signal, sys, time
import numpy as np
from ucc_hetero.native.libraries import ffi, lib
files = [os.memfd_create(name) for name in "ras"]
folder = sys.argv[2].encode() or ffi.NULL
assert lib.ucch_flight_open(*files, int(sys.argv[1]), 3, folder, b"x.flight") == 0
about = {"rank": 3, "job": "j", "host": "h", "pid": os.getpid(), "vendor": "host", "command": "c"}
os.write(files[1], json.dumps(about).encode() + b"\\n")
os.write(files[1], b'{"comm": 5, "number": 0, "time": 1, "ranks": [3, 4], "mine": 0}\\n')
board = lib.ucch_board_new(ffi.NULL, 1, 0, ffi.new("int[]", [0]), 1)
lib.ucch_board_name(board, 5)
def program(label, signature, number=0):
    part = {"kind": lib.UCCH_STEP_LOCAL + lib.UCCH_COPY, "dtype": 4 << 3, "src": (0, 0, 1), "dst": (1, 0, 1)}
    text, status = ffi.new("char[]", label), ffi.new("int *")
    about = {"label": text, "signature": signature, "number": number, "bytes": signature}
    made = lib.ucch_program_new(board, [about], 1, [part], status)
    assert status[0] == 0
    return made
send, recv = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
both = ffi.from_buffer(send), ffi.from_buffer(recv)
for i in range(int(sys.argv[3])):
    each = program(b"allreduce float32[%d] SUM" % i, 1000 + i)
    assert lib.ucch_program_run(each, *both, 0.0, 1.0) == 1
    lib.ucch_program_free(each)
"""

#: After HEAD: the recorder as in the package.
RECORDER = """
from ucc_hetero import env
from ucc_hetero.trace import flight
lib.ucch_flight_stop()
os.environ["UCCH_FLIGHT"] = sys.argv[2]
flight.begin(3, "x", "host")
parent, number = os.getpid(), env.get("FLIGHT_SIGNAL")
"""


def run(script, folder, runs=2, ends=0):
    """Return the output of a script after HEAD, with a ring of 16 operations; it ends with this status."""
    done = python(HEAD + script, 16, folder, runs, check=False)
    assert done.returncode == ends, done.stderr
    return done.stdout


def read(path):
    return parse(path.read_bytes())


def written(script, folder, runs=3):
    run(script, folder, runs)
    assert [path.name for path in folder.iterdir()] == ["x.flight"]
    return read(folder / "x.flight")


@pytest.mark.parametrize("runs", [2, 50])
def test_events_outlive_a_killed_process(tmp_path, runs):
    """The last events of a call and its step, in order."""
    script = f"""
assert lib.ucch_trace_open(sys.argv[2].encode() + b"/no/folder", 8) == -1
assert lib.ucch_trace_open(sys.argv[2].encode() + b"/ring", 8) == 0
each = program(b"copy", 7, 7)
for _ in range({runs}):
    assert lib.ucch_program_run(each, *both, 0.0, 1.0) == 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(script, tmp_path, 0, ends=-9)
    events = np.frombuffer(used((tmp_path / "ring").read_bytes()), EVENT)
    assert events["step"].tolist() == ([-1, 0] * runs)[-8:]
    assert (events["program"] == 7).all() and (events["status"] == 0).all()
    assert (np.diff(events["begin"].astype(np.int64)) >= 0).all() and (events["end"] >= events["begin"]).all()
    calls, steps = (events[-4:][events[-4:]["step"] == step] for step in (-1, 0))
    assert (steps["begin"] >= calls["begin"]).all() and (steps["end"] <= calls["end"]).all()


@pytest.mark.parametrize("runs", [1, 16, 100])
def test_the_last_operations(tmp_path, runs):
    dump = written("assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL) == 0", tmp_path, runs=runs)
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
    script = """
late = [lib.ucch_message_new() for _ in range(2)]
team = program(b"barrier", 1)
lib.ucch_board_refuse(board, b"ValueError: count")
record = lib.ucch_board_record(board, lib.UCCH_RECORD_MPI, 9, 4, b"reduce by MPI")
lib.ucch_record_end(record, lib.UCCH_FAIL_REFUSED)  # no failure of the communicator's
assert not os.listdir(sys.argv[2])
record = lib.ucch_board_record(board, lib.UCCH_RECORD_MPI, 10, 4, b"reduce by MPI")
lib.ucch_record_end(record, lib.UCCH_FAIL_TIMEOUT)
os.rename(sys.argv[2] + "/x.flight", sys.argv[2] + "/first")
lib.ucch_record_end(lib.ucch_board_record(board, lib.UCCH_RECORD_MPI, 11, 4, b"after"), lib.UCCH_FAIL_PEER)
assert os.listdir(sys.argv[2]) == ["first"]  # in one burst
os.rename(sys.argv[2] + "/first", sys.argv[2] + "/x.flight")
"""
    dump = written(script, tmp_path, runs=1)
    assert dump.cause == 3
    assert dump.records["kind"].tolist() == [1, 5, 4, 4]
    assert dump.records["seq"].tolist() == [1, 2, 9, 10]
    assert dump.records["status"].tolist() == [0, 0, -1013, -1001]
    assert dump.records["label"][1] == b"ValueError: count"


def test_a_signal_while_python_is_stuck(tmp_path):
    """In an endless regular expression that holds the interpreter's lock; Python's signal handlers never run."""
    script = """
import re
assert lib.ucch_flight_catch(43) == 1 == lib.ucch_flight_catch(43)
faulthandler.register(43, files[2], all_threads=True)
assert lib.ucch_flight_catch(43) == 1
parent, path, (begun, begin) = os.getpid(), sys.argv[2] + "/x.flight", os.pipe()
if os.fork() == 0:
    os.read(begun, 1)
    for turn in range(2):  # the second stack is not behind the first
        turn and os.unlink(path)
        while not os.path.exists(path):  # complete from the start; signals that come meanwhile are one
            os.kill(parent, 43)
            time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os._exit(0)
def stuck():
    os.write(begin, b"x")
    re.match("(a+)+$", "a" * 40 + "b")
stuck()
"""
    run(script, tmp_path, ends=-9)
    dump = read(tmp_path / "x.flight")
    assert dump.cause == 2 and len(dump.records) == 2
    assert "in stuck" in dump.stack and "most recent call first" in dump.stack
    assert dump.stack.count("in stuck") == 1


def test_many_signals_at_once(tmp_path):
    """Nested handlers would overflow the stack that Python gives them, which has Python's memory below it."""
    script = """
import gc
assert lib.ucch_flight_catch(number) == 1
if os.fork() == 0:
    os.kill(parent, signal.SIGSTOP)
    for _ in range(500):  # all of them wait to be delivered
        os.kill(parent, number)
    os.kill(parent, signal.SIGCONT)
    os._exit(0)
os.wait()
gc.collect()
os.rename(flight.usual_path(), sys.argv[2] + "/x")
if os.fork() == 0:  # and while the interpreter ends
    while os.getppid() == parent:
        os.kill(parent, number)
        time.sleep(0.003)
    os._exit(0)
while not flight.usual_path().exists():
    time.sleep(0.003)
"""
    run(RECORDER + script, tmp_path)
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
    script = f"""
import ctypes
assert lib.ucch_flight_catch(43) == 1
ctypes.CDLL({str(library)!r}).by_fault(43)
assert lib.ucch_flight_catch(43) == 1
for _ in range(3):
    os.kill(os.getpid(), 43)
    assert os.path.exists(folder.decode() + "/x.flight")
    os.unlink(folder.decode() + "/x.flight")
print("lives", flush=True)
ctypes.string_at(8)
"""
    assert run(script, folder, ends=-signal.SIGSEGV) == "lives\n"


def test_a_signal_while_records_are_written(tmp_path):
    """Stacks of two writers are not mixed, and both files are written."""
    script = """
from ucc_hetero.trace.flight_files import parse
if (child := os.fork()) == 0:
    while os.getppid() == parent:
        os.kill(parent, number)
        time.sleep(0.004)
    os._exit(0)
while not flight.usual_path().exists():  # the child has begun
    time.sleep(0.003)
for round in range(300):
    path = flight.dump(sys.argv[2] + "/asked")
    if path is not None:  # a failure may have come first
        stack = parse(path.read_bytes()).stack
        assert stack.count("most recent call first") == 1 == stack.count("in <module>"), (round, stack)
os.kill(child, signal.SIGKILL)
assert parse(flight.usual_path().read_bytes()).cause == 2
"""
    run(RECORDER + script, tmp_path)


def test_an_interrupted_dump(tmp_path):
    """It leaves the handler of signals to later dumps: they used to wait for ever."""
    script = """
import threading
main, held = threading.main_thread().ident, ffi.new("int *")

def waits():
    frame = sys._current_frames()[main]
    return frame.f_code.co_name == "dump" and "folder" in vars(frame.f_locals["self"])

def interrupt():
    while not waits():
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    lib.ucch_flight_let_go(held)

lib.ucch_flight_hold(held)
threading.Thread(target=interrupt).start()
try:
    flight.dump()
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    print(flight.dump())
"""
    assert run(RECORDER + script, tmp_path) == f"{tmp_path}/x.3.flight\n"


def test_a_signal_that_somebody_wants(tmp_path):
    script = """
signal.signal(signal.SIGUSR2, lambda *_: None)
assert lib.ucch_flight_catch(signal.SIGUSR2) == 0 == lib.ucch_flight_catch(999)
os.kill(os.getpid(), signal.SIGUSR2)
assert not os.listdir(sys.argv[2])
"""
    run(script, tmp_path, 1)


def test_a_child_records_nothing(tmp_path):
    script = """
if os.fork() == 0:
    lib.ucch_flight_stop()
    lib.ucch_program_run(program(b"child", 7), *both, 0.0, 1.0)
    os._exit(0 if lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL) == -1 else 1)
assert os.wait()[1] == 0
assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL) == 0
"""
    assert written(script, tmp_path).records["label"].tolist()[-1] == b"allreduce float32[2] SUM"


def test_places_that_cannot_be_written(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.symlink("/dev/null", foreign / "x.flight.part")  # is removed, not followed
    script = """
assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, b"/no/such/folder/file") == -1
assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, b"x" * 2000) == -1
assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL) == 0
"""
    assert len(written(script, foreign).records) == 3
    run("assert lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL) == -1", "", 1)


def test_communicators_that_are_freed(tmp_path):
    """Records of freed communicators are limited, also if for a while no descriptor is left; living communicators are
    kept, however old."""
    script = """
import resource
from pathlib import Path
from ucc_hetero.trace import flight
lib.ucch_flight_stop()
flight.begin(3, "j", "host")
numbers = [flight.comm(board, 7, time, [3, 4], 0) for time in range(2)]
limits, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
for k in range(5000):
    flight.forget(flight.comm(board, k % 9, k // 9, [3, 4], 0))
    if k == 2500:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        numbers.append(flight.comm(board, 8, 1, [3], 0))
lib.ucch_board_name(board, numbers[1])
lib.ucch_program_run(program(b"barrier", 7), *both, 0.0, 1.0)
assert flight.dump(sys.argv[2] + "/x.flight") == Path(sys.argv[2], "x.flight")
print(numbers)
"""
    printed, dump = run(script, tmp_path, 0), read(tmp_path / "x.flight")
    assert printed == "[1, 2, 2504]\n" and {1, 2, 2504, 5003} <= set(dump.comms) and len(dump.comms) < 600
    assert dump.comms[2].time == 1 and dump.comms[2504].ranks == (3,)
    assert dump.records["comm"].tolist() == [2] and "in <module>" in dump.stack


def test_communicators_that_threads_make_and_free(tmp_path):
    """Living communicators are kept, also in files written meanwhile."""
    script = """
import threading
lib.ucch_flight_stop()
from ucc_hetero.trace import flight
flight.begin(3, "x", "host")
sys.setswitchinterval(1e-6)
live = [[], []]
def works(mine):
    for k in range(4000):
        number = flight.comm(board, 7, k, [3, 4], 0)
        if k % 100:
            flight.forget(number)
        else:
            mine.append(number)
threads = [threading.Thread(target=works, args=(mine,)) for mine in live]
for each in threads:
    each.start()
k = 0
while any(each.is_alive() for each in threads):
    flight.dump(f"{sys.argv[2]}/{k}.flight")
    k = (k + 1) % 30
flight.dump(sys.argv[2] + "/last.flight")
print(json.dumps(live))
"""
    live = json.loads(run(script, tmp_path, 0))
    dumps = {path.stem: read(path) for path in tmp_path.iterdir()}
    numbers = {*live[0], *live[1]}
    assert len(numbers) == 80 and numbers <= {*dumps["last"].comms} and len(dumps) > 1


def test_transfers(tmp_path):
    """One-sided transfers that are not complete at their start, and may never be."""
    script = """
from ucc_hetero import rma
here, there = rma.Worker(), rma.Worker()
peer = here.connect(there.address)
there.connect(here.address)
room = np.zeros(1 << 20, np.uint8)
mine, theirs = here.register(np.full(1 << 20, 7, np.uint8)), there.register(room)
target = peer.open(theirs.descriptor)
at = np.arange(4096, dtype=np.uint64) * 256
peer.put(mine, target, at, at, np.full(4096, 256), notify=b"there").Wait()
peer.get(mine, target, at, at, np.full(4096, 256)).Wait()
assert (room == 7).all()
assert 0 == lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, ffi.NULL)
here.close(), there.close()
"""
    dump = written(script, tmp_path, runs=0)
    kinds = dump.records["kind"] - 8
    assert kinds.tolist() == [3, 0, 1], kinds  # the request for the region comes first
    assert (dump.records["peer"] == dump.about["pid"]).all() and (dump.records["own"] == 1).all()
    assert dump.records["bytes"].tolist() == [0, 1 << 20, 1 << 20] and dump.records["tag"].tolist() == [0, 1, 0]
    assert (dump.records["ended"] >= dump.records["called"]).all() and (dump.records["status"] == 0).all()
