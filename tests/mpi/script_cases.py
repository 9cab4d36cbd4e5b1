"""Cases that are whole scripts: each imports what it needs, in the order that it is about."""

import os
import sys
import tempfile
import threading
import traceback

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


def forked_before_mpi():
    """The child has an exit of its own, as if its parent had not imported the package."""
    import ucc_hetero as u

    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    comm = u.Communicator()
    comm.Barrier()
    sys.exit(3 * comm.rank)


# --- libraries and settings


def imported(first):
    """The package or MPI is imported first; calls are right, and the UCX in use and the notes about it are printed."""
    if first == "MPI":
        from mpi4py import MPI  # noqa: F401
    import numpy as np

    from ucc_hetero import Communicator
    from ucc_hetero.native.libraries import load

    with Communicator() as comm:
        comm.Allreduce(np.arange(5.0) + comm.rank, y := np.full(5, np.nan))
        assert (y == sum(np.arange(5.0) + r for r in range(comm.size))).all()
        data = np.zeros(3) if comm.rank else np.arange(3.0)
        comm.Send(data, 1, 4) if comm.rank == 0 else comm.Recv(data, 0, 4)
        assert (data == np.arange(3.0)).all()
    print("ucx", load().ucx_path, "|".join(load().notes) or "-", flush=True)


def opened(of_rank):
    """Make a communicator; ``of_rank``: variables, and their values on the ranks."""
    for name, values in of_rank.items():
        if values[RANK] is not None:
            os.environ[name] = values[RANK]
    import ucc_hetero

    ucc_hetero.Communicator()


def refused(of_rank):
    """Print the error of `opened`, and how many frames of it are the package's."""
    try:
        opened(of_rank)
    except Exception as error:
        frames, said = traceback.extract_tb(error.__traceback__), str(error).replace("\n", " / ")
        print(f"refused: {type(error).__name__}: {said} ({len(frames) - 2} frames)", flush=True)


def commands(*lines):
    """Run commands of ``python -m ucc_hetero``."""
    from ucc_hetero.__main__ import main

    for words in lines:
        if status := main(words.split()):
            sys.exit(status)


def unlike():
    """Every rank reports other links and runs in another folder: the plans are the same, and follow the table."""
    import numpy as np
    from mpi4py import MPI

    from ucc_hetero import Communicator

    world = MPI.COMM_WORLD
    os.environ["UCCH_LINK_SPEED"] = str(1000 * (1 + world.rank))
    os.chdir(tempfile.mkdtemp())
    with Communicator(world) as comm:
        for n in (1, 1000, 300000):
            x, y = np.full(n, world.rank, np.float32), np.zeros(n, np.float32)
            comm.Allreduce(x, y)
            assert (y == sum(range(world.size))).all()
            comm.Bcast(y)
        plan = comm.plan_summary()
        assert len(set(world.allgather(plan))) == len(set(world.allgather(comm.topology))) == 1, plan
        for line in ("allreduce float32[1] SUM: ring (measured)", "allreduce float32[1000] SUM: tree (default)",
                     "bcast float32[300000] root=0: flat (measured)"):  # fmt: skip
            assert line in plan, plan
        world.Barrier()
        if world.rank == 0:  # the first rank of a part may be on a host that lacks the file
            os.unlink(os.environ["UCCH_TUNE_FILE"])
        world.Barrier()
        with comm.Split() as part:
            part.Allreduce(np.ones(1, np.float32), np.zeros(1, np.float32))
            assert "ring (measured)" in part.plan_summary()


def recorded(dies):
    """Calls for a timeline of four ranks. Rank 1 starts some when all the others have; in the end rank 2 may die."""
    import numpy as np
    from mpi4py import MPI

    from ucc_hetero import Communicator

    comm = Communicator()
    x = np.full(1 << 18, comm.rank + 1, np.float32)
    y = np.empty_like(x)
    comm.Allreduce(x, y)
    for _ in range(5):
        if comm.rank == 1:
            MPI.COMM_WORLD.Barrier()
        request = comm.Iallreduce(x, y)
        if comm.rank != 1:
            MPI.COMM_WORLD.Barrier()
        request.Wait()
        assert (y == 10).all()
    requests = [comm.Iallreduce(x, y.copy()) for _ in range(3)]
    for request in requests:
        request.Wait()
    with Communicator(MPI.COMM_WORLD.Split(comm.rank // 2)) as half:
        half.Bcast(x)
    if dies:
        if comm.rank == 2:
            os._exit(3)
        comm.Allreduce(x, y)


def jax_arrays():
    """What is sent from JAX's arrays, which are read-only and come by DLPack."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax.numpy as jnp
    import numpy as np
    import pytest

    import ucc_hetero

    with ucc_hetero.Communicator() as comm:
        rank, size = comm.rank, comm.size
        mine, out = jnp.arange(1000, dtype=jnp.float32) + rank, np.empty(1000, np.float32)
        due = np.arange(1000, dtype=np.float32) * size + sum(range(size))
        for _ in range(3):
            comm.Allreduce(mine, out)
            assert (jnp.asarray(out) == due).all(), "and back"
        comm.Allgather(mine[:4].astype(jnp.bfloat16), gathered := np.empty(4 * size, jnp.bfloat16))
        assert (gathered.astype(np.float32).reshape(size, 4) == np.add.outer(np.arange(size), np.arange(4))).all()
        # A slice is an array of its own; results of a computation that may still be running are waited for.
        comm.Iallreduce(mine[::2] * 2, half := np.empty(500, np.float32)).Wait()
        assert (half == 2 * due[::2]).all()
        comm.Bcast(into := mine if rank == 0 else np.empty(1000, np.float32), root=0)  # the root's is only read
        assert (np.asarray(into) == np.arange(1000)).all()
        comm.Sendrecv(mine, (rank + 1) % size, 0, out, (rank - 1) % size, 0)
        assert (out == np.arange(1000) + (rank - 1) % size).all()
        for wrong in (lambda: comm.Allreduce(out, mine), lambda: comm.Recv(mine, 0)):
            with pytest.raises(BufferError, match="buf"):
                wrong()


# --- torch's backend


def replaced_on_some_ranks():
    """The error names the other ranks and the variable, and no rank waits for ever."""
    if RANK != 1:
        os.environ["UCCH_TORCH_REPLACE"] = "gloo"
    import _ucc_hetero_autoload

    _ucc_hetero_autoload.register()  # as torch's import does, which the process has behind it
    import torch.distributed as dist

    dist.init_process_group("gloo")


def for_torchrun(name):
    """The script behind the first lines has been written for torchrun and a backend of torch's."""
    assert "ucc_hetero" not in sys.modules
    import _ucc_hetero_autoload  # what the entry point names

    _ucc_hetero_autoload.register()
    assert "mpi4py.MPI" not in sys.modules

    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(name)
    assert dist.get_rank() == local and dist.get_backend() == name
    dist.new_group([1])  # rank 0, which prints what serves a group, is not in it
    if name == "nccl":
        pair = dist.new_group([0, 1], backend="gloo")  # not replaced
        dist.all_reduce(torch.ones(1), group=pair)
        assert dist.get_backend(pair) == "gloo" and pair.name() != "ucch"
    else:  # torch refuses it to other names
        dist.monitored_barrier()
        dist.destroy_process_group()
        dist.init_process_group("ucch")  # by its own name, without an import either
        assert dist.get_backend() == "ucch"
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t.tolist() == [2.0] * 3 and dist.group.WORLD.name() == "ucch"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert model._get_ddp_logging_data()["backend_name"] == dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(name)  # and once more
    dist.barrier()
    print("fine")  # ends without destroy_process_group


def local_rank_of_the_launcher():
    """It may number a host's ranks in another order: Open MPI does so with more ranks than cores."""
    from ucc_hetero.machine import launchers

    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(1 - launchers.number("RANK", os.environ, 0))
    import torch.distributed as dist

    dist.init_process_group("ucch")
    assert os.environ["LOCAL_RANK"] == str(1 - dist.get_rank())


def started_again():
    """By torchrun after a failure: the ranks must not find entries of the first ones in the store."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("ucch")
    t = torch.ones(3)
    dist.all_reduce(t)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(t)
    print("sum", t.tolist(), flush=True)
    if dist.get_rank() == 1:
        os._exit(0)  # as scripts do that want no clean-up: the other one's does not wait for it


def replaced_inside_a_vendor():
    """Without MPI; a replaced name leads to the real backend, inside torch's wrapper."""
    import torch_rehearsal  # noqa: F401  the vendors' rows alone

    import torch  # isort: skip
    import torch.distributed as dist

    import _ucc_hetero_autoload

    os.environ.update(UCCH_TORCH_REPLACE="gloo", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    dist.set_debug_level_from_env()  # as torch's import does, which this process has behind it
    _ucc_hetero_autoload.register()
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert type(world) is dist.ProcessGroup and dist.get_backend() == "gloo"
    assert dist.get_backend(dist.new_group()) == "gloo"
    kind = type(world._get_backend(torch.device("cpu"))).__name__
    assert kind == "_ProcessGroupWrapper", kind
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    dist.barrier()
    print("fine", flush=True)
    dist.destroy_process_group()


def turned_off_on_one_rank():
    """Ranks that differ in the setting still create the same groups."""
    os.environ["UCCH_TORCH_VENDOR"] = "n" if RANK == 1 else "y"
    import torch_rehearsal  # noqa: F401

    import torch  # isort: skip
    import torch.distributed as dist

    import ucc_hetero.torch

    dist.init_process_group("ucch")
    rank = dist.get_rank()
    for ranks, ours in {(0, 1, 2): True, (0, 1): True, (0, 2): False, (1,): True, (2,): False}.items():
        group = dist.group.WORLD if len(ranks) == 3 else dist.new_group(list(ranks))
        if rank in ranks:
            assert isinstance(group, ucc_hetero.torch.ProcessGroupUCCH) == ours, (rank, ranks, type(group))
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(r + 1 for r in ranks)


def fails_in_a_group_of_torchs():
    import torch.distributed as dist
    import torch_rehearsal  # noqa: F401

    dist.init_process_group("ucch")
    assert type(dist.group.WORLD) is dist.ProcessGroup
    if dist.get_rank():
        raise RuntimeError("on purpose")
    threading.Event().wait()
