"""A peer on another host that dies: libucp's endpoint to it fails, and whoever calls next is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.launch.emulate import Cluster

#: libucp refuses a send once it has noticed; libucc's transport then took the error's number for a request, and ended
#: the process by a signal.
JOB = """
import os, signal, sys, time
import numpy as np
import ucc_hetero as u
from mpi4py import MPI
comm = u.Communicator(MPI.COMM_WORLD)
x, y = np.ones(1000, "f4"), [np.empty(1000 * comm.size, "f4")]
comm.Allgather(x, y[0])
comm.mpi.Barrier()
if comm.rank:
    os.kill(os.getpid(), signal.SIGKILL)
requests, until = [], time.monotonic() + float(sys.argv[1])
try:
    while time.monotonic() < until:
        y.append(np.empty_like(y[0]))
        requests.append(comm.Iallgather(x, y[-1]))
        time.sleep(0.02)
        [request.Test() for request in requests]
    print("nothing was noticed", flush=True)
except u.CollectiveError as error:
    print("caught", error, flush=True)
os._exit(0)
"""


def test_a_peer_that_dies(emulate: Callable[..., Cluster], flavour: tuple[Any, ...], room: int, tmp_path: Path) -> None:
    recover = ["--enable-recovery"] if flavour >= ("openmpi", 5) and flavour[0] == "openmpi" else []
    job = tmp_path / "job.py"
    job.write_text(JOB)
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", "UCCH_TIMEOUT": "1000"}
    hosts = emulate(hosts=2, slots=1)
    done = hosts.mpirun([sys.executable, str(job), str(60 * room)], env=env, options=recover, timeout=120)
    if not recover and "caught" not in done.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    assert "caught rank 0: allgather float32[1000]" in done.stdout, done.stdout + done.stderr
