"""The collective and message methods of a process group, under the names of torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..calls.arguments import CallSpec
from .dispatch import Dispatch, KeyedCall
from .layout import (
    OPERATIONS,
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

_SUM = dist.ReduceOp.RedOpType.SUM
#: What torch's options call an argument of a short form (``group.reduce(tensor, root, op, timeout)``), by its type and
#: by its name.
_BY_TYPE: dict[type, str] = {
    dist.ReduceOp: "reduceOp", type(_SUM): "reduceOp", int: "rootRank", timedelta: "timeout",
}  # fmt: skip
_BY_NAME = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_type_of = attrgetter("dtype")


def _options(kind: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Options of a call, of this type of torch's: ``given`` are options or arguments of torch's short form."""
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


def _collective(
    operator: str,
    options: Any,
    count: int,
    calls_of: Callable[..., list[KeyedCall]] | None = None,
    *,
    method: str | None = "",
    several: bool = False,
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a collective of ``count`` arguments and then torch's options of this type.

    The decorated method takes torch's short form, too. Calls that repeat earlier ones take the short path: ``calls_of``
    finds their keys; ``several`` if there may be other than one. Others are shown as in :func:`.through_operator`. If
    arguments are wrong, the other ranks get a ``RefusedError`` instead of a hang.
    """

    def decorated(body: Callable[..., Work]) -> Callable[..., Work]:
        general = through_operator(operator, method)(body)

        @wraps(body)
        def made(self: Any, *args: Any, opts: Any = None, **named: Any) -> Any:
            before, given = self._posted, args[count:] if opts is None else (opts, *args[count:])
            args, opts = args[:count], given[0] if given else None
            try:
                if named or len(given) > 1 or type(opts) in _BY_TYPE:
                    opts = _options(options, given, named)
                if calls_of is not None and not modes():
                    calls = calls_of(self, opts, *args)
                    work = self._repeat(calls, opts) if several or len(calls) == 1 else None
                    if work is not None and not calls:
                        return work
                    if work is not None:  # the rest of several
                        rest = (each[len(each) - len(calls) :] for each in args)
                        return self._combined([work, made(self, *rest, opts)])
                return general(self, *args, *[None] * (count - len(args)), opts)
            except (TypeError, ValueError, RuntimeError) as mistake:
                if self._posted == before and not isinstance(mistake, dist.DistBackendError):
                    self.refuse(mistake, args)
                raise

        return made

    return decorated


def _in_place(name: str, group: Dispatch, opts: Any, tensors: Any) -> list[KeyedCall]:
    """Calls that work in each tensor of a list, for :meth:`.Dispatch._repeat`."""
    calls: list[KeyedCall] = []
    op = None if name == "bcast" else OPERATIONS.get(hash(_SUM if opts is None else opts.reduceOp))
    root = -1 if name == "allreduce" else 0 if opts is None else opts.rootRank
    sends = name == "reduce" and root != group.place[0]
    for tensor in tensors if type(tensors) is list else ():
        memory = tensor.dtype, tensor.numel(), tensor.device
        if sends:
            calls.append(((name, memory, None, op, root), tensor, None))
        else:
            calls.append(((name, None, memory, op, root), None, tensor))
    return calls


def _pairs(name: str, group: Dispatch, opts: Any, outputs: Any, inputs: Any, *splits: Any) -> list[KeyedCall]:
    """Calls from inputs to outputs for :meth:`.Dispatch._repeat`, which has none if one of them has split sizes, other
    memory in common than an allgather's in place, or tensors without memory of their own."""
    for each in splits:
        if each is not None and (type(each) is not list or each):  # numpy's arrays, e.g., have no truth value
            return []
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = (outputs,), (inputs,)
    rank, size = group.place
    calls: list[KeyedCall] = []
    op = None
    if name == "reduce_scatter_block":
        op = OPERATIONS.get(hash(_SUM if opts is None else opts.reduceOp))
    for output, input in zip(outputs, inputs, strict=True):
        if not (type(output) in PLAIN and type(input) in PLAIN) and seen(output, input):
            return []
        if name == "alltoall" and ((*output.shape, 1)[0] % size or (*input.shape, 1)[0] % size):
            return []
        try:
            at, length = input.data_ptr() - output.data_ptr(), input.nbytes
        except RuntimeError:
            return []
        send, key_in = input, (input.dtype, input.numel(), input.device)
        if name == "allgather" and at == rank * length:
            send = key_in = None  # type: ignore[assignment]
        elif -length < at < output.nbytes:
            return []
        calls.append(((name, key_in, (output.dtype, output.numel(), output.device), op, -1), send, output))
    return calls


def _one(tensors: Any, method: str) -> Any:
    """The single tensor of a list: old versions of torch allowed several devices per process."""
    if not isinstance(tensors, torch.Tensor):
        if len(tensors) != 1:
            raise ValueError(f"{method} takes a list of one tensor, got {len(tensors)}")
        tensors = tensors[0]
    return tensors


def _reduction(opts: Any) -> TorchReduction:
    """The reduction that a call's options name; sum by default."""
    return torch_reduction(_SUM if opts is None else opts.reduceOp)


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _splits(given: Any, size: int, tensor: Any, what: str) -> list[int] | None:
    """Split sizes as a list; None for equal sizes. torch passes on whatever its caller gave it."""
    splits, rows = [] if given is None else [int(n) for n in given], tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{what} has {rows} rows, not a multiple of the {size} ranks; give split sizes")
        return None
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"split sizes {splits} of {what} must be {size} numbers of 0 or more that add up to {rows}")
    return splits


def _blocks(flat: Any, counts: Sequence[int], unit: int) -> list[Any]:
    """A tensor with the numbers of elements for each rank, ``unit`` times ``counts``, and where they begin."""
    counts = [n * unit for n in counts] if unit != 1 else counts
    return [flat, (counts, [0, *accumulate(counts[:-1])])]


def _rows(flat: Any, splits: list[int] | None, size: int) -> list[Any]:
    """As :func:`_blocks`, by the splits of the rows; None for equal ones."""
    splits = splits or [1] * size
    return _blocks(flat, splits, flat.numel() // (sum(splits) or 1))


@not_compiled
class Collectives(Dispatch):
    """The collective methods of the group. ``opts`` are torch's options of the call, or arguments of its short form."""

    # --- all ranks alike ----------------------------------------------------------------------------------------------

    @_collective("allreduce_", c10d.AllreduceOptions, 1, partial(_in_place, "allreduce"))
    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce over all ranks, in place."""
        tensor = _one(tensors, "allreduce")
        if tensor.is_sparse:
            return self._sum_sparse(tensor, _reduction(opts))
        return self._reduce_in_place("allreduce", tensor, opts, -1)

    def _reduce_in_place(self, name: str, tensor: Any, opts: Any, root: int) -> Work:
        how = _reduction(opts)
        operand = how.operand(tensor)
        if root not in (-1, self.place[0]):
            return self._post(CallSpec(name, operand, None, how.op, root), opts, [tensor])
        return self._post(CallSpec(name, None, operand, how.op, root), opts, [tensor], copy_back(operand, tensor))

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

    @_collective(
        "allreduce_coalesced_", c10d.AllreduceCoalescedOptions, 1, partial(_in_place, "allreduce"), several=True
    )
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        return self._combined(self.allreduce([tensor], opts) for tensor in tensors)

    @_collective("broadcast_", c10d.BroadcastOptions, 1, partial(_in_place, "bcast"))
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Send the root's tensor to all ranks."""
        tensor, root = _one(tensors, "broadcast"), _root(opts)
        target, finish = (to_send(tensor), None) if self.place[0] == root else to_receive(tensor)
        return self._post(CallSpec("bcast", None, target, None, root), opts, [tensor], finish)

    @_collective("reduce_", c10d.ReduceOptions, 1, partial(_in_place, "reduce"))
    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce to the root, in place there."""
        return self._reduce_in_place("reduce", _one(tensors, "reduce"), opts, _root(opts))

    @_collective("barrier", c10d.BarrierOptions, 0, method=None)
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

    @_collective("_allgather_base_", c10d.AllgatherOptions, 2, partial(_pairs, "allgather"), method="all_gather_single")
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Gather the ranks' tensors, in rank order, in one tensor."""
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather on rank {self.rank()}: output has {output.numel()} elements of {output.dtype}; it must "
                f"have {self.size()} times input's {input.numel()} of {input.dtype}"
            )
        flat, finish = to_receive(output)
        return self._gather_into(flat, input, opts, [output], finish)

    def _gather_into(self, flat: Any, tensor: Any, opts: Any, outputs: Sequence[Any], finish: Finish) -> Work:
        own = self.place[0] * tensor.numel() * elements_of(tensor)
        send = without_overlap(to_send(tensor), flat, own)
        in_place = send.data_ptr() == flat.data_ptr() + own * flat.element_size()
        return self._post(CallSpec("allgather", None if in_place else send, flat), opts, outputs, finish)

    @_collective("allgather_", c10d.AllgatherOptions, 2)
    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather every rank's tensor in a list. Sizes may differ: each is that of the list's tensor."""
        tensor, rank = _one(inputs, "allgather"), self.place[0]
        outputs, counts = self._parts(output_lists, "allgather", "output")
        if counts[rank] != tensor.numel() or {*map(_type_of, outputs)} != {tensor.dtype}:
            raise ValueError(
                f"allgather on rank {rank}: input has {tensor.numel()} elements of {tensor.dtype}, but its "
                f"tensor in the output list has {counts[rank]} of {outputs[rank].dtype}"
            )
        flat, finish = to_receive_all(outputs)
        if min(counts) == max(counts):
            return self._gather_into(flat, tensor, opts, outputs, finish)
        unit = elements_of(tensor)
        send = without_overlap(to_send(tensor), flat, unit * sum(counts[:rank]))
        recv = [flat, [n * unit for n in counts]]
        return self._post(CallSpec("allgatherv", send, recv), opts, outputs, finish)

    @_collective("allgather_coalesced_", c10d.AllgatherOptions, 2)
    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Any], opts: Any = None) -> Work:
        """Do several allgathers; ``output_lists[r]`` receives the tensors of rank r."""
        return self._combined(
            self.allgather([[ranks[i] for ranks in output_lists]], [each], opts) for i, each in enumerate(inputs)
        )

    @_collective(
        "allgather_into_tensor_coalesced_", c10d.AllgatherOptions, 2, partial(_pairs, "allgather"),
        method="all_gather_single_coalesced", several=True,
    )  # fmt: skip
    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        return self._combined(self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True))

    @_collective("gather_", c10d.GatherOptions, 2)
    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather equal tensors at the root."""
        tensor, root = _one(inputs, "gather"), _root(opts)
        if self.place[0] != root:
            return self._post(CallSpec("gather", to_send(tensor), None, None, root), opts, [])
        outputs, counts = self._parts(output_lists, "gather", "output")
        if {*counts} != {tensor.numel()} or {*map(_type_of, outputs)} != {tensor.dtype}:
            raise ValueError(
                f"gather on rank {root}: outputs of {counts} elements do not match input's {tensor.numel()}"
            )
        flat, finish = to_receive_all(outputs)
        send = without_overlap(to_send(tensor), flat, root * tensor.numel() * elements_of(tensor))
        return self._post(CallSpec("gather", send, flat, None, root), opts, outputs, finish)

    @_collective("gather_", c10d.GatherOptions, 2, method=None)
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Gather equal tensors at the root, in rank order, in one tensor."""
        parts = [[*output.view(-1).tensor_split(self.size())]] if self.rank() == _root(opts) else []
        return self.gather(parts, [input], opts)

    # --- scattering ---------------------------------------------------------------------------------------------------

    @_collective("scatter_", c10d.ScatterOptions, 2)
    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        """Send each rank one of the root's equal tensors."""
        tensor, root = _one(outputs, "scatter"), _root(opts)
        target, finish = to_receive(tensor)
        send = None
        if self.place[0] == root:
            inputs, counts = self._parts(input_lists, "scatter", "input")
            if {*counts} != {tensor.numel()}:
                raise ValueError(f"scatter on rank {root}: inputs of {counts} elements, output of {tensor.numel()}")
            send = to_send_all(inputs)
            if target.data_ptr() != send.data_ptr() + root * target.nbytes:
                send = without_overlap(send, target)
        return self._post(CallSpec("scatter", send, target, None, root), opts, [tensor], finish)

    @_collective(
        "_reduce_scatter_base_", c10d.ReduceScatterOptions, 2, partial(_pairs, "reduce_scatter_block"),
        method="reduce_scatter_single",
    )  # fmt: skip
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Reduce over all ranks, and scatter equal parts: rank r gets part r."""
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter on rank {self.rank()}: input has {input.numel()} elements of {input.dtype}; it must "
                f"have {self.size()} times output's {output.numel()} of {output.dtype}"
            )
        return self._reduce_scatter(output, input, None, opts)

    def _reduce_scatter(self, output: Any, flat: Any, counts: list[int] | None, opts: Any) -> Work:
        how = _reduction(opts)
        target, finish = how.to_receive(output)
        operand = without_overlap(how.operand(flat), target)
        name = "reduce_scatter_block" if counts is None else "reduce_scatter"
        return self._post(CallSpec(name, operand, target, how.op, -1, counts), opts, [output], finish)

    @_collective("reduce_scatter_", c10d.ReduceScatterOptions, 2)
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors over all ranks; rank r gets tensor r. Sizes may differ."""
        output, rank = _one(outputs, "reduce_scatter"), self.place[0]
        inputs, counts = self._parts(input_lists, "reduce_scatter", "input")
        if counts[rank] != output.numel():
            raise ValueError(
                f"reduce_scatter on rank {rank}: output has {output.numel()} elements, but its tensor in the "
                f"input list has {counts[rank]}"
            )
        return self._reduce_scatter(output, to_reduce_all(inputs), None if min(counts) == max(counts) else counts, opts)

    @_collective(
        "reduce_scatter_tensor_coalesced_", c10d.ReduceScatterOptions, 2, partial(_pairs, "reduce_scatter_block"),
        method="reduce_scatter_single_coalesced", several=True,
    )  # fmt: skip
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        return self._combined(self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True))

    # --- all to all ---------------------------------------------------------------------------------------------------

    @_collective("alltoall_base_", c10d.AllToAllOptions, 4, partial(_pairs, "alltoall"), method="all_to_all_single")
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> Work:
        """Send rows of the first dimension to every rank; split sizes count rows."""
        size = self.place[1]
        into, outof = _splits(output_splits, size, output, "output"), _splits(input_splits, size, input, "input")
        target, finish = to_receive(output)
        send = without_overlap(to_send(input), target)
        if into is None and outof is None:
            return self._post(CallSpec("alltoall", send, target), opts, [output], finish)
        call = CallSpec("alltoallv", _rows(send, outof, size), _rows(target, into, size))
        return self._post(call, opts, [output], finish)

    @_collective("alltoall_", c10d.AllToAllOptions, 2)
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Send one tensor to every rank; sizes may differ."""
        outputs, into = self._parts(outputs, "alltoall", "output")
        inputs, outof = self._parts(inputs, "alltoall", "input")
        flat, finish = to_receive_all(outputs)
        send, unit = without_overlap(to_send_all(inputs), flat), elements_of(inputs[0])
        call = CallSpec("alltoallv", _blocks(send, outof, unit), _blocks(flat, into, unit))
        return self._post(call, opts, outputs, finish)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _parts(self, tensors: Any, method: str, what: str) -> tuple[list[Any], list[int]]:
        """(The tensors of a list, one for each rank; their numbers of elements). Old versions of torch had one list for
        each device of the process."""
        one = tensors if not tensors or isinstance(tensors[0], torch.Tensor) else tensors[0]
        found = list(one) if PLAIN.issuperset(map(type, one)) else [waited(each) for each in one]
        if len(found) != self.place[1]:
            raise ValueError(
                f"{method} on rank {self.place[0]}: {len(found)} {what} tensors for a group of {self.place[1]}; "
                "one per rank is needed"
            )
        return found, [*map(torch.Tensor.numel, found)]

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
        return self._repeat_message(tensor, dest, tag, outgoing=True) or self._send_one([tensor], dest, tag)

    @through_operator("send")
    def _send_one(self, tensors: Any, dest: int, tag: int) -> Work:
        return self._post_message(to_send(tensors[0]), dest, tag, outgoing=True, outputs=[])

    def recv(self, tensors: Any, origin: int, tag: int = 0) -> Work:
        """Start to receive a tensor from group rank ``origin``."""
        tensor = _one(tensors, "recv")
        return self._repeat_message(tensor, origin, tag, outgoing=False) or self._receive_one([tensor], origin, tag)

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
