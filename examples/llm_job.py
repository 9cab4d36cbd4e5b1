"""Training steps of train_llm.py for each way to train in parallel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llm_model import SIZES, Config, Decoder, Layer, Sequences
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ucc_hetero.torch  # registers the backend
from ucc_hetero.torch import balance

#: --parallel -> description.
WAYS = {
    "ddp": "data parallel, every rank has the whole model",
    "replicate": "the same, composable (replicate)",
    "zero": "data parallel, optimizer states sharded (ZeroRedundancyOptimizer)",
    "fsdp1": "data parallel, everything sharded (FullyShardedDataParallel)",
    "fsdp2": "data parallel, everything sharded (fully_shard)",
    "hsdp": "everything sharded inside groups, --replicas of them",
    "tp": "tensor parallel, --replicas of it data parallel, sharded (fully_shard)",
    "cp": "context parallel, every rank has a part of each sequence (Ulysses)",
    "pp": "pipeline (--schedule), --replicas of it data parallel",
}
#: --schedule -> torch's class, and the number of stages of each rank.
SCHEDULES = {"gpipe": ("ScheduleGPipe", 1), "1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2)}
#: --dtype -> description.
DTYPES = {
    "fp32": "everything in float32",
    "bf16": "weights in float32, computing in bfloat16 (autocast, or FSDP2's mixed precision)",
    "bf16-all": "weights and gradients in bfloat16, too",
}

#: Part of a GPU's name -> dense bfloat16 TFLOP/s of its data sheet.
_PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0,
    "MI355X": 2500.0, "MI325X": 1307.0, "MI300X": 1307.0, "MI250X": 191.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run; equal on every rank. ``batch``: sequences per step over all ranks, of ``length`` bytes."""

    model: str = "llama"
    size: str = "1m"
    parallel: str = "ddp"
    dtype: str = "fp32"
    batch: int = 16
    length: int = 128
    rate: float = 1e-3
    seed: int = 0
    replicas: int = 1
    schedule: str = "1f1b"
    #: Distribute work in proportion to the ranks' speed.
    balanced: bool = False
    #: Random weights from the device's own generator: faster, but different from the host's.
    quick_start: bool = False


def device_of_rank() -> torch.device:
    """The device on which this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def peak_of(device: torch.device) -> float:
    """bfloat16 TFLOP/s of a device; 0 if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), 0.0)


class Job:
    """A rank's part of the job: its device, its rank among those that share a batch, the model, and the training
    step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device_of_rank()
        width, layers, heads, kv_heads, hidden = SIZES[settings.size]
        self.config = Config(width, layers, heads, kv_heads, hidden, bias=settings.model == "qwen2")
        self._check()
        #: Number of layers of each pipeline stage; this rank's part of a batch.
        self.cuts: list[tuple[int, int]] = []
        self.share = self._share()
        self.schedule: Any = None
        self.replicas_group: Any = None
        self.model = self._model()
        self.optimizer = self._optimizer()

    def _check(self) -> None:
        """Raise ``ValueError`` for settings that these ranks cannot run."""
        s, parts = self.settings, self._data_ranks()
        if s.replicas < 1 or self.size % s.replicas:
            raise ValueError(f"--replicas {s.replicas} does not divide the {self.size} ranks")
        if s.batch % parts and not s.balanced:
            raise ValueError(f"--batch {s.batch} is not a multiple of the {parts} ranks that share it")
        if s.parallel == "tp" and self.config.kv_heads % (self.size // s.replicas):
            ranks = self.size // s.replicas
            raise ValueError(f"{ranks} ranks do not divide the {self.config.kv_heads} key and value heads")
        if s.parallel == "cp" and (self.config.kv_heads % self.size or s.length % self.size):
            raise ValueError(
                f"{self.size} ranks must divide the {self.config.kv_heads} key and value heads and --length {s.length}"
            )
        stages = self.size // s.replicas * SCHEDULES[s.schedule][1]
        if s.parallel == "pp" and stages > self.config.layers:
            raise ValueError(f"{stages} stages are more than the {self.config.layers} layers")
        if s.parallel == "pp" and s.balanced and SCHEDULES[s.schedule][1] > 1:
            raise ValueError("--balanced cuts one stage for each rank; --schedule interleaved has more")

    def _data_ranks(self) -> int:
        """Number of ranks that share a batch."""
        way = self.settings.parallel
        return {"tp": self.settings.replicas, "cp": 1, "pp": self.settings.replicas}.get(way, self.size)

    def _share(self) -> balance.Share:
        s, parts = self.settings, self._data_ranks()
        if s.parallel == "pp":
            return balance.Share((s.batch // parts,) * parts, self.rank % parts)
        if s.balanced and parts == self.size > 1:
            return self._profile().split(s.batch)
        return balance.Share((s.batch // parts,) * parts, self.rank // (self.size // parts))

    # --- the model ----------------------------------------------------------------------------------------------------

    def _decoder(self, first: int = 0, last: int | None = None) -> Decoder:
        quick = self.settings.quick_start
        with self.device if quick else torch.device("cpu"):
            model = Decoder(self.config, first, last)
            model.initialise(self.config, first, self.settings.seed, self.device if quick else torch.device("cpu"))
        kind = torch.bfloat16 if self.settings.dtype == "bf16-all" else torch.float32
        return model.to(self.device, kind)

    def _model(self) -> nn.Module:
        s = self.settings
        if s.parallel == "pp":
            return self._stages()
        model = self._decoder()
        if s.parallel == "cp":
            model.share_sequences(Sequences(dist.group.WORLD))
        if s.parallel in ("ddp", "zero", "cp"):
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if s.parallel == "replicate":
            from torch.distributed._composable.replicate import replicate

            return replicate(model)
        if s.parallel == "fsdp1":
            return self._fully_sharded(model)
        if s.parallel == "fsdp2":
            return self._sharded(model, dist.init_device_mesh(self.device.type, (self.size,)))
        names = ("replicate", "shard" if s.parallel == "hsdp" else "split")
        mesh = dist.init_device_mesh(self.device.type, (s.replicas, self.size // s.replicas), mesh_dim_names=names)
        if s.parallel == "hsdp":
            return self._sharded(model, mesh)
        model = self._split(model, mesh["split"])
        return self._sharded(model, mesh["replicate"]) if s.replicas > 1 else model

    def _fully_sharded(self, model: Decoder) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mixed_precision=half if self.settings.dtype == "bf16" else None,
            device_id=self.device,
            use_orig_params=True,
        )

    def _sharded(self, model: Decoder, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        more = {}
        if self.settings.dtype == "bf16":
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **more)
        return fully_shard(model, mesh=mesh, **more)

    def _split(self, model: Decoder, mesh: Any) -> Decoder:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        names = ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in names}
        plan |= {"attention.o": RowwiseParallel(), "feed.down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
        return model

    def _stages(self) -> nn.Module:
        """This rank's stages: ranks r, r + replicas, r + 2 replicas, ... form the r-th pipeline."""
        from torch.distributed import pipelining

        s = self.settings
        kind, each = SCHEDULES[s.schedule]
        ranks = self.size // s.replicas
        count = ranks * each
        mesh = dist.init_device_mesh(self.device.type, (ranks, s.replicas), mesh_dim_names=("pp", "dp"))
        place, pipeline = self.rank // s.replicas, mesh["pp"].get_group()
        self.replicas_group = mesh["dp"].get_group() if s.replicas > 1 else None
        layers = self.config.layers
        self.cuts = [(layers * i // count, layers * (i + 1) // count) for i in range(count)]
        if s.balanced and ranks > 1:
            self.cuts = self._layer_cuts(pipeline)
        mine = range(place, count, ranks)
        models: list[nn.Module] = [self._decoder(*self.cuts[i]) for i in mine]
        if self.replicas_group is not None and each == 1:
            group = self.replicas_group
            models = [DistributedDataParallel(models[0], process_group=group, gradient_as_bucket_view=True)]
        stages = [
            pipelining.PipelineStage(model, i, count, self.device, group=pipeline)
            for i, model in zip(mine, models, strict=True)
        ]
        # The largest number of microbatches, up to two per stage, that divides the sequences evenly.
        parts = math.gcd(self.share.count, 2 * count)
        schedule = getattr(pipelining, kind)
        self.schedule = schedule(stages if each > 1 else stages[0], n_microbatches=parts, loss_fn=self.loss)
        self.first, self.last = place == 0, place == ranks - 1
        #: A rank of the last stage, which has the loss.
        self.knows = self.size - 1
        return nn.ModuleList(models) if each > 1 else models[0]

    def _optimizer(self) -> Any:
        more = {"lr": self.settings.rate, "betas": (0.9, 0.95), "fused": self.device.type == "cuda"}
        if self.settings.parallel == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, **more)
        from torch.distributed.tensor import DTensor

        # With tensor parallelism some parameters are plain tensors, and one kernel call accepts only plain ones or only
        # DTensors.
        kinds = [[p for p in self.model.parameters() if isinstance(p, DTensor) is kind] for kind in (False, True)]
        return torch.optim.AdamW([{"params": parameters} for parameters in kinds if parameters], **more)

    # --- unequal devices ----------------------------------------------------------------------------------------------

    def _profile(self) -> balance.Profile:
        model, s = self._decoder(), self.settings
        most = max(2, s.batch // self.size)

        def step(n: int) -> None:
            tokens = torch.zeros(n, s.length, dtype=torch.long, device=self.device)
            with self._autocast():
                self.loss(model(tokens), tokens).backward()
            model.zero_grad()

        return balance.profile(step, (1, most))

    def _layer_cuts(self, pipeline: Any) -> list[tuple[int, int]]:
        model, s = self._decoder(), self.settings
        example = torch.zeros(1, s.length, self.config.width, device=self.device, requires_grad=True)
        return balance.split_layers(
            balance.profile_layers(model.layers, example.to(model.head.weight.dtype), group=pipeline)
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def _autocast(self) -> Any:
        s = self.settings
        sharded = s.parallel in ("fsdp1", "fsdp2", "hsdp") or (s.parallel == "tp" and s.replicas > 1)
        half = s.dtype == "bf16" and not sharded
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the next byte."""
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step on the whole batch [batch, length + 1]; returns the mean loss, equal on every rank."""
        mine = self.share.take(tokens).to(self.device)
        inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        if self.settings.parallel == "cp":
            inputs, targets = (each.chunk(self.size, 1)[self.rank].contiguous() for each in (inputs, targets))
        self.optimizer.zero_grad()
        with self._autocast():
            if self.schedule is not None:
                loss = self._pipelined(inputs, targets)
            else:
                loss = self.loss(self.model(inputs), targets) * self.share.weight
        if self.schedule is None:
            loss.backward()
        self.optimizer.step()
        return self._mean(loss.detach().clone())

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        if self.schedule is not None:
            if self.replicas_group is not None and self.last:
                dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=self.replicas_group)
            dist.broadcast(loss, self.knows)
        elif len(self.share.counts) > 1 or self.settings.parallel == "cp":
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss

    def _pipelined(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=targets, losses=losses)
        else:
            self.schedule.step(*arguments)
        if self.replicas_group is not None and isinstance(self.model, nn.ModuleList):
            # DDP miscounts if several stages of a rank alternate.
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            works = [dist.all_reduce(g, dist.ReduceOp.AVG, self.replicas_group, async_op=True) for g in gradients]
            for work in works:
                work.wait()
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)

    # --- figures ------------------------------------------------------------------------------------------------------

    def parameters(self) -> int:
        """Parameters of the whole model."""
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(self.config).parameters())

    def flops(self) -> float:
        """Floating-point operations of a step on all ranks, forward and backward."""
        c, s = self.config, self.settings
        attention = 6 * c.layers * c.heads * (c.width // c.heads) * s.length  # causal: half of all pairs
        return float(6 * self.parameters() + attention) * s.batch * s.length

    def communication(self) -> float:
        """Seconds in which this rank's groups had calls in progress, if the backend is ucch."""
        return sum(group.communicator.stats()["seconds"] for group in ucc_hetero.torch.groups())

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Contents of a checkpoint, for torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        inner = getattr(self.optimizer, "optim", self.optimizer)
        return {
            self._own("model"): get_model_state_dict(self.model),
            self._own("optimizer", zero=True): get_optimizer_state_dict(self.model, inner),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the job from a state that was read."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        inner = getattr(self.optimizer, "optim", self.optimizer)
        set_model_state_dict(self.model, state[self._own("model")])
        set_optimizer_state_dict(self.model, inner, state[self._own("optimizer", zero=True)])

    def _own(self, name: str, *, zero: bool = False) -> str:
        """Return a unique name for an entry that only some ranks have, and that torch does not know to be part of a
        whole."""
        if self.settings.parallel == "pp":
            return f"{name} of stage {self.rank // self.settings.replicas}"
        return f"{name} of rank {self.rank}" if zero and self.settings.parallel == "zero" else name


def batches(text: torch.Tensor, settings: Settings, draw: torch.Generator) -> torch.Tensor:
    """The next batch [batch, length + 1] of token numbers, the same for any number of ranks."""
    length = settings.length
    starts: Sequence[int] = torch.randint(0, len(text) - length - 1, (settings.batch,), generator=draw).tolist()
    return torch.stack([text[start : start + length + 1] for start in starts]).long()
