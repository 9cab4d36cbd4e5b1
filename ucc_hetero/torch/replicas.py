"""Data-parallel replicas on different vendors: looking for those that have drifted, and making all equal again.

All ranks of an all-reduce get the same bits, but each then runs its own vendor's optimizer kernels, and these differ in
the last bits: replicas drift. Sharding (FSDP, ZeRO) has one owner for each parameter and no drift; for DDP there is
:class:`Replicas`, which compares checksums now and then, and copies one rank's parameters where that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import log

#: Elements that are summed up at once: 64-bit copies of them are made.
_PIECE = 1 << 22
#: Bytes of an element -> the integer type in which its bits are read; the sums have room above it.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class DriftError(RuntimeError):
    """Replicas differ, and were not to."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One comparison: an entry of :attr:`Replicas.history`.

    Args:
        step: Step after which it was made.
        checksums: Every rank's.
        distance: Largest difference from the root's parameters, relative to the largest parameter; 0 where all
            checksums are equal.
    """

    step: int
    checksums: tuple[int, ...]
    distance: float

    @property
    def equal(self) -> bool:
        """True if all replicas are the same, to the last bit."""
        return len(set(self.checksums)) == 1


def _local(tensors: Iterable[Any]) -> Iterator[Any]:
    for tensor in tensors:
        yield (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def checksum(tensors: Iterable[Any]) -> int:
    """A number that tells the bits of tensors apart, order and signs of zeros included.

    Computed on the tensors' device, in integers, so that every vendor comes to the same number; one number goes to the
    host. Two sums modulo 2^64, one of them weighted by place, as in Fletcher's checksum.

    Args:
        tensors: Tensors; of sharded ones the local part counts.

    Returns:
        The number.
    """
    total = 0
    for tensor in _local(tensors):
        if not tensor.numel():
            continue
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1)
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
        tensors: As many, of the same shapes, on every rank.
        root: Rank of the group.
        group: Process group; torch's default group if None.

    Returns:
        The difference, relative to the root's largest element.
    """
    worst = largest = 0.0
    for tensor in _local(tensors):
        if tensor.numel():
            reference = tensor.clone()
            dist.broadcast(reference, group=group, group_src=root)
            wide = torch.float64 if tensor.device.type != "mps" else torch.float32
            worst = max(worst, float((tensor.to(wide) - reference.to(wide)).abs().max()))
            largest = max(largest, float(reference.to(wide).abs().max()))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, worst, group=group)
    return float(max(everyone)) / (largest or 1.0)


def synchronise(tensors: Iterable[Any], root: int = 0, group: Any = None) -> None:
    """Give every rank the root's tensors. Collective.

    Args:
        tensors: As many, of the same shapes, on every rank; written to.
        root: Rank of the group.
        group: Process group; torch's default group if None.
    """
    works = [dist.broadcast(t, group=group, group_src=root, async_op=True) for t in _local(tensors) if t.numel()]
    for work in works:
        work.wait()


class Replicas:
    """Compares the replicas of a model every so many steps.

    Args:
        model: Its parameters and buffers are compared, equal in shape on every rank of the group.
        optimizer: Its state is synchronised with them; None for none.
        every: Steps between comparisons.
        policy: What is done where replicas differ: ``"report"`` logs a warning the first time, ``"broadcast"`` gives
            every rank the root's parameters, buffers and optimizer state, ``"raise"`` raises :class:`DriftError` on
            every rank.
        root: Rank of the group.
        group: Process group; torch's default group if None.

    Raises:
        ValueError: ``every`` or ``policy`` is none.
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
        #: Results of the comparisons, in order.
        self.history: list[Drift] = []

    def step(self) -> Drift | None:
        """Count a step, and compare when it is time; to be called after every optimizer step, on every rank.

        Returns:
            What was found; None where it was not time to look.

        Raises:
            DriftError: As :meth:`compare`.
        """
        self._step += 1
        return None if self._step % self._every else self.compare()

    def compare(self) -> Drift:
        """Compare now, and do what the policy says. Collective.

        Returns:
            What was found.

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
            for _, value in sorted(state.items()):
                # Counts of steps, on the host, are equal anyhow.
                if isinstance(value, torch.Tensor) and value.device == parameter.device and value.dim():
                    yield value
