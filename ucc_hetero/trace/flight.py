"""Flight recorder: the last operations of this process, kept by the native engine, with descriptions of their numbers.

It is always on. It is written to a file by a failure that ends a communicator, by a signal (``UCCH_FLIGHT_SIGNAL``) and
by :func:`dump`; ``ucch-doctor hang`` reads the files, and for a process that is stuck its memory, through memory files.
The engine does all of this (``cffi_build/base/flight.c``), as Python itself may be stuck.
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

#: Number of operations that are kept.
RECORDS = 2048
#: Freed communicators are forgotten once there are twice as many as this; the newer half stays.
_FREED = 256
#: Seconds after which files in the temporary folder are removed.
_KEPT_S = 7 * 24 * 3600
#: Names of the memory files: the ring, the lines that describe its numbers, and Python's stack.
FILES = ("ucch-flight", "ucch-flight-about", "ucch-flight-stack")


class _Recorder:
    """This process's recorder. ``folder``: where files go; None for no files."""

    def __init__(self, rank: int, job: str, vendor: str) -> None:
        self.pid, self.folder = os.getpid(), usual_folder()
        self.path = self.folder / f"{job}.{rank}.flight" if self.folder else None
        self.comms: dict[int, dict[str, Any]] = {}
        self._made, self._freed = 0, deque[int]()
        #: Communicators may be made and freed by any thread.
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
        """Handle the signal: the engine's handler calls Python's, which writes the stack, and writes the records."""
        if number and lib.ucch_flight_catch(number):
            with suppress(RuntimeError, ValueError, OSError):
                faulthandler.register(number, self._stack, all_threads=True)
                lib.ucch_flight_catch(number)
                atexit.register(lib.ucch_flight_without_python)

    def comm(self, data: dict[str, Any]) -> int:
        with self._lock:
            number = self._made = self._made + 1
            line = self.comms[number] = {"comm": number, **data}
            # The lines have numbers and lists of numbers only: str() is valid JSON then, and several times faster.
            os.write(self._about, (str(line).replace("'", '"') + "\n").encode())
        return number

    def forget(self, number: int) -> None:
        """Record that a communicator was freed. Forget the oldest of these if there are many."""
        with self._lock:
            self._freed.append(number)
            if len(self._freed) < 2 * _FREED:
                return
            for _ in range(_FREED):
                self.comms.pop(self._freed.popleft(), None)
            lines = [self._facts, *self.comms.values()]
            text = "".join(json.dumps(line) + "\n" for line in lines).encode()
            # A new file replaces the old one, which a dump or another process may be reading. If there is no descriptor
            # left, the old one just stays longer.
            with suppress(OSError), os.fdopen(os.memfd_create(FILES[1]), "wb", buffering=0) as fewer:
                fewer.write(text)
                os.dup2(fewer.fileno(), self._about, inheritable=False)

    def dump(self, path: Path | None, cause: int) -> bool:
        """Write stack and records. A signal meanwhile would write its stack into the same memory, so it waits."""
        held = ffi.new("int *")
        try:
            lib.ucch_flight_hold(held)
            with suppress(OSError, RuntimeError):
                faulthandler.dump_traceback(self._stack, all_threads=True)
            done = not lib.ucch_flight_dump(cause, ffi.NULL if path is None else os.fsencode(path))
        finally:
            missed = lib.ucch_flight_let_go(held)
        if missed and path is not None:  # the signal asked for another file
            self.dump(None, lib.UCCH_DUMP_SIGNAL)
        return done


_recorder: _Recorder | None = None


def usual_folder() -> Path | None:
    """Folder for this user's files; None if files are off or no folder can be used."""
    name = str(env.get("FLIGHT"))
    if name != "none":
        with suppress(OSError):  # no temporary folder is writable, or the working directory was removed
            return Path(name).absolute() if name else Path(tempfile.gettempdir()) / f"ucch-flight-{os.getuid()}"
    return None


def failed() -> None:
    """Write the records, for a failure that the engine does not know of."""
    if _recorder is not None:
        _recorder.dump(None, lib.UCCH_DUMP_FAILURE)


def usual_path() -> Path | None:
    """The file to which failures of this process are written."""
    return _recorder.path if _recorder is not None else None


def begin(rank: int, job: str, vendor: str) -> None:
    """Start recording. ``rank``: this process's rank in its first job."""
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
    """Remove files of old failures from the temporary folder."""
    with os.scandir(folder) as entries:
        for each in entries:
            with suppress(OSError):
                if each.name.endswith(".flight") and time.time() - each.stat().st_mtime > _KEPT_S:
                    os.unlink(each)


def comms() -> list[dict[str, Any]]:
    return list(_recorder.comms.values()) if _recorder else []


def comm(board: Any, number: int, time: int, ranks: Sequence[int], mine: int) -> int:
    """Record a communicator: its board; its number in tags, and how often the numbers have wrapped around; its
    ``ranks`` as world ranks; and this rank's index among them. Returns its number in records."""
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
    """Stop recording in a forked child: its calls do not belong to the parent's records."""
    global _recorder
    lib.ucch_flight_stop()
    _recorder = None


os.register_at_fork(after_in_child=_after_fork)
