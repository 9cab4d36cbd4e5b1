"""What is printed of an error that ends a rank."""

import logging
import sys
from pathlib import Path

import pytest

import ucc_hetero
from ucc_hetero import log
from ucc_hetero.bootstrap.uncaught import text_of
from ucc_hetero.planner.rules import parse_tune


def printed(call, *args) -> str:  # type: ignore[no-untyped-def]
    try:
        call(*args)
    except Exception:
        return text_of(*sys.exc_info())  # type: ignore[arg-type]
    raise AssertionError("no error")


def test_frames_of_the_package_are_left_out_of_what_it_raises_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(parse_tune, "nonsense")
    assert "call(*args)" in text and "in parse_tune" in text and "in _section" not in text
    assert "(1 more inside ucc_hetero, which UCCH_LOG_LEVEL=debug shows)" in text
    assert text.splitlines()[-1].startswith("ValueError: UCCH_TUNE: section 'nonsense'")
    monkeypatch.setattr(log.log("init"), "level", logging.DEBUG)
    log.log("init").manager._clear_cache()  # type: ignore[attr-defined]
    assert "in _section" in printed(parse_tune, "nonsense")


def test_faults_of_the_package_and_errors_within_errors_are_shown_whole() -> None:
    inside = Path(ucc_hetero.__file__).with_name("made_up.py")
    names: dict[str, object] = {}
    exec(compile("def one():\n    two()\ndef two():\n    3 + ''\n", inside, "exec"), names)
    assert "in two" in printed(names["one"])

    def handler() -> None:
        try:
            raise KeyError("mine")
        except KeyError:
            parse_tune("allreduce")  # which names no algorithm

    text = printed(handler)
    assert "KeyError: 'mine'" in text and "in _section" in text
