"""Calls that ranks of the first host make differently from those of the others: all are told who called what."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ucc_hetero import Communicator
from ucc_hetero.errors import MismatchError, PeerError
from ucc_hetero.machine.discover import host_identity
from ucc_hetero.native.libraries import load

load()
from mpi4py import MPI  # noqa: E402

WORLD = MPI.COMM_WORLD
FAR = host_identity().node != WORLD.bcast(host_identity().node)


def filled(count: int, dtype: type = np.float32) -> Any:
    return np.full(count, WORLD.rank + 1, dtype)


def pair(count: int, dtype: type = np.float32) -> tuple[Any, Any]:
    return filled(count, dtype), np.full(count, -77, dtype)


#: Kind of difference -> name of the method and arguments of the first host, and of the others. A call that has to wait
#: for others must fail itself; of the last two kinds some ranks may be through before anybody knows.
KINDS: dict[str, tuple[tuple[str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]]] = {
    "operation": (("allreduce", (*pair(1000), MPI.SUM)), ("allreduce", (*pair(1000), MPI.MAX))),
    "datatype": (("allreduce", pair(1000)), ("allreduce", pair(1000, np.int32))),
    "count": (("allreduce", pair(1000)), ("allreduce", pair(1001))),
    "long count": (("allreduce", pair(500_000)), ("allreduce", pair(499_999))),
    "collective": (("allreduce", pair(1000)), ("allgather", (filled(1000), np.zeros(1000 * WORLD.size, np.float32)))),
    "barrier": (("allreduce", pair(1)), ("barrier", ())),
    "exchange": (("alltoall", pair(120)), ("reduce_scatter_block", (filled(120), filled(120 // WORLD.size)))),
    "root": (("bcast", (filled(1000), 0)), ("bcast", (filled(1000), WORLD.size - 1))),
    "direction": (("bcast", (filled(1000), 0)), ("reduce", (*pair(1000), MPI.SUM, 0))),
}  # fmt: skip
WAITING = list(KINDS)[:-2]


def blocking(comm: Communicator, name: str, arguments: tuple[Any, ...]) -> None:
    getattr(comm, name.capitalize())(*arguments)


def started(comm: Communicator, name: str, arguments: tuple[Any, ...]) -> None:
    getattr(comm, f"I{name}")(*arguments).Wait()


def persistent(comm: Communicator, name: str, arguments: tuple[Any, ...]) -> None:
    request = getattr(comm, f"{name.capitalize()}_init")(*arguments)
    request.Start()
    request.Wait()


def through_torch(comm: Communicator, name: str, arguments: tuple[Any, ...]) -> None:
    """Call by way of torch; the communicator is its group's."""
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(arguments[0]) if arguments else torch.zeros(1)
    if name == "allreduce":
        dist.all_reduce(tensor, dist.ReduceOp.MAX if arguments[2:] == (MPI.MAX,) else dist.ReduceOp.SUM)
    elif name == "allgather":
        dist.all_gather_into_tensor(torch.from_numpy(arguments[1]), tensor)
    else:
        dist.barrier()


def refused(kind: str, call: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Make the call, and go on until all ranks know; ``call`` makes one."""
    name, arguments = KINDS[kind][FAR]
    try:
        call(name, arguments)
        assert kind not in WAITING, f"{kind}: {arguments[1][:4] if arguments else name}"
        while True:
            call("barrier", ())
            time.sleep(0.01)
    except (MismatchError, PeerError, RuntimeError) as error:
        gone = "has left" in str(error) or "has given up" in str(error)
        if gone and sys.argv[1] == "persistent":
            return  # while the call was set up: it is not known yet which one it will be
        assert isinstance(error, MismatchError) or isinstance(error.__cause__, MismatchError), error
        assert " called " in str(error), error
        print(f"rank {WORLD.rank}: {kind}: {error}", flush=True)


def main() -> None:
    form = sys.argv[1]
    if form == "torch":
        import torch.distributed as dist

        import ucc_hetero.torch  # noqa: F401

        for kind in ("operation", "datatype", "count", "collective", "barrier"):
            dist.init_process_group("ucch")
            dist.barrier()
            refused(kind, partial(through_torch, None))
            WORLD.Barrier()
            dist.destroy_process_group()
    else:
        how = {"blocking": blocking, "started": started, "persistent": persistent}[form]
        for kind in KINDS:
            comm = Communicator(WORLD)
            comm.Barrier()
            refused(kind, partial(how, comm))
            WORLD.Barrier()
    print("all kinds refused", flush=True)


if __name__ == "__main__":
    main()
