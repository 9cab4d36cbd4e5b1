"""Requests of calls and messages that were begun in C (cffi_build/python/requests.c)."""

from __future__ import annotations

import threading
from typing import Any

from ..native.libraries import ffi, posted, refuse_children, requests
from ..native.waiting import progress_mpi, refuse_finalized
from .request import WAYS, Request, run_poll_hooks


def _make_progress() -> None:
    refuse_children()
    refuse_finalized()
    progress_mpi()
    run_poll_hooks()


#: Held while a request becomes an ordinary one: another thread may wait for it, or drop it.
_becoming = threading.RLock()


class PostedRequest(posted, Request):  # type: ignore[misc]
    """The request of a call that was begun in C, where it is also waited for (cffi_build/python/requests.c).

    For all else, and after an error, it becomes an ordinary request."""

    def become_ordinary(self, op: Any, keep: object, **about: Any) -> None:
        done = self._done
        super().__init__(op, keep, **about)
        self._done = done

    def _ops(self) -> list[Any]:
        address = self._address()
        return [ffi.cast("ucch_op *", address)] if address else super()._ops()

    def _describe(self, state: int, status: Any) -> None:
        if status is None or self._fill(state, status):
            return
        if "_call" not in vars(self):
            self._become_ordinary()
        super()._describe(state, status)

    def __getattr__(self, name: str) -> Any:
        if name not in _ENDED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        with _becoming:
            if name not in vars(self) and self._become_ordinary() is False:  # another thread may have completed it
                return _ENDED[name]
        return object.__getattribute__(self, name)


#: Attributes of an ordinary request, and what they are once it has been completed in C.
_ENDED: dict[str, Any] = {"_call": None, "_keep": None, "_op": ffi.NULL, "_owner": None, "_timeout": 0.0}


requests(PostedRequest, _make_progress, *WAYS)
