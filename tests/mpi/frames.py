"""Which of the package's Python functions a call runs, and of which files they are."""

import gc
import sys
from pathlib import Path

import ucc_hetero
from ucc_hetero.calls.request import reap, wait_op

PACKAGE = str(Path(ucc_hetero.__file__).parent)


def frames_of(call):
    """Names of the package's Python functions that run in a call.

    But for those while it waits for other ranks, and those that end what earlier callers have dropped.
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
    gc.freeze()  # torch has a million objects, and a look at all of them would take longer than anything else here
    gc.disable()  # requests of earlier calls end in frames of their own
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found
