"""Mixture of experts over the ranks of a group: tokens go to the ranks of their experts, results come back as sums.

Methods, arguments and results of :class:`Experts` are those of DeepEP's ``Buffer``. They use the collectives of a
process group, so ranks may be on several hosts and of several vendors. Shapes: a rank has ``n`` tokens of ``H``
elements with ``K`` choices each, and receives ``R`` tokens. Of ``E`` experts, rank r of ``W`` has those from
``r * E / W`` on.

Choices are global indices of experts, int64 or int32, -1 for none. Elements are float32, float16 or bfloat16, equal on
all ranks; weights are float32. Gradients flow through all methods; all ranks ask for them, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from .group import ProcessGroupUCCH
from .streams import current, module, started

# Names of torch 2.13, else the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)
_INDICES = (torch.int64, torch.int32)
_Shape: TypeAlias = tuple[int | None, ...]


class Event:
    """The results of a call are available; returned by :meth:`Experts.dispatch` and :meth:`Experts.combine`.

    Args:
        stream: Stream of the call; None if the call ran in the caller's stream, so that there is nothing to wait
            for.
    """

    def __init__(self, stream: Any = None) -> None:
        if stream is None:
            self._event = None
        else:
            self._device, self._event = stream.device, stream.record_event()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the results; the host does not wait."""
        if self._event is not None:
            current(self._device).wait_event(self._event)


@dataclass(frozen=True, slots=True)
class Handle:
    """The route of tokens in one dispatch, for its combine and for later dispatches.

    What :meth:`Experts.dispatch` returns.
    """

    group: Any
    #: Number of this rank's tokens, and the token of each row that is sent, ordered by destination: int64
    #: ``[sum(sent)]``.
    tokens: int
    rows: Any
    #: Rows sent to and received from each rank.
    sent: list[int]
    received: list[int]

    def dispatch(self, x: Any) -> Any:
        """Send tokens ``[n, ...]``; returns the rows ``[R, ...]`` that come to this rank."""
        out = x.new_empty((sum(self.received), *x.shape[1:]))
        dist.all_to_all_single(out, x.index_select(0, self.rows), self.received, self.sent, group=self.group)
        return out

    def combine(self, x: Any) -> Any:
        """Send rows ``[R, ...]`` back; returns their sums ``[n, ...]``, in float32 and in the order of the ranks."""
        out = x.new_empty((sum(self.sent), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), self.sent, self.received, group=self.group)
        total = x.new_zeros((self.tokens, *x.shape[1:]), dtype=torch.float32)
        for rows, part in zip(self.rows.split(self.sent), out.split(self.sent), strict=True):
            total.index_add_(0, rows, part.float())  # a token is in one row of a rank at most: bits are reproducible
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _AllRanks:
    """Route of all tokens to all ranks: ``M`` rows of each rank, ``T = M * W`` in total, and a last row of zeros."""

    group: Any

    def dispatch(self, x: Any) -> Any:
        """Send rows ``[M, ...]``; returns the rows of all ranks and a row of zeros: ``[T + 1, ...]``."""
        out = x.new_empty((dist.get_world_size(self.group) * len(x) + 1, *x.shape[1:]))
        out[-1].zero_()
        _all_gather(out[:-1], x.contiguous(), group=self.group)
        return out

    def combine(self, x: Any) -> Any:
        """Send rows ``[T + 1, ...]`` back; returns their sums ``[M, ...]`` over the ranks."""
        out = x.new_empty(((len(x) - 1) // dist.get_world_size(self.group), *x.shape[1:]))
        _reduce_scatter(out, x.contiguous()[:-1], group=self.group)
        return out


@dataclass(frozen=True, slots=True)
class FixedHandle:
    """The route of tokens in a dispatch of fixed size, ``T = M * W`` of all ranks, padded ones included.

    What :meth:`Experts.low_latency_dispatch` returns.
    """

    #: Number of this rank's tokens; which of them have an index out of range, as bool ``[n]``.
    tokens: int
    wrong: Any
    #: (E / W, T), and the row of each choice of all tokens: int64 ``[T, K]``, -1 for experts of other ranks.
    shape: tuple[int, int]
    rows: Any


_DISPATCH, _COMBINE = True, False


class _Move(torch.autograd.Function):
    """Move tensors along a route, and their gradients back. None stays None."""

    @staticmethod
    def forward(ctx: Any, route: Handle | _AllRanks, direction: bool, *tensors: Any) -> Any:
        ctx.route, ctx.direction = route, direction
        move = route.dispatch if direction is _DISPATCH else route.combine
        return tuple(None if each is None else move(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[2:], strict=True))
        return None, None, *_Move.apply(ctx.route, not ctx.direction, *wanted)


class _Facts(NamedTuple):
    """Values that must be equal on all ranks."""

    hidden_size: int = 0
    element_type: int = 0
    top_k: int = 0
    experts: int = 0
    maximum_of_tokens: int = 0
    weights: bool = False
    #: Which tensors require gradients, as bits.
    gradients: int = 0


class Experts:
    """Dispatch and combine over a process group.

    All ranks call the same methods in the same order, except for the local ``get_dispatch_layout``. ``stream`` of the
    methods: ``async_finish=True`` runs the call beside the current stream, after ``previous_event`` or else after what
    is queued in that stream; results may be used after ``event.current_stream_wait()``. ``allocate_on_comm_stream`` has
    no effect.

    Wrong arguments on one rank raise ``ValueError`` there and, in collective calls, ``DistBackendError`` on the other
    ranks, which names the rank; the group has then ended. If all ranks make the same mistake it stays usable. Sizes and
    types that differ between ranks raise ``ValueError`` on all ranks in the first call that has them; the group stays
    usable. In a one-vendor group of torch's own (docs/torch.md) the other ranks see a mistake as a timeout.

    Args:
        group: Process group; torch's default group if None.

    Raises:
        TypeError: ``group`` is not a process group.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        if not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"group is {type(self.group).__name__}; a process group of torch is needed")
        self.rank, self.size = self.group.rank(), self.group.size()
        self._sides: dict[Any, Any] = {}
        self._agreed: set[tuple[str, _Facts]] = set()

    @staticmethod
    def capture() -> Event:
        """Record an event in the current stream.

        Returns:
            The event, to be passed as ``previous_event``.
        """
        return Event(next((each.current_stream() for _, each in started()), None))

    # --- counts that the host knows -----------------------------------------------------------------------------------

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int, **stream: Any) -> tuple[Any, None, Any, Any, Event]:
        """Count where tokens go; local, and the host does not wait.

        Indices out of range count as -1 here; :meth:`dispatch` raises for them.

        Args:
            topk_idx: Choices ``[n, K]``.
            num_experts: ``E``.
            stream: ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream``, as the class has them.

        Returns:
            ``num_tokens_per_rank`` int32 ``[W]``, None, ``num_tokens_per_expert`` int32 ``[E]``, ``is_token_in_rank``
            bool ``[n, W]`` and the event.

        Raises:
            ValueError: ``topk_idx`` is not a tensor of choices, or ranks do not divide the experts.
        """
        self._check_choices("get_dispatch_layout", topk_idx, num_experts)

        def work() -> tuple[Any, ...]:
            valid, index = (topk_idx >= 0) & (topk_idx < num_experts), topk_idx.long()
            ranks = torch.where(valid, index // (num_experts // self.size), self.size)
            inside = torch.zeros((len(index), self.size + 1), dtype=torch.bool, device=index.device)
            inside = inside.scatter_(1, ranks, True)[:, :-1].contiguous()
            counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=index.device)
            counts.index_add_(0, torch.where(valid, index, num_experts).flatten(), valid.flatten().int())
            return inside.sum(0, dtype=torch.int32), None, counts[:-1], inside

        return self._run(work, [topk_idx], **stream)

    def dispatch(
        self, x: Any, handle: Handle | None = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Any = None, topk_weights: Any = None, expert_alignment: int = 1, **stream: Any,
    ) -> tuple[Any, Any, Any, list[int] | None, Handle, Event]:  # fmt: skip
        """Send each token once to every rank that has one of its experts. Collective.

        The host reads the counts and exchanges them. With the handle of an earlier dispatch, tokens take the same
        route, ``x`` is the only other argument, and the host does not wait.

        Args:
            x: Tokens ``[n, H]``.
            handle: Handle of an earlier dispatch, or None.
            num_tokens_per_rank, num_tokens_per_rdma_rank: Of the layout; not used.
            is_token_in_rank, num_tokens_per_expert: Of the layout (:meth:`get_dispatch_layout`).
            topk_idx: Choices ``[n, K]``.
            topk_weights: Weights ``[n, K]``, or None.
            expert_alignment: Counts of experts are rounded up to multiples of it.
            stream: ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream``, as the class has them.

        Returns:
            ``recv_x`` ``[R, H]``, ordered by sender and then by token; ``recv_topk_idx`` ``[R, K]``, counted from
            this rank's first expert, -1 for others; ``recv_topk_weights`` ``[R, K]``, 0 where the index is -1; a list
            with the number of tokens of each local expert; the handle; the event. With a handle, indices, weights and
            list are None.

        Raises:
            ValueError, DistBackendError: As the class says.
        """
        if handle is not None:
            with self._refusing():
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError(f"dispatch on rank {self.rank}: a handle comes without topk_idx and topk_weights")
                self._check("dispatch", "x", x, (handle.tokens, None), _ELEMENTS, handle.rows.device)
            self._agree("dispatch", _facts(x))

            def same_route() -> tuple[Any, ...]:
                return *_Move.apply(handle, _DISPATCH, x), None, None, None, handle

            return self._run(same_route, [x, handle], **stream)
        given = x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert

        def work() -> tuple[Any, ...]:
            route, counts = self._route(expert_alignment, *given)
            # Choices (as bits) and weights go in one message: a message costs the host a plan for these counts.
            choices, k = topk_idx.int().view(torch.float32), topk_idx.size(1)
            packed = choices if topk_weights is None else torch.cat([choices, topk_weights], 1)
            received, packed = _Move.apply(route, _DISPATCH, x, packed)
            choices, weights = packed.detach()[:, :k].contiguous().view(torch.int32), packed[:, k:]
            index = choices.to(topk_idx.dtype) - self.rank * len(counts)
            mine = (index >= 0) & (index < len(counts))
            weights = None if topk_weights is None else torch.where(mine, weights, 0)
            rounded = [-(-count // expert_alignment) * expert_alignment for count in counts]
            return received, torch.where(mine, index, -1), weights, rounded, route

        return self._run(work, given, **stream)

    def combine(self, x: Any, handle: Handle, topk_weights: Any = None, **stream: Any) -> tuple[Any, Any, Event]:
        """Send rows back, and sum the rows of each token without weights. Collective.

        The host waits for nothing.

        Args:
            x: Rows ``[R, H]``.
            handle: Handle of the dispatch.
            topk_weights: Weights ``[R, K]`` to be summed likewise, or None.
            stream: ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream``, as the class has them.

        Returns:
            Sums ``[n, H]``, added in float32 and rounded once; the sums of the weights, or None; and the event.

        Raises:
            ValueError, DistBackendError: As the class says.
        """
        with self._refusing():
            received, device = sum(handle.received), handle.rows.device
            self._check("combine", "x", x, (received, None), _ELEMENTS, device)
            if topk_weights is not None:
                self._check("combine", "topk_weights", topk_weights, (received, None), (torch.float32,), device)
        self._agree("combine", _facts(x, topk_weights, 0 if topk_weights is None else topk_weights.size(1)))
        inputs = [x, handle, topk_weights]
        return self._run(lambda: _Move.apply(handle, _COMBINE, x, topk_weights), inputs, **stream)

    def _route(
        self, alignment: int, x: Any, idx: Any, weights: Any, inside: Any, per_expert: Any
    ) -> tuple[Handle, Any]:
        """The handle of a dispatch, and the number of tokens of each local expert."""
        with self._refusing():
            if alignment < 1:
                raise ValueError(f"dispatch on rank {self.rank}: expert_alignment is {alignment}; it must be 1 or more")
            if idx is None or inside is None or per_expert is None:
                raise ValueError(f"dispatch on rank {self.rank}: topk_idx and its layout are needed, or a handle")
            self._check_choices("dispatch", idx, experts := len(per_expert))
            self._check("dispatch", "x", x, (len(idx), None), _ELEMENTS, idx.device)
            self._check("dispatch", "is_token_in_rank", inside, (len(idx), self.size), (torch.bool,), idx.device)
            if weights is not None:
                self._check("dispatch", "topk_weights", weights, tuple(idx.shape), (torch.float32,), idx.device)
            wrong = _outside(idx, experts).sum().view(1)
            *numbers, bad = torch.cat([inside.sum(0), per_expert, wrong]).tolist()
            self._check_range("dispatch", bad, experts)
            sent, choices = numbers[: self.size], numbers[self.size :]
        rows = self._compare("dispatch", _facts(x, weights, idx.size(1), experts), sent)
        given = torch.tensor(choices, device="cpu").view(self.size, -1)
        counts = torch.empty_like(given)
        dist.all_to_all_single(counts, given, group=self.group)
        order = inside.t().nonzero()[:, 1]
        return Handle(self.group, len(idx), order, sent, [row[self.rank] for row in rows]), counts.sum(0).tolist()

    # --- fixed sizes: the host knows no counts ------------------------------------------------------------------------

    def low_latency_dispatch(
        self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int, num_experts: int, *, use_fp8: bool = False,
        async_finish: bool = False, return_recv_hook: bool = False,
    ) -> tuple[Any, Any, FixedHandle, Event, Callable[[], None]]:  # fmt: skip
        """Send experts their tokens, at most ``M`` of each rank, without counts on the host. Collective.

        All of it runs in the stream, and can be captured in a graph after one call with these sizes. Every rank
        receives the tokens of all ranks and keeps those of its experts: a message of fixed size has room for all
        anyway. A token that chooses an expert twice is one row. On a device the host cannot see indices out of range:
        such tokens come out of :meth:`low_latency_combine` as NaN.

        Args:
            x: Tokens ``[n, H]``.
            topk_idx: Choices ``[n, K]``.
            num_max_dispatch_tokens_per_rank: ``M``, equal on all ranks.
            num_experts: ``E``.
            use_fp8: Must be False.
            async_finish: True to run the call beside the current stream.
            return_recv_hook: The same, for callers that use the hook.

        Returns:
            ``recv_x`` ``[E / W, M * W, H]``: the first ``recv_count[e]`` rows of each expert are tokens, ordered by
            sender and then by token, the rest are 0; ``recv_count`` int32 ``[E / W]``; the handle; the event; and a
            hook, which is ``event.current_stream_wait``.

        Raises:
            ValueError, DistBackendError: As the class says; on the host also for indices out of range.
        """
        method, most = "low_latency_dispatch", num_max_dispatch_tokens_per_rank
        with self._refusing():
            self._check_choices(method, topk_idx, num_experts)
            self._check(method, "x", x, (len(topk_idx), None), _ELEMENTS, topk_idx.device)
            if use_fp8:
                raise ValueError(f"{method} on rank {self.rank}: float8 differs between vendors; cast what arrives")
            if len(x) > most:
                raise ValueError(f"{method} on rank {self.rank}: {len(x)} tokens are more than the maximum, {most}")
            wrong = _outside(topk_idx, num_experts)
            if _visible(wrong):
                self._check_range(method, int(wrong.sum()), num_experts)
        self._agree(method, _facts(x, None, topk_idx.size(1), num_experts, most))

        def work() -> tuple[Any, ...]:
            spare, count, total = (0, 0, 0, most - len(x)), num_experts // self.size, most * self.size
            padded = pad(topk_idx.int(), spare, value=-1), pad(x, spare)
            choices, every = _Move.apply(_AllRanks(self.group), _DISPATCH, *padded)
            received, counts, rows = _by_expert(choices[:-1].long() - self.rank * count, every, count)
            return received, counts, FixedHandle(len(x), wrong.any(1), (count, total), rows)

        *results, event = self._run(work, [x, topk_idx, wrong], async_finish=async_finish or return_recv_hook)
        return *results, event, event.current_stream_wait

    def low_latency_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: FixedHandle, *, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Event, Callable[[], None]]:  # fmt: skip
        """Send the experts' results back and sum them by weights. Collective.

        A rank adds its experts' results in float32 and rounds once; the sum over ranks is in ``x``'s type.

        Args:
            x: Rows ``[E / W, M * W, H]``.
            topk_idx: Choices ``[n, K]`` of the dispatch.
            topk_weights: Weights ``[n, K]``.
            handle: Handle of the dispatch.
            async_finish: True to run the call beside the current stream.
            return_recv_hook: The same, for callers that use the hook.

        Returns:
            Sums ``[n, H]``, the event, and a hook, which is ``event.current_stream_wait``.

        Raises:
            ValueError, DistBackendError: As the class says.
        """
        method = "low_latency_combine"
        with self._refusing():
            (count, total), k, device = handle.shape, handle.rows.size(1), handle.rows.device
            self._check(method, "x", x, (count, total, None), _ELEMENTS, device)
            self._check(method, "topk_idx", topk_idx, (handle.tokens, k), _INDICES, device)
            self._check(method, "topk_weights", topk_weights, (handle.tokens, k), (torch.float32,), device)
        self._agree(method, _facts(x, topk_weights, k))

        def work() -> tuple[Any, ...]:
            everyone, spare = _AllRanks(self.group), (0, 0, 0, total // self.size - handle.tokens)
            weights = _Move.apply(everyone, _DISPATCH, pad(topk_weights, spare))[0][:-1]
            part = x.new_zeros((total, x.size(2)), dtype=torch.float32)
            for row, factor in zip(handle.rows.unbind(1), weights.split(1, dim=1), strict=True):
                # Rows behind the tokens may hold anything, also NaN.
                made = x.flatten(0, 1).index_select(0, row.clamp(min=0)).masked_fill(row.lt(0).unsqueeze(1), 0)
                part = torch.addcmul(part, made.float(), factor)
            out = _Move.apply(everyone, _COMBINE, pad(part.to(x.dtype), (0, 0, 0, 1)))[0][: handle.tokens]
            return (out if _visible(handle.wrong) else out.masked_fill(handle.wrong.unsqueeze(1), torch.nan),)

        out, event = self._run(work, [x, topk_weights, handle], async_finish=async_finish or return_recv_hook)
        return out, event, event.current_stream_wait

    # --- streams ------------------------------------------------------------------------------------------------------

    def _run(
        self, work: Callable[[], Any], inputs: Sequence[Any], previous_event: Event | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Call ``work``, in a side stream with ``async_finish`` on a device; return its results and their event."""
        device = next((tensor.device for tensor in _tensors(inputs)), torch.device("cpu"))
        if device.type == "cpu" or not async_finish:
            if previous_event is not None:
                previous_event.current_stream_wait()
            return *work(), Event()
        caller = current(device)
        side = self._sides.get(device) or self._sides.setdefault(device, module(device).Stream(device))
        if previous_event is None:
            side.wait_event(caller.record_event())
        with module(device).stream(side):
            if previous_event is not None:
                previous_event.current_stream_wait()
            results = work()
            event = Event(side)
        for stream, several in ((side, inputs), (caller, results)):
            for tensor in _tensors(several):
                tensor.record_stream(stream)
        return *results, event

    # --- agreement ----------------------------------------------------------------------------------------------------

    def _agree(self, method: str, facts: _Facts) -> None:
        """Compare values with the other ranks, in the first call that has these values."""
        if (method, facts) not in self._agreed:
            self._compare(method, facts)
            self._agreed.add((method, facts))

    def _compare(self, method: str, facts: _Facts, more: Sequence[int] = ()) -> list[list[int]]:
        """Compare values with the other ranks: ``ValueError`` if they differ. Returns ``more`` of every rank."""
        mine = torch.tensor([*facts, *more], dtype=torch.int64, device="cpu")
        table = mine.new_empty(self.size * len(mine))
        _all_gather(table, mine, group=self.group)
        rows: list[list[int]] = table.view(self.size, -1).tolist()
        for at, name in enumerate(_Facts._fields):
            values = [row[at] for row in rows]
            if len(set(values)) > 1:
                shown = [str(_ELEMENTS[value]) for value in values] if name == "element_type" else values
                raise ValueError(f"{method} on rank {self.rank}: ranks differ in {name.replace('_', ' ')}: {shown}")
        return [row[len(facts) :] for row in rows]

    # --- checks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Context in which wrong arguments make this rank refuse the collective, so that other ranks get an error."""
        try:
            yield
        except Exception as mistake:
            if isinstance(self.group, ProcessGroupUCCH):
                self.group.refuse(mistake)
            raise

    def _check(
        self, method: str, name: str, tensor: Any, shape: _Shape, types: Sequence[Any], device: Any = None
    ) -> None:
        """Raise ``ValueError`` unless ``tensor`` has this shape (None: any size), one of the types, and the device."""
        what, fits = type(tensor).__name__, False
        if isinstance(tensor, torch.Tensor):
            what, fits = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}", tensor.dim() == len(shape)
            fits = fits and all(n is None or n == size for n, size in zip(shape, tensor.shape, strict=True))
            fits = fits and tensor.dtype in types and device in (None, tensor.device)
        if not fits:
            due = f"{' or '.join(map(str, types))} [{', '.join('any' if n is None else str(n) for n in shape)}]"
            place = "" if device is None else f" on {device}"
            raise ValueError(f"{method} on rank {self.rank}: {name} is {what}; {due}{place} is due")

    def _check_choices(self, method: str, idx: Any, experts: int) -> None:
        self._check(method, "topk_idx", idx, (None, None), _INDICES)
        if experts < 1 or experts % self.size:
            raise ValueError(f"{method} on rank {self.rank}: {self.size} ranks do not divide {experts} experts")

    def _check_range(self, method: str, wrong: int, experts: int) -> None:
        if wrong:
            raise ValueError(f"{method} on rank {self.rank}: {wrong} of topk_idx are not from -1 to {experts - 1}")


def _facts(x: Any, weights: Any = None, top_k: int = 0, experts: int = 0, most: int = 0) -> _Facts:
    asking = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in (x, weights)]
    gradients = asking[0] + 2 * asking[1]
    return _Facts(x.size(-1), _ELEMENTS.index(x.dtype), top_k, experts, most, weights is not None, gradients)


def _by_expert(choices: Any, tokens: Any, count: int) -> tuple[Any, Any, Any]:
    """Sort tokens ``[T + 1, H]``, the last of them 0, into rows of ``count`` local experts by ``choices`` ``[T, K]``.

    Choices outside of 0 to ``count - 1`` belong to other ranks. Returns the rows ``[count, T, H]``, the number of rows
    of each expert, and the row of each choice, -1 for other ranks'.
    """
    total, device = len(choices), choices.device
    mine = torch.where((choices >= 0) & (choices < count), choices, count)  # `count`: other ranks' choices
    chosen = torch.zeros((total, count + 1), dtype=torch.bool, device=device).scatter_(1, mine, True)
    place = chosen.cumsum(0) - 1
    source = place.new_full((total + 1, count), total)
    numbers = torch.arange(total, device=device).unsqueeze(1).expand(-1, count)
    source.scatter_(0, torch.where(chosen, place, total)[:, :-1], numbers)
    received = tokens.index_select(0, source[:-1].t().flatten()).view(count, total, tokens.size(1))
    rows = torch.where(mine < count, mine * total + place.gather(1, mine), -1)
    return received, chosen[:, :-1].sum(0, dtype=torch.int32), rows


def _outside(idx: Any, experts: int) -> Any:
    """Mask of the choices that are out of range."""
    return (idx < -1) | (idx >= experts)


def _visible(tensor: Any) -> bool:
    """True if the host can read the tensor without waiting for a device."""
    return bool(tensor.is_cpu)


def _tensors(several: Iterable[Any]) -> Iterable[Any]:
    for each in several:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Handle | FixedHandle):
            yield from _tensors(getattr(each, field.name) for field in fields(each))
