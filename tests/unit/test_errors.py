"""What ranks are told about a failed call, and what is printed of an error that ends a rank."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ucc_hetero
from ucc_hetero import log
from ucc_hetero.bootstrap.exit import text_of
from ucc_hetero.calls.state import explain, with_record_path
from ucc_hetero.errors import CollectiveError, MismatchError, RefusedError
from ucc_hetero.native.libraries import lib
from ucc_hetero.planner.rules import parse_tune
from ucc_hetero.trace import flight


@pytest.fixture
def left():
    """The board of rank 2 on the second of two hosts, in the state that rank 3 left after one of its calls failed."""
    looks = iter([(0, -1, ""), (0, -1, "")])
    return SimpleNamespace(
        processes=(),
        native=None,
        hosts=[0, 0, 1, 1],
        ranks=[2, 3],
        rank_of=lambda slot: 3,
        refusal=lambda: None,
        fate=lambda rank: lib.UCCH_LEFT if rank == 3 else lib.UCCH_THERE,
        dead=lambda: -1,
        parted=lambda seq: (0, -1),
        given_up=lambda rank: 8 if rank == 3 else 0,
        is_cut=lambda rank: False,
        link_to=lambda rank: "",
        difference=lambda seq: next(looks, (7, 1, "bcast float32[9] root=3")),
    )


def news(*later):
    """Return what the second look at the board finds."""
    looks = iter([None, None])
    return lambda *_: next(looks, later)


#: What happens while a rank waits for the reason -> the error, and words of its message.
REASONS = {
    "another call": (
        {}, MismatchError, "rank 1 called bcast float32[9] root=3, where it should have been as call 7 here",
    ),
    "a death": (
        {"dead": lambda: 0, "difference": lambda seq: (0, -1, ""), "given_up": lambda rank: 6},
        CollectiveError, "rank 3 has given up, as call 6 has failed there",
    ),
    "a refusal": (
        {"refusal": news(7, 0, "TypeError: no buffer"), "difference": lambda seq: (0, -1, ""), "given_up": lambda _: 7},
        RefusedError, "rank 0 refused its part: TypeError: no buffer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REASONS)
def test_a_rank_that_has_left_first_is_no_reason(left, what):
    """If calls differ, ranks die meanwhile, or a refusal arrives after it made a rank leave."""
    found_out, kind, words = REASONS[what]
    vars(left).update(found_out)
    failed = SimpleNamespace(status=lib.UCCH_FAIL_PEER, seq=7, peer=1, step=0, elapsed=0.1)
    error = explain(failed, left, 2, "bcast float32[9] root=0", 5.0)
    assert type(error) is kind and words in str(error)


def printed(call, *args):
    try:
        call(*args)
    except Exception:
        return text_of(*sys.exc_info())
    raise AssertionError("no error")


def test_frames_of_the_package_are_left_out_of_what_it_raises_on_purpose(monkeypatch):
    text = printed(parse_tune, "nonsense")
    assert "call(*args)" in text and "in parse_tune" in text and "in _section" not in text
    assert "(1 more inside ucc_hetero, which UCCH_LOG_LEVEL=debug shows)" in text
    assert text.splitlines()[-1].startswith("ValueError: UCCH_TUNE: section 'nonsense'")
    monkeypatch.setattr(log.log("init"), "level", logging.DEBUG)
    log.log("init").manager._clear_cache()
    assert "in _section" in printed(parse_tune, "nonsense")


def test_faults_of_the_package_and_errors_within_errors_are_shown_whole():
    inside = Path(ucc_hetero.__file__).with_name("made_up.py")
    names = {}
    exec(compile("def one():\n    two()\ndef two():\n    3 + ''\n", inside, "exec"), names)
    assert "in two" in printed(names["one"])

    def handler():
        try:
            raise KeyError("mine")
        except KeyError:
            parse_tune("allreduce")  # it names no algorithm

    text = printed(handler)
    assert "KeyError: 'mine'" in text and "in _section" in text


def test_a_flight_record_that_was_not_written_is_not_named(monkeypatch, tmp_path):
    path = tmp_path / "4.flight"
    monkeypatch.setattr(flight, "usual_path", lambda: path)
    assert str(with_record_path(CollectiveError("rank 1 is gone"))) == "rank 1 is gone"
    path.touch()
    assert str(path) in str(with_record_path(CollectiveError("rank 1 is gone")))
