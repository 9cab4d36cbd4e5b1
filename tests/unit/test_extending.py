"""docs/extending.md and its example: an algorithm added in one file is proved, chosen, forced and agreed upon."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import topologies
from test_bootstrap import FACTS

from ucc_hetero import AgreementError
from ucc_hetero.bootstrap.agreement import judge
from ucc_hetero.planner.algorithms import registry
from ucc_hetero.planner.collectives import Call
from ucc_hetero.planner.select import Choice, Tuning, candidates, choose, make_plan
from ucc_hetero.planner.topology import Topology
from ucc_hetero.planner.validate import validate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_algorithm.py"
TWO = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])


@pytest.fixture(scope="module")
def own() -> Iterator[ModuleType]:
    """The example, registered for the tests of this module only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_TABLE", dict(registry._TABLE))
        spec = importlib.util.spec_from_file_location("own_algorithm", EXAMPLE)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@given(topologies(), st.integers(0, 300), st.booleans())
def test_its_plans_are_right(own: ModuleType, topology: Topology, count: int, in_place: bool) -> None:
    call = Call("allreduce", topology.size, (count,))
    validate(make_plan.__wrapped__(topology, call, Choice("by_rank_0")), topology, call, in_place)


def test_it_runs_where_it_says(own: ModuleType) -> None:
    topology = replace(TWO)  # choices are kept by topology and tuning
    tune = Tuning()
    assert choose(topology, "allreduce", own.LIMIT, tune) == Choice("by_rank_0")
    assert choose(topology, "allreduce", own.LIMIT + 1, tune).algorithm != "by_rank_0"
    assert choose(topology, "bcast", 8, tune).algorithm != "by_rank_0"
    assert Choice("by_rank_0") in candidates(topology, "allreduce", 8)
    forced = Tuning.parse("allreduce:@by_rank_0:1m-inf")
    assert choose(topology, "allreduce", 1 << 20, forced).algorithm == "by_rank_0"


def test_ranks_must_add_the_same(own: ModuleType) -> None:
    assert registry.added() == ("allreduce@by_rank_0",)
    mine = replace(FACTS, algorithms=" ".join(registry.added()))
    with pytest.raises(AgreementError, match="(?s)algorithms.*allreduce@by_rank_0.*register the same"):
        judge([mine, FACTS])
