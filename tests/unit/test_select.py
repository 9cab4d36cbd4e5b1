"""Choice of algorithms: the TUNE grammar, the measured table, defaults, and plans from the cache."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import topologies

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS, Call
from ucc_hetero.planner.rules import (
    Measured,
    PairRule,
    Rule,
    Wires,
    load_table,
    match,
    pair_path,
    parse_tune,
    save_table,
)
from ucc_hetero.planner.select import Choice, Tuning, agreed, choose, make_plan, reason
from ucc_hetero.planner.topology import Topology, link_weights
from ucc_hetero.types import Transport

DIRECT, STAGED = Transport

ONE = Topology.group(["nvidia"] * 4, [0, 0, 1, 1])
TWO = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
SAME_HOST = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0] * 4)
MIB = 1 << 20


def test_grammar() -> None:
    assert parse_tune("allreduce:0-64k:@flat#allreduce,bcast:64k-inf:@split_rail:fragments=4") == (
        Rule("allreduce", 0, 65536, "flat"),
        Rule("allreduce", 65536, math.inf, "split_rail", 4),
        Rule("bcast", 65536, math.inf, "split_rail", 4),
    )
    assert parse_tune("@tree:nvidia,amd:[2-8]:reduce:100") == (
        Rule("reduce", 0, math.inf, "tree", vendors=("nvidia", "amd"), ranks=(2, 8), score=100),
    )
    assert parse_tune("") == parse_tune(" # ") == ()


@pytest.mark.parametrize("text, message", [
    ("allreduce:0-4k", "'allreduce:0-4k': no algorithm"),
    ("0-4k:@flat", "no collective"),
    ("allreduce:@flat#bcast:@nothing", "'bcast:@nothing': bcast has no @nothing; it has @"),
    ("allreduce:4k-1k:@flat", "range '4k-1k' ends before it begins"),
    ("allreduce:4q-8q:@flat", "'4q' is not a size"),
    ("allreduce:cuda:@flat", "'cuda' is not a collective, byte range, vendor"),
    ("allreduce:@flat:@tree", "'@tree' gives the algorithm a second time"),
    ("allreduce:@flat:fragments=0", "'fragments=0' should be a number from 1 to 1024"),
    ("allreduce:@", "'@' is not a collective"),
    ("scan:@split_rail", "scan has no @split_rail; it has @flat"),
])  # fmt: skip
def test_grammar_names_the_bad_part(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tune(text)


def test_highest_score_holds_then_the_last() -> None:
    rules = parse_tune("allreduce:@flat:10#allreduce:@tree:20#allreduce:@split_rail:20#allreduce:@flat:0")
    best = match(rules, TWO, "allreduce", 100)
    assert best is not None and best.algorithm == "split_rail"
    assert match(rules, TWO, "bcast", 100) is None
    only_nvidia = parse_tune("allreduce:nvidia:@flat")
    assert match(only_nvidia, ONE, "allreduce", 1) is not None and match(only_nvidia, TWO, "allreduce", 1) is None
    assert match(parse_tune("allreduce:[5-8]:@flat"), TWO, "allreduce", 1) is None


def test_defaults() -> None:
    assert choose(ONE, "allreduce", 64 * MIB) == Choice("flat")
    assert choose(TWO, "allreduce", 8) == Choice("tree")
    assert choose(TWO, "allreduce", 4 * MIB) == Choice("split_rail", 8)
    assert choose(TWO, "allreduce", 64 * MIB) == Choice("split_rail", 128)
    assert choose(SAME_HOST, "allreduce", 64 * MIB) == Choice("split_rail", 1)
    unlike = Topology.group(["host"] * 3, [0, 1, 2], [1, 4, 4])
    assert choose(unlike, "allreduce", 64 * MIB) == Choice("direct", 128)
    assert choose(unlike, "reduce", 64 * MIB) == Choice("split_rail", 128)
    assert choose(unlike, "bcast", 64 * MIB) == Choice("ring", 85)
    assert choose(unlike, "bcast", 3 * MIB).algorithm == "split_rail"  # too few fragments for a chain
    assert choose(TWO, "bcast", 64 * MIB) == Choice("split_rail", 128)
    uneven = Topology.group(["host"] * 5, [0, 0, 1, 1, 2])
    shared = Topology.group(["host"] * 5, [0, 0, 1, 1, 2], link_weights([0, 0, 1, 1, 2], [4000] * 5))
    assert choose(shared, "allreduce", 64 * MIB) == Choice("split_rail", 128)  # links of hosts, of which all are alike
    for collective in ("allgather", "reduce_scatter_block"):
        assert choose(uneven, collective, 64 * MIB).algorithm == "ring"
        assert choose(unlike, collective, 64 * MIB).algorithm == "split_rail"
    assert choose(uneven, "gather", 64 * MIB) == Choice("split_rail")
    many = Topology.group(["host"] * 80, [rank // 16 for rank in range(80)])
    assert choose(many, "alltoall", 256).algorithm == "tree"
    assert choose(many, "alltoall", MIB).algorithm == "split_rail"
    assert choose(uneven, "alltoall", 256).algorithm == "split_rail"
    levels = Topology.group(["nvidia"] * 4, [0, 0, 1, 1], (), [[0, 0, 1, 1]])
    assert choose(levels, "allreduce", 64 * MIB) == Choice("split_rail", 128)
    assert choose(TWO, "scan", 64 * MIB) == Choice("flat")
    assert choose(TWO, "barrier", 0) == Choice("tree")


def test_user_before_measured_before_default() -> None:
    measured = (Rule("allreduce", 0, math.inf, "split_rail", 2),)
    tune = Tuning.parse("allreduce:0-1k:@flat", measured)
    assert choose(TWO, "allreduce", 512, tune=tune) == Choice("flat")
    assert choose(TWO, "allreduce", 1024, tune=tune) == Choice("split_rail", 2)
    assert choose(TWO, "bcast", 8, tune=tune) == Choice("tree")


def test_table_survives_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    rules = (Rule("allreduce", 0, 4096, "tree", 1), Rule("bcast", 4096, math.inf, "split_rail", 8))
    far = ("amd", "nvidia"), False
    pairs = (PairRule(*far, 0, 4096, STAGED), PairRule(("amd", "amd"), True, 8, math.inf, DIRECT))
    save_table(file, TWO, Measured(rules, messages=pairs))
    save_table(file, SAME_HOST, Measured(rules[:1], (4, 4, 1, 1)))
    assert load_table(file.read_text(), TWO) == Measured(rules, messages=pairs)
    assert agreed(TWO, TWO, "", file.read_text())[1].messages == pairs
    assert [pair_path(pairs, *far, n) for n in (0, 4095, 4096)] == [STAGED, STAGED, None]
    assert [pair_path(pairs, ("amd", "amd"), near, 1 << 40) for near in (True, False)] == [DIRECT, None]
    assert load_table(file.read_text(), SAME_HOST) == Measured(rules[:1], (4, 4, 1, 1))
    assert load_table(file.read_text(), ONE) == Measured()
    save_table(file, ONE, Measured(wires=Wires(8, 1 << 20)))
    assert agreed(ONE, ONE, "", file.read_text())[1].wires == Wires(8, 1 << 20)
    for bad in ('"slot": 1000', '"slot": 33554432'):
        with pytest.raises(ValueError, match="not a table of measured choices"):
            load_table(file.read_text().replace('"slot": 1048576', bad), ONE)
    assert list(tmp_path.iterdir()) == [file]


def entry(**fields: object) -> dict[str, object]:
    return {"topologies": {TWO.fingerprint(): {"rules": [], **fields}}}


RULE = {"between": ["amd", "nvidia"], "near": True, "from": 0, "to": 8, "path": "window"}


@pytest.mark.parametrize("change", [
    *({"format": 2}, {"topologies": 3}, {"format": None}, entry(rules=[{}])),
    *(entry(messages=[{"between": ["amd"], "near": True}]), entry(messages=[RULE]), entry(weights=[1])),
])  # fmt: skip
def test_bad_tables_are_refused(change: dict[str, object]) -> None:
    text = json.dumps({"format": 1, "topologies": {}} | change)
    with pytest.raises(ValueError, match="not a table of measured choices"):
        load_table(text, TWO)
    with pytest.raises(ValueError, match="not a table"):
        load_table("{", TWO)


def test_agreed_joins_table_rules_and_weights(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    save_table(file, TWO, Measured((Rule("allreduce", 0, math.inf, "tree", 1, DIRECT),), (3, 3, 1, 1)))
    topology, tune = agreed(TWO, TWO, "allreduce:0-1k:@flat", file.read_text())
    assert topology == Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1], (3, 3, 1, 1))
    found = [(choose(topology, *call, tune=tune), reason(topology, *call, tune=tune)) for call in CALLS]
    assert found == [(Choice("flat"), "user"), (Choice("tree"), "measured"), (Choice("tree"), "default")]
    assert agreed(ONE, TWO, "", "")[0] is TWO


def test_in_one_memory_islands_gain_nothing() -> None:
    plain = Tuning(plain=True)
    assert choose(SAME_HOST, "bcast", 8, tune=plain).algorithm == "flat"
    assert choose(SAME_HOST, "allgather", MIB, tune=plain).algorithm == "flat"
    assert choose(SAME_HOST, "allreduce", 8, tune=plain) == Choice("flat")  # carried by the board
    assert choose(SAME_HOST, "allreduce", 8192, tune=plain).algorithm == "tree"
    assert choose(SAME_HOST, "allreduce", 64 * MIB, tune=plain) == Choice("flat")
    assert choose(TWO, "allreduce", 2048, tune=plain).algorithm == "tree"
    assert choose(TWO, "allreduce", 4096, tune=plain) == Choice("doubling")
    assert choose(TWO, "allreduce", 4096).algorithm == "tree"  # on devices sums are kernels
    for call in (("bcast", 8), ("allreduce", 64 * MIB)):  # between hosts, and between devices
        assert choose(TWO, *call, tune=plain) == choose(TWO, *call)
        assert choose(SAME_HOST, *call).algorithm != "flat"


def test_allreduce_between_hosts_by_its_length() -> None:
    """As measured on emulated links: the fewest rounds, then rails in one piece, then the library's in many."""
    plain = Tuning(plain=True)
    for hosts in ([0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3], list(range(8))):
        topology = Topology.group(["host"] * len(hosts), hosts)
        found = [choose(topology, "allreduce", n << 10, tune=plain) for n in (1, 32, 64, 512, 1024)]
        assert found[:4] == [Choice("doubling"), Choice("doubling"), Choice("ring"), Choice("ring")]
        assert found[4] == Choice("split_rail", 2)
        on_devices = choose(topology, "allreduce", 64 << 10)
        assert on_devices == Choice("tree")
    two = [choose(TWO, "allreduce", n << 10, tune=plain) for n in (1, 32, 64, 512)]
    assert two == [Choice("tree"), Choice("doubling"), Choice("split_rail"), Choice("split_rail")]
    many = Topology.group(["host"] * 16, list(range(16)))
    assert choose(many, "allreduce", 64 << 10, tune=plain).algorithm == "split_rail"  # too many for a ring
    unlike = Topology.group(["host"] * 3, [0, 1, 2], [1, 4, 4])
    assert choose(unlike, "allreduce", 64 << 10, tune=plain).algorithm == "direct"
    assert choose(unlike, "bcast", 64 << 10, tune=plain).algorithm == "tree"
    deep = Topology.group(["host"] * 4, [0, 1, 2, 3], (), [[0, 0, 1, 1]])
    assert choose(deep, "allreduce", 8, tune=plain).algorithm == "tree"


CALLS = (("allreduce", 8), ("allreduce", MIB), ("bcast", 8))


@given(data=st.data(), nbytes=st.integers(0, 1 << 40))
def test_every_default_can_run(data: st.DataObject, nbytes: int) -> None:
    topology = data.draw(topologies())
    collective = data.draw(st.sampled_from(tuple(ROWS)))
    choice = choose(topology, collective, nbytes)
    assert choice.algorithm in algorithms.names(collective) and 1 <= choice.fragments <= 128


def test_huge_flat_plans_are_small() -> None:
    topology = Topology.group(["nvidia"] * 4096, [r // 8 for r in range(4096)])
    plan = make_plan.__wrapped__(topology, Call("alltoall", 4096, (1 << 33,)), Choice("flat"))
    (step,) = plan.fragments[0].stages[0]
    assert step.src[0] is step.src[4095] and step.dst[0] is step.dst[4095]
    assert step.src[0][4095].offset == 4095 << 33


def test_queued_calls() -> None:
    """No collective crosses the bridge among devices whose streams do all of it; short calls are one kernel."""
    topology = Topology.group(["nvidia", "amd"] * 2, [0] * 4)
    several = Topology.group(["nvidia", "amd"] * 6, [0] * 12)  # more than one kernel does
    queued, plain = Tuning(queued=True), Tuning()
    found = [choose(t, "allreduce", n, queued) for t in (topology, several) for n in (8, 1 << 20)]
    assert [choice.algorithm for choice in found] == ["flat", "split_rail", "tree", "split_rail"]
    assert all(choice.queued for choice in found)
    assert choose(topology, "allreduce", 8, plain) == Choice("tree")
    pair = Topology.group(["nvidia", "amd"], [0] * 2)  # nothing goes on in islands beside the crossing
    fragments = [choose(t, "allreduce", 1 << 28, queued).fragments for t in (pair, topology)]
    assert fragments[0] == 1 < fragments[1]
    plan = make_plan(topology, Call("allreduce", 4, (1 << 24,)), found[1])
    kinds = {step.kind for f in plan.fragments for stage in f.stages for step in stage if step.link == "bridge"}
    assert kinds == {"message"}
