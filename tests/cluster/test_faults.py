"""Ranks, islands and hosts that die in jobs of several hosts, and survivors that continue."""

import functools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import judge
from tests.faults.__main__ import line
from tests.faults.menu import Trial, draw

#: Timeout of calls that no death should reach: the job is killed before.
NEVER = 1000.0
#: Jobs over MPI: ranks of each host, vendors, True for fake GPUs, and the ranks that die: at a time, or the second as
#: the others shrink, or each after the others have continued without the previous one.
LOST = {
    "a host": ((2, 2), "nvidia:2,amd:2", False, "collective", (2, 3)),
    "one of each": ((2, 2), "nvidia:2,amd:2", False, "shrink", (0, 2)),
    "with devices": ((1, 1, 1), "nvidia:1,amd:2", True, "collective", (1,)),  # its calls are carried by network threads
    "with devices of a host": ((4,), "nvidia:2,amd:2", True, "collective", (0,)),
    "one after the other": ((5,), "nvidia:2,amd:3", False, "after", (1, 4, 0)),
}


def over_mpi(slots, vendors, gpu, moment, victims):
    at, delay = random.randrange(12), random.uniform(0, 0.05)
    return Trial(random.randrange(10**6), "ulfm", slots, vendors, gpu, "kill", moment, victims, at, delay, NEVER)


def over_a_store(fault):
    """The last rank, or its host, is lost. To others a host that is off, cut or behind a hole is one that says nothing
    more: one of these, drawn. A rank that holds the interpreter is alive."""
    slots = (1, 2)
    if fault == "outside":
        fault, slots = random.choice(["cut", "hole", "off"]), random.choice([(2, 2), (1, 1, 1)])
    size = sum(slots)
    seed = random.randrange(10**6)
    return Trial(seed, "store", slots, f"host:{size}", False, fault, "collective", (size - 1,), 9, 0.0, NEVER)


@pytest.mark.usefixtures("hosts", "libraries", "ulfm")
def test_all_who_live_go_on_or_have_an_answer(pythons, fakegpu, request, room):
    """Survivors know and go on in fixed jobs; in four drawn ones (docs/faults.md) all results are right, or errors in
    time. Jobs run at the same time, as most wait."""
    given = [
        *map(over_a_store, ("stop", "hold", "outside", "kill", "exit")),
        *(over_mpi(*each) for each in LOST.values()),
    ]
    seed = random.randrange(10**6)
    drawn = [draw(each) for each in range(seed, seed + 4)]
    run = functools.partial(judge.run, fakes=fakegpu, room=room, python=pythons.of(request.path, {}))
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(run, [*given[:3], *drawn, *given[3:]]))
    wrong = [each for each in verdicts if each.failures]
    for each in verdicts:
        goes_on = each.right == each.trial.size - len({*each.trial.lost}) or each.launcher
        wrong += [each] * (each.trial in given and not goes_on)
    assert not wrong, "\n".join(f"{line(each)}\n{each}" for each in wrong)


@pytest.mark.parametrize("what", ["message", "collective"])
def test_a_message_that_libucp_throws_away(emulate, libraries, compiled, tmp_path, what):
    """For lack of memory: the next message with its tag is not received instead, and no rank waits until the
    deadline."""
    here, room, level = Path(__file__).parent, tmp_path / "no_room.so", random.choice(["warn", "fatal"])
    compiled(room, "-shared", "-fPIC", here / "no_room.c", "-ldl")
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", "UCCH_TIMEOUT": str(NEVER), "UCX_LOG_LEVEL": level, "OMPI_MCA_pml": "ob1"}
    words = [sys.executable, str(here / "no_room_job.py"), str(room), what]
    job = emulate(hosts=2, slots=1, rate="none").mpirun(words, env=env, timeout=120)
    said = dict(line.split(": ", 1) for line in job.stdout.splitlines() if line.startswith("rank "))
    assert set(said) == {"rank 0", "rank 1"} and "WRONG" not in job.stdout, job.stdout + job.stderr
    reasons = said["rank 1"].split(" | ")
    assert all("libucp has thrown it away" in reason for reason in reasons), job.stdout + job.stderr
    assert ("is not allocated" in job.stdout + job.stderr) == (level == "warn"), job.stdout + job.stderr


def test_a_connection_that_breaks_in_the_middle(emulate, libraries, ulfm, compiled, tmp_path):
    """Data that rank 1 has not received is not forwarded: a call that succeeds has every rank's data.

    libucp silently drops a broken connection if its sender has nothing more to send: calls then end at their timeout.
    """
    here, library, seed = Path(__file__).parent, tmp_path / "broken.so", random.randrange(10**6)
    compiled(library, "-O1", "-shared", "-fPIC", here / "broken_read.c", "-ldl")
    hosts, slots = random.choice([(3, 1), (3, 2), (4, 1)])
    env = {
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
        "UCCH_TIMEOUT": "20",
    }
    job_file, preload = str(here / "broken_read_job.py"), f"LD_PRELOAD={library}"
    words = ["env", preload, sys.executable, job_file, str(library), str(seed), "200000", "3", "0.5"]
    job = emulate(hosts=hosts, slots=slots, rate="none").mpirun(words, env=env, options=ulfm, timeout=120)
    said = f"seed {seed}, {hosts} x {slots}\n{job.stdout}{job.stderr}"
    assert job.stdout.count("right: rank") == hosts * slots, said
    assert job.stdout.count(", 3 failed") >= 1, said
