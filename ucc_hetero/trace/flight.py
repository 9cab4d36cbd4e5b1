"""Flight recorder: the last operations of this process, as the native engine keeps them, and what their numbers mean.

It is always on. An operation that fails in a way that ends its communicator, a signal (``UCCH_FLIGHT_SIGNAL``) and
:func:`dump` write it to a file, which ``ucch-doctor hang`` reads; so does that what lies in the memory of a process
that is stuck, by way of the memory files here. The engine does all of it (``cffi_build/base/flight.c``), as Python may
be the one that is stuck.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import env, log
from .._version import __version__
from ..native.libraries import ffi, lib

#: Operations that are kept.
RECORDS = 2048
#: Communicators that are freed and remembered: between so many and twice as many.
_FREED = 256
#: Seconds for which files stay in the temporary folder.
_KEPT_S = 7 * 24 * 3600
#: Names of the memory files: the ring, the lines that say what its numbers mean, and Python's stack.
FILES = ("ucch-flight", "ucch-flight-about", "ucch-flight-stack")


class _Recorder:
    """This process's recorder; ``folder`` is where files go, None for nowhere."""

    def __init__(self, rank: int, job: str, vendor: str) -> None:
        self.pid, self.folder = os.getpid(), usual_folder()
        self.path = self.folder / f"{job}.{rank}.flight" if self.folder else None
        self.comms: dict[int, dict[str, Any]] = {}
        self._made, self._freed = 0, deque[int]()
        #: Communicators are made and freed in any thread.
        self._lock = threading.RLock()
        ring, self._about, self._stack = (os.memfd_create(name) for name in FILES)
        where = (ffi.NULL, ffi.NULL) if self.path is None else (os.fsencode(self.path.parent), self.path.name.encode())
        if lib.ucch_flight_open(ring, self._about, self._stack, RECORDS, rank, *where):
            log.log("init").warning("no memory for the flight recorder: ucch-doctor hang cannot show this rank")
        facts: dict[str, Any] = {"host": os.uname().nodename, "pid": self.pid, "vendor": vendor, "version": __version__}
        self._facts = {"rank": rank, "job": job, **facts, "command": " ".join(sys.argv)[:200]}
        self.line(self._facts)
        self._catch(env.get("FLIGHT_SIGNAL"))

    def line(self, data: dict[str, Any]) -> None:
        os.write(self._about, (json.dumps(data) + "\n").encode())

    def _catch(self, number: int) -> None:
        """Write the records at this signal, with Python's stack: the engine's handler calls Python's, until its end."""
        if number and lib.ucch_flight_catch(number):
            with suppress(RuntimeError, ValueError, OSError):
                faulthandler.register(number, self._stack, all_threads=True)
                lib.ucch_flight_catch(number)
                atexit.register(lib.ucch_flight_without_python)

    def comm(self, data: dict[str, Any]) -> int:
        with self._lock:
            number = self._made = self._made + 1
            line = self.comms[number] = {"comm": number, **data}
            # Numbers and a list of numbers, which Python writes as JSON does, several times faster.
            os.write(self._about, (str(line).replace("'", '"') + "\n").encode())
        return number

    def forget(self, number: int) -> None:
        """Note that a communicator was freed. The oldest of these are forgotten once there are many."""
        with self._lock:
            self._freed.append(number)
            if len(self._freed) < 2 * _FREED:
                return
            for _ in range(_FREED):
                self.comms.pop(self._freed.popleft(), None)
            lines = [self._facts, *self.comms.values()]
            text = "".join(json.dumps(line) + "\n" for line in lines).encode()
            # Empty lines at the end: the file may just be read, by a signal's handler or another process.
            os.pwrite(self._about, text.ljust(os.fstat(self._about).st_size, b"\n"), 0)
            os.lseek(self._about, len(text), os.SEEK_SET)

    def dump(self, path: Path | None, cause: int) -> bool:
        """Write stack and records; the stack of a signal that comes meanwhile would be written into the same memory."""
        lib.ucch_flight_hold()
        try:
            with suppress(OSError, RuntimeError):
                faulthandler.dump_traceback(self._stack, all_threads=True)
            done = not lib.ucch_flight_dump(cause, ffi.NULL if path is None else os.fsencode(path))
        finally:
            missed = lib.ucch_flight_let_go()
        if missed and path is not None:  # it asked for another file
            self.dump(None, lib.UCCH_DUMP_SIGNAL)
        return done


_recorder: _Recorder | None = None


def usual_folder() -> Path | None:
    """Folder of the files of this user's jobs; None where there are to be none, or can be none."""
    name = str(env.get("FLIGHT"))
    if name != "none":
        with suppress(OSError):  # no temporary folder can be written to, or the working directory has been removed
            return Path(name).absolute() if name else Path(tempfile.gettempdir()) / f"ucch-flight-{os.getuid()}"
    return None


def failed() -> None:
    """Write the records of a failure that the engine knows nothing of."""
    if _recorder is not None:
        _recorder.dump(None, lib.UCCH_DUMP_FAILURE)


def usual_path() -> Path | None:
    """File to which failures of this process are written."""
    return _recorder.path if _recorder is not None else None


def begin(rank: int, job: str, vendor: str) -> None:
    """Record from now on what this process does, ``rank`` of its first job."""
    global _recorder
    if _recorder is None:
        folder = usual_folder()
        with suppress(OSError):
            if env.get("FLIGHT") and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            elif folder is not None:
                _tidy(folder)
        _recorder = _Recorder(rank, job, vendor)


def _tidy(folder: Path) -> None:
    """Remove files of failures long ago from the temporary folder."""
    for path in folder.glob("*.flight"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()


def comms() -> list[dict[str, Any]]:
    return list(_recorder.comms.values()) if _recorder else []


def comm(board: Any, number: int, time: int, ranks: Sequence[int], mine: int) -> int:
    """Record a communicator: its board, its number in tags, how often that has begun anew, its ``ranks`` by their
    numbers in the job, and the place of this one among them. Returns its number in records."""
    if _recorder is None:
        return 0
    found = _recorder.comm({"number": number, "time": time, "ranks": list(ranks), "mine": mine})
    lib.ucch_board_name(board, found)
    return found


def forget(number: int) -> None:
    if _recorder is not None and number:
        _recorder.forget(number)


def dump(path: str | os.PathLike[str] | None = None) -> Path | None:
    """Write the last operations of this process, and the stacks of its Python threads, to a file.

    ``ucch-doctor hang`` reads the files of a job.

    Args:
        path: The file; in the folder ``UCCH_FLIGHT``, where failures are written, by default.

    Returns:
        Path | None: The file; None if nothing was written, as this process has no communicator yet.
    """
    if _recorder is None:
        return None
    where = Path(path).absolute() if path is not None else _recorder.path
    if where is None or not _recorder.dump(where if path is not None else None, lib.UCCH_DUMP_ASKED):
        return None
    return where


def _after_fork() -> None:
    """Stop recording in a child: its calls and signals are no part of the parent's records."""
    global _recorder
    lib.ucch_flight_stop()
    _recorder = None


os.register_at_fork(after_in_child=_after_fork)
