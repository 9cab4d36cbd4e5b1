"""What tests of every folder do: run a script in a new Python, and wait until something is so."""

import fcntl
import os
import subprocess
import sys
import time
from itertools import count

#: Seconds for what takes a moment: only what fails takes that long.
LONG = 300.0


def python(script, *args, env=None, check=True, **how):
    """Run a script in a new Python with ``env`` beside this environment; with ``check`` it must end well."""
    words = [sys.executable, "-c", script, *map(str, args)]
    how = {"capture_output": True, "text": True, "timeout": 2 * LONG, "env": {**os.environ, **(env or {})}, **how}
    done = subprocess.run(words, check=False, **how)
    assert not check or done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done


def until(condition, what=""):
    """Wait for a condition; ``what`` is said where it does not come."""
    ends = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < ends, what or "not within the time limit"
        time.sleep(0.002)


def is_free(file):
    """True if no process holds a lock of a file, which ends with its process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def interrupted_at(call, what):
    """Run something with Ctrl-C behind the function of this number that it calls, in C or Python; False: so many are
    not called. Python looks for signals there."""
    calls = count()

    def profile(frame, event, arg):
        if event in ("call", "c_return") and next(calls) == call:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        what()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False
