"""``plan``, ``topo`` and ``tune`` on real ranks; tables reach every rank; local facts never make choices differ."""

import json

MAIN = """
import sys
from ucc_hetero.__main__ import main
for words in sys.argv[1:]:
    status = main(words.split())
    if status:
        sys.exit(status)
"""

#: Every rank reports other links and runs in another folder.
UNLIKE = """
import os, sys, tempfile
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
os.environ["UCCH_LINK_SPEED"] = str(1000 * (1 + world.rank))
os.chdir(tempfile.mkdtemp())
from ucc_hetero import Communicator
with Communicator(world) as comm:
    for n in (1, 1000, 300000):
        x, y = np.full(n, world.rank, np.float32), np.zeros(n, np.float32)
        comm.Allreduce(x, y)
        assert (y == sum(range(world.size))).all()
        comm.Bcast(y)
    plans = world.allgather(comm.plan_summary())
    assert len(set(plans)) == 1, plans
    if world.rank == 0:
        print(plans[0])
    assert len(set(world.allgather(comm.topology))) == 1
    world.Barrier()
    if world.rank == 0:  # the first rank of a part may be on a host that lacks the file
        os.unlink(os.environ["UCCH_TUNE_FILE"])
    world.Barrier()
    with comm.Split() as part:
        part.Allreduce(np.ones(1, np.float32), np.zeros(1, np.float32))
        assert "ring (measured)" in part.plan_summary()
"""


def test_tune_writes_what_later_jobs_follow(crew, tmp_path):
    table, layout = tmp_path / "table.json", "nvidia:2,amd:2"
    commands = [
        "plan allreduce 64K --run",
        "topo",
        f"tune --file {table} --collective allreduce --collective bcast --sizes 64:4K",
    ]
    out = crew(MAIN, n=4, args=commands, layout=layout, timeout=120).stdout
    assert "measured" in out and "rank 3: amd memory" in out and out.count("allreduce  ") >= 3
    (entry,) = json.loads(table.read_text())["topologies"].values()
    assert entry["islands"] == "nvidia[0-1]@0 amd[2-3]@0" and entry["weights"] == []
    # Whichever was fastest on this machine: from here on the test's own rule.
    entry["rules"] = ["allreduce:0-1024:@ring:fragments=1", "bcast:0-inf:@flat:fragments=1"]
    data = json.loads(table.read_text())
    data["topologies"] = {next(iter(data["topologies"])): entry}
    table.write_text(json.dumps(data))
    plans = crew(UNLIKE, n=4, layout=layout, env={"UCCH_TUNE_FILE": str(table)}, timeout=120).stdout
    assert "allreduce float32[1] SUM: ring (measured)" in plans
    assert "allreduce float32[1000] SUM: tree (default)" in plans
    assert "bcast float32[300000] root=0: flat (measured)" in plans


def test_a_missing_table_and_missing_ranks_are_said(crew, tmp_path):
    script = "from ucc_hetero.__main__ import main\nassert main(['plan', 'bcast', '8']) != 0\n"
    alone = crew("from ucc_hetero.__main__ import main\nassert main(['tune']) == 1\n", n=1)
    assert "tune needs ranks: run it under mpirun" in alone.stderr
    said = crew(script, n=2, env={"UCCH_TUNE_FILE": str(tmp_path / "nothing.json")}).stderr
    assert "nothing.json cannot be read" in said and "python -m ucc_hetero tune" in said
