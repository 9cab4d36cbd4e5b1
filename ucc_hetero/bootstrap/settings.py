"""Settings of a rank (``UCCH_*``): read when ranks meet, which then tell each other of wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from .. import env, log
from ..errors import ranks_text
from ..planner.rules import parse_tune

_Error = TypeVar("_Error", bound=Exception)

#: The settings that were read last, and their errors.
_read: tuple[dict[str, str], str] = ({}, "")
#: Attribute of errors that the first rank prints.
_TOLD = "_first_rank_prints"


def read(rank: int) -> str:
    """Errors in this rank's settings, read again if one has changed. Applies those of the log, and warns of unknown
    ones."""
    global _read
    now = env.settings(env.PREFIX)
    if not log.configured():
        log.set_rank(rank)
    if now != _read[0] or not log.configured():
        try:
            env.check()
            parse_tune(env.get("TUNE"))
            log.configure()
        except ValueError as error:
            _read = now, str(error)
        else:
            log.warn_unknown()
            _read = now, ""
    return _read[1]


def timeout() -> float:
    """``UCCH_TIMEOUT`` in seconds; its default if it is wrong, of which the ranks are about to learn."""
    try:
        return float(env.get("TIMEOUT"))
    except ValueError:
        return float(env.TABLE["TIMEOUT"].default)


def limit_text(seconds: float) -> str:
    """A time limit as errors name it: by its setting if it is that."""
    return f"UCCH_TIMEOUT={seconds:g}" if seconds == timeout() else f"the limit was {seconds:g} s"


def wrong(mistakes: Mapping[int, str], rank: int, size: int) -> ValueError:
    """The error of all ``size`` ranks if some have wrong settings."""
    texts = set(mistakes.values())
    if len(texts) == 1:
        who = f"all {size} ranks" if size > 1 and len(mistakes) == size else ranks_text(sorted(mistakes))
        error = ValueError(f"{texts.pop()} (on {who})")
    else:
        lines = [f"  rank {each}: {mistakes[each]}" for each in sorted(mistakes)]
        error = ValueError("\n".join(["settings are wrong:", *lines]))
    return told(error, rank)


def told(error: _Error, rank: int) -> _Error:
    """Mark an error that all ranks raise alike: if it ends the job, the first rank prints it."""
    if rank:
        setattr(error, _TOLD, True)
    return error


def is_told(error: BaseException) -> bool:
    """True if another rank prints this error."""
    return hasattr(error, _TOLD)
