"""Collectives in CUDA graphs, through torch: right or wrong, and a call's time replayed and called, beside NCCL's.

    python tools/torch_graphs.py --ranks 2 --amd 1 --hip libamdhip64-over-cuda.so --json out.json   # tests/hipcuda

Every backend is a job of its own. Each collective of each size is captured a few times in one graph, which is replayed
on random data, with calls outside of graphs and a second graph between, and compared with what the host computes; then
a graph of many such calls is timed, and as many calls outside of one. Microseconds a call, of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any

from torch_calls import IN_PLACE, KINDS, Data, call_of, turns
from torch_job import about, every_backend, join, parser, status, write

#: Calls of a graph that is timed, and of one that is compared.
MANY, FEW = 20, 3


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 2, 120, "nccl,ucch,mixed")
    found.add_argument("--sizes", default="8,4096,65536,1048576,16777216", help="bytes of a rank's longer buffer")
    found.add_argument("--rounds", type=int, default=7)
    return found.parse_args()


class Case(Data):
    """One collective of one size, and graphs of it."""

    def call(self, asynchronous: bool = False) -> None:
        """The collective, from x to y."""
        if self.kind in IN_PLACE:
            self.y.copy_(self.x)
        work = call_of(self.torch.distributed, self.kind, self.x, self.y, 1 % self.n, async_op=asynchronous)()
        if asynchronous:
            work.wait()

    def calls(self) -> None:
        """As many calls as a graph that is timed has."""
        for _ in range(MANY):
            self.call()

    def captured(self, times: int, asynchronous: bool = False) -> Any:
        """A graph of so many calls."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(times):
                self.call(asynchronous)
        return graph

    def replayed(self) -> int:
        """Elements that are wrong, of replays on new data beside calls that are not captured."""
        self.load(0)
        self.call()
        self.torch.cuda.synchronize()
        graphs, wrong = [self.captured(FEW), self.captured(1, True)], 0
        for seed in range(1, 7):
            self.load(seed)
            graphs[seed % 2].replay()
            if seed > 3:
                self.call()
                graphs[0].replay()
            wrong += int((self.y.cpu() != self.wanted(seed, 1 % self.n)).sum())
        return wrong


def measured(torch: Any, kind: str, nbytes: int, rounds: int) -> list[float]:
    """Microseconds of a call: replayed, to its end and to issue; called, likewise. NCCL has graphs end first."""
    case = Case(torch, kind, nbytes, "cuda")
    wrong = case.replayed()
    if wrong:
        raise AssertionError(f"rank {case.rank}: {kind} of {nbytes} bytes: {wrong} elements are wrong")
    graph = case.captured(MANY)
    costs = turns(torch, {"replay": graph.replay, "call": case.calls}, 1, rounds)
    return [round(us / MANY, 1) for cost in costs.values() for us in (cost.time, cost.issue)]


def child(options: argparse.Namespace) -> int:
    """Everything over one backend; rank 0 writes what there is after each collective."""
    torch = join(options)
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {"about": about(torch, options.ranks), "us": {}}
    for kind, nbytes in product(KINDS, map(int, options.sizes.split(","))):
        found["us"][f"{kind} {nbytes}"] = measured(torch, kind, nbytes, options.rounds)
        if rank == 0:
            write(options.child, found)
    torch.distributed.destroy_process_group()
    return 0


def main() -> int:
    """Run the jobs; the status is 1 when ours failed."""
    options = arguments()
    if options.child:
        return child(options)
    found = every_backend(__file__, options, ["nccl", "mixed"], "sizes rounds")
    print(f"{'us a call':36}" + "".join(f"{f'{b}: replay, issue, called, issue':>44}" for b in found))
    for name in next(iter(found.values())).get("us", {}):
        rows = [each.get("us", {}).get(name, [float("nan")] * 4) for each in found.values()]
        print(f"{name:36}" + "".join(f"{row[0]:17.1f}{row[1]:9.1f}{row[2]:9.1f}{row[3]:9.1f}" for row in rows))
    return status(found)


if __name__ == "__main__":
    sys.exit(main())
