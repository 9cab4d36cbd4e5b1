"""Ranks that run mpi4py's tests: one after the other, together, each result agreed on. Started by mpi4py_suite.py.

Arguments: mpi4py's test folder, the file that rank 0 writes results to (a line of JSON each), the seconds that a test
may take, test files; the names of tests to leave out are read from the file in ``UCCH_SUITE_SKIP``, patterns of those
to run are in ``UCCH_SUITE_ONLY``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import unittest
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mpi4py_adapter import StandIn, load  # noqa: E402

from mpi4py import MPI  # noqa: E402


class Outcome(unittest.TestResult):
    """The result of one test on one rank; the first failure ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.failfast = True

    def summary(self) -> tuple[str, str]:
        """(passed, skipped or failed; why)."""
        if self.errors or self.failures:
            return "failed", (self.errors + self.failures)[0][1]
        if self.skipped:
            return "skipped", self.skipped[0][1]
        return "passed", ""


def wanted(cases: list[unittest.TestCase]) -> list[unittest.TestCase]:
    """The cases to run."""
    skip = Path(os.environ["UCCH_SUITE_SKIP"]).read_text().split() if "UCCH_SUITE_SKIP" in os.environ else []
    only = os.environ.get("UCCH_SUITE_ONLY", "*").split()
    names = [case.id() for case in cases]
    return [
        case
        for name, case in zip(names, cases, strict=True)
        if name not in skip and any(fnmatchcase(name, pattern) for pattern in only)
    ]


def agreed(results: list[tuple[str, str]]) -> tuple[str, str]:
    """One result from those of all ranks: a failure, the one that came first in time is not known, so the shortest."""
    for kind in ("failed", "skipped"):
        found = [(len(text), rank, text) for rank, (what, text) in enumerate(results) if what == kind]
        if found:
            # A rank that waited says only that others were missing.
            waited = [each for each in found if "CollectiveTimeout" in each[2]]
            _, rank, text = min([each for each in found if each not in waited] or found)
            return kind, f"rank {rank}: {text}"
    return "passed", ""


def main() -> None:
    """Run the tests."""
    folder, out, limit, *files = sys.argv[1:]
    control = MPI.COMM_WORLD.Dup()
    cases, renew = load(Path(folder), files, StandIn())
    warnings.simplefilter("ignore")
    handle = open(out, "a") if control.rank == 0 else None

    def note(**facts: Any) -> None:
        if handle is not None:
            print(json.dumps(facts), file=handle, flush=True)

    for case in wanted(cases):
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
