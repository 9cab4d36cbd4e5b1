"""Cases of test_torch_ends.py: torch jobs in which ranks end early, fail, or leave groups."""

import atexit
import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ucc_hetero.torch import rendezvous
from ucc_hetero.torch.work import Work


def begin():
    """Make the default group; return this rank and a tensor."""
    dist.init_process_group("ucch")
    return dist.get_rank(), torch.ones(4)


# --- ranks that end early


def exits_early(wait):
    """Rank 1, while the other one waits in a future, or at the end."""
    rank, t = begin()
    dist.all_reduce(t)
    if rank == 1:
        sys.exit(3)
    if wait == "in a future":
        dist.all_reduce(t, async_op=True).get_future().wait()
    dist.destroy_process_group()


def fails_in_a_hook(where):
    """On rank 1, of DDP's or in a future; the exception comes out of backward."""
    rank, t = begin()

    def fails(_):
        raise KeyError("mine alone")

    def hook(_, bucket):
        if rank == 1 and where == "hook":
            return fails(bucket)
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(fails if rank == 1 else lambda f: f.value()[0])

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    try:
        model(torch.ones(4)).sum().backward()
    except Exception as error:
        assert rank == 1 and "mine alone" in str(error), error
        raise
    dist.all_reduce(t)
    print("went on", flush=True)


def leaves_all_groups(how):
    """A rank awaited in one group used to wait for others in the previous group, until the timeout."""
    rank, t = begin()
    mine = dist.new_group()
    dist.barrier(group=mine)
    if rank == 1:
        if how == "destroys":
            dist.destroy_process_group()
        sys.exit()
    with pytest.raises(dist.DistBackendError, match="rank 1 has left"):
        dist.all_reduce(t)
    print("right", flush=True)
    os._exit(0)


def forked_children_end_no_group():
    """One used to tell the other ranks that its parent had left. One that waits for its parent's call, or makes a
    group, gets an error: it used to take its parent's messages, and groups hung at random."""
    rank, t = begin()
    dist.all_reduce(t)
    if not (child := os.fork()):
        dist.destroy_process_group()
        os._exit(0)
    if not (other := os.fork()):
        sys.exit()
    assert os.waitpid(child, 0)[1] == os.waitpid(other, 0)[1] == 0
    call = dist.irecv(came := torch.zeros(9), 1 - rank)
    if not (third := os.fork()):
        dist.destroy_process_group()
        for start in call.wait, lambda: dist.init_process_group("ucch", store=dist.HashStore(), rank=0, world_size=1):
            with pytest.raises(RuntimeError, match="spawn"):
                start()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(third, 0)[1]) == 7
    for first, pair in zip(range(0, 8, 2), DataLoader(range(8), 2, num_workers=2), strict=True):
        dist.all_reduce(pair)
        assert pair.tolist() == [2 * first, 2 * first + 2]
    dist.barrier()
    dist.send(torch.full([9], 5.0), 1 - rank)
    call.wait()
    assert (came == 5).all()
    for _ in range(2):  # the first one may have been posted ahead of the others' end
        dist.barrier()
    dist.all_reduce(t)
    print("went on", t[0].item(), flush=True)
    dist.destroy_process_group()


def children_make_a_group(folder):
    """They are not MPI ranks, whatever their environment says: torch saves checkpoints in such processes.

    Before that each makes a group by itself, and forks processes that make one: their first call used to hang. The
    callback of a call that is under way when its process ends is run.
    """
    rank, _ = begin()
    args = json.dumps([rank, dist.get_world_size(), f"file://{folder}/meeting"])
    subprocess.run([sys.executable, *sys.argv[:2], "child", args], check=True)
    dist.all_reduce(total := torch.ones(1))
    assert total == 2
    dist.destroy_process_group()


def check_threads():
    """No thread of the package's may be in torch when the interpreter ends."""
    left = [thread.name for thread in threading.enumerate() if "futures" in thread.name or "callbacks" in thread.name]
    if left:
        os._exit(9)


def child(rank, size, meeting):
    atexit.register(check_threads)  # run behind those that are registered later

    def total(place, rank, size):
        dist.init_process_group("ucch", init_method=f"{meeting}-{place}", rank=rank, world_size=size)
        dist.all_reduce(ones := torch.ones(1))
        dist.destroy_process_group()
        return int(ones)

    assert total(f"alone-{rank}", 0, 1) == 1
    children = []
    for i in range(3):
        if not (forked := os.fork()):
            os._exit(total(f"forked-{rank}", i, 3) != 3)
        children.append(forked)
    assert not any(os.waitpid(each, 0)[1] for each in children)
    dist.init_process_group("ucch", init_method=f"{meeting}-all", rank=rank, world_size=size)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        ends = threading.Event()

        def tell():  # once the main thread waits, after its last line
            ends.wait()
            while not any("native/waiting" in frame.f_code.co_filename for frame, _ in stack_of(main)):
                pass
            store.set("ends", "y")

        main, stack_of = threading.get_ident(), lambda thread: traceback.walk_stack(sys._current_frames()[thread])
        threading.Thread(target=tell, daemon=True).start()
        atexit.register(ends.set)
    else:
        store.wait(["ends"])
    sum_up = dist.all_reduce(ones := torch.ones(1 << 22), async_op=True).get_future()
    sum_up.then(lambda _: print(f"{int(ones[-1])} children", flush=True))


def bound_to_one_core():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for threads in ("as it was told", "no longer"):
        print(threads, file=sys.stderr, flush=True)
        begin()
        dist.new_group()
        dist.destroy_process_group()
        os.environ.pop("OMP_NUM_THREADS", None)


class Waits(dist.ProcessGroup):
    """A group whose destruction waits for the other ranks, like an NCCL group's."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.mine, self.all = store, f"left {rank}", [f"left {each}" for each in range(size)]

    def shutdown(self):
        self.store.set(self.mine, "")
        self.store.wait(self.all, datetime.timedelta(seconds=20))


def groups_end_in_torchs_order():
    """There may be an NCCL group between two ucch groups."""
    dist.Backend.register_backend("waits", Waits, devices=["cpu"])
    begin()
    dist.new_group(backend="waits")
    dist.new_group([0])  # torch ends the last ones first
    dist.destroy_process_group()


# --- on a crew


def refusals():
    """Mistakes on all ranks end nothing; a mistake on one rank ends the group on all ranks, and no other group."""
    rank, three = begin()[0], torch.zeros(3)
    mistakes = {
        "input has 4 elements": lambda bad, **group: dist.all_gather(
            [torch.zeros(3)] * 2, torch.zeros(3 + bad), async_op=True, **group),
        "AVG on bool": lambda bad, **group: dist.all_reduce(
            three.bool() if bad else three, dist.ReduceOp.AVG if bad else dist.ReduceOp.SUM, async_op=True, **group),
    }  # fmt: skip
    for reason, call in mistakes.items():
        with pytest.raises(Exception, match=reason):
            call(True)
        dist.all_reduce(three)
    for reason, call in mistakes.items():
        group = dist.new_group()
        with pytest.raises(Exception, match=reason):
            call(rank == 1, group=group).wait()
        with pytest.raises(dist.DistBackendError, match="rank 1 refused.*the group can no longer be used"):
            while True:
                dist.barrier(group=group)
    dist.all_reduce(three)


def a_failed_gradient_and_barriers():
    """DDP's reducer, in C++, receives a call's failure without a crash; a barrier waits for earlier calls."""
    begin()
    for count in (10, 1 << 20):
        tensors = [torch.ones(count) for _ in range(8)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.barrier()
        assert all(work.is_completed() for work in works), "a barrier ended before calls that were made before it"
        assert all((tensor == dist.get_world_size()).all() for tensor in tensors)
    model, publish = DistributedDataParallel(torch.nn.Linear(4, 4)), Work.publish

    def dies(self, failure=None):
        publish(self, dist.DistBackendError("a rank has died"))

    with mock.patch.object(Work, "publish", dies):
        with pytest.raises(RuntimeError, match="DistBackendError: a rank has died"):
            model(torch.ones(2, 4)).sum().backward()


def messages_without_their_others():
    """A receive of no message, and a long unreceived send: both used to delay the end by torch's half hour."""
    other = 1 - begin()[0]
    works = [dist.irecv(torch.ones(5), other, tag=3), dist.isend(torch.ones(1 << 20), other, tag=4)]
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="before the message of a receive came"):
        works[0].wait()


def destroyed_in_different_orders():
    """Each destroys its left group first, then its right one: this used to deadlock until the timeout of half an
    hour."""
    (me, t), size = begin(), dist.get_world_size()
    pairs = {left: dist.new_group([left, (left + 1) % size]) for left in range(size)}
    for left in sorted({me, (me - 1) % size}):
        dist.all_reduce(torch.ones(4), group=pairs[left])
    for left in ((me - 1) % size, me):
        dist.destroy_process_group(pairs[left])
    dist.all_reduce(t)
    assert t[0] == size


def a_host_without_an_address():
    """Its label is too long for the resolver: the store is created at the address that the message advises."""
    alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Free=lambda: None)
    world = SimpleNamespace(
        Split_type=lambda kind: alone, Get_rank=lambda: 0, Get_size=lambda: 2, bcast=lambda what, root: what
    )
    with mock.patch.object(socket, "gethostname", lambda: "a" * 64):
        store, *place = rendezvous.store_over(world, datetime.timedelta(seconds=20))
    store.set("key", "value")
    assert place == [0, 2]
