"""Tensors as the engine takes them, contiguous and of a known type, and the copies of results back into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ..types import DTYPES, OPS, Op

#: Work that is left once the call's data is there, such as copies out of a flat tensor; None for nothing.
Finish: TypeAlias = Callable[[], object] | None

#: Bytes from which numpy asks for huge pages.
_LONG = 4 << 20
#: Element types that the engine knows; tensors of other types are moved as bytes.
_KNOWN = frozenset(getattr(torch, name) for name in DTYPES)
#: Those that numpy has, too.
NUMPY_TYPES = frozenset(getattr(torch, name) for name in DTYPES if hasattr(np, name))


_detached, _flat = methodcaller("detach"), methodcaller("reshape", -1)


def waited(tensor: Any) -> Any:
    """The result that an ``AsyncCollectiveTensor`` waits for; any other tensor as it is.

    Functional collectives return such tensors. torch's dispatcher replaces them, but not in lists of lists.
    """
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def is_plain(*tensors: Any) -> bool:
    """True if the engine can use the tensors' own memory."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.dtype not in _KNOWN or not tensor.is_contiguous():
            return False
        if tensor.is_neg() or tensor.is_conj():
            return False
    return True


def dense(tensor: Any) -> Any:
    """``tensor`` without its gradient; ``TypeError`` if its elements are not all that it consists of."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} has no single block of memory; pass .to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"the scale of a tensor of {tensor.dtype} would not be sent with it; pass .int_repr()")
    return tensor.detach()


def _bytes(tensor: Any) -> Any:
    """A contiguous tensor of a type that the engine does not know, as bytes."""
    if tensor.dtype in _KNOWN:
        return tensor
    # reshape(-1) would keep a stride other than 1 of a single element
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def elements_of(tensor: Any) -> int:
    """Number of engine elements per element of this tensor."""
    return 1 if tensor.dtype in _KNOWN else int(tensor.element_size())


def to_send(tensor: Any) -> Any:
    """The tensor to send: ``tensor`` itself, or a contiguous copy."""
    if is_plain(tensor):
        return tensor
    return _bytes(dense(tensor).resolve_conj().resolve_neg().contiguous())


def copy_back(fresh: Any, tensor: Any) -> Finish:
    """Function that copies ``fresh`` into ``tensor``; None if they share their elements."""
    return None if fresh is tensor else partial(_writable(tensor).copy_, fresh)


def _writable(tensor: Any) -> Any:
    """``tensor`` without its gradient, to copy a result into."""
    tensor = dense(tensor)
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("elements of an expanded tensor share their memory, which has no room for results; clone() it")
    return tensor


def to_receive(tensor: Any) -> tuple[Any, Finish]:
    """(tensor to receive into, function that copies it into ``tensor`` or None)."""
    if is_plain(tensor):
        return tensor, None
    tensor = dense(tensor)
    if tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return _bytes(tensor), None  # only the type is unknown: receive into its bytes
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _bytes(fresh), copy_back(fresh, tensor)


def _adjacent(tensors: Sequence[Any]) -> Any:
    """One flat tensor over several that are adjacent in memory; None if they are not."""
    if not is_plain(*tensors):
        return None
    first, total = tensors[0], 0
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.dtype is not first.dtype or tensor.data_ptr() != end or not tensor.numel():
            return None
        end += tensor.nbytes
        total += tensor.numel()
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return torch.as_strided(first.detach(), (total,), (1,), first.storage_offset())


def _joined(tensors: Sequence[Any], form: Callable[[Any], Any]) -> Any:
    """One flat tensor with the elements of all ``tensors``; ``form`` makes one dense."""
    together = _adjacent(tensors)
    if together is not None:
        return together
    parts = [*map(_flat, map(_detached, tensors if is_plain(*tensors) else map(form, tensors)))]
    return torch.cat(parts, out=_room(sum(map(len, parts)), parts[0])) if len(parts) > 1 else parts[0]


def _room(count: int, like: Any) -> Any:
    """Memory for elements like those of a tensor. On the host it is numpy's if it is long: numpy asks for huge pages,
    and small ones cost several times as much as the copies."""
    nbytes = count * like.element_size()
    if like.is_cpu and nbytes >= _LONG:
        return torch.from_numpy(np.empty(nbytes, np.uint8)).view(like.dtype)
    return torch.empty(count, dtype=like.dtype, device=like.device)


def to_send_all(tensors: Sequence[Any]) -> Any:
    """One flat tensor with the elements of all ``tensors``, to send."""
    return _joined(tensors, to_send)


def to_reduce_all(tensors: Sequence[Any]) -> Any:
    """One flat tensor with the elements of all ``tensors``, to reduce."""
    return _joined(tensors, dense)


def to_receive_all(tensors: Sequence[Any]) -> tuple[Any, Finish]:
    """(one flat tensor to receive into, function that copies its elements into ``tensors`` or None)."""
    together = _adjacent(tensors)
    if together is not None:
        return together, None
    places = [*map(_detached if is_plain(*tensors) else _writable, tensors)]
    counts = [*map(torch.Tensor.numel, tensors)]
    flat = _room(sum(counts), tensors[0])

    def finish() -> None:
        for place, part in zip(places, flat.split(counts), strict=True):
            place.copy_(part.view(place.shape))

    return _bytes(flat), finish


def overlap(one: Any, other: Any) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    its, others = one.nbytes, other.nbytes
    return bool(its and others and a < b + others and b < a + its)


def without_overlap(send: Any, target: Any, own: int = -1) -> Any:
    """A contiguous tensor to send: a copy if it shares memory with ``target``, except in place, which is where
    ``target`` has its ``own``-th element."""
    in_place = own >= 0 and send.data_ptr() == target.data_ptr() + own * target.element_size()
    return send.clone() if not in_place and overlap(send, target) else send


_KINDS: Any = dist.ReduceOp.RedOpType
_NAMES = {"PRODUCT": "PROD"} | {name: name for name in ("SUM", "AVG", "MIN", "MAX", "BAND", "BOR", "BXOR")}
#: Number of a kind, to which ``ReduceOp`` and its kinds hash -> its operation.
OPERATIONS: dict[int, Op] = {int(getattr(_KINDS, name)): OPS[ours] for name, ours in _NAMES.items()}

#: Narrow types that no library reduces -> the type in which they are reduced; the result is rounded once.
_WIDER = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
}


class TorchReduction(NamedTuple):
    """A reduction: the engine's operation, and the factor of PREMUL_SUM or None."""

    op: Op
    factor: Any = None

    def operand(self, tensor: Any) -> Any:
        """The tensor to reduce: ``tensor`` itself, or a contiguous copy in the type of the computation."""
        wider = _WIDER.get(tensor.dtype)
        if wider is None and self.factor is None and is_plain(tensor):
            return tensor
        tensor = dense(tensor).resolve_conj().resolve_neg()
        if wider is not None:
            tensor = tensor.to(wider)
        if self.factor is not None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(f"PREMUL_SUM needs a floating-point tensor, not {tensor.dtype}")
            tensor = (tensor * self.factor).to(tensor.dtype)
        return tensor.contiguous()

    def to_receive(self, tensor: Any) -> tuple[Any, Finish]:
        """(tensor to receive a result into, function that copies it into ``tensor`` or None)."""
        wider = _WIDER.get(tensor.dtype)
        if wider is None and is_plain(tensor):
            return tensor, None
        fresh = torch.empty(tensor.shape, dtype=wider or tensor.dtype, device=tensor.device)
        return fresh, copy_back(fresh, tensor)


def torch_reduction(op: Any) -> TorchReduction:
    """The reduction for a ``ReduceOp``, or for one of its kinds."""
    if type(op) not in (dist.ReduceOp, _KINDS):
        raise ValueError(f"{op!r} is not a reduce operation of torch.distributed")
    known = OPERATIONS.get(hash(op))
    if known is not None:
        return TorchReduction(known)
    if op == _KINDS.PREMUL_SUM and hasattr(op, "op"):
        return TorchReduction(OPS["SUM"], op.__getstate__()[1])  # not every version of torch has op.factor
    raise ValueError(f"reduce operation {op} is not one of PREMUL_SUM, {', '.join(_NAMES)}")
