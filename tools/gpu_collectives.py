"""Collectives on GPU memory: right or wrong, then timed against NCCL and Gloo over the same GPUs in the same run.

    mpirun -n 4 python tools/gpu_collectives.py --json out.json
    mpirun -n 4 python tools/gpu_collectives.py --amd 2,3 --hip libamdhip64-over-cuda.so    # tests/hipcuda

One rank per GPU; torch makes the arrays and runs NCCL (``--no-nccl`` leaves that out) and, with ``--gloo``, Gloo on
host copies as its users do. ``--amd`` ranks take their GPU through the HIP runtime that ``--hip`` names; NCCL does not
know of that. ``UCCH_STAGING`` and ``UCCH_TUNE`` choose paths and algorithms as always.
Times are medians over rounds, of the slowest rank; microseconds a call. ``blocking``: the host waits for each call;
``stream``: calls in one stream, device time; ``issue``: host time to issue one of those. Messages in streams
(``sendrecv``) go through torch for both. ``bytes`` are those of the longer buffer of a rank.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_calls import KINDS, call_of, exchange
from torch_job import about, begin, parser, write

#: Collective -> (ours, torch's).
CASES = {
    "allreduce": ("allreduce", "all_reduce"), "allgather": ("allgather", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_block", "reduce_scatter_tensor"), "alltoall": ("alltoall", "all_to_all_single"),
    "bcast": ("bcast", "broadcast"), "sendrecv": ("", ""),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 0, 3600)
    found.add_argument("--sizes", default="8,65536,1048576,16777216,268435456", help="bytes")
    found.add_argument("--collectives", default="allreduce", help=f"of {','.join(CASES)}")
    found.add_argument("--rounds", type=int, default=10)
    found.add_argument("--no-nccl", action="store_true")
    found.add_argument("--gloo", action="store_true")
    found.add_argument("--no-stream", action="store_true")
    found.add_argument("--no-check", action="store_true")
    return found.parse_args()


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
    for what, stream in (("a stream", torch.cuda.Stream()), ("the default stream", torch.cuda.default_stream())):
        with torch.cuda.stream(stream):
            for n in (1000, 1 << 20, 1 << 24):
                say(comm, f"checking {n} elements in {what}")
                x, y = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
                for k in range(20):
                    x.fill_(comm.rank + k)
                    comm.Iallreduce(x, y, stream=stream)
                    z = y * 2
                stream.synchronize()
                want = 2.0 * (comm.size * (comm.size - 1) // 2 + comm.size * 19)
                if not bool((z == want).all()):
                    wrong.append(f"{what} {n}: {z[:4].tolist()} instead of {want}")
    return wrong + check_gil(comm, torch)


def check_gil(comm: Any, torch: Any) -> list[str]:
    """A thread that keeps the interpreter for 300 ms delays nothing that is in a stream."""
    say(comm, "checking that the interpreter's lock delays nothing")
    hold = ctypes.PyDLL(None).usleep
    stream, x = torch.cuda.Stream(), torch.ones(1 << 16, device="cuda")
    y = torch.empty_like(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    comm.Iallreduce(x, y, stream=stream).Wait()
    torch.cuda.synchronize()
    comm.Barrier()
    begin.record(stream)
    held = [comm.Iallreduce(x, y, stream=stream).finished for _ in range(10)]
    end.record(stream)
    hold(300_000)
    end.synchronize()
    if begin.elapsed_time(end) > 150 and not all(held):
        return [f"10 calls took {begin.elapsed_time(end):.0f} ms while a thread kept the interpreter's lock"]
    return []


class Timer:
    """Medians over rounds of the slowest rank."""

    def __init__(self, world: Any, torch: Any, rounds: int) -> None:
        self.world, self.torch, self.rounds = world, torch, rounds

    def __call__(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """Microseconds of a call in the current stream: (by the device, until the host may go on)."""
        both = [self._round(call, calls) for _ in range(self.rounds)]
        device, host = (max(self.world.allgather(statistics.median(each))) for each in zip(*both, strict=True))
        return 1e6 * device, 1e6 * host

    def _round(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda.synchronize()
        self.world.Barrier()
        begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / calls, host / calls


def our_calls(
    comm: Any, torch: Any, group: Any, name: str, x: Any, y: Any
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """The blocking call, and the one in a stream where there is one; messages by ``group`` of torch's."""
    if name == "sendrecv":
        blocking = partial(comm.Sendrecv, x, (comm.rank + 1) % comm.size, 0, y, (comm.rank - 1) % comm.size)
        return blocking, partial(exchange, torch.distributed, group, x, y) if group else None
    ours, _ = CASES[name]
    args = (y,) if name == "bcast" else (x, y)
    stream = torch.cuda.current_stream()
    return partial(getattr(comm, ours.capitalize()), *args), partial(getattr(comm, f"I{ours}"), *args, stream=stream)


def peers(torch: Any, world: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Name -> process group of torch.distributed; ours, too, where messages are measured."""
    if options.no_nccl and not options.gloo:
        return {}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist = torch.distributed
    dist.init_process_group("gloo", rank=world.Get_rank(), world_size=world.Get_size())
    groups = {} if options.no_nccl else {"nccl": dist.new_group(backend="nccl")}
    if "sendrecv" in options.collectives.split(","):
        import ucc_hetero.torch  # noqa: F401  # registers the backend

        groups["ucch"] = dist.new_group(backend="ucch")
    for group in groups.values():
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)  # connects now
    torch.cuda.synchronize()
    return groups | ({"gloo": dist.group.WORLD} if options.gloo else {})


def measure(
    comm: Any, torch: Any, options: argparse.Namespace, world: Any, groups: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per collective and size."""
    timer = Timer(world, torch, options.rounds)
    rows = []
    for name in options.collectives.split(","):
        for size in map(int, options.sizes.split(",")):
            rows.append(row_of(comm, torch, timer, groups, name, size, stream=not options.no_stream))
            if comm.rank == 0:
                print("  ".join(f"{k} {v:.5g}" if k != "collective" else v for k, v in rows[-1].items()), flush=True)
    if groups:
        torch.distributed.destroy_process_group()
    return rows


def row_of(
    comm: Any, torch: Any, timer: Timer, groups: dict[str, Any], name: str, size: int, *, stream: bool
) -> dict[str, Any]:
    """One collective at one size, ours and the peers' in turn."""
    from ucc_hetero.planner.collectives import ROWS  # after the settings, as importing loads libraries

    ours, kind = CASES[name]
    sends, receives = KINDS.get(kind, (False, False))
    part = max(size // 4 // (comm.size if sends or receives else 1), 1)
    x = torch.ones(part * (comm.size if sends else 1), device="cuda")
    y = torch.empty(part * (comm.size if receives else 1), device="cuda")
    calls = 50 if size <= 1 << 20 else 5
    row: dict[str, Any] = {"collective": name, "bytes": size}
    groups = dict(groups)
    blocking, ordered = our_calls(comm, torch, groups.pop("ucch", None), name, x, y)
    for _ in range(3):
        blocking()
    _, row["blocking"] = timer(blocking, calls)
    if stream and ordered is not None:
        ordered()
        torch.cuda.synchronize()
        row["stream"], row["issue"] = timer(ordered, calls)
    for peer, group in groups.items():
        if peer == "gloo" and name in ("reduce_scatter", "alltoall", "sendrecv"):
            continue  # it has none on GPU tensors
        dist = torch.distributed
        theirs = call_of(dist, kind, x, y, group=group) if kind else partial(exchange, dist, group, x, y)
        theirs()
        torch.cuda.synchronize()
        row[peer], row[f"{peer} issue"] = timer(theirs, calls if peer == "nccl" else 2)
    best = min(row[k] for k in ("blocking", "stream") if k in row)
    row["busbw GB/s"] = (ROWS[ours].busbw(comm.size) if ours else 1.0) * size / best * 1e-3
    return row | {f"of {peer}": row[peer] / best for peer in groups if peer in row}


def main() -> int:
    """Run; the status is 1 when any rank had a wrong result."""
    options = arguments()
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # NCCL, which knows no vendors here, wants all ranks alike
    torch = begin(options.amd, options.hip, options.limit)
    from mpi4py import MPI

    import ucc_hetero
    from ucc_hetero.native.libraries import load

    torch.zeros(1, device="cuda")
    world, libraries = MPI.COMM_WORLD, load()
    comm = ucc_hetero.Communicator()
    groups = peers(torch, world, options)
    wrong = [] if options.no_check else check(comm, torch)
    if not options.no_stream and not options.no_check:
        wrong += check_streams(comm, torch)
    everyone = [f"rank {rank}: {text}" for rank, texts in enumerate(world.allgather(wrong)) for text in texts]
    if comm.rank == 0:
        print("wrong:" if everyone else "all right", *everyone[:20], sep="\n", flush=True)
    rows = measure(comm, torch, options, world, groups)
    if comm.rank == 0:
        print(comm.plan_summary())
        if options.json:
            found = {
                **about(torch, comm.size), "ucc": libraries.ucc_version, "ucx": libraries.ucx_version,
                "command": sys.argv, "topology": comm.topology.describe(), "wrong": everyone, "rows": rows,
            }  # fmt: skip
            write(options.json, found)
    comm.Free()
    return 1 if everyone else 0


if __name__ == "__main__":
    sys.exit(main())
