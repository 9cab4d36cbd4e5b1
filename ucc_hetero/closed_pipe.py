"""Exit status of programs whose output goes to a closed pipe, as with ``| head``."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

#: Exit status as in a shell for SIGPIPE. The signal itself stays ignored, Python's default: it would also end a job
#: when a network library's connection breaks.
CLOSED = 128 + signal.SIGPIPE

Main = Callable[[Sequence[str] | None], int]


def closed_outputs() -> list[int]:
    """Those of standard output and standard error whose pipe has no reader any more."""
    asked = select.poll()
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            asked.register(fd, 0)
    return [fd for fd, event in asked.poll(0) if event & select.POLLERR]


def ends_with_its_reader(main: Main) -> Callable[..., int]:
    """Wrap ``main(arguments) -> status``: end quietly, with status `CLOSED`, when the reader of the output is gone.

    A broken pipe elsewhere stays an error.
    """

    @functools.wraps(main)
    def program(arguments: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(arguments)
            finally:
                # Otherwise the interpreter flushes at exit, where exceptions cannot be caught.
                sys.stdout.flush()
        except BrokenPipeError:
            closed = closed_outputs()
            if not closed:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in closed:
                os.dup2(nowhere, fd)  # buffered output goes to /dev/null
            os.close(nowhere)
            return CLOSED

    return program
