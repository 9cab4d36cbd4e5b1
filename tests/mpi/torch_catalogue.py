"""Calls of torch.distributed on tensors of any kind, and what is due, for modules of torch cases."""

from collections.abc import Callable
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
        out = torch.div(wide.sum(0), N, rounding_mode=None if dtype.is_floating_point else "trunc")
    else:
        out = {OPS.SUM: wide.sum, OPS.PRODUCT: wide.prod, OPS.MIN: wide.amin, OPS.MAX: wide.amax}[op](0)
    return out.to(dtype)


def drawn_blocks(seed, shape, dtype=torch.float32, name="", device=None):
    """What rank a has for rank b, of which all ranks know; with ``name`` of the different lengths that it allows."""
    more = UNEVEN.get(name, lambda a, b: 0)
    return [
        [
            data(seed + N * a + b, (shape[0] + more(a, b), *shape[1:]), dtype, 3 + (dtype == torch.bool)).to(device)
            for b in range(N)
        ]
        for a in range(N)
    ]


def plain(tensors):
    return [each.clone() for each in tensors]


def poisoned(tensors):
    return [torch.full_like(each, 77) for each in tensors]


def passed_on(sent, into, **source):
    """A call that sends to the right and receives from the left."""

    def run(async_op=False):
        sending, found = dist.isend(sent, (R + 1) % N), (dist.irecv if async_op else dist.recv)(into, **source)
        sending.wait()
        return found if async_op else None

    return run


def made(name, blocks, root=0, op=OPS.SUM, forms=plain, rooms=poisoned):
    """The call of this name. ``forms`` makes tensors of some values, ``rooms`` those that are received into."""
    group, at_root, left = dist.group.WORLD, root == R, (R - 1) % N
    mine, theirs, firsts = blocks[R], [row[R] for row in blocks], [row[0] for row in blocks]

    def reach(work, async_op=False):
        """Of a method of the group, which always gives a work."""
        return work if async_op or not work.wait() else None

    if name in ("allreduce_", "broadcast_", "reduce_"):
        one = forms(mine[:1])
        call, due = {
            "allreduce_": (lambda **how: dist.all_reduce(one[0], op, **how), [total(firsts, op)]),
            "broadcast_": (lambda **how: dist.broadcast(one[0], root, **how), [firsts[root]]),
            "reduce_": (lambda **how: dist.reduce(one[0], root, op, **how), [total(firsts, op)] * at_root),
        }[name]
        return Made(call, one, one if due else [], due)
    if name in ("allreduce_coalesced_", "scatter_", "_reduce_scatter_base_", "reduce_scatter_"):
        some, whole, out = forms(mine), forms([torch.cat(mine)]), rooms(mine[R : R + 1])
        sums = [total([row[b] for row in blocks], op) for b in range(N)]
        return {
            "allreduce_coalesced_": lambda: Made(
                lambda **how: dist.all_reduce_coalesced(some, op, **how), some, some, sums),
            "scatter_": lambda: Made(lambda **how: dist.scatter(out[0], some if at_root else None, root, **how),
                                     some * at_root, out, [blocks[root][R]]),
            "_reduce_scatter_base_": lambda: Made(
                lambda **how: dist.reduce_scatter_tensor(out[0], whole[0], op, **how), whole, out, [sums[R]]),
            "reduce_scatter_": lambda: Made(
                lambda **how: dist.reduce_scatter(out[0], some, op, **how), some, out, [sums[R]]),
        }[name]()  # fmt: skip
    if name.startswith("alltoall"):
        if name == "alltoall_":
            some, into = forms(mine), rooms(theirs)
            return Made(lambda **how: dist.all_to_all(into, some, **how), some, into, theirs)
        whole, into = forms([torch.cat(mine)]), rooms([torch.cat(theirs)])
        splits = [[len(each) for each in of] for of in (theirs, mine)]
        if all(splits[0][0] == n for n in (*splits[0], *splits[1])):
            splits = ()
        return Made(
            lambda **how: dist.all_to_all_single(into[0], whole[0], *splits, **how), whole, into, [torch.cat(theirs)]
        )
    one, into, wide = forms(mine[:1]), rooms(firsts), rooms([torch.cat(firsts)])
    if name.startswith("send"):
        source = {} if "any" in name else {"src": left}
        return Made(passed_on(one[0], into[0], **source), one, into[:1], [firsts[left]])
    if name == "gather_single":
        options = torch._C._distributed_c10d.GatherOptions()
        options.rootRank = root
        wide = rooms([torch.stack(firsts) if at_root else firsts[0][:0]])
        return Made(lambda **how: reach(group.gather_single(wide[0], one[0], options), **how),
                    one, wide * at_root, [torch.stack(firsts)] * at_root)  # fmt: skip
    return {
        "_allgather_base_": lambda: Made(
            lambda **how: dist.all_gather_into_tensor(wide[0], one[0], **how), one, wide, [torch.cat(firsts)]),
        "allgather_": lambda: Made(lambda **how: dist.all_gather(into, one[0], **how), one, into, firsts),
        "gather_": lambda: Made(lambda **how: dist.gather(one[0], into if at_root else None, root, **how),
                                one, into * at_root, firsts * at_root),
        "allgather_into_tensor_coalesced_": lambda: Made(
            lambda **how: reach(group.all_gather_single_coalesced(wide, one), **how), one, wide, [torch.cat(firsts)]),
    }[name]()  # fmt: skip
