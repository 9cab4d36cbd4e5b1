"""Calls of torch.distributed that the torch benchmarks make; times of several calls measured alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

#: Collective -> True if a rank sends, and if it receives, one part for each rank; otherwise it has one part.
KINDS = {
    "all_reduce": (False, False), "broadcast": (False, False), "all_gather_into_tensor": (False, True),
    "reduce_scatter_tensor": (True, False), "all_to_all_single": (True, True),
}  # fmt: skip
#: Collectives that work in place, in the result's tensor.
IN_PLACE = ("all_reduce", "broadcast")
#: Untimed rounds.
_WARM = 2


class Cost(NamedTuple):
    """Microseconds of a call: until it returns, and until its data is complete."""

    issue: float
    time: float


class Data:
    """Tensors of a collective of one size, or of the kind ``exchange``, and the expected result."""

    def __init__(self, torch: Any, kind: str, nbytes: int, device: Any) -> None:
        self.torch, self.kind = torch, kind
        self.n, self.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        spread = KINDS.get(kind, (False, False))
        self.part = max(1, nbytes // 4 // (self.n if any(spread) else 1))
        self.sent, received = (self.part * (self.n if each else 1) for each in spread)
        self.x, self.y = torch.zeros(self.sent, device=device), torch.zeros(received, device=device)
        self._seed = 0

    def data(self, seed: int, rank: int) -> Any:
        """Return a rank's data: whole numbers, whose sums are exact."""
        draw = self.torch.Generator().manual_seed(1000 * seed + rank)
        return self.torch.randint(-40, 40, (self.sent,), generator=draw).float()

    def load(self, seed: int) -> None:
        """Fill the tensors with new data."""
        self.x.copy_(self.data(seed, self.rank))
        self.y.fill_(-77)

    def wanted(self, seed: int, root: int = 0) -> Any:
        if self.kind in ("broadcast", "exchange"):
            return self.data(seed, root if self.kind == "broadcast" else (self.rank - 1) % self.n)
        every = [self.data(seed, rank) for rank in range(self.n)]
        mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
        if self.kind in ("all_reduce", "reduce_scatter_tensor"):
            total = self.torch.stack(every).sum(0)
            return total if self.kind == "all_reduce" else total[mine]
        return self.torch.cat([each[mine] for each in every] if self.kind == "all_to_all_single" else every)

    def check(self, call: Callable[[], Any], what: str, from_x: bool = False) -> None:
        """Raise AssertionError if a call on new data gives another result; ``from_x``: all_reduce reads x, too."""
        self._seed += 1
        self.load(self._seed)
        if self.kind == "broadcast" or (self.kind == "all_reduce" and not from_x):
            self.y.copy_(self.x)
        settle(self.torch)
        work = call()
        if work is not None:
            work.wait()
        settle(self.torch)
        wrong = int((self.y.cpu() != self.wanted(self._seed)).sum())
        if wrong:
            raise AssertionError(f"{what}, on rank {self.rank}: {wrong} elements are wrong")


def call_of(dist: Any, kind: str, x: Any, y: Any, root: int = 0, **how: Any) -> Callable[..., Any]:
    """The call of a collective (of :data:`KINDS`) from ``x`` to ``y``; all_reduce and broadcast work in ``y``.

    ``how``: ``group`` and ``async_op``, as torch has them. The call takes no arguments, and returns torch's Work or
    None."""
    tensors = {"all_reduce": (y,), "broadcast": (y, root)}.get(kind, (y, x))
    return partial(getattr(dist, kind), *tensors, **how)


def exchange(dist: Any, group: Any, send: Any, recv: Any) -> None:
    """Send to the next rank, and receive from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = (dist.isend, send, (rank + 1) % size), (dist.irecv, recv, (rank - 1) % size)
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in pair]):
        work.wait()


def settle(torch: Any) -> None:
    """Wait until the device has completed all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def of_all(dist: Any, value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def once(torch: Any, call: Callable[[], Any], many: int) -> tuple[float, float]:
    """Return the seconds of ``many`` calls back to back, after a barrier: until they return, and until data is
    complete."""
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


def turns(torch: Any, calls: Mapping[str, Callable[[], Any]], many: int, rounds: int) -> dict[str, Cost]:
    """Costs of calls, ``many`` in a row, that take turns, so that what disturbs one disturbs all; of the slowest rank.

    A Work that a call returns is waited for after the last one. Returns medians of rounds, equal on every rank."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(_WARM + rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            seen[name].append(once(torch, calls[name], many))
    mine = {
        name: [1e6 * statistics.median(each) / many for each in zip(*all_[_WARM:], strict=True)]
        for name, all_ in seen.items()
    }
    ranks = of_all(torch.distributed, mine)
    return {name: Cost(*(max(rank[name][i] for rank in ranks) for i in range(2))) for name in calls}
