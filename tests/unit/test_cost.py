"""Bytes on the wires: what the algorithms' documentation says, computed from their plans."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import calls, topologies

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.algorithms.rails import owner_shares
from ucc_hetero.planner.collectives import ROWS, Call, Shape
from ucc_hetero.planner.cost import Wire, wire_bytes
from ucc_hetero.planner.plan import Plan
from ucc_hetero.planner.select import Choice, make_plan
from ucc_hetero.planner.topology import Topology, link_weights

TWO = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
INTERLEAVED = Topology.group(["nvidia", "amd"] * 2, [0, 1, 0, 1])
UNEVEN = Topology.group(["nvidia"] * 3 + ["amd"], [0, 0, 0, 1])
FOUR = Topology.group(["host"] * 8, [0, 0, 1, 1, 2, 2, 3, 3])


def plan_of(topology: Topology, collective: str, name: str, counts: tuple[int, ...], fragments: int = 1) -> Plan:
    root = 0 if ROWS[collective].rooted else -1
    return make_plan(topology, Call(collective, topology.size, counts, root), Choice(name, fragments))


def wire(topology: Topology, collective: str, name: str, *counts: int, fragments: int = 1) -> Wire:
    return wire_bytes(plan_of(topology, collective, name, counts, fragments), topology, 4)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 3, 2), (4, 1, 1, 2)])
def test_direct_divides_by_what_each_host_s_link_carries(sizes: tuple[int, ...]) -> None:
    """Hosts of different size with equal links: each sends and receives the same."""
    hosts = [host for host, n in enumerate(sizes) for _ in range(n)]
    topology = Topology.group(["host"] * len(hosts), hosts, link_weights(hosts, [1000] * len(hosts)))
    m, count = len(sizes), 12 << 20
    got = wire(topology, "allreduce", "direct", count)
    least = 2 * (m - 1) / m * count * 4
    assert max(*got.host_out, *got.host_in) == pytest.approx(least, rel=0.01)


#: The algorithm of an allreduce of 9,600 bytes -> what leaves each host, which is what enters it, and each rank.
ALLREDUCES: list[tuple[Topology, str, tuple[int, ...], tuple[int, ...]]] = [
    # Once each way, over all links at the same time.
    (TWO, "split_rail", (9600,) * 2, (4800,) * 4), (INTERLEAVED, "split_rail", (9600,) * 2, (4800,) * 4),
    (UNEVEN, "split_rail", (9600,) * 2, (3200, 3200, 3200, 9600)),
    # 2(m-1)/m of the data per host: no plan over m equal hosts sends less.
    (FOUR, "split_rail", (14400,) * 4, (7200,) * 8), (FOUR, "direct", (14400,) * 4, ()),
    (FOUR, "ring", (14400,) * 4, ()), (TWO, "direct", (9600,) * 2, ()), (TWO, "ring", (9600,) * 2, ()),
    (Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 1, 2, 3], [1, 3, 2, 2]), "split_rail", (),
     (2400, 7200, 4800, 4800)),
    # A link four times slower: its host reduces nothing, so that its N bytes each way are all that it waits for.
    (Topology.group(["host"] * 6, [0, 0, 1, 1, 2, 2], [1, 1, 4, 4, 4, 4]), "direct", (9600, 14400, 14400), ()),
]  # fmt: skip


@pytest.mark.parametrize("fragments", (1, 4))
@pytest.mark.parametrize("topology, name, hosts, ranks", ALLREDUCES)
def test_allreduce(topology: Topology, name: str, hosts: tuple[int], ranks: tuple[int], fragments: int) -> None:
    got = wire(topology, "allreduce", name, 2400, fragments=fragments)
    assert not hosts or got.host_out == got.host_in == hosts
    assert not ranks or (got.bridge == ranks if fragments == 1 else sum(got.bridge) == sum(ranks))


def test_owner_shares_end_together() -> None:
    assert owner_shares([1, 1, 1]) == [Fraction(1, 3)] * 3
    assert owner_shares([1, 9]) == [Fraction(1, 2)] * 2
    assert owner_shares([1, 4, 4]) == [0, Fraction(1, 2), Fraction(1, 2)]
    shares = owner_shares([3, 4, 5])
    assert sum(shares) == 1
    assert len({(1 + share) / weight for share, weight in zip(shares, [3, 4, 5], strict=True)}) == 1


@pytest.mark.parametrize("name", ("tree", "split_rail"))
@pytest.mark.parametrize("topology", (TWO, INTERLEAVED, UNEVEN, FOUR), ids=Topology.describe)
def test_what_crosses_goes_into_each_island_once(topology: Topology, name: str) -> None:
    n, block = topology.size, 96
    foreign = [(n - island.size) * block * 4 for island in topology.islands]
    assert wire(topology, "bcast", name, 480).host_in[1:] == (1920,) * (len(foreign) - 1)
    assert list(wire(topology, "allgather", name, block).host_in) == foreign
    assert list(wire(topology, "reduce_scatter_block", name, block).host_out) == foreign
    gathered = wire(topology, "gather", name, block)
    assert gathered.host_in[0] == foreign[0] and not any(gathered.host_in[1:])
    scattered = wire(topology, "scatter", name, block)
    assert scattered.host_out[0] == foreign[0] and not any(scattered.host_out[1:])


@settings(max_examples=60)
@given(data=st.data())
def test_alltoall_sends_no_byte_across_twice(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    call = data.draw(calls(topology, ("alltoall", "alltoallv")))
    plan = make_plan.__wrapped__(topology, call, Choice("split_rail", data.draw(st.integers(1, 3))))
    shape, home = Shape(call), topology.island_of
    for rank, sent in enumerate(wire_bytes(plan, topology).bridge):
        foreign = (peer for peer in range(call.ranks) if home[peer] != home[rank])
        assert sent == sum(shape.send(rank, peer).count for peer in foreign)


@settings(max_examples=60)
@given(data=st.data())
def test_what_leaves_arrives(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    call = data.draw(calls(topology))
    name = data.draw(st.sampled_from(algorithms.names(call.collective)))
    plan = make_plan.__wrapped__(topology, call, Choice(name, 2))
    got = wire_bytes(plan, topology, 8)
    assert abs(sum(got.host_out) - sum(got.host_in)) <= topology.size
