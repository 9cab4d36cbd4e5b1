"""Dividing data among islands: segments, rails and their number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plan_cases import many_islands, topologies

from ucc_hetero.planner.algorithms.division import MOST_RAILS, merge, owned_blocks, rounds, segments
from ucc_hetero.planner.algorithms.parts import each, link
from ucc_hetero.planner.algorithms.registry import GRAIN, Piece, Scratch, cut_at
from ucc_hetero.planner.collectives import Block
from ucc_hetero.planner.plan import Blocks, Region, regions
from ucc_hetero.planner.topology import Topology


@st.composite
def runs(draw: st.DrawFn) -> list[Block]:
    """Disjoint blocks in order."""
    out, at = [], 0
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=6)):
        out.append(Block(at + gap, count))
        at += gap + count
    return out


@given(topology=st.one_of(topologies(), many_islands()), blocks=runs())
def test_segments_partition_the_runs(topology: Topology, blocks: list[Block]) -> None:
    parts = segments(topology, blocks)
    assert merge(Block(part.offset, part.count) for part in parts) == merge(blocks)
    for part in parts:
        assert len(part.owners) == len(topology.islands)
        assert all(rank in i.ranks for rank, i in zip(part.owners, topology.islands, strict=True))


def test_uneven_islands_refine_each_other() -> None:
    topology = Topology.group(["nvidia"] * 3 + ["amd"] * 2, [0] * 5)
    got = [(s.offset, s.count, s.owners) for s in segments(topology, [Block(10, 60)])]
    assert got == [(10, 20, (0, 3)), (30, 10, (1, 3)), (40, 10, (1, 4)), (50, 20, (2, 4))]


def test_neighbours_with_the_same_owners_are_one_segment() -> None:
    topology = Topology.group(["nvidia", "amd"], [0, 0])
    assert len(segments(topology, [Block(0, 5), Block(5, 5), Block(20, 5)])) == 2


def test_fixed_owners_keep_their_blocks() -> None:
    topology = Topology.group(["nvidia"] * 2 + ["amd"], [0] * 3)
    got = segments(topology, [Block(0, 3), Block(7, 9)], {0: [(3, 0), (12, 1)]})
    assert [(s.offset, s.count, s.owners) for s in got] == [(0, 3, (0, 2)), (7, 9, (1, 2))]


def test_many_unlike_islands_do_not_make_a_rail_per_rank() -> None:
    sizes = range(33, 97)
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    topology = Topology.group(["host"] * len(hosts), hosts)
    parts = segments(topology, [Block(0, 1 << 24)])
    assert len({part.owners for part in parts}) <= MOST_RAILS * max(sizes)
    for island in topology.islands:
        shares = dict.fromkeys(island.ranks, 0)
        for part in parts:
            shares[part.owners[island.index]] += part.count
        assert max(shares.values()) < 1.5 * (1 << 24) / island.size


def test_what_each_rank_owns() -> None:
    owned = owned_blocks([Block(10, 5), Block(20, 5)], [(3, 7), (7, 9), (10, 8)], (7, 8, 9))
    assert owned == [[Block(10, 3)], [Block(22, 3)], [Block(13, 2), Block(20, 2)]]
    assert owned_blocks([], [], (1, 2)) == [[], []]


@given(count=st.integers(0, 1 << 50), whole=st.integers(1, 100))
def test_cuts_are_in_order_and_aligned(count: int, whole: int) -> None:
    cuts = [cut_at(count, part, whole) for part in range(whole + 1)]
    assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == count
    assert all(cut % GRAIN == 0 for cut in cuts[:-1] if cut > 64 * GRAIN)


@given(count=st.integers(0, 1 << 20), total=st.integers(1, 20))
def test_pieces_cover_a_block(count: int, total: int) -> None:
    pieces = [Piece(k, total, Scratch(1)).cut(Block(7, count)) for k in range(total)]
    assert merge(pieces) == ([Block(7, count)] if count else [])


def test_operands() -> None:
    assert each("send", [Block(0, 4), Block(4, 4)]) == Blocks("send", 0, 4, 4, 2)
    assert each("recv", [Block(1, 4), Block(11, 4)]) == Blocks("recv", 1, 4, 10, 2)
    assert each("recv", [Block(4, 4), Block(0, 4)]) == (Region("recv", 4, 4), Region("recv", 0, 4))
    assert regions(Blocks("recv", 1, 4, 10, 2)) == (Region("recv", 1, 4), Region("recv", 11, 4))
    assert rounds([[Block(0, 1)], [Block(1, 2), Block(9, 3)]]) == [
        [Block(0, 1), Block(1, 2)],
        [Block(0, 0), Block(9, 3)],
    ]


def test_link() -> None:
    topology = Topology.group(["nvidia", "amd", "nvidia"], [0] * 3)
    assert link(topology, (0, 2)) == "native" and link(topology, (0, 1)) == "bridge"
