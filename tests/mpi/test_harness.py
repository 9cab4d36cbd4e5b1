"""The fixtures that start ranks: they return the ranks' output, notice failures, and leave nothing behind."""

import pytest

#: Rank 1 fails or stays away, and rank 0 waits; MPI's Barrier would take a core.
AMISS = """
import threading
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1 and {fails}:
    raise ValueError("no such luck")
threading.Event().wait()
"""


def test_a_crew_says_which_rank_is_wrong_and_the_next_case_runs(crew):
    for fails, words, seconds in (True, "(?s)rank 1: .*no such luck", 60), (False, "(?s)rank 1 did not come .*", 0.3):
        with pytest.raises(pytest.fail.Exception, match=words):
            crew(AMISS.format(fails=fails), timeout=seconds)
        assert crew("from mpi4py import MPI\nprint('rank', MPI.COMM_WORLD.rank)").stdout.split() == [
            "rank", "0", "rank", "1",
        ]  # fmt: skip


def test_failure_of_a_rank_fails_the_test(mpirun):
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with status.*no such luck"):
        mpirun("raise SystemExit('no such luck')")
