"""Plans as data: posting order and JSON."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import calls, topologies

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import Call
from ucc_hetero.planner.plan import LEAST_IN_FLIGHT, Blocks, Fragment, Plan, Region
from ucc_hetero.planner.select import Choice, make_plan
from ucc_hetero.planner.topology import Topology


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_json_and_posting_order(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    call = data.draw(calls(topology))
    name = data.draw(st.sampled_from(algorithms.names(call.collective)))
    plan = make_plan.__wrapped__(topology, call, Choice(name, data.draw(st.integers(1, 4))))
    assert Plan.from_json(plan.to_json()) == plan
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "fragments": [[[["sum"]]]]}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan in JSON"):
        Plan.from_json(text)


def test_blocks_are_a_sequence_of_regions() -> None:
    blocks = Blocks("recv", 10, 2, 5, 3)
    assert len(blocks) == 3 and list(blocks) == [Region("recv", at, 2) for at in (10, 15, 20)]
    assert [blocks[i] for i in range(3)] == list(blocks)
    for i in (-1, 3):
        with pytest.raises(IndexError):
            blocks[i]


def test_fragments_are_values() -> None:
    assert Fragment(()) == Fragment(()) and hash(Fragment(())) == hash(Fragment(()))
