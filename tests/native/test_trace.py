"""The native ring of events: what a program leaves in it, in a file that outlives the process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ucc_hetero.trace.chrome import EVENT, used

#: Runs a program of two copies several times and is then killed.
SCRIPT = """
import os, signal, sys
import numpy as np
from ucc_hetero.native.libraries import ffi, lib
assert lib.ucch_trace_open(sys.argv[1].encode(), int(sys.argv[2])) == 0
board = lib.ucch_board_new(ffi.NULL, 1, 0, ffi.new("int[]", [0]))
program = lib.ucch_program_new(2, board, 0, b"two copies")
code = 4 << 3  # any datatype of 16 bytes
for i in range(2):
    part = {"kind": lib.UCCH_STEP_LOCAL + lib.UCCH_COPY, "dtype": code, "src": (0, 16 * i, 1), "dst": (1, 16 * i, 1)}
    assert lib.ucch_program_step(program, i, [part]) == 0
lib.ucch_program_trace(program, 7)
send, recv = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
for _ in range(int(sys.argv[3])):
    assert lib.ucch_program_run(program, ffi.from_buffer(send), ffi.from_buffer(recv), 0.0, 1.0) == 1
assert (recv == send).all()
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def record(path: Path, capacity: int, runs: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    command = [sys.executable, "-c", SCRIPT, str(path), str(capacity), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -9, done.stderr
    return np.frombuffer(used(path.read_bytes()), EVENT)


def test_a_killed_process_leaves_its_events(tmp_path: Path) -> None:
    events = record(tmp_path / "r", 100, 3)
    assert events["step"].tolist() == [-1, 0, 1] * 3
    assert (events["program"] == 7).all()
    assert (events["status"] == 0).all()
    assert (events["end"] >= events["begin"]).all()
    calls, steps = events[events["step"] < 0], events[events["step"] >= 0]
    assert (np.diff(calls["begin"]) > 0).all()
    assert (steps["begin"].reshape(3, 2) >= calls["begin"][:, None]).all()
    assert (steps["end"].reshape(3, 2) <= calls["end"][:, None]).all()


@pytest.mark.parametrize("runs", [2, 3, 50])
def test_the_oldest_are_overwritten(tmp_path: Path, runs: int) -> None:
    events = record(tmp_path / "r", 8, runs)
    assert events["step"].tolist() == ([-1, 0, 1] * runs)[-8:]
    assert (np.diff(events["begin"].astype(np.int64)) >= 0).all()


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    from ucc_hetero.native.libraries import lib

    assert lib.ucch_trace_open(str(tmp_path / "no" / "folder").encode(), 8) == -1
