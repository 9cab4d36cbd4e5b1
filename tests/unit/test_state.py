"""What ranks are told of a call that has failed."""

from types import SimpleNamespace

import pytest

from ucc_hetero.calls.state import explain
from ucc_hetero.errors import CollectiveError, MismatchError, RefusedError
from ucc_hetero.native.libraries import lib


@pytest.fixture
def left() -> SimpleNamespace:
    """The board of rank 2 on the second of two hosts, as rank 3 has left it after a call of its own had failed."""
    looks = iter([(0, -1, ""), (0, -1, "")])
    return SimpleNamespace(
        native=None,
        hosts=[0, 0, 1, 1],
        ranks=[2, 3],
        rank_of=lambda slot: 3,
        refusal=lambda: None,
        fate=lambda rank: lib.UCCH_LEFT if rank == 3 else lib.UCCH_THERE,
        dead=lambda: -1,
        parted=lambda seq: (0, -1),
        given_up=lambda rank: 8 if rank == 3 else 0,
        difference=lambda seq: next(looks, (7, 1, "bcast float32[9] root=3")),
    )


def error_of(status: int, seq: int = 7) -> SimpleNamespace:
    return SimpleNamespace(status=status, seq=seq, peer=1, step=0, elapsed=0.1)


def test_a_rank_that_has_left_first_is_no_reason_where_calls_differ(left: SimpleNamespace) -> None:
    found = explain(error_of(lib.UCCH_FAIL_PEER), left, 2, "bcast float32[9] root=0", 5.0)
    assert isinstance(found, MismatchError)
    assert "rank 1 called bcast float32[9] root=3, where it should have been as call 7 here" in str(found)


def test_a_rank_that_dies_meanwhile_is_the_reason(left: SimpleNamespace) -> None:
    left.dead, left.difference, left.given_up = lambda: 0, lambda seq: (0, -1, ""), lambda rank: 6
    found = explain(error_of(lib.UCCH_FAIL_PEER), left, 2, "barrier", 5.0)
    assert type(found) is CollectiveError and "rank 3 has given up, as call 6 has failed there" in str(found)


def test_a_refusal_that_is_heard_of_after_it_has_made_a_rank_leave_is_the_reason(left: SimpleNamespace) -> None:
    looks = iter([None, None])
    left.difference, left.given_up = lambda seq: (0, -1, ""), lambda rank: 7
    left.refusal = lambda: next(looks, (7, 0, "TypeError: no buffer"))
    found = explain(error_of(lib.UCCH_FAIL_PEER), left, 2, "alltoall float32[9]", 5.0)
    assert isinstance(found, RefusedError) and "rank 0 refused its part: TypeError: no buffer" in str(found)
