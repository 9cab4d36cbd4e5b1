"""Serve a small Llama with two processes: one computes prompts on one vendor, the other decodes on another.

    python examples/serve_two_vendors.py --cache float8              # both processes on this machine

    export SERVE_SECRET=$(openssl rand -hex 32)                      # the same on both machines
    python examples/serve_two_vendors.py --role prefill --address tcp://0.0.0.0:7000
    python examples/serve_two_vendors.py --role decode --address tcp://first-machine:7000

The processes connect by ``rma.Agent``. Each has a paged KV cache in the format of its vendor's engines: NHD and
float8_e4m3fn on NVIDIA, HND and float8_e4m3fnuz on AMD. When a layer has been computed, its pages go to the decoder's
cache and are converted to its format during the transfer. Prints the time to the first token with this conversion and,
from a cache of the decoder's format, without it, and whether the tokens are those of a single process. Weights are
random; without a GPU the vendors are only names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from llm_model import SIZES, Attention, Config, Decoder
from torch import nn

from ucc_hetero import rma

#: Tokens of a page.
PAGE = 16
#: --cache -> types of the elements on NVIDIA and on AMD.
TYPES = {"float32": ("float32",) * 2, "float16": ("float16",) * 2, "float8": ("float8_e4m3fn", "float8_e4m3fnuz")}
#: Scale of float8 elements on NVIDIA.
SCALE = 2.0**-5


class Form(NamedTuple):
    """Format of a vendor's cache."""

    turned: bool
    dtype: str
    scale: float


def forms(kind: str) -> tuple[Form, Form]:
    """The caches of NVIDIA's engines and of AMD's."""
    one, other = TYPES[kind]
    return Form(False, one, SCALE if kind == "float8" else 1.0), Form(
        True, other, 2 * SCALE if kind == "float8" else 1.0
    )


class Cache:
    """Keys and values of all layers, in pages."""

    def __init__(self, config: Config, form: Form, pages: int, device: torch.device) -> None:
        self.form, self.dtype = form, getattr(torch, form.dtype)
        self.short = self.dtype.itemsize == 1
        heads = config.kv_heads
        shape = [2, pages, heads, PAGE] if form.turned else [2, pages, PAGE, heads]
        stored = torch.uint8 if self.short else self.dtype
        raw = [
            torch.zeros(*shape, config.width // config.heads, dtype=stored, device=device) for _ in range(config.layers)
        ]
        #: As in engines: [2, pages, PAGE, heads, elements], with any strides.
        self.layers = [each.transpose(2, 3) if form.turned else each for each in raw]
        self.free = list(range(pages))

    def table(self, worker: rma.Worker) -> rma.PageTable:
        """Register the cache, so that peers can access it."""
        return rma.PageTable(worker, self.layers, "KBNHD", dtype=self.form.dtype)

    def take(self, tokens: int) -> list[int]:
        """Allocate pages for so many tokens, scattered as after many requests."""
        taken = sorted(self.free, key=lambda page: page * 37 % 101)[: -(-tokens // PAGE)]
        if len(taken) * PAGE < tokens:
            raise SystemExit(f"--pages: {tokens} tokens find no room in {len(self.free)} pages")
        self.free = [page for page in self.free if page not in taken]
        return taken

    def give(self, pages: list[int]) -> None:
        """Free pages."""
        self.free += pages

    def write(self, layer: int, pages: torch.Tensor, places: torch.Tensor, both: torch.Tensor) -> None:
        """Store [2, tokens, heads, elements] at these positions of a sequence."""
        both = (both / self.form.scale).to(self.dtype)
        self.layers[layer][:, pages[places // PAGE], places % PAGE] = both.view(torch.uint8) if self.short else both

    def read(self, layer: int, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return keys and values of a sequence's first tokens as float32."""
        found = self.layers[layer][:, pages].flatten(1, 2)[:, :tokens]
        return (found.contiguous().view(self.dtype) if self.short else found).float() * self.form.scale


class Engine:
    """The model and a cache; computes the tokens of one sequence."""

    def __init__(self, config: Config, cache: Cache, device: torch.device) -> None:
        self.config, self.cache, self.device = config, cache, device
        self.model = Decoder(config).to(device)
        self.model.initialise(config, 0, 1, device)

    def _rotated(self, x: torch.Tensor, places: torch.Tensor, attention: Attention) -> torch.Tensor:
        half = attention.head // 2
        pace = attention.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = (places[:, None] * pace)[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def _attended(self, number: int, x: torch.Tensor, places: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        attention = self.model.layers[number].attention
        q, k, v = (p(x).unflatten(-1, (-1, attention.head)) for p in (attention.q, attention.k, attention.v))
        both = torch.stack([self._rotated(k, places, attention), v])
        self.cache.write(number, pages, places, both)
        tokens = int(places[-1]) + 1
        keys, values = self.cache.read(number, pages, tokens).transpose(1, 2)
        seen = torch.arange(tokens, device=x.device) <= places[:, None]
        q = self._rotated(q, places, attention).transpose(0, 1)
        mixed = nn.functional.scaled_dot_product_attention(q[None], keys[None], values[None], seen, enable_gqa=True)[0]
        return attention.o(mixed.transpose(0, 1).flatten(1))

    @torch.no_grad()
    def run(
        self, tokens: list[int], first: int, pages: list[int], ready: Callable[[int], None] = lambda layer: None
    ) -> int:
        """Return the token that follows these, which begin at position ``first``; ``ready`` is called after each
        layer."""
        model, where = self.model, torch.tensor(pages, device=self.device)
        assert model.embedding is not None and model.head is not None and model.norm is not None
        places = torch.arange(first, first + len(tokens), device=self.device)
        x = model.embedding(torch.tensor(tokens, device=self.device))
        for number, layer in enumerate(model.layers):
            x = x + self._attended(number, layer.before(x), places, where)
            ready(number)
            x = x + layer.feed(layer.between(x))
        return int(model.head(model.norm(x[-1])).argmax())

    def decode(self, prompt: list[int], pages: list[int], tokens: int) -> tuple[list[int], float]:
        """Decode after a prompt whose cache (without its last token) is in these pages; return tokens and the first's
        time."""
        out = [self.run(prompt[-1:], len(prompt) - 1, pages)]
        came = time.perf_counter()
        while len(out) < tokens:
            out.append(self.run(out[-1:], len(prompt) + len(out) - 1, pages))
        return out, came


def device_here() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def answer(engine: Engine, target: rma.PageTarget, prompt: list[int], ticket: bytes) -> None:
    """Compute a prompt, and send each layer's pages as soon as it has been computed."""
    pages, sent = engine.cache.take(len(prompt)), []
    stream = torch.cuda.current_stream() if engine.device.type == "cuda" else None

    def ready(layer: int) -> None:
        sent.append(target.send_pages(pages, ticket, layers=[layer], stream=stream))

    engine.run(prompt, 0, pages, ready)
    for request in sent:
        request.Wait()
    engine.cache.give(pages)


def prefill(options: argparse.Namespace, config: Config, secret: bytes) -> None:
    """Compute prompts for decoding engines until they disconnect."""
    device = device_here()
    caches = [Cache(config, form, options.pages, device) for form in forms(options.cache)]
    engine = Engine(config, caches[0], device)
    agent = rma.Agent(options.address, secret, name="prefill")
    print(agent.address, flush=True)
    tables = [cache.table(agent.worker) for cache in caches]
    targets: list[rma.PageTarget] = []
    while True:
        peer, said = agent.receive()
        if "table" in said:
            targets = [table.open(peer.endpoint, bytes.fromhex(said["table"])) for table in tables]
            scales = [cache.form.scale * target.scale for cache, target in zip(caches, targets, strict=True)]
            ways = [str(target.plan) for target in targets]
            peer.send({"tables": [table.descriptor.hex() for table in tables], "scales": scales, "ways": ways})
        elif "prompt" in said:
            engine.cache = caches[said["way"]]
            answer(engine, targets[said["way"]], said["prompt"], bytes.fromhex(said["ticket"]))
        else:
            break
    agent.close()


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Random prompts of equal length."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(0, 256, (options.requests, options.prompt), generator=generator).tolist()


def alone(options: argparse.Namespace, config: Config) -> list[list[int]]:
    """Return the tokens of a single process with the cache format of the first vendor."""
    engine = Engine(config, Cache(config, forms(options.cache)[0], options.pages, device_here()), device_here())
    found = []
    for prompt in prompts(options):
        pages = engine.cache.take(len(prompt) + options.tokens)
        engine.run(prompt[:-1], 0, pages)
        found.append(engine.decode(prompt, pages, options.tokens)[0])
        engine.cache.give(pages)
    return found


def decode(options: argparse.Namespace, config: Config, secret: bytes) -> int:
    """Request prompts' pages, decode, and compare: 0 if the tokens are those of a single process."""
    device = device_here()
    cache = Cache(config, forms(options.cache)[1], options.pages, device)
    engine = Engine(config, cache, device)
    agent = rma.Agent("tcp://0.0.0.0:0", secret, name="decode")
    table = cache.table(agent.worker)
    peer = agent.connect(options.address)
    peer.send({"table": table.descriptor.hex()})
    _, said = agent.receive(60)
    if any(scale != cache.form.scale for scale in said["scales"]):
        raise SystemExit(f"scales: {said['scales']} come, and {cache.form.scale} is here")
    sources = [table.open(peer.endpoint, bytes.fromhex(each)) for each in said["tables"]]
    first: list[list[float]] = [[] for _ in sources]
    results: list[list[list[int]]] = [[] for _ in sources]
    for prompt in prompts(options):
        for way, source in enumerate(sources):
            began = time.perf_counter()
            pages = cache.take(len(prompt) + options.tokens)
            receipt = table.recv_pages(pages[: -(-(len(prompt) - 1) // PAGE)], source)
            peer.send({"prompt": prompt[:-1], "way": way, "ticket": receipt.ticket.hex()})
            receipt.Wait()
            tokens, later = engine.decode(prompt, pages, options.tokens)
            first[way].append(later - began)
            results[way].append(tokens)
            cache.give(pages)
    peer.send({"end": True})
    for way, times in zip(said["ways"], first, strict=True):
        print(f"{way}: first token after {median(times) * 1e3:.2f} ms")
    wanted = alone(options, config)
    same = all(found == wanted for found in results)
    print("the same tokens as in one process:", "yes" if same else "NO")
    agent.close()
    return 0 if same else 1


def both(options: argparse.Namespace, words: list[str]) -> int:
    """Start the two processes, which share only an address and a secret."""
    env = os.environ | {"SERVE_SECRET": os.urandom(32).hex()}
    command = [sys.executable, __file__, *words]
    with subprocess.Popen([*command, "--role", "prefill"], env=env, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            address = one.stdout.readline().strip()
            if not address:
                return 1
            status = subprocess.run([*command, "--role", "decode", "--address", address], env=env).returncode
            return status or one.wait(30)
        finally:
            one.kill()


def main() -> int:
    """Run one of the processes, or start both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--address", default="tcp://127.0.0.1:0", help="of the process that computes prompts")
    parser.add_argument("--cache", choices=TYPES, default="float16", help="elements of the caches")
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are decoded")
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--pages", type=int, default=256, help="pages of a cache")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.prompt < 2 or min(options.tokens, options.requests, options.pages) < 1:
        parser.error("a prompt has 2 tokens or more, and of all else there is 1 at least")
    if options.role == "both":
        return both(options, sys.argv[1:])
    secret = bytes.fromhex(os.environ.get("SERVE_SECRET", ""))
    config = Config(*SIZES[options.size])
    if options.role == "decode":
        return decode(options, config, secret)
    prefill(options, config, secret)
    return 0


if __name__ == "__main__":
    sys.exit(main())
