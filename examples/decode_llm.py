"""Greedy decoding of a small Llama with tensor parallelism, one token at a time: with single calls, and with a CUDA
graph.

    mpirun -np 2 python examples/decode_llm.py --size 1b --tokens 200
    mpirun -np 2 -x UCCH_EMULATE=nvidia:1,amd:1 python examples/decode_llm.py    # host memory: no graphs

Every rank has a part of each layer's heads and hidden units, and two all_reduces per layer sum the parts. A step makes
hundreds of short launches. Captured once in a CUDA graph, together with its all_reduces, it is a single launch. Prints
tokens/s of both ways, and whether all ranks got the same tokens in both. ``--check`` also compares the tokens with
those of the whole model on one rank. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from llm_model import SIZES, Attention, Config, Decoder, Gated
from torch import nn

import ucc_hetero.torch  # noqa: F401  registers the backend

#: Steps before the capture, which initialise streams, kernels and matrix libraries.
WARM = 3


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100k")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--check", action="store_true", help="compare with the whole model")
    parser.add_argument("--batch", type=int, default=4, help="sequences that are decoded together")
    return parser.parse_args()


def cut(layer: nn.Linear, dim: int) -> None:
    """Keep this rank's part of a layer's outputs (``dim`` 0) or inputs (1)."""
    layer.weight = nn.Parameter(layer.weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous())


def joined(part: torch.Tensor) -> torch.Tensor:
    """Sum the parts of all ranks."""
    dist.all_reduce(part)
    return part


class Step:
    """Decode one more token of every sequence: reads ``token``, overwrites it with the next one, increments
    ``position``.

    All data is in tensors with fixed addresses, as graphs require.
    """

    def __init__(self, config: Config, batch: int, room: int, device: torch.device) -> None:
        self.model = Decoder(config).to(device)
        self.model.initialise(config, 0, 1, device)
        for layer in self.model.layers:
            for each in (layer.attention.q, layer.attention.k, layer.attention.v, layer.feed.gate, layer.feed.up):
                cut(each, 0)
            cut(layer.attention.o, 1)
            cut(layer.feed.down, 1)
        heads, head = config.kv_heads // dist.get_world_size(), config.width // config.heads
        self.cache = torch.zeros(config.layers, 2, batch, heads, room, head, device=device)
        self.places = torch.arange(room, device=device)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        half = head // 2
        self.pace = config.theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)

    def begin(self) -> None:
        """Go back to the first token."""
        self.cache.zero_()
        self.position.zero_()
        self.token.copy_(torch.arange(self.token.numel()).reshape(-1, 1))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        angle = self.position * self.pace
        one, two = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def _attended(self, attention: Attention, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, attention.head)).transpose(1, 2) for p in (attention.q, attention.k, attention.v)
        )
        cache[0].index_copy_(2, self.position, self._rotated(k))
        cache[1].index_copy_(2, self.position, v)
        seen = (self.places <= self.position)[None, None, None]
        mixed = nn.functional.scaled_dot_product_attention(
            self._rotated(q), cache[0], cache[1], attn_mask=seen, enable_gqa=True
        )
        return joined(attention.o(mixed.transpose(1, 2).flatten(2)))

    @staticmethod
    def _fed(feed: Gated, x: torch.Tensor) -> torch.Tensor:
        return joined(feed.down(nn.functional.silu(feed.gate(x)) * feed.up(x)))

    @torch.no_grad()
    def __call__(self) -> None:
        """Decode one token."""
        model = self.model
        assert model.embedding is not None and model.head is not None and model.norm is not None
        x = model.embedding(self.token)
        for layer, cache in zip(model.layers, self.cache, strict=True):
            x = x + self._attended(layer.attention, layer.before(x), cache)
            x = x + self._fed(layer.feed, layer.between(x))
        self.token.copy_(model.head(model.norm(x)).argmax(-1))
        self.position.add_(1)


def decode(step: Step, once: Callable[[], None], tokens: int) -> tuple[list[list[int]], float]:
    """Decode this many tokens; return them, and tokens per second."""
    step.begin()
    out = torch.zeros(tokens, step.token.numel(), dtype=torch.long, device=step.token.device)
    dist.barrier()
    start = time.perf_counter()
    for k in range(tokens):
        once()
        out[k] = step.token[:, 0]
    found: list[list[int]] = out.tolist()
    return found, tokens * step.token.numel() / (time.perf_counter() - start)


@torch.no_grad()
def fits(config: Config, tokens: list[list[int]], device: torch.device) -> bool:
    """True if the whole model would have chosen these tokens, or equally likely ones."""
    model = Decoder(config).to(device)
    model.initialise(config, 0, 1, device)
    chosen = torch.tensor(tokens, device=device).T
    first = torch.arange(len(chosen), device=device)[:, None]
    logits = model(torch.cat([first, chosen[:, :-1]], 1))
    return bool((logits.gather(2, chosen[:, :, None])[:, :, 0] > logits.amax(2) - 1e-3).all())


def main() -> None:
    """Decode with single calls, and with a graph if there is a GPU."""
    options = arguments()
    dist.init_process_group("ucch")
    gpu, config = torch.cuda.is_available(), Config(*SIZES[options.size])
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if config.kv_heads % dist.get_world_size():
        raise SystemExit(f"--size {options.size} has {config.kv_heads} heads of keys, which the ranks do not divide")
    step = Step(config, options.batch, options.tokens, device)
    ways: dict[str, Callable[[], None]] = {"called": step}
    if gpu:
        torch.cuda.set_stream(torch.cuda.Stream())
    decode(step, step, min(WARM, options.tokens))
    if gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
        ways["a graph"] = graph.replay
    results = {name: decode(step, once, options.tokens) for name, once in ways.items()}
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [tokens for tokens, _ in results.values()])
    whole = not options.check or fits(config, results["called"][0], device)
    same = all(tokens == results["called"][0] for each in everyone for tokens in each)  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        for name, (_, rate) in results.items():
            print(f"{name}: {rate:.0f} tokens/s")
        print("the same tokens in all ways and on all ranks:", "yes" if same else "NO")
        if options.check:
            print("as the whole model has it:", "yes" if whole else "NO")
    dist.destroy_process_group()
    if not (same and whole):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
