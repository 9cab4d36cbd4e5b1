"""One vendor on several hosts: islands by fabric, and calls between hosts that no fabric joins; on fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from channel_jobs import JOBS, judge
from device_scripts import LATE_KERNELS

from ucc_hetero.machine.fabric import RESULTS
from ucc_hetero.planner.rules import Layout, fabrics_of, measured_fabric, read_table, save_fabric

#: Fakes have no library of collectives for the ranks of a host: with several there, vendors stay whole unless told.
HOST = {"UCCH_FABRIC": "host"}
#: Islands, teams by link, rings, fabric; of the job and of communicators inside hosts and across.
STRUCTURE = """
from arrays import Array
from ucc_hetero import Communicator

def tell(name, comm):
    x, y = Array(1000).set(comm.rank + 1), Array(1000)
    comm.Allreduce(x, y)
    assert (y.peek == sum(range(1, comm.size + 1))).all()
    members, (first, *rest) = comm._run.members, comm.plan_summary().splitlines()
    fabric = [line for line in rest if line.startswith("fabric: ")]
    teams = sorted((link, len(ranks)) for ranks, link in members.teams._teams)
    for ranks, link in members.teams._teams:
        assert link == "bridge" or len({comm.topology.island_of[rank] for rank in ranks}) == 1
    print(name, first, *fabric, "queued" if "queued" in rest[-1] else "else", teams[-1:], flush=True)

with Communicator() as comm:
    tell("all", comm)
    with Communicator(comm.mpi.Split(comm.topology.hosts[comm.rank])) as inside:
        tell("inside", inside)
    with Communicator(comm.mpi.Split(comm.rank % 2)) as across:
        tell("across", across)
"""

#: The user's word counts for more than a table's.
DECIDED = """
import os
os.environ["UCCH_FABRIC"] = "host"
with Communicator() as comm:
    tell("decided", comm)
"""


def test_calls_between_hosts(on_crew: Callable[..., Any]) -> None:
    """Two ranks each; of three hosts, and of many calls in many streams, test_wires.py."""
    name = "every collective in every form"
    judge(name, on_crew(JOBS[name].script, "amd:4", 2, 2, **JOBS[name].env, **HOST).output)


NONE = "no active port of InfiniBand, RoCE or EFA"
FOUR = ("nvidia:4", 2, 2)


@pytest.mark.parametrize(("where", "env", "told", "across"), [
    (FOUR, HOST, "nvidia[0-1]@0 nvidia[2-3]@1 fabric: nvidia: each host by itself (UCCH_FABRIC=host) queued", 2),
    (
        ("nvidia:4", 4, 1), {},
        f"nvidia[0]@0 nvidia[1]@1 nvidia[2]@2 nvidia[3]@3 fabric: nvidia: each host by itself ({NONE}) queued", 2,
    ),
    (FOUR, {"UCCH_FABRIC": "all"}, "nvidia[0-3]@0-1 fabric: nvidia: all hosts (UCCH_FABRIC=all) else", 1),
    (
        FOUR, LATE_KERNELS,
        "nvidia[0-3]@0-1 fabric: nvidia: all hosts, as streams cannot do calls between them (ranks 0, 1, 2, 3: load "
        "kernels at their first launch, docs/launch.md has the setting) else", 1,
    ),
    (
        ("nvidia:2,amd:2", 2, 2), {"UCCH_WIRES": "0"}, "nvidia[0-1]@0 amd[2-3]@1 else", 1,
    ),
    (
        ("nvidia:1,amd:1,nvidia:1,amd:1", 2, 2), {},
        f"nvidia[0]@0 amd[1]@0 nvidia[2]@1 amd[3]@1 fabric: nvidia: each host by itself ({NONE}); "
        f"amd: each host by itself ({NONE}) queued", 2,
    ),
], ids=["host", "four hosts", "all", "late", "a vendor a host", "mixed"])  # fmt: skip
def test_islands_are_said(
    on_crew: Callable[..., Any], where: tuple[str, int, int], env: dict[str, str], told: str, across: int
) -> None:
    """Communicators of some ranks have the job's islands, and no team of one vendor's library spans hosts apart."""
    out = on_crew(STRUCTURE, *where, **env).output
    lines = [line for line in out.splitlines() if line.startswith("all ")]
    assert len(lines) == 4 and all(line.startswith(f"all {told} ") for line in lines), out
    assert len([line for line in out.splitlines() if line.startswith("inside ")]) == 4, out
    mixed = "amd" in where[0]
    islands = {len(line.partition(" fabric")[0].split()) - 1 for line in out.splitlines() if line.startswith("across ")}
    assert mixed or islands == {across}, out


TUNED = """
import os
import arrays
from ucc_hetero import Communicator
from ucc_hetero.cli.tune import clearly, tune

lines = []
with Communicator() as comm:
    found = tune(comm, ["allreduce", "barrier"], [64, 30_000], lines.append)
    assert found.fabric is not None and set(found.fabric.seconds) == {"host", "all"}, lines
    assert len(set(comm.mpi.allgather((tuple(found.fabric.seconds.items()), tuple(found.fabric.noise.items()))))) == 1
    assert [line.split("  ")[0] for line in lines[:4]] == ["fabric, allreduce"] * 2 + ["fabric, barrier", "fabric"]
    word = clearly(found.fabric)
    assert len(found.bare.islands) == (1 if word == "all" else 2), (word, found.bare)
    assert "UCCH_FABRIC" not in os.environ
    found.save(os.environ["TABLE"], comm.rank)
    print("right", word or "neither", flush=True)
"""


def test_tune_measures_islands_and_later_jobs_follow(
    on_crew: Callable[..., Any], alone: Callable[..., Any], tmp_path: Path
) -> None:
    """Both kinds of islands on devices of one vendor; the faster one is written down, with the ranks that it is for."""
    path, where = tmp_path / "tuned.json", ("nvidia:2", 2, 1)
    pair = Layout.of(["nvidia"] * 2, "ab", [""] * 2)
    save_fabric(path, Layout.of(["amd"] * 2, "ab", [""] * 2), "all")
    out = on_crew(TUNED, *where, TABLE=str(path)).output
    (word,) = {line.split()[1] for line in out.splitlines() if line.startswith("right ")}
    assert out.count("right ") == 2, out
    assert measured_fabric(read_table(str(path)), pair)[0] == word.replace("neither", ""), word
    assert len(fabrics_of(read_table(str(path)))) == 1 + (word != "neither")
    for word, islands, queued in (("all", "nvidia[0-1]@0-1", "else"), ("host", "nvidia[0]@0 nvidia[1]@1", "queued")):
        save_fabric(path, pair, word)
        told = f"all {islands} fabric: nvidia: {RESULTS[word]} (by the tuned table {path}) {queued}"
        out = alone(STRUCTURE + DECIDED, *where, UCCH_TUNE_FILE=str(path)).output
        assert len([line for line in out.splitlines() if line.startswith(told)]) == 2, out
        assert out.count("fabric: nvidia: each host by itself (UCCH_FABRIC=host) queued") == 2, out


@pytest.mark.parametrize(("layout", "env", "told"), [
    ("nvidia:2", {"UCCH_FABRIC": "host"}, "# fabric: not measured, as UCCH_FABRIC decides"),
    ("nvidia:2", {"UCCH_WIRES": "0"}, "# fabric: not measured, as streams cannot do calls between hosts"),
    ("nvidia:1,amd:1", {}, ""),
], ids=["decided", "no wires", "a vendor a host"])  # fmt: skip
def test_islands_that_cannot_be_measured(
    on_crew: Callable[..., Any], layout: str, env: dict[str, str], told: str
) -> None:
    script = """
import arrays
from ucc_hetero import Communicator
from ucc_hetero.cli.tune import measure_fabric

with Communicator() as comm:
    assert measure_fabric(comm, ["allreduce"], [64], print) is None
    assert all(facts.device_memory for facts in comm._run.members.facts)
"""
    out = on_crew(script, layout, 2, 1, **env).output
    assert out.count("fabric: ") == (2 if told else 0) and told in out, out
