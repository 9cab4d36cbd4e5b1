"""Cases of test_torch_api.py: tokens go to experts on other ranks and back, compared with loops over all tokens."""

import re
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch_cases import DEVICE, N, R, same

from ucc_hetero.torch import experts as module
from ucc_hetero.torch.experts import Experts

TYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Tolerance relative to the largest element, for the rounding of each rank's part and of the sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def seeded():
    """New random numbers, equal on every rank."""
    seed = [torch.seed() % 2**32]
    dist.broadcast_object_list(seed)
    if R == 0:
        print("seed", seed[0], flush=True)
    return torch.Generator("cpu").manual_seed(seed[0])


def on_host(function):
    """Decorator: make tensors on the host, whatever the job's device is."""

    def run(*arguments, **named):
        with torch.device("cpu"):
            return function(*arguments, **named)

    return run


class Routing(NamedTuple):
    """Tokens, choices and weights of all ranks, a host tensor per rank."""

    x: list[torch.Tensor]
    idx: list[torch.Tensor]
    weights: list[torch.Tensor]
    each: int

    @property
    def experts(self):
        return self.each * N

    def mine(self):
        return self.x[R].to(DEVICE), self.idx[R].to(DEVICE), self.weights[R].to(DEVICE)

    def to(self, rank):
        """(sender, token) of the tokens that choose an expert of a rank, in order."""
        return [
            (s, t)
            for s in range(N)
            for t, row in enumerate(self.idx[s].tolist())
            if any(e >= 0 and e // self.each == rank for e in row)
        ]


@on_host
def routing(generator, dtype, each=3, k=2, hidden=24):
    """Random choices, some none and some repeated; one rank has no tokens, and one expert is never chosen."""
    counts = torch.randint(3, 20, (N,), generator=generator).tolist()
    counts[counts[0] % N] = 0
    x = [torch.randn(n, hidden, generator=generator).to(dtype) for n in counts]
    lonely = counts[-1] % (each * N)
    idx = []
    for n in counts:
        chosen = torch.rand(n, each * N, generator=generator).argsort(1)[:, :k]
        twice = torch.rand(n, generator=generator) < 0.1
        chosen[twice, 1] = chosen[twice, 0]
        none = (torch.rand(n, k, generator=generator) < 0.2) | (chosen == lonely)
        idx.append(torch.where(none, -1, chosen))
    return Routing(x, idx, [torch.rand(n, k, generator=generator) for n in counts], each)


def close(got, want, what):
    assert got.dtype in TOLERANCE and got.shape == want.shape, (what, got.dtype, got.shape, want.shape)
    far = (got.detach().cpu().double() - want.double()).abs().max().item() if want.numel() else 0.0
    assert far <= TOLERANCE[got.dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0), (what, far)


@on_host
def one_process(given, scales):
    """Outputs of a MoE, ``tanh(x * scale of the expert)``, and gradients of their weighted sum, token by token."""
    x = [each.double().requires_grad_() for each in given.x]
    weights = [each.double().requires_grad_() for each in given.weights]
    scales = scales.double().requires_grad_()
    outputs, loss = [], scales.sum() * 0
    for s in range(N):
        rows = []
        for t, row in enumerate(given.idx[s].tolist()):
            parts = [weights[s][t, k] * torch.tanh(x[s][t] * scales[e]) for k, e in enumerate(row) if e >= 0]
            rows.append(sum(parts, torch.zeros_like(x[s][t])))
        outputs.append(torch.stack(rows) if rows else x[s] * 0)
        loss = loss + (outputs[-1] * factors(outputs[-1])).sum()
    grads = torch.autograd.grad(loss, [*x, *weights, scales], allow_unused=True, materialize_grads=True)
    return [each.detach() for each in outputs], [grads[:N], grads[N : 2 * N], grads[-1]]


def factors(x):
    return torch.cos(torch.arange(x.numel(), dtype=torch.float64, device=x.device)).view(x.shape)


def layout(experts, given, idx):
    per_rank, _, per_expert, inside, _ = experts.get_dispatch_layout(idx, given.experts)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": inside}


def case_tokens_go_and_come_back():
    generator, experts = seeded(), Experts()
    for dtype in TYPES:
        given = routing(generator, dtype)
        x, idx, weights = given.mine()
        asked = layout(experts, given, idx)
        want = [sum(s == R for s, _ in given.to(rank)) for rank in range(N)]
        assert asked["num_tokens_per_rank"].tolist() == want
        assert asked["num_tokens_per_expert"].tolist() == [(idx == e).sum().item() for e in range(given.experts)]
        got, index, scale, counts, handle, event = experts.dispatch(
            x, topk_idx=idx, topk_weights=weights, expert_alignment=4, async_finish=True, **asked
        )
        event.current_stream_wait()
        due = given.to(R)
        same(got, torch.stack([given.x[s][t] for s, t in due]) if due else x[:0].cpu(), "recv_x")
        for row, (s, t) in enumerate(due):
            for k, e in enumerate(given.idx[s][t].tolist()):
                mine = e >= 0 and e // given.each == R
                assert index[row, k].item() == (e % given.each if mine else -1)
                assert scale[row, k].item() == (given.weights[s][t, k].item() if mine else 0.0)
        everyone = torch.cat(given.idx)
        chosen = [(everyone == e).sum().item() for e in range(R * given.each, (R + 1) * given.each)]
        assert counts == [(n + 3) // 4 * 4 for n in chosen]
        visits = [sum((R, t) in given.to(rank) for rank in range(N)) for t in range(len(x))]
        back, back_weights, _ = experts.combine(got, handle, scale)
        close(back, given.x[R].double() * torch.tensor(visits, device="cpu").view(-1, 1), "combined_x")
        same(back_weights, given.weights[R] * (given.idx[R] >= 0), "combined_topk_weights")
        again, *nothing, same_way, _ = experts.dispatch(x * 2, handle)  # other tokens on the same route
        assert nothing == [None] * 3 and same_way is handle
        same(again, got.cpu() * 2, "by a handle")


def case_gradients_of_a_layer():
    generator = seeded()
    for dtype in TYPES:
        given = routing(generator, dtype)
        scales = torch.rand(given.experts, generator=generator, device="cpu") + 0.5
        outputs, (x_grads, w_grads, s_grads) = one_process(given, scales)
        own = slice(R * given.each, (R + 1) * given.each)
        for layer in (counted, fixed):
            x, idx, weights = (each.clone() for each in given.mine())
            x.requires_grad_(), weights.requires_grad_()
            mine = scales[own].to(DEVICE).requires_grad_()
            out = layer(given, x, idx, weights, mine)
            (out * factors(out)).sum().backward()
            for got, want, what in (
                (out, outputs[R], "output"), (x.grad, x_grads[R], "x"), (weights.grad, w_grads[R], "weights"),
            ):  # fmt: skip
                close(got.to(dtype), want, f"{layer.__name__} {what} {dtype}")
            close(mine.grad.to(dtype), s_grads[own], f"{layer.__name__} scales")


def counted(given, x, idx, weights, scales):
    experts = Experts()
    asked = layout(experts, given, idx)
    rows, index, factor, _, handle, _ = experts.dispatch(x, topk_idx=idx, topk_weights=weights, **asked)
    made = torch.tanh(rows.unsqueeze(1).float() * scales[index.clamp(min=0)].unsqueeze(2))
    return experts.combine((made * factor.unsqueeze(2)).sum(1).to(x.dtype), handle)[0]


def fixed(given, x, idx, weights, scales):
    experts = Experts()
    rows, counts, handle, event, hook = experts.low_latency_dispatch(
        x, idx, 20, given.experts, async_finish=True, return_recv_hook=False
    )
    event.current_stream_wait(), hook()
    made = torch.tanh(rows.float() * scales.view(-1, 1, 1)).to(x.dtype)
    valid = torch.arange(rows.size(1), device=DEVICE) < counts.unsqueeze(1)
    made = torch.where(valid.unsqueeze(2), made, torch.nan)  # the values of other rows do not matter
    return experts.low_latency_combine(made, idx, weights, handle)[0]


def case_rows_of_fixed_size():
    generator, experts = seeded(), Experts()
    for dtype in TYPES:
        given = routing(generator, dtype, each=2, k=min(3, 2 * N))
        x, idx, _ = given.mine()
        rows, counts, _, _, _ = experts.low_latency_dispatch(x, idx.int(), 20, given.experts)
        assert rows.shape == (2, 20 * N, x.size(1)) and counts.dtype == torch.int32
        for e in range(2):
            want = [given.x[s][t] for s in range(N) for t, row in enumerate(given.idx[s].tolist()) if R * 2 + e in row]
            assert counts[e].item() == len(want)
            zeros = x.new_zeros((20 * N - len(want), x.size(1))).cpu()
            same(rows[e], torch.cat([torch.stack(want), zeros]) if want else zeros, f"expert {e}")
    rows, counts, handle, _, _ = experts.low_latency_dispatch(x[:0], idx[:0], 0, given.experts)
    assert rows.shape == (2, 0, x.size(1)) and not counts.any()
    assert experts.low_latency_combine(rows, idx[:0], idx[:0].float(), handle)[0].shape == (0, x.size(1))


def case_mistakes_are_told_to_all():
    """Each mistake on the last rank: its group ends, other groups go on. If all ranks see it, the group goes on."""
    generator, experts = seeded(), Experts()
    given = routing(generator, torch.float32)
    last = R == N - 1
    x, idx = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)

    def attempt(words, both=False, **changed):
        group = dist.group.WORLD if both else dist.new_group()
        its = Experts(group)
        arguments = {"x": x, "topk_idx": idx, **layout(its, given, idx)}
        arguments |= changed if last else {}
        kind, where = (ValueError, R) if last or both else (dist.DistBackendError, N - 1)
        with pytest.raises(kind, match=f"dispatch on rank {where}: .*{re.escape(words)}"):
            its.dispatch(**arguments)
        if not both:
            dist.destroy_process_group(group)

    outside = idx.clone()
    outside[1, 1], outside[2, 0] = given.experts, -2
    attempt(f"2 of topk_idx are not from -1 to {given.experts - 1}", topk_idx=outside)
    attempt("x is torch.float64 [4, 8]", x=x.double())
    attempt("x is list", x=x.tolist())
    attempt("ranks differ in hidden size", both=True, x=x[:, :6])
    attempt("ranks differ in element type", both=True, x=x.half())
    attempt("ranks differ in gradients", both=True, x=x.clone().requires_grad_())
    attempt("expert_alignment is 0", expert_alignment=0)
    attempt("its layout are needed", is_token_in_rank=None)
    attempt("topk_weights is torch.bfloat16", topk_weights=torch.ones(4, 2, dtype=torch.bfloat16))
    got, *_, handle, _ = experts.dispatch(x, topk_idx=idx, **layout(experts, given, idx))
    assert len(got) == (4 * N if R == 0 else 0)
    with pytest.raises(ValueError, match="ranks differ in hidden size"):
        experts.combine(got if R else got[:, :4], handle)
    same(experts.combine(got, handle)[0], x.cpu(), "after mistakes")
    total = torch.ones(1, device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == N


def case_mistakes_that_every_rank_makes():
    experts = Experts()
    x, idx = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="4 tokens are more than the maximum, 3"):
        experts.low_latency_dispatch(x, idx, 3, N)
    with pytest.raises(ValueError, match=f"{N} ranks do not divide {N + 1} experts"):
        experts.get_dispatch_layout(idx, N + 1)
    with pytest.raises(ValueError, match="float8"):
        experts.low_latency_dispatch(x, idx, 4, N, use_fp8=True)
    with pytest.raises(ValueError, match=r"topk_idx is torch.float32 \[4, 8\]"):
        experts.get_dispatch_layout(x, N)
    *_, handle, _, _ = experts.low_latency_dispatch(x, idx, 4, N)
    with pytest.raises(ValueError, match=r"topk_weights is torch.float32 \[4, 8\] on .*; torch.float32 \[4, 2\]"):
        experts.low_latency_combine(torch.ones(1, 4 * N, 8, device=DEVICE), idx, x, handle)


def case_wrong_indices_that_nobody_sees():
    """On a device the host cannot see them: such tokens become NaN, on their rank only."""
    visible, module._visible = module._visible, lambda _: False
    try:
        experts = Experts()
        x, idx = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
        idx[2] = N if R == N - 1 else -1
        rows, *_, handle, _, _ = experts.low_latency_dispatch(x, idx, 5, N)
        out = experts.low_latency_combine(rows, idx, torch.ones(4, 1, device=DEVICE), handle)[0]
        assert out[[0, 1, 3]].eq(1).all() and (out[2].isnan() if R == N - 1 else out[2].eq(0)).all()
    finally:
        module._visible = visible
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=f"1 of topk_idx are not from -1 to {N - 1}"):
            experts.low_latency_dispatch(x, torch.full((4, 1), -1).index_fill(0, torch.tensor([1]), N), 5, N)


def case_nobody_waits_for_a_mistaken_rank():
    """In calls without an exchange of the hosts: their group ends, other groups go on."""
    if DEVICE != "cpu":  # the others have queued the call: their group raises at its next call
        return
    x, idx = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    weights, wrong = torch.ones(4, 2, device=DEVICE), R == N - 1
    for method in ("combine", "dispatch", "low_latency_dispatch", "low_latency_combine"):
        experts = Experts(group := dist.new_group())
        kind = ValueError if wrong else dist.DistBackendError
        for attempt in (False, True):
            late = attempt and wrong
            _, _, per_expert, inside, _ = experts.get_dispatch_layout(idx, N)
            with pytest.raises(kind, match=f"{method} on rank {N - 1}: ") if attempt else nullcontext():
                if method in ("combine", "dispatch"):
                    got, *_, handle, _ = experts.dispatch(
                        x, topk_idx=idx, is_token_in_rank=inside, num_tokens_per_expert=per_expert
                    )
                    if method == "combine":
                        experts.combine(got[:, 0] if late else got, handle)
                    else:
                        experts.dispatch(x[:3] if late else x, handle)
                else:
                    most = 3 if late and method == "low_latency_dispatch" else 4
                    rows, _, handle, _, _ = experts.low_latency_dispatch(x, idx, most, N)
                    experts.low_latency_combine(rows[0] if late else rows, idx, weights, handle)
        dist.destroy_process_group(group)
