"""Runs a case in a job of its own: ``python case.py FILE FUNCTION ARGUMENTS``, the arguments as JSON."""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path


def call(path, case, args):
    """Call a function of a module of cases. If its first parameter is ``comm``, it gets a communicator of all ranks."""
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    function = getattr(importlib.import_module(Path(path).stem), case)
    if next(iter(inspect.signature(function).parameters), "") != "comm":
        return function(*args)
    from ucc_hetero import Communicator

    with Communicator() as comm:
        return function(comm, *args)


if __name__ == "__main__":
    if "FAKEGPU_LAYOUT" in os.environ:
        import arrays  # noqa: F401  it chooses the vendor, before a communicator is made
    call(*sys.argv[1:3], json.loads(sys.argv[3]))
