"""Runs mpi4py's own tests through this package, and compares what fails with the list of refusals beside it.

    python tests/suites/mpi4py_suite.py [--layout NAME]... [--only PATTERN]... [--write]

Every layout of ranks, all tests of collectives and messages; fails for a test that fails and is not listed, and for one
that is listed and passes. ``--write`` then puts the counts into docs/conformance.md.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from conftest import find_mpirun, mpi_command, mpi_environment, run_limited  # noqa: E402
from mpi4py_refusals import Refusal, Result, among, judge, refusals, table  # noqa: E402
from mpi4py_source import ROOT, test_folder  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"

#: name -> (ranks, vendors that are emulated)
LAYOUTS = {
    "1": (1, ""), "2": (2, ""), "3": (3, ""), "4": (4, ""), "3 of two vendors": (3, "nvidia:1,amd:2"),
    "4 of two vendors": (4, "nvidia:2,amd:2"),
}  # fmt: skip

FILES = ("test_cco_*.py", "test_p2p_*.py", "test_msgspec.py", "test_msgzero.py")

#: Seconds after which a call fails, after which a test is given up with its job, and which a job may take.
CALL, TEST, JOB = 60, 600, 7200
#: Jobs that one layout may take: after a test that was given up the next one goes on with those that are left.
JOBS = 8


def run(
    layout: str, listed: Sequence[Refusal], only: Sequence[str] = ("*",), call: float = CALL, types: str = ""
) -> dict[str, Result]:
    """The results of the tests on a layout, on some types by the seed ``types``; ``OSError`` without an mpirun."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise OSError("no mpirun: install the extra 'mpi', or an MPI")
    ranks, vendors = LAYOUTS[layout]
    folder = test_folder()
    files = sorted({path.stem for pattern in FILES for path in folder.glob(pattern)})
    environment = mpi_environment(mpirun) | {"UCCH_TIMEOUT": str(call), "UCCH_SUITE_ONLY": " ".join(only)}
    environment |= {"UCCH_EMULATE": vendors, "UCCH_SUITE_TYPES": types}
    results: dict[str, Result] = {}
    leave = [pattern for each in listed if each.hangs and among(layout, each.layouts) for pattern in each.tests]
    with tempfile.TemporaryDirectory() as temporary:
        out, skip = Path(temporary) / "results", Path(temporary) / "skip"
        command = [*mpi_command(mpirun, ranks), sys.executable, str(HERE / "mpi4py_ranks.py")]
        command += [str(folder), str(out), str(skip), str(TEST), *files]
        for _ in range(JOBS):
            skip.write_text("\n".join([*leave, *results]))
            out.write_text("")
            job, late = run_limited(command, environment, Path(temporary), JOB)
            if _read(out, results, f"status {job.returncode}{', killed' if late else ''}\n{job.output[-6000:]}"):
                return results
    raise RuntimeError(f"{layout}: more than {JOBS} tests ended their jobs: {results}")


def _read(out: Path, results: dict[str, Result], end: str) -> bool:
    """Take the results of a job; whether it came to its end. If not, the test that was under way has failed."""
    begun = ""
    for line in out.read_text().splitlines():
        facts: dict[str, Any] = json.loads(line)
        if "test" in facts:
            results[facts["test"]] = Result(facts["result"], facts["why"], facts["seconds"])
            begun = ""
        begun = facts.get("begin", begun)
        if "end" in facts:
            return True
    if not begun:
        raise RuntimeError(f"the ranks ended between two tests: {end}")
    results[begun] = Result("failed", f"ended its job: {end}")
    return False


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The counts as docs/conformance.md shows them."""
    rows = [
        f"| {layout} | {c['passed'] + c['refused']} | {c['passed']} | {c['refused']} | {c['skipped']} |"
        for layout, c in counts.items()
    ]
    return "\n".join(["| ranks | run | passed | refused | skipped by mpi4py |", "|---|---|---|---|---|", *rows])


def write(name: str, text: str) -> None:
    """Put a table into docs/conformance.md."""
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.S)
    PAGE.write_text(pattern.sub(lambda found: f"{found[1]}{text}{found[2]}", PAGE.read_text()))


def main(arguments: Sequence[str]) -> int:
    """Run the layouts; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="a layout of ranks; all by default")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names such as 'test_p2p_buf.*testProbe'")
    parser.add_argument("--write", action="store_true", help="put counts and refusals into docs/conformance.md")
    options = parser.parse_args(arguments)
    listed, layouts, only = refusals(), options.layout or list(LAYOUTS), options.only or ["*"]
    counts, wrong, used = {}, [], set()
    for layout in layouts:
        results = run(layout, listed, only)
        if folder := os.environ.get("UCCH_SUITE_KEEP"):
            kept = {test: result._asdict() for test, result in results.items()}
            (Path(folder) / f"{layout.replace(' ', '-')}.json").write_text(json.dumps(kept, indent=1))
        verdict = judge(layout, results, listed)
        counts[layout] = verdict.counts
        wrong += verdict.wrong
        used |= verdict.used
        seconds = sum(result.seconds for result in results.values())
        print(f"{layout}: {dict(verdict.counts)} in {seconds:.0f} s, {len(verdict.wrong)} wrong", flush=True)
    if options.layout is None and options.only is None:
        idle = [each for each in listed if each not in used and not each.hangs]
        wrong += [f"no test is refused by {each.tests}: {each.why}" for each in idle]
    print("\n".join(wrong))
    if options.write and not wrong:
        write("mpi4py counts", counts_table(counts))
        write("mpi4py", table(listed))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
