"""Cases that begin in a process without MPI: each imports what it needs, in the order that it is about."""

import os
import sys


def forked_before_mpi():
    """The child has an exit of its own, as if its parent had not imported the package."""
    import ucc_hetero as u

    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    comm = u.Communicator()
    comm.Barrier()
    sys.exit(3 * comm.rank)
