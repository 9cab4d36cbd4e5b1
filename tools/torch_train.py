"""Training steps through torch, over ucch on one vendor and on two, over NCCL and over Gloo: tokens/s, in one run.

    python tools/torch_train.py --amd 2,3 --hip libamdhip64-over-cuda.so --json out.json   # 4 GPUs; tests/hipcuda
    python tools/torch_train.py --size 100k --length 64 --batch 16                         # the host, emulated

Every backend is a job of its own, which trains the model of examples/train_llm.py under DDP, FSDP2 and two pipeline
stages times data parallel, one after the other; under HSDP and two replicas of tensor parallel ranks, too, if
``--ways`` says so. ``mixed``: the last half of the ranks is another vendor's, so that the
boundary lies inside the groups of DDP and FSDP2 and between the pipeline's stages; ``--amd`` ranks take their GPU
through the HIP runtime that ``--hip`` names, and without GPUs the vendors are emulated. Times are medians over rounds,
of the slowest rank. A backend that fails, or takes too long, costs its own figures only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

from torch_calls import of_all, settle
from torch_job import RANK, about, every_backend, join, parser, ratio, status, write

#: Name -> (Settings of examples/llm_job.py, shares of NCCL's tokens/s that the mixed and homogeneous jobs are to reach)
WAYS: dict[str, tuple[dict[str, Any], float, float]] = {
    "ddp": ({"parallel": "ddp"}, 0.98, 0.99),
    "fsdp2": ({"parallel": "fsdp2"}, 0.97, 0.99),
    "pp2 x dp": ({"parallel": "pp"}, 0.98, 0.99),
    "hsdp": ({"parallel": "hsdp", "replicas": 2}, 0.98, 0.99),
    "tp x dp2": ({"parallel": "tp", "replicas": 2}, 0.98, 0.99),
}
USUAL = ("ddp", "fsdp2", "pp2 x dp")
BACKENDS = ("nccl", "ucch", "mixed", "gloo")


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__, 4, 120, ",".join(BACKENDS))
    found.add_argument("--ways", default=",".join(USUAL), help=f"some of {','.join(WAYS)} (default: %(default)s)")
    found.add_argument("--size", default="1b", help="of the model (default: 1b)")
    found.add_argument("--dtype", default="", help="fp32, bf16, bf16-all (default: bf16-all on GPUs, else fp32)")
    found.add_argument("--batch", type=int, default=32, help="sequences per step over all ranks (default: 32)")
    found.add_argument("--length", type=int, default=2048, help="tokens per sequence (default: 2048)")
    found.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    found.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    found.add_argument("--gloo-steps", type=int, default=1, help="steps per round over Gloo, in one round (default: 1)")
    found.add_argument("--step-limit", type=float, default=30, help="seconds that a call may take (default: 30)")
    return found.parse_args()


# --- a rank of a job --------------------------------------------------------------------------------------------------


def measure(torch: Any, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s and losses of one way to train, equal on every rank."""
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


def child(options: argparse.Namespace) -> int:
    """All ways over one backend; rank 0 writes what there is after each."""
    torch, ours = join(options, options.step_limit), options.backend in ("ucch", "mixed")
    found: dict[str, Any] = {"about": about(torch, options.ranks), "ways": {}}
    for way in options.ways.split(","):
        if options.backend == "gloo" and WAYS[way][0]["parallel"] == "pp" and torch.cuda.is_available():
            continue  # Gloo's messages read device memory as if it were the host's, and die
        found["ways"][way] = measure(torch, way, options)
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
    """Tokens/s of all backends, and what share of NCCL's (on the host: how many times Gloo's) they are."""
    lines = [f"{'':10}{'':8}" + "".join(f"{name:>12}" for name in found)]
    for way in options.ways.split(","):
        rate = {name: each.get("ways", {}).get(way, {}).get("tokens/s") for name, each in found.items()}
        lines.append(f"{way:10}tokens/s" + "".join(f"{rate[name] or float('nan'):12.0f}" for name in found))
        base = "nccl" if "nccl" in found else "gloo"
        lines.append(f"{'':10}of {base:5}" + "".join(f"    {ratio(rate[name], rate.get(base))}" for name in found))
        if base == "nccl":
            _, mixed, alone = WAYS[way]
            goals = {"mixed": f"{mixed:.0%}", "ucch": f"{alone:.0%}"}
            lines.append(f"{'':10}to reach" + "".join(f"{goals.get(name, ''):>12}" for name in found))
    return "\n".join(lines)


def main() -> int:
    """Run the jobs; the status is 1 when any of ours failed."""
    options = arguments()
    if options.child:
        return child(options)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usual = [name for name in BACKENDS if name != "nccl" or gpus >= options.ranks]
    usual = [name for name in usual if name != "mixed" or not gpus or options.amd]
    names = "ways size dtype batch length steps rounds gloo_steps step_limit"
    found = every_backend(__file__, options, usual, names)
    print(table(found, options))
    return status(found)


if __name__ == "__main__":
    sys.exit(main())
