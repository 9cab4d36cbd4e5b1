"""Resources that calls leave behind, child processes, and killed jobs."""

import random
from pathlib import Path

import pytest


@pytest.mark.parametrize("case", ["starts_processes", "message_dropped_by_a_child", "few_files"])
def test_jobs(mpirun, case):
    mpirun(f"ends_cases:{case}", env={"UCX_TLS": "tcp,self"} if "message" in case else {})


def test_nothing_grows(crew):
    """A sample of the figures in docs/native.md (tools/soak.py); groups of torch: test_torch_ends.py."""
    args = ["--collectives", "10000", "--communicators", "100", "--refusals", "40", "--failures", "20"]
    args += ["--transfers", "20", "--groups", "0"]
    layout, env = random.choice(["", "nvidia:1,amd:1"]), {"UCCH_TIMEOUT": "100"}
    job = crew("tools/soak.py", 2, args=args, layout=layout, env=env, timeout=120)
    assert job.stdout.count("more rounds") == 5 and "grown" not in job.stdout, job.output


def test_nothing_is_left_of_a_job_that_is_killed(mpirun, tmp_path):
    """Open MPI's own segments are not checked; UCX's are in a folder of this job alone."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    (segments := tmp_path / "segments").mkdir()
    env = {"UCCH_EMULATE": "nvidia:2,amd:1", "UCX_POSIX_DIR": str(segments)}
    job = mpirun("ends_cases:killed", 3, env=env, check=False)
    assert job.said("pid") == 3, job.output
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if "ucch" in name] and not list(segments.iterdir()), left
