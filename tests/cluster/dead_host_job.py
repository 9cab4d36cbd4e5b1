"""Worker whose address others get (be FOLDER), or one that connects once the host of that is gone (meet FOLDER)."""

import sys
import time
from pathlib import Path

import numpy as np

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveError


def be(folder: Path) -> None:
    worker = rma.Worker()
    region = worker.register(np.zeros(64, np.uint8))
    (folder / "room").write_bytes(region.descriptor)
    (folder / "part").write_bytes(worker.address)
    (folder / "part").rename(folder / "address")
    time.sleep(3600)


def meet(folder: Path) -> None:
    worker = rma.Worker(timeout=3)
    mine = worker.register(np.ones(64, np.uint8))
    (folder / "ready").touch()
    while not (folder / "fault").exists():
        time.sleep(0.01)
    peer = worker.connect((folder / "address").read_bytes())
    try:
        peer.put(mine, peer.open((folder / "room").read_bytes())).Wait()
    except CollectiveError as error:
        print("right:", type(error).__name__, error, flush=True)


if __name__ == "__main__":
    {"be": be, "meet": meet}[sys.argv[1]](Path(sys.argv[2]))
