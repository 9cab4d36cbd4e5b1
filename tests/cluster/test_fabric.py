"""One vendor on several hosts: islands by fabric, and calls between hosts without a common fabric; on fake GPUs."""

import pytest
from channel_jobs import JOBS, judge
from settings import LATE_KERNELS

#: Fake GPUs have no collective library for several ranks on a host: by default vendors then stay one island.
HOST = {"UCCH_FABRIC": "host"}
#: Islands, teams by link, rings, fabric; of the job and of communicators inside and across hosts.
STRUCTURE = """
from arrays import Array
from ucc_hetero import Communicator

def tell(name, comm):
    x, y = Array(1000).set(comm.rank + 1), Array(1000)
    comm.Allreduce(x, y)
    assert (y.peek == sum(range(1, comm.size + 1))).all()
    members, (first, *rest) = comm._runner.members, comm.plan_summary().splitlines()
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


def test_calls_between_hosts(on_crew):
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
def test_islands_are_said(on_crew, where, env, told, across):
    """Sub-communicators have the job's islands, and no team of a vendor's library spans hosts without a common
    fabric."""
    out = on_crew(STRUCTURE, *where, **env).output
    lines = [line for line in out.splitlines() if line.startswith("all ")]
    assert len(lines) == 4 and all(line.startswith(f"all {told} ") for line in lines), out
    assert len([line for line in out.splitlines() if line.startswith("inside ")]) == 4, out
    mixed = "amd" in where[0]
    islands = {len(line.partition(" fabric")[0].split()) - 1 for line in out.splitlines() if line.startswith("across ")}
    assert mixed or islands == {across}, out
