"""``plan`` and ``topo``: their output for layouts and machines, and refusals; the rules that ``tune`` makes."""

import itertools
import json
from pathlib import Path

import pytest

from ucc_hetero.__main__ import main
from ucc_hetero.cli.plan import facts, render
from ucc_hetero.cli.topo import DrawnHost, draw, tree
from ucc_hetero.cli.tune import Finding, rules_of
from ucc_hetero.machine import launchers
from ucc_hetero.machine.discover import Accelerator, Machine, Nic
from ucc_hetero.planner.rules import Rule
from ucc_hetero.planner.select import Choice
from ucc_hetero.planner.topology import Topology

DATA = Path(__file__).parents[1] / "data"
TWO = Topology.group(["host"] * 4, [0, 0, 1, 1])
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in (*launchers.places("WORLD_SIZE"), "UCCH_EMULATE"):
        monkeypatch.delenv(name, raising=False)


def test_facts_count_bytes_on_the_links():
    found = facts(TWO, "allreduce", 16 * MIB)
    assert (found["algorithm"], found["fragments"], found["by"]) == ("split_rail", 32, "default")
    assert found["wire"]["host_out"] == found["wire"]["host_in"] == [16 * MIB] * 2
    assert [(row["kind"], row["link"], len(row["teams"])) for row in found["stages"]] == [
        ("reduce_scatter", "native", 2),
        ("allreduce", "bridge", 2),
        ("allgather", "native", 2),
    ]
    assert json.loads(json.dumps(found)) == found
    text = render(found)
    assert "split_rail in 32 fragments" in text and "host 1: 16 MiB leave, 16 MiB enter" in text
    assert "measured   2.00 ms, median of 9" in render(found | {"measured": {"median": 2e-3, "best": 1e-3, "calls": 9}})


def test_plan_command(capsys):
    assert main(["plan", "allreduce", "1M", "--vendors", "nvidia:2,amd:2", "--hosts", "2,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["islands"] == "nvidia[0-1]@0 amd[2-3]@1" and found["bytes"] == MIB
    assert main(["plan", "bcast", "64K", "--hosts", "2,2", "--algorithm", "flat"]) == 0
    assert "flat in 1 fragment (chosen by: command line)" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["plan", "allreduce", "1M"], "run it under mpirun, or give --vendors"),
    (["plan", "allreduce", "1M", "--hosts", "2,2", "--run"], "start it under mpirun"),
    (["plan", "allreduce", "1M", "--hosts", "2,2", "--algorithm", "magic"], "no algorithm 'magic'"),
    (["plan", "allreduce", "1M", "--vendors", "nvidia:2", "--hosts", "2,2"], "places 2 ranks, but there are 4"),
    (["plan", "allreduce", "1M", "--hosts", "2,2", "--fragments", "3"], "--fragments 3: is of --algorithm"),
    (["plan", "allreduce", "inf", "--hosts", "2,2"], "'inf' is no number of bytes"),
    (["tune", "--sizes", "64:inf"], "'inf' is no number of bytes"),
    (["plan", "allreduce", "1M", "--vendors", "nvidia:x"], "'nvidia:x' should be vendor:ranks"),
    (["plan", "allreduce", "1M", "--hosts", "2,x"], "--hosts 2,x: must be numbers"),
    (["trace", "/"], "/ is a folder"),
    (["plan", "allreduce", "1M", "--hosts", "0"], "--hosts 0: must be numbers from 1 on"),
    (["plan", "allreduce", "1M", "--hosts", "2,2", "--weights", "1;1"], "--weights 1;1: must be numbers"),
    (["topo", "--facts", "/no such folder/facts"], "/no such folder/facts: No such file"),
    (["topo", "--record", "/no such folder/facts"], "/no such folder/facts: No such file"),
    (["topo", "--facts", __file__], f"--facts {__file__}: not a record"),
    (["tune", "--sizes", "0:1M"], "--sizes 0:1M: no size from 0 (1 or more)"),
    (["tune", "--file", "/no such folder/rules"], "--file /no such folder/rules: its folder is not there"),
])  # fmt: skip
def test_commands_say_what_is_wrong(words, message, capsys):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_tree_and_drawing():
    nics = (Nic("mlx5_0", "infiniband", 400_000, "0000:18:00.0", 0), Nic("eth0", "ethernet", 0))
    gpu = Accelerator("nvidia", "0000:1b:00.0", "NVIDIA H200", numa=0)
    machine = Machine(nics, (gpu,), ((0, "0-7"), (1, "8-15")), False, ((gpu.pci, nics[0].pci, "switch"),))
    topology = Topology.group(["nvidia", "amd"], [0, 0])
    text = draw(tree([DrawnHost("one", machine, [(0, "nvidia", 0), (1, "amd", 1)])], topology))
    assert text.splitlines() == [
        "host 0 one",
        "├─ NUMA node 0: cores 0-7",
        "│  ├─ device 0000:1b:00.0: nvidia NVIDIA H200, same switch as mlx5_0",
        "│  ├─ port mlx5_0: infiniband, 400 Gbit/s, 0000:18:00.0",
        "│  └─ port eth0: ethernet, speed unknown, virtual",
        "├─ NUMA node 1: cores 8-15",
        "├─ rank 0: nvidia memory on device 0, island 0",
        "└─ rank 1: amd memory on device 1, island 1",
        f"islands ({topology.fingerprint()})",
        "├─ island 0: nvidia, rank 0",
        "└─ island 1: amd, rank 1",
    ]


def test_topo_of_a_record(tmp_path, capsys):
    assert main(["topo", "--facts", str(DATA / "h200x4.json")]) == 0
    assert capsys.readouterr().out.count("nvidia NVIDIA H200") == 4
    assert main(["topo", "--record", str(tmp_path / "here.json")]) == 0
    here = capsys.readouterr().out
    assert main(["topo", "--facts", str(tmp_path / "here.json")]) == 0
    assert capsys.readouterr().out == here


def finding(nbytes, **seconds):
    return Finding("allreduce", nbytes, Choice("tree"), {Choice(name): t for name, t in seconds.items()})


def test_noise_makes_no_rules():
    """Five samples each, as a busy machine gave them for one and the same algorithm; then a clear difference."""
    default, other = Choice("tree"), Choice("flat")
    same = [(917, 1138, 48708, 680, 646), (689, 1004, 32491, 689, 46808), (983, 3579, 18761, 811, 711)]
    for one, two in itertools.permutations(same, 2):
        found = Finding.of("allreduce", 64, default, {default: one, other: two})
        assert found.best == default and rules_of([found]) == ()
    noisy = Finding.of("allreduce", 64, default, {default: (10, 14, 9, 15, 11), other: (8, 12, 7, 14, 10)})
    assert noisy.doubtful and " ? " in noisy.line()
    quick = Choice("ring")
    times = {default: (10, 11, 10, 11, 10), other: (4, 9, 1, 12, 3), quick: (5, 6, 5, 5, 60)}
    found = Finding.of("allreduce", 64, default, times)
    assert found.best == quick and not found.doubtful, "one that is clearly faster, with an outlier, not the noisy one"


def test_rules_end_between_sizes_and_leave_defaults_alone():
    found = [
        finding(64, tree=1.0, flat=0.5),
        finding(1024, tree=1.0, flat=0.5),
        finding(16384, tree=1.0, flat=0.96),  # too close to call
        finding(1 << 18, tree=1.0, flat=2.0, ring=0.2),
    ]
    assert rules_of(found) == (Rule("allreduce", 0, 4096, "flat", 1), Rule("allreduce", 65536, 1 << 19, "ring", 1))
    assert rules_of([]) == ()
