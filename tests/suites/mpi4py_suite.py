"""Runs mpi4py's own tests through this package, and compares failures with the list of refusals in this folder.

    python tests/suites/mpi4py_suite.py [--layout NAME]... [--only PATTERN]... [--write]

Runs every layout of ranks and all tests of collectives and messages. Fails for a test that fails and is not listed, and
for one that is listed and passes. ``--write`` then writes the counts into docs/conformance.md.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

from conftest import find_mpirun, mpi_command, mpi_environment, run_limited  # noqa: E402

PAGE, LIST, CACHE = ROOT / "docs/conformance.md", HERE / "mpi4py_refusals.json", ROOT / "build/suites"

#: name -> (ranks, emulated vendors)
LAYOUTS = {
    "1": (1, ""), "2": (2, ""), "3": (3, ""), "4": (4, ""), "3 of two vendors": (3, "nvidia:1,amd:2"),
    "4 of two vendors": (4, "nvidia:2,amd:2"),
}  # fmt: skip

FILES = ("test_cco_*.py", "test_p2p_*.py", "test_msgspec.py", "test_msgzero.py")

#: Timeouts in seconds: of a call, of a test, after which its job is killed, and of a job.
CALL, TEST, JOB = 60, 600, 7200
#: Jobs for one layout: after a killed test the next job continues with the remaining ones.
JOBS = 8


class SourceMissing(RuntimeError):
    """The source distribution is neither in the cache nor available from the package index."""


def test_folder():
    """Return the ``test`` folder of the installed version's source distribution; fetched once, then kept in
    ``CACHE``."""
    version = importlib.metadata.version("mpi4py")
    folder = CACHE / f"mpi4py-{version}" / "test"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            unpacked = _unpacked(version, Path(temporary))
            try:
                unpacked.rename(folder.parent)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def _unpacked(version, into):
    # Without isolation and with what is installed, pip prepares the metadata; nothing is compiled.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={version}", "--dest", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    archives = list(into.glob("mpi4py-*.tar.gz"))
    if done.returncode or len(archives) != 1:
        raise SourceMissing(f"pip could not fetch the source distribution of mpi4py {version}:\n{done.stderr.strip()}")
    with tarfile.open(archives[0]) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4, and later 3.10s
        archive.extractall(into, **safely)
    return into / archives[0].name.removesuffix(".tar.gz")


def among(name, patterns):
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Refusal(NamedTuple):
    """Tests that fail, on which layouts, words of the error, and why this is right. ``hangs``: not run."""

    tests: tuple[str, ...]
    why: str
    words: str = ""
    layouts: tuple[str, ...] = ("*",)
    hangs: bool = False

    def matches(self, layout, test):
        """True if it covers a test on a layout."""
        return among(layout, self.layouts) and among(test, self.tests)


class Result(NamedTuple):
    kind: str
    why: str
    seconds: float = 0.0


class Verdict(NamedTuple):
    counts: Counter[str]
    wrong: list[str]
    used: set[Refusal]


def refusals():
    """The committed list."""
    return [
        Refusal(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for entry in json.loads(LIST.read_text())
    ]


def judge(layout, results, listed):
    verdict = Verdict(Counter(), [], set())
    for test, result in results.items():
        about = [each for each in listed if each.matches(layout, test) and not each.hangs]
        by = [each for each in about if each.words in result.why]
        kind = "refused" if result.kind == "failed" and by else result.kind
        verdict.counts[kind] += 1
        verdict.used.update(by if kind == "refused" else ())
        if kind == "failed":
            said = " though by other words than those listed" if about else ""
            verdict.wrong.append(f"{layout}: {test} fails{said}: {result.why}")
        elif kind == "passed" and about:
            verdict.wrong.append(f"{layout}: {test} passes and is listed as refused: {about[0].why}")
    return verdict


def run(layout, listed, only=("*",), call=CALL, types=""):
    """Return the tests' results on a layout, with types drawn by the seed ``types``; ``OSError`` without mpirun."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise OSError("no mpirun: install the extra 'mpi', or an MPI")
    ranks, vendors = LAYOUTS[layout]
    folder = test_folder()
    files = sorted({path.stem for pattern in FILES for path in folder.glob(pattern)})
    environment = mpi_environment(mpirun) | {"UCCH_TIMEOUT": str(call), "UCCH_SUITE_ONLY": " ".join(only)}
    environment |= {"UCCH_EMULATE": vendors, "UCCH_SUITE_TYPES": types}
    results = {}
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


def _read(out, results, end):
    """Read a job's results; return whether it finished. If not, the test in progress has failed."""
    begun = ""
    for line in out.read_text().splitlines():
        facts = json.loads(line)
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


def table(listed):
    """The refusals as docs/conformance.md shows them."""
    rows = []
    for each in listed:
        names = ", ".join(f"`{test.removeprefix('test_')}`" for test in each.tests)
        where = "" if each.layouts == ("*",) else f" ({', '.join(each.layouts)} ranks)"
        rows.append(f"| {names}{where} | {each.why} |")
    return "\n".join(["| tests | why |", "|---|---|", *rows])


def counts_table(counts):
    """The counts as docs/conformance.md shows them."""
    rows = [
        f"| {layout} | {c['passed'] + c['refused']} | {c['passed']} | {c['refused']} | {c['skipped']} |"
        for layout, c in counts.items()
    ]
    return "\n".join(["| ranks | run | passed | refused | skipped by mpi4py |", "|---|---|---|---|---|", *rows])


def write(name, text):
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.S)
    PAGE.write_text(pattern.sub(lambda found: f"{found[1]}{text}{found[2]}", PAGE.read_text()))


def main(arguments):
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
