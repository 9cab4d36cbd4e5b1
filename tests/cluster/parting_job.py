"""A rank of a job over a store whose last rank ends while teams are created: FOLDER RANK SIZE HOW.

``dead``: it has ended when the others create their teams, and libraries fail before the engine notices. ``interrupt``:
the same, while all ranks end. ``early``: while contexts are created. ``stop``: it is stopped there, and ranks have some
seconds. ``late``: it gives up, and stays alive, when the others have what it lacks; ``after``: when all have abandoned
what they created. ``cut``: it is unreachable, and does not finish, when all have freed that. ``storeless``: only its
store is unreachable then, and it ends. ``failed``: the same by an error, while the others agree on something.
``revoked``: it does not end, but revokes a communicator while the others wait in another one.
"""

import os
import signal
import sys
import time
from pathlib import Path

import mpi4py
import numpy as np

from ucc_hetero import Communicator
from ucc_hetero.bootstrap import agreement
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.bootstrap.process import Job
from ucc_hetero.bootstrap.storecomm import StoreComm
from ucc_hetero.bootstrap.teams import Teams
from ucc_hetero.calls.request import run_poll_hooks
from ucc_hetero.errors import CollectiveTimeout, PeerError
from ucc_hetero.native.libraries import lib, load
from ucc_hetero.native.waiting import progress_until

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from store import Store


def end(how):
    if how in ("kill", "dead", "early", "after"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(0)
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how == "late":
        raise CollectiveTimeout("this rank has waited for too long")
    raise ValueError("this rank is out of its mind")


def revoked(comm, folder):
    """Calls of another communicator continue: a rank that waits between hosts checks news of all communicators."""
    other, found, rank, size = comm.Dup(), np.full(5, -1), comm.rank, comm.size

    def await_all(what):
        while not all((folder / f"{what}{r}").exists() for r in range(size - 1)):
            time.sleep(0.01)

    def hear(op):
        (folder / f"waits{rank}").touch()
        while not lib.ucch_board_revoked(comm._runner.board.native):
            lib.ucch_wait(op, 0.01)
            run_poll_hooks()
        (folder / f"heard{rank}").touch()
        return wait(op)

    wait = other._runner.wait
    if rank == size - 1:
        await_all("waits")
        comm.Revoke()
        await_all("heard")
    else:
        other._runner.wait = hear
    other.Allreduce(np.full(5, rank + 1), found)
    assert (found == size * (size + 1) // 2).all(), found
    print(f"rank {rank} right", flush=True)


def main():
    folder, rank, size, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    mpi4py.rc.initialize = False
    load()
    at_exit.register()
    if rank == size - 1:
        if how == "interrupt":
            at_exit._together = lambda *_: end(how)
        elif how in ("early", "stop"):
            Job._context = lambda *_: end(how)
        elif how == "late":
            agreement.judge_contexts = lambda *_: end(how)
        elif how not in ("after", "cut", "storeless", "failed", "revoked"):
            Teams.get = lambda *_: end(how)
    elif how == "dead":
        make = Teams.get
        Teams._check_inside = lambda self: None
        Teams.get = lambda self, *team: progress_until(self.job.ended) and make(self, *team)
    seconds = {"stop": 4.0, "revoked": 200.0}.get(how, 0.0)
    try:
        comm = Communicator._adopt(StoreComm.first(Store(folder, rank), rank, range(size), size, seconds))
        if how == "after":
            comm._runner.abandon("as of a group of torch's that is aborted")
            if rank == size - 1:
                end(how)
        elif how == "revoked":
            revoked(comm, folder)
        elif how == "failed" and rank < size - 1:
            comm.Agree(1)
        elif how == "failed":
            (folder / f"cut{rank}").touch()
            raise RuntimeError("this rank has an error of its own")
        elif how == "cut":
            comm.Free()
            (folder / "ready").touch()
            while rank == size - 1 or not (folder / "fault").exists():
                time.sleep(0.01)
        elif how == "storeless":
            comm.Free()
            at_exit._PATIENCE = 2.0
            if rank == size - 1:
                (folder / f"cut{rank}").touch()
    except (PeerError, CollectiveTimeout) as error:
        print(f"rank {rank} knows: {type(error).__name__} {error}", flush=True)


if __name__ == "__main__":
    main()
