"""Cases of test_torch_api.py: repeated calls, which take a short path, and calls that only resemble them."""

import random
from functools import partial

import torch
import torch.distributed as dist
from frames import files_of, frames_of
from torch_cases import DEVICE, N, R, data, same

OPS = dist.ReduceOp


def case_few_frames():
    """A repeated call runs at most twelve of the package's Python functions, one of lists three times as many."""
    dice = torch.Generator("cpu").manual_seed(int(torch.seed() % 2**31))
    for count in (3, 70_000):
        mine = torch.rand(count, generator=dice, device="cpu").to(DEVICE)
        part, whole, sent, begun = torch.empty_like(mine), torch.empty(count * N, device=DEVICE), mine.repeat(N), []
        calls = {
            "all_reduce": lambda part=part: dist.all_reduce(part),
            "mean": lambda part=part: dist.all_reduce(part, op=OPS.AVG),
            "broadcast": lambda part=part: dist.broadcast(part, src=N - 1),
            "reduce": lambda part=part: dist.reduce(part, dst=0),
            "gather": lambda whole=whole, mine=mine: dist.all_gather_into_tensor(whole, mine),
            "reduce_scatter": lambda part=part, whole=whole: dist.reduce_scatter_tensor(part, whole),
            "exchange": lambda whole=whole, sent=sent: dist.all_to_all_single(whole, sent),
            "as one": lambda part=part: as_one(dist.all_reduce, [(each,) for each in part.tensor_split(3)]),
            "async": lambda part=part, begun=begun: begun.append(dist.all_reduce(part, async_op=True)),
            "async mean": lambda part=part, begun=begun: begun.append(dist.all_reduce(part, OPS.AVG, async_op=True)),
            "gather lists": lambda whole=whole, mine=mine: dist.all_gather(list(whole.tensor_split(N)), mine),
            "scatter lists": lambda part=part, whole=whole: dist.reduce_scatter(part, list(whole.tensor_split(N))),
        }
        parts = [torch.empty(0)] * N
        dist.all_gather_object(parts, mine.cpu())
        sums = torch.stack(parts).sum(0)
        wanted = {"all_reduce": sums, "mean": sums / N, "broadcast": parts[N - 1], "gather": torch.cat(parts)}
        wanted |= {"reduce_scatter": parts[R] * N, "exchange": wanted["gather"], "as one": sums, "async": sums}
        wanted |= {"reduce": mine.cpu() if R else sums, "async mean": sums / N, "gather lists": wanted["gather"]}
        wanted["scatter lists"] = wanted["reduce_scatter"]
        for name, call in calls.items():
            result, tries = whole if name in ("gather", "exchange", "gather lists") else part, []
            for _ in range(8):
                result.fill_(float("nan"))
                if result is part:
                    part.copy_(mine)
                tries.append(frames_of(call))
                while begun:
                    begun.pop().wait()
                torch.testing.assert_close(result.cpu(), wanted[name])
            most = MOST.get(name, 12) if DEVICE == "cpu" else 12 + 12 * ("async" in name) + 22 * ("lists" in name)
            assert min(map(len, tries)) <= most, (name, count, min(tries, key=len))


#: Functions that run in calls of these names, if more than twelve.
MOST = {"as one": 18, "gather lists": 34, "scatter lists": 34}


def as_one(call, arguments, **how):
    """Make calls that torch coalesces."""
    with dist._coalescing_manager(**how) as manager:
        for each in arguments:
            call(*each)
    if how.get("async_ops"):
        manager.wait()


def case_several_as_one():
    """Coalesced calls, of as many tensors as before or more or fewer; some wait at once, others later; and lists of
    tensors, adjacent or not; each after others, with new memory and numbers."""
    dice = random.Random(int(shared_seed()))
    for turn in range(40):
        many, n, kind = dice.randint(1, 4), dice.choice((2, 50, 3000)), dice.choice(list(TOGETHER))
        every = torch.randint(-9, 9, (N, many, N, n), generator=torch.Generator("cpu").manual_seed(turn), device="cpu")
        got, want = TOGETHER[kind](every.float(), {"async_ops": dice.random() < 0.5} | dice.choice(DEVICES))
        torch.testing.assert_close([each.cpu() for each in got], [each.cpu() for each in want], msg=f"{turn} {kind}")


#: Arguments of torch's coalescing.
DEVICES = {}, {"device": torch.device(DEVICE)}


def apart(rows):
    return [torch.empty_like(row, device=DEVICE).copy_(row) for row in rows]


def poisoned(rows):
    """Room for such tensors, which are adjacent or not."""
    if random.random() < 0.5:
        return [torch.full_like(row, -77, device=DEVICE) for row in rows]
    return list(torch.full((len(rows), *rows[0].shape), -77.0, device=DEVICE))


def summed(every, how):
    mine = apart(every[R, :, 0])
    as_one(dist.all_reduce, [(each,) for each in mine], **how)
    return mine, every[:, :, 0].sum(0)


def gathered(every, how):
    got = poisoned(every[0])
    as_one(dist.all_gather_into_tensor, list(zip(got, apart(every[R, :, :1]), strict=True)), **how)
    return got, every[:, :, 0].transpose(0, 1)


def scattered(every, how):
    got = poisoned(every[0, :, :1])
    as_one(dist.reduce_scatter_tensor, list(zip(got, apart(every[R]), strict=True)), **how)
    return got, every.sum(0)[:, R : R + 1]


def listed(every, how):
    """The calls of lists."""
    rows, asynchronous = apart(every[R, 0]), {"async_op": how["async_ops"]}
    ones, others, third = poisoned(every[0, 0]), poisoned(every[0, 0]), poisoned(every[0, 0, :1])[0]
    sent = rows if random.random() < 0.5 else list(torch.stack(rows))
    works = [
        dist.all_to_all(ones, sent, **asynchronous), dist.all_gather(others, rows[0], **asynchronous),
        dist.reduce_scatter(third, sent, **asynchronous),
    ]  # fmt: skip
    [work.wait() for work in works if work is not None]
    if how["async_ops"]:  # the caller's tensors, not memory that the call used in their place
        results = [each for work in works for each in work.result()]
        assert all(a is b for a, b in zip(results, [*ones, *others, third], strict=True))
    return [*ones, *others, third], [*every[:, 0, R], *every[:, 0, 0], every[:, 0, R].sum(0)]


TOGETHER = {"sums": summed, "gather": gathered, "scatter": scattered, "lists": listed}


def case_long_scatters():
    """Some ranks wait at once, others later; some receive into memory with gaps; the root's tensors are adjacent or
    not."""
    seed = int(shared_seed())
    for turn in range(3):
        root, n = seed % N, (17 << 20) // N // 4 + seed % 1000 + turn
        parts = torch.randint(-99, 99, (N, n), generator=torch.Generator("cpu").manual_seed(seed + turn), device="cpu")
        got = torch.full((n, 2), -77.0, device=DEVICE)[:, 0] if random.random() < 0.5 else torch.empty(n, device=DEVICE)
        asynchronous = random.random() < 0.5
        sent = poisoned(parts.float()) if root == R else None
        [each.copy_(part) for each, part in zip(sent or [], parts, strict=False)]
        work = dist.scatter(got, sent, root, async_op=asynchronous)
        if asynchronous:
            random.choice((work.wait, work.get_future().wait))()
        same(got.contiguous(), parts[R].float().to(DEVICE))


def case_exchanges_with_split_sizes():
    """All counts again and again, and others; some ranks wait at once, others later. A repeated one binds nothing."""
    dice = torch.Generator("cpu").manual_seed(int(shared_seed()))
    some = torch.eye(N, dtype=torch.int64, device="cpu")  # empty tensors have no address, and bind each time
    tables = [(torch.randint(0, 4, (N, N), generator=dice, device="cpu") + some).tolist() for _ in range(2)]
    rounds = [*torch.randint(2, (10,), generator=dice, device="cpu").tolist(), 0, 0, 0]
    tries, own = [], torch.Generator("cpu")
    own.seed()
    for turn, which in enumerate(rounds):
        outof, into = tables[which][R], [row[R] for row in tables[which]]
        sent = torch.cat([torch.full((n,), 100.0 * R + 10 * r + turn) for r, n in enumerate(outof)]).to(DEVICE)
        got = torch.full((sum(into),), float("nan"), device=DEVICE)
        if turn < 10 and torch.randint(2, (1,), generator=own, device="cpu"):
            dist.all_to_all_single(got, sent, into, outof, async_op=True).wait()
        else:
            call = partial(dist.all_to_all_single, got, sent, into, outof)
            tries.append(files_of(call))
        same(got, torch.cat([torch.full((n,), 100.0 * r + 10 * R + turn) for r, n in enumerate(into)]).to(DEVICE))
    assert DEVICE != "cpu" or any("buffers/forms.py" not in files for files in tries), tries[-1]


def shared_seed():
    seed = [torch.seed() % 2**31]
    dist.broadcast_object_list(seed, 0)
    return seed[0]


def case_alike_but_not_the_same():
    """A call that differs from an earlier one in more than its addresses takes the general path."""
    parts = [data(r, (N, 6)) for r in range(N)]
    added = sum(parts)
    for _ in range(3):
        tensor = parts[R].clone()
        dist.all_reduce(tensor)
        same(tensor, added)
        for op, want in ((OPS.MAX, torch.stack(parts).amax(0)), (OPS.AVG, added / N)):
            tensor = parts[R].clone()
            dist.all_reduce(tensor, op=op)
            same(tensor, want)
        tensor = parts[R].t().contiguous().t()  # other strides
        dist.all_reduce(tensor)
        same(tensor, added)
        tensor = torch.empty(N, 12, device=DEVICE)[:, ::2].copy_(parts[R])  # with gaps
        dist.all_reduce(tensor)
        same(tensor.clone(), added)
        half = torch.ones(6, dtype=torch.complex32, device=DEVICE)  # of a type that is moved as bytes
        work = dist.group.WORLD.broadcast([half], 0)
        work.wait()
        assert work.result()[0] is half
        negative = torch.complex(parts[R], parts[R]).conj().imag  # a view that negates the stored numbers
        dist.all_reduce(negative)
        same(negative.resolve_neg().clone(), -added)
        if DEVICE == "cpu":
            sparse = parts[R].to_sparse()
            dist.all_reduce(sparse)
            same(sparse.to_dense(), added)


def case_memory_in_common():
    """Alternately, one tensor is a part of the other one of the same call, or is not."""
    whole = [data(r, (N * 4,)) for r in range(N)]
    for _ in range(3):
        apart, inside = torch.empty(4, device=DEVICE), whole[R].clone()
        dist.reduce_scatter_tensor(apart, whole[R].clone())
        same(apart, sum(whole)[4 * R : 4 * R + 4])
        own = inside[4 * R : 4 * R + 4]
        dist.reduce_scatter_tensor(own, inside)
        same(own.clone(), apart)
        first = inside.copy_(whole[R])[:4]
        dist.reduce_scatter_tensor(first, inside)
        same(first.clone(), apart)
        gathered = torch.full((N * 4,), -1.0, device=DEVICE)
        dist.all_gather_into_tensor(gathered, whole[R][:4].clone())
        same(gathered, torch.cat([each[:4] for each in whole]))
        gathered.fill_(-1)[4 * R : 4 * R + 4] = whole[R][:4]
        dist.all_gather_into_tensor(gathered, gathered[4 * R : 4 * R + 4])
        same(gathered, torch.cat([each[:4] for each in whole]))
