"""Training steps through torch with ucch on one vendor and on two, with NCCL and with Gloo: tokens/s, in one run.

    python tools/torch_train.py --amd 2,3 --hip libamdhip64-over-cuda.so --json out.json   # 4 GPUs; tests/hipcuda
    python tools/torch_train.py --size 100k --length 64 --batch 16                         # the host, emulated
    python tools/torch_train.py --ranks 2 --ways calls,alone,beside --seconds 15           # collectives and products

Every backend is a separate job, which trains the model of examples/train_llm.py under DDP, FSDP2 and two pipeline
stages times data parallel, one after the other, and with ``--ways`` also under HSDP and two replicas of tensor parallel
ranks. ``mixed``: the last half of the ranks is of another vendor, so that the boundary between vendors lies inside the
groups of DDP and FSDP2 and between the pipeline's stages. ``--amd`` ranks use their GPU through the HIP runtime
``--hip``; without GPUs the vendors are emulated. Times are medians over rounds, of the slowest rank. If a backend
fails, or takes too long, only its own figures are missing.

``calls``: asynchronous collectives of all kinds and sizes (8 B to 16 MiB, of the same seed for every backend) in two
groups of all ranks, with matrix products between them, waited for and compared sixteen at a time; calls per second.
``alone``, ``beside``: TFLOP/s of a rank's products, alone and during a series of all_reduces of 128 MiB.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from typing import Any

from torch_calls import KINDS, call_of, of_all, settle
from torch_job import RANK, about, every_backend, join, parser, ratio, status, write

#: Name -> (Settings of examples/llm_job.py, shares of NCCL's tokens/s that mixed and homogeneous jobs should reach)
WAYS: dict[str, tuple[dict[str, Any], float, float]] = {
    "ddp": ({"parallel": "ddp"}, 0.98, 0.99),
    "fsdp2": ({"parallel": "fsdp2"}, 0.97, 0.99),
    "pp2 x dp": ({"parallel": "pp"}, 0.98, 0.99),
    "hsdp": ({"parallel": "hsdp", "replicas": 2}, 0.98, 0.99),
    "tp x dp2": ({"parallel": "tp", "replicas": 2}, 0.98, 0.99),
}
USUAL = ("ddp", "fsdp2", "pp2 x dp")
#: Ways without training, and the unit of each result.
BUSY = {"calls": "calls/s", "alone": "TFLOP/s", "beside": "TFLOP/s"}
#: Calls in flight at a time in ``calls``.
BATCH = 16
BACKENDS = ("nccl", "ucch", "mixed", "gloo")


def arguments() -> argparse.Namespace:
    found = parser(__doc__, 4, 120, ",".join(BACKENDS))
    found.add_argument(
        "--ways", default=",".join(USUAL), help=f"some of {','.join([*WAYS, *BUSY])} (default: %(default)s)"
    )
    found.add_argument("--size", default="1b", help="of the model (default: 1b)")
    found.add_argument("--dtype", default="", help="fp32, bf16, bf16-all (default: bf16-all on GPUs, else fp32)")
    found.add_argument("--batch", type=int, default=32, help="sequences per step over all ranks (default: 32)")
    found.add_argument("--length", type=int, default=2048, help="tokens per sequence (default: 2048)")
    found.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    found.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    found.add_argument("--gloo-steps", type=int, default=1, help="steps per round over Gloo, in one round (default: 1)")
    found.add_argument("--seconds", type=float, default=15, help="of calls (default: 15)")
    found.add_argument("--step-limit", type=float, default=30, help="seconds that a call may take (default: 30)")
    return found.parse_args()


# --- a rank of a job --------------------------------------------------------------------------------------------------


def measure(torch: Any, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s and losses of one way to train, equal on every rank."""
    from llm_job import Job, Settings, device_of_rank

    dist, device = torch.distributed, device_of_rank()
    on_gpu = device.type == "cuda"
    gloo = options.backend == "gloo"
    chosen = dict(WAYS[way][0])
    if chosen["parallel"] == "pp":
        chosen["replicas"] = max(options.ranks // 2, 1)
    dtype = options.dtype or ("bf16-all" if on_gpu else "fp32")
    run = Job(
        Settings(
            size=options.size, dtype=dtype, batch=options.batch, length=options.length, quick_start=on_gpu, **chosen
        )
    )
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (options.batch, options.length + 1), generator=draw)
    losses, seconds = [], []
    steps, rounds, warm = (options.gloo_steps, 1, 1) if gloo and on_gpu else (options.steps, options.rounds, 3)
    for _ in range(warm):
        losses.append(run.step(tokens).item())
    for _ in range(rounds):
        settle(torch)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss = run.step(tokens)
        settle(torch)
        seconds.append((time.perf_counter() - start) / steps)
        losses.append(loss.item())
    step = max(of_all(dist, statistics.median(seconds)))
    return {
        "seconds": step, "tokens/s": options.batch * options.length / step, "losses": losses,
        "TFLOP/s per rank": run.flops() / step / run.size * 1e-12, "rounds": seconds,
    }  # fmt: skip


class Busy:
    """Concurrent collectives and matrix products: a rank's groups and matrices."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.dist = torch, torch.distributed
        self.n = self.dist.get_world_size()
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        self.groups = [self.dist.new_group() for _ in range(2)]
        self.order = 4096 if self.gpu else 128
        kind = torch.bfloat16 if self.gpu else torch.float32
        self.square = torch.randn(self.order, self.order, dtype=kind, device=self.device)
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)

    def call(self, kind: str, count: int, group: Any, value: int) -> tuple[Any, Any, int]:
        """Start a collective of ``count`` elements a rank; return its work, its output, and the output's expected
        value."""
        sends, receives = (count * (self.n if spread else 1) for spread in KINDS[kind])
        x = self.torch.full((sends,), float(value), device=self.device)
        y = x if kind in ("all_reduce", "broadcast") else self.torch.full((receives,), -1.0, device=self.device)
        work = call_of(self.dist, kind, x, y, group=group, async_op=True)()
        return work, y, value * self.n if "reduce" in kind else value

    def calls(self, seconds: float) -> float:
        """Return calls per second; all results are compared."""
        draw, done = random.Random(5), 0
        end = time.perf_counter() + seconds
        start = time.perf_counter()
        while True:
            flying = []
            for _ in range(BATCH):
                kind, size = draw.choice(list(KINDS)), 2 ** draw.randint(1, 22)
                flying.append(self.call(kind, size, draw.choice(self.groups), draw.randint(1, 9)))
                if draw.random() < 0.5:
                    self.square @ self.square
            for work, out, value in flying:
                work.wait()
                self.bad += (out != value).sum()
            done += BATCH
            if done % (8 * BATCH) == 0 and not all(of_all(self.dist, time.perf_counter() < end)):
                break  # all ranks stop after the same batch
        settle(self.torch)
        rate = done / (time.perf_counter() - start)
        if int(self.bad):
            raise AssertionError(f"rank {RANK}: {int(self.bad)} elements are wrong")
        return float(min(of_all(self.dist, rate)))

    def products(self, beside: bool) -> float:
        """Return TFLOP/s of a rank's products, alone or during a series of long all_reduces."""
        long = self.torch.zeros((32 if self.gpu else 1) << 20, device=self.device)
        rates = []
        for _ in range(5):
            settle(self.torch)
            self.dist.barrier()
            works = [self.dist.all_reduce(long, async_op=True) for _ in range(8 * beside)]
            start = time.perf_counter()
            for _ in range(200):
                self.square @ self.square
            if self.gpu:
                self.torch.cuda.current_stream().synchronize()
            rates.append(200 * 2 * self.order**3 / (time.perf_counter() - start) * 1e-12)
            for work in works:
                work.wait()
        return float(min(of_all(self.dist, sorted(rates)[2])))


def busy(torch: Any, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a figure for concurrent collectives and products."""
    bench = Busy(torch)
    return {BUSY[way]: bench.calls(options.seconds) if way == "calls" else bench.products(way == "beside")}


def child(options: argparse.Namespace) -> int:
    """Run all ways with one backend; rank 0 writes the results after each way."""
    torch, ours = join(options, options.step_limit), options.backend in ("ucch", "mixed")
    found: dict[str, Any] = {"about": about(torch, options.ranks), "ways": {}}
    for way in options.ways.split(","):
        if options.backend == "gloo" and way.startswith("pp") and torch.cuda.is_available():
            continue  # Gloo's messages access device memory as host memory, and crash
        found["ways"][way] = (busy if way in BUSY else measure)(torch, way, options)
        if RANK == 0:
            if ours:
                import ucc_hetero.torch

                found["ways"][way]["plans"] = [g.communicator.plan_summary() for g in ucc_hetero.torch.groups()]
            write(options.child, found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    return 0


# --- the run ----------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Format the figures of all backends, and their share of NCCL's (on the host: the factor over Gloo's)."""
    lines = [f"{'':10}{'':8}" + "".join(f"{name:>12}" for name in found)]
    for way in options.ways.split(","):
        unit = BUSY.get(way, "tokens/s")
        rate = {name: each.get("ways", {}).get(way, {}).get(unit) for name, each in found.items()}
        lines.append(f"{way:10}{unit:8}" + "".join(f"{rate[name] or float('nan'):12.6g}" for name in found))
        base = "nccl" if "nccl" in found else "gloo"
        lines.append(f"{'':10}of {base:5}" + "".join(f"    {ratio(rate[name], rate.get(base))}" for name in found))
        if base == "nccl" and way in WAYS:
            _, mixed, alone = WAYS[way]
            goals = {"mixed": f"{mixed:.0%}", "ucch": f"{alone:.0%}"}
            lines.append(f"{'':10}to reach" + "".join(f"{goals.get(name, ''):>12}" for name in found))
    return "\n".join(lines)


def main() -> int:
    """Run the jobs; return 1 if a ucch job failed."""
    options = arguments()
    if options.child:
        return child(options)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usual = [name for name in BACKENDS if name != "nccl" or gpus >= options.ranks]
    usual = [name for name in usual if name != "mixed" or not gpus or options.amd]
    names = "ways size dtype batch length steps rounds gloo_steps step_limit seconds"
    found = every_backend(__file__, options, usual, names)
    print(table(found, options))
    return status(found)


if __name__ == "__main__":
    sys.exit(main())
