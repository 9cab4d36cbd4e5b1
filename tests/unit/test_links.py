"""With whom ranks of several hosts are connected beside the data."""

import random

import pytest

from ucc_hetero.bootstrap.links import neighbours, spokes


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
