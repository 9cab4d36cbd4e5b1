"""Helpers for all tests: run a script in a new Python, wait for a condition."""

import fcntl
import os
import subprocess
import sys
import time
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


def is_free(file):
    """True if no process has a lock on a file; locks end with their process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def interrupted_at(call, what, kind=KeyboardInterrupt):
    """Run ``what`` with the exception of a signal's handler, such as Ctrl-C's, after a function call of this number, in
    C or Python, where Python checks for signals. False if there were fewer calls."""
    calls = count()

    def profile(frame, event, arg):
        if event in ("call", "c_return") and next(calls) == call:
            raise kind

    sys.setprofile(profile)
    try:
        what()
    except kind:
        return True
    finally:
        sys.setprofile(None)
    return False
