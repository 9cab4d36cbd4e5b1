"""``ucch-doctor hang`` on real jobs, after they have failed and while they hang."""

import json
from pathlib import Path

import pytest

from ucc_hetero.launch.doctor.__main__ import main

JOB = Path(__file__).with_name("hang_job.py")
SUM = "allreduce float32[1024] SUM"
#: Each fault's first finding: its code, the beginning of its text, and a part of the stack it names.
FAULTS = {
    "mismatch": ("hang-differs", "rank 1 called allgather float32[4] as call 3001, where ranks 0,2-3 called", ""),
    "stuck": ("hang-missing", f"rank 2 has not called {SUM}, call 3001, in which", "in load_batch"),
    "dead": ("hang-dead", "rank 1 left no records", ""),
    "tag": ("hang-message", "rank 1 has waited", "instead"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_failure(mpirun, tmp_path, capsys, flavour, fault):
    folder = tmp_path / "my records"
    # If mpirun ends the job at a death, it may do so before ranks without a core notice the death.
    more = ["--with-ft", "ulfm"] if fault == "dead" and flavour >= ("openmpi", 5) and flavour[0] == "openmpi" else []
    job = mpirun(JOB, 4, args=[fault, "1"], env={"UCCH_FLIGHT": str(folder)}, mpi_args=more, check=False)
    assert (job.returncode or more) and f"ucch-doctor hang '{folder}'" in job.stderr, job.output
    assert main(["hang", "--json", str(folder)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    code, text, more = FAULTS[fault]
    first = next(each for each in found if each["level"] == "error")
    assert first["code"] == code and text in first["text"] and more in first["text"], (found, job.output)
    if fault == "tag":
        assert "from rank 0, tag 7, which rank 0 has not sent; it has sent a message with tag 8" in first["text"]
    gone = 1 if fault == "dead" else None
    left = {int(path.name.split(".")[1]) for path in folder.iterdir()}
    assert left == {0, 1, 2, 3} - {gone}, (left, job.output)
