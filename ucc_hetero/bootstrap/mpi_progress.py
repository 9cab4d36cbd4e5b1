"""Progress of MPI while this package waits.

A rank may have to send another one something by MPI, as a long message of mpi4py's whose request it has yet to wait
for, before that one comes to our call. MPI moves it when it is called, by no means else.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def progress_mpi() -> None:
    """Let MPI move what it has under way, where there is one that this thread may call."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main():
        # Its errors are of ranks that have died, of which our call's own says more. Not what handlers of signals raise.
        with suppress(mpi.Exception):
            mpi.COMM_SELF.Iprobe()
