"""Calls of torch.distributed that the torch benchmarks make, and their times in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

#: Collective -> True where a rank sends, and where it receives, a part for each rank; one part otherwise.
KINDS = {
    "all_reduce": (False, False), "broadcast": (False, False), "all_gather_into_tensor": (False, True),
    "reduce_scatter_tensor": (True, False), "all_to_all_single": (True, True),
}  # fmt: skip
#: Rounds that are not counted.
_WARM = 2


class Cost(NamedTuple):
    """Microseconds of a call: until its caller may go on, and until its data is there."""

    issue: float
    time: float


def call_of(dist: Any, kind: str, x: Any, y: Any, root: int = 0, **how: Any) -> Callable[..., Any]:
    """The call of a collective from ``x`` to ``y``; all_reduce and broadcast work in ``y``.

    Args:
        dist: ``torch.distributed``.
        kind: a name of :data:`KINDS`.
        x: the tensor that is sent.
        y: the tensor that is received.
        root: rank that broadcasts.
        how: ``group`` and ``async_op``, as torch has them.

    Returns:
        What to call, without arguments; it returns torch's Work, or None.
    """
    tensors = {"all_reduce": (y,), "broadcast": (y, root)}.get(kind, (y, x))
    return partial(getattr(dist, kind), *tensors, **how)


def exchange(dist: Any, group: Any, send: Any, recv: Any, ring: Sequence[int] = ()) -> None:
    """Send to the next rank of ``ring`` (all ranks if empty), and receive from the one before; others do nothing."""
    ring, rank = ring or range(dist.get_world_size()), dist.get_rank()
    if rank not in ring:
        return
    at = ring.index(rank)
    pair = (dist.isend, send, ring[(at + 1) % len(ring)]), (dist.irecv, recv, ring[at - 1])
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in pair]):
        work.wait()


def settle(torch: Any) -> None:
    """Wait until the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def of_all(dist: Any, value: Any) -> list[Any]:
    """The values of all ranks, in their order, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def once(torch: Any, call: Callable[[], Any], many: int) -> tuple[float, float]:
    """Seconds of ``many`` calls in a row, after a barrier: until the caller may go on, and until the data is there."""
    settle(torch)
    torch.distributed.barrier()
    start = time.perf_counter()
    works = [call() for _ in range(many)]
    issued = time.perf_counter() - start
    for work in works:
        if work is not None:
            work.wait()
    settle(torch)
    return issued, time.perf_counter() - start


def turns(
    torch: Any,
    calls: Mapping[str, Callable[[], Any]],
    many: int,
    rounds: int,
    best: Callable[[Iterable[float]], float] = statistics.median,
) -> dict[str, Cost]:
    """Costs of calls that take turns, so that what disturbs one disturbs all; of the slowest rank.

    Args:
        torch: the module.
        calls: the calls by name. A Work that a call returns is waited for after the last one.
        many: calls in a row.
        rounds: rounds that are counted.
        best: what of the rounds counts: ``min`` or the median.

    Returns:
        The cost of each call, by name, equal on every rank.
    """
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(_WARM + rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            seen[name].append(once(torch, calls[name], many))
    mine = {name: [1e6 * best(each) / many for each in zip(*all_[_WARM:], strict=True)] for name, all_ in seen.items()}
    ranks = of_all(torch.distributed, mine)
    return {name: Cost(*(max(rank[name][i] for rank in ranks) for i in range(2))) for name in calls}
