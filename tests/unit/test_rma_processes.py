"""One-sided communication of two processes, one of which is stopped or killed in the middle of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crews import program


@pytest.fixture
def two(tmp_path, request):
    def run(case, before=(), args=()):
        words = [*before, sys.executable, *program(tmp_path, f"rma_two_cases:{case}", args, request.path)]
        return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)

    return run


@pytest.mark.parametrize(("case", "begun"), [("many", "4000"), ("under_way", "256")])
def test_much_is_under_way(two, case, begun):
    """Transfers that wait for each other, and work of libucp when the worker is closed, used to end the process."""
    done = two(case)
    assert (done.returncode, done.stdout.split()) == (0, [begun]), done


def test_a_number_that_another_process_has_now(two):
    """The peer's memory is now another process's, and nothing is written to it."""
    own = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = two("reused", (*own, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"))
    if "skip" in done.stderr or "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["refused", "clean"], done


def test_a_loss_for_lack_of_memory_is_an_error(two, tmp_path, compiled):
    library = tmp_path / "no_memory.so"
    compiled(library, "-shared", "-fPIC", Path(__file__).with_name("no_memory.c"), "-ldl")
    done = two("no_memory", ("env", f"LD_PRELOAD={library}"), [str(library)])
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["right"]), done  # libucp says so, too
