"""A rank of a job that goes on calling until something happens to it or to another: FOLDER RANK SIZE FAULT VICTIMS."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from ucc_hetero import Communicator
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.errors import CollectiveError
from ucc_hetero.native.libraries import load

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from store import Store as Folder

CALLS = 20


class Store(Folder):
    """A folder as a torch Store, which those who are ``lost`` do not reach any more."""

    def __init__(self, folder: Path, lost: bool = False) -> None:
        super().__init__(folder, 0)
        self._lost = lost

    def _path(self, key: str) -> Path:
        if self._lost and key != "fault" and (self._folder / "fault").exists():
            raise ConnectionError("the store is out of reach")
        return super()._path(key)


def hold_the_interpreter(seconds: int) -> None:
    """No Python of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


def befall(fault: str, store: Store) -> None:
    """Have the fault happen to this rank, or wait for those outside who see to it."""
    if fault in ("kill", "stop", "exit"):
        store.set("fault", repr(time.monotonic()))
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit":
        os._exit(0)
    elif fault == "hold":
        hold_the_interpreter(4)
    else:
        store.set("ready", b"")


def call(comm: Communicator) -> None:
    x, y = np.full(1 << 18, comm.rank + 1, np.float32), np.zeros(1 << 18, np.float32)
    comm.Allreduce(x, y)
    assert (y == comm.size * (comm.size + 1) / 2).all(), "wrong data"


def main() -> None:
    from ucc_hetero.bootstrap.storecomm import StoreComm

    folder, rank, size, fault, victims = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    lost = [int(word) for word in victims.split(",")]
    store = Store(folder, rank in lost)
    load()
    at_exit.register()
    comm = Communicator._adopt(StoreComm.first(store, rank, range(size), size, 200.0))
    try:
        for number in range(10**9 if fault != "hold" else 2 * CALLS):
            if number == CALLS and rank == lost[0]:
                befall(fault, store)
            call(comm)
    except CollectiveError as error:
        took = time.monotonic() - float(store.get("fault"))
        print(f"rank {rank} knows: {took:.2f} s {type(error).__name__} {error}", flush=True)
    else:
        print(f"rank {rank} right", flush=True)
        return
    living = [r for r in range(size) if r not in lost]
    if rank in living:
        dead = comm._run.board.dead_ranks()
        assert dead and set(dead) <= set(lost), dead
        place = living.index(rank)
        anew = StoreComm.first(Store(folder / "anew"), place, living, size, 200.0)
        with Communicator._adopt(anew) as survivors:
            call(survivors)
        print(f"rank {rank} goes on", flush=True)


if __name__ == "__main__":
    main()
