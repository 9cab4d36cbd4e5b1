"""The decoder that train_llm.py trains: Llama's and Qwen2's architecture, from 100k to 1B parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional


@dataclass(frozen=True)
class Config:
    """One architecture. ``bias``: Qwen2 adds one to queries, keys and values; Llama has none."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    bias: bool = False
    vocabulary: int = 256  # bytes
    theta: float = 10000.0


#: --size -> (width, layers, heads, key and value heads, hidden units).
SIZES = {
    "100k": (48, 4, 4, 4, 128),
    "1m": (128, 4, 4, 2, 344),
    "10m": (320, 8, 8, 4, 864),
    "125m": (768, 16, 12, 4, 2048),
    "350m": (1024, 26, 16, 8, 2816),
    "1b": (2048, 20, 16, 8, 5632),
}


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


class Sequences:
    """Attention over sequences that are split over the ranks of a group, in rank order.

    Before attention the ranks exchange their parts of all heads for whole sequences of some heads, and exchange back
    after it: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509). Gradients are exchanged the same way.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._ranks = group, group.size()

    def _swap(self, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        """Split dimension ``split``, send one part to each rank, and concatenate the received parts along ``join``."""
        parts = torch.stack(x.chunk(self._ranks, split))
        came = functional.all_to_all_single_autograd(parts.reshape(-1), None, None, self._group).view(parts.shape)
        return torch.cat(came.unbind(), join)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, part of length, head] to [batch, part of heads, length, head]."""
        return self._swap(x, 1, 2)

    def parted(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, part of heads, length, head] to [batch, heads, part of length, head]."""
        return self._swap(x, 2, 1)


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key and value heads than query heads."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        #: Set if other ranks have the rest of each sequence.
        self.shared: Sequences | None = None
        self.head = c.width // c.heads
        self.q = nn.Linear(c.width, c.heads * self.head, bias=c.bias)
        self.k = nn.Linear(c.width, c.kv_heads * self.head, bias=c.bias)
        self.v = nn.Linear(c.width, c.kv_heads * self.head, bias=c.bias)
        self.o = nn.Linear(c.heads * self.head, c.width, bias=False)
        self.theta = c.theta

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head // 2
        angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * self.theta ** (
            -torch.arange(half, device=x.device, dtype=torch.float32) / half
        )
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The number of heads is read from the projections: with tensor parallelism each rank has only some of them.
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.shared is not None:
            q, k, v = map(self.shared.whole, (q, k, v))
        q, k = self._rotated(q), self._rotated(k)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.shared is not None:
            mixed = self.shared.parted(mixed)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The feed-forward part, SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed = Attention(c), Gated(c)
        self.before, self.between = Norm(c.width), Norm(c.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


class Decoder(nn.Module):
    """The layers ``first`` to ``last`` of a model; the first stage has the embedding, the last one the head.

    Input: token numbers [batch, length], or the previous stage's output [batch, length, width]. Output: logits [batch,
    length, vocabulary], or the next stage's input.
    """

    def __init__(self, c: Config, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = c.layers if last is None else last
        self.embedding = nn.Embedding(c.vocabulary, c.width) if first == 0 else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(first, last))
        self.norm = Norm(c.width) if last == c.layers else None
        self.head = nn.Linear(c.width, c.vocabulary, bias=False) if last == c.layers else None

    def initialise(self, c: Config, first: int, seed: int, device: torch.device) -> None:
        """Initialise random weights that do not depend on how the model is cut into stages. Weights made on the host
        are equal on all vendors; weights made on a device take less time."""
        parts = [(0, self.embedding), *((1 + first + i, layer) for i, layer in enumerate(self.layers))]
        for number, part in [*parts, (1 + c.layers, self.head)]:
            generator = torch.Generator(device).manual_seed(seed * 100003 + number)
            for parameter in part.parameters() if part is not None else ():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=device)
                    parameter.data.copy_(noise * 0.02)
                elif parameter.data.std() > 0:
                    parameter.data.zero_()  # a bias

    def share_sequences(self, shared: Sequences) -> None:
        """From now on take and return only this rank's part of each sequence."""
        for layer in self.layers:
            layer.attention.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x
