"""How many roundings deep the algorithms add: computed from their plans, and no more than docs/numerics.md promises."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
from plan_cases import Simulation, Vector

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS, Call, Shape
from ucc_hetero.planner.select import Choice, make_plan
from ucc_hetero.planner.topology import Group, Topology

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
    "ordered": ("⌈log₂ P⌉", lambda p, k, m: ceil(log2(p))),
}

#: Vendors and hosts of the ranks.
LAYOUTS = (
    ("nnaa", "0000"),
    ("nana", "0000"),
    ("nnna", "0000"),
    ("nnaah", "00000"),
    ("nnnaaahh", "00001111"),
    ("nahnahna", "00000000"),
    ("hhhhhhhhh", "001122334"),
    ("hhhhhhhhhhhhhhhh", "0011223344556677"),
)
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


@pytest.mark.parametrize(("vendors", "hosts"), LAYOUTS, ids=[f"{v}-{h}" for v, h in LAYOUTS])
@pytest.mark.parametrize("collective", REDUCING)
def test_no_deeper_than_promised(collective: str, vendors: str, hosts: str) -> None:
    topology = Topology.group([VENDORS[v] for v in vendors], [int(h) for h in hosts])
    p, k, m = topology.size, len(topology.islands), max(island.size for island in topology.islands)
    counts = {"vector": (40,), "equal": (5,), "ranks": tuple(range(1, p + 1))}[ROWS[collective].layout]
    call = Call(collective, p, counts, p - 1 if ROWS[collective].rooted else -1)
    for name in algorithms.names(collective):
        bound = BOUNDS["ordered" if ROWS[collective].prefix else name][1](p, k, m)
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
