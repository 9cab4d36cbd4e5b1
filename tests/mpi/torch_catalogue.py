"""Calls of torch.distributed on tensors of any kind, and what is due, for modules of torch cases."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch_cases import DEVICE, N, R, data, same

OPS = dist.ReduceOp
ARITHMETIC, BITS = [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX], [OPS.BAND, OPS.BOR, OPS.BXOR]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16]
ODD = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex32]
#: Types -> operations.
REDUCED = {
    **{kind: [*ARITHMETIC, OPS.AVG] for kind in FLOATS}, **{kind: [*ARITHMETIC, OPS.AVG, *BITS] for kind in INTEGERS},
    **{kind: [OPS.SUM, OPS.MAX] for kind in (torch.float8_e4m3fn, torch.float8_e5m2)},
    torch.bool: [*ARITHMETIC, *BITS], torch.complex64: [OPS.SUM],
}  # fmt: skip

#: Operators of torch's dispatcher that each call runs; between GPUs a receive names its source.
NAMES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "_allgather_base_", "allgather_", "gather_"),
    *("scatter_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_", "alltoall_"),
    *("allgather_into_tensor_coalesced_", "gather_single", "send recv_"),
    *["send recv_any_source_"] * (DEVICE == "cpu"),
)
REDUCES = tuple(name for name in NAMES if "reduce" in name)
#: Calls whose blocks may have different lengths: of rank a for rank b.
UNEVEN = {
    "allgather_": lambda a, b: a, "reduce_scatter_": lambda a, b: b, "alltoall_base_": lambda a, b: a + 2 * b,
    "alltoall_": lambda a, b: (a * b + 1) % 3,
}  # fmt: skip


class Made(NamedTuple):
    """A call to be made, its tensors, and what is due in the outputs."""

    call: Callable[..., Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    due: list[torch.Tensor]

    def check(self, what="", check=same):
        for got, want in zip(self.outputs, self.due, strict=True):
            check(got, want, what)


def total(parts, op):
    dtype = parts[0].dtype
    if dtype.is_complex:
        return sum(parts)
    wide = torch.stack([p.double() if dtype.is_floating_point else p.to(torch.int64) for p in parts])
    if op in BITS:
        out, bit = wide[0], dict(zip(BITS, (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor), strict=True))[op]
        for part in wide[1:]:
            out = bit(out, part)
    elif op == OPS.AVG:
        out = torch.div(wide.sum(0), len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    else:
        out = {OPS.SUM: wide.sum, OPS.PRODUCT: wide.prod, OPS.MIN: wide.amin, OPS.MAX: wide.amax}[op](0)
    return out.to(dtype)


def drawn_blocks(seed, shape, dtype=torch.float32, name="", device=None, size=N):
    """What rank a has for rank b, of which all ranks know; with ``name`` of the different lengths that it allows."""
    more, scale = UNEVEN.get(name, lambda a, b: 0), 3 + (dtype == torch.bool)

    def block(a, b):
        return data(seed + size * a + b, (shape[0] + more(a, b), *shape[1:]), dtype, scale).to(device)

    return [[block(a, b) for b in range(size)] for a in range(size)]


def plain(tensors):
    return [each.clone() for each in tensors]


def poisoned(tensors):
    return [torch.full_like(each, 77) for each in tensors]


def pass_on(sent, dest, into, source, group, async_op=False):
    sending = dist.isend(sent, dest, group)
    found = (dist.irecv if async_op else dist.recv)(into, source, group)
    sending.wait()
    return found if async_op else None


def gather_single(output, tensor, root, group, async_op=False):
    """By a method of the group, which always gives a work."""
    options = torch._C._distributed_c10d.GatherOptions()
    options.rootRank = root
    work = group.gather_single(output, tensor, options)
    return work if async_op or not work.wait() else None


def gather_each(outputs, tensors, group, async_op=False):
    work = group.all_gather_single_coalesced(outputs, tensors)
    return work if async_op or not work.wait() else None


def made(name, blocks, root=0, op=OPS.SUM, forms=plain, rooms=poisoned, group=None):
    """The call of this name. ``forms`` makes tensors of some values, ``rooms`` those that are received into; ``blocks``
    and ``root`` go by numbers in the group."""
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    n, r, top = len(ranks), ranks.index(R), ranks[root]
    at_root, mine, theirs, firsts = root == r, blocks[r], [row[r] for row in blocks], [row[0] for row in blocks]
    sums = [total([row[b] for row in blocks], op) for b in range(n)] if "reduce" in name else firsts
    if name in ("allreduce_", "broadcast_", "reduce_"):
        one = forms(mine[:1])
        call, due = {
            "allreduce_": ((dist.all_reduce, one[0], op), sums[:1]),
            "broadcast_": ((dist.broadcast, one[0], top), [firsts[root]]),
            "reduce_": ((dist.reduce, one[0], top, op), sums[:1] * at_root),
        }[name]
        row = call, one, one * bool(due), due
    elif name.startswith(("alltoall", "scatter", "reduce_scatter", "_reduce_scatter", "allreduce_coalesced")):
        some, whole, out, into = forms(mine), forms([torch.cat(mine)]), rooms(mine[r : r + 1]), rooms(theirs)
        wide, splits = rooms([torch.cat(theirs)]), [[len(each) for each in of] for of in (theirs, mine)]
        splits = () if len({*splits[0], *splits[1]}) == 1 else splits
        row = {
            "allreduce_coalesced_": ((dist.all_reduce_coalesced, some, op), some, some, sums),
            "scatter_": (
                (dist.scatter, out[0], some if at_root else None, top), some * at_root, out, [blocks[root][r]]),
            "_reduce_scatter_base_": ((dist.reduce_scatter_tensor, out[0], whole[0], op), whole, out, [sums[r]]),
            "reduce_scatter_": ((dist.reduce_scatter, out[0], some, op), some, out, [sums[r]]),
            "alltoall_": ((dist.all_to_all, into, some), some, into, theirs),
            "alltoall_base_": ((dist.all_to_all_single, wide[0], whole[0], *splits), whole, wide, [torch.cat(theirs)]),
        }[name]  # fmt: skip
    else:
        one, into, wide, left = forms(mine[:1]), rooms(firsts), rooms([torch.cat(firsts)]), (r - 1) % n
        every = torch.stack(firsts) if name == "gather_single" else firsts[0]
        rows = rooms([every if at_root else every[:0]])
        sides = one[0], ranks[(r + 1) % n], into[0]
        row = {
            "_allgather_base_": ((dist.all_gather_into_tensor, wide[0], one[0]), one, wide, [torch.cat(firsts)]),
            "allgather_": ((dist.all_gather, into, one[0]), one, into, firsts),
            "gather_": (
                (dist.gather, one[0], into if at_root else None, top), one, into * at_root, firsts * at_root),
            "gather_single": ((gather_single, rows[0], one[0], root), one, rows * at_root, [every] * at_root),
            "allgather_into_tensor_coalesced_": ((gather_each, wide, one), one, wide, [torch.cat(firsts)]),
            "send recv_": ((pass_on, *sides, ranks[left]), one, into[:1], [firsts[left]]),
            "send recv_any_source_": ((pass_on, *sides, None), one, into[:1], [firsts[left]]),
        }[name]  # fmt: skip
    return Made(partial(*row[0], group=group), *row[1:])


def every_call(group, names=NAMES):
    """Make calls in a group, if this rank is in it."""
    if group in (None, dist.GroupMember.NON_GROUP_MEMBER):
        return
    size = dist.get_world_size(group)
    for name in names if size > 1 else [name for name in names if "send" not in name]:
        one = made(name, drawn_blocks(size, (3,), size=size), size - 1, group=group)
        one.call()
        one.check(f"{name} of {dist.get_process_group_ranks(group)}")
