"""A rank of a job over a store that waits in one communicator while another is revoked: FOLDER RANK SIZE."""

import sys
import time
from pathlib import Path

import mpi4py
import numpy as np

from ucc_hetero import Communicator
from ucc_hetero.bootstrap.storecomm import StoreComm
from ucc_hetero.calls.request import run_poll_hooks
from ucc_hetero.native.libraries import lib, load

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from store import Store


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    mpi4py.rc.initialize = False
    load()
    comm = Communicator._adopt(StoreComm.first(Store(folder, 0), rank, range(size), size, 200.0))
    other, found = comm.Dup(), np.full(5, -1)

    def await_all(what: str) -> None:
        while not all((folder / f"{what}{r}").exists() for r in range(size - 1)):
            time.sleep(0.01)

    def hear(op: object) -> int:
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


if __name__ == "__main__":
    main()
