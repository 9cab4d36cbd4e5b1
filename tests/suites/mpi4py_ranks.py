"""Ranks that run mpi4py's tests together, one test after the other, and agree on each result. See mpi4py_suite.py.

Arguments: mpi4py's test folder; the file into which rank 0 writes results, one line of JSON each; a file with the names
of tests to skip; the timeout of a test in seconds; test files. ``UCCH_SUITE_ONLY`` holds patterns of tests to run.
"""

import faulthandler
import json
import os
import sys
import time
import unittest
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mpi4py import MPI
from mpi4py_adapter import StandIn, load


class Outcome(unittest.TestResult):
    """The result of one test on one rank; the first failure ends the test."""

    def __init__(self):
        super().__init__()
        self.failfast = True

    def summary(self):
        if self.errors or self.failures:
            return "failed", (self.errors + self.failures)[0][1]
        if self.skipped:
            return "skipped", self.skipped[0][1]
        return "passed", ""


def wanted(cases, leave):
    only = os.environ.get("UCCH_SUITE_ONLY", "*").split()

    def among(name, patterns):
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [case for case in cases if among(case.id(), only) and not among(case.id(), leave)]


def agreed(results):
    """Combine all ranks' results: of several failures prefer one that is not a timeout."""
    for kind in ("failed", "skipped"):
        found = [(len(text), rank, text) for rank, (what, text) in enumerate(results) if what == kind]
        if found:
            waited = [each for each in found if "CollectiveTimeout" in each[2]]
            _, rank, text = min([each for each in found if each not in waited] or found)
            return kind, f"rank {rank}: {text}"
    return "passed", ""


def main():
    folder, out, skip, limit, *files = sys.argv[1:]
    control = MPI.COMM_WORLD.Dup()
    cases, renew = load(Path(folder), files, StandIn())
    warnings.simplefilter("ignore")

    def note(**facts):
        if control.rank == 0:
            with Path(out).open("a") as lines:
                print(json.dumps(facts), file=lines)

    for case in wanted(cases, Path(skip).read_text().split()):
        note(begin=case.id())
        faulthandler.dump_traceback_later(float(limit), exit=True)
        began = time.monotonic()
        outcome = Outcome()
        case.run(outcome)
        kind, why = agreed(control.allgather(outcome.summary()))
        note(test=case.id(), result=kind, why=why, seconds=round(time.monotonic() - began, 3))
        if kind == "failed":
            renew()
    faulthandler.cancel_dump_traceback_later()
    note(end=True)


if __name__ == "__main__":
    main()
