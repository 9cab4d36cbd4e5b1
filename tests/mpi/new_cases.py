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


def replaced_on_some_ranks():
    """The error names the other ranks and the variable, and no rank waits for ever."""
    if os.environ["OMPI_COMM_WORLD_RANK"] != "1":
        os.environ["UCCH_TORCH_REPLACE"] = "gloo"
    import _ucc_hetero_autoload

    _ucc_hetero_autoload.register()  # as torch's import does, which the process has behind it
    import torch.distributed as dist

    dist.init_process_group("gloo")
