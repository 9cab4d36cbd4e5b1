"""Grouping ranks into islands, topologies of sub-communicators, and bytes on the links as the pages state them."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import calls, deep_topologies, topologies
from processes import python

from ucc_hetero.cli.plan import traffic_of
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.algorithms.rails import owner_shares
from ucc_hetero.planner.collectives import ROWS, Call, Shape
from ucc_hetero.planner.select import Choice, Tuning, choose, example_call, make_plan
from ucc_hetero.planner.topology import Group, Topology, emulated_vendors, levels_of, link_weights, share_hosts


def test_group_by_vendor_and_host_ranks_by_node():
    topology = Topology.group(["nvidia", "host", "amd", "nvidia", "host", "host"], [7, 7, 9, 9, 9, 7])
    assert [(i.vendor, i.ranks) for i in topology.islands] == [
        ("nvidia", (0, 3)), ("host", (1, 5)), ("amd", (2,)), ("host", (4,)),
    ]  # fmt: skip
    assert topology.hosts == (0, 0, 1, 1, 1, 0)
    assert topology.island_of == (0, 1, 2, 0, 3, 1)
    assert [topology.vendor(rank) for rank in range(3)] == ["nvidia", "host", "amd"]
    assert not topology.flat and not topology.one_host
    assert topology.describe() == "nvidia[0,3]@0-1 host[1,5]@0 amd[2]@1 host[4]@1"


@pytest.mark.parametrize("vendors, hosts, weights, text", [
    (["nvidia"], [0, 1], (), "1 vendors and 2 hosts"),
    (["intel"], [0], (), "rank 0: vendor 'intel' is not one of host, nvidia, amd"),
    (["amd"], [0], (0,), "weights"),
    (["amd"], [0], (1, 1), "weights"),
])  # fmt: skip
def test_group_refuses(vendors, hosts, weights, text):
    with pytest.raises(ValueError, match=text):
        Topology.group(vendors, hosts, weights)


def test_levels_join_islands_and_divide_them():
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    vendors = ["nvidia"] * 4 + ["amd"] * 4
    topology = Topology.group(vendors, hosts, (), [hosts])
    nvidia = Group((0, 1, 2, 3), (Group((0, 1)), Group((2, 3))))
    amd = Group((4, 5, 6, 7), (Group((4, 5)), Group((6, 7))))
    assert topology.tree == Group(tuple(range(8)), (nvidia, amd)) and topology.deep and topology.tree.height == 2
    assert not Topology.group(vendors, hosts).deep
    racks = levels_of(["a/1", "a/1", "a/2", "a/2", "b", "b", "b", "b"])
    assert racks == [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 2, 2)]
    tree = Topology.group(["host"] * 8, hosts, (), racks).tree
    assert [child.height for child in tree.children] == [1, 1] and tree.children[0].ranks == (0, 1, 2, 3)
    # Groups of one rank inside an island are not a level; an island across a level's border is divided.
    assert not Topology.group(["amd"] * 3, [0, 1, 2], (), [[0, 1, 2]]).deep
    across = Topology.group(["amd"] * 4, [0] * 4, (), [[5, 5, 9, 9]])
    assert across.flat and across.deep and across.tree.children == (Group((0, 1)), Group((2, 3)))
    assert (
        across.levels == ((0, 0, 1, 1),) and across.fingerprint() != Topology.group(["amd"] * 4, [0] * 4).fingerprint()
    )
    with pytest.raises(ValueError, match="one number for each of 2 ranks"):
        Topology.group(["amd"] * 2, [0, 0], (), [[0]])


@given(topology=deep_topologies())
def test_every_level_partitions_the_ranks(topology):
    for group in topology.tree.walk():
        assert len(set(group.ranks)) == group.size > 0
        if group.children:
            assert [rank for child in group.children for rank in child.ranks] == list(group.ranks)
            assert len(group.children) > 1
        else:
            assert len({topology.island_of[rank] for rank in group.ranks}) == 1
    assert sorted(topology.tree.ranks) == list(range(topology.size))
    again = topology.sub(range(topology.size))
    assert again == topology and again.tree == topology.tree


def test_fabrics_divide_vendors():
    vendors, hosts = ["nvidia"] * 4 + ["amd"] * 4, [0, 0, 1, 1, 2, 2, 3, 3]
    assert Topology.group(vendors, hosts, fabrics=hosts).describe() == (
        "nvidia[0-1]@0 nvidia[2-3]@1 amd[4-5]@2 amd[6-7]@3"
    )
    assert Topology.group(vendors, hosts, fabrics=[7] * 8) == Topology.group(vendors, hosts)
    some = Topology.group(vendors, hosts, fabrics=[0, 0, 0, 0, 1, 1, 2, 2])
    assert some.describe() == "nvidia[0-3]@0-1 amd[4-5]@2 amd[6-7]@3"
    assert some.sub([0, 2, 5]).describe() == "nvidia[0-1]@0-1 amd[2]@2"
    # Racks join hosts that are islands, and divide an island of several hosts.
    racks = levels_of(["a", "a", "b", "b", "c", "c", "c", "c"])
    assert [g.ranks for g in Topology.group(vendors, hosts, (), racks, hosts).tree.children] == [
        (0, 1), (2, 3), (4, 5, 6, 7),
    ]  # fmt: skip
    whole = Topology.group(vendors, hosts, (), racks).tree.children
    assert [g.ranks for g in whole] == [(0, 1, 2, 3), (4, 5, 6, 7)] and [g.height for g in whole] == [1, 0]
    with pytest.raises(ValueError, match="1 fabrics for 8 ranks"):
        Topology.group(vendors, hosts, fabrics=[0])


def test_hosts_of_several_islands_are_a_level():
    """Data for other hosts crosses the links once: half as much as without the level, with two devices a host."""
    hosts, islands = [0, 0, 1, 1], [0, 1, 2, 3]
    assert share_hosts(islands, hosts) and share_hosts([0, 0, 1, 2], [0, 0, 0, 1])
    assert not share_hosts([0, 0, 1, 1], hosts)  # one on each host
    assert not share_hosts([0, 1, 0, 1], hosts) and not share_hosts([0, 1, 2, 2], [0, 0, 0, 1])  # some on both hosts
    assert not share_hosts([0, 1], [0, 0])
    vendors, queued, n = ["nvidia", "amd", "amd", "nvidia"], replace(Tuning(), queued=True), 16 << 20
    for collective, share in (("allreduce", 2), ("allgather", 1), ("reduce_scatter_block", 1)):
        out = []
        for levels in ([], [hosts]):
            topology = Topology.group(vendors, hosts, (), levels, islands)
            plan = make_plan(topology, example_call(topology, collective, n), choose(topology, collective, n, queued))
            out.append(traffic_of(plan, topology).host_out)
        assert out == [(share * n,) * 2, (share * n // 2,) * 2], collective


@given(data=st.data())
def test_sub_keeps_who_is_with_whom(data):
    topology = data.draw(topologies())
    ranks = data.draw(st.permutations(range(topology.size)))[: data.draw(st.integers(1, topology.size))]
    sub = topology.sub(ranks)
    assert sub.size == len(ranks)
    for new, old in enumerate(ranks):
        assert sub.vendor(new) == topology.vendor(old)
        for other_new, other_old in enumerate(ranks):
            together = topology.island_of[old] == topology.island_of[other_old]
            assert (sub.island_of[new] == sub.island_of[other_new]) == together
            assert (sub.hosts[new] == sub.hosts[other_new]) == (topology.hosts[old] == topology.hosts[other_old])
    if topology.weights:
        assert sub.weights == tuple(topology.weights[rank] for rank in ranks)
    assert [island.ranks[0] for island in sub.islands] == sorted(island.ranks[0] for island in sub.islands)
    assert topology.sub(range(topology.size)) == topology


def test_equal_topologies_hash_and_print_alike_in_every_process():
    make = "Topology.group(['nvidia', 'amd', 'amd'], [3, 3, 5], [1, 2, 2])"
    topology = Topology.group(["nvidia", "amd", "amd"], [3, 3, 5], [1, 2, 2])
    same = Topology.group(["nvidia", "amd", "amd"], [8, 8, 1], [1, 2, 2])
    assert topology == same and hash(topology) == hash(same) and topology.fingerprint() == same.fingerprint()
    assert topology.fingerprint() != Topology.group(["nvidia", "amd", "amd"], [3, 3, 5]).fingerprint()
    code = f"from ucc_hetero.planner.topology import Topology; print({make}.fingerprint())"
    assert python(code).stdout.strip() == topology.fingerprint()


@pytest.mark.parametrize("spec, size, text", [
    ("nvidia:2,amd:2", 3, "places 4 ranks, but there are 3"), ("nvidia:2,intel:2", 4, "vendor 'intel' in 'intel:2'"),
    ("nvidia", 1, "'nvidia' should be vendor:ranks"), ("nvidia:x", 1, "'nvidia:x' should be"),
    ("nvidia:0", 0, "at least 1 rank"), ("nvidia:-1", 1, "at least 1 rank"), ("nvidia:2,", 2, "vendor ''"),
    ("", 1, "vendor ''"),
])  # fmt: skip
def test_emulated_vendors_refuses(spec, size, text):
    with pytest.raises(ValueError, match=text):
        emulated_vendors(spec, size)


def test_link_weights_are_a_ranks_share_of_its_hosts_links():
    assert link_weights([0, 0, 1, 1], [4000, 4000, 1000, 1000]) == (64, 64, 16, 16)
    assert link_weights([0, 0, 0, 1], [1000] * 4) == (16, 16, 16, 48)
    assert link_weights([0, 1], [100, 100]) == ()  # all alike
    assert link_weights([0, 0], [100, 900]) == ()  # one host
    assert link_weights([0, 1], [100, 0]) == ()  # unknown
    assert link_weights([0, 0, 1], [0, 10, 20]) == link_weights([0, 0, 1], [10, 10, 20])


TWO = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
INTERLEAVED = Topology.group(["nvidia", "amd"] * 2, [0, 1, 0, 1])
UNEVEN = Topology.group(["nvidia"] * 3 + ["amd"], [0, 0, 0, 1])
FOUR = Topology.group(["host"] * 8, [0, 0, 1, 1, 2, 2, 3, 3])


def plan_of(topology, collective, name, counts, fragments=1):
    root = 0 if ROWS[collective].rooted else -1
    return make_plan(topology, Call(collective, topology.size, counts, root), Choice(name, fragments))


def wire(topology, collective, name, *counts, fragments=1):
    return traffic_of(plan_of(topology, collective, name, counts, fragments), topology, 4)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 3, 2), (4, 1, 1, 2)])
def test_direct_divides_by_what_each_host_s_link_carries(sizes):
    """Hosts of different sizes with equal links: each sends and receives the same amount."""
    hosts = [host for host, n in enumerate(sizes) for _ in range(n)]
    topology = Topology.group(["host"] * len(hosts), hosts, link_weights(hosts, [1000] * len(hosts)))
    m, count = len(sizes), 12 << 20
    got = wire(topology, "allreduce", "direct", count)
    least = 2 * (m - 1) / m * count * 4
    assert max(*got.host_out, *got.host_in) == pytest.approx(least, rel=0.01)


#: The algorithm of an allreduce of 9,600 bytes -> bytes that leave each host, which equal those that enter it, and each
#: rank.
ALLREDUCES = [
    # Once each way, over all links at the same time.
    (TWO, "split_rail", (9600,) * 2, (4800,) * 4), (INTERLEAVED, "split_rail", (9600,) * 2, (4800,) * 4),
    (UNEVEN, "split_rail", (9600,) * 2, (3200, 3200, 3200, 9600)),
    # 2(m-1)/m of the data per host: no plan over m equal hosts sends less.
    (FOUR, "split_rail", (14400,) * 4, (7200,) * 8), (FOUR, "direct", (14400,) * 4, ()),
    (FOUR, "ring", (14400,) * 4, ()), (TWO, "direct", (9600,) * 2, ()), (TWO, "ring", (9600,) * 2, ()),
    (Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 1, 2, 3], [1, 3, 2, 2]), "split_rail", (),
     (2400, 7200, 4800, 4800)),
    # A link four times slower: its host reduces nothing, and only its N bytes each way limit it.
    (Topology.group(["host"] * 6, [0, 0, 1, 1, 2, 2], [1, 1, 4, 4, 4, 4]), "direct", (9600, 14400, 14400), ()),
]  # fmt: skip


@pytest.mark.parametrize("fragments", (1, 4))
@pytest.mark.parametrize("topology, name, hosts, ranks", ALLREDUCES)
def test_allreduce(topology, name, hosts, ranks, fragments):
    got = wire(topology, "allreduce", name, 2400, fragments=fragments)
    assert not hosts or got.host_out == got.host_in == hosts
    assert not ranks or (got.bridge == ranks if fragments == 1 else sum(got.bridge) == sum(ranks))


def test_owner_shares_end_together():
    assert owner_shares([1, 1, 1]) == [Fraction(1, 3)] * 3
    assert owner_shares([1, 9]) == [Fraction(1, 2)] * 2
    assert owner_shares([1, 4, 4]) == [0, Fraction(1, 2), Fraction(1, 2)]
    shares = owner_shares([3, 4, 5])
    assert sum(shares) == 1
    assert len({(1 + share) / weight for share, weight in zip(shares, [3, 4, 5], strict=True)}) == 1


@pytest.mark.parametrize("name", ("tree", "split_rail"))
@pytest.mark.parametrize("topology", (TWO, INTERLEAVED, UNEVEN, FOUR), ids=Topology.describe)
def test_what_crosses_goes_into_each_island_once(topology, name):
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
def test_alltoall_sends_no_byte_across_twice(data):
    topology = data.draw(topologies())
    call = data.draw(calls(topology, ("alltoall", "alltoallv")))
    plan = make_plan.__wrapped__(topology, call, Choice("split_rail", data.draw(st.integers(1, 3))))
    shape, home = Shape(call), topology.island_of
    for rank, sent in enumerate(traffic_of(plan, topology).bridge):
        foreign = (peer for peer in range(call.ranks) if home[peer] != home[rank])
        assert sent == sum(shape.send(rank, peer).count for peer in foreign)


@settings(max_examples=60)
@given(data=st.data())
def test_what_leaves_arrives(data):
    topology = data.draw(topologies())
    call = data.draw(calls(topology))
    name = data.draw(st.sampled_from(algorithms.names(call.collective)))
    plan = make_plan.__wrapped__(topology, call, Choice(name, 2))
    got = traffic_of(plan, topology, 8)
    assert abs(sum(got.host_out) - sum(got.host_in)) <= topology.size
