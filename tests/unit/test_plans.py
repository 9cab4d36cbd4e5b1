"""Plans: as data, in parts, of every registered algorithm on random topologies and calls, and depths of rounding."""

import random
import runpy
from dataclasses import replace
from itertools import combinations
from math import ceil, log2
from pathlib import Path

import numpy as np
import plan_cases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import Simulation, calls, drop, mutate, steps, substitute

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.algorithms import alltoall, partition, registry
from ucc_hetero.planner.algorithms.partition import MOST_RAILS
from ucc_hetero.planner.collectives import ROWS, Block, Call, Shape, elements
from ucc_hetero.planner.plan import LEAST_IN_FLIGHT, EqualRegions
from ucc_hetero.planner.select import Choice, Tuning, choose, make_plan
from ucc_hetero.planner.topology import Topology
from ucc_hetero.planner.validate import InvalidPlan, validate

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
ORDERED = tuple(name for name, row in ROWS.items() if row.prefix)

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
EVERY = [(collective, name) for collective in ROWS for name in algorithms.names(collective)]
EVERY.append(("allreduce", "by_rank_0"))


@pytest.fixture(scope="module", autouse=True)
def own_algorithm():
    """Register the example's algorithm for this module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_TABLE", dict(registry._TABLE))
        runpy.run_path(str(EXAMPLE))
        yield


def plan_of(topology, call, name, fragments):
    # Without the cache, which hypothesis would only fill.
    return make_plan.__wrapped__(topology, call, Choice(name, fragments))


#: Kind of topologies -> how to draw them, how many, the most elements of a block, and the most fragments.
DRAWN = {
    "any": (plan_cases.topologies(), 6, 40, 4), "queued": (plan_cases.topologies(7), 6, 30, 3),
    "many islands": (plan_cases.many_islands(), 1, 300, 2), "levels": (plan_cases.deep_topologies(), 2, 40, 3),
    "equal islands": (plan_cases.equal_islands(), 4, 40, 4),
}  # fmt: skip
#: Kinds whose ranks may lack teams, so that messages take their place.
HOSTS = ("any", "levels", "equal islands")
#: Plans are also executed numerically up to this many ranks.
FEW = 7


def shape_of(operand):
    """Form of another rank's operand, on which this rank's library call depends."""
    return (type(operand), operand.stride == operand.count) if isinstance(operand, EqualRegions) else type(operand)


def own_part(plan, topology, call, choice, rank, lacks):
    """The plan that a rank makes for itself equals its part of the whole plan."""
    mine = make_plan.__wrapped__(topology, call, choice, rank)
    mine = algorithms.expand_plan(mine, rank, lacks) if lacks else mine
    assert mine.sizes[rank] == plan.sizes[rank]
    pairs = list(zip(mine.steps_of(rank), plan.steps_of(rank), strict=True))
    assert len(pairs) == sum(len(stage) for fragment in mine.fragments for stage in fragment.stages)
    for (f, _, i, one), (g, _, j, other) in pairs:
        assert (f, i, one.kind, one.ranks, one.link) == (g, j, other.kind, other.ranks, other.link)
        assert (one.root, one.src[i], one.dst[i]) == (other.root, other.src[j], other.dst[j])
        if ROWS[call.collective].layout not in ("ranks", "matrix"):  # others always use one library call for any counts
            assert [shape_of(o) for o in (*one.src, *one.dst)] == [shape_of(o) for o in (*other.src, *other.dst)]


def some_teams(seed):
    """A function that says that a step's ranks lack a team: those of about half of all teams do."""
    return lambda step: random.Random(f"{seed} {step.ranks} {step.link}").random() < 0.5


def posted_in_order(plan, ranks):
    """Each rank posts its steps stage by stage, and each pair of ranks posts shared steps in the same order."""
    orders = [list(plan.steps_of(rank)) for rank in range(ranks)]
    for rank, order in enumerate(orders):
        for f, s, member, step in order:
            assert step.ranks[member] == rank and any(step is other for other in plan.fragments[f].stages[s])
        for fragment in range(len(plan.fragments)):
            stages = [s for f, s, _, _ in order if f == fragment]
            assert stages == sorted(stages)
    steps = [{id(step): None for *_, step in order} for order in orders]
    for a, b in combinations(steps, 2):
        assert [each for each in a if each in b] == [each for each in b if each in a]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("collective, name", EVERY)
def test_right(collective, name, kind, monkeypatch):
    drawn, examples, most, fragments = DRAWN[kind]
    queued, messages = kind == "queued", alltoall.MOST_MESSAGES

    @settings(max_examples=examples, suppress_health_check=SLOW)
    @given(data=st.data(), seed=st.integers(0, 1 << 32))
    def every(data, seed):
        topology = data.draw(drawn)
        call = data.draw(calls(topology, (collective,), most))
        if kind == "equal islands":
            monkeypatch.setattr(alltoall, "MOST_MESSAGES", data.draw(st.sampled_from((0, messages))))
            if ROWS[collective].layout == "ranks" and data.draw(st.booleans()):
                call = call._replace(counts=(call.counts[0],) * topology.size)
        choice = Choice(name, data.draw(st.integers(1, fragments)), queued=queued)
        plan = make_plan.__wrapped__(topology, call, choice)  # without the cache, which would only be filled
        lacks = data.draw(st.sampled_from((None, some_teams(seed)))) if kind in HOSTS else None
        plan = algorithms.expand_plan(plan, None, lacks) if lacks else plan
        for in_place in (False, True):
            validate(plan, topology, call, in_place, collective in ORDERED)
            if topology.size <= FEW:
                simulation = Simulation(plan, call, in_place, seed)
                simulation.run()
                assert simulation.right()
        if topology.size <= 2 * FEW:
            posted_in_order(plan, topology.size)
        own_part(plan, topology, call, choice, seed % topology.size, lacks)
        assert not lacks or not any(step.kind != "barrier" and step.on_team and lacks(step) for *_, step in steps(plan))
        assert not queued or all(s.kind in ("message", "barrier") or s.link != "bridge" for *_, s in steps(plan))

    every()


@pytest.mark.parametrize("collective, count", [
    ("barrier", 0), ("bcast", 1 << 22), ("reduce", 2), ("reduce", 1 << 22), ("allreduce", 2), ("allgather", 2),
    ("reduce_scatter_block", 2), ("gather", 1 << 16), ("scatter", 2),
])  # fmt: skip
def test_valid_on_32_hosts_of_8(collective, count):
    """One vendor whose hosts are islands, with the plans of queued calls."""
    hosts = [host for host in range(32) for _ in range(8)]
    topology = Topology.group(["nvidia"] * 256, hosts, fabrics=hosts)
    root = 77 if ROWS[collective].rooted else -1
    call = Call(collective, 256, (count,) if count else (), root)
    choice = choose(topology, collective, 4 * elements(call), Tuning(queued=True))
    validate(make_plan.__wrapped__(topology, call, choice), topology, call)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_alltoall_by_rails(monkeypatch, size, count):
    """Equal islands of consecutive ranks, as with more messages than a plan for each of them has."""
    monkeypatch.setattr(alltoall, "MOST_MESSAGES", 0)
    topology = Topology.group(["host"] * 3 * size, [host for host in range(3) for _ in range(size)])
    call = Call("alltoall", 3 * size, (count,), -1)
    plan = plan_of(topology, call, "split_rail", 2)
    assert {step.kind for *_, step in steps(plan)} == ({"alltoall"} if count else set())
    for in_place in (False, True):
        validate(plan, topology, call, in_place)


def test_a_rank_that_passes_on_as_much_as_it_has_still_gets_its_own():
    """Rank 5, alone in its group, and a rail that moves another rank's element through it, as long as its own block."""
    vendors = ["nvidia", "amd", "nvidia", "amd", "nvidia", "nvidia", "nvidia", "host"]
    groups = [[0] * 8, [0, 0, 0, 0, 0, 1, 0, 0]]
    topology = Topology.group(vendors, [0] * 8, (1, 1, 1, 1, 1, 2, 3, 1), groups)
    call = Call("allgatherv", 8, (2, 2, 5, 0, 1, 1, 5, 5))
    for fragments in (1, 2, 3):
        validate(plan_of(topology, call, "split_rail", fragments), topology, call)


@settings(max_examples=150, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 1 << 32), in_place=st.booleans())
def test_mutants_that_pass_are_right(data, seed, in_place):
    """The validator refuses a plan with a mistake, unless the mistake changes nothing in any allowed order."""
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


#: A change of a step of an allreduce over ranks 0 to 2 -> the words of its refusal.
MISSHAPEN = {
    "kind 'sum'": lambda step: replace(step, kind="sum"),
    "must be distinct": lambda step: replace(step, ranks=(0, 1, 1)),
    "have one src and one dst each": lambda step: replace(step, src=step.src[:2]),
    "not all among 3": lambda step: replace(step, ranks=(0, 1, 3)),
    "1 members, where allreduce takes at least 2": lambda step: replace(
        step, ranks=(0,), src=step.src[:1], dst=step.dst[:1]
    ),
    "3 members, where message takes 2": lambda step: replace(step, kind="message", root=0),
    "root 0 of 3": lambda step: replace(step, root=0),
    "root 3 of 3": lambda step: replace(step, kind="bcast", root=3),
    "member 0 needs src: each": lambda step: replace(step, kind="alltoall"),
}


@pytest.mark.parametrize("words", MISSHAPEN)
def test_misshapen_steps_are_refused(words):
    topology, call = Topology.group(["host"] * 3, [0] * 3), Call("allreduce", 3, (4,))
    plan = plan_of(topology, call, "flat", 1)
    ((*at, step),) = steps(plan)
    with pytest.raises(InvalidPlan, match=f"^fragment 0, stage 0, .*{words}"):
        validate(substitute(plan, *at, MISSHAPEN[words](step)), topology, call)


def test_a_combination_in_another_order_is_refused():
    """For operations that do not commute."""
    topology, call = Topology.group(["host"] * 3, [0] * 3), Call("exscan", 3, (4,))
    plan = plan_of(topology, call, "flat", 1)
    ((*at, step),) = ((*at, step) for *at, step in steps(plan) if step.kind == "combine")
    swapped = substitute(plan, *at, replace(step, src=step.dst, dst=step.src))
    with pytest.raises(InvalidPlan, match="combines rank 1 before rank 0: the order of the ranks is lost"):
        validate(swapped, topology, call, ordered=True)


LAYOUTS = (
    Topology.group(["nvidia", "amd", "nvidia", "amd", "nvidia"], [0, 0, 1, 1, 1]),
    Topology.group(["nvidia", "amd", "host", "amd", "nvidia", "nvidia"], [0] * 6),
)


def example(topology, collective):
    row, n = ROWS[collective], topology.size
    size = {"none": 0, "vector": 1, "equal": 1, "ranks": n, "matrix": n * n}[row.layout]
    return Call(collective, n, tuple(24 + 7 * i % 5 for i in range(size)), n - 2 if row.rooted else -1)


@pytest.mark.parametrize("topology", LAYOUTS, ids=Topology.describe)
@pytest.mark.parametrize("collective, name", EVERY)
def test_no_step_is_idle(topology, collective, name):
    """The validator notices if any step of any plan is missing: no step is superfluous."""
    call = example(topology, collective)
    plan = plan_of(topology, call, name, 2)
    ordered = collective in ORDERED
    validate(plan, topology, call, ordered=ordered)
    for f, s, i, step in steps(plan):
        if (collective, name, step.kind) == ("barrier", "tree", "barrier") and s == 0 and len(step.ranks) == 1:
            continue
        with pytest.raises(InvalidPlan):
            validate(drop(plan, f, s, i), topology, call, ordered=ordered)


def teams(plan, rank):
    found = (step for *_, step in plan.steps_of(rank))
    return {(s.link, s.ranks) for s in found if s.link != "local" and s.kind != "message" and len(s.ranks) > 1}


@settings(max_examples=60, suppress_health_check=SLOW, deadline=None)
@given(data=st.data())
def test_all_fragments_are_on_the_teams_of_one(data):
    """If islands are alike, a communicator creates the teams of one fragment, and no others later."""
    topology = data.draw(plan_cases.equal_islands())
    rank = data.draw(st.integers(0, topology.size - 1))
    for collective in ("allreduce", "bcast", "reduce", "allgather", "reduce_scatter_block"):
        call = Call(collective, topology.size, (1 << 18,), 0 if ROWS[collective].rooted else -1)
        for name in algorithms.names(collective):
            whole, one = (make_plan.__wrapped__(topology, call, Choice(name, n), rank) for n in (4, 1))
            assert teams(whole, rank) == teams(one, rank), (collective, name)


def test_fragments_overlap_in_wave_fronts():
    topology = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
    plan = make_plan(topology, Call("allreduce", 4, (1200,)), Choice("split_rail", 3))
    order = [(f, s) for f, s, _, _ in plan.steps_of(0)]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


def test_as_many_in_flight_as_the_plan_is_deep():
    two = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
    assert make_plan(two, Call("allreduce", 4, (1 << 16,)), Choice("split_rail", 8)).in_flight == LEAST_IN_FLIGHT
    many = Topology.group(["host"] * 8, list(range(8)))
    ring = make_plan(many, Call("allreduce", 8, (1 << 16,)), Choice("ring", 2))
    assert ring.in_flight == 1 + max(f.depths[-1] for f in ring.fragments) > LEAST_IN_FLIGHT


def test_many_unlike_islands_do_not_make_a_rail_per_rank():
    sizes, whole = range(33, 97), 1 << 24
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    topology = Topology.group(["host"] * len(hosts), hosts)
    divided = partition.divisions(topology, topology.islands, whole, None)
    parts = partition.refine(partition.merge([Block(0, whole)]), divided)
    assert len({part.owners for part in parts}) <= MOST_RAILS * max(sizes)
    for island in topology.islands:
        shares = dict.fromkeys(island.ranks, 0)
        for part in parts:
            shares[part.owners[island.index]] += part.count
        assert max(shares.values()) < 1.5 * whole / island.size


#: Algorithm -> the bound of docs/numerics.md, for P ranks in k islands of up to m.
BOUNDS = {
    **dict.fromkeys(("flat", "by_rank_0"), lambda p, k, m: p - 1),
    **dict.fromkeys(("tree", "split_rail", "direct", "ring"), lambda p, k, m: m - 1 + k - 1),
    "doubling": lambda p, k, m: m - 1 + ceil(log2(k)) + 1,
    "scan": lambda p, k, m: ceil(log2(p)),
}

#: Vendors and hosts of the ranks.
PLACES = (
    ("nnaa", "0000"), ("nana", "0000"), ("nnna", "0000"), ("nnaah", "00000"), ("nnnaaahh", "00001111"),
    ("nahnahna", "00000000"), ("hhhhhhhhh", "001122334"), ("hhhhhhhhhhhhhhhh", "0011223344556677"),
)  # fmt: skip
VENDORS = {"n": "nvidia", "a": "amd", "h": "host"}


class Depth(Simulation):
    """Values are numbers of roundings; a step over n ranks may add one operand after the other."""

    def _garbage(self, count):
        return np.zeros(count, np.int64)

    def add(self, values):
        return np.maximum.reduce(values) + len(values) - 1


def depth(topology, call, choice):
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
def test_no_deeper_than_promised(collective, vendors, hosts):
    topology = Topology.group([VENDORS[v] for v in vendors], [int(h) for h in hosts])
    p, k, m = topology.size, len(topology.islands), max(island.size for island in topology.islands)
    counts = {"vector": (40,), "equal": (5,), "ranks": tuple(range(1, p + 1))}[ROWS[collective].layout]
    call = Call(collective, p, counts, p - 1 if ROWS[collective].rooted else -1)
    for name in algorithms.names(collective):
        bound = BOUNDS["scan" if ROWS[collective].prefix else name](p, k, m)
        for pieces in (1, 3):
            assert depth(topology, call, Choice(name, pieces)) <= bound, (name, pieces)


def _widths(group):
    """Roundings of a tree that adds one group's members one after the other, on the deepest path."""
    below = max((_widths(child) for child in group.children), default=0)
    return below + max(len(group.children) or len(group.ranks), 1) - 1


@pytest.mark.parametrize("collective", REDUCING)
def test_levels_add_up(collective):
    """Sites of racks of hosts: each level adds at most one group after the other."""
    hosts = [0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    racks = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4]
    sites = [0] * 8 + [1] * 8
    topology = Topology.group(["host"] * 16, hosts, (), [sites, racks])
    counts = {"vector": (40,), "equal": (5,), "ranks": tuple(range(1, 17))}[ROWS[collective].layout]
    call = Call(collective, 16, counts, 15 if ROWS[collective].rooted else -1)
    for name in algorithms.names(collective):
        most = _widths(topology.tree) if name in ("tree", "split_rail") else 15
        assert depth(topology, call, Choice(name)) <= most, name
