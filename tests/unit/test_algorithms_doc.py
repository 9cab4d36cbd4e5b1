"""docs/algorithms.md says of every algorithm what its plan does: its table is computed from plans and compared."""

from __future__ import annotations

from pathlib import Path

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.planner.cost import wire_bytes
from ucc_hetero.planner.select import Choice, example_call, make_plan
from ucc_hetero.planner.topology import Topology

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
#: Four hosts of two ranks each; the vector, or all blocks together, has this many bytes.
HOSTS = Topology.group(["host"] * 8, [0, 0, 1, 1, 2, 2, 3, 3])
NBYTES = 1 << 20


def row(collective: str, name: str) -> str:
    plan = make_plan(HOSTS, example_call(HOSTS, collective, NBYTES), Choice(name))
    wire = wire_bytes(plan, HOSTS)
    stages = len(plan.fragments[0].stages) if plan.fragments else 0
    shares = (max(wire.host_out), max(wire.host_in), max(wire.bridge), max(wire.native))
    return f"| {collective} | {name} | {stages} | " + " | ".join(f"{n / NBYTES:.2f}" for n in shares) + " |"


def table() -> str:
    """The table of docs/algorithms.md."""
    names = [n for n in ROWS if n not in ("gatherv", "scatterv", "allgatherv", "alltoallv", "reduce_scatter")]
    return "\n".join(row(collective, name) for collective in names for name in algorithms.names(collective))


def test_the_page_has_the_computed_table() -> None:
    assert table() in PAGE.read_text(), f"docs/algorithms.md should have:\n{table()}"
