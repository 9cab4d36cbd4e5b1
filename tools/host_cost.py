"""Cost of a call to its host: ours beside NCCL, Gloo and mpi4py, in one job and in turns.

    python tools/host_cost.py                               # host memory: Gloo and mpi4py
    python tools/host_cost.py --ranks 2                     # with GPUs: NCCL, through torch
    python tools/host_cost.py --amd 1 --hip libamdhip64-over-cuda.so     # tests/hipcuda

``issue`` is how long a call in a stream keeps its caller, or one on host memory until it has ended: microseconds, the
least of all rounds, of the slowest rank; ``calls/s`` counts to the end of the last. Where the ratio is below 100 % ours
is the cheaper one. Ranks that share a GPU (MPS) get host names of their own, without which NCCL refuses them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch_calls import KINDS, call_of, exchange, turns
from torch_job import RANK, about, join, one_job, parser, ratio, write


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 300)
    found.add_argument("--sizes", default="8,1024,65536", help="bytes of the longer tensor")
    found.add_argument("--calls", type=int, default=100, help="calls in a row (default: 100)")
    found.add_argument("--rounds", type=int, default=15, help="of each (default: 15)")
    return found.parse_args()


def coalesced(dist: Any, group: Any, tensors: list[Any], device: Any) -> None:
    """Four reductions as one call."""
    with dist._coalescing_manager(group=group, device=device):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def of_torch(dist: Any, torch: Any, size: int, groups: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is called, the call of each backend) of one size."""
    n, ranks, device = max(size // 4, 2), dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    whole, other, part = (torch.zeros(k, device=device) for k in (n // ranks * ranks, n, n // ranks))
    for name in [name for name in KINDS if name != "all_to_all_single"]:
        x, y = (whole if spread or not any(KINDS[name]) else part for spread in KINDS[name])
        for form in ("", ", async"):
            more = {"async_op": bool(form)}
            yield f"{name}{form}", {e: call_of(dist, name, x, y, group=g, **more) for e, g in groups.items()}
    yield "batch_isend_irecv", {each: partial(exchange, dist, group, whole, other) for each, group in groups.items()}
    if device == "cuda":
        four = [torch.zeros(n, device=device) for _ in range(4)]
        where = torch.device("cuda", torch.cuda.current_device())
        yield "4 all_reduce coalesced", {e: partial(coalesced, dist, g, four, where) for e, g in groups.items()}


def of_ours(comm: Any, world: Any, torch: Any, size: int, nccl: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """As :func:`of_torch`, of a communicator: beside mpi4py on host memory, in a stream beside NCCL."""
    if torch.cuda.is_available():
        x = torch.zeros(max(size // 4, 1), device="cuda")
        y, stream = torch.empty_like(x), torch.cuda.current_stream()

        def ours() -> None:
            comm.Iallreduce(x, y, stream=stream)

        yield "Iallreduce in a stream", {"ours": ours, "peer": partial(torch.distributed.all_reduce, y, group=nccl)}
        return
    import numpy as np

    x, y = np.zeros(max(size // 4, 1), np.float32), np.zeros(max(size // 4, 1), np.float32)
    standing = comm.Allreduce_init(x, y)

    def again() -> None:
        standing.Start()
        standing.Wait()

    yield "Allreduce", {"ours": partial(comm.Allreduce, x, y), "peer": partial(world.Allreduce, x, y)}
    yield "Allreduce, persistent", {"ours": again, "peer": partial(world.Allreduce, x, y)}
    yield "Bcast", {"ours": partial(comm.Bcast, x), "peer": partial(world.Bcast, x)}
    yield "Barrier", {"ours": comm.Barrier, "peer": world.Barrier}


def child(options: argparse.Namespace) -> int:
    """All costs, in one job."""
    torch = join(options, 60)
    from mpi4py import MPI

    import ucc_hetero

    dist, world, peer = torch.distributed, MPI.COMM_WORLD, "nccl" if torch.cuda.is_available() else "gloo"
    groups = {"ours": dist.group.WORLD, "peer": dist.new_group(backend=peer)}
    comm, rows = ucc_hetero.Communicator(), []
    for size in map(int, options.sizes.split(",")):
        kinds = (of_torch(dist, torch, size, groups), of_ours(comm, world, torch, size, groups["peer"]))
        for by, kind in zip((f"torch, {peer}", "mpi4py" if peer == "gloo" else peer), kinds, strict=True):
            for name, calls in kind:
                found = turns(torch, calls, options.calls, options.rounds, min)
                costs = {side: {"issue": cost.issue, "rate": 1e6 / cost.time} for side, cost in found.items()}
                rows.append({"call": name, "bytes": size, "beside": by, **costs})
    if RANK == 0:
        write(options.child, {"about": about(torch, dist.get_world_size()), "rows": rows})
    comm.Free()
    dist.destroy_process_group()
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """The costs as text."""
    lines = [f"{'call':30}{'bytes':>8}  {'beside':16}{'issue':>9}{'peer':>9}{'ratio':>9}{'calls/s':>12}{'peer':>12}"]
    for row in rows:
        ours, peer = row["ours"], row["peer"]
        issue = f"{ours['issue']:9.2f}{peer['issue']:9.2f}{ratio(ours['issue'], peer['issue']):>9}"
        rates = f"{ours['rate']:12.0f}{peer['rate']:12.0f}"
        lines.append(f"{row['call']:30}{row['bytes']:8}  {row['beside']:16}{issue}{rates}")
    return "\n".join(lines)


def main() -> int:
    """Run the job and print its table; the status is 1 when it failed."""
    options = arguments()
    return child(options) if options.child else one_job(__file__, options, "sizes calls rounds", table)


if __name__ == "__main__":
    sys.exit(main())
