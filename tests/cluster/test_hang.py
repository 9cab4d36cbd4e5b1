"""``ucch-doctor hang`` under mpirun: processes of all hosts are asked, also on a host where no rank waits."""

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ucc_hetero.launch.doctor.__main__ import main

JOB = Path(__file__).parents[1] / "mpi" / "hang_job.py"


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_is_alone_on_its_host(emulate, tmp_path, capsys):
    """No rank there waits for it; it writes its record when the ranks of the other host fail and end the job."""
    cluster, folder = emulate(hosts=2, slots=[2, 1]), tmp_path / "records"
    done = cluster.mpirun([sys.executable, str(JOB), "gil", "1"], env={"UCCH_FLIGHT": str(folder)})
    assert "CollectiveTimeout" in done.stderr
    assert main(["hang", "--json", str(folder)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    first = next(each["text"] for each in found if each["level"] == "error")
    assert first.startswith("rank 2 has not called") and "in hold_the_interpreter" in first, (found, done.stderr)


@pytest.mark.usefixtures("libraries")
def test_a_rank_of_another_host(emulate, tmp_path, room, appear):
    """Processes answer, and continue. A stopped process cannot answer, and its memory is read instead."""
    cluster, stays = emulate(hosts=2, slots=[2, 1]), tmp_path / "stays"

    def job():
        with suppress(Exception):  # it is killed
            # A rank that is stopped is not taken for dead, however long the doctor takes.
            env = {"UCCH_FLIGHT": str(tmp_path / "records"), "UCCH_HEARTBEAT": "0"}
            cluster.mpirun([sys.executable, str(JOB), "gil", "1000", str(stays)], env=env, timeout=300)

    threading.Thread(target=job, daemon=True).start()
    appear([stays], [])
    doctor = [sys.executable, "-m", "ucc_hetero.launch.doctor", "hang", "--json"]

    def ask(words):
        until, said = time.monotonic() + 60 * room, ""
        while words not in said:
            assert time.monotonic() < until, said
            said = cluster.mpirun(doctor, np=2, options=["--map-by", "ppr:1:node"], timeout=60).stdout
        return [each for each in json.loads(said)["findings"] if each["level"] == "error"]

    found = ask("hold_the_interpreter")
    assert len(found) == 1 and found[0]["code"] == "hang-missing"
    assert found[0]["text"].startswith(
        "rank 2 has not called allreduce float32[1024] SUM, call 3001, in which ranks 0-1 have waited"
    )
    stopped = (tmp_path / "stays.pid").read_text()
    cluster.run(["kill", "-STOP", stopped], host=1, check=True)
    ask("its process is stopped by a signal; it has been in user code")
    said = cluster.run([*doctor, stopped, "99999"], host=1).stdout
    assert f"1 rank(s) on {cluster.hosts[1].name}" in said and "process 99999: does not exist" in said
    cluster.kill_all()
