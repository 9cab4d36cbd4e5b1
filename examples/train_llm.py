"""Train a Llama or Qwen2 model on text, in parallel the way --parallel says, with the backend ucch.

    mpirun -np 4 python examples/train_llm.py
    UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 python examples/train_llm.py --parallel fsdp2 --size 1m --steps 50
    mpirun -np 8 python examples/train_llm.py --size 1b --dtype bf16 --parallel ddp --peak 989

The corpus is made of the text that comes with Python (its help topics and its library), as bytes: nothing is fetched.
Data and weights do not depend on the number of ranks or on how they share the work, so the losses of any two runs with
the same --seed, --batch and --length can be laid on top of each other. --plot draws them, --save keeps checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llm_model import SIZES, Config, Decoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ucc_hetero.torch  # registers the backend

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--size", choices=tuple(SIZES), default="1m")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2", "tp", "pp"), default="ddp")
    parser.add_argument(
        "--dtype", choices=tuple(TYPES), default="fp32", help="bf16: autocast or FSDP2's mixed precision"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks (default: 16)")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence (default: 128)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="ucch", help="to compare: nccl, gloo (default: ucch)")
    parser.add_argument("--every", type=int, default=10, help="steps between lines of progress (default: 10)")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end (torch.distributed.checkpoint)")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file (needs matplotlib)")
    parser.add_argument("--peak", type=float, default=0, help="TFLOP/s of one device, to report the share that is used")
    return parser.parse_args()


def corpus() -> torch.Tensor:
    """The text as bytes. Python versions differ in it, so rank 0's is what all use."""
    import pydoc_data.topics

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join([*pydoc_data.topics.topics.values(), *(p.read_text(errors="replace") for p in library)])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Job:
    """A rank's part: its device, its place among those that share the data, the model, and how a step is taken."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        width, layers, heads, kv_heads, hidden = SIZES[options.size]
        self.config = Config(width, layers, heads, kv_heads, hidden, bias=options.model == "qwen2")
        #: Which share of the batch this rank takes, and of how many.
        self.share = (self.rank, self.size) if options.parallel in ("ddp", "fsdp2") else (0, 1)
        self.schedule: Any = None
        self.model = self._model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.95))

    def _model(self) -> nn.Module:
        way = self.options.parallel
        if way == "pp":
            return self._stage()
        model = Decoder(self.config)
        model.initialise(self.config, seed=self.options.seed)
        model = model.to(self.device)
        if way == "ddp":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        mesh = dist.init_device_mesh(self.device.type, (self.size,))
        return self._sharded(model, mesh) if way == "fsdp2" else self._split(model, mesh)

    def _sharded(self, model: Decoder, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        more = {}
        if self.options.dtype == "bf16":
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **more)
        return fully_shard(model, mesh=mesh, **more)

    def _split(self, model: Decoder, mesh: Any) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.config.kv_heads % self.size:
            sys.exit(f"--parallel tp: {self.size} ranks do not divide the {self.config.kv_heads} key and value heads")
        columns = dict.fromkeys(
            ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up"), ColwiseParallel()
        )
        for layer in model.layers:
            parallelize_module(
                layer, mesh, {**columns, "attention.o": RowwiseParallel(), "feed.down": RowwiseParallel()}
            )
        return model

    def _stage(self) -> nn.Module:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        layers = self.config.layers
        first, last = (layers * r // self.size for r in (self.rank, self.rank + 1))
        model = Decoder(self.config, first, last)
        model.initialise(self.config, first, self.options.seed)
        stage = PipelineStage(model.to(self.device), self.rank, self.size, self.device)
        parts = min(2 * self.size, self.options.batch)
        self.schedule = Schedule1F1B(stage, n_microbatches=parts, loss_fn=self.loss)
        return model

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step on the whole batch [batch, length + 1]; returns the mean loss, equal on every rank."""
        index, parts = self.share
        mine = tokens.chunk(parts)[index].to(self.device)
        inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        self.optimizer.zero_grad()
        half = self.options.dtype == "bf16" and self.options.parallel != "fsdp2"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            if self.schedule is not None:
                loss = self._pipelined(inputs, targets)
            else:
                loss = self.loss(self.model(inputs), targets)
        if self.schedule is None:
            loss.backward()
        self.optimizer.step()
        loss = loss.detach().clone()
        if self.schedule is not None:
            dist.broadcast(loss, self.size - 1)
        elif parts > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss

    def _pipelined(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.rank == 0 else ()
        if self.rank == self.size - 1:
            self.schedule.step(*arguments, target=targets, losses=losses)
            return torch.stack(losses).mean()
        self.schedule.step(*arguments)
        return torch.zeros((), device=self.device)


def spent() -> float:
    """Seconds that this rank's communicator has spent, as far as it is ours."""
    group = dist.group.WORLD
    return group.communicator.stats()["seconds"] if isinstance(group, ucc_hetero.torch.ProcessGroupUCCH) else 0.0


def train(job: Job, text: torch.Tensor) -> list[float]:
    """All steps, with a line of progress now and then; returns the losses."""
    options, losses = job.options, []
    draw = torch.Generator().manual_seed(options.seed + 1)  # the same on every rank, whatever their number
    parameters = sum(p.numel() for p in Decoder(job.config).parameters()) if job.rank == 0 else 0
    if job.rank == 0:
        print(
            f"{options.model} of {parameters / 1e6:.1f}M parameters, {options.parallel} over {job.size} ranks",
            flush=True,
        )
    began, before = time.perf_counter(), spent()
    for step in range(1, options.steps + 1):
        starts = torch.randint(0, len(text) - options.length - 1, (options.batch,), generator=draw)
        tokens = torch.stack([text[s : s + options.length + 1] for s in starts.tolist()]).long()
        losses.append(job.step(tokens).item())
        if job.rank == 0 and (step % options.every == 0 or step == options.steps):
            took, talked = time.perf_counter() - began, spent() - before
            since = (step - 1) % options.every + 1
            rate = since * options.batch * options.length / took
            line = f"step {step:5d}  loss {losses[-1]:.4f}  {rate:9.0f} tokens/s  communication {talked / took:5.1%}"
            if options.peak:
                line += f"  MFU {6 * parameters * rate / (options.peak * 1e12 * job.size):.1%}"
            print(line, flush=True)
            began, before = time.perf_counter(), spent()
    return losses


def main() -> int:
    options = arguments()
    dist.init_process_group(options.backend)
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.batch % size:
        sys.exit(f"--batch {options.batch} is not a multiple of the {size} ranks")
    text = corpus()
    length = torch.tensor([len(text)])
    dist.broadcast(length, 0)
    text = text if rank == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0)
    job = Job(options)
    losses = train(job, text)
    if options.save:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        weights = get_model_state_dict(job.model)
        state = {f"stage{rank}": weights} if options.parallel == "pp" else weights
        checkpoint.save(state, checkpoint_id=options.save)
    if rank == 0 and options.losses:
        options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    if rank == 0 and options.plot:
        import matplotlib.pyplot as plt

        plt.plot(range(1, len(losses) + 1), losses)
        plt.xlabel("step")
        plt.ylabel("loss")
        plt.savefig(options.plot)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
