"""Groups of one vendor: torch's NCCL and what the backend ``ucch`` makes of the same ranks, side by side on two GPUs.

    mpirun -np 2 python tools/torch_vendor.py                      # or python tools/torch_vendor.py: it starts its jobs
    python tools/torch_vendor.py --steps issue,capture --jsonl out.jsonl
    python tools/torch_vendor.py --amd 1 --hip libamdhip64-over-cuda.so    # mixed groups too; tests/hipcuda
    sudo env "PATH=$PATH" python tools/torch_vendor.py --steps train-hosts,train-25gbit,collectives-hosts

Every step is a job of its own with a time limit. A line of JSON for each figure is appended to ``--jsonl`` as it is
found, so that a step which hangs or fails costs its own figures only. ``issue``: microseconds that a call of 8 bytes
keeps its caller, the median of rounds in turns, of the slowest rank, beside a group of torch's own NCCL in the same
process. Results are compared with what they must be before they are timed.

Steps between hosts need root, and a GPU for each of two emulated hosts (TCP over veth, MTU 9000): ``train-hosts`` with
NCCL as it comes, the others with its 4 threads × 4 sockets. They run tools/torch_train.py and tools/gpu_collectives.py.
``least`` and ``most`` are what ours is to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch_calls import exchange, of_all, settle, turns
from torch_job import RANK, about, begin, job, mpirun, parser, ratio, words_of

from ucc_hetero.launch.emulate import unavailable
from ucc_hetero.machine.launchers import PREFIXES

#: Ratios of ours to NCCL's that groups of one vendor are to reach.
MOST = 1.05
#: Groups whose memory is counted, and replays of a graph.
GROUPS, REPLAYS = 16, 100
#: NCCL at its fastest over sockets.
_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
#: Training step -> (rate of two emulated hosts' links, NCCL's settings, shares of NCCL's tokens/s to reach). Links
#: without a limit cannot bring more than NVLink does: NCCL's sockets have 0.98 (4 x 4) and 0.63 of that in DDP.
TRAINING: dict[str, tuple[str, dict[str, str], tuple[float, float, float]]] = {
    "train": ("", {}, (0.99, 0.99, 0.99)),
    "train-hosts": ("none", {}, (1.5, 1.8, 1.0)),
    "train-hosts-4x4": ("none", _SOCKETS, (1.0, 1.0, 1.0)),
    "train-25gbit": ("25gbit", _SOCKETS, (1.0, 1.0, 1.0)),
    "train-10gbit": ("10gbit", _SOCKETS, (1.0, 1.0, 1.0)),
}
COLLECTIVES = "collectives-hosts"
_PREFIXES = (*PREFIXES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")


def arguments() -> argparse.Namespace:
    """The command line."""
    found, every = parser(__doc__, 2, 120), (*STEPS, *TRAINING, COLLECTIVES)
    found.add_argument("--steps", default="", help=f"some of {','.join(every)} (default: all that can run)")
    found.add_argument("--jsonl", default="torch_vendor.jsonl", help="file that figures are appended to (%(default)s)")
    found.add_argument("--calls", type=int, default=200, help="calls in a row (default: 200)")
    found.add_argument("--rounds", type=int, default=21, help="of each (default: 21)")
    found.add_argument("--size", default="1b", help="of the model that is trained (default: 1b)")
    found.add_argument("--train-limit", type=float, default=600, help="seconds that training may take (default: 600)")
    found.add_argument("--step", default="", help=argparse.SUPPRESS)
    return found.parse_args()


def device_of(torch: Any) -> Any:
    """The device of this rank: its GPU, or the host without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Figures:
    """The file of figures; rank 0 writes a line for each at once, and the others none."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path, self._step = Path(options.jsonl), options.step

    def add(self, figure: str, **values: Any) -> None:
        """Append a figure."""
        if RANK == 0:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": self._step, "figure": figure, **values}) + "\n")


# --- steps: each in a job of its own ----------------------------------------------------------------------------------


def eight_bytes(torch: Any, group: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls on 8 bytes of device memory, after a look at what each of them gives."""
    dist, device = torch.distributed, device_of(torch)
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    tensor = partial(torch.full, device=device)
    whole, x = tensor((2 * size,), -1.0), tensor((2,), rank + 1.0)
    total, spread = size * (size + 1) / 2, [1.0 + r for r in range(size) for _ in range(2)]
    dist.all_reduce(x, group=group)
    expect("all_reduce", x, [total] * 2)
    gather(whole, tensor((2,), rank + 1.0), group=group)
    expect("all_gather", whole, spread)
    scatter(x.fill_(-1), tensor((2 * size,), rank + 1.0), group=group)
    expect("reduce_scatter", x, [total] * 2)
    dist.broadcast(x.fill_(rank + 1.0), 0, group=group)
    expect("broadcast", x, [1.0] * 2)
    other = tensor((2,), -1.0)
    exchange(dist, group, x.fill_(rank + 1.0), other)
    expect("isend + irecv", other, [(rank - 1) % size + 1.0] * 2)
    part = tensor((2 // size or 1,), 0.0)  # the longer tensor has 8 bytes
    long = tensor((len(part) * size,), 0.0)
    yield "all_reduce", partial(dist.all_reduce, long, group=group)
    yield "all_gather", partial(gather, long, part, group=group)
    yield "reduce_scatter", partial(scatter, part, long, group=group)
    yield "broadcast", partial(dist.broadcast, long, 0, group=group)
    yield "isend + irecv", partial(exchange, dist, group, x, other)


def expect(what: str, found: Any, want: list[float]) -> None:
    """Raise where a result is not what it must be."""
    if found.tolist() != want:
        raise AssertionError(f"{what} on rank {RANK}: {found.tolist()}, and {want} is right")


def issue(torch: Any, options: argparse.Namespace, figures: Figures) -> None:
    """Microseconds of each call in a group of ours and in one of NCCL's (Gloo's without GPUs), in turns."""
    dist = torch.distributed
    peer = dist.new_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    sides = {"ours": dict(eight_bytes(torch, dist.group.WORLD)), "peer": dict(eight_bytes(torch, peer))}
    for name in sides["ours"]:
        costs = turns(torch, {side: calls[name] for side, calls in sides.items()}, options.calls, options.rounds)
        ours, nccl = costs["ours"].issue, costs["peer"].issue
        figures.add(name, us=round(ours, 2), nccl_us=round(nccl, 2), ratio=round(ours / nccl, 3), most=MOST)


def capture(torch: Any, options: argparse.Namespace, figures: Figures) -> None:
    """A captured all_reduce, replayed on new data each time, with a call outside of the graph between."""
    dist, device = torch.distributed, device_of(torch)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    dist.all_reduce(y)
    settle(torch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
        dist.all_reduce(y)
    for turn in range(REPLAYS):
        x.fill_(rank + turn)
        y.fill_(-7)
        graph.replay()
        want = float(sum(r + turn for r in range(size)))
        if not bool((y == want).all()):
            raise AssertionError(f"replay {turn} on rank {rank}: {y[:4].tolist()}, and {want} is right")
        between = torch.full((3,), float(turn), device=device)
        dist.all_reduce(between)
        expect(f"the call after replay {turn}", between, [float(turn * size)] * 3)
    figures.add("replays that were right", count=REPLAYS)


def memory(torch: Any, options: argparse.Namespace, figures: Figures) -> None:
    """Device memory of 16 groups after a first short call in each: the most of all ranks."""
    dist, device = torch.distributed, device_of(torch)
    kind = "nccl" if options.step == "memory-nccl" else "ucch"
    x = torch.ones(2, device=device)
    dist.all_reduce(x)
    settle(torch)
    before = torch.cuda.mem_get_info()[0]
    groups = [dist.new_group(backend=kind) for _ in range(GROUPS)]
    for group in groups:
        dist.all_reduce(x.fill_(1), group=group)
        expect("all_reduce", x, [float(dist.get_world_size())] * 2)
    settle(torch)
    used = max(of_all(dist, before - torch.cuda.mem_get_info()[0]))
    figures.add(f"MiB of {GROUPS} groups", mib=round(used / 2**20, 1), backend=kind)


def host(torch: Any, options: argparse.Namespace, figures: Figures) -> None:
    """Microseconds of an all_reduce of host memory in such a group."""
    dist, size = torch.distributed, torch.distributed.get_world_size()
    for nbytes in (8, 1 << 20):
        x = torch.ones(nbytes // 4)
        dist.all_reduce(x)
        expect("all_reduce of host memory", x[:2], [float(size)] * 2)
        cost = turns(torch, {"ours": partial(dist.all_reduce, x.zero_())}, 50, 7)["ours"]
        figures.add(f"all_reduce of {nbytes} B of the host", us=round(cost.issue, 1))


def works(torch: Any, options: argparse.Namespace, figures: Figures) -> None:
    """Facts of the group, and features that only torch's own groups have."""
    dist, world, device = torch.distributed, torch.distributed.group.WORLD, device_of(torch)
    figures.add(
        "group", type=type(world).__name__, backend=type(world._get_backend(device)).__name__, asked=dist.get_backend(),
        config=dist.get_backend_config(), bound=str(world.bound_device_id),
    )  # fmt: skip
    list(eight_bytes(torch, world))
    options_of = getattr(dist.ProcessGroupNCCL, "Options", None) if torch.cuda.is_available() else None
    if options_of is not None:
        fast = dist.new_group(pg_options=options_of(is_high_priority_stream=True))
        list(eight_bytes(torch, fast))
        made = getattr(fast._get_backend(device), "options", None)  # groups of ours have none
        figures.add("high priority", kept=bool(made and made.is_high_priority_stream))
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    list(eight_bytes(torch, mesh.get_group()))
    expect("all_gather_object", torch.tensor(of_all(dist, RANK)), list(range(dist.get_world_size())))
    if world.bound_device_id is not None:
        split = dist.split_group(split_ranks=[list(range(dist.get_world_size()))])
        list(eight_bytes(torch, split))
        figures.add("split_group", right=True)
    figures.add("values", right=True)


#: Name -> (the function, settings of its job, what it starts its default group with).
STEPS: dict[str, tuple[Callable[..., None], dict[str, str], str]] = {
    "works": (works, {}, "ucch"),
    "works-bound": (works, {"UCCH_BIND": "1"}, "ucch"),
    "works-replace": (works, {"UCCH_TORCH_REPLACE": "nccl"}, "nccl"),
    "works-detail": (works, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "ucch"),
    "works-off": (works, {"UCCH_TORCH_VENDOR": "n"}, "ucch"),
    "issue": (issue, {}, "ucch"),
    "issue-off": (issue, {"UCCH_TORCH_VENDOR": "n"}, "ucch"),
    "capture": (capture, {}, "ucch"),
    "memory-nccl": (memory, {}, "nccl"),
    "memory-ucch": (memory, {}, "ucch"),
    "memory-mixed": (memory, {}, "ucch"),
    "host": (host, {}, "ucch"),
}
ON_GPUS = ("capture", "memory-nccl", "memory-ucch", "memory-mixed", "works-bound", "works-replace")


def child(options: argparse.Namespace) -> int:
    """A rank of a step's job."""
    step, settings, backend = STEPS[options.step]
    mixed = options.step == "memory-mixed"
    torch = begin(options.amd if mixed else "", options.hip if mixed else "", options.limit - 5)
    if (backend, settings) != ("nccl", {}):  # NCCL by itself has settings of ours otherwise
        import ucc_hetero.torch  # noqa: F401  registers

    more: dict[str, Any] = {"timeout": timedelta(seconds=options.limit / 2)}
    if "UCCH_BIND" in settings:
        more["device_id"] = device_of(torch)
    torch.distributed.init_process_group(backend, **more)
    figures = Figures(options)
    figures.add("about", **about(torch, torch.distributed.get_world_size()))
    step(torch, options, figures)
    torch.distributed.destroy_process_group()
    return 0


# --- the run ----------------------------------------------------------------------------------------------------------


def alone() -> None:
    """Forget the job that mpirun started this in: steps are jobs of their own."""
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        del os.environ[name]


def on_hosts(rate: str) -> list[str]:
    """The first words of a command on two emulated hosts of one slot each; none without a rate."""
    words = ["--hosts", "2", "--slots", "1", "--rate", rate, "--mtu", "9000", "--"]
    return [sys.executable, "-m", "ucc_hetero.launch.emulate", *words] if rate else []


def program(options: argparse.Namespace, words: list[str], settings: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Run a program that writes ``--json``; returns what it wrote, and why it failed, if it did."""
    out = Path(options.jsonl).with_suffix(f".{options.step}.json")
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [*words, "--json", str(out)], timeout=options.train_limit + 60, check=False, env={**os.environ, **settings}
        )
    except subprocess.TimeoutExpired as late:
        return {}, str(late)
    error = f"{options.step} ended with status {done.returncode}" if done.returncode else ""
    return json.loads(out.read_text()) if out.exists() else {}, error


def note_training(torch: Any, options: argparse.Namespace, figures: Figures) -> str:
    """Note tokens/s of DDP, FSDP2 and a pipeline over NCCL (Gloo without GPUs) and ours, by tools/torch_train.py."""
    rate, settings, least = TRAINING[options.step]
    peer = "nccl" if torch.cuda.is_available() else "gloo"
    script = str(Path(__file__).with_name("torch_train.py"))
    words = ["--ranks", str(options.ranks), "--backends", f"{peer},ucch", "--size", options.size]
    words += ["--limit", str(options.train_limit / 2)]
    found, error = program(options, [*on_hosts(rate), sys.executable, script, *words], settings)
    ways = {name: each.get("ways", {}) for name, each in found.get("backends", {}).items()}
    for (way, ours), goal in zip(ways.get("ucch", {}).items(), least, strict=False):
        rates = [ours.get("tokens/s"), ways.get(peer, {}).get(way, {}).get("tokens/s")]
        of = {"ours": rates[0], peer: rates[1], f"of_{peer}": ratio(*rates).strip(), "least": f"{goal:.0%}"}
        figures.add(f"tokens/s, {way}", **of)
    return error


def note_collectives(options: argparse.Namespace, figures: Figures) -> str:
    """Note the times of collectives between two emulated hosts beside NCCL's, by tools/gpu_collectives.py."""
    script = str(Path(__file__).with_name("gpu_collectives.py"))
    words = ["--collectives", "allreduce,allgather,bcast,reduce_scatter,alltoall"]
    words += ["--sizes", "8,65536,1048576,16777216,134217728"]
    settings = {**_SOCKETS, "MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "eth0"}
    job_of = [mpirun(), "-n", str(options.ranks), sys.executable, script]
    found, error = program(options, [*on_hosts("none"), *job_of, *words], settings)
    for row in found.get("rows", ()):
        ours, nccl = min(row[name] for name in ("blocking", "stream") if name in row), row["nccl"]
        values = {"us": round(ours, 1), "nccl_us": round(nccl, 1), "of_nccl": round(nccl / ours, 3), "least": 1.1}
        figures.add(f"{row['collective']} of {row['bytes']} B", **values)
    return error


def table(lines: list[Mapping[str, Any]]) -> str:
    """Figures as text."""
    rows = []
    for line in lines:
        if line["figure"] != "about":
            rest = ", ".join(f"{name} {value}" for name, value in line.items() if name not in ("step", "figure"))
            rows.append(f"{line['step']:18}{line['figure']:32}{rest}")
    return "\n".join(rows)


def main() -> int:
    """Run the steps; the status is 1 when one failed."""
    options = arguments()
    if options.child:
        return child(options)
    if RANK:
        return 0  # rank 0 starts the jobs
    alone()
    import torch

    usual = [name for name in STEPS if torch.cuda.is_available() or name not in ON_GPUS]
    usual = [name for name in usual if options.hip or name != "memory-mixed"]
    if torch.cuda.is_available():
        usual += [name for name, (rate, *_) in TRAINING.items() if not rate or unavailable() is None]
        usual += [COLLECTIVES] * (unavailable() is None)
    options.jsonl = str(Path(options.jsonl).resolve())
    path, bad = Path(options.jsonl), 0
    path.write_text("")
    for name in options.steps.split(",") if options.steps else usual:
        print(f"# {name}", file=sys.stderr, flush=True)
        options.step = name
        if name in TRAINING:
            error = note_training(torch, options, Figures(options))
        elif name == COLLECTIVES:
            error = note_collectives(options, Figures(options))
        else:
            words = words_of(options, "ranks amd hip limit jsonl calls rounds step")
            error = job(__file__, options.ranks, words, STEPS[name][1], options.limit).get("error", "")
        if error:
            bad += 1
            Figures(options).add("error", text=error[-3000:])
    print(table([json.loads(line) for line in path.read_text().splitlines()]))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
