"""Cases of test_torch_api.py: collectives and messages, through torch.distributed's functions."""

import itertools
import random
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_cases import DEVICE, TWO_VENDORS, N, R, data, same

from ucc_hetero.torch import work as torch_work

OPS = dist.ReduceOp
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16]
ODD = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex32]


def everyone(shape, dtype, scale=3):
    return [data(r, shape, dtype, scale) for r in range(N)]


def total(parts, op):
    dtype = parts[0].dtype
    wide = torch.stack(
        [p.to(torch.int64) if dtype == torch.bool or not dtype.is_floating_point else p.double() for p in parts]
    )
    if op == OPS.SUM:
        out = wide.sum(0)
    elif op == OPS.AVG:
        out = torch.div(wide.sum(0), N, rounding_mode=None if dtype.is_floating_point else "trunc")
    elif op == OPS.PRODUCT:
        out = wide.prod(0)
    elif op == OPS.MIN:
        out = wide.amin(0)
    elif op == OPS.MAX:
        out = wide.amax(0)
    else:
        out = wide[0]
        for part in wide[1:]:
            out = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}[op](out, part)
    return out.to(dtype)


def case_all_reduce():
    arithmetic = [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX]
    for dtype, op in itertools.chain(
        itertools.product(FLOATS, [*arithmetic, OPS.AVG]),
        itertools.product(INTEGERS, [*arithmetic, OPS.AVG, OPS.BAND, OPS.BOR, OPS.BXOR]),
        itertools.product([torch.float8_e4m3fn, torch.float8_e5m2], [OPS.SUM, OPS.MAX]),
        itertools.product([torch.bool], [*arithmetic, OPS.BAND, OPS.BOR, OPS.BXOR]),
    ):
        parts = everyone((3, 5), dtype)
        tensor = parts[R].clone()
        assert dist.all_reduce(tensor, op=op) is None
        same(tensor, total(parts, op), f"{dtype} {op}")
    z = data(R, (4,), torch.complex64) * 1j
    dist.all_reduce(z)
    same(z, sum(everyone((4,), torch.complex64, 5)) * 1j)


def case_premul_sum():
    for dtype, factor in itertools.product([torch.float32, torch.bfloat16], [0.5, torch.tensor(2.0)]):
        tensor = data(R, (7,), dtype)
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
        same(tensor, (sum(data(r, (7,)) for r in range(N)) * factor).to(dtype))


def case_layouts():
    parts = everyone((8, 6), torch.float32)
    want = total(parts, OPS.SUM)
    for view in (lambda t: t.t(), lambda t: t[::2, 1:4], lambda t: t[3], lambda t: t[0, 0], lambda t: t[:0]):
        mine = parts[R].clone()
        dist.all_reduce(view(mine))
        same(view(mine), view(want))
        untouched = parts[R].clone()
        view(untouched).zero_(), view(mine).zero_()
        same(mine, untouched)
        mine = parts[R].clone()
        dist.broadcast(view(mine), N - 1)
        same(view(mine), view(parts[N - 1]))
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    same(leaf.detach(), torch.full((3,), float(N)))


def case_movement():
    for dtype in [*FLOATS, torch.int64, *ODD]:
        parts = everyone((2, 3), dtype)
        mine = parts[R]
        got = torch.empty_like(mine)
        got = mine.clone() if R == 1 else got
        dist.broadcast(got, 1)
        same(got, parts[1], f"broadcast {dtype}")
        outputs = [torch.empty_like(mine) for _ in range(N)]
        dist.all_gather(outputs, mine)
        for o, want in zip(outputs, parts, strict=True):
            same(o, want, f"all_gather {dtype}")
        flat = torch.empty((2 * N, 3), dtype=dtype)
        dist.all_gather_into_tensor(flat, mine)
        for r, want in enumerate(parts):
            same(flat[2 * r : 2 * r + 2], want, f"single {dtype}")
        lists = [torch.empty_like(mine) for _ in range(N)] if R == N - 1 else None
        dist.gather(mine, lists, dst=N - 1)
        for o, want in zip(lists or [], parts, strict=R == N - 1):
            same(o, want, f"gather {dtype}")
        options = torch._C._distributed_c10d.GatherOptions()
        options.rootRank = N - 1
        flat = torch.empty((N, 2, 3) if R == N - 1 else 0, dtype=dtype)
        dist.group.WORLD.gather_single(flat, mine, options).wait()
        for o, want in zip(flat, parts, strict=R == N - 1):
            same(o, want, f"gather_single {dtype}")
        got = torch.empty_like(mine)
        dist.scatter(got, parts if R == 0 else None, src=0)
        same(got, mine, f"scatter {dtype}")
        sent = [data(R * N + r, (2,), dtype) for r in range(N)]
        received = [torch.empty(2, dtype=dtype) for _ in range(N)]
        dist.all_to_all(received, sent)
        for r, o in enumerate(received):
            same(o, data(r * N + R, (2,), dtype), f"all_to_all {dtype}")


class OfAUser(torch.Tensor):
    pass


def in_some_form(dice, values):
    """A tensor of these values: plain, transposed, with gaps, amid others, of another class, with a gradient, or a view
    that negates the stored numbers."""
    shape, dtype = values.shape, values.dtype
    forms = [
        torch.empty(shape, dtype=dtype), torch.empty(shape[::-1], dtype=dtype).t(),
        torch.empty((*shape, 3), dtype=dtype)[..., 1], torch.empty(shape.numel() + 5, dtype=dtype)[2:-3].view(shape),
        torch.empty(shape, dtype=dtype).as_subclass(OfAUser),
    ]  # fmt: skip
    if dtype in (torch.float32, torch.float64):
        forms += [torch.empty(shape, dtype=dtype, requires_grad=True), torch._neg_view(torch.empty(shape, dtype=dtype))]
    chosen = dice.choice(forms)
    chosen.detach().copy_(values)
    return chosen


def on_some_forms(name, form, blocks, root):
    """Make a call on tensors in any form; ``blocks[r][q]`` is what rank r has for rank q. Returns pairs of what came
    and what was due."""
    mine, theirs, firsts = blocks[R], [row[R] for row in blocks], [row[0] for row in blocks]
    into = [form(torch.ones_like(mine[0])) for _ in range(N)]
    one = form(mine[0]) if name in ("all_reduce", "broadcast") else into[0]
    if name == "all_reduce":
        dist.all_reduce(one)
        return [(one, total(firsts, OPS.SUM))]
    if name == "reduce_scatter":
        dist.reduce_scatter(one, [form(block) for block in mine])
        return [(one, total(theirs, OPS.SUM))]
    if name == "broadcast":
        dist.broadcast(one, root)
        return [(one, firsts[root])]
    if name == "scatter":
        dist.scatter(one, [form(block) for block in mine] if root == R else None, root)
        return [(one, blocks[root][R])]
    if name == "gather":
        dist.gather(form(mine[0]), into if root == R else None, root)
        return zip(into, firsts, strict=True) if root == R else ()
    if name == "all_gather":
        dist.all_gather(into, form(mine[0]))
        return zip(into, firsts, strict=True)
    if name == "all_to_all":
        dist.all_to_all(into, [form(block) for block in mine])
        return zip(into, theirs, strict=True)
    work = dist.irecv(one, (R - 1) % N)
    dist.send(form(mine[0]), (R + 1) % N)
    work.wait()
    return [(one, firsts[R - 1])]


def case_tensors_in_any_form():
    """Each rank's tensors are in forms of their own."""
    seeds = [random.randrange(1 << 30)]
    dist.broadcast_object_list(seeds)
    dice, own = random.Random(seeds[0]), random.Random(seeds[0] + R + 1)
    for turn in range(40):
        name = dice.choice("all_reduce reduce_scatter broadcast scatter gather all_gather all_to_all message".split())
        dtype = dice.choice([*FLOATS, *INTEGERS, *([] if "reduce" in name else ODD)])
        shape = dice.choice([(1, 1), (3, 2), (4, 4), (130, 3), (0, 2)])
        blocks = [[data(seeds[0] + N * r + q, shape, dtype, 3) for q in range(N)] for r in range(N)]
        found = on_some_forms(name, partial(in_some_form, own), blocks, dice.randrange(N))
        for got, want in found:
            got = got.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
            same(got, want, f"seed {seeds[0]}, {turn}: {name} {dtype}")


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
        start = sum(sizes[:n])
        here = run(lambda m, x: dist.all_gather(list(m.split(sizes)), x), start, sizes[R])
        same(here, torch.cat([whole(r)[start : start + sizes[r]] for r in range(N)]))


def case_uneven():
    outputs = [torch.empty(r, 2) for r in range(N)]
    dist.all_gather(outputs, data(R, (R, 2)))
    for r, o in enumerate(outputs):
        same(o, data(r, (r, 2)))
    whole = torch.empty(sum(range(N)) * 2)  # adjacent views of one tensor
    views = list(whole.split([2 * r for r in range(N)]))
    dist.all_gather(views, data(R, (2 * R,)))
    same(whole, torch.cat([data(r, (2 * r,)) for r in range(N)]))
    inputs = [data(10 * R + r, (r + 1,)) for r in range(N)]
    out = torch.empty(R + 1)
    dist.reduce_scatter(out, inputs)
    same(out, sum(data(10 * r + R, (R + 1,)) for r in range(N)))
    sent = [data(N * R + r, (R + r,)) for r in range(N)]
    received = [torch.empty(r + R) for r in range(N)]
    dist.all_to_all(received, sent)
    for r, o in enumerate(received):
        same(o, data(N * r + R, (r + R,)))
    for make in (list, tuple, np.array):
        outof, into = [R + r for r in range(N)], [r + R for r in range(N)]
        got = torch.empty(sum(into), 3)
        dist.all_to_all_single(got, torch.full((sum(outof), 3), float(R)), make(into), make(outof))
        same(got, torch.cat([torch.full((n, 3), float(r)) for r, n in enumerate(into)]))


def case_reductions_to_one_or_a_part():
    for dtype, op in itertools.product([torch.float32, torch.bfloat16, torch.int32], [OPS.SUM, OPS.AVG, OPS.MAX]):
        parts = everyone((2 * N, 3), dtype)
        mine = parts[R].clone()
        dist.reduce(mine, dst=N - 1, op=op)
        if R == N - 1:
            same(mine, total(parts, op), f"reduce {dtype} {op}")
        out = torch.empty((2, 3), dtype=dtype)
        dist.reduce_scatter_tensor(out, parts[R], op=op)
        same(out, total(parts, op)[2 * R : 2 * R + 2], f"reduce_scatter {dtype} {op}")
        dist.reduce_scatter(out, list(parts[R].split(2)), op=op)
        same(out, total(parts, op)[2 * R : 2 * R + 2])


def case_short_forms():
    """The methods of a group, with operation, root and timeout in place of options: as torch's own take them."""
    group, limit, root = dist.group.WORLD, timedelta(seconds=60), random.Random(N).randrange(N)
    parts, op = everyone((2, 3), torch.float64), OPS.MAX
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


def case_coalesced():
    tensors = [data(R, (n,)) for n in (1, 5, 3)]
    with dist._coalescing_manager(async_ops=True) as cm:
        for each in tensors:
            dist.all_reduce(each)
    cm.wait()
    for each, n in zip(tensors, (1, 5, 3), strict=True):
        same(each, sum(data(r, (n,)) for r in range(N)))
    outputs = [torch.empty(n * N) for n in (2, 4)]
    with dist._coalescing_manager():
        for o, n in zip(outputs, (2, 4), strict=True):
            dist.all_gather_into_tensor(o, data(R, (n,)))
    for o, n in zip(outputs, (2, 4), strict=True):
        same(o, torch.cat([data(r, (n,)) for r in range(N)]))
    outs = [torch.empty(n) for n in (2, 4)]
    with dist._coalescing_manager():
        for o, n in zip(outs, (2, 4), strict=True):
            dist.reduce_scatter_tensor(o, data(R, (n * N,)))
    for o, n in zip(outs, (2, 4), strict=True):
        same(o, sum(data(r, (n * N,)) for r in range(N))[n * R : n * (R + 1)])
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as cm:
        dist.all_reduce(tensors[0])
    cm.wait()


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

    calls = (from_left, data((R - 1) % N, (4,))), (partial(dist.all_reduce, async_op=True), torch.full((4,), float(N)))
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
