"""Waits during which progress is made: peers may need our side of a transfer before they can do what is waited for."""

from __future__ import annotations

import math
import os
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
    spin: float = 0.0,
    apart: float = 0.0,
) -> bool:
    """Make progress until something is done.

    Args:
        done: True once it is; may raise what went wrong.
        seconds: The most that is waited; 0 is for ever, and less than 0 is over.
        hopeless: True, or raises, once it will not be.
        step: Naps between rounds are longer by this each time, in seconds.
        longest: The longest nap.
        spin: Seconds at the beginning in which nothing but ``done`` is asked.
        apart: Seconds between two looks at whether it is ``hopeless``.

    Returns:
        True if it is done; False where that is hopeless, or did not happen in time.
    """
    began = look_at = time.monotonic()
    until, nap = began + (seconds or math.inf), 0.0
    while not done():
        now = time.monotonic()
        if now < began + spin:
            os.sched_yield()
            continue
        if now > until or (now >= look_at and hopeless()):
            return False
        look_at = now + apart if now >= look_at else look_at
        lib.ucch_progress_once()
        time.sleep(nap)
        nap = min(nap + step, longest)
    return True
