"""Run lanes of the test suite: ``lanes.py LANE ...``, four at a time in the order given, the longest first.

When all have ended, each failed test runs once more alone. If it passes then it is unsteady: it is listed, and does
not fail the run unless there are many. Each lane's output is printed in one piece, except the
first lane's, which is printed as it comes. The exit status is 0 if every lane passes.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

#: With three lanes two cores are idle for a tenth of the time, because tests wait for deaths and deadlines; with five,
#: the ranks, which spin while they wait for each other, take longer.
AT_A_TIME = 4
#: More unsteady tests than this fail the run.
MOST_UNSTEADY = 8
#: How many of its slowest tests each lane lists.
SLOWEST = 25

ROOT = Path(__file__).resolve().parent.parent
#: A third of the unit tests' time. As a separate lane it ends when the others do.
PLANS = "tests/unit/test_plans.py"
#: Folder of tests that start ranks -> its files whose ranks import torch, which takes half a minute per lane.
TORCH = {
    folder: sorted(
        str(path.relative_to(ROOT)) for kind in ("torch", "vllm") for path in ROOT.glob(f"{folder}/test_{kind}*.py")
    )
    for folder in ("tests/mpi", "tests/native", "tests/cluster")
}


def files(folder: str, *names: str) -> list[str]:
    """Return the paths of test files."""
    return [f"{folder}/test_{name}.py" for name in names]


#: Tests that start jobs and clusters of their own, and mostly wait; the others of these folders share crews.
JOBS = files("tests/mpi", "ends", "faults", "hang", "launch", "loading", "timeline")
CLUSTERS = files("tests/cluster", "emulated", "growth", "run", "slurm")
LOSSES = files("tests/cluster", "faults", "hang", "hosts_lost")


def without(*paths: str) -> list[str]:
    """Return pytest's arguments for all tests except these."""
    return [f"--ignore={path}" for path in paths]


#: lane -> pytest's arguments
SUITE = {
    "unit": ["tests/unit", *without(PLANS)],
    "plans": [PLANS],
    "devices": ["tests/native", *without(*TORCH["tests/native"])],
    "hosts": ["tests/cluster", *without(*TORCH["tests/cluster"], *CLUSTERS, *LOSSES)],
    "clusters": CLUSTERS,
    "losses": LOSSES,
    "jobs": JOBS,
    "front": ["tests/front"],
    "torch": [path for paths in TORCH.values() for path in paths],
    "ranks": without("tests/unit", "tests/native", "tests/cluster", "tests/front", *TORCH["tests/mpi"], *JOBS),
}
#: lane -> command of a lane without pytest
CHECKS = {name: ["make", "--no-print-directory", name] for name in ("types", "lint")}


@dataclass
class Lane:
    """A lane: its command, pytest's cache of failed tests, and its result."""

    name: str
    command: list[str]
    log: Path
    cache: Path | None = None  # None: not pytest
    status: int = -1
    seconds: float = 0.0
    core_seconds: float = 0.0
    unsteady: dict[str, str] = field(default_factory=dict)  # test -> its first failure

    def run(self, live: bool, *more: str) -> int:
        """Run the lane; return the exit status. The output is printed as it comes, or in one piece at the end.

        The output goes to a file: a pipe would stay open as long as a process that a test left behind holds it.
        """
        began = time.monotonic()
        with self.log.open("w") as log, self.log.open() as shown:
            job = subprocess.Popen(
                [*self.command, *more], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            while live and not (done := os.wait4(job.pid, os.WNOHANG))[0]:
                print(shown.read(), end="", flush=True)
                time.sleep(0.2)
            _, status, used = done if live else os.wait4(job.pid, 0)
            self.status = job.returncode = os.waitstatus_to_exitcode(status)
            self.seconds += time.monotonic() - began
            self.core_seconds += used.ru_utime + used.ru_stime
            print(shown.read(), end="", flush=True)
        return self.status

    def failed(self) -> list[str]:
        """The tests that failed in the last run."""
        memory = self.cache / "v/cache/lastfailed" if self.cache else None
        return list(json.loads(memory.read_text())) if memory and memory.exists() else []

    def summary(self) -> str:
        """Return the last run's summary: pytest's last line, or the exit status."""
        last = re.findall(r"^=+ (.* in [\d.]+s.*?) =+$", self.log.read_text(), re.M)
        return last[-1] if last else f"exit status {self.status}"

    def retry(self) -> None:
        """Rerun the failed tests, if pytest ended normally and reported them (status 1)."""
        failed = self.failed()
        if self.status != 1 or not failed:
            return
        said = self.log.read_text()
        print(f"--- {self.name}: {len(failed)} failed; once more, alone", flush=True)
        self.log = self.log.with_suffix(".again.log")
        if self.run(True, "--last-failed", "--last-failed-no-failures=none") == 0:
            lines = {name: re.search(rf"^(?:FAILED|ERROR) \S*{re.escape(name)}.*$", said, re.M) for name in failed}
            self.unsteady = {name: line[0] if line else name for name, line in lines.items()}


def make_lane(name: str, work: Path) -> Lane:
    """Make a lane from its name."""
    if name in CHECKS:
        return Lane(name, CHECKS[name], work / f"{name}.log")
    cache = work / f"{name}.cache"
    shutil.rmtree(cache, ignore_errors=True)  # failures of an earlier run do not matter
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", f"--durations={SLOWEST}", *SUITE[name]]
    return Lane(name, command, work / f"{name}.log", cache)


def run(lanes: list[Lane]) -> int:
    """Run the lanes, rerun failed tests, and print the results. Return 0, or 1 if anything failed."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(lambda lane: lane.run(lane is lanes[0]), lanes))
    wrong = [lane for lane in lanes if lane.status]
    print("\nlanes:")
    for lane in lanes:
        used = f"{lane.seconds:6.0f} s, {lane.core_seconds:4.0f} s of cores"
        print(f"  {lane.name:8} {used}  {lane.summary()}", flush=True)
    for lane in wrong:
        lane.retry()
    unsteady = {name: line for lane in lanes for name, line in lane.unsteady.items()}
    if unsteady:
        print(f"\nunsteady: {len(unsteady)} failed beside the other lanes, and passed alone:")
        print("\n".join(f"  {line}" for line in unsteady.values()))
    still = [lane.name for lane in wrong if lane.status]
    if still:
        print(f"\nwrong: {', '.join(still)}")
    elif len(unsteady) > MOST_UNSTEADY:
        print(f"\nwrong: more than {MOST_UNSTEADY} unsteady tests")
    return int(bool(still) or len(unsteady) > MOST_UNSTEADY)


def main(names: list[str]) -> int:
    """Run the lanes of these names."""
    if unknown := [name for name in names if name not in {**SUITE, **CHECKS}] or not names:
        print(f"lanes.py: unknown {unknown}; known: {' '.join((*SUITE, *CHECKS))}", file=sys.stderr)
        return 2
    os.environ.setdefault("TESTS_DRAW", str(secrets.randbelow(1 << 30)))  # reruns use the same seed
    work = ROOT / "build" / "lanes"
    work.mkdir(parents=True, exist_ok=True)
    return run([make_lane(name, work) for name in names])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
