"""torch's reduce operations as operations of the engine, and the types in which they are computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..types import OPS, Op
from .layout import Finish, copy_back, is_plain

_KINDS: Any = dist.ReduceOp.RedOpType
_OPS: dict[Any, Op] = {
    _KINDS.SUM: OPS["SUM"],
    _KINDS.AVG: OPS["AVG"],
    _KINDS.PRODUCT: OPS["PROD"],
    _KINDS.MIN: OPS["MIN"],
    _KINDS.MAX: OPS["MAX"],
    _KINDS.BAND: OPS["BAND"],
    _KINDS.BOR: OPS["BOR"],
    _KINDS.BXOR: OPS["BXOR"],
    _KINDS.PREMUL_SUM: OPS["SUM"],
}

#: Types too small to add up in, which no library reduces: computed in the wider one and rounded once.
_WIDER = {
    getattr(torch, name): wide
    for names, wide in (
        (("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), torch.float32),
        (("complex32",), torch.complex64),
    )
    for name in names
    if hasattr(torch, name)
}


class TorchReduction(NamedTuple):
    """One reduction: our operation, and the factor of PREMUL_SUM or None."""

    op: Op
    factor: Any = None

    def operand(self, tensor: Any) -> Any:
        """The tensor to reduce for ``tensor``: itself, or a contiguous copy in the type that is computed in."""
        wider = _WIDER.get(tensor.dtype)
        if wider is None and self.factor is None and is_plain(tensor):
            return tensor
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if wider is not None:
            tensor = tensor.to(wider)
        if self.factor is not None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(f"PREMUL_SUM needs a floating-point tensor, not {tensor.dtype}")
            tensor = (tensor * self.factor).to(tensor.dtype)
        return tensor.contiguous()

    def to_receive(self, tensor: Any) -> tuple[Any, Finish]:
        """(the tensor to receive a result for ``tensor`` into, what copies it there)."""
        wider = _WIDER.get(tensor.dtype)
        if wider is None and is_plain(tensor):
            return tensor, None
        fresh = torch.empty(tensor.shape, dtype=wider or tensor.dtype, device=tensor.device)
        return fresh, copy_back(fresh, tensor)


_NUMBERED = frozenset({dist.ReduceOp, _KINDS})
_PREMUL = int(_KINDS.PREMUL_SUM)
#: Number of a kind -> its reduction. Both ``ReduceOp`` and its kinds hash to that number, and look-ups by it are quick.
_PLAIN = {int(kind): TorchReduction(op) for kind, op in _OPS.items() if kind != _KINDS.PREMUL_SUM}


def torch_reduction(op: Any) -> TorchReduction:
    """The reduction that a ``ReduceOp``, or one of its kinds, asks for."""
    if type(op) not in _NUMBERED:
        raise ValueError(f"{op!r} is not a reduce operation of torch.distributed")
    number = hash(op)
    known = _PLAIN.get(number)
    if known is not None:
        return known
    if number == _PREMUL and hasattr(op, "op"):
        # Older versions of torch show the factor only to pickle.
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        return TorchReduction(OPS["SUM"], factor)
    raise ValueError(f"reduce operation {op} is not one of {', '.join(str(k).rpartition('.')[2] for k in _OPS)}")
