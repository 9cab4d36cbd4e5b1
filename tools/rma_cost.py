"""Put and get of host memory compared with ucx_perftest, alternately, between two processes of one host or of two.

    mpirun -np 2 python tools/rma_cost.py                                # one host
    python -m ucc_hetero.launch.emulate --hosts 2 --slots 1 --rate none -- mpirun -np 2 python tools/rma_cost.py

Both sides transfer the same number of pieces, back to back, at one address: this package as one list, ucx_perftest
with one call for each piece. Results are microseconds per piece, the least of all rounds; for a single piece a call
that is waited for, and ucx_perftest's median latency. Both use private memory of two processes, between which the
kernel copies on one host: by default ucx_perftest would use shared memory, where a short put is a store. ucx_perftest's
memory is written when it is allocated (MALLOC_PERTURB_), as all reads of pages that were never written hit one cached
page of zeros. This package's memory is mapped without huge pages, which numpy would request and ucx_perftest does not
have, and with which the kernel copies 1 MiB in half the time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ucc_hetero import rma

UCX = Path(next(iter(import_module("libucx").__path__)))
#: (bytes of a piece, pieces in a row).
SIZES = (8, 1), (8, 4096), (4096, 1024), (65536, 256), (1 << 20, 64), (64 << 20, 4)


def perftest(comm: Any, what: str, size: int, count: int) -> float:
    """Return ucx_perftest's microseconds per piece; rank 1 serves."""
    port = comm.bcast(14000 + os.getpid() % 20000 if comm.rank == 0 else None)
    host = comm.bcast(MPI.Get_processor_name(), root=1)
    env = os.environ | {
        "UCX_ALLOC_PRIO": "heap",
        "MALLOC_PERTURB_": "1",
        "LD_LIBRARY_PATH": f"{UCX / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    words = [str(UCX / "bin" / "ucx_perftest"), "-p", str(port)]
    options: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if comm.rank == 1:
        with subprocess.Popen(words, **options) as server:
            time.sleep(0.5)
            meet(comm)
            meet(comm)
            server.kill()
        return 0.0
    meet(comm)
    test = {"put": "ucp_put_bw" if count > 1 else "ucp_put_lat", "get": "ucp_get"}[what]
    times = str(max(count, 100) if count > 1 else 5000)
    more = ["-t", test, "-s", str(size), "-n", times, "-w", str(min(count, 20)), "-v", "-f"]
    done = subprocess.run([*words, host, *more], timeout=120, check=False, **options)
    meet(comm)
    names, values = (line.split(",") for line in done.stdout.split() if "," in line)
    found = dict(zip(names, values, strict=True))
    return float(found["overall_lat" if count > 1 else next(name for name in found if "percentile" in name)])


def meet(comm: Any) -> None:
    """Wait for the other rank without using the core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


class Ours:
    """This package's side: both memories, and the peer."""

    def __init__(self, comm: Any) -> None:
        most = max(size for size, _ in SIZES)
        self.worker = rma.Worker(timeout=60)
        peers = rma.connect_all(self.worker, comm)
        memory = np.frombuffer(mmap.mmap(-1, most, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        memory[:] = comm.rank
        self.mine = self.worker.register(memory)
        told = comm.allgather(self.mine.descriptor)
        self.peer = peers[1 - comm.rank]
        self.theirs = self.peer.open(told[1 - comm.rank])

    def __call__(self, what: str, size: int, count: int) -> float:
        """Return microseconds per piece."""
        call = self.peer.put if what == "put" else self.peer.get
        at: Any = np.zeros(count, np.uint64) if count > 1 else 0
        times = []
        for _ in range(11 if count > 1 else 1001):
            start = time.perf_counter()
            call(self.mine, self.theirs, at, at, size).Wait()
            times.append(time.perf_counter() - start)
        return 1e6 * min(times) / count


def main() -> None:
    """Measure all sizes, both directions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    comm, found = MPI.COMM_WORLD, []
    ours = Ours(comm)
    for what in ("put", "get"):
        for size, count in SIZES:
            rows = []
            for _ in range(options.rounds):
                own = ours(what, size, count) if comm.rank == 0 else 0.0
                meet(comm)
                rows.append((own, perftest(comm, what, size, count)))
            own, peer = map(min, zip(*rows, strict=True))
            found.append({"what": what, "bytes": size, "pieces": count, "ours": own, "ucx_perftest": peer})
            if comm.rank == 0:
                ratio = f"{own / peer:5.2f} x, {own - peer:+.2f} us"
                print(f"{what} {count:5} x {size:9} B: {own:10.2f} us, {peer:10.2f}: {ratio}", flush=True)
    if options.json and comm.rank == 0:
        Path(options.json).write_text(json.dumps(found, indent=1))
    comm.Barrier()
    ours.worker.close()


if __name__ == "__main__":
    main()
