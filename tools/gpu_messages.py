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
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch_calls import exchange, turns
from torch_job import RANK, about, join, one_job, parser, ratio, write


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 150)
    found.add_argument("--sizes", default="8,65536,1048576,16777216,67108864", help="bytes (default: %(default)s)")
    found.add_argument("--rounds", type=int, default=11, help="of each (default: 11)")
    found.add_argument("--inside", type=int, nargs="?", const=1, default=0, help="only among ranks that are not AMD's")
    return found.parse_args()


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


def child(options: argparse.Namespace) -> int:
    """All figures, in one job."""
    torch = join(options, 60)
    import ucc_hetero

    dist, comm, rows = torch.distributed, ucc_hetero.Communicator(), []
    rank, size = comm.rank, comm.size
    apart = options.amd.split(",") if options.inside else []
    ring, whole = [each for each in range(size) if str(each) not in apart], list(range(size))
    groups = {"ours": dist.group.WORLD, "nccl": dist.new_group(ring, backend="nccl")}

    def sendrecv(x: Any, y: Any) -> None:
        comm.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0)

    for nbytes in map(int, options.sizes.split(",")):
        for name, group in groups.items():
            check(torch, partial(exchange, dist, group, ring=ring), ring, nbytes, name)
        check(torch, sendrecv, whole, nbytes, "Sendrecv")
        x, y = (torch.zeros(max(nbytes // 4, 1), device="cuda") for _ in range(2))
        calls: dict[str, Callable[[], None]] = {n: partial(exchange, dist, g, x, y, ring) for n, g in groups.items()}
        calls["Sendrecv"] = partial(sendrecv, x, y)
        many = 100 if nbytes <= 1 << 20 else max(2, (256 << 20) // nbytes)
        costs = turns(torch, calls, many, options.rounds)
        rows.append({"bytes": nbytes, **{name: cost._asdict() for name, cost in costs.items()}})
    if RANK == 0:
        write(options.child, {"about": about(torch, size), "rows": rows})
    comm.Free()
    dist.destroy_process_group()
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
    titles, widths = "bytes issue NCCL ratio time NCCL GB/s NCCL Sendrecv".split(), (10, 9, 9, 9, 11, 11, 8, 8, 11)
    lines = ["".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))]
    for row in rows:
        ours, nccl, n = row["ours"], row["nccl"], row["bytes"]
        issue = f"{ours['issue']:9.1f}{nccl['issue']:9.1f}{ratio(ours['issue'], nccl['issue']):>9}"
        rates = "".join(f"{n / each['time'] / 1e3:8.2f}" for each in (ours, nccl))
        lines.append(f"{n:10}{issue}{ours['time']:11.1f}{nccl['time']:11.1f}{rates}{row['Sendrecv']['time']:11.1f}")
    return "\n".join(lines)


def main() -> int:
    """Run the job and print its table; the status is 1 when it failed."""
    options = arguments()
    return child(options) if options.child else one_job(__file__, options, "sizes rounds inside", table)


if __name__ == "__main__":
    sys.exit(main())
