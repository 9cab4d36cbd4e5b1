"""torch's own ``DistributedTest`` against the backend ``ucch``, with gloo as control, or NCCL with ``--gpus``.

``ucch`` must pass what the control passes, except for the methods listed with reasons in docs/torch-tests.md. The suite
fails if a method fails and is not listed, if the control passes one and ucch skips it, and if a listed one passes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from conftest import find_mpirun, kill_session, mpi_command, mpi_environment  # noqa: E402
from torch_ranks import news  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "torch-tests.md"

#: Seconds without progress of a job's ranks after which it counts as hanging: torch's own limits are 60.
STILL = 100.0
#: The same before the first progress: the ranks import torch.
START = 240.0
#: Jobs per backend: each failed method ends one.
MOST_JOBS = 60


class Way(NamedTuple):
    """How to run the methods: a backend, and the emulated vendors of its ranks; or GPUs, and the ranks that use them
    through a HIP runtime."""

    backend: str
    emulate: str = ""
    gpus: bool = False
    amd: str = ""
    hip: str = ""

    @property
    def environment(self):
        if self.gpus and self.backend == "ucch":  # groups of one vendor, and those that a method asks of NCCL, are ours
            return {"UCCH_TORCH_VENDOR": "n", "UCCH_TORCH_REPLACE": "nccl"}
        return {"UCCH_EMULATE": self.emulate} if self.emulate else {}

    @property
    def words(self):
        return ["--gpus", "--amd", self.amd, "--hip", self.hip] if self.gpus else []

    def __str__(self):
        vendors = f"two vendors (ranks {self.amd} by HIP)" if self.amd else self.emulate
        return f"{self.backend} on {vendors}" if vendors else self.backend


@dataclass
class Result:
    outcome: str
    text: str = ""


def exceptions(page, section):
    """Method -> reason, from the table in a section of the page."""
    text = page.partition(f"### {section}\n")[2].partition("\n### ")[0]
    return dict(re.findall(r"^\| `(test_\w+)` \| (.+?) \|$", text, re.MULTILINE))


class Job:
    """Ranks that run methods one after the other, until all are done or one has failed."""

    def __init__(self, way, methods, ranks, folder, python):
        self.methods, self.ranks, self.folder = methods, ranks, folder
        (folder / "barrier").mkdir()
        (folder / "test_dir").mkdir()
        (folder / "methods").write_text("\n".join(methods))
        self._output = (folder / "output").open("w")
        program = find_mpirun()
        if program is None:
            sys.exit("no mpirun: install the extra 'mpi', or an MPI")
        words = way.backend, str(folder), *way.words
        command = [*mpi_command(program, ranks), *python, str(HERE / "torch_ranks.py"), *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True,
            env=mpi_environment(program) | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | way.environment,
        )  # fmt: skip

    def _news(self):
        return [line for rank in range(self.ranks) for line in news(self.folder, rank)]

    def run(self):
        """Wait for the end; False if the job hung and was killed."""
        seen, since = 0, time.monotonic()
        while self._process.poll() is None:
            time.sleep(0.1)
            if (lines := len(self._news())) != seen:
                seen, since = lines, time.monotonic()
            elif time.monotonic() - since > (STILL if seen else START):
                self._end()
                return False
        self._end()
        return True

    def _end(self):
        kill_session(self._process.pid)
        self._process.wait()
        self._output.close()

    def results(self, ended):
        found = {}
        noted = sorted(self._news(), key=lambda line: line[3])
        for method in self.methods:
            lines = [line for line in noted if line[0] == method]
            outcomes = Counter(line[1] for line in lines)
            if not lines:
                break
            if failed := next((line[2] for line in lines if line[1] == "failed"), None):
                found[method] = Result("failed", failed)
            elif outcomes["passed"] + outcomes["skipped"] < self.ranks:
                tail = (self.folder / "output").read_text(errors="replace")[-3000:]
                found[method] = Result("failed", f"{'a rank died' if ended else 'stood still'}\n{tail}")
            elif outcomes["passed"]:
                found[method] = Result("passed")
            else:
                found[method] = Result("skipped", lines[-1][2])
        return found


def run_all(way, methods, ranks, python=(sys.executable,)):
    """Return every method's result, in as many jobs as necessary. ``python``: words that start Python."""
    found = {}
    left = list(methods)
    for _ in range(MOST_JOBS):
        if not left:
            return found
        with tempfile.TemporaryDirectory(prefix="ucch-torch-") as folder:
            job = Job(way, left, ranks, Path(folder), python)
            new = job.results(job.run())
            if not new:
                sys.exit(f"{ranks} ranks did not start:\n{(Path(folder) / 'output').read_text()[-3000:]}")
        found |= new
        for method, result in new.items():
            if result.outcome == "failed":
                print(f"{way}: {method} failed: {last_line(result.text)}", flush=True)
        left = [method for method in left if method not in found]
    sys.exit(f"{way}: {MOST_JOBS} methods failed; {len(left)} were not run")


def last_line(text):
    """Return the line of a traceback with the error."""
    return (text.strip().splitlines() or [""])[-1]


def all_methods():
    code = "import torch_ranks as t; m = t.load('gloo'); print(*t.methods_of(t.adapt(m, 'gloo')))"
    environment = os.environ | {"WORLD_SIZE": "4", "RANK": "0", "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        sys.exit(f"torch's tests cannot be loaded:\n{done.stderr}")
    return done.stdout.split()


def judge(ours, control, listed):
    """Return differences from the control that the page does not list, and listed methods that pass."""
    wrong = []
    for method, result in ours.items():
        theirs = control.get(method, Result("not run")).outcome
        short = result.outcome == "failed" or (result.outcome == "skipped" and theirs == "passed")
        if short and method not in listed:
            wrong.append(f"{method}: {result.outcome} (control: {theirs})\n{result.text}")
        if method in listed and result.outcome == "passed":
            wrong.append(f"{method}: passes; take it off the list in {PAGE.name}")
    return wrong


def count(results):
    got = Counter(result.outcome for result in results.values())
    return f"{got['passed']} passed, {got['failed']} failed, {got['skipped']} skipped"


def main():
    """Run the suite; return 0 if all results are as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", help="only these methods")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--emulate", nargs="*", default=["", "nvidia:2,amd:2"], help="vendors of the ranks, one run each"
    )
    parser.add_argument("--gpus", action="store_true", help="tests of GPUs, one for each rank; NCCL is the control")
    parser.add_argument(
        "--hip", default="", help="with --gpus: HIP runtime of the second half of the ranks, in one run more"
    )
    parser.add_argument("--no-control", action="store_true", help="leave out the control's run")
    options = parser.parse_args()
    if find_spec("torch") is None:
        print("torch's DistributedTest: torch is not installed (WITH_TORCH=torch)")
        return 0
    methods = options.methods or all_methods()
    first, ways = ways_of(options)
    listed = exceptions(PAGE.read_text(), "On GPUs" if options.gpus else "On host memory")
    control = {} if options.no_control else run_all(first, methods, options.ranks)
    # Methods that fail in the control need more GPUs, or other versions of packages.
    possible = [method for method in methods if method not in control or control[method].outcome != "failed"]
    ours = {way: run_all(way, possible, options.ranks) for way in ways}
    wrong = [f"{way}: {each}" for way, results in ours.items() for each in judge(results, control, listed)]
    for each in wrong:
        print(f"\n{each}")
    print(f"\ntorch's DistributedTest on {options.ranks} ranks, {len(methods)} methods, {len(listed)} of them excepted")
    for way, results in {first: control, **ours}.items():
        print(f"  {way}: {count(results)}")
    return 1 if wrong else 0


def ways_of(options):
    """Return the control, and the ways to run ``ucch``."""
    if not options.gpus:
        return Way("gloo"), [Way("ucch", each) for each in options.emulate]
    found = [Way("ucch", gpus=True)]
    if options.hip:
        half = ",".join(map(str, range((options.ranks + 1) // 2, options.ranks)))
        found.append(Way("ucch", gpus=True, amd=half, hip=options.hip))
    return Way("nccl", gpus=True), found


if __name__ == "__main__":
    sys.exit(main())
