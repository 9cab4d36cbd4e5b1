"""A sample of drawn calls with buffers in mpi4py's forms; ``make suites`` draws 20,000."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import buffer_suite
from buffer_suite import Listed, judge, listed
from conftest import ROOM


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["2", "3 of two vendors"])
def test_sample(layout: str) -> None:
    tally = judge(buffer_suite.run(layout, 200, seed=1, room=ROOM), listed())
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.counts.total() == 200 and tally.counts["alike: results"] > 40, tally.counts


def test_what_is_wrong_is_said() -> None:
    known = [Listed("ours", ("too long", "too short"), "never mind")]
    tally = judge(
        [
            ("alike", "results", -1, "Bcast", "case 1"),
            ("only we refuse", "it is too short", 1, "Bcast", "case 2"),
            ("only mpi4py refuses", "it is too short", 0, "Bcast", "case 3"),
            ("differs", "1 of 2 bytes", 2, "Bcast", "case 4"),
            ("only we fail", "a mistake", 0, "Bcast", "case 5"),
            ("not run", "readonly", -1, "Bcast", "case 6"),
        ],
        known,
    )
    assert tally.reasons == {known[0]: 1}
    assert [text.partition("\n")[0] for text in tally.wrong] == [
        "only mpi4py refuses on rank 0: it is too short",
        "differs on rank 2: 1 of 2 bytes",
        "only we fail on rank 0: a mistake",
    ]
    assert tally.counts.total() == 6 and tally.counts["alike: results"] == 1
