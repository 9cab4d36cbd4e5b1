"""Cases of test_torch_api.py: collectives and messages, through torch.distributed's functions."""

import random
from datetime import timedelta
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch_cases import DEVICE, TWO_VENDORS, N, R, data, same
from torch_catalogue import (
    FLOATS,
    INTEGERS,
    NAMES,
    ODD,
    OPS,
    REDUCED,
    REDUCES,
    drawn_blocks,
    made,
    plain,
    poisoned,
    total,
)  # fmt: skip

from ucc_hetero.torch import work as torch_work


def shared_dice():
    """Dice that are the same on all ranks, and those of this rank."""
    seeds = [random.randrange(1 << 30)]
    dist.broadcast_object_list(seeds)
    if R == 0:
        print("seed", seeds[0], flush=True)
    return random.Random(seeds[0]), random.Random(seeds[0] + R + 1)


def wait(work, own):
    if work is not None:
        future = work.get_future() if hasattr(work, "get_future") else work  # torch returns one for coalesced calls
        own.choice((work, future)).wait()


def case_every_type_and_operation():
    for dtype in (*FLOATS, *INTEGERS, *ODD):
        for name in (each for each in NAMES if dtype in REDUCED or each not in REDUCES):
            for op in REDUCED.get(dtype, [OPS.SUM])[: None if name in ("allreduce_", "reduce_scatter_") else 1]:
                one = made(name, drawn_blocks(1, (2, 3), dtype), N - 1, op)
                one.call()
                one.check(f"{name} {dtype} {op}")
    for dtype, factor in product([torch.float32, torch.bfloat16], [0.5, torch.tensor(2.0)]):
        tensor = data(R, (7,), dtype)
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
        same(tensor, (sum(data(r, (7,)) for r in range(N)) * factor).to(dtype))


def case_nothing_to_move():
    for name, asynchronous in product(NAMES, (False, True)):
        one = made(name, drawn_blocks(1, (0, 3)), N - 1)
        work = one.call(async_op=asynchronous)
        if work is not None:
            work.wait()
        one.check(name)


class OfAUser(torch.Tensor):
    pass


def in_some_form(dice, values):
    """A tensor of these values: plain, transposed, with gaps, amid others, of another class, with a gradient, or a view
    that negates the stored numbers."""
    shape, dtype = values.shape, values.dtype
    forms = [
        torch.empty(shape, dtype=dtype), torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1]),
        torch.empty((*shape, 3), dtype=dtype)[..., 1], torch.empty(shape.numel() + 5, dtype=dtype)[2:-3].view(shape),
        torch.empty(shape, dtype=dtype).as_subclass(OfAUser),
    ]  # fmt: skip
    if dtype in (torch.float32, torch.float64):
        forms += [torch.empty(shape, dtype=dtype, requires_grad=True), torch._neg_view(torch.empty(shape, dtype=dtype))]
    chosen = dice.choice(forms)
    chosen.detach().copy_(values)
    return chosen


def in_some_forms(dice, tensors):
    return [in_some_form(dice, each) for each in tensors]


def case_random():
    """Calls made again and again with other numbers in other tensors, and one that only resembles them among them. Each
    rank's tensors are in forms of their own, and it waits in its own way."""
    dice, own = shared_dice()
    for turn in range(25):
        name, dtype = dice.choice(NAMES), dice.choice([*FLOATS, *INTEGERS, *ODD])
        dtype = dtype if dtype in REDUCED or name not in REDUCES else torch.float32
        op, shape = dice.choice(REDUCED.get(dtype, [OPS.SUM])), dice.choice([(1, 1), (3, 2), (4, 4), (130, 3), (0, 2)])
        uneven, root, how = dice.choice((name, "")), dice.randrange(N), {"async_op": True} if own.random() < 0.5 else {}
        for again in range(5):
            kind, any_form = (dtype, op), own.random() < (0.6 if again == 3 else 0.1)
            if again == 3:
                root = dice.randrange(N)
                kind = dice.choice([each for each in REDUCED if each.itemsize == dtype.itemsize] or [dtype])
                kind = kind, dice.choice(REDUCED.get(kind, [OPS.SUM]))
            forms, rooms = plain, lambda tensors: several(tensors, own)
            if any_form:
                forms = partial(in_some_forms, own)
                rooms = poisoned if name == "gather_single" else lambda tensors: in_some_forms(own, poisoned(tensors))
            one = made(name, drawn_blocks(100 * turn + again, shape, kind[0], uneven), root, kind[1], forms, rooms)
            wait(one.call(**how), own)
            for got, want in zip(one.outputs, one.due, strict=True):
                got = got.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
                same(got, want, f"{turn}, {again}: {name} {kind} {shape} {uneven}")


def several(tensors, own):
    """Room for such tensors, which are adjacent or not."""
    sizes = [each.numel() for each in tensors]
    if own.random() < 0.5 or 0 in sizes:
        return poisoned(tensors)
    parts = torch.full((sum(sizes),), 77, dtype=tensors[0].dtype).split(sizes)
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def case_coalesced():
    """As many tensors as before, or more or fewer; some ranks wait at once, others later."""
    dice, own = shared_dice()
    names = ["allreduce_", "_allgather_base_", "_reduce_scatter_base_"]
    for turn in range(25):
        name, n, many = dice.choice(names), dice.choice((2, 50, 3000)), dice.randint(1, 4)
        calls = [made(name, drawn_blocks(10 * turn + k, (n,))) for k in range(many)]
        how = {"async_ops": own.random() < 0.5} | own.choice(({}, {"device": torch.device(DEVICE)}))
        with dist._coalescing_manager(**how) as manager:
            for each in calls:
                each.call()
        if how["async_ops"]:
            manager.wait()
        for each in calls:
            each.check(f"{turn}: {many} {name} {n}")


def case_long_scatters():
    """Some receive into memory with gaps; the root's tensors are adjacent or not."""
    dice, own = shared_dice()
    for turn in range(3):
        blocks = drawn_blocks(turn, ((17 << 20) // N // 4 + dice.randrange(1000),))
        one = made(
            "scatter_", blocks, dice.randrange(N), forms=lambda tensors: fill(several(tensors, own), tensors),
            rooms=lambda tensors: [torch.full((*each.shape, 2), 77.0)[..., 0] for each in tensors] if own.random() < 0.5
            else poisoned(tensors),
        )  # fmt: skip
        wait(one.call(async_op=own.random() < 0.5), own)
        same(one.outputs[0].contiguous(), one.due[0])


def fill(tensors, values):
    return [each.copy_(value) for each, value in zip(tensors, values, strict=True)]


def case_inputs_inside_outputs():
    """Of all places only a rank's own part is in place; at others what arrives would overwrite what is sent."""
    sizes = [3 + r % 2 for r in range(N)]

    def whole(seed):
        return data(seed, (3 * N + N // 2,))

    def run(call, start, size):
        memory = whole(R)
        call(memory, memory[start : start + size])
        return memory

    for n in range(N):
        for start in (3 * n, 3 * n + 1):
            want = torch.cat([whole(r)[start : start + 3] for r in range(N)])
            for _ in range(2):
                apart = torch.empty(3 * N)
                dist.all_gather_into_tensor(apart, whole(R)[start : start + 3])
                same(apart, want)
            same(run(lambda m, x: dist.all_gather_into_tensor(m[: 3 * N], x), start, 3)[: 3 * N], want)
            same(run(lambda m, x: dist.all_gather(list(m[: 3 * N].split(3)), x), start, 3)[: 3 * N], want)
            here = run(lambda m, x: dist.gather(x, list(m[: 3 * N].split(3)) if R == 1 else None, 1), start, 3)
            same(here[: 3 * N], want if R == 1 else whole(R)[: 3 * N])
            here = run(lambda m, x: dist.scatter(x, list(m[: 3 * N].split(3)) if R == 1 else None, 1), start, 3)
            same(here[start : start + 3], whole(1)[3 * R : 3 * R + 3])
            here = run(lambda m, x: dist.reduce_scatter_tensor(x, m[: 3 * N]), start, 3)
            same(here[start : start + 3], sum(whole(r) for r in range(N))[3 * R : 3 * R + 3])
        start = sum(sizes[:n])
        here = run(lambda m, x: dist.all_gather(list(m.split(sizes)), x), start, sizes[R])
        same(here, torch.cat([whole(r)[start : start + sizes[r]] for r in range(N)]))


def case_short_forms():
    """The methods of a group, with operation, root and timeout in place of options: as torch's own take them."""
    group, limit, root = dist.group.WORLD, timedelta(seconds=60), random.Random(N).randrange(N)
    parts, op = [data(r, (2, 3), torch.float64, 3) for r in range(N)], OPS.MAX
    calls = [
        (group.allreduce, (op,), {}, total(parts, op)), (group.allreduce, (), {"op": op}, total(parts, op)),
        (group.allreduce, (), {}, total(parts, OPS.SUM)), (group.allreduce, (op, limit), {}, total(parts, op)),
        (group.broadcast, (root,), {}, parts[root]), (group.broadcast, (), {"root": root}, parts[root]),
        (group.broadcast, (root, limit), {}, parts[root]),
        (group.reduce, (root, op), {}, total(parts, op)), (group.reduce, (root,), {"op": op}, total(parts, op)),
        (group.reduce, (root,), {"timeout": limit}, total(parts, OPS.SUM)),
    ]  # fmt: skip
    for method, args, named, want in calls:
        tensor = parts[R].clone()
        method(random.choice([tensor, [tensor]]) if method != group.reduce else tensor, *args, **named).wait()
        if method != group.reduce or root == R:
            same(tensor, want, f"{method.__name__} {args} {named}")
    into = [torch.full((2, 3), -1.0, dtype=torch.float64) for _ in range(N)]
    group.allgather(into, parts[R], limit).wait()
    [same(*pair) for pair in zip(into, parts, strict=True)]
    into = [torch.full((2, 3), -1.0, dtype=torch.float64) for _ in range(N)] if root == R else []
    group.gather(into, parts[R], root, limit).wait()
    [same(*pair) for pair in zip(into, parts, strict=False)]
    group.scatter(got := torch.zeros(2, 3, dtype=torch.float64), parts if root == R else [], root=root).wait()
    same(got, parts[R])
    group.reduce_scatter(got, [part + R for part in parts], op).wait()
    same(got, parts[R] + N - 1)
    rows = data(R, (N, 2))
    group.alltoall_base(got := torch.zeros(N, 2), rows, [], [], timeout=limit).wait()
    same(got, torch.stack([data(r, (N, 2))[R] for r in range(N)]))
    group.barrier(limit).wait()
    with pytest.raises(TypeError, match="'operation'"):
        group.allreduce(rows, operation=op)


def case_messages():
    right, left = (R + 1) % N, (R - 1) % N
    got = torch.empty(4)
    ops = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, data(R, (4,)), right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, data(left, (4,)))
    if R == 0:
        found = []
        for r in range(1, N):
            one = torch.empty(2)
            if TWO_VENDORS:
                with pytest.raises(dist.DistBackendError, match="name its source"):
                    dist.recv(one, tag=7)
            found.append(dist.recv(one, r if TWO_VENDORS else None, tag=7))
            same(one, data(found[-1], (2,)))
        assert sorted(found) == list(range(1, N))
    else:
        dist.send(data(R, (2,)), 0, tag=7)
    strided = torch.zeros(4, 2)
    work = dist.irecv(strided[:, 0], src=left, tag=3)
    dist.isend(data(R, (6, 2))[::2][:, 1].contiguous().repeat(2)[:4], right, tag=3).wait()
    work.wait()
    assert strided[:, 0].min() > 0 and not strided[:, 1].any()
    assert work.is_completed()  # a device's tensor only after its stream was waited for
    for size in (0, 1 << 20):
        big = torch.empty(size)
        works = [dist.isend(torch.full((size,), float(R)), right), dist.irecv(big, left)]
        for work in works:
            work.wait()
        same(big, torch.full((size,), float(left)))
    things = [None, None]
    if R == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1)
    elif R == 1:
        dist.recv_object_list(things, src=0)
        assert things == [{"a": 1}, "b"]
    to_self = torch.empty(3)
    work = dist.group.WORLD.recv([to_self], R, 9)
    dist.group.WORLD.send([torch.ones(3)], R, 9).wait()
    work.wait()
    same(to_self, torch.ones(3))


def case_interrupted_copies():
    """A signal's handler may raise while a result is copied out: the wait raises that once, and the next one copies."""
    if DEVICE != "cpu":
        return  # a stream copies there

    class Stop(Exception):
        pass

    def interrupt(_):
        raise Stop

    def from_left(into):
        work = dist.irecv(into, (R - 1) % N)
        dist.send(data(R, (4,)), (R + 1) % N)
        return work

    sums = lambda into: dist.all_reduce(into, async_op=True)  # noqa: E731
    calls = (from_left, data((R - 1) % N, (4,))), (sums, torch.full((4,), float(N)))
    for call, want in calls:
        into = torch.ones(4, 2)[:, 0]
        with mock.patch.object(torch_work, "used_in_current", interrupt):
            work = call(into)
            with pytest.raises(Stop):
                work.wait()
        into.fill_(-1)
        assert work.wait() and work.is_success() and work.exception() is None
        same(into, want)
        into.fill_(-1)
        work.wait()
        same(into, torch.full((4,), -1.0))
