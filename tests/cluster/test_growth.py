"""Ranks of another host join a job without MPI, one is killed, and another one comes in its place."""

import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("growth_job.py")


@pytest.mark.usefixtures("libraries")
def test_ranks_of_another_host_come_and_come_back(emulate, launch, appear, tmp_path, room):
    cluster = emulate(hosts=2, slots=3, rate="none")
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of this job's")
    server = [sys.executable, "-m", "ucc_hetero", "store", f"tcp://{cluster.hosts[0].address}:0", str(secret)]
    store = launch(cluster, 0, server)
    address = store.stdout.readline().strip()

    def rank(host, which):
        job = [sys.executable, str(JOB), str(tmp_path), address, which]
        return launch(cluster, host, job, env={"UCCH_TIMEOUT": str(60 * room)})

    ranks = [rank(host, which) for host, which in ((0, "0"), (0, "1"), (1, "later"), (1, "later"))]
    appear([tmp_path / "shrunk"], [store, *ranks[:2]])
    ranks.append(rank(1, "later"))
    out = [each.communicate(timeout=60 * room)[0] for each in ranks]
    killed, *ended = sorted((each.returncode for each in ranks), key=lambda status: not status)
    assert killed in (-9, 137) and ended == [0] * 4, out
    assert sum("right" in each for each in out) == 4 and sum("lost: " in each for each in out) == 3, out
