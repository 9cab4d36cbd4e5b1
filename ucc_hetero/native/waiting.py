"""Waits during which progress is made: peers may need our side of a transfer before they can do what is waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .libraries import lib


def progress_until(
    done: Callable[[], object],
    seconds: float = 0.0,
    hopeless: Callable[[], object] = bool,
    *,
    step: float = 1e-5,
    longest: float = 1e-3,
) -> bool:
    """Make progress until something is done; False once it is ``hopeless``, or ``seconds`` (0: any number) are over.

    Naps between rounds are ``step`` longer each time, and ``longest`` in the end.
    """
    until, nap = time.monotonic() + (seconds if seconds > 0 else math.inf), 0.0
    while not done():
        if hopeless() or time.monotonic() > until:
            return False
        lib.ucch_progress_once()
        time.sleep(nap)
        nap = min(nap + step, longest)
    return True
