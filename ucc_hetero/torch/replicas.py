"""Data-parallel replicas on different vendors: detect replicas that have drifted apart, and make them equal again.

An all-reduce gives all ranks the same bits, but then each vendor's optimizer kernels round differently, and replicas
drift apart. With sharding (FSDP, ZeRO) each parameter has one owner, so there is no drift. For DDP :class:`Replicas`
compares checksums from time to time, and copies one rank's parameters to the others if the policy asks for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import log

#: Elements that are summed at a time: each needs a 64-bit copy.
_PIECE = 1 << 22
#: Bytes per element -> integer type for its bits. The sums are wider than this type.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class DriftError(RuntimeError):
    """Replicas differ, and the policy of :class:`Replicas` is ``"raise"``."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Result of one comparison: an entry of :attr:`Replicas.history`.

    Args:
        step: Number of the optimizer step before the comparison.
        checksums: Checksums of all ranks, in rank order.
        distance: Largest difference from the root's parameters, relative to the largest parameter; NaN if a
            parameter is; 0 if all checksums are equal.
    """

    step: int
    checksums: tuple[int, ...]
    distance: float

    @property
    def equal(self) -> bool:
        """True if all replicas have the same bits."""
        return len(set(self.checksums)) == 1


def _local(tensors: Iterable[Any]) -> Iterator[Any]:
    """The local parts, of complex tensors as pairs of real numbers."""
    for tensor in tensors:
        part = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
        yield torch.view_as_real(part) if part.is_complex() else part


def _largest(values: list[float]) -> float:
    """The largest value, NaN if one of them is."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64, device="cpu").max())


def checksum(tensors: Iterable[Any]) -> int:
    """Compute a checksum of the bits of tensors; order and signs of zeros count.

    Computed on the device in integers, so that all vendors get the same number; only that number is copied to the host.
    Two sums modulo 2^64, one of them weighted by position, as in Fletcher's checksum.

    Args:
        tensors: Tensors; of sharded ones (DTensor) the local part.

    Returns:
        The checksum.
    """
    total = 0
    for tensor in _local(tensors):
        if not tensor.numel():
            continue
        flat = tensor.contiguous().reshape(-1)
        bits = flat.view(_BITS[flat.element_size()])
        sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for start in range(0, len(bits), _PIECE):
            piece = bits[start : start + _PIECE].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(piece), dtype=torch.int64, device=tensor.device)
            sums += torch.stack([piece.sum(), (piece * places).sum()])
        plain, weighted = sums.tolist()
        total = (total * 1000003 + plain * 31 + weighted) % ((1 << 61) - 1)
    return total


def distance(tensors: Iterable[Any], root: int = 0, group: Any = None) -> float:
    """Find the largest difference of any rank's tensors from the root's. Collective.

    Args:
        tensors: The same number and shapes on every rank.
        root: Rank of the group.
        group: Process group; torch's default group if None.

    Returns:
        The difference, relative to the absolute value of the root's largest element; NaN if an element is.
    """
    apart, sizes = [], []
    for tensor in _local(tensors):
        if tensor.numel():
            reference = tensor.clone()
            dist.broadcast(reference, group=group, group_src=root)
            apart.append(float((tensor.double() - reference.double()).abs().max()))
            sizes.append(float(reference.double().abs().max()))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, _largest(apart), group=group)
    return _largest(everyone) / (_largest(sizes) or 1.0)


def synchronise(tensors: Iterable[Any], root: int = 0, group: Any = None) -> None:
    """Copy the root's tensors to all ranks. Collective.

    Args:
        tensors: The same number and shapes on every rank; overwritten on all ranks but the root.
        root: Rank of the group.
        group: Process group; torch's default group if None.
    """
    works = [dist.broadcast(t, group=group, group_src=root, async_op=True) for t in _local(tensors) if t.numel()]
    for work in works:
        work.wait()


class Replicas:
    """Compares the replicas of a model every few steps.

    Args:
        model: Model whose parameters and buffers are compared; equal in shape on all ranks of the group.
        optimizer: Optimizer whose state the policy ``"broadcast"`` copies too, or None.
        every: Steps between comparisons.
        policy: Action if replicas differ: ``"report"`` logs a warning the first time, ``"broadcast"`` copies the
            root's parameters, buffers and optimizer state to all ranks, ``"raise"`` raises :class:`DriftError` on
            all ranks.
        root: Rank of the group.
        group: Process group; torch's default group if None.

    Raises:
        ValueError: ``every`` is below 1, or ``policy`` is unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        every: int = 100,
        policy: Literal["report", "broadcast", "raise"] = "broadcast",
        root: int = 0,
        group: Any = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be 1 or more, not {every}")
        if policy not in ("report", "broadcast", "raise"):
            raise ValueError(f"policy must be report, broadcast or raise, not {policy!r}")
        self._model, self._optimizer, self._every, self._policy = model, optimizer, every, policy
        self._root, self._group, self._step, self._warned = root, group, 0, False
        #: Results of all comparisons, in order.
        self.history: list[Drift] = []

    def step(self) -> Drift | None:
        """Count a step, and compare every ``every`` steps. Call it after each optimizer step, on every rank.

        Returns:
            The result of the comparison; None if this step had none.

        Raises:
            DriftError: See :meth:`compare`.
        """
        self._step += 1
        return None if self._step % self._every else self.compare()

    def compare(self) -> Drift:
        """Compare now, and act by the policy. Collective.

        Returns:
            The result of the comparison.

        Raises:
            DriftError: Replicas differ, and the policy is ``"raise"``.
        """
        sums: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(sums, checksum(self._weights()), group=self._group)
        apart = len(set(sums)) > 1
        found = Drift(self._step, tuple(sums), distance(self._weights(), self._root, self._group) if apart else 0.0)
        self.history.append(found)
        if apart:
            self._act(found)
        return found

    def _act(self, found: Drift) -> None:
        text = (
            f"step {found.step}: there are {len(set(found.checksums))} versions of the replicas, which differ by up to "
            f"{found.distance:.1e} of the largest parameter"
        )
        if self._policy == "raise":
            raise DriftError(f"{text}; shard the parameters (FSDP, ZeRO), or let Replicas broadcast them")
        if self._policy == "broadcast":
            synchronise(self._weights(), self._root, self._group)
            synchronise(self._state(), self._root, self._group)
        elif not self._warned:
            self._warned = True
            log.log("torch").warning("%s", text)

    def _weights(self) -> Iterator[Any]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _state(self) -> Iterator[Any]:
        if self._optimizer is None:
            return
        for parameter in (p for each in self._optimizer.param_groups for p in each["params"]):
            state = self._optimizer.state.get(parameter, {})
            for value in (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)):
                # Step counts are equal on all ranks: host tensors, or without dimensions.
                if value.device == parameter.device and (value.dim() or not parameter.dim()):
                    yield value
