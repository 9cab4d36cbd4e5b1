"""Environment variables and their first use: log lines, their format, levels, subsystems and files."""

import logging
import math
import os
import re
import socket

import pytest

from ucc_hetero import env
from ucc_hetero import log as module
from ucc_hetero.log import TRACE, configure, log, set_rank


@pytest.mark.parametrize("text, value", [
    ("0", 0), ("4k", 4096), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("1tb", 1 << 40), ("8b", 8), (" inf ", math.inf),
])  # fmt: skip
def test_sizes(text, value):
    assert env.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "4X", "1e6", "infinite", "0x10"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="size|whole"):
        env.parse_size(text)


@pytest.mark.parametrize("name, text, value", [
    ("TIMEOUT", "2.5", 2.5), ("TIMEOUT", "inf", math.inf), ("TIMEOUT", "  ", 300.0), ("WIRES", "auto", "auto"),
    ("WIRES", "0", 0), ("WIRE_SLOT", "16K", 16 << 10), ("WIRE_SLOT", "Auto", "auto"), ("CHECK", "Yes", True),
    ("CHECK", "0", False), ("CHECK", "data", env.Sampling(100)), ("CHECK", "Data:7", env.Sampling(7)),
    ("LOG_SUBSYS", "plan, coll", ("plan", "coll")), ("LOG_LEVEL", "DEBUG", "debug"), ("STAGING", "staged", "staged"),
    ("FLIGHT_SIGNAL", "SIGUSR2", 12), ("FLIGHT_SIGNAL", "usr2", 12), ("FLIGHT_SIGNAL", "RTMIN+9", 43),
    ("FLIGHT_SIGNAL", "none", 0),
])  # fmt: skip
def test_get(name, text, value):
    assert env.get(name, {"UCCH_" + name: text}) == value


@pytest.mark.parametrize("name, text, message", [
    ("TIMEOUT", "soon", "UCCH_TIMEOUT: 'soon' is not a number of seconds"),
    *(("TIMEOUT", text, "more than 0") for text in ("0", "nan")),
    *(("WIRES", text, "neither auto nor from 0 to 16") for text in ("17", "-1")),
    *(("WIRE_SLOT", text, "not a multiple of 4K from 16K to 16M") for text in ("15K", "32M")),
    *(("FLIGHT_SIGNAL", text, "neither a signal that can be handled")
      for text in ("0", "RTMIN+99", "USR9", "KILL", "19")),
    ("CHECK", "maybe", "UCCH_CHECK: 'maybe' is neither yes"), ("CHECK", "data:0", "nor data or data:N"),
    ("LOG_LEVEL", "loud", "UCCH_LOG_LEVEL: 'loud' is not one of error, warn, info, debug, trace"),
    ("LOG_SUBSYS", "plan,x", "UCCH_LOG_SUBSYS: 'x' is not one of"),
])  # fmt: skip
def test_bad_values_name_the_variable(name, text, message):
    with pytest.raises(ValueError, match=message):
        env.get(name, {"UCCH_" + name: text})


def test_defaults_and_unknown_names():
    for name, variable in env.TABLE.items():
        assert env.get(name, {}) == variable.default
        assert f"UCCH_{name}=" in env.describe() and variable.doc in env.describe()
    with pytest.raises(KeyError):
        env.get("NO_SUCH", {})


def test_unknown_variables_are_warned_of_once(monkeypatch, capsys):
    """One log line with the most similar known name, without this package's source."""
    monkeypatch.setattr(module, "_warned", set())
    monkeypatch.setenv("UCCH_TIMEOUTT", "3")
    monkeypatch.setenv("UCCH_log_level", "info")
    assert "UCCH_TIMEOUTT" in env.unknown() and "UCCH_TIMEOUT" not in env.unknown(["UCCH_TIMEOUT", "PATH"])
    configure()
    module.warn_unknown()
    module.warn_unknown()
    said = capsys.readouterr().err.splitlines()
    assert [re.sub(".* UCCH WARN INIT ", "", line) for line in said] == [
        "unknown variable UCCH_TIMEOUTT: did you mean UCCH_TIMEOUT?",
        "unknown variable UCCH_log_level: did you mean UCCH_LOG_LEVEL?",
    ]


def test_wrong_values_are_named_together(monkeypatch):
    env.check()
    monkeypatch.setenv("UCCH_WIRES", "17")
    monkeypatch.setenv("UCCH_TIMEOUT", "soon")
    with pytest.raises(
        ValueError, match="UCCH_TIMEOUT: 'soon' is not a number of seconds, or inf; UCCH_WIRES: '17' is"
    ):
        env.check()


def test_a_log_file_that_cannot_be_written_is_a_wrong_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("UCCH_LOG_FILE", str(tmp_path / "none" / "%r.log"))
    with pytest.raises(ValueError, match=r"UCCH_LOG_FILE: '.*/none/3.log' cannot be written: No such file"):
        configure()


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
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


HERE = rf"{re.escape(socket.gethostname())}:{os.getpid()}:\d+ \[3/nvidia:1\] UCCH "


@pytest.mark.parametrize("before", [None, "mine"])
def test_variables_that_several_threads_set_meanwhile(monkeypatch, before):
    """The first thread to set them may be the first to restore them: the last one restores the values before all
    threads."""
    name = "UCX_FOR_A_TEST"
    monkeypatch.setenv(name, "")
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before
    first, second = (env.meanwhile({name: "y"}) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[name] == "y"
    assert not second.__exit__(ZeroDivisionError, ZeroDivisionError(), None), "also where something was raised"
    assert os.environ.get(name) == before


@pytest.mark.parametrize("settings, lines", [
    ({}, ["ERROR PLAN always", "WARN COLL once"]),  # configured twice
    ({"LEVEL": "info"}, ["ERROR PLAN always", "INFO PLAN made 3 steps", "WARN COLL once"]),
    ({"LEVEL": "trace", "SUBSYS": "p2p"}, ["ERROR PLAN always", "TRACE P2P step", "WARN COLL once"]),
], ids=["default", "level", "subsystem"])  # fmt: skip
def test_lines(monkeypatch, capsys, settings, lines):
    for name, value in settings.items():
        monkeypatch.setenv("UCCH_LOG_" + name, value)
    configure()
    configure()
    log("plan").error("always")
    log("p2p").log(TRACE, "step")
    log("plan").info("made %d steps", 3)
    log("coll").warning("once")
    assert re.fullmatch("".join(f"{HERE}{line}\n" for line in lines), capsys.readouterr().err)


def test_file_per_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("UCCH_LOG_FILE", str(tmp_path / "%h-%p-%r-%%.log"))
    configure()
    try:
        raise RuntimeError("inner")
    except RuntimeError:
        log("init").exception("outer")
    text = (tmp_path / f"{socket.gethostname()}-{os.getpid()}-3-%.log").read_text()
    assert "UCCH ERROR INIT outer\nTraceback" in text and "RuntimeError: inner" in text
