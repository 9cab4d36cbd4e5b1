"""Ranks of several hosts beside the data: with whom they are connected, and by which numbers tags of calls differ."""

import random
from itertools import combinations

import pytest

from ucc_hetero.bootstrap.board import salt
from ucc_hetero.bootstrap.links import neighbours, spokes
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.types import DTYPES, OPS


def reached(hosts: list[int], lost: set[int]) -> set[int]:
    """Ranks that news of the first living one comes to."""
    found = {next(r for r in range(len(hosts)) if r not in lost)}
    while more := {s for r in found for s in spokes(hosts, r)} - found - lost:
        found |= more
    return found


@pytest.mark.parametrize("count", range(1, 40))
def test_neighbours_are_mutual_and_few(count: int) -> None:
    every = [neighbours(count, place) for place in range(count)]
    assert all(place in every[other] for place in range(count) for other in every[place])
    assert all(place not in every[place] and len(every[place]) <= 2 * count.bit_length() for place in range(count))
    assert count == 1 or all(every)


def test_connections_are_mutual_and_reach_every_rank_but_those_that_are_lost() -> None:
    rng = random.Random(7)
    for _ in range(200):
        hosts = [rng.randrange(rng.randint(2, 9)) for _ in range(rng.randint(2, 24))]
        hosts = [sorted(set(hosts)).index(host) for host in hosts]
        for rank in range(len(hosts)):
            assert all(rank in spokes(hosts, other) for other in spokes(hosts, rank)), (hosts, rank)
            near = neighbours(max(hosts) + 1, hosts[rank])
            assert near <= {hosts[other] for other in spokes(hosts, rank)}, (hosts, rank)
        assert len(reached(hosts, set())) == len(hosts), hosts
        one = rng.randrange(len(hosts))
        assert len(reached(hosts, {one})) == len(hosts) - 1, (hosts, one)


@pytest.mark.parametrize("names", [ROWS, DTYPES, OPS], ids=["collective", "datatype", "operation"])
@pytest.mark.parametrize("call", ["{} float32[7] SUM root=2", "reduce {}[7] SUM root=2", "reduce float32[7] {} root=2"])
def test_one_name_that_differs_is_enough(call: str, names: list[str]) -> None:
    assert all(salt(call.format(one)) != salt(call.format(two)) for one, two in combinations(names, 2))


def test_numbers_that_differ_are_enough_and_salts_well_spread() -> None:
    for number in (1, 2, 1000, 1 << 20, 1 << 40):
        for more in (*range(1, 1021), number):
            assert salt(f"bcast int8[{number}] root=0") != salt(f"bcast int8[{number + more}] root=0")
            assert salt(f"bcast int8[4] root={number}") != salt(f"bcast int8[4] root={number + more}")
    found = [salt(f"allgatherv float64[{n},{n * n},3]") for n in range(4000)]
    assert max(found) < 1021 and len(set(found)) > 900
