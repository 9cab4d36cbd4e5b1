"""``python tools/bench_cluster.py``: collectives on emulated clusters, compared with the limit of their links.

Every case builds a cluster, measures its links with plain TCP sockets (before and after the jobs; the best value
counts), and times this package, plain UCC and Open MPI in turn with ``ucch-bench compare``. ``limit`` is the least time
in which any plan can move the data that must leave and enter the hosts, at the sockets' rate. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ucc_hetero.bench.report import short_size
from ucc_hetero.bench.result_file import origin, write_json
from ucc_hetero.bench.table import COLLECTIVES
from ucc_hetero.launch.emulate import Cluster, goodput, unavailable
from ucc_hetero.launch.emulated_net import parse_rates

_MIB = 1 << 20
#: How often a hanging job is started, and the seconds that a job may take.
_ATTEMPTS, _PATIENCE = 3, 180.0
#: Largest factor by which links are slowed down: on slower links a job takes minutes to start.
_SLOWEST = 100


@dataclass(frozen=True, slots=True)
class Test:
    """A collective and its bytes: of the vector, of all ranks' blocks together, or for alltoall of each pair.

    ``target`` is the ratio to the limit that is to be reached; 0 if the peers are the reference.
    """

    collective: str
    nbytes: int
    target: float = 0.0

    def count(self, ranks: int) -> int:
        """Return the number of float32 elements, counted as in the table of benchmarks."""
        per_rank = COLLECTIVES[self.collective].kind in ("gather_all", "gather_root", "scatter_root")
        return self.nbytes // 4 // (ranks if per_rank else 1)


@dataclass(frozen=True, slots=True)
class ClusterCase:
    """A shape of cluster and its tests. ``slots`` and ``rate`` as for ``Cluster``: one per host, or one for all."""

    name: str
    slots: tuple[int, ...]
    tests: tuple[Test, ...]
    rate: str = "4gbit"
    links: int = 1
    interleaved: bool = False

    def cluster(self) -> Cluster:
        """Make the cluster; it is not started."""
        plain = Cluster(len(self.slots), self.slots, self.rate, self.links)
        # The kernel reports 10 Gbit/s for every emulated port; a real port reports its speed.
        speeds = [sum(link.rate for link in host.links) // 10**6 for host in plain.layout]
        env = [{"UCCH_LINK_SPEED": str(speed)} for speed in speeds]
        return Cluster(len(self.slots), self.slots, self.rate, self.links, env=env)

    def slower(self, factor: float) -> ClusterCase:
        """Return the case with every link's rate divided by ``factor``, for cores that are slower than the links."""
        if factor == 1:
            return self
        rates = parse_rates(self.rate, len(self.slots), self.links)
        texts = ["+".join(f"{one / factor / 1e6:.12g}mbit" for one in host) for host in rates]
        return replace(self, rate=",".join(texts))

    def hosts(self) -> list[int]:
        """The host of each rank."""
        slots, out = list(self.slots), []
        while any(slots):
            for host, free in enumerate(slots):
                take = min(free, 1) if self.interleaved else free
                out += [host] * take
                slots[host] -= take
        return out


def _large(target: float) -> tuple[Test, ...]:
    return tuple(Test("allreduce", n * _MIB, target) for n in (16, 64))


_OTHERS = (
    *(Test(name, 64 * _MIB, 1.15) for name in ("allgather", "reduce_scatter", "bcast")),
    Test("alltoall", 16 * _MIB, 1.15),
)
_SMALL = tuple(Test("allreduce", n) for n in (8, 64, 512, 4096))

#: Shapes of cluster for which the hierarchical plans have targets.
CASES = (
    ClusterCase("2x2", (2, 2), _large(1.05)),
    ClusterCase("2x2 interleaved", (2, 2), _large(1.05), interleaved=True),
    ClusterCase("3+1", (3, 1), _large(1.10)),
    ClusterCase("2+2+1", (2, 2, 1), _large(1.10)),
    ClusterCase("4x2", (2, 2, 2, 2), _large(1.10)),
    ClusterCase("slow link", (2, 2), _large(1.10), rate="4gbit,1gbit"),
    ClusterCase("slow link of three", (2, 2, 2), _large(1.10), rate="4gbit,4gbit,1gbit"),
    ClusterCase("two links", (2, 2), _large(1.15), links=2),
    ClusterCase("2x2 others", (2, 2), _OTHERS),
    ClusterCase("2x2 small", (2, 2), _SMALL),
    ClusterCase("1+1 small", (1, 1), _SMALL),
)


def crossing_bytes(kind: str, size: int, inside: int, ranks: int) -> float:
    """Bytes that must leave or enter (the larger counts) a host with ``inside`` of the ranks, whatever the plan: what
    its ranks need and lack, or have and others need. ``size``: as OSU counts it for this kind."""
    more = max(inside, ranks - inside)
    crossing = {
        "reduce_all": size, "bcast": size, "reduce_scatter": more / ranks * size, "gather_all": more * size,
        "exchange": inside * (ranks - inside) * size,
    }  # fmt: skip
    if kind not in crossing:
        raise ValueError(f"no limit is known for calls of the kind {kind}")
    return crossing[kind]


def limit(test: Test, hosts: Sequence[int], rates: Sequence[float]) -> float:
    """Return the seconds that any plan needs to move the data that must leave and enter the hosts.

    ``hosts`` has the host of each rank, ``rates`` the bytes per second of each host's link in either direction.
    """
    kind, size = COLLECTIVES[test.collective].kind, 4 * test.count(len(hosts))
    busy = [crossing_bytes(kind, size, hosts.count(host), len(hosts)) / rate for host, rate in enumerate(rates)]
    if kind == "reduce_all":  # all hosts together: reduce all vectors but one, and distribute as many results
        busy.append(2 * (len(rates) - 1) * size / sum(rates))
    return max(busy)


def _sockets(cluster: Cluster) -> dict[int, float]:
    """Nominal bits per second of a host's links -> bytes per second by plain sockets, both ways at once."""
    found: dict[int, float] = {}
    nominal = [sum(link.rate for link in host.links) for host in cluster.layout]
    for a, b in pairwise(range(len(nominal))):
        slower = min(nominal[a], nominal[b])
        for _ in range(2):
            found[slower] = max(found.get(slower, 0.0), goodput(cluster, a, b))
    return found


def _rates(cluster: Cluster, *found: Mapping[int, float]) -> list[float]:
    """Return bytes per second of each host's links: the best measured at their nominal rate, or in proportion to it."""
    best: dict[int, float] = {}
    for seen in found:
        best |= {rate: max(value, best.get(rate, 0.0)) for rate, value in seen.items()}
    share = max(value / rate for rate, value in best.items())
    nominal = [sum(link.rate for link in host.links) for host in cluster.layout]
    return [best.get(rate, rate * share) for rate in nominal]


def _job(
    case: ClusterCase, test: Test, cluster: Cluster, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Run one test in a separate job; return the seconds of each peer's rounds."""
    size, out = 4 * test.count(sum(case.slots)), folder / "out.json"
    words = ["--collective", test.collective, "-m", f"{size}:{size}", "-r", str(arguments.rounds)]
    words += ["--peers", ",".join(arguments.peers), "--json", str(out)]
    # Open MPI must not use UCX, so that the comparison is between UCX and Open MPI's own transports.
    options = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    options += ["--map-by", "node" if case.interleaved else "slot"]  # regardless of the environment
    environment = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"}
    for setting in arguments.x:
        name, _, value = setting.partition("=")
        environment[name] = value or os.environ.get(name, "")
    done = _started(cluster, [sys.executable, "-m", "ucc_hetero.bench", "compare", *words], environment, options)
    if done.returncode or not out.exists():
        raise RuntimeError(f"case {case.name!r} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    found = json.loads(out.read_text())
    out.unlink()
    series: dict[str, list[float]] = {}
    for each in found["rows"][0]["series"]:
        series.setdefault(each["peer"], [us * 1e-6 for us in each["rounds"]])  # blocking calls come first
    return {"collective": test.collective, "nbytes": test.nbytes, "series": series, "plans": found["plans"]}


def _started(
    cluster: Cluster, command: Sequence[str], env: Mapping[str, str], options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run a job, twice if necessary: on a busy machine Open MPI 5's daemons occasionally fail to connect."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(subprocess.TimeoutExpired):
            return cluster.mpirun(command, env=env, options=options, timeout=_PATIENCE)
    return cluster.mpirun(command, env=env, options=options, timeout=_PATIENCE)


def measure(case: ClusterCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the cluster, measure links and collectives, and return the case's rows."""
    with case.cluster() as cluster, tempfile.TemporaryDirectory(prefix="ucch-cluster-") as folder:
        before = _sockets(cluster)
        rows = [_job(case, test, cluster, arguments, Path(folder)) for test in case.tests]
        rates = _rates(cluster, before, _sockets(cluster))
    for test, row in zip(case.tests, rows, strict=True):
        row |= {"target": test.target, "limit": limit(test, case.hosts(), rates)}
        row |= {"median": {name: median(each) for name, each in row["series"].items()}}
        row |= {"least": {name: min(each) for name, each in row["series"].items()}}
    shape = {"slots": case.slots, "rate": case.rate, "links": case.links, "interleaved": case.interleaved}
    return {"case": case.name, **shape, "goodput": rates, "rows": rows, "load": os.getloadavg()[0]}


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--case", action="append", default=[], help=f"only this one; may be repeated: {names}")
    parser.add_argument("--collective", default="", help="only this one")
    slower = "divide the links' rates, for a machine whose cores cannot keep up with them (1)"
    parser.add_argument("--slower", type=float, default=1.0, metavar="FACTOR", help=slower)
    parser.add_argument("--rounds", type=int, default=7, help="of each test (7)")
    parser.add_argument("--peers", default="ours,ucc,mpi4py", help="who is measured (ours,ucc,mpi4py; also gloo)")
    parser.add_argument("-x", action="append", default=[], metavar="NAME=VALUE", help="environment of the ranks")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.parse_args(list(words))
    unknown = [name for name in found.case if name not in {case.name for case in CASES}]
    if unknown:
        parser.error(f"--case {unknown[0]!r} is not one of {names}")
    if not 1 <= found.slower <= _SLOWEST:
        parser.error(f"--slower {found.slower:g} is not a factor from 1 to {_SLOWEST}")
    found.peers = found.peers.split(",")
    return found


def _wanted(arguments: argparse.Namespace) -> list[ClusterCase]:
    wanted = [case for case in CASES if not arguments.case or case.name in arguments.case]
    cases = [case.slower(arguments.slower) for case in wanted]
    if not arguments.collective:
        return cases
    narrowed = []
    for case in cases:
        tests = tuple(test for test in case.tests if test.collective == arguments.collective)
        if tests:
            narrowed.append(replace(case, tests=tests))
    return narrowed


def heading(peers: Sequence[str]) -> str:
    """The table's first lines."""
    columns = "".join(f"{f'{name}(ms)':>12}" for name in peers)
    left = f"{'# case':<20}{'collective':<16}{'bytes':>6}{'limit(ms)':>11}"
    return f"{left}{columns}{'ours/limit':>12}{'best':>8}{'target':>8}"


def line(case: str, row: dict[str, Any], peers: Sequence[str]) -> str:
    """One row of the table."""
    times = "".join(f"{row['median'][p] * 1e3:12.3f}" if p in row["median"] else f"{'-':>12}" for p in peers)
    text = f"{case:<20}{row['collective']:<16}{short_size(row['nbytes']):>6}{row['limit'] * 1e3:11.3f}{times}"
    if row["target"] and peers[0] in row["median"]:
        ratio, best = (row[kind][peers[0]] / row["limit"] for kind in ("median", "least"))
        return f"{text}{ratio:12.2f}{best:8.2f}{row['target']:8.2f}"
    return text


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    arguments = _arguments(words)
    reason = unavailable()
    if reason is not None:
        raise SystemExit(f"no cluster can be emulated here: {reason}")
    cores = len(os.sched_getaffinity(0))
    print(f"# load {os.getloadavg()[0]:.1f} on {cores} cores; medians; best = that of the fastest call", flush=True)
    print(heading(arguments.peers), flush=True)
    cases = []
    for case in _wanted(arguments):
        cases.append(measure(case, arguments))
        for row in cases[-1]["rows"]:
            print(line(case.name, row, arguments.peers), flush=True)
    if arguments.json:
        command = ["python", "tools/bench_cluster.py", *words]
        write_json(arguments.json, {**origin("cluster", command), "unit": "s", "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
