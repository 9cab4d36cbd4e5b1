"""Cases of test_torch_faults.py: torch jobs whose ranks die, under MPI or over a store, where replicas come back."""

import atexit
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ucc_hetero.torch
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.bootstrap import process
from ucc_hetero.native.libraries import lib

LIMIT = timedelta(seconds=200)


def client(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def survivors(dying, rank=-1, size=-1, port=0):
    """Ranks die in this order, and the others rebuild the default group. ``port``: of a store, without MPI."""
    store = client(port) if port else None
    dist.init_process_group("ucch", store=store, rank=rank, world_size=size, timeout=LIMIT)
    me, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group(list(range(size)))
    for count, victim in enumerate(dying, 1):
        try:
            for step in range(1_000_000):
                x = torch.full((1000,), float(me + step))
                if me == victim and step == 30:
                    die()
                if step % 3:
                    dist.all_reduce(x)
                else:
                    dist.all_reduce(x, async_op=True).wait()
        except RuntimeError as error:
            print(f"rank {me}: {error}", flush=True)
        ucc_hetero.torch.rebuild()
        left = [r for r in range(size) if r not in dying[:count]]
        assert (dist.get_rank(), dist.get_world_size()) == (left.index(me), len(left))
        x = torch.tensor([float(me)])
        dist.all_reduce(x)
        assert x.item() == sum(left), (x, left)
    del other
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.full((2, 4), float(me))).sum().backward()
    want = torch.full((4, 4), 2.0 * sum(left) / len(left))
    assert torch.allclose(model.module.weight.grad, want), model.module.weight.grad
    group = dist.new_group(list(range(len(left))))
    dist.barrier(group)
    print(f"right: {me}", flush=True)
    dist.destroy_process_group()


def the_store_is_gone(rank, port, server):
    """Calls continue without it, and the death of a rank is reported."""
    dist.init_process_group("ucch", store=client(port), rank=rank, world_size=3, timeout=LIMIT)
    other = dist.new_group([0, 1, 2])

    def reduce(step):
        for group in (other, None):
            x = torch.full((1000,), float(rank + step))
            dist.all_reduce(x, group=group)
            assert (x == 3 + 3 * step).all(), x

    reduce(0)
    if rank == 0:
        os.kill(server, signal.SIGKILL)
    for step in range(1, 4):
        if rank == step - 1:
            time.sleep(1.5)  # the others look at the store meanwhile
        reduce(step)
    print(f"right: {rank}", flush=True)
    try:
        if rank == 2:
            die()
        while True:
            reduce(0)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
    os._exit(0)  # groups cannot be left without their store


def own_groups(rank, port):
    """A function that makes the group of a generation of the three ranks."""
    store = client(port)
    return lambda generation: ucc_hetero.torch.process_group(
        dist.PrefixStore(f"generation {generation}", store), rank, 3, LIMIT
    )


def torchft_group():
    """A group of torchft's, which it recreates with this backend."""
    import torchft

    class Group(torchft.process_group.ProcessGroupWrapper):
        def _create_pg(self, store, rank, world_size):
            return ucc_hetero.torch.process_group(store, rank, world_size, self._timeout)

        def getBackendName(self):
            return "torchft-ucch"

    return Group(LIMIT)


def torchft_groups(rank, port):
    """The same by torchft."""
    import torchft

    made = torchft_group()

    def together(generation):
        address = f"127.0.0.1:{port}/{generation}"
        if hasattr(made, "configure"):
            made.configure(address, f"replica {rank}", rank, 3, generation)
        else:  # after 0.2.0
            torchft.process_group.reconfigure_with_store(made, address, rank, 3, LIMIT)
        return made

    return together


def comes_back(rank, first, port, how):
    """Ranks 0 and 1 die in their generations; ``first``: the generation in which this process has started."""
    together = (torchft_groups if how == "torchft" else own_groups)(rank, port)
    for generation in range(first, 3):
        group = together(generation)
        try:
            for step in range(1000):
                x = torch.full((1000,), float(rank + step))
                if rank == generation and step == 20 and generation < 2:
                    die()
                group.allreduce([x], dist.AllreduceOptions()).wait()
                assert x[0] == 3 + 3 * step, (x[0], step)
        except RuntimeError as error:
            print(f"rank {rank}: {error}", flush=True)
            group.abort()
    print(f"right: {rank}", flush=True)


def not_closed_in_time(rank, _, port):
    """Libraries whose closing thread is stuck in torch's store, or in libucc."""
    atexit.register(print, "after all")
    store = client(port)

    def never():
        if rank == 2:
            lib.ucch_lock()
            threading.Event().wait()
        while True:
            store.add("looks", 0)

    group = ucc_hetero.torch.process_group(store, rank, 3, LIMIT)
    group.allreduce([torch.ones(5)], dist.AllreduceOptions()).wait()
    process.close_all, at_exit._PATIENCE = never, 0.3
    print(f"right: {rank}", flush=True)


def managed(replica, again, lighthouse):
    """A script of torchft's: a replica dies in a step and returns; the others continue, and it receives their state."""
    from torchft import Manager

    steps, all_there, state = 60, 0, {"w": torch.zeros(1000)}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    manager = Manager(
        torchft_group(), state.update, lambda: {"w": state["w"].clone()}, min_replica_size=2, use_async_quorum=False,
        timeout=LIMIT, quorum_timeout=LIMIT, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"replica{replica}", hostname="127.0.0.1")  # fmt: skip
    while manager.current_step() < steps or not all_there:  # the one that comes back is waited for
        manager.start_quorum()
        step = manager.current_step()
        if replica == 1 and not again and step == 8:
            die()
        gradient = torch.full((1000,), float(step))
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            assert (gradient == step).all(), (gradient, step)
            state["w"] += gradient
            all_there += step > 8 and manager.num_participants() == 3
    done = manager.current_step()
    assert (state["w"] == sum(range(done))).all(), (state["w"][0], done)
    print(f"right: {replica}", flush=True)
    manager.shutdown()
    os._exit(0)


def serve():
    """Be a store, until the test's end; print its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
