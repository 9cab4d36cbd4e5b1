"""Progress of MPI while this package waits.

A rank may have to send another one something by MPI, as a long message of mpi4py's whose request it has yet to wait
for, before that one comes to our call. MPI moves it when it is called, by no means else.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from . import faults


def progress_mpi() -> None:
    """Let MPI move what it has under way, where there is one that this thread may call."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main():
        with suppress(*faults.EXCHANGE_ERRORS):  # of ranks that have died: our call's own error says it better
            mpi.COMM_SELF.Iprobe()
