"""Cases of the native rings of operations and events, each in a process of its own."""

import ctypes
import errno
import faulthandler
import gc
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from ucc_hetero import env, rma
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.trace import flight
from ucc_hetero.trace.flight_files import parse


class Recorder:
    """A ring of 16 operations, which programs of one copy each have filled; it is written into a folder."""

    def __init__(self, folder, runs):
        self.folder, self.files = Path(folder), [os.memfd_create(name) for name in "ras"]
        where = folder.encode() or ffi.NULL
        assert lib.ucch_flight_open(*self.files, 16, 3, where, b"x.flight") == 0
        about = {"rank": 3, "job": "j", "host": "h", "pid": os.getpid(), "vendor": "host", "command": "c"}
        os.write(self.files[1], json.dumps(about).encode() + b"\n")
        os.write(self.files[1], b'{"comm": 5, "number": 0, "time": 1, "ranks": [3, 4], "mine": 0}\n')
        self.board = lib.ucch_board_new(ffi.NULL, 1, 0, ffi.new("int[]", [0]), 1)
        lib.ucch_board_name(self.board, 5)
        self.path = self.folder / "x.flight"
        for i in range(runs):
            each = self.program(b"allreduce float32[%d] SUM" % i, 1000 + i)
            self.run(each)
            lib.ucch_program_free(each)

    def program(self, label, signature, number=0):
        part = {"kind": lib.UCCH_STEP_LOCAL + lib.UCCH_COPY, "dtype": 4 << 3, "src": (0, 0, 1), "dst": (1, 0, 1)}
        text, status = ffi.new("char[]", label), ffi.new("int *")
        about = {"label": text, "signature": signature, "number": number, "bytes": signature}
        made = lib.ucch_program_new(self.board, [about], 1, [part], status)
        assert status[0] == 0
        return made

    def run(self, program):
        send, recv = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
        assert lib.ucch_program_run(program, ffi.from_buffer(send), ffi.from_buffer(recv), 0.0, 1.0) == 1

    def dump(self, path=ffi.NULL):
        return lib.ucch_flight_dump(lib.UCCH_DUMP_ASKED, path)

    def as_in_the_package(self):
        """From here on the recorder is the package's own. Returns the number of its signal."""
        lib.ucch_flight_stop()
        os.environ["UCCH_FLIGHT"] = str(self.folder)
        flight.begin(3, "x", "host")
        return env.get("FLIGHT_SIGNAL")


def killed(folder, runs):
    """With events of this number of runs."""
    rec = Recorder(folder, 0)
    assert lib.ucch_trace_open(f"{folder}/no/folder".encode(), 8) == errno.ENOENT
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    assert lib.ucch_trace_open(f"{folder}/long".encode(), 1 << 18) == errno.EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.path.exists(f"{folder}/long")
    assert lib.ucch_trace_open(f"{folder}/ring".encode(), 8) == 0
    each = rec.program(b"copy", 7, 7)
    for _ in range(runs):
        rec.run(each)
    os.kill(os.getpid(), signal.SIGKILL)


def asked(folder, runs):
    assert Recorder(folder, runs).dump() == 0


def refused_and_failed(folder):
    rec = Recorder(folder, 1)
    late = [lib.ucch_message_new() for _ in range(2)]
    team = rec.program(b"barrier", 1)
    lib.ucch_board_refuse(rec.board, b"ValueError: count")
    record = lib.ucch_board_record(rec.board, lib.UCCH_RECORD_MPI, 9, 4, b"reduce by MPI")
    lib.ucch_record_end(record, lib.UCCH_FAIL_REFUSED)  # no failure of the communicator's
    assert not os.listdir(folder)
    record = lib.ucch_board_record(rec.board, lib.UCCH_RECORD_MPI, 10, 4, b"reduce by MPI")
    lib.ucch_record_end(record, lib.UCCH_FAIL_TIMEOUT)
    rec.path.rename(rec.folder / "first")
    lib.ucch_record_end(lib.ucch_board_record(rec.board, lib.UCCH_RECORD_MPI, 11, 4, b"after"), lib.UCCH_FAIL_PEER)
    assert os.listdir(folder) == ["first"]  # in one burst
    (rec.folder / "first").rename(rec.path)
    del late, team


def stuck():
    """An endless regular expression, which holds the interpreter's lock."""
    re.match("(a+)+$", "a" * 40 + "b")


def signalled_when_stuck(folder):
    rec = Recorder(folder, 2)
    assert lib.ucch_flight_catch(43) == 1 == lib.ucch_flight_catch(43)
    faulthandler.register(43, rec.files[2], all_threads=True)
    assert lib.ucch_flight_catch(43) == 1
    parent, (begun, begin) = os.getpid(), os.pipe()
    if os.fork() == 0:
        os.read(begun, 1)
        for turn in range(2):  # the second stack is not behind the first
            turn and rec.path.unlink()
            while not rec.path.exists():  # complete from the start; signals that come meanwhile are one
                os.kill(parent, 43)
                time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.write(begin, b"x")
    stuck()


def many_signals(folder):
    rec = Recorder(folder, 2)
    number, parent = rec.as_in_the_package(), os.getpid()
    assert lib.ucch_flight_catch(number) == 1
    if os.fork() == 0:
        os.kill(parent, signal.SIGSTOP)
        for _ in range(500):  # all of them wait to be delivered
            os.kill(parent, number)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.wait()
    gc.collect()
    flight.usual_path().rename(rec.folder / "x")
    if os.fork() == 0:  # and while the interpreter ends
        while os.getppid() == parent:
            os.kill(parent, number)
            time.sleep(0.003)
        os._exit(0)
    while not flight.usual_path().exists():
        time.sleep(0.003)


def faults(folder, library):
    rec = Recorder(folder, 2)
    assert lib.ucch_flight_catch(43) == 1
    ctypes.CDLL(library).by_fault(43)
    assert lib.ucch_flight_catch(43) == 1
    for _ in range(3):
        os.kill(os.getpid(), 43)
        rec.path.unlink()
    print("lives", flush=True)
    ctypes.string_at(8)


def signalled_when_writing(folder):
    """Stacks of two writers are not mixed, and both files are written."""
    rec = Recorder(folder, 2)
    number, parent = rec.as_in_the_package(), os.getpid()
    if (child := os.fork()) == 0:
        while os.getppid() == parent:
            os.kill(parent, number)
            time.sleep(0.004)
        os._exit(0)
    while not flight.usual_path().exists():  # the child has begun
        time.sleep(0.003)
    for turn in range(300):
        path = flight.dump(rec.folder / "asked")
        if path is not None:  # a failure may have come first
            stack = parse(path.read_bytes()).stack
            assert stack.count("most recent call first") == 1 == stack.count("in <module>"), (turn, stack)
    os.kill(child, signal.SIGKILL)
    assert parse(flight.usual_path().read_bytes()).cause == 2


def interrupted(folder):
    Recorder(folder, 2).as_in_the_package()
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


def wanted_signal(folder):
    """A signal for which the program has a handler is left alone."""
    Recorder(folder, 1)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    assert lib.ucch_flight_catch(signal.SIGUSR2) == 0 == lib.ucch_flight_catch(999)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not os.listdir(folder)


def child(folder):
    rec = Recorder(folder, 3)
    if os.fork() == 0:
        lib.ucch_flight_stop()
        rec.run(rec.program(b"child", 7))
        os._exit(0 if rec.dump() == -1 else 1)
    assert os.wait()[1] == 0
    assert rec.dump() == 0


def places(folder):
    rec = Recorder(folder, 3)
    assert rec.dump(b"/no/such/folder/file") == rec.dump(b"x" * 2000) == -1
    assert rec.dump() == (0 if folder else -1)


def freed_communicators(folder):
    rec = Recorder(folder, 0)
    rec.as_in_the_package()
    numbers = [flight.comm(rec.board, 7, time, [3, 4], 0) for time in range(2)]
    limits, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    for k in range(5000):
        flight.forget(flight.comm(rec.board, k % 9, k // 9, [3, 4], 0))
        if k == 2500:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            numbers.append(flight.comm(rec.board, 8, 1, [3], 0))
    lib.ucch_board_name(rec.board, numbers[1])
    rec.run(rec.program(b"barrier", 7))
    assert flight.dump(rec.path) == rec.path
    print(numbers)


def communicators_of_threads(folder):
    rec, live, k = Recorder(folder, 0), [[], []], 0
    rec.as_in_the_package()
    sys.setswitchinterval(1e-6)

    def works(mine):
        for made in range(4000):
            number = flight.comm(rec.board, 7, made, [3, 4], 0)
            if made % 100:
                flight.forget(number)
            else:
                mine.append(number)

    threads = [threading.Thread(target=works, args=(mine,)) for mine in live]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        flight.dump(f"{folder}/{k}.flight")
        k = (k + 1) % 30
    flight.dump(f"{folder}/last.flight")
    print(json.dumps(live))


def transfers(folder):
    rec, here, there = Recorder(folder, 0), rma.Worker(), rma.Worker()
    peer = here.connect(there.address)
    there.connect(here.address)
    room = np.zeros(1 << 20, np.uint8)
    mine, theirs = here.register(np.full(1 << 20, 7, np.uint8)), there.register(room)
    target = peer.open(theirs.descriptor)
    at = np.arange(4096, dtype=np.uint64) * 256
    peer.put(mine, target, at, at, np.full(4096, 256), notify=b"there").Wait()
    peer.get(mine, target, at, at, np.full(4096, 256)).Wait()
    assert (room == 7).all()
    assert rec.dump() == 0
    here.close(), there.close()
