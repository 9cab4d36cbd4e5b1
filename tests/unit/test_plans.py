"""Plans: as data, in parts, of every registered algorithm on random topologies and calls, and how deep they add."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2
from pathlib import Path

import numpy as np
import plan_cases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import Simulation, Vector, calls, drop, mutate, steps, substitute

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.algorithms import alltoall, partition
from ucc_hetero.planner.algorithms.builders import each, link
from ucc_hetero.planner.algorithms.partition import MOST_RAILS, Division, Segment
from ucc_hetero.planner.algorithms.registry import GRAIN, Piece, Scratch, cut_at
from ucc_hetero.planner.collectives import ROWS, Block, Call, Shape, elements
from ucc_hetero.planner.plan import LEAST_IN_FLIGHT, Blocks, Fragment, Operand, Plan, Region, regions
from ucc_hetero.planner.select import Choice, Tuning, choose, make_plan
from ucc_hetero.planner.topology import Group, Topology
from ucc_hetero.planner.validate import InvalidPlan, validate

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
ORDERED = tuple(name for name, row in ROWS.items() if row.prefix)

EVERY = [(collective, name) for collective in ROWS for name in algorithms.names(collective)]


def plan_of(topology: Topology, call: Call, name: str, fragments: int) -> Plan:
    # Past the cache: hypothesis would only fill it.
    return make_plan.__wrapped__(topology, call, Choice(name, fragments))


def test_every_collective_has_a_flat_and_a_hierarchical_algorithm() -> None:
    for collective in ROWS:
        names = algorithms.names(collective)
        assert "flat" in names
        assert collective in ORDERED or {"tree", "split_rail"} & set(names)


#: Kind of topologies -> how they are drawn, how many, the most elements of a block and the most fragments.
DRAWN = {
    "any": (plan_cases.topologies(), 10, 40, 4),
    "many islands": (plan_cases.many_islands(), 1, 300, 2),
    "levels": (plan_cases.deep_topologies(), 3, 40, 3),
}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("collective, name", EVERY)
def test_valid(collective: str, name: str, kind: str) -> None:
    drawn, examples, most, fragments = DRAWN[kind]

    @settings(max_examples=examples, suppress_health_check=SLOW)
    @given(data=st.data())
    def every(data: st.DataObject) -> None:
        topology = data.draw(drawn)
        call = data.draw(calls(topology, (collective,), most))
        plan = plan_of(topology, call, name, data.draw(st.integers(1, fragments)))
        for in_place in (False, True):
            validate(plan, topology, call, in_place, collective in ORDERED)

    every()


@pytest.mark.parametrize("collective, count", [
    ("barrier", 0), ("bcast", 2), ("bcast", 1 << 22), ("reduce", 2), ("reduce", 1 << 22), ("allreduce", 2),
    ("allgather", 2), ("reduce_scatter_block", 2), ("gather", 2), ("gather", 1 << 16), ("scatter", 2),
    ("scatter", 1 << 16),
])  # fmt: skip
def test_valid_on_64_hosts_of_8(collective: str, count: int) -> None:
    """One vendor whose hosts are islands, with the plans that queued calls get there."""
    hosts = [host for host in range(64) for _ in range(8)]
    topology = Topology.group(["nvidia"] * 512, hosts, fabrics=hosts)
    root = 77 if ROWS[collective].rooted else -1
    call = Call(collective, 512, (count,) if count else (), root)
    choice = choose(topology, collective, 4 * elements(call), Tuning(queued=True))
    validate(make_plan.__wrapped__(topology, call, choice), topology, call)


def test_a_rank_that_passes_on_as_much_as_it_has_still_gets_its_own() -> None:
    """Rank 5, alone in its group, and a rail that moves another's element of its: as long as its own block."""
    vendors = ["nvidia", "amd", "nvidia", "amd", "nvidia", "nvidia", "nvidia", "host"]
    groups = [[0] * 8, [0, 0, 0, 0, 0, 1, 0, 0]]
    topology = Topology.group(vendors, [0] * 8, (1, 1, 1, 1, 1, 2, 3, 1), groups)
    call = Call("allgatherv", 8, (2, 2, 5, 0, 1, 1, 5, 5))
    for fragments in (1, 2, 3):
        validate(plan_of(topology, call, "split_rail", fragments), topology, call)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=5, suppress_health_check=SLOW)
@given(data=st.data(), in_place=st.booleans(), seed=st.integers(0, 1 << 32))
def test_right_in_any_order(collective: str, name: str, data: st.DataObject, in_place: bool, seed: int) -> None:
    topology = data.draw(plan_cases.topologies(6))
    call = data.draw(calls(topology, (collective,), 9))
    simulation = Simulation(plan_of(topology, call, name, data.draw(st.integers(1, 3))), call, in_place, seed)
    simulation.run()
    assert simulation.right()


@pytest.mark.parametrize("collective, name", [pair for pair in EVERY if pair[1] == "split_rail"])
@pytest.mark.parametrize("messages", [0, alltoall.MOST_MESSAGES])
@settings(max_examples=8, suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_valid_with_equal_islands(
    collective: str, name: str, messages: int, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alltoall, "MOST_MESSAGES", messages)
    topology = data.draw(plan_cases.equal_islands())
    call = data.draw(calls(topology, (collective,)))
    if ROWS[collective].layout == "ranks" and data.draw(st.booleans()):
        call = call._replace(counts=(call.counts[0],) * topology.size)
    plan = plan_of(topology, call, name, data.draw(st.integers(1, 4)))
    for in_place in (False, True):
        validate(plan, topology, call, in_place)


def shape_of(operand: Operand) -> object:
    """Form of another rank's operand, on which this rank's library call depends."""
    return (type(operand), operand.stride == operand.count) if isinstance(operand, Blocks) else type(operand)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=4, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_rank_s_own_plan_is_its_part_of_the_whole(collective: str, name: str, data: st.DataObject) -> None:
    topology = data.draw(st.one_of(plan_cases.topologies(), plan_cases.deep_topologies(), plan_cases.equal_islands()))
    call = data.draw(calls(topology, (collective,)))
    fragments = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, topology.size - 1))
    whole = plan_of(topology, call, name, fragments)
    mine = make_plan.__wrapped__(topology, call, Choice(name, fragments), rank)
    assert mine.sizes[rank] == whole.sizes[rank]
    pairs = list(zip(mine.program(rank), whole.program(rank), strict=True))
    assert len(pairs) == sum(len(stage) for fragment in mine.fragments for stage in fragment.stages)
    for (_, _, i, one), (_, _, j, other) in pairs:
        assert (one.kind, one.ranks, one.link, one.root, i) == (other.kind, other.ranks, other.link, other.root, j)
        assert (one.src[i], one.dst[i]) == (other.src[i], other.dst[i])
        if ROWS[collective].layout not in ("ranks", "matrix"):  # those always run a library's form for any counts
            assert [shape_of(o) for o in (*one.src, *one.dst)] == [shape_of(o) for o in (*other.src, *other.dst)]


@settings(max_examples=150, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 1 << 32), in_place=st.booleans())
def test_mutants_that_pass_are_right(data: st.DataObject, seed: int, in_place: bool) -> None:
    """A plan with a mistake is refused, unless the mistake changes nothing in any order the plan allows."""
    topology = data.draw(plan_cases.topologies(6))
    call = data.draw(calls(topology, most=9))
    plan = plan_of(topology, call, data.draw(st.sampled_from(algorithms.names(call.collective))), 2)
    if not list(steps(plan)) or call.collective == "barrier":
        return
    mutant = mutate(plan, random.Random(seed))
    try:
        validate(mutant, topology, call, in_place)
    except InvalidPlan:
        return
    for order in range(3):
        simulation = Simulation(mutant, call, in_place, seed + order)
        simulation.run()
        assert simulation.right()


LAYOUTS = (
    Topology.group(["nvidia", "nvidia", "amd", "amd"], [0, 0, 1, 1]),
    Topology.group(["nvidia", "amd", "nvidia", "amd", "nvidia"], [0, 0, 1, 1, 1]),
    Topology.group(["nvidia", "amd", "host", "amd", "nvidia", "nvidia"], [0] * 6),
)


def example(topology: Topology, collective: str) -> Call:
    row, n = ROWS[collective], topology.size
    size = {"none": 0, "vector": 1, "equal": 1, "ranks": n, "matrix": n * n}[row.layout]
    return Call(collective, n, tuple(24 + 7 * i % 5 for i in range(size)), n - 2 if row.rooted else -1)


@pytest.mark.parametrize("topology", LAYOUTS, ids=Topology.describe)
@pytest.mark.parametrize("collective, name", EVERY)
def test_no_step_is_idle(topology: Topology, collective: str, name: str) -> None:
    """Dropping any step of any plan is noticed: nothing is sent for nothing."""
    call = example(topology, collective)
    plan = plan_of(topology, call, name, 2)
    ordered = collective in ORDERED
    validate(plan, topology, call, ordered=ordered)
    for f, s, i, step in steps(plan):
        if (collective, name, step.kind) == ("barrier", "tree", "barrier") and s == 0 and len(step.ranks) == 1:
            continue
        with pytest.raises(InvalidPlan):
            validate(drop(plan, f, s, i), topology, call, ordered=ordered)


@pytest.mark.parametrize("topology", LAYOUTS, ids=Topology.describe)
def test_repeated_contributions_are_counted(topology: Topology) -> None:
    call = example(topology, "allreduce")
    for name in ("tree", "split_rail"):
        plan = plan_of(topology, call, name, 1)
        for f, s, i, step in steps(plan):
            if step.kind not in ("allreduce", "reduce", "reduce_scatter") or step.link != "bridge":
                continue
            stages = plan.fragments[f].stages
            twice = type(plan.fragments[f])((*stages[: s + 1], (step,), *stages[s + 1 :]))
            mutant = Plan(plan.collective, plan.algorithm, plan.sizes, (twice,))
            with pytest.raises(InvalidPlan):
                validate(mutant, topology, call, in_place=True)
            assert i >= 0


def test_messages_say_what_is_wrong() -> None:
    topology = LAYOUTS[0]
    call = Call("allreduce", 4, (8,))
    plan = plan_of(topology, call, "tree", 1)
    reduce_, bridge, bcast = (stage[0] for stage in plan.fragments[0].stages)

    def refused(f: int, s: int, i: int, text: str, **change: object) -> None:
        with pytest.raises(InvalidPlan, match=text):
            validate(substitute(plan, f, s, i, replace(plan.fragments[f].stages[s][i], **change)), topology, call)

    refused(0, 0, 0, "link 'local'", link="local")
    refused(0, 1, 0, "link 'native' for ranks of 2 islands", link="native")
    refused(0, 0, 0, "distinct", ranks=(0, 0))
    refused(0, 0, 0, "root 5", root=5)
    refused(0, 0, 0, "member 0 needs", src=(None, reduce_.src[1]))
    refused(0, 0, 0, "kind 'sum'", kind="sum")
    with pytest.raises(InvalidPlan, match=r"lacks ranks \[2, 3\]"):
        validate(drop(plan, 0, 1, 0), topology, call)
    with pytest.raises(InvalidPlan, match="reads undefined recv"):
        validate(drop(plan, 0, 0, 0), topology, call)
    with pytest.raises(InvalidPlan, match="sizes"):
        validate(plan, topology, Call("allreduce", 4, (9,)))
    assert bridge.link == "bridge" and bcast.link == "native"


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=12, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_spelled_out(collective: str, name: str, data: st.DataObject, seed: int) -> None:
    """Without collectives over bridges: valid, right in any order, and a rank's own plan is its part of the whole."""
    topology = data.draw(plan_cases.topologies(7))
    call = data.draw(calls(topology, (collective,), 30))
    choice = Choice(name, data.draw(st.integers(1, 3)), queued=True)
    plan = make_plan.__wrapped__(topology, call, choice)
    assert all(step.kind in ("message", "barrier") or step.link != "bridge" for *_, step in steps(plan))
    for in_place in (False, True):
        validate(plan, topology, call, in_place, collective in ORDERED)
        simulation = Simulation(plan, call, in_place, seed)
        simulation.run()
        assert simulation.right()
    rank = data.draw(st.integers(0, topology.size - 1))
    mine = make_plan.__wrapped__(topology, call, choice, rank)
    assert mine.sizes[rank] == plan.sizes[rank]
    for (f, _, i, one), (g, _, j, other) in zip(mine.program(rank), plan.program(rank), strict=True):
        assert (f, one.kind, one.ranks, one.link, i) == (g, other.kind, other.ranks, other.link, j)
        assert (one.src[i], one.dst[i]) == (other.src[i], other.dst[i])


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_posting_order(data: st.DataObject) -> None:
    topology = data.draw(plan_cases.topologies())
    call = data.draw(calls(topology))
    name = data.draw(st.sampled_from(algorithms.names(call.collective)))
    plan = make_plan.__wrapped__(topology, call, Choice(name, data.draw(st.integers(1, 4))))
    orders = [list(plan.program(rank)) for rank in range(call.ranks)]
    for rank, order in enumerate(orders):
        for f, s, member, step in order:
            assert step.ranks[member] == rank and any(step is other for other in plan.fragments[f].stages[s])
        for fragment in range(len(plan.fragments)):
            stages = [s for f, s, _, _ in order if f == fragment]
            assert stages == sorted(stages)
    # Every two ranks post the steps that they share in the same order.
    for a in orders:
        for b in orders:
            mine, its = ({id(step) for *_, step in order} for order in (a, b))
            both = mine & its
            assert [id(s) for *_, s in a if id(s) in both] == [id(s) for *_, s in b if id(s) in both]


def teams(plan: Plan, rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """Teams that a rank needs for a plan, and over what."""
    found = (step for *_, step in plan.program(rank))
    return {(s.link, s.ranks) for s in found if s.link != "local" and s.kind != "message" and len(s.ranks) > 1}


@settings(max_examples=60, suppress_health_check=SLOW, deadline=None)
@given(data=st.data())
def test_all_fragments_are_on_the_teams_of_one(data: st.DataObject) -> None:
    """Where islands are alike: a communicator begins with the teams of one fragment, and makes no others later."""
    topology = data.draw(plan_cases.equal_islands())
    rank = data.draw(st.integers(0, topology.size - 1))
    for collective in ("allreduce", "bcast", "reduce", "allgather", "reduce_scatter_block"):
        call = Call(collective, topology.size, (1 << 18,), 0 if ROWS[collective].rooted else -1)
        for name in algorithms.names(collective):
            whole, one = (make_plan.__wrapped__(topology, call, Choice(name, n), rank) for n in (4, 1))
            assert teams(whole, rank) == teams(one, rank), (collective, name)


def test_fragments_overlap_in_wave_fronts() -> None:
    topology = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
    plan = make_plan(topology, Call("allreduce", 4, (1200,)), Choice("split_rail", 3))
    order = [(f, s) for f, s, _, _ in plan.program(0)]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


def test_as_many_in_flight_as_the_plan_is_deep() -> None:
    two = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
    assert make_plan(two, Call("allreduce", 4, (1 << 16,)), Choice("split_rail", 8)).in_flight == LEAST_IN_FLIGHT
    many = Topology.group(["host"] * 8, list(range(8)))
    ring = make_plan(many, Call("allreduce", 8, (1 << 16,)), Choice("ring", 2))
    assert ring.in_flight == 1 + max(f.depths[-1] for f in ring.fragments) > LEAST_IN_FLIGHT


def test_blocks_and_fragments_are_values() -> None:
    blocks = Blocks("recv", 10, 2, 5, 3)
    assert len(blocks) == 3 and list(blocks) == [Region("recv", at, 2) for at in (10, 15, 20)]
    assert [blocks[i] for i in range(3)] == list(blocks)
    for i in (-1, 3):
        with pytest.raises(IndexError):
            blocks[i]
    assert Fragment(()) == Fragment(()) and hash(Fragment(())) == hash(Fragment(()))


@st.composite
def runs(draw: st.DrawFn) -> list[Block]:
    """Disjoint blocks in order."""
    out, at = [], 0
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=6)):
        out.append(Block(at + gap, count))
        at += gap + count
    return out


def segments(topology: Topology, blocks: list[Block], fixed: dict[int, Division] | None = None) -> list[Segment]:
    """Runs as the islands divide them."""
    total = sum(block.count for block in blocks)
    return partition.refine(partition.merge(blocks), partition.divisions(topology, topology.islands, total, fixed))


@given(topology=st.one_of(plan_cases.topologies(), plan_cases.many_islands()), blocks=runs())
def test_segments_partition_the_runs(topology: Topology, blocks: list[Block]) -> None:
    parts = segments(topology, blocks)
    assert partition.merge(Block(part.offset, part.count) for part in parts) == partition.merge(blocks)
    for part in parts:
        assert len(part.owners) == len(topology.islands)
        assert all(rank in i.ranks for rank, i in zip(part.owners, topology.islands, strict=True))


def test_segments_by_example() -> None:
    topology = Topology.group(["nvidia"] * 3 + ["amd"] * 2, [0] * 5)
    got = [(s.offset, s.count, s.owners) for s in segments(topology, [Block(10, 60)])]
    assert got == [(10, 20, (0, 3)), (30, 10, (1, 3)), (40, 10, (1, 4)), (50, 20, (2, 4))]
    topology = Topology.group(["nvidia", "amd"], [0, 0])
    assert len(segments(topology, [Block(0, 5), Block(5, 5), Block(20, 5)])) == 2
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
    owned = partition.owned_blocks([Block(10, 5), Block(20, 5)], [(3, 7), (7, 9), (10, 8)], (7, 8, 9))
    assert owned == [[Block(10, 3)], [Block(22, 3)], [Block(13, 2), Block(20, 2)]]
    assert partition.owned_blocks([], [], (1, 2)) == [[], []]


@given(count=st.integers(0, 1 << 50), whole=st.integers(1, 100))
def test_cuts_are_in_order_and_aligned(count: int, whole: int) -> None:
    cuts = [cut_at(count, part, whole) for part in range(whole + 1)]
    assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == count
    assert all(cut % GRAIN == 0 for cut in cuts[:-1] if cut > 64 * GRAIN)


@given(count=st.integers(0, 1 << 20), total=st.integers(1, 20))
def test_pieces_cover_a_block(count: int, total: int) -> None:
    pieces = [Piece(k, total, Scratch(1)).cut(Block(7, count)) for k in range(total)]
    assert partition.merge(pieces) == ([Block(7, count)] if count else [])


def test_operands() -> None:
    assert each("send", [Block(0, 4), Block(4, 4)]) == Blocks("send", 0, 4, 4, 2)
    assert each("recv", [Block(1, 4), Block(11, 4)]) == Blocks("recv", 1, 4, 10, 2)
    assert each("recv", [Block(4, 4), Block(0, 4)]) == (Region("recv", 4, 4), Region("recv", 0, 4))
    assert regions(Blocks("recv", 1, 4, 10, 2)) == (Region("recv", 1, 4), Region("recv", 11, 4))
    assert partition.rounds([[Block(0, 1)], [Block(1, 2), Block(9, 3)]]) == [
        [Block(0, 1), Block(1, 2)],
        [Block(0, 0), Block(9, 3)],
    ]


def test_link() -> None:
    topology = Topology.group(["nvidia", "amd", "nvidia"], [0] * 3)
    assert link(topology, (0, 2)) == "native" and link(topology, (0, 1)) == "bridge"


PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"

Bound = Callable[[int, int, int], int]

#: Algorithm -> (its row of the page's table, the bound) for P ranks in k islands of up to m.
BOUNDS: dict[str, tuple[str, Bound]] = {
    "flat": ("P − 1 at most; libucc chooses the exchange", lambda p, k, m: p - 1),
    "tree": ("(m − 1) + (k − 1) at most", lambda p, k, m: m - 1 + k - 1),
    "split_rail": ("(m − 1) + (k − 1) at most", lambda p, k, m: m - 1 + k - 1),
    "direct": ("(m − 1) + (k − 1) at most", lambda p, k, m: m - 1 + k - 1),
    "ring": ("(m − 1) + (k − 1)", lambda p, k, m: m - 1 + k - 1),
    "doubling": ("(m − 1) + ⌈log₂ k⌉ + 1", lambda p, k, m: m - 1 + ceil(log2(k)) + 1),
    "scan": ("⌈log₂ P⌉", lambda p, k, m: ceil(log2(p))),
}

#: Vendors and hosts of the ranks.
PLACES = (
    ("nnaa", "0000"), ("nana", "0000"), ("nnna", "0000"), ("nnaah", "00000"), ("nnnaaahh", "00001111"),
    ("nahnahna", "00000000"), ("hhhhhhhhh", "001122334"), ("hhhhhhhhhhhhhhhh", "0011223344556677"),
)  # fmt: skip
VENDORS = {"n": "nvidia", "a": "amd", "h": "host"}


class Depth(Simulation):
    """Numbers are how many roundings deep a value is; a step over n ranks may add one after the other."""

    def _garbage(self, count: int) -> Vector:
        return np.zeros(count, np.int64)

    def add(self, values: list[Vector]) -> Vector:
        return np.maximum.reduce(values) + len(values) - 1


def depth(topology: Topology, call: Call, choice: Choice) -> int:
    """Of the deepest element of any rank's result."""
    plan = make_plan(topology, call, choice)
    simulation = Depth(plan, call, False, 0)
    simulation.run()
    shape, row = Shape(call), ROWS[call.collective]
    out = [0]
    for rank in range(call.ranks):
        for due in row.post(shape, rank):
            out.append(int(simulation.memory[rank, "recv"][due.offset : due.offset + due.count].max(initial=0)))
    return max(out)


REDUCING = [name for name, row in ROWS.items() if row.reduces]


@pytest.mark.parametrize(("vendors", "hosts"), PLACES, ids=[f"{v}-{h}" for v, h in PLACES])
@pytest.mark.parametrize("collective", REDUCING)
def test_no_deeper_than_promised(collective: str, vendors: str, hosts: str) -> None:
    topology = Topology.group([VENDORS[v] for v in vendors], [int(h) for h in hosts])
    p, k, m = topology.size, len(topology.islands), max(island.size for island in topology.islands)
    counts = {"vector": (40,), "equal": (5,), "ranks": tuple(range(1, p + 1))}[ROWS[collective].layout]
    call = Call(collective, p, counts, p - 1 if ROWS[collective].rooted else -1)
    for name in algorithms.names(collective):
        bound = BOUNDS["scan" if ROWS[collective].prefix else name][1](p, k, m)
        for pieces in (1, 3):
            assert depth(topology, call, Choice(name, pieces)) <= bound, (name, pieces)


def _widths(group: Group) -> int:
    """Roundings of a tree that adds one group's members after the other, on the deepest way down."""
    below = max((_widths(child) for child in group.children), default=0)
    return below + max(len(group.children) or len(group.ranks), 1) - 1


@pytest.mark.parametrize("collective", REDUCING)
def test_levels_add_up(collective: str) -> None:
    """Sites of racks of hosts: what each level divides into is added there, one group after the other at most."""
    hosts = [0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    racks = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4]
    sites = [0] * 8 + [1] * 8
    topology = Topology.group(["host"] * 16, hosts, (), [sites, racks])
    counts = {"vector": (40,), "equal": (5,), "ranks": tuple(range(1, 17))}[ROWS[collective].layout]
    call = Call(collective, 16, counts, 15 if ROWS[collective].rooted else -1)
    for name in algorithms.names(collective):
        most = _widths(topology.tree) if name in ("tree", "split_rail") else 15
        assert depth(topology, call, Choice(name)) <= most, name


def test_the_page_has_the_bounds() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = [(cells[1], cells[2].strip()) for cells in rows]
    for name, (words, _) in BOUNDS.items():
        assert any(f"`{name}`" in cell and words == said for cell, said in found), name
    promised = {name for collective in REDUCING for name in algorithms.names(collective)}
    assert promised <= set(BOUNDS), "every algorithm that adds has a bound"
