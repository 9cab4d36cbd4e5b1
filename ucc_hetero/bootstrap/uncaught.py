"""How an error that ends a rank is printed: in one piece, so that lines of several ranks do not mix, and in short."""

from __future__ import annotations

import logging
import sys
import traceback
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from .. import log

#: Folder of the package, and the programs in it, whose frames are not the library's.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_PROGRAMS = (f"{_PACKAGE}bench/", f"{_PACKAGE}launch/")


def _ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE) and not frame.filename.startswith(_PROGRAMS)


def _told_elsewhere(found: traceback.TracebackException) -> bool:
    """True if an error came of another one that has frames of the caller's."""
    before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return before is not None and (not all(map(_ours, before.stack)) or _told_elsewhere(before))


def text_of(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> str:
    """Text of an error, as Python prints it.

    One that the package raises on purpose is about the call, and not about the package: of its innermost frames in the
    package the first is shown, which was called, unless the log has the level debug.
    """
    found = traceback.TracebackException(kind, value, tb)
    frames = list(found.stack)
    hidden = len(list(takewhile(_ours, reversed(frames)))) - 1
    meant = hidden > 0 and (frames[-1].line or "").startswith("raise ") and hidden + 1 < len(frames)
    if not meant or _told_elsewhere(found) or log.log("init").isEnabledFor(logging.DEBUG):
        return "".join(found.format())
    shown = traceback.StackSummary.from_list(frames[:-hidden]).format()
    note = f"  ({hidden} more inside ucc_hetero, which UCCH_LOG_LEVEL=debug shows)\n"
    return "".join(["Traceback (most recent call last):\n", *shown, note, *found.format_exception_only()])


def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
    """Print an error, in the place of ``sys.__excepthook__``."""
    if sys.stderr is not None:
        sys.stderr.write(text_of(kind, value, tb))
        sys.stderr.flush()
