"""torch on host memory, ucch against Gloo: small all_reduces, and DDP steps, in one job and in turns.

    python tools/torch_cpu.py --json out.json

4 bytes on 2 ranks, then DDP on 4 ranks in two emulated vendors. Both backends have a group over the same ranks, and
rounds alternate between them, so that whatever else the machine does hurts both. Medians over rounds, of the slowest
rank; beside them what a call or step costs a rank: seconds of processor time, and how often it gave its core away or
lost it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch_job import RANK, about, begin, job, mixed_environment, words_of, write


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,1024,65536,1048576", help="bytes of the all_reduces")
    parser.add_argument("--models", default="100k,1m,10m", help="sizes of the model of examples/train_llm.py")
    parser.add_argument("--length", type=int, default=32, help="bytes per sequence (default: 32)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step over all ranks (default: 8)")
    parser.add_argument("--rounds", type=int, default=11, help="of each backend (default: 11)")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a job may take (default: 300)")
    parser.add_argument("--json", default="", help="write the results here")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


class Costs(NamedTuple):
    """Cost of a call to this process, all its threads together."""

    processor: float
    given: float
    lost: float


def spent() -> Costs:
    """Cost of this process so far: seconds, and switches to others that it asked for and that it did not."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return Costs(now.ru_utime + now.ru_stime, now.ru_nvcsw, now.ru_nivcsw)


def alternate(torch: Any, calls: Mapping[str, Callable[[], Any]], repeat: int, rounds: int) -> dict[str, Any]:
    """Seconds of each call: median over rounds of the slowest rank, with the least and the most; and its costs."""
    dist = torch.distributed
    costs: dict[str, list[Costs]] = {name: [] for name in calls}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(max(3, repeat // 10)):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            before, start = spent(), time.perf_counter()
            for _ in range(repeat):
                call()
            seconds[name].append((time.perf_counter() - start) / repeat)
            costs[name].append(Costs(*((b - a) / repeat for a, b in zip(before, spent(), strict=True))))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seconds, costs))
    slowest = {
        name: [max(column) for column in zip(*(rank[0][name] for rank in everyone), strict=True)] for name in calls
    }
    out: dict[str, Any] = {}
    for name, s in slowest.items():
        out[name] = {"median": statistics.median(s), "least": min(s), "most": max(s)}
        rounds_of_all = [each for rank in everyone for each in rank[1][name]]
        out[name] |= {what: statistics.median(getattr(c, what) for c in rounds_of_all) for what in Costs._fields}
    return out


def small(torch: Any, options: argparse.Namespace, groups: dict[str, Any]) -> dict[str, Any]:
    """all_reduce of a few sizes."""
    dist, out = torch.distributed, {}
    for size in map(int, options.sizes.split(",")):
        tensor = torch.zeros(size // 4)
        calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
        out[f"{size} B"] = alternate(torch, calls, 300 if size <= 65536 else 30, options.rounds)
    return out


def ddp(torch: Any, options: argparse.Namespace, groups: dict[str, Any]) -> dict[str, Any]:
    """DDP steps of a few models."""
    from llm_model import SIZES, Config, Decoder

    out = {}
    for size in options.models.split(","):
        config = Config(*SIZES[size])
        mine = torch.randint(0, 256, (options.batch // len(groups["members"]), options.length + 1))
        calls: dict[str, Callable[[], Any]] = {}
        for name in ("ucch", "gloo"):
            model = Decoder(config)
            model.initialise(config, 0, 0, torch.device("cpu"))
            replicas = torch.nn.parallel.DistributedDataParallel(model, process_group=groups[name])
            optimizer = torch.optim.SGD(replicas.parameters(), lr=0.01)

            def step(replicas: Any = replicas, optimizer: Any = optimizer, mine: Any = mine) -> None:
                optimizer.zero_grad()
                logits = replicas(mine[:, :-1])
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()).backward()
                optimizer.step()

            calls[name] = step
        out[size] = alternate(torch, calls, 3, options.rounds)
    return out


def child(options: argparse.Namespace) -> int:
    """One case in one job."""
    torch = begin("", "", options.limit - 5)
    import ucc_hetero.torch  # noqa: F401

    dist = torch.distributed
    dist.init_process_group("ucch")
    groups = {"ucch": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if options.case == "ddp":
        groups["members"] = dist.get_process_group_ranks(dist.group.WORLD)
    rows = (ddp if options.case == "ddp" else small)(torch, options, groups)
    if RANK == 0:
        write(options.child, {"about": about(torch, dist.get_world_size()), "rows": rows})
    dist.destroy_process_group()
    return 0


def main() -> int:
    """Run both jobs; the status is 1 when one failed."""
    options = arguments()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.child:
        return child(options)
    found = {}
    for case, ranks, environment in (("small", 2, {}), ("ddp", 4, mixed_environment(4, ""))):
        words = words_of(options, "sizes models length batch rounds limit")
        found[case] = job(__file__, ranks, ["--case", case, *words], environment, options.limit)
        print(
            f"{'all_reduce, 2 ranks' if case == 'small' else 'DDP step, 2 + 2 ranks':24}{'ucch':>12}{'gloo':>12}   µs"
        )
        for label, row in found[case].get("rows", {}).items():
            one, two = (1e6 * row[name]["median"] for name in ("ucch", "gloo"))
            print(f"{label:24}{one:12.1f}{two:12.1f}   {two / one:.2f} times as fast")
            for name in ("ucch", "gloo"):
                cost = row[name]
                print(
                    f"{'':8}{name}: a rank's {1e6 * cost['processor']:.1f} µs of processor time; core given away "
                    f"{cost['given']:.1f} times, lost {cost['lost']:.1f} times"
                )
        print(found[case].get("error", ""))
    if options.json:
        write(options.json, {"command": sys.argv, **found})
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
