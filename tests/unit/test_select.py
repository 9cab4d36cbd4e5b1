"""Choice of algorithms: the TUNE grammar, the measured table, defaults, cached plans; the table of collectives."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import topologies

from ucc_hetero.env import parse_size
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS, Call, check
from ucc_hetero.planner.plan import KINDS
from ucc_hetero.planner.rules import Measured, Rule, load_table, match, parse_tune, save_table
from ucc_hetero.planner.select import Choice, Tuning, agreed, choose, make_plan, reason
from ucc_hetero.planner.topology import Topology, link_weights

ONE = Topology.group(["nvidia"] * 4, [0, 0, 1, 1])
TWO = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1])
SAME_HOST = Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0] * 4)
MIXED = Topology.group(["nvidia", "amd"] * 2, [0] * 4)
MIB = 1 << 20


def test_grammar():
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
    ("allreduce:0-4k", "'allreduce:0-4k': no algorithm"), ("0-4k:@flat", "no collective"),
    ("allreduce:@flat#bcast:@nothing", "'bcast:@nothing': bcast has no @nothing; it has @"),
    ("allreduce:4k-1k:@flat", "range '4k-1k' ends before it begins"), ("allreduce:4q-8q:@flat", "'4q' is not a size"),
    ("allreduce:cuda:@flat", "'cuda' is not a collective, byte range, vendor"),
    ("allreduce:@flat:@tree", "'@tree' gives the algorithm a second time"),
    ("allreduce:@flat:fragments=0", "'fragments=0' should be a number from 1 to 1024"),
    ("allreduce:@", "'@' is not a collective"), ("scan:@split_rail", "scan has no @split_rail; it has @flat"),
])  # fmt: skip
def test_grammar_names_the_bad_part(text, message):
    with pytest.raises(ValueError, match=message):
        parse_tune(text)


def test_highest_score_holds_then_the_last():
    rules = parse_tune("allreduce:@flat:10#allreduce:@tree:20#allreduce:@split_rail:20#allreduce:@flat:0")
    best = match(rules, TWO, "allreduce", 100)
    assert best is not None and best.algorithm == "split_rail"
    assert match(rules, TWO, "bcast", 100) is None
    only_nvidia = parse_tune("allreduce:nvidia:@flat")
    assert match(only_nvidia, ONE, "allreduce", 1) is not None and match(only_nvidia, TWO, "allreduce", 1) is None
    assert match(parse_tune("allreduce:[5-8]:@flat"), TWO, "allreduce", 1) is None


def islands(*hosts, **more):
    """Ranks without devices on these hosts."""
    return Topology.group(["host"] * len(hosts), hosts, **more)


PLACES = {
    "one island": Topology.group(["host"] * 4, [0] * 4), "one vendor": ONE,
    "two islands": TWO, "one host": SAME_HOST, "mixed host": MIXED,
    "pair": Topology.group(["nvidia", "amd"], [0] * 2), "full host": Topology.group(["nvidia", "amd"] * 6, [0] * 12),
    "hosts in a rack": Topology.group(["nvidia"] * 4, [0, 0, 1, 1], (), [[0, 0, 1, 1]]),
    "2, 2 and 1": islands(0, 0, 1, 1, 2), "unlike links": islands(0, 1, 2, weights=[1, 4, 4]),
    "ranks that share links": islands(0, 0, 1, 1, 2, weights=link_weights([0, 0, 1, 1, 2], [4000] * 5)),
    "4 of 2": islands(0, 0, 1, 1, 2, 2, 3, 3), "8 of 1": islands(*range(8)), "16 of 1": islands(*range(16)),
    "5 of 16": islands(*(rank // 16 for rank in range(80))), "racks": islands(0, 1, 2, 3, levels=[[0, 0, 1, 1]]),
}  # fmt: skip
TUNINGS = {"devices": Tuning(), "memory": Tuning(plain=True), "streams": Tuning(queued=True)}
#: As measured on emulated links: first the algorithm with the fewest rounds, then rails in one piece, then the
#: library's in many.
BY_LENGTH = "allreduce 1k doubling, 32k doubling, 64k ring, 512k ring, 1m split_rail/2"
#: Where the data and the ranks are -> algorithms of calls by their bytes, with fragments if there are several.
CHOICES = [
    ("devices", "one vendor", "allreduce 64m flat"),
    ("devices", "two islands", "allreduce 8 tree, 4k tree, 64k split_rail, 4m split_rail/8, 64m split_rail/128; "
                               "bcast 8 tree, 64m split_rail/128; scan 64m flat; barrier 0 tree"),
    ("devices", "one host", "allreduce 8 tree, 64m split_rail; bcast 8 tree; allgather 1m split_rail"),
    # A chain needs more fragments than three MiB have.
    ("devices", "unlike links", "allreduce 64m direct/128; reduce 64m split_rail/128; bcast 3m split_rail/6, "
                                "64m ring/85; allgather 64m split_rail/128; reduce_scatter_block 64m split_rail/128"),
    ("devices", "2, 2 and 1", "allreduce 64k tree; allgather 64m ring/85; reduce_scatter_block 64m ring/85; "
                              "gather 64m split_rail; alltoall 256 split_rail"),
    ("devices", "ranks that share links", "allreduce 64m split_rail/128"),  # hosts form groups, as they are alike
    ("devices", "hosts in a rack", "allreduce 64m split_rail/128"),
    ("devices", "5 of 16", "alltoall 256 tree, 1m split_rail/2"),
    ("devices", "4 of 2", "allreduce 64k tree; alltoall 64m split_rail/128"),
    ("devices", "8 of 1", "allreduce 64k tree"),  # sums are kernels
    # In one memory islands gain nothing; the board carries short calls.
    ("memory", "one host", "bcast 8 flat; allgather 64m flat; allreduce 8 flat, 8k tree, 16m flat, 64m flat/64"),
    # What is longer than libucc's scratch goes in pieces that stay in caches.
    ("memory", "one island", "reduce 2m flat, 4m split_rail, 64m split_rail/64; allreduce 16m flat, 64m flat/64; "
                             "bcast 256m flat/128; reduce_scatter 64m flat/64; alltoall 64m flat"),
    ("memory", "two islands", "bcast 8 tree; allreduce 1k tree, 2k tree, 4k doubling, 32k doubling, 64k split_rail, "
                              "512k split_rail, 64m split_rail/128"),
    # Bundles save messages, but copy long blocks twice more.
    ("memory", "2, 2 and 1", BY_LENGTH),
    ("memory", "4 of 2", f"{BY_LENGTH}; alltoall 128k split_rail, 256k flat, 64m flat; alltoallv 256k flat"),
    ("memory", "8 of 1", BY_LENGTH),
    ("memory", "16 of 1", "allreduce 64k split_rail"),  # too many islands for a ring
    ("memory", "unlike links", "allreduce 64k direct; bcast 64k tree"), ("memory", "racks", "allreduce 8 tree"),
    # Short calls are one kernel of limited size; in islands of one rank nothing overlaps the traffic between islands.
    ("streams", "mixed host", "allreduce 8 flat, 1m split_rail, 256m split_rail/4"),
    ("streams", "full host", "allreduce 8 tree, 1m split_rail"), ("streams", "pair", "allreduce 256m split_rail"),
]  # fmt: skip


@pytest.mark.parametrize("data, place, calls", CHOICES, ids=[f"{data}, {place}" for data, place, _ in CHOICES])
def test_defaults(data, place, calls):
    tune = TUNINGS[data]
    for collective, sizes in (call.split(" ", 1) for call in calls.split("; ")):
        for size, name, cut in re.findall(r"(\w+) (\w+)/?(\d*)", sizes):
            wanted = Choice(name, int(cut or 1), tune.queued)
            assert choose(PLACES[place], collective, int(parse_size(size)), tune) == wanted, (collective, size)


def test_user_before_measured_before_default():
    measured = (Rule("allreduce", 0, math.inf, "split_rail", 2),)
    tune = Tuning(parse_tune("allreduce:0-1k:@flat"), measured)
    assert choose(TWO, "allreduce", 512, tune=tune) == Choice("flat")
    assert choose(TWO, "allreduce", 1024, tune=tune) == Choice("split_rail", 2)
    assert choose(TWO, "bcast", 8, tune=tune) == Choice("tree")


def test_table_survives_a_file(tmp_path):
    file = tmp_path / "tuned.json"
    measured = (Rule("allreduce", 0, 4096, "tree", 1), Rule("bcast", 4096, math.inf, "split_rail", 8))
    save_table(file, TWO, Measured(measured))
    save_table(file, SAME_HOST, Measured(measured[:1], (4, 4, 1, 1)))
    assert load_table(file.read_text(), TWO) == Measured(measured)
    assert load_table(file.read_text(), SAME_HOST) == Measured(measured[:1], (4, 4, 1, 1))
    assert load_table(file.read_text(), ONE) == Measured()
    assert list(tmp_path.iterdir()) == [file]


def entry(**fields):
    return {"topologies": {TWO.fingerprint(): {"rules": [], **fields}}}


@pytest.mark.parametrize("change", [
    {"format": 1}, {"topologies": 3}, {"format": None}, entry(rules=[{}]), entry(rules=["bcast"]), entry(weights=[1]),
])  # fmt: skip
def test_bad_tables_are_refused(change):
    text = json.dumps({"format": 2, "topologies": {}} | change)
    with pytest.raises(ValueError, match="not a table of measured choices"):
        load_table(text, TWO)
    with pytest.raises(ValueError, match="not a table"):
        load_table("{", TWO)


def test_agreed_joins_table_rules_and_weights(tmp_path):
    file = tmp_path / "tuned.json"
    save_table(file, TWO, Measured((Rule("allreduce", 0, math.inf, "tree", 1),), (3, 3, 1, 1)))
    topology, tune = agreed(TWO, TWO, "allreduce:0-1k:@flat", file.read_text())
    assert topology == Topology.group(["nvidia"] * 2 + ["amd"] * 2, [0, 0, 1, 1], (3, 3, 1, 1))
    found = [(choose(topology, *call, tune=tune), reason(topology, *call, tune=tune)) for call in CALLS]
    assert found == [(Choice("flat"), "user"), (Choice("tree"), "measured"), (Choice("tree"), "default")]
    assert agreed(ONE, TWO, "", "")[0] is TWO


CALLS = (("allreduce", 8), ("allreduce", MIB), ("bcast", 8))


@given(data=st.data(), nbytes=st.integers(0, 1 << 40))
def test_every_default_can_run(data, nbytes):
    topology = data.draw(topologies())
    collective = data.draw(st.sampled_from(tuple(ROWS)))
    choice = choose(topology, collective, nbytes)
    assert choice.algorithm in algorithms.names(collective) and 1 <= choice.fragments <= 128


def test_huge_flat_plans_are_small():
    topology = Topology.group(["nvidia"] * 4096, [r // 8 for r in range(4096)])
    plan = make_plan.__wrapped__(topology, Call("alltoall", 4096, (1 << 33,)), Choice("flat"))
    (step,) = plan.fragments[0].stages[0]
    assert step.src[0] is step.src[4095] and step.dst[0] is step.dst[4095]
    assert step.src[0][4095].offset == 4095 << 33


def test_queued_calls():
    """If the devices' streams do all work, no collective crosses the bridge."""
    plan = make_plan(MIXED, Call("allreduce", 4, (1 << 24,)), choose(MIXED, "allreduce", MIB, TUNINGS["streams"]))
    kinds = {step.kind for f in plan.fragments for stage in f.stages for step in stage if step.link == "bridge"}
    assert kinds == {"message"}


# --- the table of collectives -----------------------------------------------------------------------------------------


def test_ucc_types():
    """``ucc_coll_type_t``: one bit each, in alphabetical order except for fanin and fanout."""
    names = (
        "allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "barrier", "bcast", "fanin", "fanout",
        "gather", "gatherv", "reduce", "reduce_scatter", "reduce_scatterv", "scatter", "scatterv",
    )  # fmt: skip
    value = {name: 1 << bit for bit, name in enumerate(names)}
    uneven = {"allgather", "alltoall", "gather", "reduce_scatter"}
    forms = {name: (value[name], value[name + "v" * (name in uneven)]) for name in KINDS if name in value}
    forms["scatter"] = (value["scatterv"],) * 2  # libucc's TL/UCP has no SCATTER
    assert {name: (kind.ucc, kind.ucc_v) for name, kind in KINDS.items() if kind.ucc} == forms
    assert {name for name, row in ROWS.items() if not row.step} == {"scan", "exscan"}


@pytest.mark.parametrize("call, text", [
    (Call("allsum", 2, (1,)), "'allsum' is not one of barrier"), (Call("allreduce", 0, (1,)), "at least one"),
    (Call("allreduce", 2, ()), "takes 1 counts, got 0"), (Call("gatherv", 3, (1, 2), 0), "takes 3 counts, got 2"),
    (Call("alltoallv", 2, (1, 2, 3)), "takes 4 counts"), (Call("scatterv", 2, (1, -2), 0), r"counts\[1\] is -2"),
    (Call("bcast", 2, (1,), 2), "root 2 is not a rank of a communicator of 2"), (Call("bcast", 2, (1,)), "root -1"),
    (Call("allreduce", 2, (1,), 0), "has no root"),
])  # fmt: skip
def test_calls_that_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        check(call)
