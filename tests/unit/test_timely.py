"""Exchanges of objects by which communicators are made; ranks are threads here."""

import threading
from typing import Any

import pytest

from ucc_hetero.bootstrap.timely import Timely

SIZE = 3


class Shared:
    """MPI's exchanges among threads, one after the other; counts them."""

    def __init__(self) -> None:
        self.given: list[dict[int, bytes]] = []

    def rank(self, rank: int) -> "Ranked":
        return Ranked(self, rank)


class Ranked:
    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared, self._rank, self._count = shared, rank, 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return SIZE

    def Improbe(self, tag: int) -> None:
        """No rank has waited in vain."""

    def _begin(self, mine: Any, into: Any) -> "Request":
        while len(self._shared.given) <= self._count:
            self._shared.given.append({})
        given = self._shared.given[self._count]
        self._count += 1
        given[self._rank] = bytes(mine)
        return Request(given, into)

    def Iallgather(self, mine: Any, into: Any) -> "Request":
        assert len(into) == SIZE * len(mine)
        return self._begin(mine, into)

    def Iallgatherv(self, mine: Any, spec: Any) -> "Request":
        into, (lengths, _) = spec
        assert len(mine) == lengths[self._rank]
        return self._begin(mine, into)


class Request:
    def __init__(self, given: dict[int, bytes], into: Any) -> None:
        self._given, self._into = given, into

    def Test(self) -> bool:
        if len(self._given) < SIZE:
            return False
        self._into[:] = b"".join(self._given[rank] for rank in range(SIZE))
        return True


@pytest.mark.parametrize("lengths", [(0, 1, 2), (340, 341, 342), (0, 100_000, 3), (2000, 2000, 2000)])
@pytest.mark.parametrize("turns", [1, 3])
def test_objects_of_all_ranks(lengths: tuple[int, ...], turns: int) -> None:
    shared, found = Shared(), [[] for _ in range(SIZE)]  # type: ignore[var-annotated]
    things = [(rank, bytes(range(256)) * (n // 256) + b"x" * (n % 256)) for rank, n in enumerate(lengths)]
    shared.given += [{} for _ in range(2 * turns)]

    def run(rank: int) -> None:
        comm = Timely(shared.rank(rank), 60.0, "the test", tag=1)
        for _ in range(turns):
            found[rank].append(comm.allgather(things[rank]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[things] * turns] * SIZE
    exchanges = sum(bool(given) for given in shared.given)
    assert exchanges == (turns if max(lengths) < 350 else 2 * turns), "short ones take one exchange"
