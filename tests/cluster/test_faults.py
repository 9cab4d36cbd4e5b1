"""Ranks, islands and hosts that die in jobs of several hosts, and survivors that go on."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "mpi" / "fault_cases.py"
#: A job in which a death is noticed by the deadline of calls alone is killed before that.
NEVER = {"UCCH_TIMEOUT": "1000"}


@pytest.mark.parametrize("rounds", [["2,3"], ["0", "2"]], ids=["a host", "one of each"])
def test_survivors_go_on(emulate: Any, libraries: None, ulfm: list[str], rounds: list[str]) -> None:
    """Every result is numpy's, and the job ends."""
    cluster, seed = emulate(hosts=2, slots=2, rate="none"), random.randrange(10**6)
    env = {"UCCH_EMULATE": "nvidia:2,amd:2", **NEVER, "UCX_MEM_MMAP_HOOK_MODE": "none"}
    env |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi"}
    words = [sys.executable, str(CASES), str(seed), *rounds]
    job = cluster.mpirun(words, env=env, options=ulfm, timeout=60)
    left = 4 - sum(len(text.split(",")) for text in rounds)
    assert job.stdout.count("right: rank") == left, f"seed {seed}\n{job.stdout}{job.stderr}"


def test_survivors_go_on_with_devices(emulate: Any, libraries: None, ulfm: list[str], fake_environment: Any) -> None:
    """Calls that network threads carry."""
    cluster, seed = emulate(hosts=3, slots=1, rate="none"), random.randrange(10**6)
    env = fake_environment("nvidia:1,amd:2") | {**NEVER, "FAKEGPU_DELAY_US": "20"}
    words = [sys.executable, str(CASES), str(seed), "1"]
    job = cluster.mpirun(words, env=env, options=ulfm, timeout=60)
    assert job.stdout.count("right: rank") == 2, f"seed {seed}\n{job.stdout}{job.stderr}"


@pytest.mark.parametrize("what", ["message", "collective"])
def test_a_message_that_libucp_throws_away(
    emulate: Any, libraries: None, compiled: Any, tmp_path: Path, what: str
) -> None:
    """For want of memory: the next one with its tag is not taken for it, and nobody waits for it until the deadline."""
    here, room, level = Path(__file__).parent, tmp_path / "no_room.so", random.choice(["warn", "fatal"])
    compiled(room, "-shared", "-fPIC", here / "no_room.c", "-ldl")
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", **NEVER, "UCX_LOG_LEVEL": level, "OMPI_MCA_pml": "ob1"}
    words = [sys.executable, str(here / "no_room_job.py"), str(room), what]
    job = emulate(hosts=2, slots=1, rate="none").mpirun(words, env=env, timeout=120)
    said = dict(line.split(": ", 1) for line in job.stdout.splitlines() if line.startswith("rank "))
    assert set(said) == {"rank 0", "rank 1"} and "WRONG" not in job.stdout, job.stdout + job.stderr
    reasons = said["rank 1"].split(" | ")
    assert all("libucp has thrown it away" in reason for reason in reasons), job.stdout + job.stderr
    assert ("is not allocated" in job.stdout + job.stderr) == (level == "warn"), job.stdout + job.stderr


def test_a_connection_that_breaks_in_the_middle(
    emulate: Any, libraries: None, ulfm: list[str], compiled: Any, tmp_path: Path
) -> None:
    """What rank 1 has not received is not passed on: whose call ends well has every rank's data.

    libucp drops a broken connection in silence where its sender has nothing more to send: calls then end at their time.
    """
    here, library, seed = Path(__file__).parent, tmp_path / "broken_receive.so", random.randrange(10**6)
    compiled(library, "-O1", "-shared", "-fPIC", here / "broken_receive.c", "-ldl")
    hosts, slots = random.choice([(3, 1), (3, 2), (4, 1)])
    env = {
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
        "UCCH_TIMEOUT": "20",
    }
    job_file, preload = str(here / "broken_receive_job.py"), f"LD_PRELOAD={library}"
    words = ["env", preload, sys.executable, job_file, str(library), str(seed)]
    job = emulate(hosts=hosts, slots=slots, rate="none").mpirun(words, env=env, options=ulfm, timeout=120)
    said = f"seed {seed}, {hosts} x {slots}\n{job.stdout}{job.stderr}"
    assert job.stdout.count("right: rank") == hosts * slots, said
    assert job.stdout.count(", 3 failed") >= 1, said
