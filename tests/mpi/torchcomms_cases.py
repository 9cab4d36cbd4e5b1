"""Every call of torchcomms, through the backend ``ucch``."""

import gc
import os
import random
import tempfile
import weakref

import pytest
import torch
import torchcomms_stand_in
from torch.distributed import FileStore

import torchcomms  # isort: skip
import ucc_hetero.torch.torchcomms  # noqa: F401  registers the backend, as an entry point does where torchcomms is

#: Device of the tensors.
DEVICE = os.environ.get("CASES_DEVICE", "cpu")
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
OPS = {"SUM": torch.Tensor.sum, "MAX": torch.Tensor.amax, "MIN": torch.Tensor.amin}


def numbers(rank, shape, dtype, seed):
    dice = torch.Generator("cpu").manual_seed(17 * seed + rank)
    return torch.randint(0, 9, shape, generator=dice, device="cpu").to(DEVICE, dtype)


def poisoned(shape, dtype):
    return torch.full(shape, -77, dtype=dtype, device=DEVICE)


def checked(comm, seed, overlaps=False):
    """Make every call once, with data that all ranks can compute, and compare. ``overlaps``: what was asked for."""
    dice, r, p = random.Random(seed), comm.get_rank(), comm.get_size()
    dtype, shape, op, root = dice.choice(KINDS), (dice.randint(1, 9), dice.randint(1, 5)), dice.choice([*OPS]), seed % p
    inputs = [numbers(each, shape, dtype, seed) for each in range(p)]
    uneven = [numbers(each, (each + 1, *shape), dtype, seed) for each in range(p)]
    reduced = OPS[op](torch.stack(inputs), 0).to(dtype)
    # parts[a][b] goes from rank a to rank b.
    parts = [[numbers(a * p + b, shape, dtype, seed + 1) for b in range(p)] for a in range(p)]
    rows = [[numbers(a * p + b, ((a + 2 * b) % 4, 3), dtype, seed + 2) for b in range(p)] for a in range(p)]
    summed = [OPS[op](torch.stack([parts[a][b] for a in range(p)]), 0).to(dtype) for b in range(p)]
    how, mine, whole = getattr(torchcomms.ReduceOp, op), inputs[r], (p * shape[0], shape[1])
    one, each = poisoned(shape, dtype), [poisoned(shape, dtype) for _ in range(p)]
    taken = torch.cat([rows[a][r] for a in range(p)])
    calls = [
        ("all_reduce", (at := mine.clone(), how), at, reduced),
        ("reduce", (at := mine.clone(), root, how), at, reduced if r == root else None),
        ("broadcast", (at := mine.clone(), root), at, inputs[root]),
        ("all_gather", (at := [each.clone() for each in each], mine), at, inputs),
        ("all_gather_v", (at := [poisoned(each.shape, dtype) for each in uneven], uneven[r]), at, uneven),
        ("all_gather_single", (at := poisoned(whole, dtype), mine), at, torch.cat(inputs)),
        ("reduce_scatter", (at := one.clone(), parts[r], how), at, summed[r]),
        ("reduce_scatter_single", (at := one.clone(), torch.cat(parts[r]), how), at, summed[r]),
        ("all_to_all", (at := [each.clone() for each in each], parts[r]), at, [parts[a][r] for a in range(p)]),
        ("all_to_all_single", (at := poisoned(whole, dtype), torch.cat(parts[r])), at,
         torch.cat([parts[a][r] for a in range(p)])),
        ("all_to_all_v_single", (at := poisoned(taken.shape, dtype), torch.cat(rows[r]),
                                 [len(rows[a][r]) for a in range(p)], [len(each) for each in rows[r]]), at, taken),
        ("scatter", (at := one.clone(), parts[r] if r == root else [], root), at, parts[root][r]),
        ("gather", (at := [each.clone() for each in each] if r == root else [], mine, root), at,
         inputs if r == root else None),
        ("gather_single", (at := poisoned(whole, dtype), mine, root), at, torch.cat(inputs) if r == root else None),
        ("barrier", (), None, None),
    ]  # fmt: skip
    for name, args, got, want in calls:
        work = getattr(comm, name)(*args, pending := dice.random() < 0.5)
        if overlaps and pending:
            work.wait()
        else:  # DDP and torch.distributed may not wait
            assert work is None or work.is_completed(), name
        if want is not None:
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    right, left = (r + 1) % p, (r - 1) % p
    if p > 1:
        sent = comm.send(mine, right, True)
        comm.recv(at := one.clone(), left, False)
        sent.wait()
        assert torch.equal(at, inputs[left])


def calls(comm):
    """Of all ranks, and of parts of them; in parts also of one rank."""
    r, p, seed = comm.rank, comm.size, comm.bcast(random.randrange(1 << 20))
    path = comm.bcast(tempfile.mktemp())
    whole = torchcomms.new_comm("ucch", torch.device(DEVICE), "whole", store=FileStore(path, p))
    assert (whole.get_rank(), whole.get_size()) == (r, p)
    for turn in range(4):
        checked(whole, seed + turn)
    overlapping = torchcomms.new_comm(
        "ucch", torch.device(DEVICE), "whole", store=FileStore(path, p), hints={"overlap": "y"}
    )
    checked(overlapping, seed + 5, True)
    if torchcomms is torchcomms_stand_in:  # torchcomms' own C++ drops it without the GIL
        dropped = weakref.ref(overlapping.barrier(True))
        assert dropped() is not None
        dropped().wait()
        gc.collect()
        assert dropped() is None
    overlapping.finalize()
    with pytest.raises(ValueError, match="multiple|must have"):
        whole.all_gather_single(poisoned((p * 3 + 1,), torch.float32), poisoned((3,), torch.float32), False)
    with pytest.raises(RuntimeError, match="not one of"):
        whole.split([(r + 1) % p] if p > 1 else [p], "others")
    order = random.Random(seed).sample(range(p), p)
    cut = random.Random(seed).randint(1, p)
    for name, ranks in (("first", order[:cut]), ("rest", order[cut:])):
        part = whole.split(ranks if r in ranks else [], name)
        assert (part is not None) == (r in ranks)
        if part is not None:
            assert (part.get_rank(), part.get_size()) == (ranks.index(r), len(ranks))
            checked(part, seed + 9)
            part.finalize()
    whole.finalize()
