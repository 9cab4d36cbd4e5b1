"""A job in which a rank hangs or makes another call: FAULT SECONDS [FILE].

SECONDS is the timeout of the other ranks. FILE is created once all ranks are stuck, and beside it a file with the
process id of the rank that hangs.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ucc_hetero as u

from mpi4py import MPI  # isort: skip

comm = u.Communicator()
x, y = np.ones(1024, "f4"), np.empty(1024, "f4")
met = MPI.COMM_WORLD.Barrier  # no timeout starts before all ranks are there


def load_batch():
    met()
    time.sleep(1000)


def hold_the_interpreter():
    if sys.argv[3:]:
        Path(f"{sys.argv[3]}.pid").write_text(str(os.getpid()))
    met()
    re.match("(a+)+$", "a" * 40 + "b")


for _ in range(3000):  # more than the recorder keeps
    comm.Bcast(x)  # ranks hardly wait for each other in it
fault = sys.argv[1]
if fault == "mismatch" and comm.rank == 1:
    comm.Allgather(x[:4], np.empty(16, "f4"))
if fault == "stuck" and comm.rank == 2:
    load_batch()
if fault == "gil" and comm.rank == 2:
    hold_the_interpreter()
if fault == "dead" and comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "tag" and comm.rank == 0:
    comm.Send(x, 1, tag=8)
if fault in ("mismatch", "dead"):
    comm.Allreduce(x, y)
first = fault == "tag" and comm.rank == 1
request = comm.Irecv(y, 0, tag=7) if first else comm.Iallreduce(x, y)
met()
if sys.argv[3:]:
    Path(sys.argv[3]).touch()
request._timeout = float(sys.argv[2]) * (1 + 1000 * first)
request.Wait()
