"""Programs end quietly when nobody reads their output any more, as ``ucch-bench | head`` makes them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.stdio import CLOSED, ends_with_its_reader, reader_gone

ROOT = Path(__file__).resolve().parents[2]

#: Every program that is installed, with arguments that make it print.
PROGRAMS = {
    "bench": ["ucc_hetero.bench", "report", "--help"],
    "ucc_hetero": ["ucc_hetero", "plan", "allreduce", "1M", "--vendors", "nvidia:2,amd:2"],
    "doctor": ["ucc_hetero.launch.doctor", "--json"],
    "run": ["ucc_hetero.launch", "--dry-run", "-np", "2", "true"],
    "emulate": ["ucc_hetero.launch.emulate", "--help"],
}


def run_unread(words: list[str], unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a program whose standard output has no reader from the start."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, cwd=ROOT, timeout=600, check=False,
        )  # fmt: skip
    finally:
        os.close(write)


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs_end_quietly_without_a_reader(words: list[str]) -> None:
    done = run_unread(words, "")
    assert (done.returncode, done.stderr) == (CLOSED, ""), done


def test_so_do_programs_whose_every_line_is_written_at_once() -> None:
    done = run_unread(["ucc_hetero.bench"], "1")
    assert (done.returncode, done.stderr) == (CLOSED, ""), done


def test_a_broken_pipe_to_anything_else_is_an_error() -> None:
    @ends_with_its_reader
    def talks_to_nobody(arguments: object = None) -> int:
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"x")
        finally:
            os.close(write)
        return 0

    assert not reader_gone()
    with pytest.raises(BrokenPipeError):
        talks_to_nobody()


def test_the_status_is_passed_on_and_the_signal_stays_ignored() -> None:
    assert ends_with_its_reader(lambda arguments: 7)([]) == 7
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
