"""Measure a rank's resources over many calls, communicators and failures: memory, descriptors, threads, shared
segments.

    mpirun -n 2 python tools/soak.py --collectives 1000000 --communicators 10000 --failures 1000

Each kind of work first runs for a tenth of its rounds, to fill caches; its growth over the other nine tenths is
printed, one line each. The job ends with status 1 if descriptors, threads or shared segments have grown, or memory
by more than ``--most`` KiB. libucc cannot cancel a posted call: a refused call may leave 20 KiB, and a failed one
100 KiB, and each a page of shared memory with its communicator.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ucc_hetero import IN_PLACE, Communicator, rma
from ucc_hetero.errors import CollectiveError


class Holdings(NamedTuple):
    """Resources that this process holds."""

    kib: int
    descriptors: int
    threads: int
    maps: int
    segments: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = sum("/dev/shm/" in line or "/memfd:" in line or "/SYSV" in line for line in maps)
        return cls(
            int(status["VmRSS"].split()[0]),
            len(list(Path("/proc/self/fd").iterdir())),
            int(status["Threads"]),
            len(maps),
            shared,
        )

    def less(self, before: Holdings) -> Holdings:
        return Holdings(*(now - then for now, then in zip(self, before, strict=True)))


#: Kinds of work, and the rounds of each.
KINDS = {
    "collectives": 100_000, "communicators": 300, "transfers": 100, "groups": 100, "refusals": 100, "failures": 50,
}  # fmt: skip
#: KiB that stay in libucc after a call that did not complete.
LOST = {"refusals": 20, "failures": 100}


class Work:
    """Rounds of one communicator's calls; data of several lengths."""

    def __init__(self) -> None:
        self.comm = Communicator()
        self.arrays = [(np.ones(n), np.empty(n)) for n in (1, 100, 5_000)]
        self.starts = [self.comm.Allreduce_init(x, y) for x, y in self.arrays]

    def collectives(self, number: int) -> None:
        """Blocking, non-blocking and persistent calls and messages, in turn."""
        x, y = self.arrays[number % 3]
        kind = number % 10
        if kind < 6:
            self.comm.Allreduce(x, y)
        elif kind == 6:
            self.comm.Iallreduce(x, y).Wait()
        elif kind == 7:
            self.starts[number % 3].Start()
            self.starts[number % 3].Wait()
        elif kind == 8:
            self.comm.Bcast(y, number % self.comm.size)
        else:
            peer = self.comm.rank ^ 1
            if peer < self.comm.size:
                self.comm.Sendrecv(x, peer, 0, y, peer, 0)

    def communicators(self, number: int) -> None:
        """Create, use and free a communicator."""
        with Communicator() as comm:
            comm.Allreduce(IN_PLACE, self.arrays[number % 3][1])

    def refusals(self, number: int) -> None:
        """Make calls whose arguments one rank refuses, then free the communicator."""
        comm = Communicator()
        x, y = self.arrays[1]
        with suppress(CollectiveError, ValueError):
            comm.Allreduce(x, y[:-1] if comm.rank == number % comm.size else y)
        comm.Free()
        MPI.COMM_WORLD.Barrier()

    def failures(self, number: int) -> None:
        """Make calls that differ between ranks, then free the communicator."""
        comm = Communicator()
        x, y = self.arrays[1]
        with suppress(CollectiveError):
            comm.Allreduce(x, y, op=MPI.MAX if comm.rank else MPI.SUM)
            comm.Barrier()
        comm.Free()
        MPI.COMM_WORLD.Barrier()

    def transfers(self, number: int) -> None:
        """Put with a notification to the next rank, by a worker."""
        comm, worker = MPI.COMM_WORLD, rma.Worker()
        peers, room = rma.connect_all(worker, comm), np.zeros(10_000)
        mine, theirs = worker.register(np.full(10_000, float(number))), worker.register(room)
        right = peers[(comm.rank + 1) % comm.size]
        target = right.open(comm.allgather(theirs.descriptor)[(comm.rank + 1) % comm.size])
        right.put(mine, target, 0, 0, notify=b"put").Wait()
        worker.wait_notification()
        assert (room == number).all()
        comm.Barrier()
        worker.close()

    def groups(self, number: int) -> None:
        """Create and destroy a torch group, if torch is installed."""
        try:
            import torch
            import torch.distributed as dist

            import ucc_hetero.torch  # noqa: F401  registers the backend
        except ImportError:
            return
        if not dist.is_initialized():
            dist.init_process_group("ucch")
        group = dist.new_group()
        data = torch.full((1000,), float(number))
        dist.all_reduce(data, group=group)
        assert (data == number * MPI.COMM_WORLD.size).all()
        dist.destroy_process_group(group)


def run(name: str, round_: Callable[[int], Any], count: int) -> Holdings:
    """Return the growth of this rank's resources over nine tenths of the rounds."""
    first = max(count // 10, 1)
    for number in range(first):
        round_(number)
    before, began = Holdings.now(), time.monotonic()
    for number in range(first, count):
        round_(number)
    growth = Holdings.now().less(before)
    worst = Holdings(*map(max, zip(*MPI.COMM_WORLD.allgather(growth), strict=True)))
    if MPI.COMM_WORLD.rank == 0:
        took = (time.monotonic() - began) / max(count - first, 1)
        print(
            f"{name}: {count - first} more rounds of {1e6 * took:.1f} us: "
            + ", ".join(f"{k} {v:+d}" for k, v in worst._asdict().items()),
            flush=True,
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"rounds ({default})")
    parser.add_argument("--most", type=int, default=4096, help="KiB by which memory may grow in each kind (4096)")
    args = parser.parse_args()
    work, bad = Work(), []
    for name in KINDS:
        if count := getattr(args, name):
            growth = run(name, getattr(work, name), count)
            lost = LOST.get(name, 0)
            grown = growth.descriptors > 2 or growth.threads > 0 or growth.segments > (count + 2 if lost else 2)
            bad += [name] if grown or growth.kib > args.most + lost * count else []
    for start in work.starts:
        start.Free()
    work.comm.Free()
    if bad and MPI.COMM_WORLD.rank == 0:
        print(f"grown: {', '.join(bad)}", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
