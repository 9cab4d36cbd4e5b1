"""The fixtures that start ranks: they return what these wrote, notice failure, and leave nothing behind."""

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
from crews import NOT_STARTED, RANK, CaseFailed, Crew


def test_a_crew_says_which_rank_is_wrong_and_the_next_case_runs(crew) -> None:
    for case, words in (("raises", "(?s)rank 1: .*no such luck"), ("stays", "(?s)rank 1 did not come .* in stays")):
        with pytest.raises(pytest.fail.Exception, match=words):
            crew(f"harness_cases:{case}", timeout=1)
        assert crew("harness_cases:right").stdout.split() == ["rank", "0", "rank", "1"]


def test_an_mpirun_that_does_not_start_is_started_once_more(capsys) -> None:
    """One process stands for the ranks; the second time that mpirun does not start is the last."""
    for failures in (1, 2):
        started = []

        def start(words: list[str], failures: int = failures, started: list[str] = started, **options: Any) -> Any:
            started.append(words[-1])
            words = ["echo", NOT_STARTED] if len(started) <= failures else words
            return subprocess.Popen(words, **options)

        with contextlib.ExitStack() as expected:
            if failures == 2:
                expected.enter_context(pytest.raises(CaseFailed, match=f"(?s)0 of 1 ranks.*{NOT_STARTED}"))
            crew = Crew(start, [sys.executable], 1, os.environ, 60, lambda _: None)
            crew.run(RANK, "leave_torch", [], {}, 60)
            crew.end(60)
        assert len(started) == 2 and "is started once more" in capsys.readouterr().out


def test_failure_of_a_rank_fails_the_test(mpirun) -> None:
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with status.*no such luck"):
        mpirun("raise SystemExit('no such luck')")
    assert mpirun("raise SystemExit(3)", check=False).returncode != 0
