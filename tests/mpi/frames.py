"""Which of the package's Python functions, in which files, run in a call."""

import gc
import sys
from pathlib import Path

import ucc_hetero
from ucc_hetero.calls.request import reap, wait_op

PACKAGE = str(Path(ucc_hetero.__file__).parent)


def frames_of(call):
    """Names of the package's Python functions that run in a call.

    Functions that run while it waits for other ranks, or that end dropped requests, do not count.
    """
    return [code.co_qualname for code in codes_of(call)]


def files_of(call):
    return {code.co_filename.removeprefix(PACKAGE + "/") for code in codes_of(call)}


def codes_of(call):
    found = []
    waiting = []

    def note(frame, event, arg):
        if waiting:
            if event == "return" and frame is waiting[0]:
                waiting.clear()
        elif event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            if frame.f_code in (wait_op.__code__, reap.__code__):
                waiting.append(frame)
            else:
                found.append(frame.f_code)

    gc.collect()
    gc.freeze()  # torch has a million objects: traversing them takes longer than anything else here
    gc.disable()  # ends of earlier requests would add frames
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found
