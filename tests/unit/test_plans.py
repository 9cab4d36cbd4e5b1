"""Every registered algorithm on random topologies and calls: proved symbolically, and run with numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import (
    Simulation,
    calls,
    deep_topologies,
    drop,
    equal_islands,
    many_islands,
    mutate,
    steps,
    substitute,
    topologies,
)

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.algorithms import alltoall
from ucc_hetero.planner.collectives import ROWS, Call
from ucc_hetero.planner.plan import Blocks, Operand, Plan
from ucc_hetero.planner.select import Choice, make_plan
from ucc_hetero.planner.topology import Topology
from ucc_hetero.planner.validate import InvalidPlan, validate

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
ORDERED = tuple(name for name, row in ROWS.items() if row.prefix)

EVERY = [(collective, name) for collective in ROWS for name in algorithms.names(collective)]


def plan_of(topology: Topology, call: Call, name: str, fragments: int) -> Plan:
    # Past the cache: hypothesis would only fill it.
    return make_plan.__wrapped__(topology, call, Choice(name, fragments))


def is_ordered(collective: str, name: str) -> bool:
    return collective in ORDERED or name == "ordered"


def test_every_collective_has_a_flat_and_a_hierarchical_algorithm() -> None:
    for collective in ROWS:
        names = algorithms.names(collective)
        assert "flat" in names
        assert collective in ORDERED or {"tree", "split_rail"} & set(names)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=25, suppress_health_check=SLOW)
@given(data=st.data())
def test_valid(collective: str, name: str, data: st.DataObject) -> None:
    topology = data.draw(topologies())
    call = data.draw(calls(topology, (collective,)))
    plan = plan_of(topology, call, name, data.draw(st.integers(1, 4)))
    for in_place in (False, True):
        validate(plan, topology, call, in_place, is_ordered(collective, name))


def test_a_rank_that_passes_on_as_much_as_it_has_still_gets_its_own() -> None:
    """Rank 5, alone in its group, and a rail that moves another's element of its: as long as its own block."""
    vendors = ["nvidia", "amd", "nvidia", "amd", "nvidia", "nvidia", "nvidia", "host"]
    groups = [[0] * 8, [0, 0, 0, 0, 0, 1, 0, 0]]
    topology = Topology.group(vendors, [0] * 8, (1, 1, 1, 1, 1, 2, 3, 1), groups)
    call = Call("allgatherv", 8, (2, 2, 5, 0, 1, 1, 5, 5))
    for fragments in (1, 2, 3):
        validate(plan_of(topology, call, "split_rail", fragments), topology, call)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=10, suppress_health_check=SLOW)
@given(data=st.data(), in_place=st.booleans(), seed=st.integers(0, 1 << 32))
def test_right_in_any_order(collective: str, name: str, data: st.DataObject, in_place: bool, seed: int) -> None:
    topology = data.draw(topologies(6))
    call = data.draw(calls(topology, (collective,), 9))
    simulation = Simulation(plan_of(topology, call, name, data.draw(st.integers(1, 3))), call, in_place, seed)
    simulation.run()
    assert simulation.right()


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=2, suppress_health_check=SLOW)
@given(data=st.data())
def test_valid_with_many_islands(collective: str, name: str, data: st.DataObject) -> None:
    topology = data.draw(many_islands())
    call = data.draw(calls(topology, (collective,), 300))
    validate(plan_of(topology, call, name, data.draw(st.integers(1, 2))), topology, call)


@pytest.mark.parametrize("collective, name", [pair for pair in EVERY if pair[1] == "split_rail"])
@pytest.mark.parametrize("messages", [0, alltoall.MOST_MESSAGES])
@settings(max_examples=15, suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_valid_with_equal_islands(
    collective: str, name: str, messages: int, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alltoall, "MOST_MESSAGES", messages)
    topology = data.draw(equal_islands())
    call = data.draw(calls(topology, (collective,)))
    if ROWS[collective].layout == "ranks" and data.draw(st.booleans()):
        call = call._replace(counts=(call.counts[0],) * topology.size)
    plan = plan_of(topology, call, name, data.draw(st.integers(1, 4)))
    for in_place in (False, True):
        validate(plan, topology, call, in_place)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=6, suppress_health_check=SLOW)
@given(data=st.data())
def test_valid_on_many_levels(collective: str, name: str, data: st.DataObject) -> None:
    topology = data.draw(deep_topologies())
    call = data.draw(calls(topology, (collective,)))
    plan = plan_of(topology, call, name, data.draw(st.integers(1, 3)))
    for in_place in (False, True):
        validate(plan, topology, call, in_place, is_ordered(collective, name))


def shape_of(operand: Operand) -> object:
    """What of another rank's operand this rank's library call depends on: its form."""
    return (type(operand), operand.stride == operand.count) if isinstance(operand, Blocks) else type(operand)


@pytest.mark.parametrize("collective, name", EVERY)
@settings(max_examples=8, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_rank_s_own_plan_is_its_part_of_the_whole(collective: str, name: str, data: st.DataObject) -> None:
    topology = data.draw(st.one_of(topologies(), deep_topologies(), equal_islands()))
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


@settings(max_examples=400, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 1 << 32), in_place=st.booleans())
def test_mutants_that_pass_are_right(data: st.DataObject, seed: int, in_place: bool) -> None:
    """A plan with a mistake is refused, unless the mistake changes nothing in any order the plan allows."""
    topology = data.draw(topologies(6))
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
    ordered = is_ordered(collective, name)
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
            validate(substitute(plan, f, s, i, _replace(plan, s, **change)), topology, call)

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


def _replace(plan: Plan, stage: int, **change: object) -> object:
    from dataclasses import replace

    return replace(plan.fragments[0].stages[stage][0], **change)


SPELLED = [pair for pair in EVERY if pair[1] != "ordered"]


@pytest.mark.parametrize("collective, name", SPELLED)
@settings(max_examples=12, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_spelled_out(collective: str, name: str, data: st.DataObject, seed: int) -> None:
    """Without collectives over bridges: valid, right in any order, and a rank's own plan is its part of the whole."""
    topology = data.draw(topologies(7))
    call = data.draw(calls(topology, (collective,), 30))
    choice = Choice(name, data.draw(st.integers(1, 3)), "window")
    plan = make_plan.__wrapped__(topology, call, choice)
    assert all(step.kind in ("message", "barrier") or step.link != "bridge" for *_, step in steps(plan))
    for in_place in (False, True):
        validate(plan, topology, call, in_place, is_ordered(collective, name))
        simulation = Simulation(plan, call, in_place, seed)
        simulation.run()
        assert simulation.right()
    rank = data.draw(st.integers(0, topology.size - 1))
    mine = make_plan.__wrapped__(topology, call, choice, rank)
    assert mine.sizes[rank] == plan.sizes[rank]
    for (f, _, i, one), (g, _, j, other) in zip(mine.program(rank), plan.program(rank), strict=True):
        assert (f, one.kind, one.ranks, one.link, i) == (g, other.kind, other.ranks, other.link, j)
        assert (one.src[i], one.dst[i]) == (other.src[i], other.dst[i])
