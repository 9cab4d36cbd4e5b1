"""The collective and message methods of a process group, under the names of torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..calls.arguments import CallSpec
from .dispatch import Dispatch, KeyedCall
from .layout import (
    Finish,
    TorchReduction,
    copy_back,
    elements_of,
    to_receive,
    to_receive_all,
    to_reduce_all,
    to_send,
    to_send_all,
    torch_reduction,
    waited,
    without_overlap,
)
from .not_compiled import not_compiled
from .operators import PLAIN, modes, seen, through_operator
from .streams import started
from .work import Work

#: A flat tensor, and the number of its elements that belong to each rank.
_Shares: TypeAlias = tuple[Any, list[int]]
_M = TypeVar("_M", bound=Callable[..., Any])

_SUM = dist.ReduceOp.RedOpType.SUM
#: What torch's options call an argument of a short form (``group.reduce(tensor, root, op, timeout)``), by its type and
#: by its name.
_BY_TYPE: dict[type, str] = {
    dist.ReduceOp: "reduceOp", type(_SUM): "reduceOp", int: "rootRank", timedelta: "timeout",
}  # fmt: skip
_BY_NAME = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
#: Bytes of the pieces of a long scatter on host memory: the pages of new memory for all of it would take the root ten
#: times as long as a copy does in memory that was used before.
_PIECE = 8 << 20
#: Types of split sizes that are not given: None, or an empty list. numpy's arrays, e.g., have no truth value.
_LEFT_OUT = frozenset({list, type(None)})


def _one(tensors: Any, method: str) -> Any:
    """The single tensor of a list: old versions of torch allowed several devices per process."""
    if not isinstance(tensors, torch.Tensor):
        if len(tensors) != 1:
            raise ValueError(f"{method} takes a list of one tensor, got {len(tensors)}")
        tensors = tensors[0]
    return tensors


def _options(kind: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Options of a call, of this type of torch's, or None: ``given`` are options or arguments of torch's short form."""
    first = given[0] if given else None
    if not named and len(given) < 2 and type(first) not in _BY_TYPE:
        return first
    if wrong := named.keys() - _BY_NAME.keys():
        raise TypeError(f"unexpected argument {min(wrong)!r}; known are opts, {', '.join(_BY_NAME)}")
    opts = kind()
    for each in given:
        if each is not None:
            setattr(opts, _BY_TYPE.get(type(each), "rootRank"), each)
    for name, each in named.items():
        if each is not None:
            setattr(opts, _BY_NAME[name], each)
    return opts


def _takes(kind: Any, tensors: int) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a method whose first arguments are ``tensors`` and whose last one is torch's options of this type: it
    takes torch's short form, too. A ``key`` is passed on."""

    def decorated(method: Callable[..., Work]) -> Callable[..., Work]:
        @wraps(method)
        def made(self: Any, *args: Any, opts: Any = None, **named: Any) -> Work:
            given = args[tensors:] if opts is None else (opts, *args[tensors:])
            more = {"key": named.pop("key")} if "key" in named else {}
            return method(self, *args[:tensors], _options(kind, given, named), **more)

        return made

    return decorated


def _list(tensors: Any) -> Any:
    """The first of a list of lists: old versions of torch had one list for each device of the process."""
    one = tensors if not tensors or isinstance(tensors[0], torch.Tensor) else tensors[0]
    return list(one) if PLAIN.issuperset(map(type, one)) else [waited(each) for each in one]


def _reduction(opts: Any) -> TorchReduction:
    """The reduction that a call's options name; sum by default."""
    return torch_reduction(_SUM if opts is None else opts.reduceOp)


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _in_place(kind: str, what: Hashable, tensors: Sequence[Any], *, sends: bool = False) -> list[KeyedCall]:
    """Calls that work in these tensors, for :meth:`.Dispatch._repeat`. ``sends``: this rank receives nothing."""
    calls: list[KeyedCall] = []
    for tensor in tensors:
        key = kind, what, tensor.dtype, tensor.numel(), tensor.device
        calls.append((key, tensor, None) if sends else (key, None, tensor))
    return calls


def _splits(given: Any, size: int, rows: int, what: str) -> list[int] | None:
    """Split sizes as a list; None for equal sizes. torch passes on whatever its caller gave it."""
    splits = [] if given is None else [int(n) for n in given]
    if not splits:
        if rows % size:
            raise ValueError(f"{what} has {rows} rows, not a multiple of the {size} ranks; give split sizes")
        return None
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"split sizes {splits} of {what} must be {size} numbers of 0 or more that add up to {rows}")
    return splits


def _refusing(method: _M) -> _M:
    """Decorate a collective: if arguments are wrong, the other ranks get a ``RefusedError`` instead of a hang."""

    @wraps(method)
    def made(self: Any, *args: Any, **more: Any) -> Any:
        before = self._posted
        try:
            return method(self, *args, **more)
        except (TypeError, ValueError, RuntimeError) as mistake:
            if self._posted == before and not isinstance(mistake, dist.DistBackendError):
                self.refuse(mistake, args)
            raise

    return cast(_M, made)


@not_compiled
class Collectives(Dispatch):
    """The collective methods of the group. ``opts`` are torch's options of the call, or arguments of its short form."""

    # --- all ranks alike ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Reduce over all ranks, in place."""
        if more or named or type(opts) in _BY_TYPE:
            opts = _options(c10d.AllreduceOptions, (opts, *more), named)
        if type(tensors) is not list or len(tensors) != 1:
            return self._allreduce_one(tensors, opts, key=None)
        calls = _in_place("allreduce", getattr(opts, "reduceOp", opts), tensors)
        return self._repeat(calls, opts) or self._allreduce_one(tensors, opts, key=calls[0][0])

    @_refusing
    @through_operator("allreduce_")
    def _allreduce_one(self, tensors: Any, opts: Any, *, key: Hashable) -> Work:
        tensor = _one(tensors, "allreduce")
        how = _reduction(opts)
        if tensor.is_sparse:
            return self._sum_sparse(tensor, how)
        if not tensor.numel():
            return Work(self, [tensor])
        operand = how.operand(tensor)
        if operand is not tensor:  # e.g. the tensor times the factor of PREMUL_SUM
            key = None
        finish = copy_back(operand, tensor)
        return self._post(CallSpec("allreduce", None, operand, how.op), opts, [tensor], finish, key=key)

    def _sum_sparse(self, tensor: Any, how: TorchReduction) -> Work:
        """Sum a sparse COO tensor in place, before this returns. Each rank gathers the non-zero elements of all."""
        if how.op.name != "SUM" or how.factor is not None:
            raise ValueError(f"all_reduce of sparse tensors supports SUM only, not {how.op}")
        mine = tensor.detach().coalesce()
        counts = torch.empty(self.size(), dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([mine._nnz()])).wait()
        indices = self._gathered_rows(mine.indices().t(), counts.tolist())
        values = self._gathered_rows(mine.values(), counts.tolist())
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device).coalesce()
        with torch.no_grad():  # detach() of a sparse tensor would copy its elements
            tensor.copy_(total)
        return Work(self, [tensor])

    def _gathered_rows(self, rows: Any, counts: list[int]) -> Any:
        parts = [rows.new_empty((n, *rows.shape[1:])) for n in counts]
        self.allgather([parts], [rows.contiguous()]).wait()
        return torch.cat(parts)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        calls = _in_place("allreduce", getattr(opts, "reduceOp", opts), tensors)
        return self._together(calls, opts, self._allreduce_each, tensors)

    @through_operator("allreduce_coalesced_")
    def _allreduce_each(self, tensors: Sequence[Any], opts: Any) -> Work:
        calls = (self.allreduce([tensor], opts) for tensor in tensors)
        return self._combined(calls, "allreduce_coalesced_", tensors)

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Send the root's tensor to all ranks."""
        if more or named or type(opts) in _BY_TYPE:
            opts = _options(c10d.BroadcastOptions, (opts, *more), named)
        root = _root(opts)
        if type(tensors) is not list or len(tensors) != 1:
            return self._broadcast_one(tensors, opts, root=root, key=None)
        calls = _in_place("broadcast", root, tensors)
        return self._repeat(calls, opts) or self._broadcast_one(tensors, opts, root=root, key=calls[0][0])

    @_refusing
    @through_operator("broadcast_")
    def _broadcast_one(self, tensors: Any, opts: Any, *, root: int, key: Hashable) -> Work:
        tensor = _one(tensors, "broadcast")
        if not tensor.numel():
            return Work(self, [tensor])
        target, finish = (to_send(tensor), None) if self.rank() == root else to_receive(tensor)
        call = CallSpec("bcast", None, target, None, root)
        return self._post(call, opts, [tensor], finish, key=key if target is tensor else None)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Reduce to the root, in place there."""
        if more or named or type(opts) in _BY_TYPE:
            opts = _options(c10d.ReduceOptions, (opts, *more), named)
        root = _root(opts)
        if type(tensors) is not list or len(tensors) != 1:
            return self._reduce_one(tensors, opts, root=root, key=None)
        calls = _in_place("reduce", (root, getattr(opts, "reduceOp", opts)), tensors, sends=root != self._place[0])
        return self._repeat(calls, opts) or self._reduce_one(tensors, opts, root=root, key=calls[0][0])

    @_refusing
    @through_operator("reduce_")
    def _reduce_one(self, tensors: Any, opts: Any, *, root: int, key: Hashable) -> Work:
        tensor = _one(tensors, "reduce")
        if not tensor.numel():
            return Work(self, [tensor])
        how = _reduction(opts)
        operand = how.operand(tensor)
        key = key if operand is tensor else None
        if self.rank() != root:
            return self._post(CallSpec("reduce", operand, None, how.op, root), opts, [tensor], key=key)
        call, finish = CallSpec("reduce", None, operand, how.op, root), copy_back(operand, tensor)
        return self._post(call, opts, [tensor], finish, key=key)

    @_takes(c10d.BarrierOptions, 0)
    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called it. By then earlier collectives of the group are complete, and so is what
        was queued in the caller's current stream."""
        device = getattr(opts, "device", None)
        for kind, module in started():  # opts need not name a device
            module.current_stream(device if device is not None and device.type == kind else None).synchronize()
        earlier = [work for work in list(self.in_flight) if isinstance(work, Work) and work.collective]
        own = self._post(CallSpec("barrier", None, None), opts, [])
        return self._combined([*earlier, own])

    # --- gathering ----------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Gather the ranks' tensors, in rank order, in one tensor."""
        calls = self._pairs("allgather", None, (output,), (input,))
        return self._repeat(calls, opts) or self._gather_one(output, input, opts, key=calls[0][0])

    def _pairs(self, kind: str, what: Hashable, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[KeyedCall]:
        """Calls from inputs to outputs for :meth:`_repeat`. In place an allgather's input is its rank's part of the
        output; calls with other memory in common have no key, nor have those of tensors without memory of their own."""
        calls: list[KeyedCall] = []
        hidden = modes()
        for output, input in zip(outputs, inputs, strict=True):
            key, send = None, input
            if not (hidden or (not (type(output) in PLAIN and type(input) in PLAIN) and seen(output, input))):
                try:
                    at = input.data_ptr() - output.data_ptr()
                except RuntimeError:
                    calls.append((None, input, output))
                    continue
                inside = kind == "allgather" and at == self._place[0] * input.nbytes
                if inside or not -input.nbytes < at < output.nbytes:
                    key = kind, what, inside, input.dtype, input.numel(), output.dtype, output.numel(), output.device
                    send = None if inside else input
            calls.append((key, send, output))
        return calls

    def _inside(self, input: Any, output: Any) -> bool:
        """True if ``input`` is this rank's part of ``output`` (in place)."""
        at = self._place[0] * input.numel() * input.element_size()
        return bool(input.data_ptr() == output.data_ptr() + at)

    @_refusing
    @through_operator("_allgather_base_", "all_gather_single")
    def _gather_one(self, output: Any, input: Any, opts: Any, *, key: Hashable) -> Work:
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather on rank {self.rank()}: output has {output.numel()} elements of {output.dtype}; it must "
                f"have {self.size()} times input's {input.numel()} of {input.dtype}"
            )
        if not input.numel():
            return Work(self, [output])
        target, finish = to_receive(output)
        return self._gather_into(target, input, opts, [output], finish, "_allgather_base_", key)

    def _gather_into(
        self,
        flat: Any,
        tensor: Any,
        opts: Any,
        outputs: Sequence[Any],
        finish: Finish,
        form: str = "",
        key: Hashable = None,
    ) -> Work:
        send = without_overlap(to_send(tensor), flat, self.rank() * tensor.numel() * elements_of(tensor))
        own = send is tensor and flat is outputs[0]
        call = CallSpec("allgather", None if self._inside(send, flat) else send, flat)
        return self._post(call, opts, outputs, finish, form, tensor, key if own else None)

    @_refusing
    @_takes(c10d.AllgatherOptions, 2)
    @through_operator("allgather_")
    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather every rank's tensor in a list. Sizes may differ: each is that of the list's tensor."""
        tensor, outputs = _one(inputs, "allgather"), _list(output_lists)
        counts = self._per_rank(outputs, "allgather", "output")
        if counts[self.rank()] != tensor.numel() or any(each.dtype != tensor.dtype for each in outputs):
            raise ValueError(
                f"allgather on rank {self.rank()}: input has {tensor.numel()} elements of {tensor.dtype}, but its "
                f"tensor in the output list has {counts[self.rank()]} of {outputs[self.rank()].dtype}"
            )
        if not sum(counts):
            return Work(self, outputs)
        flat, finish = to_receive_all(outputs)
        if min(counts) == max(counts):
            return self._gather_into(flat, tensor, opts, outputs, finish)
        unit = elements_of(tensor)
        send = without_overlap(to_send(tensor), flat, unit * sum(counts[: self.rank()]))
        recv = [flat, [n * unit for n in counts]]
        return self._post(CallSpec("allgatherv", send, recv), opts, outputs, finish, inputs=tensor)

    @through_operator("allgather_coalesced_")
    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Any], opts: Any = None) -> Work:
        """Do several allgathers; ``output_lists[r]`` receives the tensors of rank r."""
        calls = (self.allgather([[ranks[i] for ranks in output_lists]], [each], opts) for i, each in enumerate(inputs))
        return self._combined(calls, "allgather_coalesced_", inputs)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        calls = self._pairs("allgather", None, outputs, inputs)
        return self._together(calls, opts, self._gather_each, outputs, inputs)

    @through_operator("allgather_into_tensor_coalesced_", "all_gather_single_coalesced")
    def _gather_each(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Work:
        calls = (self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True))
        return self._combined(calls, "allgather_into_tensor_coalesced_", inputs)

    @_refusing
    @_takes(c10d.GatherOptions, 2)
    @through_operator("gather_")
    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather equal tensors at the root."""
        tensor, root = _one(inputs, "gather"), _root(opts)
        if not tensor.numel():
            return Work(self, [])
        if self.rank() != root:
            return self._post(CallSpec("gather", to_send(tensor), None, None, root), opts, [], inputs=tensor)
        outputs = _list(output_lists)
        counts = self._per_rank(outputs, "gather", "output")
        if any(n != tensor.numel() for n in counts) or any(each.dtype != tensor.dtype for each in outputs):
            raise ValueError(
                f"gather on rank {root}: outputs of {counts} elements do not match input's {tensor.numel()}"
            )
        flat, finish = to_receive_all(outputs)
        send = without_overlap(to_send(tensor), flat, root * tensor.numel() * elements_of(tensor))
        return self._post(CallSpec("gather", send, flat, None, root), opts, outputs, finish, inputs=tensor)

    @_refusing
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Gather equal tensors at the root, in rank order, in one tensor."""
        parts = [[*output.view(-1).tensor_split(self.size())]] if self.rank() == _root(opts) else []
        return self.gather(parts, [input], opts)

    # --- scattering ---------------------------------------------------------------------------------------------------

    @_refusing
    @_takes(c10d.ScatterOptions, 2)
    @through_operator("scatter_")
    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        """Send each rank one of the root's equal tensors."""
        tensor, root = _one(outputs, "scatter"), _root(opts)
        if not tensor.numel():
            return Work(self, [tensor])
        target, finish = to_receive(tensor)
        inputs: Sequence[Any] = ()
        if self.rank() == root:
            inputs = _list(input_lists)
            counts = self._per_rank(inputs, "scatter", "input")
            if any(n != tensor.numel() for n in counts):
                raise ValueError(f"scatter on rank {root}: inputs of {counts} elements, output of {tensor.numel()}")
        if not target.is_cpu or self.size() * target.nbytes < 2 * _PIECE:
            return self._scatter_into(target, inputs, root, opts, [tensor], finish)
        step = max(1, _PIECE // self.size() // target.element_size())
        flat, rows = target.view(-1), [to_send(each).reshape(-1) for each in inputs]
        calls = (
            self._scatter_into(flat[at : at + step], [row[at : at + step] for row in rows], root, opts, [])
            for at in range(0, flat.numel(), step)
        )
        return self._combined(calls, "scatter_", inputs, [tensor], finish)

    def _scatter_into(
        self, target: Any, inputs: Sequence[Any], root: int, opts: Any, outputs: Sequence[Any], finish: Finish = None
    ) -> Work:
        send = to_send_all(inputs) if inputs else None
        if send is not None and target.data_ptr() != send.data_ptr() + root * target.nbytes:
            send = without_overlap(send, target)
        return self._post(CallSpec("scatter", send, target, None, root), opts, outputs, finish, inputs=inputs)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Reduce over all ranks, and scatter equal parts: rank r gets part r."""
        calls = self._pairs("reduce_scatter", getattr(opts, "reduceOp", opts), (output,), (input,))
        return self._repeat(calls, opts) or self._reduce_scatter_one(output, input, opts, key=calls[0][0])

    @_refusing
    @through_operator("_reduce_scatter_base_", "reduce_scatter_single")
    def _reduce_scatter_one(self, output: Any, input: Any, opts: Any, *, key: Hashable) -> Work:
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter on rank {self.rank()}: input has {input.numel()} elements of {input.dtype}; it must "
                f"have {self.size()} times output's {output.numel()} of {output.dtype}"
            )
        if not output.numel():
            return Work(self, [output])
        how = _reduction(opts)
        return self._reduce_scatter(output, how.operand(input), how, None, opts, "_reduce_scatter_base_", input, key)

    def _reduce_scatter(
        self,
        output: Any,
        operand: Any,
        how: TorchReduction,
        counts: Any,
        opts: Any,
        form: str,
        inputs: Any,
        key: Hashable = None,
    ) -> Work:
        target, finish = how.to_receive(output)
        operand = without_overlap(operand, target)
        name = "reduce_scatter_block" if counts is None else "reduce_scatter"
        call = CallSpec(name, operand, target, how.op, -1, counts)
        own = operand is inputs and target is output
        return self._post(call, opts, [output], finish, form, inputs, key if own else None)

    @_refusing
    @_takes(c10d.ReduceScatterOptions, 2)
    @through_operator("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors over all ranks; rank r gets tensor r. Sizes may differ."""
        output = _one(outputs, "reduce_scatter")
        inputs = _list(input_lists)
        counts = self._per_rank(inputs, "reduce_scatter", "input")
        if counts[self.rank()] != output.numel():
            raise ValueError(
                f"reduce_scatter on rank {self.rank()}: output has {output.numel()} elements, but its tensor in the "
                f"input list has {counts[self.rank()]}"
            )
        if not sum(counts):
            return Work(self, [output])
        how = _reduction(opts)
        operand = how.operand(to_reduce_all(inputs))
        uneven = None if min(counts) == max(counts) else counts
        return self._reduce_scatter(output, operand, how, uneven, opts, "", inputs)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        calls = self._pairs("reduce_scatter", getattr(opts, "reduceOp", opts), outputs, inputs)
        return self._together(calls, opts, self._reduce_scatter_each, outputs, inputs)

    @through_operator("reduce_scatter_tensor_coalesced_", "reduce_scatter_single_coalesced")
    def _reduce_scatter_each(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Work:
        calls = (self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True))
        return self._combined(calls, "reduce_scatter_tensor_coalesced_", inputs)

    # --- all to all ---------------------------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
        **named: Any,
    ) -> Work:
        """Send rows of the first dimension to every rank; split sizes count rows."""
        key = None
        equal = {type(output_splits), type(input_splits)} <= _LEFT_OUT and not (output_splits or input_splits)
        if equal and not named and type(opts) not in _BY_TYPE:
            calls = self._pairs("alltoall", (output.shape[:1], input.shape[:1]), (output,), (input,))
            if (work := self._repeat(calls, opts)) is not None:
                return work
            key = calls[0][0]
        return self._exchange_rows(output, input, output_splits, input_splits, opts=opts, key=key, **named)

    @_refusing
    @_takes(c10d.AllToAllOptions, 4)
    @through_operator("alltoall_base_", "all_to_all_single")
    def _exchange_rows(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any, *, key: Hashable
    ) -> Work:
        into = _splits(output_splits, self.size(), output.size(0) if output.dim() else 1, "output")
        outof = _splits(input_splits, self.size(), input.size(0) if input.dim() else 1, "input")
        target, finish = to_receive(output)
        send = without_overlap(to_send(input), target)
        if into is None and outof is None:
            if not send.numel() and not target.numel():
                return Work(self, [output])
            own = key if send is input and target is output else None
            return self._post(CallSpec("alltoall", send, target), opts, [output], finish, "alltoall_base_", input, own)
        given, taken = (send, self._scaled(outof, send)), (target, self._scaled(into, target))
        return self._exchange(given, taken, opts, [output], finish, "alltoall_base_", input)

    def _scaled(self, splits: list[int] | None, flat: Any) -> list[int]:
        if splits is None:
            return [flat.numel() // self.size()] * self.size()
        rows = sum(splits)
        return [n * (flat.numel() // rows) for n in splits] if rows else splits

    @_refusing
    @through_operator("alltoall_")
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Send one tensor to every rank; sizes may differ."""
        outputs, inputs = _list(outputs), _list(inputs)
        into = self._per_rank(outputs, "alltoall", "output")
        outof = self._per_rank(inputs, "alltoall", "input")
        flat, finish = to_receive_all(outputs)
        send = without_overlap(to_send_all(inputs), flat)
        unit = elements_of(inputs[0])
        given, taken = (send, [n * unit for n in outof]), (flat, [n * unit for n in into])
        return self._exchange(given, taken, opts, list(outputs), finish, "alltoall_", inputs)

    def _exchange(
        self, given: _Shares, taken: _Shares, opts: Any, outputs: list[Any], finish: Finish, form: str, inputs: Any
    ) -> Work:
        send, recv = ([flat, (counts, list(accumulate(counts, initial=0))[:-1])] for flat, counts in (given, taken))
        return self._post(CallSpec("alltoallv", send, recv), opts, outputs, finish, form, inputs)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _together(self, calls: list[KeyedCall], opts: Any, post: Callable[..., Work], *tensors: Sequence[Any]) -> Work:
        """Repeat several calls as one, and ``post`` in full those that cannot be repeated."""
        work = None if type(opts) in _BY_TYPE else self._repeat(calls, opts)
        if work is not None and not calls:
            return work
        rest = post(*(each[len(each) - len(calls) :] for each in tensors), opts)
        return rest if work is None else self._combined([work, rest])

    def _per_rank(self, tensors: Sequence[Any], method: str, what: str) -> list[int]:
        if len(tensors) != self.size():
            raise ValueError(
                f"{method} on rank {self.rank()}: {len(tensors)} {what} tensors for a group of {self.size()}; "
                "one per rank is needed"
            )
        return [tensor.numel() for tensor in tensors]

    # Names of these methods in torch up to 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


@not_compiled
class PointToPoint(Dispatch):
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Work:
        """Start to send a tensor to group rank ``dest``."""
        tensor = _one(tensors, "send")
        if (work := self._repeat_message(tensor, dest, tag, outgoing=True)) is not None:
            return work
        return self._send_one([tensor], dest, tag)

    @through_operator("send")
    def _send_one(self, tensors: Any, dest: int, tag: int) -> Work:
        return self._post_message(to_send(tensors[0]), dest, tag, outgoing=True, outputs=[])

    def recv(self, tensors: Any, origin: int, tag: int = 0) -> Work:
        """Start to receive a tensor from group rank ``origin``."""
        tensor = _one(tensors, "recv")
        if (work := self._repeat_message(tensor, origin, tag, outgoing=False)) is not None:
            return work
        return self._receive_one([tensor], origin, tag)

    @through_operator("recv_")
    def _receive_one(self, tensors: Any, origin: int, tag: int) -> Work:
        target, finish = to_receive(tensors[0])
        return self._post_message(target, origin, tag, outgoing=False, outputs=tensors, finish=finish)

    @through_operator("recv_any_source_", "recv_anysource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Start to receive a tensor from any rank; ``source_rank`` of the Work is the sender."""
        target, finish = to_receive(_one(tensors, "recv"))
        return self._post_message(target, -1, tag, outgoing=False, outputs=list(tensors), finish=finish)

    recvAnysource = recv_anysource
