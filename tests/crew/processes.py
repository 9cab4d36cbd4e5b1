"""Helpers for all tests: run a script in a new Python, a call in a child or in threads; wait for a condition."""

import fcntl
import os
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from crews import alone

#: Timeout in seconds for things that take a moment: only failures take that long.
LONG = 300.0


def python(script, *args, env=None, check=True, **how):
    """Run a script, or a case ``module:function``, in a new Python with ``env`` added to the environment. With
    ``check`` it must succeed."""
    words = [sys.executable, *(alone(script, args) or ["-c", script, *map(str, args)])]
    how = {"capture_output": True, "text": True, "timeout": 2 * LONG, "env": {**os.environ, **(env or {})}, **how}
    done = subprocess.run(words, check=False, **how)
    assert not check or done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done


def until(condition, what=""):
    """Wait for a condition; ``what`` is the error text if it does not come true."""
    ends = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < ends, what or "not within the time limit"
        time.sleep(0.002)


class Instead:
    """Stands for another object, with some attributes of its own."""

    def __init__(self, real, **own):
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name):
        return getattr(self._real, name)


def in_threads(*calls):
    """Run calls at the same time, with frequent switches between them. Returns their results, or raises the first one's
    exception."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(len(calls)) as pool:
        under_way = [pool.submit(call) for call in calls]
    sys.setswitchinterval(usual)
    return [each.result() for each in under_way]


def in_child(call, limit=100):
    """Run a call in a forked child, which ends without more ado; it must succeed within ``limit`` seconds."""
    if not (child := os.fork()):
        signal.alarm(limit)
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status


def is_free(file):
    """True if no process has a lock on a file; locks end with their process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def places(call, stop=-1, kind=KeyboardInterrupt, within=""):
    """Run a call, with the exception of a signal's handler, such as Ctrl-C's, at the place of this number where Python
    checks for signals: a function begins, or one of C's has returned. ``within``: the folder of functions that count.
    Returns the number of places, or None if the call was interrupted."""
    passed = count()

    def profile(frame, event, arg):
        code = frame.f_code
        counts = event in ("call", "c_return") and code.co_filename.startswith(within) and code.co_name != "__del__"
        if counts and next(passed) == stop:
            raise kind

    sys.setprofile(profile)
    try:
        call()
    except kind:
        return None
    finally:
        sys.setprofile(None)
    return next(passed)


def interrupted_at(stop, call, kind=KeyboardInterrupt):
    """True if `places` has interrupted the call; False if there were fewer places."""
    return places(call, stop, kind) is None
