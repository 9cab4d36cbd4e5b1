"""The fixtures that start ranks: they return what these wrote, notice failure, and leave nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

HANG = """
import sys, time
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, "is here", flush=True)
if MPI.COMM_WORLD.rank:
    MPI.COMM_WORLD.Barrier()
time.sleep(600)
"""


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that mention a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        if str(folder) in line:
            found.append(line)
    return found


def test_a_crew_says_which_rank_is_wrong_and_the_next_case_runs(crew) -> None:
    for case, words in (("raises", "(?s)rank 1: .*no such luck"), ("stays", "(?s)rank 1 did not come .* in stays")):
        with pytest.raises(pytest.fail.Exception, match=words):
            crew(f"harness_cases:{case}", timeout=1)
        assert crew("harness_cases:right").stdout.split() == ["rank", "0", "rank", "1"]


def test_a_line_is_written_in_one_piece(mpirun) -> None:
    """Words of several ranks would run into each other otherwise."""
    script = """
import os, socket, sys
from mpi4py import MPI
out = os.dup(1)
for fd in (1, 2):
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    os.dup2(here.fileno(), fd)
    print("right", MPI.COMM_WORLD.rank, file=(None, sys.stdout, sys.stderr)[fd])
    os.write(out, there.recv(100))
"""
    job = mpirun(script, 2)
    assert sorted(job.stdout.splitlines()) == ["right 0", "right 0", "right 1", "right 1"]
    assert (job.said("right"), job.said("right 1"), job.said("righ"), job.said("1")) == (4, 2, 0, 0)


def test_failure_of_a_rank_fails_the_test(mpirun) -> None:
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with status.*no such luck"):
        mpirun("raise SystemExit('no such luck')")
    assert mpirun("raise SystemExit(3)", check=False).returncode != 0


def test_hanging_job_is_killed_with_its_output_kept(mpirun, tmp_path: Path, room: int) -> None:
    for limit in (1, 5, 25):  # a busy machine takes its time to start ranks
        with pytest.raises(pytest.fail.Exception, match=f"killed after {limit * room} s") as killed:
            mpirun(HANG, 3, timeout=limit)
        assert not processes_of(tmp_path)
        if "rank 0 is here" in str(killed.value):
            return
    pytest.fail(str(killed.value))


def test_terminated_run_leaves_no_ranks(tmp_path: Path) -> None:
    """They would keep what they hold: ranks that had filled a GPU failed every test of the next run."""
    (tmp_path / "test_it.py").write_text(f"def test_it(mpirun):\n    mpirun({HANG!r})\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.Popen(
        [*command, "--basetemp", str(tmp_path / "base"), str(tmp_path / "test_it.py")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 100
    while not any("is here" in each.read_text() for each in tmp_path.glob("base/**/mpirun.out")):
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.1)
    run.terminate()
    run.terminate()
    output, _ = run.communicate(timeout=600)
    until = time.monotonic() + 100
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output
    while processes_of(tmp_path):
        assert time.monotonic() < until, processes_of(tmp_path)
        time.sleep(0.1)
