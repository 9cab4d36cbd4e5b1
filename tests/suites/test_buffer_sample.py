"""A sample of drawn calls with buffers in mpi4py's forms; ``make suites`` draws 20,000."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import buffer_suite
from buffer_suite import judge, listed
from conftest import ROOM


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["2", "3 of two vendors"])
def test_sample(layout: str) -> None:
    tally = judge(buffer_suite.run(layout, 200, seed=1, room=ROOM), listed())
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.counts.total() == 200 and tally.counts["alike: results"] > 40, tally.counts
