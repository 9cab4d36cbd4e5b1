"""The end of a process: everything is freed before MPI is finalized, and a failed rank ends the job.

If a rank dies of an exception while others communicate, they would wait for ever in MPI_Finalize or in a collective;
plain mpi4py scripts hang there. With this module the other ranks see it leave, and the failed rank aborts the job, even
before it has made a communicator. The same holds for ``sys.exit`` with a status other than 0, as under ``python -m
mpi4py``. ``raise SystemExit`` does not come by here: the other ranks have to notice it.
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
from ..native import threaded
from ..native.libraries import lib
from ..native.waiting import progress_until
from ..trace import timeline
from ..transport import wires
from . import creations, faults, links, process, settings, timely

#: Folder of the package; and programs in it, whose frames count as the user's.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_PROGRAMS = (f"{_PACKAGE}bench/", f"{_PACKAGE}launch/")


def _is_package_frame(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE) and not frame.filename.startswith(_PROGRAMS)


def _caused_by_user_code(found: traceback.TracebackException) -> bool:
    """True if the error was caused by another one that has frames of the user's code."""
    before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return before is not None and (not all(map(_is_package_frame, before.stack)) or _caused_by_user_code(before))


def text_of(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> str:
    """Text of an error, as Python prints it.

    An error that the package raises on purpose is about the user's call. Of the innermost frames in the package only
    the first, the function that was called, is shown, unless the log level is debug.
    """
    found = traceback.TracebackException(kind, value, tb)
    frames = list(found.stack)
    hidden = len(list(takewhile(_is_package_frame, reversed(frames)))) - 1
    meant = hidden > 0 and (frames[-1].line or "").startswith("raise ") and hidden + 1 < len(frames)
    if not meant or _caused_by_user_code(found) or log.log("init").isEnabledFor(logging.DEBUG):
        return "".join(found.format())
    shown = traceback.StackSummary.from_list(frames[:-hidden]).format()
    note = f"  ({hidden} more inside ucc_hetero, which UCCH_LOG_LEVEL=debug shows)\n"
    return "".join(["Traceback (most recent call last):\n", *shown, note, *found.format_exception_only()])


def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
    """Print an error; replaces ``sys.__excepthook__``."""
    if sys.stderr is not None:
        sys.stderr.write(text_of(kind, value, tb))
        sys.stderr.flush()


# --- printing of the error that ends a rank: in one write, and in short ----------------------------------------------


class Living(NamedTuple):
    """Functions for a communicator that is not freed: get its runner; make it unusable, which returns a function that
    frees it; clean up after fork."""

    run: Callable[[Any], Any]
    retire: Callable[[Any], Callable[[], None]]
    orphan: Callable[[Any], None]


#: By communicator, in order of creation, which is equal on all ranks of a communicator.
living: dict[object, Living] = {}
#: A communicator was freed after one of its calls had failed: the libraries still hold that call.
_has_leaked_calls = False

#: Seconds that living ranks wait for each other at the end after deaths, and that threads have to leave calls.
_PATIENCE = 10.0
#: Seconds for calls that all ranks have entered to complete.
_COMPLETE_S = 0.2
#: Seconds in which a failed rank may reach the others' store, and in which ranks of its host may write their flight
#: records.
_WORD_S = 2.0

_registered = False
#: Exit status of this process if it has failed; 0: it has not.
_status = 0
#: Prints this process's error if the rank that is about to end the job, and also prints it, does not end this one
#: first.
_own_error: Callable[[], object] | None = None
#: A call of libucc does not return: a thread that needs the engine's lock from now on ends the process.
_lock_is_lost = False
#: Functions that leave what uses communicators, for ``MPI.Finalize``; they may be called again.
before_finalize: list[Callable[[], object]] = []
#: mpi4py's ``MPI.Finalize``.
_mpi_finalize: Callable[[], object] = bool
#: The process whose end is arranged; not a child that uses its parent's MPI.
_pid = 0


def register() -> None:
    """Register the functions for the end of the process, once. Done on import: a rank may fail before it
    communicates."""
    global _registered, _pid
    if _registered:
        return
    _registered, _pid = True, os.getpid()
    previous = show if sys.excepthook is sys.__excepthook__ else sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        global _status, _own_error
        _status = 1
        if settings.is_told(value) and _ends_job():
            _own_error = partial(previous, kind, value, tb)
        else:
            previous(kind, value, tb)

    sys.excepthook = hook
    if sys.exit is _sys_exit:
        sys.exit = _exit
    atexit.register(_at_exit)


def enlist(comm: object, ways: Living) -> None:
    """Note a communicator that is to be freed at the end."""
    global _mpi_finalize
    living[comm] = ways
    MPI: Any = sys.modules["mpi4py.MPI"]
    if MPI.Finalize is not _finalize:
        _mpi_finalize, MPI.Finalize = MPI.Finalize, _finalize


def _finalize() -> None:
    """End as at the end of the process, then finalize MPI; replaces ``MPI.Finalize``.

    Ranks that end, and wait for the others, would wait for this one for ever, and this one for them.
    """
    if os.getpid() == _pid:
        for leave in before_finalize:
            leave()
        runners = _runners()
        _end()
        for each in runners:
            each.orphan()
    else:
        lib.ucch_guard_finalize()
    _mpi_finalize()


def forget(run: Any) -> None:
    """The communicator of a runner has been freed."""
    global _has_leaked_calls
    _has_leaked_calls = _has_leaked_calls or bool(run.broken)


def leak(comm: object) -> None:
    """Note that this rank cannot use a communicator that other ranks may use; they do not learn of it."""
    global _has_leaked_calls
    living.pop(comm, None)
    _has_leaked_calls = True


def _before_fork() -> None:
    """Close libraries that only this process has used and no communicator uses: the child cannot use open ones
    (native/libraries.py)."""
    if not (living or _has_leaked_calls or process.inherited() or _threads_in_calls()):
        process.close_alone()


def _after_fork() -> None:
    """Communicators belong to the parent; the child registers its own exit if the parent has not begun MPI."""
    global _pid
    if not process.inherited():
        _pid = os.getpid()
    for comm, ways in living.items():
        ways.orphan(comm)
    living.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def failed() -> bool:
    """True if this process is ending by an exception, or by ``sys.exit`` with a status other than 0."""
    return _status != 0


_sys_exit = sys.exit


class _Exit(SystemExit):
    """``SystemExit`` of the main thread, which notices that it ends the process: Python calls no hook for it."""

    def __del__(self) -> None:
        # If it was caught a function drops it; if not the interpreter does, without a frame.
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            global _status
            if os.getpid() == _pid and self.code is not None and self.code != 0:
                _status = self.code & 0xFF or 1 if isinstance(self.code, int) else 1


def _exit(status: Any = None, /) -> NoReturn:
    """Raise SystemExit(status); replaces ``sys.exit``."""
    raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)


def _at_exit() -> None:
    global _status
    if os.getpid() != _pid:  # a forked child
        lib.ucch_guard_finalize()
        return
    if "mpi4py.MPI" not in sys.modules:
        lib.ucch_lock_ends()
        return
    try:
        _end()
    except BaseException as error:  # also of a signal handler, such as Ctrl-C's: the others would wait for this rank
        sys.excepthook(type(error), error, error.__traceback__)
        _status = _status or 1
        _end()
    finally:
        if not _lock_is_lost:
            _stop_threads()


def _stop_threads() -> None:
    """End the engine's threads, and wait for Python's threads that are in calls."""
    # A thread inside torch's store, which Python ends by force, would abort the process.
    _leave_calls(seconds=_PATIENCE if process.mpi_runs() else _WORD_S)
    links.stop(not _status)
    wires.stop()  # even after a failure: libucp is about to be unloaded
    lib.ucch_lock_ends()
    if _threads_in_calls():
        lib.ucch_lock()  # never unlocked: these threads must do nothing in libraries that are unloaded


def _end() -> None:
    """End together with the other ranks, or end the job."""
    global _status
    from mpi4py import MPI

    lib.ucch_progress_thread(0)
    over = MPI.Is_finalized()
    survives = MPI.Is_initialized() and not over and not faults.lacking(MPI.COMM_WORLD)
    if not (_status or over or survives) and timely.has_abandoned():
        _status = 1  # MPI_Finalize would wait for the missing ranks
    if _status:
        lib.ucch_flight_await(_WORD_S)
    if _status and not (over or survives):
        _print_own_error()
        _abort()  # first: ranks that see this one leave also fail, and would end the job with their status
    runners = _runners()
    for each in runners:
        each.members.leave()
    if over or _status:
        if survives:
            faults.leave(_status)
        if _status:
            _announce_failure()
        return  # the launcher, such as torchrun, ends the other ranks
    _end_together(runners, survives)


def _end_together(runners: list[Any], survives: bool) -> None:
    """Wait for the other ranks, and free everything if all have succeeded; ``survives``: the job goes on after
    deaths."""
    global _status
    from mpi4py import MPI

    jobs = process.all_jobs()
    found = [_together(each) for each in jobs]  # every rank takes part in each, whatever the results
    releases = [ways.retire(comm) for comm, ways in reversed(list(living.items()))]
    # From here on no rank of a job starts a call: calls that all ranks have entered can complete.
    found = [min(come, _together(each)) if come == _STUCK else come for each, come in zip(jobs, found, strict=True)]
    for each, come in zip(jobs, found, strict=True):
        if come == _STUCK and isinstance(each.comm, timely.Timely) and not survives:
            creations.agree(each.comm)
    worst = min(found, default=_WHOLE)
    stays = not _leave_calls(_COMPLETE_S) and MPI.Is_initialized()
    for each in runners:
        each.board.leave()
    if stays and not survives:
        _status = 1  # MPI_Finalize would free what an MPI call still uses
        _abort()
    if worst == _LOST:
        for each in runners:
            if not each.broken:
                each.meet(_PATIENCE)  # living ranks: a peer may still need this rank's side of a transfer
    if survives and (stays or worst == _LOST or faults.dead_ranks(MPI.COMM_WORLD) or timely.has_abandoned()):
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
    """The runners of all communicators; not those that a daemon thread frees meanwhile."""
    found = (ways.run(comm) for comm, ways in list(living.items()))
    return [each for each in found if not isinstance(each, process.Unusable)]


def _threads_in_calls() -> list[int]:
    """Threads (daemons by now) inside a call of a communicator or request, or in an MPI call for one."""
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
    """Make threads leave their calls within ``seconds``, by SystemExit: no rank enters these calls any more.

    Calls that complete within ``grace`` seconds are left alone, and creations of communicators that all ranks have
    begun. MPI objects must not be freed while a thread polls them. Returns False if a thread stays: it is in an MPI
    call that not all ranks have entered.
    """
    began = time.monotonic()

    def all_have() -> bool:
        waited, threads = time.monotonic() - began, _threads_in_calls()
        for thread in threads if waited >= grace else ():
            if waited >= seconds or not creations.completes(thread):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        return not (threads or threaded.under_way())

    return progress_until(all_have, seconds) or progress_until(all_have, _COMPLETE_S)


def _ends_job() -> bool:
    """True if a rank that fails ends the others."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return False
    return bool(faults.lacking(MPI.COMM_WORLD))


def _print_own_error() -> None:
    """Print this rank's error, which another rank prints as well, unless that one ends this process first."""
    global _own_error
    own_error, _own_error = _own_error, None
    if own_error is not None:
        time.sleep(_WORD_S)
        own_error()


def _announce_failure() -> None:
    """Tell ranks that meet in a store that this one has failed, so that they do not wait for it."""
    for each in process.all_jobs():
        if hasattr(each.comm, "announce_failure"):
            with suppress(*faults.EXCHANGE_ERRORS):
                faults.in_time("word of this rank's end", _WORD_S, each.comm.announce_failure)


def _close() -> None:
    """Free everything. If ranks survive one that is lost meanwhile, the libraries would wait for it, and are left
    alone."""
    global _lock_is_lost

    def close() -> None:
        with own_device():
            process.close_all()

    try:
        if all(faults.lacking(each.comm) for each in process.all_jobs()):  # the launcher ends all ranks if one ends
            close()
        else:
            faults.in_time("the end of this process", _PATIENCE, close)
    except faults.EXCHANGE_ERRORS as error:
        log.log("live").debug("memory of the libraries is not given back: %s", error)
        faults.leave(0)
        _lock_is_lost = bool(lib.ucch_lock_is_lost(_COMPLETE_S))


def _abort() -> None:
    """Abort the whole job, if MPI can."""
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        rank = MPI.COMM_WORLD.Get_rank()
        with suppress(Exception):  # it may be closed, or the disk full
            sys.stderr.write(f"ucc_hetero: rank {rank} has failed (status {_status}) and ends the job\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        MPI.COMM_WORLD.Abort(_status)


#: How a rank ends: ranks of the job are dead; a call will not complete; no call is active, but the libraries still hold
#: a failed one; the libraries can be closed.
_LOST, _STUCK, _LEAKED, _WHOLE = range(4)


def _together(each: process.Job) -> int:
    """Wait for all ranks of a job. Returns the worst of their states (_LOST to _WHOLE).

    Libraries that hold a failed call are not closed: freeing device memory would wait for a kernel that waits for a
    peer, and a message that arrives would be written to freed memory.
    """
    from array import array

    from mpi4py import MPI

    stuck = any(each.broken or each.busy for each in _runners()) or bool(_threads_in_calls())
    leaked = _has_leaked_calls or process.has_abandoned_jobs()
    mine, worst = array("i", [_STUCK if stuck else _LEAKED if leaked else _WHOLE]), array("i", [0])
    left = math.inf

    def hopeless() -> bool:
        """True if ranks of the job have ended and will not come; one that ended after it came does not matter.

        The message of a rank of another host may arrive after its farewell, or never, if only its store was cut off.
        """
        nonlocal left
        for run in _runners():
            run.attend()
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
    if not come:  # MPI completes the operation in later calls, and writes there
        quarantine.keep((mine, worst))
    return worst[0] if come else _LOST
