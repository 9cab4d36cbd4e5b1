"""Collectives on GPU memory: right or wrong, then allreduce against NCCL over the same GPUs in the same run.

    mpirun -n 4 python benchmarks/gpu_allreduce.py --json out.json
    mpirun -n 4 python benchmarks/gpu_allreduce.py --amd 2,3 --hip libamdhip64-over-cuda.so    # tests/hipcuda

One rank per GPU; torch makes the arrays and runs NCCL (``--no-nccl`` leaves that out). ``--amd`` ranks take their GPU
through the HIP runtime that ``--hip`` names. ``UCCH_STAGING`` and ``UCCH_TUNE`` choose paths and algorithms as always.
Times are medians over rounds, of the slowest rank; microseconds a call. ``blocking``: the host waits for each call;
``stream``: calls in one stream, device time; ``issue``: host time to issue one of those.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amd", default="", help="ranks that use the HIP runtime, such as 2,3")
    parser.add_argument("--hip", default="", help="the HIP runtime library of those ranks")
    parser.add_argument("--sizes", default="8,65536,1048576,16777216,268435456", help="bytes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", default="", help="write the results here")
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    return parser.parse_args()


def say(comm: Any, text: str) -> None:
    """Progress, on one rank and beside the results."""
    if comm.rank == 0:
        print(f"# {text}", file=sys.stderr, flush=True)


def check(comm: Any, torch: Any) -> list[str]:
    """Every collective on small and large arrays of integers in float32; what was wrong."""
    p, r, wrong = comm.size, comm.rank, []

    def expect(what: str, got: Any, want: Any) -> None:
        if not bool((got == want).all()):
            wrong.append(f"{what}: {got.flatten()[:4].tolist()}")

    def new(n: int, value: float = -7) -> Any:
        return torch.full((n,), float(value), device="cuda", dtype=torch.float32)

    for n in (1, 1000, 65536, 1 << 20, 5_000_001):
        say(comm, f"checking {n} elements")
        total, ranks = p * (p + 1) // 2, torch.arange(p, device="cuda", dtype=torch.float32)
        x, y, g, h = new(n, r + 1), new(n), new(n * p), new(n * p)
        torch.cuda.synchronize()
        comm.Allreduce(x, y)
        expect(f"allreduce {n}", y, total)
        comm.Allreduce(None, y)
        expect(f"allreduce in place {n}", y, total * p)
        comm.Allgather(x, g)
        expect(f"allgather {n}", g.view(p, n), ranks[:, None] + 1)
        comm.Reduce_scatter_block(g, y)
        expect(f"reduce_scatter {n}", y, (r + 1) * p)
        comm.Alltoall(g, h)
        expect(f"alltoall {n}", h, r + 1)
        comm.Bcast(x, 1 % p)
        expect(f"bcast {n}", x, 1 % p + 1)
        comm.Reduce(x, y, root=p - 1)
        if r == p - 1:
            expect(f"reduce {n}", y, (1 % p + 1) * p)
        x.fill_(r)
        torch.cuda.synchronize()
        comm.Sendrecv(x, (r + 1) % p, 0, y, (r - 1) % p)
        expect(f"sendrecv {n}", y, (r - 1) % p)
    return wrong


def check_streams(comm: Any, torch: Any) -> list[str]:
    """Collectives between kernels of one stream, without any synchronisation in between."""
    wrong = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for n in (1000, 1 << 20, 1 << 24):
            say(comm, f"checking {n} elements in a stream")
            x, y = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
            for k in range(20):
                x.fill_(comm.rank + k)
                comm.Iallreduce(x, y, stream=stream)
                z = y * 2
            stream.synchronize()
            want = 2.0 * (comm.size * (comm.size - 1) // 2 + comm.size * 19)
            if not bool((z == want).all()):
                wrong.append(f"stream {n}: {z[:4].tolist()} instead of {want}")
    return wrong


class Timer:
    """Medians over rounds of the slowest rank."""

    def __init__(self, world: Any, torch: Any, rounds: int) -> None:
        self.world, self.torch, self.rounds = world, torch, rounds

    def _worst(self, value: float) -> float:
        return float(max(self.world.allgather(value)))

    def host(self, call: Callable[[], Any], calls: int) -> float:
        """Microseconds of a call that the host waits for."""
        seconds = []
        for _ in range(self.rounds):
            self.torch.cuda.synchronize()
            self.world.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds.append((time.perf_counter() - start) / calls)
        return 1e6 * self._worst(statistics.median(seconds))

    def device(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """(device time, host time to issue) of a call in the current stream, microseconds."""
        on_device, issue = [], []
        for _ in range(self.rounds):
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.torch.cuda.synchronize()
            self.world.Barrier()
            begin.record()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            issue.append((time.perf_counter() - start) / calls)
            end.record()
            end.synchronize()
            on_device.append(begin.elapsed_time(end) * 1e-3 / calls)
        return 1e6 * self._worst(statistics.median(on_device)), 1e6 * self._worst(statistics.median(issue))


def nccl(torch: Any, world: Any) -> Any:
    """torch.distributed over NCCL."""
    dist = torch.distributed
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("nccl", rank=world.Get_rank(), world_size=world.Get_size())
    return dist


def measure(comm: Any, torch: Any, options: argparse.Namespace, world: Any) -> list[dict[str, Any]]:
    """One row per size."""
    timer = Timer(world, torch, options.rounds)
    dist = None if options.no_nccl else nccl(torch, world)
    rows = []
    for size in map(int, options.sizes.split(",")):
        x = torch.ones(size // 4, device="cuda")
        y = torch.empty_like(x)
        calls = 50 if size <= 1 << 20 else 5
        row: dict[str, Any] = {"bytes": size}
        for _ in range(3):
            comm.Allreduce(x, y)
        row["blocking"] = timer.host(partial(comm.Allreduce, x, y), calls)
        if not options.no_stream:
            ours = partial(comm.Iallreduce, x, y, stream=torch.cuda.current_stream())
            ours()
            torch.cuda.synchronize()
            row["stream"], row["issue"] = timer.device(ours, calls)
        if dist is not None:
            theirs = partial(dist.all_reduce, y)
            theirs()
            row["nccl"], row["nccl issue"] = timer.device(theirs, calls)
        best = min(row[k] for k in ("blocking", "stream") if k in row)
        row["busbw GB/s"] = 2 * (comm.size - 1) / comm.size * size / best * 1e-3
        rows.append(row)
        if comm.rank == 0:
            print("  ".join(f"{k} {v:.5g}" for k, v in row.items()), flush=True)
    if dist is not None:
        dist.destroy_process_group()
    return rows


def main() -> int:
    """Run; the status is 1 when any rank had a wrong result."""
    options = arguments()
    amd = {int(rank) for rank in options.amd.split(",") if rank}
    os.environ["UCCH_CUDA_LIB"] = "none" if RANK in amd else os.environ.get("UCCH_CUDA_LIB", "")
    os.environ["UCCH_HIP_LIB"] = options.hip if RANK in amd else "none"
    import ucc_hetero
    from ucc_hetero.native import load

    libraries = load()
    import torch
    from mpi4py import MPI

    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    world = MPI.COMM_WORLD
    comm = ucc_hetero.Communicator()
    wrong = [] if options.no_check else check(comm, torch)
    if not options.no_stream and not options.no_check:
        wrong += check_streams(comm, torch)
    everyone = [f"rank {rank}: {text}" for rank, texts in enumerate(world.allgather(wrong)) for text in texts]
    if comm.rank == 0:
        print("wrong:" if everyone else "all right", *everyone[:20], sep="\n", flush=True)
    rows = measure(comm, torch, options, world)
    if comm.rank == 0:
        print(comm.plan_summary())
        if options.json:
            about = {
                "date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(), "ranks": comm.size,
                "ucc": libraries.ucc_version, "ucx": libraries.ucx_version, "torch": torch.__version__,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "command": sys.argv,
                "environment": {k: v for k, v in os.environ.items() if k.startswith(("UCC", "UCX_", "CUDA_MOD"))},
                "topology": comm.topology.describe(), "wrong": everyone, "rows": rows,
            }  # fmt: skip
            with open(options.json, "w") as file:
                json.dump(about, file, indent=1)
    comm.Free()
    return 1 if everyone else 0


if __name__ == "__main__":
    sys.exit(main())
