"""One-sided communication of two processes, one of which is stopped or killed in the middle of it."""

import os
import subprocess
import sys

import pytest
from crews import program


@pytest.fixture
def two(tmp_path, request):
    def run(case, before=()):
        words = [*before, sys.executable, *program(tmp_path, f"rma_two_cases:{case}", [], request.path)]
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
