"""Cost of calls: this package, NCCL, Gloo and mpi4py, measured alternately in one job.

    python tools/call_cost.py                               # host memory: Gloo and mpi4py
    python tools/call_cost.py --ranks 2                     # with GPUs: NCCL, through torch
    python tools/call_cost.py --amd 1 --hip libamdhip64-over-cuda.so     # two vendors; tests/hipcuda
    python tools/call_cost.py --sizes 8,65536,16777216 --only stream,batch,graph --gloo

``issue`` is the time until a call returns, and ``time`` the time per call of many back to back, until the last one's
data is complete: microseconds, medians of rounds, of the slowest rank. Ratios below 100 % mean that this package is
faster. Results of calls are compared first. Ranks that share a GPU (MPS) get separate host names, as NCCL refuses them
otherwise. On several hosts start it by mpirun with ``--child FILE``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch_calls import IN_PLACE, KINDS, Data, call_of, exchange, settle, turns
from torch_job import RANK, about, join, one_job, parser, ratio, write

#: torch's collective -> the Communicator's method.
OURS = {
    "all_reduce": "Allreduce", "broadcast": "Bcast", "all_gather_into_tensor": "Allgather",
    "reduce_scatter_tensor": "Reduce_scatter_block", "all_to_all_single": "Alltoall",
}  # fmt: skip

#: Calls captured in a CUDA graph and replayed.
MANY = 20
#: Calls that Gloo has for device memory, by copies.
GLOO = ("all_reduce", "broadcast", "all_gather_into_tensor")

#: Name, the call of each side, and its data, or None if there is nothing to compare.
Row = tuple[str, dict[str, Callable[[], Any]], Data | None]


def arguments() -> argparse.Namespace:
    found = parser(__doc__, 2, 300)
    found.add_argument("--sizes", default="8,1024,65536", help="bytes of the longer tensor (default: %(default)s)")
    found.add_argument("--calls", type=int, default=100, help="calls in a row, fewer of long ones (default: 100)")
    found.add_argument("--rounds", type=int, default=15, help="of each (default: 15)")
    found.add_argument("--only", default="", metavar="WORD,…", help="calls whose names have one of these words")
    found.add_argument("--gloo", type=int, nargs="?", const=1, default=0, help="beside NCCL, measure Gloo on GPUs")
    return found.parse_args()


def coalesced(dist: Any, group: Any, tensors: list[Any], device: Any) -> None:
    """Make four reductions as one call."""
    with dist._coalescing_manager(group=group, device=device):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def by_torch(torch: Any, data: Data, groups: Mapping[str, Any], **how: Any) -> dict[str, Callable[[], Any]]:
    """Return the call of ``data`` through torch, for each group that has it."""
    has = {name: g for name, g in groups.items() if name != "gloo" or data.x.is_cpu or data.kind in GLOO}
    if data.kind == "exchange":
        return {name: partial(exchange, torch.distributed, group, data.x, data.y) for name, group in has.items()}
    return {n: call_of(torch.distributed, data.kind, data.x, data.y, group=g, **how) for n, g in has.items()}


def of_torch(torch: Any, size: int, groups: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the calls through torch of one size."""
    dist, device = torch.distributed, "cuda" if torch.cuda.is_available() else "cpu"
    for kind in KINDS:
        data = Data(torch, kind, size, device)
        for form in ("", ", async"):
            yield f"{kind}{form}", by_torch(torch, data, groups, async_op=bool(form)), data
    data = Data(torch, "exchange", size, device)
    yield "batch_isend_irecv", by_torch(torch, data, groups), data
    if device == "cuda":
        four = [torch.zeros(max(size // 4, 1), device=device) for _ in range(4)]
        where = torch.device("cuda", torch.cuda.current_device())
        has = {name: group for name, group in groups.items() if name != "gloo"}
        yield "4 all_reduce coalesced", {n: partial(coalesced, dist, g, four, where) for n, g in has.items()}, None


def captured(torch: Any, data: Data, call: Callable[[], Any]) -> Any:
    """Capture a graph of many such calls; return its replay."""

    def once() -> None:
        if data.kind in IN_PLACE:
            data.y.copy_(data.x)
        call()

    once()  # loads kernels and libraries
    settle(torch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(MANY):
            once()
    return graph.replay


def of_graphs(torch: Any, size: int, groups: Mapping[str, Any], wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Yield calls through torch that are captured in graphs; NCCL needs these destroyed before its groups."""
    names = {**{kind: kind for kind in KINDS}, "exchange": "batch_isend_irecv"}
    has = {name: group for name, group in groups.items() if name != "gloo"}
    for kind, name in [each for each in names.items() if wanted(f"{each[1]} in a graph")]:
        data = Data(torch, kind, size, "cuda")
        each = {side: captured(torch, data, call) for side, call in by_torch(torch, data, has).items()}
        yield f"{name} in a graph", each, data


def of_devices(comm: Any, torch: Any, size: int, peers: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a communicator's calls on device memory: in a stream, and by MPI's rules."""
    stream = torch.cuda.current_stream()

    def in_stream(name: str, *given: Any) -> None:
        getattr(comm, name)(*given, stream=stream)  # nobody needs to wait for the request

    for kind, name in OURS.items():
        data = Data(torch, kind, size, "cuda")
        beside, given = by_torch(torch, data, peers), (data.y,) if name == "Bcast" else (data.x, data.y)
        yield f"I{name.lower()} in a stream", {"ours": partial(in_stream, f"I{name.lower()}", *given), **beside}, data
        yield name, {"ours": partial(getattr(comm, name), *given), **beside}, data
    data, right, left = Data(torch, "exchange", size, "cuda"), (RANK + 1) % comm.size, (RANK - 1) % comm.size
    ours = partial(comm.Sendrecv, data.x, right, 0, data.y, left, 0)
    yield "Sendrecv", {"ours": ours, **by_torch(torch, data, peers)}, data


def of_hosts(comm: Any, world: Any, size: int) -> Iterator[Row]:
    """Yield a communicator's calls on host memory, and mpi4py's."""
    import numpy as np

    x, y = np.zeros(max(size // 4, 1), np.float32), np.zeros(max(size // 4, 1), np.float32)
    standing = comm.Allreduce_init(x, y)

    def again() -> None:
        standing.Start()
        standing.Wait()

    theirs = partial(world.Allreduce, x, y)
    yield "Allreduce", {"ours": partial(comm.Allreduce, x, y), "mpi4py": theirs}, None
    yield "Allreduce, persistent", {"ours": again, "mpi4py": theirs}, None
    yield "Bcast", {"ours": partial(comm.Bcast, x), "mpi4py": partial(world.Bcast, x)}, None
    yield "Barrier", {"ours": comm.Barrier, "mpi4py": world.Barrier}, None


def cost(
    torch: Any, name: str, calls: Mapping[str, Callable[[], Any]], data: Data | None, many: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Compare the results of each side's call, and time the calls."""
    graph = name.endswith("in a graph")
    for side, call in calls.items():
        if data is not None:
            data.check(call, f"{name} by {side}", graph or (side == "ours" and name[0].isupper()))
    found = turns(torch, calls, max(1, many // MANY) if graph else many, rounds)
    return {side: {what: us / (MANY if graph else 1) for what, us in c._asdict().items()} for side, c in found.items()}


def child(options: argparse.Namespace) -> int:
    """Measure all costs in one job."""
    torch = join(options, 60)
    from mpi4py import MPI

    import ucc_hetero

    dist, on_gpus, words = torch.distributed, torch.cuda.is_available(), options.only.split(",")
    names = ["nccl", *["gloo"] * options.gloo] if on_gpus else ["gloo"]
    peers = {name: dist.new_group(backend=name) for name in names}
    groups, comm, rows = {"ours": dist.group.WORLD, **peers}, ucc_hetero.Communicator(), list[dict[str, Any]]()

    def wanted(name: str) -> bool:
        return any(word in name for word in words)

    def measure(through: str, kind: Iterator[Row], size: int) -> None:
        many = options.calls if size <= 1 << 20 else max(2, min(options.calls, (256 << 20) // size))
        for name, calls, data in kind:
            if wanted(name):
                costs = cost(torch, name, calls, data, many, options.rounds)
                rows.append({"call": name, "bytes": size, "through": through, **costs})

    for size in map(int, options.sizes.split(",")):
        measure("torch", of_torch(torch, size, groups), size)
        if on_gpus:
            measure("torch", of_graphs(torch, size, groups, wanted), size)
        measure("", of_devices(comm, torch, size, peers) if on_gpus else of_hosts(comm, MPI.COMM_WORLD, size), size)
    if RANK == 0:
        write(options.child, {"about": about(torch, dist.get_world_size()), "plans": comm.plan_summary(), "rows": rows})
    comm.Free()
    dist.destroy_process_group()
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Format the costs as text."""
    columns = f"{'issue':>10}{'theirs':>10}{'ratio':>9}{'time':>11}{'theirs':>11}{'ratio':>9}"
    lines = [f"{'call':40}{'bytes':>10}{'beside':>8}{columns}"]
    for row in rows:
        ours, name = row["ours"], f"{row['through']} {row['call']}".strip()
        for peer in [each for each in ("nccl", "gloo", "mpi4py") if each in row]:
            cells = [f"{name:40}{row['bytes']:10}{peer:>8}"]
            for what, width in (("issue", 10), ("time", 11)):
                one, two = ours[what], row[peer][what]
                cells.append(f"{one:{width}.2f}{two:{width}.2f}{ratio(one, two):>9}")
            lines.append("".join(cells))
    return "\n".join(lines)


def main() -> int:
    """Run the job and print its table; return 1 if it failed."""
    options = arguments()
    return child(options) if options.child else one_job(__file__, options, "sizes calls rounds only gloo", table)


if __name__ == "__main__":
    sys.exit(main())
