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
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch_job import RANK, about, begin, job, parser, ratio, words_of, write

#: (name, what of the longer tensor is sent, and received: all or a rank's part).
TORCH = {
    "all_reduce": (1, 1), "broadcast": (1, 1), "all_gather_into_tensor": (0, 1), "reduce_scatter_tensor": (1, 0),
}  # fmt: skip


class Cost(NamedTuple):
    """Cost of one call: microseconds that the caller is kept, and calls a second."""

    issue: float
    rate: float


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 300)
    found.add_argument("--sizes", default="8,1024,65536", help="bytes of the longer tensor")
    found.add_argument("--calls", type=int, default=100, help="calls in a row (default: 100)")
    found.add_argument("--rounds", type=int, default=15, help="of each (default: 15)")
    return found.parse_args()


class Timer:
    """Costs of calls that are made in turns, so that whatever disturbs one disturbs all."""

    def __init__(self, world: Any, torch: Any, options: argparse.Namespace) -> None:
        self.world, self.torch, self.options = world, torch, options

    def __call__(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Cost]:
        """The least of all rounds, of the slowest rank."""
        for call in calls.values():
            self._round(call)
        rounds = [{name: self._round(call) for name, call in calls.items()} for _ in range(self.options.rounds)]
        found = {}
        for name in calls:
            issue, total = (min(r[name][i] for r in rounds) / self.options.calls for i in range(2))
            found[name] = Cost(1e6 * max(self.world.allgather(issue)), 1 / max(self.world.allgather(total)))
        return found

    def _finish(self) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def _round(self, call: Callable[[], Any]) -> tuple[float, float]:
        self._finish()
        self.world.Barrier()
        start = time.perf_counter()
        works = [call() for _ in range(self.options.calls)]
        issued = time.perf_counter() - start
        for work in works:
            if work is not None:
                work.wait()
        self._finish()
        return issued, time.perf_counter() - start


def exchange(dist: Any, group: Any, send: Any, recv: Any) -> Any:
    """A message to the next rank and one from the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = (dist.isend, send, (rank + 1) % size), (dist.irecv, recv, (rank - 1) % size)
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in pair]):
        work.wait()


def coalesced(dist: Any, group: Any, tensors: list[Any], device: Any) -> None:
    """Four reductions as one call."""
    with dist._coalescing_manager(group=group, device=device):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def of_torch(dist: Any, torch: Any, size: int, groups: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is called, the call of each backend) of one size."""
    n, ranks, device = max(size // 4, 2), dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    whole, other, part = (torch.zeros(k, device=device) for k in (n // ranks * ranks, n, n // ranks))
    for name, sides in TORCH.items():
        memory = [whole] if sides == (1, 1) else [whole, part] if sides == (0, 1) else [part, whole]
        more = (0,) if name == "broadcast" else ()
        for form in ("", ", async"):
            yield (
                f"{name}{form}",
                {
                    each: partial(getattr(dist, name), *memory, *more, group=group, async_op=bool(form))
                    for each, group in groups.items()
                },
            )
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
    torch = begin(options.amd, options.hip, options.limit - 5)
    if torch.cuda.is_available() and torch.cuda.device_count() < options.ranks:
        os.environ.setdefault("NCCL_HOSTID", f"rank-{RANK}")
    from mpi4py import MPI

    import ucc_hetero.torch

    dist, world, peer = torch.distributed, MPI.COMM_WORLD, "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group("ucch")
    groups = {"ours": dist.group.WORLD, "peer": dist.new_group(backend=peer)}
    timer, comm, rows = Timer(world, torch, options), ucc_hetero.Communicator(), []
    for size in map(int, options.sizes.split(",")):
        kinds = (of_torch(dist, torch, size, groups), of_ours(comm, world, torch, size, groups["peer"]))
        for by, kind in zip((f"torch, {peer}", "mpi4py" if peer == "gloo" else peer), kinds, strict=True):
            for name, calls in kind:
                found = timer(calls)
                rows.append({"call": name, "bytes": size, "beside": by, **{k: c._asdict() for k, c in found.items()}})
    if RANK == 0:
        write(options.child, {"about": about(torch, dist.get_world_size()), "rows": rows})
    comm.Free()
    dist.destroy_process_group()
    return 0


def main() -> int:
    """Run the job and print its table; the status is 1 when it failed."""
    options = arguments()
    if options.child:
        return child(options)
    found = job(__file__, options.ranks, words_of(options, "ranks amd hip sizes calls rounds limit"), {}, options.limit)
    print(f"{'call':30}{'bytes':>8}  {'beside':16}{'issue':>9}{'peer':>9}{'ratio':>9}{'calls/s':>12}{'peer':>12}")
    for row in found.get("rows", []):
        ours, peer = (Cost(**row[name]) for name in ("ours", "peer"))
        print(
            f"{row['call']:30}{row['bytes']:8}  {row['beside']:16}{ours.issue:9.2f}{peer.issue:9.2f}"
            f"{ratio(ours.issue, peer.issue):>9}{ours.rate:12.0f}{peer.rate:12.0f}"
        )
    print(found.get("error", ""))
    if options.json:
        write(options.json, {"command": sys.argv, **found})
    return int("error" in found)


if __name__ == "__main__":
    sys.exit(main())
