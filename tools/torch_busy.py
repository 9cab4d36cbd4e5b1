"""Collectives and matrix products at once, through torch: calls of a given time, and products' speed beside a call.

    python tools/torch_busy.py --ranks 2 --amd 1 --hip libamdhip64-over-cuda.so --json out.json   # tests/hipcuda
    python tools/torch_busy.py --ranks 2 --seconds 3                                     # the host, emulated

``calls``: asynchronous collectives of all kinds and sizes (8 B to 16 MiB, of the same seed for every backend) in two
groups of all ranks, bfloat16 matrix products between them, waited for and compared sixteen at a time; how many fit into
``--seconds``. ``products``: TFLOP/s of a rank's products alone, and while all_reduces of 128 MiB follow each other.
Every backend is a job of its own; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from torch_calls import KINDS, call_of, of_all, settle
from torch_job import about, every_backend, join, parser, ratio, status, write

BATCH = 16


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 90, "nccl,ucch,mixed,gloo")
    found.add_argument("--seconds", type=float, default=15, help="of mixed calls (default: 15)")
    return found.parse_args()


# --- a rank of a job --------------------------------------------------------------------------------------------------


class Bench:
    """A rank's groups, matrices and means to wait."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.dist = torch, torch.distributed
        self.n, self.rank = self.dist.get_world_size(), self.dist.get_rank()
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        self.groups = [self.dist.new_group() for _ in range(2)]
        self.order = 4096 if self.gpu else 128
        kind = torch.bfloat16 if self.gpu else torch.float32
        self.square = torch.randn(self.order, self.order, dtype=kind, device=self.device)
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)

    def call(self, kind: str, count: int, group: Any, value: int) -> tuple[Any, Any, int]:
        """One asynchronous collective of ``count`` elements a rank: its work, its output, and what that is to hold."""
        sends, receives = (count * (self.n if spread else 1) for spread in KINDS[kind])
        x = self.torch.full((sends,), float(value), device=self.device)
        y = x if kind in ("all_reduce", "broadcast") else self.torch.full((receives,), -1.0, device=self.device)
        work = call_of(self.dist, kind, x, y, group=group, async_op=True)()
        return work, y, value * self.n if "reduce" in kind else value

    def calls(self, seconds: float) -> float:
        """Calls a second, all compared with what they are to give."""
        draw, done = random.Random(5), 0
        end = time.perf_counter() + seconds
        start = time.perf_counter()
        while True:
            flying = []
            for _ in range(BATCH):
                kind, size = draw.choice(list(KINDS)), 2 ** draw.randint(1, 22)
                flying.append(self.call(kind, size, draw.choice(self.groups), draw.randint(1, 9)))
                if draw.random() < 0.5:
                    self.square @ self.square
            for work, out, value in flying:
                work.wait()
                self.bad += (out != value).sum()
            done += BATCH
            if done % (8 * BATCH) == 0 and not all(of_all(self.dist, time.perf_counter() < end)):
                break  # all ranks after the same batch
        settle(self.torch)
        rate = done / (time.perf_counter() - start)
        if int(self.bad):
            raise AssertionError(f"rank {self.rank}: {int(self.bad)} elements are wrong")
        return float(min(of_all(self.dist, rate)))

    def products(self, beside: bool) -> float:
        """TFLOP/s of a rank's products, alone or beside a row of long all_reduces."""
        long = self.torch.zeros((32 if self.gpu else 1) << 20, device=self.device)
        rates = []
        for _ in range(5):
            settle(self.torch)
            self.dist.barrier()
            works = [self.dist.all_reduce(long, async_op=True) for _ in range(8 * beside)]
            start = time.perf_counter()
            for _ in range(200):
                self.square @ self.square
            if self.gpu:
                self.torch.cuda.current_stream().synchronize()
            rates.append(200 * 2 * self.order**3 / (time.perf_counter() - start) * 1e-12)
            for work in works:
                work.wait()
        return float(min(of_all(self.dist, sorted(rates)[2])))


def child(options: argparse.Namespace) -> int:
    """Everything over one backend; rank 0 writes what there is after each part."""
    torch = join(options)
    bench = Bench(torch)
    found: dict[str, Any] = {"about": about(torch, options.ranks)}
    parts: dict[str, Callable[[], float]] = {
        "calls/s": lambda: bench.calls(options.seconds),
        "TFLOP/s alone": lambda: bench.products(False),
        "TFLOP/s beside": lambda: bench.products(True),
    }
    for name, part in parts.items():
        found[name] = part()
        if bench.rank == 0:
            write(options.child, found)
    torch.distributed.destroy_process_group()
    return 0


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the jobs; the status is 1 when any of ours failed."""
    options = arguments()
    if options.child:
        return child(options)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usual = ["nccl", "mixed"] if gpus else ["gloo", "mixed"]
    found = every_backend(__file__, options, usual, "seconds")
    first = next(iter(found))
    for name in ("calls/s", "TFLOP/s alone", "TFLOP/s beside"):
        for backend, each in found.items():
            print(f"{name:16}{backend:8}{each.get(name, float('nan')):12.1f}", end="")
            print(f"{ratio(each.get(name), found[first].get(name))} of {first}")
    return status(found)


if __name__ == "__main__":
    sys.exit(main())
