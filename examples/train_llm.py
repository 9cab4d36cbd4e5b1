"""Train a Llama or Qwen2 model on text with the backend ucch, parallelised as --parallel says.

    mpirun -np 4 python examples/train_llm.py
    UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 python examples/train_llm.py --parallel fsdp2 --size 1m --steps 50
    mpirun -np 8 python examples/train_llm.py --size 1b --dtype bf16 --parallel ddp --length 2048 --batch 64

The corpus is the text that comes with Python (its help topics and its library), as bytes: nothing is downloaded.
Data and weights do not depend on the number of ranks or on the parallelism, so the losses of any two runs with
the same --seed, --batch and --length can be compared. --plot draws them.

A progress line has the loss, tokens/s of all ranks, the share of the time in which collectives were in progress
(overlapping computation where possible), and on GPUs MFU: the share of the data sheet's bfloat16 FLOP/s that is used.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llm_job import DTYPES, SCHEDULES, WAYS, Job, Settings, batches, peak_of
from llm_model import SIZES

from ucc_hetero.torch.replicas import Replicas


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--size", choices=tuple(SIZES), default="1m", help="parameters (default: 1m)")
    parser.add_argument("--parallel", choices=tuple(WAYS), default="ddp", help=_listed(WAYS))
    parser.add_argument("--replicas", type=int, default=1, help="for hsdp, tp and pp (default: 1)")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="of the pipeline (default: 1f1b)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help=_listed(DTYPES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks (default: 16)")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence (default: 128)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--balanced", action="store_true", help="profile the ranks and give slow ones less to do")
    parser.add_argument("--drift", choices=("ignore", "report", "broadcast", "raise"), default="ignore",
                        help="what to do when replicas of ddp, zero or cp differ (default: do not look)")  # fmt: skip
    parser.add_argument("--drift-every", type=int, default=100, help="steps between two looks (default: 100)")
    parser.add_argument("--backend", default="ucch", help="to compare: nccl, gloo (default: ucch)")
    parser.add_argument("--every", type=int, default=10, help="steps between lines of progress (default: 10)")
    parser.add_argument("--save", type=Path, help="folder for checkpoints (torch.distributed.checkpoint)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: at the end)")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from: the folder of one step")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file (needs matplotlib)")
    parser.add_argument("--peak", type=float, help="TFLOP/s of one device for MFU (default: its data sheet's)")
    return parser.parse_args()


def _listed(what: dict[str, str]) -> str:
    return "; ".join(f"{name}: {about}" for name, about in what.items())


def corpus() -> torch.Tensor:
    """The text as bytes, the same on every rank: all use rank 0's, as it differs between Python versions."""
    text = torch.empty(0, dtype=torch.uint8)
    if dist.get_rank() == 0:
        import pydoc_data.topics

        library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        parts = [*pydoc_data.topics.topics.values(), *(p.read_text(errors="replace") for p in library)]
        text = torch.frombuffer(bytearray("\n".join(parts).encode()), dtype=torch.uint8)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, 0)
    text = text.to(device) if dist.get_rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, 0)
    return text.cpu()


class Progress:
    """Prints rank 0's progress lines. ``peak``: TFLOP/s of one device, 0 if unknown."""

    def __init__(self, job: Job, every: int, steps: int, peak: float) -> None:
        self._job, self._every, self._steps, self._peak = job, every, steps, peak
        self._flops, self._since = job.flops(), 0
        self._began, self._talked = time.perf_counter(), job.communication()
        if job.rank == 0:
            s, ranks = job.settings, f"{job.size} rank{'s' * (job.size > 1)}"
            print(f"{s.model} of {job.parameters() / 1e6:.1f}M parameters, {s.parallel} over {ranks}", flush=True)
            if s.balanced:
                print(f"layers of the stages: {job.cuts}" if job.cuts else f"sequences: {job.share.counts}", flush=True)

    def step(self, step: int, loss: float) -> None:
        """Call this after a step that the host has waited for."""
        self._since += 1
        if step % self._every and step != self._steps:
            return
        took, talked = time.perf_counter() - self._began, self._job.communication() - self._talked
        s = self._job.settings
        line = f"step {step:5d}  loss {loss:.4f}  {self._since * s.batch * s.length / took:9.0f} tokens/s"
        if talked:
            line += f"  communication {talked / took:5.1%}"
        if self._peak:
            line += f"  MFU {self._since * self._flops / took / (self._peak * 1e12 * self._job.size):.1%}"
        if self._job.rank == 0:
            print(line, flush=True)
        self._since, self._began, self._talked = 0, time.perf_counter(), self._job.communication()


def train(job: Job, text: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """Train all steps, with progress lines, replica checks and checkpoints; return the losses."""
    losses: list[float] = []
    draw = torch.Generator().manual_seed(job.settings.seed + 1)  # the same on every rank, for any number of ranks
    begun = load(job, options.resume, draw) if options.resume else 0
    progress = Progress(
        job, options.every, options.steps, peak_of(job.device) if options.peak is None else options.peak
    )
    replicas = None
    if options.drift != "ignore" and options.parallel in ("ddp", "zero", "cp"):
        inner = getattr(job.optimizer, "optim", job.optimizer) if options.parallel != "zero" else None
        replicas = Replicas(job.model, inner, every=options.drift_every, policy=options.drift)
    for step in range(begun + 1, options.steps + 1):
        losses.append(job.step(batches(text, job.settings, draw)).item())
        progress.step(step, losses[-1])
        if replicas is not None:
            replicas.step()
        if options.save and (step == options.steps or (options.save_every and step % options.save_every == 0)):
            save(job, options.save / f"step-{step:06d}", step, draw)
    return losses


def save(job: Job, folder: Path, step: int, draw: torch.Generator) -> None:
    """Write a checkpoint; collective over all ranks."""
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save({**job.state(), "step": torch.tensor(step), "draw": draw.get_state()}, checkpoint_id=folder)


def load(job: Job, folder: Path, draw: torch.Generator) -> int:
    """Restore a checkpoint; return the number of steps done."""
    import torch.distributed.checkpoint as checkpoint

    state: dict[str, Any] = {**job.state(), "step": torch.tensor(0), "draw": draw.get_state()}
    checkpoint.load(state, checkpoint_id=folder)
    job.restore(state)
    draw.set_state(state["draw"])
    return int(state["step"])


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot losses over steps into a file."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for label, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=label, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    """Train; write the losses where the options say."""
    options = arguments()
    dist.init_process_group(options.backend)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.set_num_threads(1)
    chosen = {field.name: getattr(options, field.name) for field in fields(Settings) if hasattr(options, field.name)}
    try:
        job = Job(Settings(**chosen))
    except ValueError as error:
        sys.exit(f"train_llm.py: {error}")
    losses = train(job, corpus(), options)
    if job.rank == 0 and options.losses:
        options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    if job.rank == 0 and options.plot:
        plot({options.parallel: losses}, options.plot)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
