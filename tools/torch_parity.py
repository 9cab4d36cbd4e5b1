"""Parity of training: equal losses on one vendor, on two, and in a single process, for every way to train.

    python tools/torch_parity.py --json out.json                                           # the host, emulated
    python tools/torch_parity.py --amd 2,3 --hip libamdhip64-over-cuda.so --size 125m ...  # 4 GPUs; tests/hipcuda

Jobs train the model of examples/train_llm.py from the same seed on the same data in the same order, under each of
--ways: a single process, all ranks of one vendor (homogeneous), two vendors whose boundary lies inside every group
(mixed), and, for the first way, one vendor from another seed (control); also another backend of torch's, on request
(--jobs single,homogeneous,mixed,nccl,control). The rule, for each against those before it:

    fp32   relative difference of the loss: 1e-6 at the first step, 1e-5 at every step
    bf16   1e-2 at every step, 1e-3 on the mean of the last 20

and the control must be at least a hundred (bf16: ten) times as far away as the runs of one seed are from each other.
The exit status is 0 only if all of it holds. TF32 is off and deterministic kernels are on.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

from torch_job import RANK, about, begin, job, mixed_environment, parser, words_of, write

#: Name -> Settings of examples/llm_job.py. The boundary between vendors lies inside every group of four ranks.
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "replicate": {"parallel": "replicate"},
    "zero": {"parallel": "zero"},
    "fsdp1": {"parallel": "fsdp1"},
    "fsdp2": {"parallel": "fsdp2"},
    "hsdp": {"parallel": "hsdp", "replicas": 2},
    "tp": {"parallel": "tp"},
    "tp x dp": {"parallel": "tp", "replicas": 2},
    "cp": {"parallel": "cp"},
    "gpipe": {"parallel": "pp", "schedule": "gpipe"},
    "pp": {"parallel": "pp"},
    "pp x dp": {"parallel": "pp", "replicas": 2},
    "interleaved x dp": {"parallel": "pp", "schedule": "interleaved", "replicas": 2},
}

#: Jobs, in the order of comparison; the backends of jobs that do not use ucch.
JOBS = {"single": "", "homogeneous": "", "mixed": "", "nccl": "nccl", "gloo": "gloo", "control": ""}


class Rule(NamedTuple):
    """Largest allowed relative differences, and how much further away another seed must be."""

    first: float
    every: float
    tail: float
    control: float


RULES = {
    "fp32": Rule(1e-6, 1e-5, 1e-5, 100.0),
    "bf16": Rule(1e-2, 1e-2, 1e-3, 10.0),
    "bf16-all": Rule(1e-2, 1e-2, 1e-3, 10.0),
}


class Distance(NamedTuple):
    """Distance of two runs' losses, relative to the first one's."""

    first: float
    worst: float
    tail: float


def distance(one: list[float], two: list[float], tail: int = 20) -> Distance:
    """Return the distance at the first step, at the worst one, and between the means of the last ``tail`` steps.

    Raises ``ValueError`` for curves of different lengths, or with losses that are not finite.
    """
    if len(one) != len(two) or not one or any(x != x or y != y for x, y in zip(one, two, strict=True)):
        raise ValueError(f"curves of {len(one)} and {len(two)} losses cannot be compared, or hold NaN")
    steps = [abs(x - y) / abs(x) for x, y in zip(one, two, strict=True)]
    ends = [sum(curve[-tail:]) / len(curve[-tail:]) for curve in (one, two)]
    return Distance(steps[0], max(steps), abs(ends[0] - ends[1]) / abs(ends[0]))


def holds(found: Distance, rule: Rule) -> bool:
    """True if two curves count as equal."""
    return found.first <= rule.first and found.worst <= rule.every and found.tail <= rule.tail


def arguments() -> argparse.Namespace:
    found = parser(__doc__, 4, 900)
    found.add_argument("--ways", default=",".join(WAYS), help="some of %(default)s")
    usual = "single,homogeneous,mixed,control"
    found.add_argument("--jobs", default=usual, help=f"some of {','.join(JOBS)} (default: {usual})")
    found.add_argument("--model", default="llama", choices=("llama", "qwen2"))
    found.add_argument("--size", default="100k", help="of the model (default: 100k)")
    found.add_argument("--dtype", default="fp32", choices=tuple(RULES))
    found.add_argument("--steps", type=int, default=300, help="(default: 300)")
    found.add_argument("--batch", type=int, default=16, help="sequences per step over all ranks (default: 16)")
    found.add_argument("--length", type=int, default=64, help="bytes per sequence (default: 64)")
    found.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW (default: 1e-3)")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--backend", default="ucch", help=argparse.SUPPRESS)
    return found.parse_args()


def child(options: argparse.Namespace) -> int:
    """Train in every way, one after the other; rank 0 writes the losses after each way."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch = begin(options.amd, options.hip, options.limit - 5)
    from llm_job import Job, Settings, batches
    from train_llm import corpus

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist = torch.distributed
    dist.init_process_group(options.backend, timeout=timedelta(seconds=120))
    text, found = corpus(), {"about": about(torch, dist.get_world_size()), "losses": {}}
    for way in options.ways.split(","):
        chosen = dict(WAYS[way])
        if dist.get_world_size() == 1:
            chosen["replicas"] = 1
        names = ("model", "size", "dtype", "batch", "length", "rate", "seed")
        settings = Settings(**{name: getattr(options, name) for name in names}, **chosen)
        run, draw, losses = Job(settings), torch.Generator().manual_seed(settings.seed), []
        for _ in range(options.steps):
            losses.append(run.step(batches(text, settings, draw)))
        found["losses"][way] = [loss.item() for loss in losses]
        if RANK == 0:
            write(options.child, found)
    dist.destroy_process_group()
    return 0


def judge(losses: dict[str, dict[str, list[float]]], dtype: str) -> tuple[list[str], dict[str, Any], bool]:
    """Return lines of a report on the jobs' losses, the distances, and True if the rule always holds."""
    rule, good = RULES[dtype], True
    lines: list[str] = []
    table: dict[str, Any] = {}

    def say(way: str, name: str, found: Distance, verdict: str) -> None:
        table.setdefault(way, {})[name] = found._asdict()
        lines.append(
            f"{way:16} {name:22} first {found.first:.1e}  worst {found.worst:.1e}  tail {found.tail:.1e}  {verdict}"
        )

    nearest = 0.0
    curves = [name for name in JOBS if name in losses and name != "control"]
    for way in losses[curves[0]] if curves else ():
        for one, two in combinations(curves, 2):
            found = distance(losses[one][way], losses[two][way])
            nearest = max(nearest, found.worst)
            good &= holds(found, rule)
            say(way, f"{two} to {one}", found, "" if holds(found, rule) else "TOO FAR")
    for way, curve in losses.get("control", {}).items() if curves else ():
        found = distance(losses[curves[-1]][way], curve)
        far = found.worst >= rule.control * nearest
        good &= far
        say(way, "another seed", found, "" if far else "TOO NEAR")
    return lines, table, good


def jobs_of(options: argparse.Namespace) -> dict[str, tuple[int, list[str], dict[str, str]]]:
    """Name of each job -> its ranks, its additional command-line words, and its environment."""
    seed = ["--ways", options.ways, "--seed", str(options.seed)]
    sides = ["--amd", options.amd, "--hip", options.hip]
    jobs: dict[str, tuple[int, list[str], dict[str, str]]] = {
        name: (options.ranks, [*seed, "--backend", backend] if backend else seed, {}) for name, backend in JOBS.items()
    }
    jobs["single"] = (1, seed, {})
    jobs["mixed"] = (options.ranks, [*seed, *sides], mixed_environment(options.ranks, options.amd))
    other = ["--ways", options.ways.split(",")[0], "--seed", str(options.seed + 1)]
    jobs["control"] = (options.ranks, other, {})
    return {name: jobs[name] for name in JOBS if name in options.jobs.split(",")}


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    common = words_of(options, "ranks model size dtype steps batch length rate limit")

    found = {}
    for name, (ranks, more, environment) in jobs_of(options).items():
        print(f"# {name}", file=sys.stderr, flush=True)
        found[name] = job(__file__, ranks, [*common, *more], environment, options.limit)
    return found


def main() -> int:
    """Run the jobs and compare them."""
    options = arguments()
    if options.child:
        return child(options)
    unknown = set(options.jobs.split(",")) - set(JOBS)
    if unknown:
        sys.exit(f"--jobs: {', '.join(sorted(unknown))} is not among {', '.join(JOBS)}")
    found = run_all(options)
    failed = {name: each["error"] for name, each in found.items() if "error" in each}
    for name, error in failed.items():
        print(f"{name}: {error}", file=sys.stderr)
    losses = {name: each["losses"] for name, each in found.items() if name not in failed}
    lines, table, good = judge(losses, options.dtype) if losses else ([], {}, False)
    good = good and not failed
    print(*lines, "parity holds" if good else "NO PARITY", sep="\n")
    if options.json:
        rule = RULES[options.dtype]._asdict()
        write(options.json, {"command": sys.argv, "good": good, "rule": rule, "distances": table, "runs": found})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
