"""Put and get of device memory between two ranks, compared with host memory, with copies by way of the host, and
limits.

    mpirun -np 2 python tools/rma_gpu.py                                          # two GPUs, one vendor
    mpirun -np 2 python tools/rma_gpu.py --amd 1 --hip libamdhip64-over-cuda.so   # two vendors; tests/hipcuda

On two hosts use their mpirun. A round moves 256 MiB: rank 0's puts, gets or lists of pages of one size;
``host`` puts from host memory to host memory; ``naive`` copies to pinned memory, sends by MPI and copies to the device,
one after the other; ``bcast`` is a collective with root 0, which between hosts uses the same wires. ``copies``
are rank 0's copies between the device and pinned memory. Results are GB/s, medians of alternating rounds, each after
an untimed one; received data is compared first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_job import RANK, about, begin, parser, write

ROUND = 256 << 20
#: Bytes of a page, and pages of a list.
PAGE, PAGES = 65536, 4096


class Pair:
    """Buffers of both ranks on the device and in host memory, and the transfers from rank 0 to rank 1."""

    def __init__(self, torch: Any, world: Any) -> None:
        import numpy as np

        from ucc_hetero import Communicator, rma

        self.comm = Communicator()  # selects this rank's device, also with HIP over CUDA
        self.torch, self.world = torch, world
        self.worker = rma.Worker()
        self.peer = rma.connect_all(self.worker, world)[1 - RANK]
        self.device = torch.randint(0, 255, (ROUND,), dtype=torch.uint8, device="cuda")
        self.host = torch.randint(0, 255, (ROUND,), dtype=torch.uint8)
        self.pinned = torch.empty(ROUND, dtype=torch.uint8, pin_memory=True)
        at = np.arange(PAGES, dtype=np.uint64) * np.uint64(PAGE)
        self.pages = at, np.random.default_rng(1).permutation(at), np.full(PAGES, PAGE, np.uint64)
        torch.cuda.synchronize()
        self.regions = {"device": self.worker.register(self.device), "host": self.worker.register(self.host.numpy())}
        self.targets = {
            name: self.peer.open(world.sendrecv(region.descriptor, 1 - RANK, source=1 - RANK))
            for name, region in self.regions.items()
        }

    def move(self, what: str, size: int, kind: str = "device") -> None:
        """Rank 0: put, get, or put pages in another order, until a round's data is moved."""
        region, target = self.regions[kind], self.targets[kind]
        if what == "pages":
            self.peer.put(region, target, *self.pages).Wait()
            return
        call = self.peer.put if what == "put" else self.peer.get
        for each in [call(region, target, at, at, size) for at in range(0, ROUND, size)]:
            each.Wait()

    def naive(self, size: int) -> None:
        """Both ranks: copy to pinned memory, send by MPI, and copy to the device, one piece at a time."""
        for at in range(0, ROUND, size):
            piece = slice(at, at + size)
            if RANK == 0:
                self.pinned[piece].copy_(self.device[piece])
                self.world.Send(self.pinned.numpy()[piece], 1)
            else:
                self.world.Recv(self.pinned.numpy()[piece], 0)
                self.device[piece].copy_(self.pinned[piece])

    def bcast(self, size: int) -> None:
        """Both ranks: move a round's data by collectives in a stream."""
        stream = self.torch.cuda.current_stream()
        for at in range(0, ROUND, size):
            self.comm.Ibcast(self.device[at : at + size], root=0, stream=stream)

    def copies(self) -> dict[str, float]:
        """Return GB/s of copies from the device to pinned memory, and back."""
        found = {}
        for name, to, source in (("out", self.pinned, self.device), ("in", self.device, self.pinned)):
            to.copy_(source)
            start = time.perf_counter()
            for _ in range(5):
                to.copy_(source, non_blocking=True)
            self.torch.cuda.synchronize()
            found[name] = 5 * ROUND / (time.perf_counter() - start) / 1e9
        return found

    def check(self, what: str, size: int) -> None:
        """Raise if the other rank's memory has wrong data."""
        self.torch.cuda.synchronize()
        self.world.Barrier()
        if RANK == 0:
            self.move(what, size)
        self.world.Barrier()
        mine = self.device.cpu()
        if what == "pages":
            import numpy as np

            order = np.random.default_rng(1).permutation(PAGES)
            mine = mine.view(PAGES, PAGE)[np.argsort(order)].reshape(-1) if RANK == 0 else mine
        theirs = self.torch.empty_like(mine)
        for at in range(0, ROUND, 64 << 20):
            piece = slice(at, at + (64 << 20))
            self.world.Sendrecv(mine.numpy()[piece], 1 - RANK, 0, theirs.numpy()[piece], 1 - RANK, 0)
        if not self.torch.equal(mine, theirs):
            raise AssertionError(f"{what} of {size} bytes: rank 1 does not have what rank 0 has")


def rate(pair: Pair, call: Callable[[], None], both: bool) -> float:
    """Return GB/s of a round made by rank 0, or by both ranks; an untimed round before it wakes links and threads."""
    for _ in range(2):
        pair.world.Barrier()
        start = time.perf_counter()
        if RANK == 0 or both:
            call()
            pair.torch.cuda.synchronize()
        pair.world.Barrier()
    return ROUND / (time.perf_counter() - start) / 1e9


def main() -> int:
    """Measure, and print on rank 0."""
    words = parser(__doc__, 2, 100)
    words.add_argument("--rounds", type=int, default=7, help="of each (default: 7)")
    words.add_argument("--sizes", default="1048576,67108864", help="bytes of a put or get (default: %(default)s)")
    options: argparse.Namespace = words.parse_args()
    torch = begin(options.amd, options.hip, options.limit)
    from mpi4py import MPI

    pair = Pair(torch, MPI.COMM_WORLD)
    calls: dict[str, tuple[Callable[[], None], bool]] = {}
    for size in map(int, options.sizes.split(",")):
        for what in ("put", "get"):
            pair.check(what, size)
            calls[f"{what} {size}"] = partial(pair.move, what, size), False
        calls[f"host put {size}"] = partial(pair.move, "put", size, "host"), False
        calls[f"naive {size}"] = partial(pair.naive, size), True
        calls[f"bcast {size}"] = partial(pair.bcast, size), True
    pair.check("pages", PAGE)
    calls[f"{PAGES} pages of {PAGE}"] = partial(pair.move, "pages", PAGE), False
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, (call, both) in calls.items():
            rounds[name].append(rate(pair, call, both))
    found = {name: round(statistics.median(each), 2) for name, each in rounds.items()}
    found |= {f"copies {name}": round(each, 2) for name, each in pair.copies().items()}
    if RANK == 0:
        print(pair.peer.info(pair.regions["device"], pair.targets["device"]))
        print("\n".join(f"{name:28}{value:8.2f}" for name, value in found.items()), flush=True)
        if options.json:
            write(options.json, {"about": about(torch, 2), "GB/s": found})
    pair.world.Barrier()
    for region in pair.regions.values():
        region.close()
    pair.worker.close()
    pair.comm.Free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
