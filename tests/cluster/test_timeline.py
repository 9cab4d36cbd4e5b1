"""UCCH_TRACE over several hosts: their clocks are compared. Emulated hosts share one, so the true offset is known."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ucc_hetero.launch.emulate import Cluster

JOB = """
import numpy as np
from ucc_hetero import Communicator
comm = Communicator()
x = np.ones(1 << 16, np.float32)
y = np.empty_like(x)
for _ in range(3):
    comm.Allreduce(x, y)
"""


def test_clocks_of_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    script, path = tmp_path / "job.py", tmp_path / "t.json"
    script.write_text(JOB)
    done = cluster.mpirun(
        [sys.executable, str(script)],
        env={"UCCH_TRACE": str(path), "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        options=["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"],
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    trace = json.loads(path.read_text())
    facts = trace["otherData"]
    assert [facts["clock uncertainty us"][r] == 0 for r in "0123"] == [True, True, False, False]
    for rank in "23":
        assert abs(facts["clock offset us"][rank]) <= facts["clock uncertainty us"][rank] + 0.001
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"} >= {"call", "island", "bridge"}
