"""Log lines: their form, levels, subsystems and files."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ucc_hetero import log as module
from ucc_hetero.log import TRACE, configure, log, set_rank


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LEVEL", "SUBSYS", "FILE"):
        monkeypatch.delenv("UCCH_LOG_" + name, raising=False)
    set_rank(3, "nvidia:1")
    yield
    monkeypatch.undo()
    module._who.update(rank="-", device="-")
    root = logging.getLogger("ucc_hetero")
    if module._handler is not None:
        root.removeHandler(module._handler)
        module._handler.close()
        module._handler = None
    root.setLevel(logging.NOTSET)
    root.propagate = True


def test_form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("UCCH_LOG_LEVEL", "info")
    configure()
    log("plan").info("made %d steps", 3)
    log("plan").debug("not this")
    line = capsys.readouterr().err
    form = rf"{re.escape(socket.gethostname())}:{os.getpid()}:\d+ \[3/nvidia:1\] UCCH INFO PLAN made 3 steps\n"
    assert re.fullmatch(form, line)


def test_configuring_again_does_not_double(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    configure()
    log("coll").warning("once")
    log("coll").info("silent by default")
    assert capsys.readouterr().err.count("UCCH") == 1


def test_subsystems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("UCCH_LOG_LEVEL", "trace")
    monkeypatch.setenv("UCCH_LOG_SUBSYS", "p2p")
    configure()
    log("p2p").log(TRACE, "step")
    log("plan").info("no")
    log("plan").error("always")
    err = capsys.readouterr().err
    assert "UCCH TRACE P2P step" in err and "UCCH ERROR PLAN always" in err and "no\n" not in err


def test_file_per_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCCH_LOG_FILE", str(tmp_path / "%h-%p-%r-%%.log"))
    configure()
    try:
        raise RuntimeError("inner")
    except RuntimeError:
        log("init").exception("outer")
    text = (tmp_path / f"{socket.gethostname()}-{os.getpid()}-3-%.log").read_text()
    assert "UCCH ERROR INIT outer\nTraceback" in text and "RuntimeError: inner" in text


def test_bad_setting_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCH_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="UCCH_LOG_LEVEL"):
        configure()
