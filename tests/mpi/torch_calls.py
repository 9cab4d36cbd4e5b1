"""Cases of test_torch_api.py: futures, groups, functional collectives, and what goes wrong."""

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import DEVICE, N, R, data, same
from torch_catalogue import NAMES, OPS, drawn_blocks, every_call, made, plain, poisoned
from torch_model import fresh, sgd, train

import ucc_hetero.torch.backend
from ucc_hetero.calls.request import kept_by
from ucc_hetero.engine.lowering import _SPARE, Program
from ucc_hetero.native.libraries import ffi
from ucc_hetero.torch import collectives

#: Calls through torch's functions, by their operators; gather_single has none.
SEEN = [name for name in NAMES if name.endswith("_")]


def case_futures():
    tensor = data(R, (100_000,))
    want = sum(data(r, (100_000,)) for r in range(N))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    same(doubled.wait(), want * 2 + 1)
    same(future.wait()[0], want)
    assert work.is_completed() and work.is_success() and work.exception() is None and future.done()
    same(work.result()[0], want)

    # Callbacks that communicate, several calls under way at once, with a different delay on each rank.
    def nested(f):
        time.sleep(0.002 * ((R * 7 + int(f.value()[0][0])) % 3))
        return dist.all_reduce(f.value()[0].clone(), async_op=True).get_future().wait()[0]

    chains = []
    for k in range(4):
        each = torch.full((1000 * (4 - k),), float(R + k))
        chains.append(dist.all_reduce(each, async_op=True).get_future().then(nested))
    dist.all_reduce(torch.ones(3))
    for k, chain in enumerate(chains):
        value = float(N * sum(r + k for r in range(N)))
        same(chain.wait(), torch.full((1000 * (4 - k),), value))

    # Callbacks of a call that was waited for run before then() returns; torchft's manager relies on that.
    each = torch.full((1000,), float(R))
    for first in (True, False):
        work = dist.all_reduce(each, async_op=True)
        early = work.get_future() if first else None
        work.wait()
        ran = []
        chain = (early or work.get_future()).then(lambda f, ran=ran: ran.append(f.value()[0]) or threading.get_ident())
        chain.then(lambda f, ran=ran: ran.append(f.value()))
        same(ran[0], each)
        assert ran[1] == threading.get_ident() and chain.done()

    def fails(f):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(fails).wait()


def case_dropped_and_many():
    tensors = [torch.full((50,), float(R + k)) for k in range(100)]
    for each in tensors:
        dist.all_reduce(each, async_op=True)
    dist.barrier()
    last = dist.all_reduce(torch.ones(1), async_op=True)
    last.wait()
    for k, each in enumerate(tensors):
        same(each, torch.full((50,), float(sum(r + k for r in range(N)))))


def case_operations_outlive_their_calls():
    """Another thread may still wait for one whose program goes back to a pool that is full."""
    if DEVICE != "cpu":
        return  # in streams programs stay with their calls
    group = dist.new_group()
    for _ in range(2):  # at first the pool is empty
        held, ops = [], set()
        if R == 0:
            [dist.recv(torch.ones(1), other) for other in range(1, N)]  # then those of the other ranks are under way
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(2 * _SPARE)]
        if R:
            held += [each for work in works for each in work.pending()]
            ops.update(address_of(each.op) for each in held)
        programs = [each for each in gc.get_objects() if type(each) is Program]
        refs = [weakref.ref(each) for each in programs if address_of(each.op) in ops]
        del programs
        if R:
            dist.send(torch.ones(1), 0)
        [work.wait() for work in reversed(works)]
        works.clear()
        assert len(refs) == len(held) and all(ref() is not None for ref in refs)
    comm, sent, got = dist.group.WORLD.communicator, np.full(3, R), np.empty(3, int)
    for _ in range(3):  # from the second time on in C, where another thread may complete it
        request = comm.Isend(sent, R, 9)
        comm.Recv(got, R, 9)
        request.Wait()
        assert kept_by(request) is None and got[0] == R


def no_room():
    raise RuntimeError("no room")


def case_results_that_cannot_be_copied():
    """The call has been made, so the group goes on; in repeated calls, too."""
    group = dist.new_group()
    for turn in range(4):
        fails_here = R == 0 and turn > 1
        with mock.patch.object(collectives, "copy_back", lambda *_: no_room) if fails_here else nullcontext():
            with pytest.raises(RuntimeError, match="no room") if fails_here else nullcontext():
                dist.all_reduce(data(R, (4, 2))[:, 0], group=group)
    dist.all_reduce(total := torch.ones(3), group=group)
    same(total, torch.full((3,), float(N)))


def address_of(op):
    return int(ffi.cast("uintptr_t", op))


def case_split_groups():
    backwards = dist.new_group(list(reversed(range(N))))
    first = dist.split_group(split_ranks=[[1, 0], *([list(range(2, N))] if N > 2 else [])])
    for parent, parts in (
        (None, [[0], [N - 1]]),
        (first, [[r] for r in reversed(range(first.size()))]),
        (backwards, [[N - 1, 0]]),
    ):
        within = dist.get_process_group_ranks(parent or dist.group.WORLD)
        mine = next((part for part in parts if R in [within[r] for r in part]), None)
        part = dist.split_group(parent, parts, group_desc="part")
        if mine is None:
            assert part in (None, dist.GroupMember.NON_GROUP_MEMBER)
        else:
            dist.all_gather(whole := [torch.empty(1) for _ in mine], torch.tensor([float(R)]), group=part)
            order = mine if torch.__version__ >= (2, 14) else sorted(mine)
            assert [each.item() for each in whole] == [within[r] for r in order] and part.group_desc == "part"
    for wrong in ([[0, 1], [1]], [[N]], [[0], []], [], None):
        with pytest.raises(ValueError, match="split_ranks"):
            dist.split_group(split_ranks=wrong)


def case_groups():
    for ranks in (range(0, N, 2), reversed(range(N)), [1]):
        every_call(dist.new_group([*ranks]))
    for ranks in 3 * ([R], [R // 2 * 2, R // 2 * 2 + 1]):  # ranks of other groups make theirs at the same time
        every_call(dist.new_group(ranks), ["allreduce_"])
    pair, _ = dist.new_subgroups(2)
    every_call(pair)
    beside = dist.new_group(backend="gloo")
    every_call(beside, ["allreduce_"])
    assert dist.get_backend(beside) == "gloo" and dist.get_backend(pair) == "ucch"
    dist.destroy_process_group(pair)
    mesh = dist.init_device_mesh(DEVICE, (N // 2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        every_call(mesh[name].get_group())
    assert dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name).rank() == R


def case_sparse():
    mine = torch.sparse_coo_tensor([[R, N]], [1.0, float(R)], (N + 1,))
    for _ in range(3):  # a dense one of this kind is known
        dist.all_reduce(mine.to_dense())
    dist.all_reduce(mine)
    same(mine.to_dense(), torch.tensor([1.0] * N + [float(sum(range(N)))]))


def case_functional():
    import torch.distributed._functional_collectives as fc

    same(fc.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 0, torch.full((3,), float(N)))
    same(fc.all_reduce(torch.ones(3) * R, "avg", dist.group.WORLD) + 0, torch.full((3,), sum(range(N)) / N))
    same(fc.all_gather_tensor(data(R, (2, 2)), 0, dist.group.WORLD) + 0, torch.cat([data(r, (2, 2)) for r in range(N)]))
    got = fc.reduce_scatter_tensor(data(R, (2 * N,)), "sum", 0, dist.group.WORLD)
    same(got + 0, sum(data(r, (2 * N,)) for r in range(N))[2 * R : 2 * R + 2])
    got = fc.all_to_all_single(torch.full((N,), float(R)), None, None, dist.group.WORLD)
    same(got + 0, torch.arange(float(N)))
    for o in fc.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", dist.group.WORLD):
        assert (o + 0).max() == N
    for o in fc.all_gather_into_tensor_coalesced([torch.ones(1), torch.ones(2)], dist.group.WORLD):
        assert (o + 0).numel() in (N, 2 * N)
    for o in fc.reduce_scatter_tensor_coalesced([torch.ones(N), torch.ones(2 * N)], "sum", [0, 0], dist.group.WORLD):
        assert (o + 0).max() == N
    same(fc.broadcast(torch.full((2,), float(R)), 1, dist.group.WORLD) + 0, torch.ones(2))
    for group in dist.group.WORLD, dist.new_group(backend="gloo"):
        gather = torch.ops._c10d_functional.all_gather_into_tensor_out
        whole = torch.full((2 * N, 3), float("nan"))
        out = gather(data(R, (2, 3)), N, group.group_name, out=whole)
        assert out.data_ptr() == whole.data_ptr()
        same(fc.wait_tensor(out), torch.cat([data(r, (2, 3)) for r in range(N)]))
    fc.all_reduce(torch.ones(3), "sum", dist.group.WORLD)  # without a wait


def _each_twice(forms=plain, rooms=poisoned, check=same):
    """Make each call twice, the second time on the short path."""
    for turn, name in product(range(2), SEEN):
        one = made(name, drawn_blocks(turn, (N,)), 1, OPS.SUM, forms, rooms)
        one.call()
        one.check(name, check)


def case_results_of_functional_collectives():
    """Such tensors have no memory of their own: a call waits for them."""
    import torch.distributed._functional_collectives as fc

    alone = [dist.new_group([r]) for r in range(N)][R]

    def results(tensors):
        found = [fc.all_reduce(each, "sum", alone) for each in tensors]
        assert not any(each.data_ptr() for each in found)
        return found

    _each_twice(results, check=lambda got, want, what: same(torch.empty_like(want).copy_(got), want, what))


class _Seen(TorchDispatchMode):
    def __init__(self, beside=None):
        super().__init__()
        self.names, self.beside = [], beside

    def __torch_dispatch__(self, operator, types, args=(), more=None):
        boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
        if boxed and dist.ProcessGroup.unbox(boxed[0]) is dist.group.WORLD:
            self.names.append(operator._opname)
            if self.beside is not None and operator._opname == "allreduce_":
                dist.all_reduce(one := torch.ones(1), group=self.beside)
                same(one, torch.full((1,), float(N)))
        return operator(*args, **(more or {}))


def case_modes_of_the_dispatcher():
    """Modes see a call's operator, once, and with them nothing else changes; inside of another mode, too. Calls of
    other backends go on meanwhile."""
    with _Seen() as outer, _Seen(dist.new_group(backend="gloo")) as inner:
        _each_twice()
    assert outer.names == inner.names == 2 * " ".join(SEEN).split(), inner.names
    with FakeTensorMode():
        dist.all_reduce(fake := torch.ones(2))
    assert isinstance(fake, FakeTensor)
    _each_twice()
    assert len(outer.names) == len(inner.names)


def case_tensors_in_tensors():
    """The tensors inside take part each by itself. A DTensor's call is refused by torch, and on all ranks."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

    def twice(tensors):
        return [TwoTensor(each.clone(), each.clone()) for each in tensors]

    def both(got, want, what):
        same(got.a, want, what)
        same(got.b, want, what)

    _each_twice(twice, lambda tensors: twice(poisoned(tensors)), both)
    if DEVICE != "cpu":  # the other ranks' streams wait
        return
    replicated = DTensor.from_local(torch.ones(2), DeviceMesh(DEVICE, range(N)), [Replicate()])
    with pytest.raises(NotImplementedError if R else dist.DistBackendError, match="sharding strategy"):
        dist.all_reduce(replicated if R else torch.ones(2), group=dist.new_group(list(range(N))))


def case_compiled():
    import torch.distributed._functional_collectives as fc

    def step(x):
        y = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
        return y + fc.all_gather_tensor(x, 0, dist.group.WORLD).sum()

    x = torch.full((2,), float(R))
    want = torch.full((2,), 4.0 * sum(range(N)))
    same(torch.compile(step, backend="aot_eager", fullgraph=True)(x), want)

    def in_place(x):
        y = x + 1
        dist.all_reduce(y)
        return y

    same(torch.compile(in_place, backend="eager")(x), torch.full((2,), float(sum(range(N)) + N)))


def case_compiled_ddp():
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(fresh()), backend="eager")
    train(model, sgd(model.parameters()))


def case_errors_before_anything_is_sent():
    for said, wrong in (
        (f"{R}", lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2))),
        (f"{R}", lambda: dist.all_gather([torch.empty(2)] * (N - 1), torch.empty(2))),
        (f"{R}", lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(3))),
        (f"{R}|split", lambda: dist.all_to_all_single(torch.empty(N + 1), torch.empty(N + 1))),
        ("split", lambda: dist.all_to_all_single(torch.empty(N), torch.empty(N), [1] * N, [2] * N)),
        ("BAND", lambda: dist.all_reduce(torch.ones(2), op=OPS.BAND)),
        ("BXOR", lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64), op=OPS.BXOR)),
        ("PREMUL", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist._make_nccl_premul_sum(2.0))),
        ("meta", lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        ("list of one tensor", lambda: dist.group.WORLD.allreduce([torch.ones(2), torch.ones(2)])),
        ("tag -5", lambda: dist.send(torch.ones(2), (R + 1) % N, tag=-5)),
        ("to_dense", lambda: dist.broadcast(torch.eye(2).to_sparse(), 0)),
        ("to_dense", lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())),
        ("int_repr", lambda: dist.broadcast(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8), 0)),
        ("clone", lambda: dist.all_reduce(torch.ones(1).expand(2))),
        ("clone", lambda: dist.all_gather([torch.ones(1).expand(2)] * N, torch.ones(2))),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=said):
            wrong()
    dist.barrier()


def case_waiting_has_a_limit():
    group = dist.new_group(list(range(N)))
    if R == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="Timeout expired"):
            work.wait(timedelta(seconds=0.3))
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        if R == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2), group=group)


def case_monitored_barrier():
    group = dist.new_group()
    group.monitored_barrier(timedelta(seconds=200))
    dist.monitored_barrier()
    with pytest.raises(TypeError, match="timedelta"):
        dist.monitored_barrier(timeout=5)
    beside = dist.new_group(backend="gloo")
    dist.monitored_barrier(beside, timedelta(seconds=200))
    if R > 1:
        dist.send(torch.ones(1), 0)
    elif R == 0:
        [dist.recv(torch.ones(1), other) for other in range(2, N)]  # the limit applies once these are posted
    if R != 1:
        want = r"Ranks? 1\b.* failed to pass monitoredBarrier" if R == 0 else f"Rank {R} successfully reached"
        with pytest.raises(RuntimeError, match=want):
            dist.monitored_barrier(group, timedelta(seconds=200 if R else 2), wait_all_ranks=True)
    dist.barrier(group=group)


def case_methods_that_look_for_a_backend_in_cpp():
    """One of torch's own versions ends the process."""
    group = dist.new_group()
    store = group.get_group_store()
    store.set(f"of {R}", "x")
    store.wait([f"of {r}" for r in range(N)], timedelta(seconds=200))
    for way_out, wrong in (
        ("new_group", lambda: group.split_group([0])),
        ("store", lambda: group.merge_remote_group(store, N)),
        ("store", lambda: group.reconfigure(None)),
        ("rma", group.new_window),
        ("rebuild", lambda: ucc_hetero.torch.backend.create(SimpleNamespace(enable_reconfigure=True))),
        ("CommDebugMode", lambda: group.register_pre_hook(1, print)),
    ):
        with pytest.raises(NotImplementedError, match=way_out):
            wrong()
    backend = group._get_backend(torch.device("cpu"))
    assert backend is group.get_backend("cpu") and not backend.supports_tensor_alloc("cpu")
    asked = [name for name in dir(dist.ProcessGroup) + dir(torch._C._distributed_c10d.Backend) if "supports_" in name]
    assert not any(getattr(backend, name) for name in asked if name != "supports_tensor_alloc")
    dist.all_reduce(total := torch.ones(1), group=group)
    same(total, torch.tensor([float(N)]))


def case_failures():
    group = dist.new_group(list(range(N)))
    for _ in range(2):
        dist.all_reduce(torch.ones(2), group=group)
    if R == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)  # as torchtitan does
        future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
        for each in (future.then(lambda f: f.value()), future):
            # Scripts and torch's own tests look for these words, spaces included.
            with pytest.raises(RuntimeError, match="(?s)(?=.*allreduce).* Timed out "):
                each.wait()
        with pytest.raises(dist.DistBackendError, match="the group can no longer be used: make"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


def case_groups_that_are_over():
    """Only the last destroyed group is kept, until the next is made."""
    refs = []
    for _ in range(3):
        group = dist.new_group()
        refs.append(weakref.ref(group))
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
    del group
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True, False]


def case_mismatches():
    """Ranks make different calls: every rank's error names the ranks and their calls. bad_input_cases.py has what may
    differ."""
    group = dist.new_group(list(range(N)), timeout=timedelta(seconds=200))
    with pytest.raises(dist.DistBackendError, match="(?s)rank.*called"):
        dist.all_gather([torch.ones(2)] * N, torch.ones(2), group) if R else dist.all_reduce(torch.ones(2), group=group)


def case_tensors_without_memory():
    """Only rank 0 has one; the other ranks learn of it. On GPUs their streams would wait, so tensors are the host's."""
    plain, whole = torch.eye(2, device="cpu"), torch.ones(2 * N, 2, device="cpu")
    for call in (
        lambda group, x: dist.broadcast(x, 0, group=group),
        lambda group, x: dist.all_gather_into_tensor(whole, x, group=group),
        lambda group, x: dist.reduce_scatter_tensor(x, whole, group=group),
    ):
        group = dist.new_group(list(range(N)), timeout=timedelta(seconds=200))
        with pytest.raises(TypeError if R == 0 else dist.DistBackendError, match="to_dense"):
            call(group, plain if R else plain.to_sparse())


def case_abort():
    group = dist.new_group(list(range(N)))
    dist.all_reduce(torch.ones(2), group=group)
    if R == 0:
        threading.Timer(0.3, group.abort).start()
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()
