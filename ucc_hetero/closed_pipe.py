"""Exit status of programs whose output goes to a pipe that its reader has closed, as ``| head`` does."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

#: Exit status, as a shell reports a program that SIGPIPE ended. The signal itself stays ignored, as Python sets it: it
#: would also end a job in which one connection of a network library breaks.
CLOSED = 128 + signal.SIGPIPE

Main = Callable[[Sequence[str] | None], int]


def _closed() -> list[int]:
    """The standard output and the standard error, or one of them, whose pipe has lost its reader."""
    asked = select.poll()
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            asked.register(fd, 0)
    return [fd for fd, event in asked.poll(0) if event & select.POLLERR]


def reader_gone() -> bool:
    """True if the standard output or the standard error has lost its reader."""
    return bool(_closed())


def ends_with_its_reader(main: Main) -> Callable[..., int]:
    """Wrap ``main(arguments) -> status``: a quiet end, with status `CLOSED`, once the reader of the program's output
    has gone.

    A broken pipe to anything else is an error as any other.
    """

    @functools.wraps(main)
    def program(arguments: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(arguments)
            finally:
                # Else the interpreter does it at its end, where its exceptions cannot be caught.
                sys.stdout.flush()
        except BrokenPipeError:
            closed = _closed()
            if not closed:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in closed:
                os.dup2(nowhere, fd)  # what is still in buffers goes there
            os.close(nowhere)
            return CLOSED

    return program
