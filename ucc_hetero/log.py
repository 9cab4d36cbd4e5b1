"""Logging: stdlib loggers, one per subsystem, in lines of ``host:pid:tid [rank/device] UCCH LEVEL SUBSYS text``.

``log("plan").info(...)`` costs one comparison when it is off. ``UCCH_LOG_LEVEL``, ``UCCH_LOG_SUBSYS`` and
``UCCH_LOG_FILE`` are read by ``configure``, which the first communicator calls, so that importing has no side effect;
an application that configures logging itself need only attach handlers to the logger ``ucc_hetero``.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading

from . import env
from .machine.launchers import number

#: Below DEBUG: one line per step.
TRACE = 5

_LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
_NAMES = {logging.WARNING: "WARN", TRACE: "TRACE"}
_ROOT = "ucc_hetero"

_who = {"rank": "-", "device": "-"}
_handler: logging.Handler | None = None


def log(subsystem: str) -> logging.Logger:
    """The logger of a subsystem (``init``, ``plan``, ``coll``, ...; ``UCCH_LOG_SUBSYS`` lists them)."""
    return logging.getLogger(f"{_ROOT}.{subsystem}")


class _Format(logging.Formatter):
    """``host:pid:tid [rank/device] UCCH LEVEL SUBSYS text``."""

    def __init__(self) -> None:
        super().__init__()
        self.host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelno, record.levelname)
        subsystem = record.name.removeprefix(_ROOT).lstrip(".").upper() or "UCCH"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        where = f"{self.host}:{os.getpid()}:{threading.get_native_id()}"
        return f"{where} [{_who['rank']}/{_who['device']}] UCCH {level} {subsystem} {text}"


def set_rank(rank: int, device: str = "-") -> None:
    """Set this process's names in lines of the log: its rank and, once it is known, its device (``nvidia:0``)."""
    _who["rank"], _who["device"] = str(rank), device


def path(template: str) -> str:
    """``template`` with %h (host), %p (process), %r (rank) and %% filled in."""
    names = {"%h": socket.gethostname(), "%p": str(os.getpid()), "%r": _who["rank"], "%%": "%"}
    return re.sub("%[hpr%]", lambda found: names[found[0]], template)


def configure() -> None:
    """Apply the environment's settings; calling it again applies changes and keeps one handler.

    ``ValueError`` for a bad setting, a log file that cannot be opened among them.
    """
    global _handler
    level, subsystems, file = env.get("LOG_LEVEL"), env.get("LOG_SUBSYS"), env.get("LOG_FILE")
    try:
        handler: logging.Handler = logging.FileHandler(path(file)) if file else logging.StreamHandler()
    except OSError as error:
        raise ValueError(f"{env.PREFIX}LOG_FILE: {path(file)!r} cannot be written: {error.strerror}") from None
    handler.setFormatter(_Format())
    if "all" not in subsystems:  # warnings and errors always pass
        handler.addFilter(lambda each: each.levelno >= logging.WARNING or each.name.rpartition(".")[2] in subsystems)
    root = logging.getLogger(_ROOT)
    if _handler is not None:
        root.removeHandler(_handler)
        _handler.close()
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    root.propagate = False
    _handler = handler


def configured() -> bool:
    return _handler is not None


_warned: set[str] = set()


def warn_unknown() -> None:
    """Warn of unknown variables, once each in a process, and in one of the ranks on a host."""
    for name in env.unknown():
        if name not in _warned:
            _warned.add(name)
            if number("LOCAL_RANK", os.environ, 0) == 0:
                log("init").warning("unknown variable %s: %s", name, env.meant(name))
