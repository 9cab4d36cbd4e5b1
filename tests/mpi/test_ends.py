"""Ends of calls and jobs after failures: an error that names rank and cause, within the deadline, and no hang."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

#: A job that waits for its calls' timeout is killed before that.
NEVER, SOON = {"UCCH_TIMEOUT": "1000"}, {"UCCH_TIMEOUT": "2"}


class Job(NamedTuple):
    """A case, as ``mpirun`` takes it; its ranks, and their expected end."""

    case: str
    ranks: int = 2
    args: Sequence[Any] = ()
    #: Regular expression -> number of matches in standard output. None: any in all output; 0: none in all output.
    said: Mapping[str, int | None] = {}
    #: mpirun's exit status; None: any except 0.
    status: int | None = 0
    env: Mapping[str, str] = {"UCCH_TIMEOUT": "200"}
    more: Mapping[str, Any] = {}

    def __str__(self):
        return ", ".join(map(str, [self.case.partition(":")[2], *self.args, *self.more.values()]))

    def run(self, start, **more):
        """Run it with ``mpirun``, or with ``crew``, whose ranks must succeed, and check its end."""
        done = start(self.case, self.ranks, args=self.args, env=self.env, **self.more, **more)
        assert (done.returncode == self.status) if self.status is not None else done.returncode, done.output
        for pattern, count in self.said.items():
            found = len(re.findall(pattern, done.stdout if count else done.output, re.M))
            assert found == count if count is not None else found, (pattern, found, done.output)
        return done


#: Cases on ranks that have run others before.
ON_A_CREW = [
    *(Job("ends_cases:freed_after_a_failure", 3, more={"layout": layout}) for layout in ("", "nvidia:2,amd:1")),
    *(Job("ends_cases:interrupted_as_it_fails", 2, [known]) for known in (0, 2)), Job("ends_cases:not_made_ready", 3),
]  # fmt: skip


@pytest.mark.parametrize("job", ON_A_CREW, ids=str)
def test_calls(crew, job):
    job.run(crew)


ENDS_JOB = "rank 1 has failed {} and ends the job".format
#: How a rank fails, the job's status, and the output.
FAILS = [
    ("exit", 3, ENDS_JOB(r"\(status 3\)")), ("exit without a stream", 3, ""), ("exit with a text", 1, "out of flour"),
    ("raise", 1, "RuntimeError: out of flour"), ("handler", 1, "KeyboardInterrupt: out of flour"),
    ("end at once", 3, ""), ("signal", 128 + 15, ""),
]  # fmt: skip

JOBS = [
    *(Job("ends_cases:a_rank_fails_at_first", 2, [how], {ENDS_JOB(rf"\(status {status}\)"): None}, status, NEVER)
      for how, status in (("exit", 3), ("argument", 1), ("interrupt", 1))),
    *(Job("ends_cases:a_rank_fails", 2, [how], {said: None}, status) for how, status, said in FAILS),
    Job("script_cases:forked_before_mpi", 2, [], {ENDS_JOB(r"\(status 3\)"): None}, None, NEVER, {"cold": True}),
    Job("ends_cases:an_exception_in_an_operation", 2, [], {"KeyError": None, "'mine alone'": None, "result": 0}, None),
    *(Job("ends_cases:does_not_come", 3, [to], {"^named$": None, "Assert": 0}, None, SOON)
      for to in ("first", "next", "call")),
    *(Job("ends_cases:looks_for_messages", 3, [first], {"^right$": 3}, None, SOON) for first in (False, True)),
    Job("ends_cases:stopped_within_mpi", 3, [], {"rank [02]: Dup: not all ranks got through in": None}, None, SOON),
    Job("ends_cases:interrupted_as_it_is_freed", 2, [], {"Traceback": 0}),
    Job("ends_cases:frees_nothing", 4, [], {"^end$": 4, "WARN|ERROR|failed|Traceback": 0}),
    Job("ends_cases:ends_with_calls_under_way", 2, [], {"^at the end": 2, "Traceback": 0}),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_jobs(mpirun, job):
    job.run(mpirun, check=False)


@pytest.mark.parametrize("more", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
def test_a_rank_that_is_interrupted_at_its_end(mpirun, flavour, more):
    """The others do not wait for it; the job fails if they cannot go on without it."""
    if more and (flavour[0] != "openmpi" or flavour[1] < 5):
        pytest.skip("needs Open MPI 5")
    job = Job("ends_cases:interrupted_at_its_end", 3, [], {"KeyboardInterrupt": None}, int(not more))
    job.run(mpirun, mpi_args=more, check=False)


def test_an_end_that_hangs_is_over_soon(mpirun, ulfm):
    """MPI_Finalize of Open MPI 5.0.11 may hang if a rank dies while others are in it (15 ms after it began)."""
    mpirun("ends_cases:hangs_at_its_end", 1, mpi_args=ulfm, timeout=60)


@pytest.mark.parametrize("turn", range(3))
def test_daemons_within_calls(mpirun, flavour, compiled, tmp_path, turn):
    """No thread is in MPI during its finalization, and none is waited for."""
    if flavour[0] != "openmpi":
        pytest.skip("needs Open MPI")
    (end, status), ranks = random.choice([("", 0), ("0", 0), ("3", 3), ("raise", 1)]), random.choice([1, 2, 3])
    library = compiled(tmp_path / "late.so", "-shared", "-fPIC", "-O2", Path(__file__).with_name("late.c"), "-ldl")
    env = {"LD_PRELOAD": str(library), "LATE_US": random.choice(["1000", "10000", "40000"])}
    said = {"signal 11|Segmentation": 0} | ({} if status else {"^at the end": ranks, "Traceback": 0})
    seed = random.randrange(1 << 30)
    Job("ends_cases:daemons_within_calls", ranks, [seed, end], said, status, NEVER | env).run(mpirun, check=False)
