"""The end of a process: everything is released before MPI is finalised, and a failed rank ends the job.

A rank that dies of an exception while other ranks communicate would leave them waiting for ever in MPI_Finalize or in a
collective; plain mpi4py scripts hang there. Here the other ranks see it leave, and the failed rank aborts the job, also
where it has made no communicator yet. So does one that calls ``sys.exit`` with a status other than 0, as under ``python
-m mpi4py``; ``raise SystemExit`` does not pass by here: the other ranks have to notice it.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from .. import log
from ..bindings import quarantine
from ..device import own_device
from ..native import aside
from ..native.libraries import lib
from ..native.waiting import progress_until
from ..trace import timeline
from ..transport import wires
from . import faults, links, process, settings, timely

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


# --- how an error that ends a rank is printed: in one piece, and in short ---------------------------------------------


class Living(NamedTuple):
    """Ways with a communicator that is not freed: to its runner; to let no thread use it, which gives its release;
    after fork."""

    run: Callable[[Any], Any]
    retire: Callable[[Any], Callable[[], None]]
    orphan: Callable[[Any], None]


#: By communicator, in order of creation, which is equal on all ranks of a communicator.
living: dict[object, Living] = {}
#: A communicator was freed after a call of it had failed: the call is in the libraries still.
_has_leaked_calls = False

#: Seconds that those who live wait for each other at the end, once ranks have died, and for threads to leave calls.
_PATIENCE = 10.0
#: Seconds for calls that all ranks have come to.
_THROUGH = 0.2
#: Seconds in which a rank that has failed may reach the others' store, and others on its host write what they do.
_WORD = 2.0

_registered = False
#: With which status this process ends because it has failed; 0 while it has not.
_status = 0
#: Prints the error by which this process ends where another rank, which is about to end the job, prints it, too.
_unsaid: Callable[[], object] | None = None
#: libucc is in a call that does not end, and whatever needs the engine's lock from now on ends the process.
_lock_is_lost = False
#: The process whose end is arranged: a child that uses its parent's MPI has none of that.
_pid = 0


def register() -> None:
    """Arrange for the end, once. The package does so when it is imported: a rank may fail before it communicates."""
    global _registered, _pid
    if _registered:
        return
    _registered, _pid = True, os.getpid()
    previous = show if sys.excepthook is sys.__excepthook__ else sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        global _status, _unsaid
        _status = 1
        if settings.is_told(value) and _ends_job():
            _unsaid = partial(previous, kind, value, tb)
        else:
            previous(kind, value, tb)

    sys.excepthook = hook
    if sys.exit is _sys_exit:
        sys.exit = _exit
    atexit.register(_at_exit)


def forget(run: Any) -> None:
    """The communicator of a runner has been freed."""
    global _has_leaked_calls
    _has_leaked_calls = _has_leaked_calls or bool(run.broken)


def leak(comm: object) -> None:
    """A communicator cannot be made ready for calls on this rank: others may have it, and do not hear of that."""
    global _has_leaked_calls
    living.pop(comm, None)
    _has_leaked_calls = True


def _after_fork() -> None:
    """Communicators are the parent's; the end of the process is its own where the parent has not begun MPI."""
    global _pid
    if not process.inherited():
        _pid = os.getpid()
    for comm, ways in living.items():
        ways.orphan(comm)
    living.clear()


os.register_at_fork(after_in_child=_after_fork)


def failed() -> bool:
    """True if this process is ending by an exception, or by ``sys.exit`` with a status other than 0."""
    return _status != 0


_sys_exit = sys.exit


class _Exit(SystemExit):
    """``SystemExit`` of the main thread. It notices when it ends the process: Python calls no hook then."""

    def __del__(self) -> None:
        # One that was caught is dropped by a function; one that was not by the interpreter, with none left.
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            global _status
            if os.getpid() == _pid and self.code is not None and self.code != 0:
                _status = self.code & 0xFF or 1 if isinstance(self.code, int) else 1


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as the function that this one stands for."""
    raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)


def _at_exit() -> None:
    global _status
    if os.getpid() != _pid:  # a forked child
        return
    if "mpi4py.MPI" not in sys.modules:
        lib.ucch_lock_ends()
        return
    try:
        _end()
    except BaseException as error:  # of a signal's handler, Ctrl-C's say: the others would wait for this rank
        sys.excepthook(type(error), error, error.__traceback__)
        _status = _status or 1
        _end()
    finally:
        if not _lock_is_lost:
            _stop_threads()


def _stop_threads() -> None:
    """End threads, of the engine's and of Python's that are in calls."""
    # One in torch's store, which Python ends by force, would abort the process.
    _leave_calls(seconds=_PATIENCE if process.mpi_runs() else _WORD)
    links.stop(not _status)
    wires.stop()  # however that went: libucp is about to be unloaded
    lib.ucch_lock_ends()
    if _within_calls():
        lib.ucch_lock()  # for good: these threads are to do nothing in libraries that are unloaded


def _end() -> None:
    """Come to the end together with the other ranks, or end the job."""
    global _status
    from mpi4py import MPI

    lib.ucch_progress_thread(0)
    over = MPI.Is_finalized()
    survives = MPI.Is_initialized() and not over and not faults.lacking(MPI.COMM_WORLD)
    if not (_status or over or survives) and timely.unmet():
        _status = 1  # MPI_Finalize would wait for the ranks that did not come
    if _status:
        lib.ucch_flight_await(_WORD)
    if _status and not (over or survives):
        _say_unsaid()
        _abort()  # first: others that see this rank leave fail, too, and would end the job with a status of theirs
    runners = _runners()
    for each in runners:
        each.board.leave()
    if over or _status:
        if survives:
            faults.leave(_status)
        if _status:
            _desert()
        return  # the launcher, such as torchrun, ends the other ranks
    _end_together(runners, survives)


def _end_together(runners: list[Any], survives: bool) -> None:
    """Wait for the other ranks, and release everything if all have come to a good end; ``survives``: deaths."""
    global _status
    from mpi4py import MPI

    jobs = process.all_jobs()
    found = [_together(each) for each in jobs]  # every rank takes part in each, whatever the others say
    releases = [ways.retire(comm) for comm, ways in reversed(list(living.items()))]
    # From here on no rank of a job begins a call any more: those that all ranks have come to get through.
    found = [min(come, _together(each)) if come == _STUCK else come for each, come in zip(jobs, found, strict=True)]
    worst = min(found, default=_WHOLE)
    stays = not _leave_calls(_THROUGH) and MPI.Is_initialized()
    if stays and not survives:
        _status = 1  # MPI_Finalize would take down what a call of MPI's goes by
        _abort()
    if worst == _LOST:
        for each in runners:
            if not each.broken:
                each.meet(_PATIENCE)  # those that live: a peer may still need our side of a transfer
    if survives and (stays or worst == _LOST or faults.dead_ranks(MPI.COMM_WORLD) or timely.unmet()):
        faults.leave(0)
        return
    if worst > _STUCK:
        timeline.finish()
    if worst == _WHOLE:
        for release in releases:
            release()
        _close()
    if survives:
        faults.leave_late()


def _runners() -> list[Any]:
    """The runners of all communicators but for those that a daemon frees meanwhile; it may make some, too."""
    found = (ways.run(comm) for comm, ways in list(living.items()))
    return [each for each in found if not isinstance(each, process.Unusable)]


def _within_calls() -> list[int]:
    """Threads, daemons by now, that are within a call of a communicator's or a request's, or of MPI's for one."""
    package = Path(__file__).parents[1]
    calls = tuple(str(package / folder) for folder in ("api", "calls", "bootstrap"))
    found = []
    for thread, frame in sys._current_frames().items():
        of = None if thread == threading.get_ident() else frame
        while of is not None and not of.f_code.co_filename.startswith(calls):
            of = of.f_back
        if of is not None:
            found.append(thread)
    return found


def _leave_calls(grace: float = 0.0, seconds: float = _PATIENCE) -> bool:
    """Have threads leave the calls that they are in within ``seconds``, by SystemExit: no rank comes to these any more.

    Those that get through within ``grace`` seconds do not: a rank that left between the agreement to make a
    communicator and its making would leave the others in MPI. MPI takes down what a thread goes by that asks it for
    news meanwhile. False if one stays: in a call of MPI's that not all ranks have made.
    """
    first = time.monotonic() + grace

    def all_have() -> bool:
        threads = _within_calls()
        for thread in threads if time.monotonic() >= first else ():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        return not (threads or aside.under_way())

    return progress_until(all_have, seconds)


def _ends_job() -> bool:
    """True if a rank that fails ends the others."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return False
    return bool(faults.lacking(MPI.COMM_WORLD))


def _say_unsaid() -> None:
    """Print the error that another rank prints, too, unless that one ends this one first."""
    global _unsaid
    unsaid, _unsaid = _unsaid, None
    if unsaid is not None:
        time.sleep(_WORD)
        unsaid()


def _desert() -> None:
    """Tell the ranks of jobs that meet in a store that this one has failed: they wait for nothing of it then."""
    for each in process.all_jobs():
        if hasattr(each.comm, "desert"):
            with suppress(*faults.EXCHANGE_ERRORS):
                faults.in_time("word of this rank's end", _WORD, each.comm.desert)


def _close() -> None:
    """Release everything. Where ranks outlive one that is lost meanwhile the libraries wait, and are left alone."""
    global _lock_is_lost

    def close() -> None:
        with own_device():
            process.close_all()

    try:
        if all(faults.lacking(each.comm) for each in process.all_jobs()):  # the launcher ends all ranks with one
            close()
        else:
            faults.in_time("the end of this process", _PATIENCE, close)
    except faults.EXCHANGE_ERRORS as error:
        log.log("live").debug("memory of the libraries is not given back: %s", error)
        faults.leave(0)
        _lock_is_lost = bool(lib.ucch_lock_is_lost(_THROUGH))


def _abort() -> None:
    """End the whole job, where MPI can."""
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        rank = MPI.COMM_WORLD.Get_rank()
        with suppress(Exception):  # it may be closed, or its disk full
            sys.stderr.write(f"ucc_hetero: rank {rank} has failed (status {_status}) and ends the job\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        MPI.COMM_WORLD.Abort(_status)


#: How a rank comes to its end: ranks of the job are dead; what is under way will not end; no call is under way, but the
#: libraries still hold one that failed; they can be closed.
_LOST, _STUCK, _LEAKED, _WHOLE = range(4)


def _together(each: process.Job) -> int:
    """Wait for all ranks of a job; how the worst of them comes to its end.

    Libraries that hold a failed call are left alone: freeing a device's memory would wait for a kernel that waits for a
    peer, and a message that arrives would be written to memory that is gone.
    """
    from array import array

    from mpi4py import MPI

    stuck = any(each.broken or each.busy for each in _runners()) or bool(_within_calls())
    leaked = _has_leaked_calls or process.forsaken()
    mine, worst = array("i", [_STUCK if stuck else _LEAKED if leaked else _WHOLE]), array("i", [0])
    left = math.inf

    def hopeless() -> bool:
        """True if ranks of the job have ended and will not come: one that has ended since it came does not matter.

        What a rank of another host has said may come behind its farewell, or never, as where its store alone was cut.
        """
        nonlocal left
        if each.ended() or links.lost(each.index) or any(run.board.dead() >= 0 for run in _runners()):
            return True
        if left == math.inf and links.left(each.index):
            left = time.monotonic()
        return time.monotonic() - left > _PATIENCE

    try:
        if not faults.lacking(each.comm) and faults.dead_ranks(each.comm):
            return _LOST
        request = each.comm.Iallreduce(mine, worst, op=MPI.MIN)
        come = progress_until(request.Test, hopeless=hopeless) or request.Test()
    except faults.EXCHANGE_ERRORS:
        come = False
    if not come:  # MPI goes on with what is under way in later calls, and writes there
        quarantine.keep((mine, worst))
    return worst[0] if come else _LOST
