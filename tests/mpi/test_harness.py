"""The fixtures that start ranks: they return the ranks' output, notice failures, and leave nothing behind."""

import pytest


def test_a_crew_says_which_rank_is_wrong_and_the_next_case_runs(crew):
    for case, words, seconds in (
        ("raises", "(?s)rank 1: .*no such luck", 60),
        ("stays", "(?s)rank 1 did not come .* in stays", 0.3),
    ):
        with pytest.raises(pytest.fail.Exception, match=words):
            crew(f"harness_cases:{case}", timeout=seconds)
        assert crew("harness_cases:right").stdout.split() == ["rank", "0", "rank", "1"]


def test_failure_of_a_rank_fails_the_test(mpirun):
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with status.*no such luck"):
        mpirun("raise SystemExit('no such luck')")
