"""Threads that find out when operations of the engine have ended, and tell others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .libraries import lib

#: Seconds after which such a thread checks its operations even if the doorbell did not ring.
_SLICE = 0.25
#: Seconds that it sleeps if there are none.
_IDLE = 3600.0


class CompletionThread:
    """A thread that calls functions until each has returned True: whenever the engine's doorbell rings.

    The doorbell rings at the end of operations that were given to ``ucch_listen``. Progress is made by the engine's
    thread, or by a thread that waits in the engine. It starts when it is first needed, also in a forked process.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._new: list[Callable[[], bool]] = []
        self._thread: threading.Thread | None = None

    def add(self, is_over: Callable[[], bool]) -> None:
        """Call ``is_over``, which does not raise, until it returns True."""
        with self._lock:
            self._new.append(is_over)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        lib.ucch_doorbell_ring()

    def _loop(self) -> None:
        waiting: list[Callable[[], bool]] = []
        while True:
            known = lib.ucch_doorbell_count()  # first, so that nothing below is missed
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                waiting += self._new
                self._new.clear()
            left = [each for each in waiting if not each()]
            if len(left) == len(waiting):
                lib.ucch_doorbell_wait(known, _SLICE if left else _IDLE)
            waiting = left

    def stop(self) -> None:
        """End the thread. Functions that have not returned True are forgotten."""
        with self._lock:
            thread, self._thread = self._thread, None
        lib.ucch_doorbell_ring()
        if thread is not None:
            thread.join()
