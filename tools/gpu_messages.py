"""Messages between two GPUs: what a pair costs its host, how long it takes, and bandwidth; ours beside NCCL, in turns.

    python tools/gpu_messages.py                                          # two GPUs, one vendor: ours is NCCL itself
    python tools/gpu_messages.py --amd 1 --hip libamdhip64-over-cuda.so   # two vendors; tests/hipcuda
    python tools/gpu_messages.py --ranks 3 --amd 2 --inside --hip ...     # one vendor's in a mixed group; three GPUs

Every round is a pair of messages through torch, one each way, by ours and by a group of NCCL's on the same GPUs.
``issue``: microseconds that ``batch_isend_irecv`` and the waits keep the caller; ``time``: of a pair from its call to
its data, many in a row; GB/s each way. ``Sendrecv`` is a Communicator's without a stream, by MPI's rules. Medians
of rounds in turns, of the slowest rank; data is compared first. On two hosts start it by mpirun with ``--child FILE``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch_job import RANK, about, begin, job, parser, ratio, words_of, write


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 150)
    found.add_argument("--sizes", default="8,65536,1048576,16777216,67108864", help="bytes (default: %(default)s)")
    found.add_argument("--rounds", type=int, default=11, help="of each (default: 11)")
    found.add_argument("--inside", type=int, nargs="?", const=1, default=0, help="only among ranks that are not AMD's")
    return found.parse_args()


def exchange(dist: Any, group: Any, ring: Sequence[int], send: Any, recv: Any) -> None:
    """A message to the next rank of the ring and one from the last."""
    if dist.get_rank() not in ring:
        return
    at = ring.index(dist.get_rank())
    pair = (dist.isend, send, ring[(at + 1) % len(ring)]), (dist.irecv, recv, ring[at - 1])
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in pair]):
        work.wait()


def check(torch: Any, call: Callable[[Any, Any], None], ring: Sequence[int], nbytes: int, what: str) -> None:
    """Raise where a message is not what was sent."""
    rank, size, n = torch.distributed.get_rank(), torch.distributed.get_world_size(), max(nbytes // 4, 1)
    data = [
        torch.randint(-1000, 1000, (n,), generator=torch.Generator().manual_seed(r + n)).float() for r in range(size)
    ]
    x, y = data[rank].cuda(), torch.full((n,), -7000.0, device="cuda")
    torch.cuda.synchronize()
    call(x, y)
    torch.cuda.synchronize()
    if rank in ring and not torch.equal(y.cpu(), data[ring[ring.index(rank) - 1]]):
        raise AssertionError(f"{what}, {nbytes} bytes, on rank {rank}: not what was sent")


def once(torch: Any, world: Any, call: Callable[[], None], many: int) -> tuple[float, float]:
    """(issue, time) of one of so many pairs in a row, in seconds."""
    torch.cuda.synchronize()
    world.Barrier()
    start = time.perf_counter()
    for _ in range(many):
        call()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    return issued / many, (time.perf_counter() - start) / many


def turns(torch: Any, world: Any, calls: Mapping[str, Callable[[], None]], many: int, rounds: int) -> dict[str, Any]:
    """Medians of rounds in turns, of the slowest rank, in microseconds."""
    for call in calls.values():
        once(torch, world, call, many)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seen[name].append(once(torch, world, call, many))
    found = {}
    for name, all_rounds in seen.items():
        issue, whole = (1e6 * statistics.median(each) for each in zip(*all_rounds, strict=True))
        found[name] = {"issue": max(world.allgather(issue)), "time": max(world.allgather(whole))}
    return found


def child(options: argparse.Namespace) -> int:
    """All figures, in one job."""
    torch = begin(options.amd, options.hip, options.limit - 5)
    if torch.cuda.device_count() < options.ranks:
        os.environ.setdefault("NCCL_HOSTID", f"rank-{RANK}")
    from mpi4py import MPI

    import ucc_hetero.torch

    dist, world = torch.distributed, MPI.COMM_WORLD
    dist.init_process_group("ucch")
    comm, rank, size, rows = ucc_hetero.Communicator(), world.rank, world.size, []
    apart = options.amd.split(",") if options.inside else []
    ring, whole = [each for each in range(size) if str(each) not in apart], list(range(size))
    groups = {"ours": dist.group.WORLD, "nccl": dist.new_group(ring, backend="nccl")}

    def sendrecv(x: Any, y: Any) -> None:
        comm.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0)

    for nbytes in map(int, options.sizes.split(",")):
        for name, group in groups.items():
            check(torch, partial(exchange, dist, group, ring), ring, nbytes, name)
        check(torch, sendrecv, whole, nbytes, "Sendrecv")
        x, y = (torch.zeros(max(nbytes // 4, 1), device="cuda") for _ in range(2))
        calls: dict[str, Callable[[], None]] = {n: partial(exchange, dist, g, ring, x, y) for n, g in groups.items()}
        calls["Sendrecv"] = partial(sendrecv, x, y)
        many = 100 if nbytes <= 1 << 20 else max(2, (256 << 20) // nbytes)
        rows.append({"bytes": nbytes, **turns(torch, world, calls, many, options.rounds)})
    if RANK == 0:
        write(options.child, {"about": about(torch, size), "rows": rows})
    comm.Free()
    dist.destroy_process_group()
    return 0


def main() -> int:
    """Run the job and print its table; the status is 1 when it failed."""
    options = arguments()
    if options.child:
        return child(options)
    found = job(
        __file__, options.ranks, words_of(options, "ranks amd hip sizes rounds limit inside"), {}, options.limit
    )
    print(
        f"{'bytes':>10}{'issue':>9}{'NCCL':>9}{'ratio':>9}{'time':>11}{'NCCL':>11}{'GB/s':>8}{'NCCL':>8}{'Sendrecv':>11}"
    )
    for row in found.get("rows", []):
        ours, nccl, n = row["ours"], row["nccl"], row["bytes"]
        words = [f"{n:10}{ours['issue']:9.1f}{nccl['issue']:9.1f}{ratio(ours['issue'], nccl['issue']):>9}"]
        words += [f"{ours['time']:11.1f}{nccl['time']:11.1f}"]
        words += [f"{n / each['time'] / 1e3:8.2f}" for each in (ours, nccl)]
        print("".join(words) + f"{row['Sendrecv']['time']:11.1f}")
    print(found.get("error", ""))
    if options.json:
        write(options.json, {"command": sys.argv, **found})
    return int("error" in found)


if __name__ == "__main__":
    sys.exit(main())
